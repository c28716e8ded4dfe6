"""OpenAI's API of `amoeba serve` in a separate process, also with TLS."""

import os
import re
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from shutil import which

import httpx2
import openai
import pytest
from live_server import TIMEOUT_S
from tiny_models import byte_model

from serving.grpc_server.config import TLS


@pytest.mark.slow
def test_serve_has_an_http_port_and_finishes_streams(compile_cache: str, tmp_path: Path):
    model = byte_model(tmp_path / "tiny-chat")
    options = ["--model", model, "--device-memory", "32MiB", "--port", "0", "--metrics-port", "0", "--http-port", "0"]
    command = [sys.executable, "-m", "serving.cli", "serve", "--no-warmup", *options, "--compile-cache", compile_cache]
    with subprocess.Popen([str(it) for it in command], stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stderr is not None
            said = ""
            while "ready:" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            url = re.search(r"OpenAI's API on ([^\s,]+)", said)
            assert url is not None
            client = openai.OpenAI(base_url=url[1], api_key="none", max_retries=0, timeout=TIMEOUT_S)
            stream = client.chat.completions.create(
                model="tiny-chat", messages=[{"role": "user", "content": "x"}], max_tokens=200, stream=True
            )
            chunks = [next(stream)]
            process.send_signal(signal.SIGTERM)
            chunks += stream
            assert chunks[-1].choices[0].finish_reason == "length"
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()


@pytest.mark.skipif(which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls_is_that_of_grpc(start_http, tmp_path: Path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with start_http(tls=TLS(certificate, key)) as http:
        trusted = ssl.create_default_context(cafile=certificate)
        url = f"https://127.0.0.1:{http.http.port}"
        assert httpx2.get(f"{url}/v1/models", verify=trusted, timeout=TIMEOUT_S).status_code == 200
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{url}/v1/models", timeout=TIMEOUT_S)
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"http://127.0.0.1:{http.http.port}/v1/models", timeout=TIMEOUT_S)
