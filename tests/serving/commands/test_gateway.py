"""`amoeba gateway`: its command line, and the manifests with the same options. `test_many_hosts.py` runs it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from serving.cli import app
from serving.commands.gateway import _SETTINGS, MAX_WORKERS

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
WORKERS = ["--worker", "http://10.0.0.1:8000", "--worker", "http://[fd00::2]:8000/"]


def test_command_is_printed_with_its_settings():
    result = CliRunner().invoke(
        app, ["gateway", *WORKERS, "--print", "--port", "8080", "--", "--retry-max-retries", "9"]
    )
    assert result.exit_code == 0, result.output
    command = result.stdout.strip()
    assert command.startswith(
        "smg launch --host 127.0.0.1 --port 8080 --worker-urls http://10.0.0.1:8000 'http://[fd00::2]:8000' "
    )
    assert "--prometheus-host 127.0.0.1 --prometheus-port 29000 --disable-tokenizer-autoload" in command
    assert "--health-check-interval-secs 2 " in command
    assert command.endswith("--retry-max-retries 9")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--worker", "10.0.0.1:8000"], "must be http://HOST:PORT or https://HOST:PORT"),
        ([*WORKERS, "--port", "0"], "--port=0 must be from 1 to 65535"),
        ([*WORKERS, "--metrics-port", "70000"], "--metrics-port=70000 must be from 1 to 65535"),
        ([*WORKERS * MAX_WORKERS], "--worker was given 512 times"),
    ],
)
def test_bad_settings_are_refused(arguments: list[str], text: str):
    result = CliRunner().invoke(app, ["gateway", *arguments, "--print"])
    assert result.exit_code == 2
    assert text in result.stderr


def pod_of(kind: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Return a pod, its only container, and the container's options that have a value."""
    manifests = [each for path in sorted(DEPLOY.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    pod = next(each for each in manifests if each["kind"] == kind)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = [text.removeprefix("--") for text in container["args"] if text.startswith("--") and "=" in text]
    return pod, container, dict(option.split("=", 1) for option in options)


def test_manifests_have_the_settings_of_the_gateway():
    _, container, options = pod_of("Deployment")
    assert _SETTINGS.items() <= options.items()
    assert options["prometheus-host"] == "127.0.0.1"
    assert "--disable-tokenizer-autoload" in container["args"]


def test_manifests_give_a_pod_more_time_than_its_drain_takes():
    pod, container, options = pod_of("StatefulSet")
    wait_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait_s + int(options["shutdown-timeout"])
    assert {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness")} == {"/health"}
    assert str({port["name"]: port["containerPort"] for port in container["ports"]}["http"]) == options["http-port"]


def test_manifests_have_options_of_the_server():
    _, container, options = pod_of("StatefulSet")
    assert container["args"][:2] == ["amoeba", "serve"]
    known = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    assert [option for option in options if f"--{option} " not in known] == []
