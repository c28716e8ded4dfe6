"""Sources of weight shards: the tensors of a checkpoint, or a random generator."""

import logging
from typing import Any

import numpy as np

from amoeba_jax.checkpoint.base import Checkpoint, FillShards
from amoeba_jax.errors import CheckpointError
from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from sharding.params import ParamSpec

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Rotary frequencies, which old checkpoints store although loaders compute them.
_COMPUTED = ".rotary_emb.inv_freq"
_COMPARED_ROWS = 1 << 12


def untie_stored_head(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config. If the stored output projection differs from the embedding, untie the embeddings.

    To untie means that `tie_word_embeddings` is False in the result, and that a warning is logged. In all other cases,
    the config is returned unchanged. `transformers` 5 does the same.
    """
    if not config.get("tie_word_embeddings") or not checkpoint.names() >= {EMBEDDING, HEAD}:
        return config
    embedding, head = checkpoint.read(EMBEDDING), checkpoint.read(HEAD)
    # By blocks of rows: a comparison of whole tensors would make an array of their size.
    same = embedding.shape == head.shape and all(
        np.array_equal(embedding[row : row + _COMPARED_ROWS], head[row : row + _COMPARED_ROWS])
        for row in range(0, len(head), _COMPARED_ROWS)
    )
    checkpoint.release(EMBEDDING)
    checkpoint.release(HEAD)
    if same:
        return config
    logger.warning(
        "config.json has tie_word_embeddings=true, but the stored %s differs from %s: the stored head is used. Set "
        "tie_word_embeddings=false to silence this warning",
        HEAD,
        EMBEDDING,
    )
    return config | {"tie_word_embeddings": False}


def check_checkpoint(checkpoint: Checkpoint, dims: ModelDims) -> None:
    """Raise `CheckpointError` if a tensor is missing or has another shape than the config implies.

    Only headers are read, so a bad checkpoint is refused before its weights are loaded. Like `transformers`, log a
    warning about tensors that the model does not use.
    """
    names = checkpoint.names()
    specs = model_specs(dims)
    used = {source.name for spec in specs.values() for source in spec.sources}
    unused = sorted(name for name in names - used - {HEAD} if not name.endswith(_COMPUTED))
    if unused:
        shown = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
        logger.warning(
            "%d of %d stored tensors are no part of a %s model with this config.json and are ignored: %s",
            len(unused),
            len(names),
            dims.config.family,
            shown,
        )
    for spec in specs.values():
        for source in spec.sources:
            if source.name not in names:
                raise CheckpointError(
                    f"tensor {source.name} {list(source.shape)} is missing: the {len(names)} tensors of the weights "
                    "do not make up the model that config.json describes"
                )
            if (shape := checkpoint.shape(source.name)) != source.shape:
                raise CheckpointError(
                    f"tensor {source.name} has shape {shape} but config.json implies {source.shape}: "
                    "config and weights disagree"
                )


def checkpoint_reader(checkpoint: Checkpoint, dims: ModelDims) -> FillShards:
    """Return a function that fills shards from a checkpoint that `check_checkpoint` has accepted."""

    def fill(spec: ParamSpec, shards: list[np.ndarray]) -> None:
        spec.fill_shards(checkpoint.read, shards)
        for source in spec.sources:
            checkpoint.release(source.name)

    return fill


def random_reader(dims: ModelDims, seed: int, std: float = 0.02) -> FillShards:
    """Return a function that fills shards with random weights of standard deviation `std`.

    The weights depend on `seed` and the names of the tensors, but not on `max_tp` or the page size.
    """

    def fill(spec: ParamSpec, shards: list[np.ndarray]) -> None:
        shapes = {source.name: source.shape for source in spec.sources}

        def sample(name: str) -> np.ndarray:
            shape = shapes[name]
            if spec.init == "ones":
                return np.ones(shape, np.float32)
            if spec.init == "zeros":
                return np.zeros(shape, np.float32)
            words = np.frombuffer(name.encode(), np.uint8)
            values = np.random.default_rng([seed, *words]).standard_normal(shape, np.float32)
            values *= np.float32(std)
            return values

        spec.fill_shards(sample, shards)

    return fill
