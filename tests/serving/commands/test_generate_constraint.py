"""Options of `amoeba generate` that constrain the text."""

from pathlib import Path

import pytest

from amoeba_jax import StructuredOutput
from amoeba_jax.errors import RequestError
from serving.commands.generate import constraint


def test_a_schema_comes_from_a_file(tmp_path: Path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "null"}')
    assert constraint(file, None) == StructuredOutput(json_schema={"type": "null"})
    assert constraint(None, "a+") == StructuredOutput(regex="a+")
    assert constraint(None, None) is None


def test_bad_options_are_refused(tmp_path: Path):
    file = tmp_path / "schema.json"
    with pytest.raises(RequestError, match=r"schema\.json cannot be read"):
        constraint(file, None)
    file.write_text("{")
    with pytest.raises(RequestError, match="not valid JSON"):
        constraint(file, None)
    file.write_text("{}")
    with pytest.raises(RequestError, match="exactly one"):
        constraint(file, "a+")
