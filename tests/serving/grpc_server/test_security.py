"""Tokens, TLS, and mutual TLS with certificates that are replaced while the server runs."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from live_server import GREEDY, TIMEOUT_S, Live
from typer.testing import CliRunner

from amoeba_jax.client import Client, Retries
from amoeba_jax.errors import ConfigError
from serving.cli import app
from serving.grpc_server.config import TLS

pytestmark = pytest.mark.usefixtures("quick_compile")

ONCE = Retries(attempts=1)
Status = grpc.StatusCode


def code_of(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code()


def connect(live: Live, token: str | None) -> Client:
    return Client(live.target, token=token)


def test_each_token_allows_its_own(start: Callable[..., Live]):
    live = start(api_token="sesame", admin_token="root")
    for token, inference, admin in (
        (None, Status.UNAUTHENTICATED, Status.UNAUTHENTICATED),
        ("wrong", Status.UNAUTHENTICATED, Status.UNAUTHENTICATED),
        ("sesame", None, Status.PERMISSION_DENIED),
        ("root", None, None),
    ):
        with connect(live, token) as client:
            if inference is None:
                assert client.model_info(timeout_s=TIMEOUT_S).model == "tiny-chat"
                assert client.generate("hello", GREEDY, timeout_s=TIMEOUT_S)
            else:
                assert code_of(client.model_info) is inference
                assert code_of(lambda client=client: client.generate("hello", GREEDY)) is inference
            if admin is None:
                assert client.cluster(timeout_s=TIMEOUT_S).state == "ready"
            else:
                assert code_of(client.cluster) is admin
    # Load balancers have no token.
    health = health_pb2_grpc.HealthStub(live.channel)
    assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING


def test_without_an_admin_token_nobody_with_the_other_is_an_admin(start: Callable[..., Live]):
    live = start(api_token="sesame")
    with connect(live, "sesame") as client:
        assert code_of(client.cluster) is Status.PERMISSION_DENIED
    with connect(live, None) as client:
        assert code_of(client.cluster) is Status.UNAUTHENTICATED


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def authority(directory: Path, name: str) -> Path:
    """Create a certificate authority, and return its certificate."""
    key, certificate = directory / f"{name}.key", directory / f"{name}.pem"
    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"),
        *("-keyout", key, "-out", certificate),
    )
    return certificate


def signed(directory: Path, name: str, by: Path) -> tuple[Path, Path]:
    """Create a signed certificate for 127.0.0.1, and return it with its key."""
    key, request, certificate = (directory / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
    extension = directory / "san"
    extension.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    subject = ("-subj", f"/CN={name}")
    openssl("req", "-newkey", "rsa:2048", "-nodes", *subject, "-keyout", key, "-out", request)
    signing = ("-CA", by, "-CAkey", by.with_suffix(".key"), "-CAcreateserial", "-extfile", extension)
    openssl("x509", "-req", "-days", "2", "-in", request, "-out", certificate, *signing)
    return certificate, key


needs_openssl = pytest.mark.skipif(which("openssl") is None, reason="needs openssl to make certificates")


@needs_openssl
def test_clients_trust_the_certificate_or_do_not_connect(start: Callable[..., Live], tmp_path: Path):
    ca, other = authority(tmp_path, "ca"), authority(tmp_path, "other")
    live = start(tls=TLS(*signed(tmp_path, "server", ca)))
    with Client(live.target, ca=ca) as client:
        assert client.generate("hello", GREEDY, timeout_s=TIMEOUT_S)
    for refused in (Client(live.target, ca=other, retries=ONCE), Client(live.target, retries=ONCE)):
        with refused:
            assert code_of(refused.model_info) is Status.UNAVAILABLE


@needs_openssl
def test_mutual_tls_wants_a_certificate_of_the_client(start: Callable[..., Live], tmp_path: Path):
    ca = authority(tmp_path, "ca")
    certificate, key = signed(tmp_path, "client", ca)
    live = start(tls=TLS(*signed(tmp_path, "server", ca), client_ca=ca))
    with Client(live.target, ca=ca, certificate=certificate, key=key) as client:
        assert client.model_info(timeout_s=TIMEOUT_S).model == "tiny-chat"
    with Client(live.target, ca=ca, retries=ONCE) as client:
        assert code_of(client.model_info) is Status.UNAVAILABLE


@needs_openssl
def test_commands_have_a_certificate_of_their_own(start: Callable[..., Live], tmp_path: Path):
    ca = authority(tmp_path, "ca")
    certificate, key = signed(tmp_path, "client", ca)
    live = start(tls=TLS(*signed(tmp_path, "server", ca), client_ca=ca))
    trust, own = ["--target", live.target, "--tls-ca", str(ca)], ["--tls-certificate", str(certificate)]
    few = ["--num-prompts", "1", "--random-input-len", "8", "--random-output-len", "2"]
    for command in (["chat", "--max-tokens", "2"], ["transform", "1"], ["placement"], ["bench", *few]):
        result = CliRunner().invoke(app, [*command, *trust, *own, "--tls-key", str(key)], input="hello\n")
        assert result.exit_code == 0, result.output
        result = CliRunner().invoke(app, [*command, *trust, *own])
        assert (result.exit_code, result.stdout) == (2, "")
        assert "a client certificate needs its key" in result.stderr
    with pytest.raises(ConfigError, match="needs TLS"):
        Client(live.target, certificate=certificate, key=key)


@needs_openssl
def test_replaced_certificates_serve_new_connections(start: Callable[..., Live], tmp_path: Path):
    old, new = authority(tmp_path, "old"), authority(tmp_path, "new")
    certificate, key = signed(tmp_path, "server", old)
    live = start(tls=TLS(certificate, key))
    with Client(live.target, ca=old) as client:
        assert client.model_info(timeout_s=TIMEOUT_S)
        for path, fresh in zip((certificate, key), signed(tmp_path, "server-2", new), strict=True):
            fresh.replace(path)
        with Client(live.target, ca=new) as later:
            assert later.model_info(timeout_s=TIMEOUT_S)
        assert client.model_info(timeout_s=TIMEOUT_S), "a connection that is there goes on"
