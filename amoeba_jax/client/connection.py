"""Connection settings of clients: address, proxy, credentials, deadlines and retries."""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from amoeba_jax.address import grpc_target, is_local
from amoeba_jax.errors import ConfigError

DEFAULT_PORT = 50051
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"

# Environment variables in which gRPC looks for a proxy, in its order.
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY_VARIABLES = ("no_grpc_proxy", "no_proxy")
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    # Pings detect a server that has vanished, also during long prefills.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class Route:
    """Route to a server: the server's address in gRPC's syntax, and the proxy between client and server.

    Attributes:
        target: address of the server for a gRPC channel.
        options: options for the gRPC channel.
        proxy_variable: name of the environment variable that sets the proxy. None: no proxy.
    """

    def __init__(self, target: str):
        """Parse `HOST[:PORT]`, `[IPV6][:PORT]` or gRPC's own syntax. Raises `ConfigError` for any other text."""
        self.target, host = grpc_target(target, DEFAULT_PORT)
        self.options: tuple[tuple[str, int], ...] = _CHANNEL_OPTIONS
        self.proxy_variable: str | None = None
        if is_local(host):
            # gRPC would send these connections to a proxy too, unless no_proxy names them.
            self.options += (("grpc.enable_http_proxy", 0),)
        elif host:
            self.proxy_variable = _proxy_variable(host)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add a note to UNAVAILABLE errors inside this context, if there is a proxy.

        The note names the environment variable that sets the proxy.
        """
        try:
            yield
        except grpc.RpcError as error:
            if self.proxy_variable is not None and is_unavailable(error):
                error.add_note(
                    f"gRPC connects to {self.target} through the proxy in the environment variable "
                    f"{self.proxy_variable}. To connect directly, add the host to no_proxy."
                )
            raise


def _proxy_variable(host: str) -> str | None:
    excluded = next((value for name in _NO_PROXY_VARIABLES if (value := os.environ.get(name))), "")
    if any(host.endswith(part) for entry in excluded.split(",") if (part := entry.strip())):
        return None
    return next((name for name in _PROXY_VARIABLES if os.environ.get(name)), None)


@dataclass(frozen=True)
class Retries:
    """Number of attempts for a call that fails with the status UNAVAILABLE, and the delays between attempts.

    A call is not repeated after its first response or after its deadline.
    """

    attempts: int = 5
    """Number of attempts, including the first."""
    first_delay_s: float = 0.1
    """Delay before the second attempt. Each further delay is twice as long. Jitter shortens a delay by up to a half."""
    longest_delay_s: float = 5.0
    """Longest delay between two attempts."""

    def delays_s(self) -> Iterator[float]:
        """Yield the seconds to wait after each failed attempt."""
        for attempt in range(self.attempts - 1):
            delay_s = min(self.first_delay_s * 2**attempt, self.longest_delay_s)
            yield delay_s * random.uniform(0.5, 1)


class Deadline:
    """Time limit for all attempts of a call together. There is no limit if `timeout_s` is None."""

    def __init__(self, timeout_s: float | None):
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        """Remaining seconds, at least 0. None: no limit."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    def allows(self, delay_s: float) -> bool:
        """Return whether a wait of `delay_s` seconds would end before the deadline."""
        left_s = self.left_s
        return left_s is None or delay_s < left_s


def is_unavailable(error: grpc.RpcError) -> bool:
    """Return whether a call failed with the status UNAVAILABLE. Another attempt may then succeed."""
    return isinstance(error, grpc.Call | grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAVAILABLE


@dataclass(frozen=True)
class Credentials:
    """Access token and certificates of a client.

    Attributes:
        token: access token that is sent with each call.
        ca: PEM file with the certificates to trust. "": the certificates of the system. None: no TLS.
        certificate: PEM file with the client's own certificate, if the server needs one.
        key: PEM file with the private key of `certificate`.
    """

    token: str | None = None
    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError("a token must have printable ASCII characters only")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata to send with each call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials of a channel, or None without TLS.

        Raises:
            OSError: a file cannot be read.
            ConfigError: `certificate` or `key` is given without the other, or both are given without `ca`.
        """
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("a client certificate needs its key: give both")
        if self.ca is None:
            if self.certificate is not None:
                raise ConfigError("a client certificate needs TLS: also give the certificates to trust")
            return None
        ca, key, certificate = (
            Path(path).read_bytes() if path else None for path in (self.ca, self.key, self.certificate)
        )
        return grpc.ssl_channel_credentials(ca, key, certificate)
