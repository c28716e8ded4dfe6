"""Which host a request goes to, where there are several."""

import random
from array import array
from typing import Protocol

from serving.simulator.errors import SimulationError
from serving.simulator.requests import RequestTable

ROUTERS = ("two_choices", "round_robin")


class Router(Protocol):
    """Spreads requests over hosts."""

    def choose(self, index: int, requests: RequestTable) -> int:
        """The host for a request that has come."""
        ...

    def ended(self, index: int, requests: RequestTable) -> None:
        """A request has ended, in whatever way."""
        ...


class OneHost:
    """All requests go to the only host."""

    def choose(self, index: int, requests: RequestTable) -> int:
        return 0

    def ended(self, index: int, requests: RequestTable) -> None:
        return None


class RoundRobinRouter:
    """Hosts take turns."""

    def __init__(self, num_hosts: int):
        self._num_hosts = num_hosts

    def choose(self, index: int, requests: RequestTable) -> int:
        return index % self._num_hosts

    def ended(self, index: int, requests: RequestTable) -> None:
        return None


class TwoChoicesRouter:
    """Choose, of two hosts drawn at random, the one with fewer tokens of requests that have not ended."""

    def __init__(self, num_hosts: int, seed: int, num_requests: int):
        self._random = random.Random(seed)
        self._tokens = [0] * num_hosts
        self._host = array("l", [0]) * num_requests

    def choose(self, index: int, requests: RequestTable) -> int:
        """See `Router.choose`."""
        tokens, count = self._tokens, len(self._tokens)
        one, two = int(self._random.random() * count), int(self._random.random() * count)
        host = one if tokens[one] <= tokens[two] else two
        tokens[host] += int(requests.input_len[index]) + int(requests.max_tokens[index])
        self._host[index] = host
        return host

    def ended(self, index: int, requests: RequestTable) -> None:
        """See `Router.ended`."""
        self._tokens[self._host[index]] -= int(requests.input_len[index]) + int(requests.max_tokens[index])


def make_router(name: str, num_hosts: int, seed: int, num_requests: int) -> Router:
    """A router by its name. Raises `SimulationError` for one that is not known."""
    if name not in ROUTERS:
        raise SimulationError(f"router {name[:100]!r} is not known: it must be one of {', '.join(ROUTERS)}")
    if num_hosts == 1:
        return OneHost()
    return TwoChoicesRouter(num_hosts, seed, num_requests) if name == "two_choices" else RoundRobinRouter(num_hosts)
