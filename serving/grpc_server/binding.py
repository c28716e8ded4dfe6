"""Error for a port that cannot be bound."""

import contextlib
import errno
import socket

from amoeba_jax.address import join_address
from amoeba_jax.errors import ConfigError


def binding_error(host: str, port: int, flag: str) -> ConfigError:
    """Return an error that says why gRPC could not bind an address, and which command-line option to change.

    gRPC does not report the reason. This function therefore tries to bind the port itself. `flag` is the option that
    sets the port, such as `--port`.
    """
    return ConfigError(f"{join_address(host, port)} cannot be bound: {_reason(host, port, flag)}")


def _reason(host: str, port: int, flag: str) -> str:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"the host name cannot be resolved ({error.strerror}). Choose another --host"
    for family, kind, protocol, _, address in addresses:
        try:
            with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"another program uses this port. Choose another {flag}, or stop that program"
            if error.errno == errno.EADDRNOTAVAIL:
                return "this machine does not have this address. Choose another --host"
            if error.errno in (errno.EACCES, errno.EPERM):
                return f"this user may not bind this port. Choose a {flag} of at least 1024"
            return f"{error.strerror}. Choose another --host or {flag}"
    return f"choose another {flag}"
