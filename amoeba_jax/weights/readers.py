"""Where the shards of weights come from: a checkpoint's tensors, or a random generator."""

import numpy as np

from amoeba_jax.checkpoint.base import Checkpoint, FillShards
from amoeba_jax.errors import CheckpointError
from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from sharding.params import ParamSpec


def check_checkpoint(checkpoint: Checkpoint, dims: ModelDims) -> None:
    """Raise `CheckpointError` for the first tensor that is missing or whose shape disagrees with the config.

    Reads headers alone, so that a bad checkpoint is refused before anything large is loaded.
    """
    names = checkpoint.names()
    for spec in model_specs(dims).values():
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
    """Shards from a checkpoint in Hugging Face names, which `check_checkpoint` has found good."""

    def fill(spec: ParamSpec, shards: list[np.ndarray]) -> None:
        spec.fill_shards(checkpoint.read, shards)
        for source in spec.sources:
            checkpoint.release(source.name)

    return fill


def random_reader(dims: ModelDims, seed: int, std: float = 0.02) -> FillShards:
    """Shards of a randomly initialized model: the same values for every `max_tp` and page size."""

    def fill(spec: ParamSpec, shards: list[np.ndarray]) -> None:
        def sample(name: str) -> np.ndarray:
            shape = next(source.shape for source in spec.sources if source.name == name)
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
