"""Save the weight shards of the devices with orbax."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from amoeba_jax.checkpoint.orbax_dir import FORMAT, SHARDS, shard_name
from amoeba_jax.checkpoint.resolve import ORBAX_MARKER
from amoeba_jax.errors import CheckpointError
from amoeba_jax.weights.store import WeightStore

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def save(directory: Path, store: WeightStore, config: dict[str, Any], tokenizer_directory: Path | None) -> None:
    """Write weight shards, sizes, config and tokenizer files into a directory. `OrbaxCheckpoint` reads the directory.

    The tokenizer files are copied from `tokenizer_directory` (None: no tokenizer files). Raises `CheckpointError` if
    `directory` exists and is not empty.
    """
    directory = directory.expanduser().resolve()
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} exists and is not empty: choose a new directory to save to")
    directory.mkdir(parents=True, exist_ok=True)
    shards = {
        shard_name(name, index): store.any_shard(name, index)
        for name, spec in store.specs.items()
        for index in range(spec.num_shards)
    }
    # One plain file per shard. With orbax's defaults, zstd and OCDBT, reading takes about 4 times as long.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory / SHARDS, args=ocp.args.PyTreeSave(shards))
    for name in _TOKENIZER_FILES:
        if tokenizer_directory is not None and (tokenizer_directory / name).exists():
            shutil.copy(tokenizer_directory / name, directory / name)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    layout = dataclasses.asdict(store.dims)
    # Written last: its presence means that all other files are complete.
    (directory / ORBAX_MARKER).write_text(json.dumps({"format": FORMAT, "layout": layout}, indent=2))
