"""Addresses as users write them: each is read as it is meant, or refused with its value and the reason."""

import pytest

from amoeba_jax.address import grpc_target, is_local, join_address, read_address, read_host, read_url
from amoeba_jax.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::", "::"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("localhost", "localhost"),
        ("gpu-node_1.example.", "gpu-node_1.example."),
    ],
)
def test_hosts_lose_their_brackets(text: str, host: str):
    assert read_host(text, "host") == host


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must not be empty"),
        ("127.0.0.1:50051", "port as a setting of its own"),
        ("[::1]:50051", "port as a setting of its own"),
        ("[localhost]", "not an IPv6 address"),
        ("::g", "not an IPv6 address"),
        ("http://localhost", "not an IPv6 address"),
        ("256.0.0.1", "not an IPv4 address"),
        ("127.1", "not an IPv4 address"),
        ("two words", "host name or an IP address"),
        ("-x", "host name or an IP address"),
    ],
)
def test_other_hosts_are_refused_with_the_reason(text: str, reason: str):
    with pytest.raises(ConfigError, match=reason) as caught:
        read_host(text, "host")
    assert str(caught.value).startswith("host")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%eth0", "node.example"])
def test_addresses_are_read_as_they_are_written(host: str):
    assert read_address(join_address(host, 50051), "target") == (host, 50051)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("::1", "needs brackets"),
        ("::1:50051", "needs brackets"),
        ("node", "with a port from 1 to 65535"),
        ("node:", "with a port from 1 to 65535"),
        ("node:0", "with a port from 1 to 65535"),
        ("node:65536", "with a port from 1 to 65535"),
        ("node:http", "with a port from 1 to 65535"),
        (":50051", "must not be empty"),
    ],
)
def test_other_addresses_are_refused_with_the_reason(text: str, reason: str):
    with pytest.raises(ConfigError, match=reason):
        read_address(text, "target")


@pytest.mark.parametrize(
    ("text", "target", "host"),
    [
        ("node:1", "node:1", "node"),
        ("node", "node:50051", "node"),
        ("[::1]", "[::1]:50051", "::1"),
        ("[::1]:1", "[::1]:1", "::1"),
        ("dns:///[::1]:1", "dns:///[::1]:1", "::1"),
        ("dns://resolver/node:1", "dns://resolver/node:1", "node"),
        ("ipv4:127.0.0.1:1", "ipv4:127.0.0.1:1", "127.0.0.1"),
        ("unix:/run/amoeba", "unix:/run/amoeba", ""),
    ],
)
def test_targets_have_a_default_port_and_may_be_in_grpcs_syntax(text: str, target: str, host: str):
    assert grpc_target(text, 50051) == (target, host)


def test_a_target_with_a_scheme_of_http_is_refused():
    with pytest.raises(ConfigError, match="without http://"):
        grpc_target("http://node:1", 50051)


def test_urls_take_every_kind_of_host():
    assert read_url("http://[::1]:4317", "endpoint") == ("http", "::1", 4317)
    assert read_url("https://node.example:4317/", "endpoint") == ("https", "node.example", 4317)


@pytest.mark.parametrize("text", ["node:4317", "ftp://node:4317", "http://node", "http://::1:4317", "http://node:1/x"])
def test_other_urls_are_refused(text: str):
    with pytest.raises(ConfigError, match="must be http://HOST:PORT"):
        read_url(text, "endpoint")


def test_hosts_of_this_machine_are_known():
    for host in ("localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "::"):
        assert is_local(host)
    for host in ("node", "localhost.example", "10.0.0.1", "fe80::1", ""):
        assert not is_local(host)
