"""Models on disk: find a model by name or path, and read its tensors under Hugging Face names."""

from amoeba_jax.checkpoint.base import Checkpoint
from amoeba_jax.checkpoint.default_model import DEFAULT_MODEL, ensure_default_model
from amoeba_jax.checkpoint.gguf_file import GGUFCheckpoint, open_gguf
from amoeba_jax.checkpoint.resolve import ResolvedModel, open_checkpoint, open_resolved, resolve_model
from amoeba_jax.checkpoint.safetensors_file import SafetensorsCheckpoint

__all__ = [
    "DEFAULT_MODEL",
    "Checkpoint",
    "GGUFCheckpoint",
    "ResolvedModel",
    "SafetensorsCheckpoint",
    "ensure_default_model",
    "open_checkpoint",
    "open_gguf",
    "open_resolved",
    "resolve_model",
]
