"""Files of a model: config, tokenizer and weights."""

from collections.abc import Iterator
from contextlib import contextmanager

from amoeba_jax.checkpoint import Checkpoint, SafetensorsCheckpoint, open_resolved, resolve_model
from amoeba_jax.checkpoint.config_only import RandomCheckpoint
from amoeba_jax.checkpoint.mxfp4 import BLOCKS, Mxfp4Checkpoint
from amoeba_jax.checkpoint.orbax_dir import OrbaxCheckpoint
from amoeba_jax.checkpoint.safetensors_file import stored_dtype
from amoeba_jax.checkpoint.split import SplitCheckpoint
from amoeba_jax.config import EngineConfig
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.models.families import FAMILIES
from amoeba_jax.weights.loading import WeightReader, default_threads
from amoeba_jax.weights.readers import check_checkpoint, checkpoint_reader, random_reader, untie_stored_head


class ModelSource:
    """Files of a model. The files stay open until `close` is called or a context of `weights` ends.

    The constructor raises `ModelNotFoundError` or `CheckpointError`.

    Attributes:
        name: name of the model for clients.
        hf_config: content of config.json. If config.json has no dtype, the stored dtype of the matrices is added.
        directory: directory of the tokenizer files. None: there is no tokenizer.
    """

    def __init__(self, config: EngineConfig):
        self._resolved = resolve_model(config.model, revision=config.revision)
        self._random, self._seed = config.load_format == "random", config.seed
        self._threads = config.load_threads or default_threads()
        self._source: OrbaxCheckpoint | RandomCheckpoint | Checkpoint | None = self._open()
        self.name = self._resolved.name
        self.hf_config, self.directory = self._source.config, self._source.directory
        if self._resolved.kind == "safetensors":
            named = self.hf_config.get("dtype") or self.hf_config.get("torch_dtype")
            # Some conversions name no dtype. The default, float32, would take twice the memory.
            if not named and (dtype := stored_dtype(self._resolved.path, self.hf_config)):
                self.hf_config = self.hf_config | {"dtype": dtype}
        if isinstance(self._source, SafetensorsCheckpoint):
            self.hf_config = untie_stored_head(self._source, self.hf_config)

    @contextmanager
    def weights(self, dims: ModelDims) -> Iterator[WeightReader]:
        """Yield a reader of the weights for an engine with the sizes `dims`. Close the files at the end of the context.

        Raises `CheckpointError` if the tensors do not match the model.
        """
        source = self._source = self._source or self._open()
        try:
            if isinstance(source, OrbaxCheckpoint):
                fill = source.reader(dims)
            elif isinstance(source, RandomCheckpoint):
                fill = random_reader(dims, self._seed)
            else:
                if isinstance(source, SafetensorsCheckpoint) and any(it.endswith(BLOCKS) for it in source.names()):
                    source = Mxfp4Checkpoint(source)
                if (split := FAMILIES[dims.config.family].split) is not None:
                    source = SplitCheckpoint(source, split(dims.config))
                check_checkpoint(source, dims)
                fill = checkpoint_reader(source, dims)
            yield WeightReader(fill, self._threads)
        finally:
            self.close()

    def close(self) -> None:
        """Close the files. A later call of `weights` opens them again."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _open(self) -> OrbaxCheckpoint | RandomCheckpoint | Checkpoint:
        if self._random:
            return RandomCheckpoint(self._resolved.path)
        if self._resolved.kind == "orbax":
            return OrbaxCheckpoint(self._resolved.path)
        return open_resolved(self._resolved)
