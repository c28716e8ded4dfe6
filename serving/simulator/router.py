"""Routers, which choose a simulated host for each request. A host is a scheduler with its devices."""

import random
from array import array
from collections.abc import Sequence
from typing import Protocol

from serving.simulator.errors import SimulationError
from serving.simulator.requests import RequestTable

ROUTERS = ("two_choices", "round_robin")


class Router(Protocol):
    """Rule that chooses the simulated host of each request."""

    def choose(self, index: int, requests: RequestTable) -> int:
        """Return the index of the host for the request in row `index`, which has just arrived."""
        ...

    def ended(self, index: int, requests: RequestTable) -> None:
        """Record that the request in row `index` has ended."""
        ...


class OneHost:
    """Router for a single host."""

    def choose(self, index: int, requests: RequestTable) -> int:
        return 0

    def ended(self, index: int, requests: RequestTable) -> None:
        return None


class RoundRobinRouter:
    """Router that assigns requests to all hosts in turn."""

    def __init__(self, num_hosts: int):
        self._num_hosts = num_hosts

    def choose(self, index: int, requests: RequestTable) -> int:
        return index % self._num_hosts

    def ended(self, index: int, requests: RequestTable) -> None:
        return None


class TwoChoicesRouter:
    """Router that draws two hosts at random, and chooses the host with less load.

    The load of a host is the number of prompt tokens and maximum output tokens of its unfinished requests, divided by
    the speed of the host.
    """

    def __init__(self, speeds: Sequence[float], seed: int, num_requests: int):
        self._random, self._speeds = random.Random(seed), speeds
        self._tokens = [0] * len(speeds)
        self._host = array("l", [0]) * num_requests

    def choose(self, index: int, requests: RequestTable) -> int:
        """Return the index of the host for the request in row `index`, which has just arrived."""
        tokens, count = self._tokens, len(self._tokens)
        one, two = int(self._random.random() * count), int(self._random.random() * count)
        host = one if tokens[one] * self._speeds[two] <= tokens[two] * self._speeds[one] else two
        tokens[host] += int(requests.input_len[index]) + int(requests.max_tokens[index])
        self._host[index] = host
        return host

    def ended(self, index: int, requests: RequestTable) -> None:
        """Record that the request in row `index` has ended."""
        self._tokens[self._host[index]] -= int(requests.input_len[index]) + int(requests.max_tokens[index])


def make_router(name: str, speeds: Sequence[float], seed: int, num_requests: int) -> Router:
    """Return a router by its name. For a single host, return `OneHost`. Raises `SimulationError` for an unknown name.

    `speeds` has the relative speed of each host.
    """
    if name not in ROUTERS:
        raise SimulationError(f"router {name[:100]!r} is unknown: it must be one of {', '.join(ROUTERS)}")
    if len(speeds) == 1:
        return OneHost()
    return TwoChoicesRouter(speeds, seed, num_requests) if name == "two_choices" else RoundRobinRouter(len(speeds))
