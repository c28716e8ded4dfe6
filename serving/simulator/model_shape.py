"""Sizes of a decoder, from its `config.json`: weight matrices, and bytes of weights and KV cache."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.simulator.errors import SimulationError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass(frozen=True)
class Matrix:
    """Weight matrix. Tensor parallelism divides its inputs or its outputs over the ranks."""

    name: str
    inputs: int
    outputs: int
    split: str
    """Side that is divided: `outputs` or `inputs`."""

    def at(self, degree: int) -> tuple[int, int]:
        """Return `(inputs, outputs)` of the part that one rank stores."""
        if self.split == "outputs":
            return self.inputs, -(-self.outputs // degree)
        return -(-self.inputs // degree), self.outputs


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with gated FFNs, dense or with experts."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Width of the FFN, or of each expert."""
    vocab_size: int
    max_position: int
    num_experts: int = 1
    experts_per_token: int = 1
    tied_embeddings: bool = False
    item_bytes: int = 2

    @classmethod
    def from_hf(cls, name: str, config: dict[str, Any]) -> "ModelShape":
        """Return the shape for the contents of a `config.json` in Hugging Face form.

        Raises `SimulationError` with the name of a missing or invalid field.
        """

        def positive(*names: str, default: int | None = None) -> int:
            value = next((config[n] for n in names if config.get(n) is not None), default)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SimulationError(f"{name}: {names[0]}={value!r} in config.json must be a positive integer")
            return value

        heads = positive("num_attention_heads")
        hidden = positive("hidden_size")
        experts = positive("num_local_experts", "num_experts", "n_routed_experts", default=1)
        dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in _ITEM_BYTES:
            known = ", ".join(_ITEM_BYTES)
            raise SimulationError(f"{name}: dtype={dtype!r} in config.json is unknown: it must be one of {known}")
        ffn = positive("moe_intermediate_size", "intermediate_size") if experts > 1 else positive("intermediate_size")
        return cls(
            name=name,
            hidden_size=hidden,
            num_layers=positive("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=positive("num_key_value_heads", default=heads),
            head_dim=positive("head_dim", default=max(hidden // heads, 1)),
            ffn_size=ffn,
            vocab_size=positive("vocab_size"),
            max_position=positive("max_position_embeddings", default=2**31 - 1),
            num_experts=experts,
            experts_per_token=positive("num_experts_per_tok", "experts_per_token", default=1),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            item_bytes=_ITEM_BYTES[dtype],
        )

    @classmethod
    def read(cls, path: Path) -> "ModelShape":
        """Read a `config.json`; `path` is the file or its directory. Raises `SimulationError` if the file is
        invalid."""
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SimulationError(f"--model {path}: {file.name} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise SimulationError(f"--model {path}: {file.name} must hold an object, not {type(config).__name__}")
        return cls.from_hf(file.resolve().parent.name, config)

    @property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        """Attention matrices of one layer: fused projection to queries, keys and values; output projection."""
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return (
            Matrix("qkv", self.hidden_size, rows, "outputs"),
            Matrix("attention_out", self.num_heads * self.head_dim, self.hidden_size, "inputs"),
        )

    @property
    def ffn_matrices(self) -> tuple[Matrix, ...]:
        """FFN matrices of one layer, or of one expert: fused gate and up projection; down projection."""
        return (
            Matrix("gate_up", self.hidden_size, 2 * self.ffn_size, "outputs"),
            Matrix("down", self.ffn_size, self.hidden_size, "inputs"),
        )

    @property
    def head_matrix(self) -> Matrix:
        """Matrix of the projection to logits."""
        return Matrix("head", self.hidden_size, self.vocab_size, "outputs")

    @property
    def ffn_bytes(self) -> int:
        """Bytes of the FFN weights of all layers and experts."""
        per_expert = sum(m.inputs * m.outputs for m in self.ffn_matrices)
        return self.num_layers * self.num_experts * per_expert * self.item_bytes

    @property
    def other_bytes(self) -> int:
        """Bytes of all weights except FFN: attention, embeddings and head."""
        attention = self.num_layers * sum(m.inputs * m.outputs for m in self.attention_matrices)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return (attention + embeddings) * self.item_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.ffn_bytes + self.other_bytes

    def kv_token_bytes(self, degree: int = 1) -> float:
        """Return the bytes that one rank stores for a token: keys and values of its KV heads in all layers.

        If there are fewer KV heads than ranks, each rank stores one head.
        """
        heads = max(self.num_kv_heads / degree, 1.0)
        return self.num_layers * heads * 2 * self.head_dim * self.item_bytes
