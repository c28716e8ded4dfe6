import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file

from amoeba_jax.checkpoint import ResolvedModel, SafetensorsCheckpoint, open_checkpoint, resolve, resolve_model
from amoeba_jax.config import EngineConfig
from amoeba_jax.errors import CheckpointError, ModelNotFoundError
from amoeba_jax.model_source import ModelSource


def make_directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"x": np.ones(3, np.float32)}, path / "model.safetensors")
    return path


def test_directory_is_opened_as_safetensors(tmp_path):
    directory = make_directory(tmp_path / "my-model")
    assert resolve_model(str(directory)) == ResolvedModel("my-model", directory, "safetensors")
    assert resolve_model(f"{directory}/") == ResolvedModel("my-model", directory, "safetensors")
    checkpoint = open_checkpoint(str(directory))
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert checkpoint.read("x").tolist() == [1, 1, 1]


def test_relative_paths_are_named_by_what_they_lead_to(tmp_path, monkeypatch):
    directory = make_directory(tmp_path / "org" / "model")
    monkeypatch.chdir(directory)
    assert resolve_model(".") == ResolvedModel("model", directory, "safetensors")
    monkeypatch.chdir(tmp_path)
    # The name looks like a hub name, but an existing path comes first.
    assert resolve_model("org/model") == ResolvedModel("model", directory, "safetensors")


def test_saved_directory_is_told_apart(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "amoeba.json").write_text("{}")
    assert resolve_model(str(tmp_path / "saved")) == ResolvedModel("saved", tmp_path / "saved", "orbax")
    with pytest.raises(CheckpointError, match="without separate tensors: open it with `LLM`"):
        open_checkpoint(str(tmp_path / "saved"))


def test_gguf_file_is_opened_as_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert resolve_model(str(path)) == ResolvedModel("m.gguf", path, "gguf")
    with pytest.raises(CheckpointError, match="architecture 'mamba'"):
        open_checkpoint(str(path))


def test_default_name_leads_to_the_default_model(default_model, monkeypatch):
    monkeypatch.setenv("AMOEBA_CACHE_DIR", str(default_model.parents[1]))
    assert resolve_model("smollm2-135m") == ResolvedModel("smollm2-135m", default_model, "safetensors")
    assert len(open_checkpoint("smollm2-135m").names()) == 272


@pytest.mark.parametrize(
    "model", ["", "llama", "./nothing", "/no/such/place", "a/b/c", "no/such.gguf", "-a/b", "a/b c"]
)
def test_what_is_no_model_is_refused_at_once(model):
    with pytest.raises(ModelNotFoundError, match=r"there is no model .* Accepted: 'smollm2-135m' \(built in\)"):
        resolve_model(model)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"model\.bin is neither a directory nor a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_hub_gives_the_revision_once_in_one_form(tmp_path, monkeypatch):
    snapshot, asked = make_directory(tmp_path / "snapshot"), {}

    def snapshot_download(repository: str, **settings: Any) -> str:
        asked.update(settings, repository=repository)
        return str(snapshot)

    monkeypatch.setattr(resolve, "snapshot_download", snapshot_download)
    source = ModelSource(EngineConfig(model="org/name", revision="v1.1"))
    source.close()
    assert (source.name, source.directory) == ("name", snapshot)
    assert (asked["repository"], asked["revision"]) == ("org/name", "v1.1")
    files = ["model-00001-of-00002.safetensors", "consolidated.safetensors", "original/params.json", "config.json"]
    wanted = filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(wanted) == [files[0], files[3]]
    ModelSource(EngineConfig(model="org/name")).close()
    assert asked["revision"] is None


RESOLVE = """
import sys
from amoeba_jax.checkpoint import resolve_model
from amoeba_jax.errors import ModelNotFoundError
try:
    print(resolve_model(sys.argv[1], revision="main"))
except ModelNotFoundError as error:
    print(error)
"""


def resolve_with_hub(model: str, **environment: str) -> str:
    """Resolve in a separate process, because the hub client reads its settings at import."""
    command = [sys.executable, "-c", RESOLVE, model]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment).stdout


def test_hub_that_cannot_be_reached_is_told(tmp_path):
    # Nothing listens on port 1 of this machine.
    said = resolve_with_hub("org/name", HF_ENDPOINT="http://127.0.0.1:1", HF_HUB_CACHE=str(tmp_path))
    assert said.startswith(
        "'org/name' is not a file or directory here, and the hub did not return it at revision 'main'"
    )
    assert "Accepted: 'smollm2-135m' (built in)" in said


def test_hub_name_is_named_by_its_last_part(tmp_path):
    # Files of an earlier download in the hub's own cache.
    repository = tmp_path / "models--org--name"
    snapshot = make_directory(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    said = resolve_with_hub("org/name", HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path))
    assert said.strip() == repr(ResolvedModel("name", snapshot, "safetensors"))
