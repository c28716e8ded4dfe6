"""Options that come from the fields of dataclasses."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from amoeba_jax.config import EngineConfig
from serving.cli import app
from serving.flags import Flags, field_docs, with_flags
from serving.grpc_server.config import Limits, SecretFiles, ServerConfig
from serving.runtime.scheduling_config import SchedulingConfig

# Fields of `ServerConfig` that `amoeba serve` reads from files or the environment.
_NO_OPTION = {"tls", "api_token", "admin_token", "limits"}


@dataclass(frozen=True)
class Settings:
    size: int = 3
    """Number of things,
    over two lines."""
    memory: str | int | None = None
    """Budget. Default: 2.5 GiB, or what `other_size` leaves. Never less than a page."""
    share: float = 0.50
    """Share of `size`."""
    fast: bool = True
    """Be fast."""
    other_size: int | None = None
    """The other size. None: no limit."""
    file: Path | None = None
    """A file."""
    pairs: tuple[int, ...] = ()
    """No option has this type."""
    bare: int = 0


def command(**options: Any) -> tuple[typer.Typer, list[dict[str, Any]]]:
    received: list[dict[str, Any]] = []
    cli = typer.Typer()

    @cli.command()
    @with_flags(Flags("Settings", Settings, **{"without": ("pairs", "bare"), **options}))
    def run(values: dict[str, Any], own: int = 0) -> None:
        received.append({**values, "own": own})

    return cli, received


def invoke(*arguments: str, **options: Any) -> dict[str, Any]:
    cli, received = command(**options)
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return received[0]


def help_of(cli: typer.Typer, *arguments: str) -> str:
    output = CliRunner().invoke(cli, [*arguments, "--help"], env={"COLUMNS": "160", "TERM": "dumb"}).output
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", output).split())


def test_only_options_that_are_given_are_passed_on():
    assert invoke() == {"own": 0}
    given = invoke("--size", "5", "--no-fast", "--memory", "64", "--file", "x", "--own", "2")
    assert given == {"size": 5, "fast": False, "memory": "64", "file": Path("x"), "own": 2}


def test_a_command_may_have_defaults_and_spellings_of_its_own():
    options: dict[str, Any] = {"defaults": {"size": 7}, "spellings": {"share": ("--part", "-s")}}
    assert invoke("-s", "0.25", **options) == {"size": 7, "share": 0.25, "own": 0}
    assert invoke("--size", "1", **options) == {"size": 1, "own": 0}


def test_help_has_docstrings_types_and_defaults():
    text = help_of(command()[0])
    assert "Number of things, over two lines. [default: (3)]" in text
    assert "Budget. Never less than a page. [default: (2.5 GiB, or what --other-size leaves)]" in text
    assert "Share of size. [default: (0.5)]" in text
    assert "--fast --no-fast" in text
    assert "The other size. [default: (no limit)]" in text


def test_a_wrong_value_names_the_option():
    result = CliRunner().invoke(command()[0], ["--size", "many"])
    assert result.exit_code == 2
    assert "--size" in result.output


@pytest.mark.parametrize(("name", "message"), [("pairs", "cannot be an option"), ("bare", "needs a docstring")])
def test_fields_that_can_be_no_option_are_refused(name: str, message: str):
    with pytest.raises(TypeError, match=message):
        command(without=(), only=(name,))


@pytest.mark.parametrize("settings", [EngineConfig, SchedulingConfig, ServerConfig, SecretFiles, Limits])
def test_serve_has_an_option_for_every_setting(settings: type):
    text, docs = help_of(app, "serve"), field_docs(settings)
    spelled = {"shutdown_timeout_s": "--shutdown-timeout", "engine_timeout_s": "--engine-timeout"}
    for field in fields(settings):
        if field.name not in _NO_OPTION:
            assert spelled.get(field.name, f"--{field.name.replace('_', '-')}") in text
            assert docs[field.name]
