"""Parsing of hosts, ports and addresses that users give, for gRPC and HTTP."""

import ipaddress
import re
from urllib.parse import urlsplit

from amoeba_jax.errors import ConfigError

# Targets of these schemes are gRPC's own syntax, and are passed on unchanged.
_GRPC_SCHEMES = ("dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_host(text: str, name: str) -> str:
    """Check a host name or IP address, and return it. Brackets around an IPv6 address are removed.

    Raises `ConfigError` if the text is not a host name or IP address. The message contains `name`, the name of the
    setting.
    """
    bracketed = text.startswith("[") and text.endswith("]")
    host = text[1:-1] if bracketed else text
    if ":" in host or bracketed:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            has_port = re.fullmatch(r"[^/:]+:\d+|.*\]:\d+", host)
            reason = "give the port as a setting of its own" if has_port else "it is not an IPv6 address"
            raise ConfigError(f"{name}={text!r} must be a host name or an IP address: {reason}") from None
        return host
    if not host:
        raise ConfigError(f"{name} must not be empty")
    if re.fullmatch(r"[\d.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError as error:
            raise ConfigError(f"{name}={text!r} is not an IPv4 address: {error}") from None
    elif not _NAME.fullmatch(host) or len(host) > 253:
        raise ConfigError(f"{name}={text!r} must be a host name or an IP address")
    return host


def read_address(text: str, name: str, default_port: int | None = None) -> tuple[str, int]:
    """Return host and port of `HOST:PORT` or `[IPV6]:PORT`.

    Args:
        text: the address.
        name: name of the setting, for errors.
        default_port: port to return if the text has no port. None: the port is required.

    Raises:
        ConfigError: the text is not an address, or its port is not from 1 to 65535.
    """
    wanted = "HOST:PORT, or [ADDRESS]:PORT for IPv6"
    host, colon, port = text.rpartition(":")
    if text.endswith("]") or not colon:
        host, port = text, ""
    elif ":" in host and not host.startswith("["):
        raise ConfigError(f"{name}={text!r} must be {wanted}: an IPv6 address needs brackets")
    host = read_host(host, name)
    if not port and default_port is not None and not text.endswith(":"):
        return host, default_port
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{name}={text!r} must be {wanted}, with a port from 1 to 65535")
    return host, int(port)


def read_url(text: str, name: str) -> tuple[str, str, int]:
    """Return scheme, host and port of `http://HOST:PORT` or `https://HOST:PORT`.

    Raises `ConfigError` for any other text. The message contains `name`, the name of the setting.
    """
    wanted = f"{name}={text!r} must be http://HOST:PORT or https://HOST:PORT"
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("http", "https"):
        raise ConfigError(wanted)
    try:
        host, port = read_address(rest.removesuffix("/"), name)
    except ConfigError as error:
        raise ConfigError(f"{wanted}: {error}") from None
    return scheme, host, port


def grpc_target(text: str, default_port: int) -> tuple[str, str]:
    """Convert the address of a server to a gRPC target. Return `(target, host)`.

    The host is "" if the target has no host. An address without a port gets `default_port`. Targets in gRPC's own
    syntax, such as `dns:///host:50051` and `unix:/path`, are returned unchanged.

    Raises:
        ConfigError: the text is neither an address nor a target in gRPC's own syntax.
    """
    scheme, colon, rest = text.partition(":")
    if colon and scheme in _GRPC_SCHEMES:
        if scheme not in ("dns", "ipv4", "ipv6"):
            return text, ""
        return text, urlsplit(f"//{rest.rpartition('/')[2]}").hostname or ""
    if "://" in text:
        raise ConfigError(f"target={text!r} must be HOST:PORT without {scheme}://")
    host, port = read_address(text, "target", default_port)
    return join_address(host, port), host


def is_local(host: str) -> bool:
    """Return whether a host always means the local machine: `localhost`, a loopback address, `0.0.0.0` or `::`."""
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified
