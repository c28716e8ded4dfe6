"""Sizes of a decoder, from its `config.json`: weight matrices, and bytes of weights and KV cache."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from serving.simulator.errors import SimulationError
from serving.simulator.quantization import Quantization

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "smollm3")
_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
MODEL_TYPES = (*_GATED, *_EXPERTS)
"""Values of `model_type` that this module can read."""
_ALL_SLIDE = ("mistral", "phi3", "mixtral")
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}
"""Every n-th layer has full attention, if the config does not list the kinds of layers."""
_MLA = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class Matrix:
    """Weight matrix. Tensor parallelism divides its inputs or its outputs over the devices."""

    name: str
    inputs: int
    outputs: int
    split: str
    """Side that is divided: `outputs`, `inputs`, or `none` if each rank stores the whole matrix."""

    def at(self, degree: int) -> tuple[int, int]:
        """Return `(inputs, outputs)` of the part that one device stores at tensor-parallel degree `degree`."""
        if self.split == "none":
            return self.inputs, self.outputs
        if self.split == "outputs":
            return self.inputs, -(-self.outputs // degree)
        return -(-self.inputs // degree), self.outputs


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (MLA): each token has one compressed vector for all heads."""

    rank: int
    """Size of the compressed keys and values (`kv_lora_rank`)."""
    rope: int
    """Size of the part of keys and queries with rotary positions."""
    nope: int
    """Size of the part of keys and queries without positions."""
    value: int
    """Size of the values of a head."""
    query_rank: int | None
    """Size of the compressed queries. None: queries are not compressed."""


class Window(NamedTuple):
    """Sliding windows of a model.

    In the share `share` of all layers, a token attends only to the latest `tokens` tokens.
    """

    share: float
    tokens: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with gated FFNs. The FFNs may consist of experts."""

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
    """Bytes of an activation, of an element of the KV cache, and of a weight that is not quantized."""
    num_dense_layers: int = 0
    """Layers without experts in a model with experts."""
    dense_ffn_size: int = 0
    """Width of the FFN in the layers without experts, in a model with experts."""
    shared_ffn_size: int = 0
    """Total width of the shared experts, which compute every token."""
    window: Window | None = None
    latent: LatentAttention | None = None
    attention_weight_bytes: float | None = None
    """Bytes of a weight of attention. None: `item_bytes`."""
    ffn_weight_bytes: float | None = None
    """Bytes of a weight of an FFN. None: `item_bytes`."""

    @classmethod
    def from_hf(cls, name: str, config: dict[str, Any]) -> "ModelShape":
        """Return the sizes of a model from the content of its `config.json` in Hugging Face form.

        Without `model_type`, a decoder with gated FFNs is assumed. Raises `SimulationError` with the name of a missing
        or invalid field, and for a model that cannot be simulated.
        """
        kind = config.get("model_type")
        if kind is not None and kind not in MODEL_TYPES:
            raise SimulationError(
                f"{name}: model_type={kind!r:.60} cannot be simulated: it must be one of {', '.join(MODEL_TYPES)}"
            )
        fields = _Fields(name, config)
        heads, hidden = fields.positive("num_attention_heads"), fields.positive("hidden_size")
        layers = fields.positive("num_hidden_layers")
        experts = fields.positive("num_local_experts", "num_experts", "n_routed_experts", default=1)
        dense = 0
        if experts > 1:
            ffn = fields.positive("moe_intermediate_size", "intermediate_size")
            dense = _dense_layers(fields, layers)
        else:
            ffn = fields.positive("intermediate_size")
        dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in _ITEM_BYTES:
            known = ", ".join(_ITEM_BYTES)
            raise SimulationError(f"{name}: dtype={dtype!r:.60} in config.json is unknown: it must be one of {known}")
        quantization = Quantization.from_hf(name, config.get("quantization_config"), experts > 1)
        return cls(
            name=name,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=fields.positive("num_key_value_heads", default=heads),
            head_dim=fields.positive("head_dim", default=max(hidden // heads, 1)),
            ffn_size=ffn,
            vocab_size=fields.positive("vocab_size"),
            max_position=fields.positive("max_position_embeddings", default=2**31 - 1),
            num_experts=experts,
            experts_per_token=fields.positive("num_experts_per_tok", "experts_per_token", default=1),
            tied_embeddings=bool(config.get("tie_word_embeddings", str(kind).startswith("gemma"))),
            item_bytes=_ITEM_BYTES[dtype],
            num_dense_layers=dense,
            dense_ffn_size=fields.positive("intermediate_size") if dense else 0,
            shared_ffn_size=_shared_ffn_size(fields, ffn) if experts > 1 else 0,
            window=_window(fields, kind, layers),
            latent=_latent(fields),
            attention_weight_bytes=quantization.attention_bytes,
            ffn_weight_bytes=quantization.ffn_bytes,
        )

    @classmethod
    def read(cls, path: Path) -> "ModelShape":
        """Read a `config.json`. `path` is the file or its directory.

        Raises `SimulationError` if the file is invalid.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SimulationError(f"--model {path}: {file.name} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise SimulationError(f"--model {path}: {file.name} must hold an object, not {type(config).__name__}")
        return cls.from_hf(file.resolve().parent.name, config)

    @cached_property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        """Attention matrices of one layer: the joint projection to queries, keys and values, and the output projection.

        With latent attention, three or four matrices replace the joint projection.
        """
        hidden, heads = self.hidden_size, self.num_heads
        if (latent := self.latent) is None:
            rows = (heads + 2 * self.num_kv_heads) * self.head_dim
            return (
                Matrix("qkv", hidden, rows, "outputs"),
                Matrix("attention_out", heads * self.head_dim, hidden, "inputs"),
            )
        queries = heads * (latent.nope + latent.rope)
        first = (Matrix("q", hidden, queries, "outputs"),)
        if latent.query_rank is not None:
            first = (
                Matrix("q_down", hidden, latent.query_rank, "none"),
                Matrix("q_up", latent.query_rank, queries, "outputs"),
            )
        return (
            *first,
            Matrix("kv_down", hidden, latent.rank + latent.rope, "none"),
            Matrix("kv_up", latent.rank, heads * (latent.nope + latent.value), "outputs"),
            Matrix("attention_out", heads * latent.value, hidden, "inputs"),
        )

    def ffn_matrices(self, width: int | None = None) -> tuple[Matrix, ...]:
        """Return the two matrices of an FFN with `width` inner features.

        The first matrix is the joint gate and up projection. The second matrix is the down projection. By default,
        `width` is the width of a layer's FFN, or of one expert.
        """
        width = self.ffn_size if width is None else width
        return (
            Matrix("gate_up", self.hidden_size, 2 * width, "outputs"),
            Matrix("down", width, self.hidden_size, "inputs"),
        )

    @cached_property
    def head_matrix(self) -> Matrix:
        """Output projection: the matrix that computes logits."""
        return Matrix("head", self.hidden_size, self.vocab_size, "outputs")

    @property
    def attention_item_bytes(self) -> float:
        """Bytes of one attention weight."""
        return self.item_bytes if self.attention_weight_bytes is None else self.attention_weight_bytes

    @property
    def ffn_item_bytes(self) -> float:
        """Bytes of one FFN weight."""
        return self.item_bytes if self.ffn_weight_bytes is None else self.ffn_weight_bytes

    @property
    def _ffn_parameters(self) -> int:
        routed, shared, dense = (
            _parameters(self.ffn_matrices(width))
            for width in (self.ffn_size, self.shared_ffn_size, self.dense_ffn_size)
        )
        with_experts = self.num_layers - self.num_dense_layers
        return with_experts * (self.num_experts * routed + shared) + self.num_dense_layers * dense

    @property
    def _router_parameters(self) -> int:
        if self.num_experts == 1:
            return 0
        return (self.num_layers - self.num_dense_layers) * self.hidden_size * self.num_experts

    @property
    def _vocabulary_parameters(self) -> int:
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def num_parameters(self) -> int:
        """Number of weights, without norms and biases."""
        attention = self.num_layers * _parameters(self.attention_matrices)
        return self._ffn_parameters + attention + self._router_parameters + self._vocabulary_parameters

    @property
    def ffn_bytes(self) -> float:
        """Bytes of the FFN weights of all layers and experts."""
        return self._ffn_parameters * self.ffn_item_bytes

    @property
    def attention_bytes(self) -> float:
        """Bytes of the attention weights of one layer."""
        return _parameters(self.attention_matrices) * self.attention_item_bytes

    @property
    def other_bytes(self) -> float:
        """Bytes of all weights except FFNs: attention, routers, embedding and output projection."""
        rest = self._router_parameters + self._vocabulary_parameters
        return self.num_layers * self.attention_bytes + rest * self.item_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.ffn_bytes + self.other_bytes

    @property
    def pair_operations(self) -> int:
        """Floating-point operations of attention for one pair of tokens, in all heads of one layer.

        A pair is a query token and a token that this query token attends to.
        """
        if (latent := self.latent) is not None:
            return 2 * self.num_heads * (latent.nope + latent.rope + latent.value)
        return 4 * self.num_heads * self.head_dim

    def kv_token_bytes(self, degree: int = 1) -> float:
        """Return the bytes of KV cache of one token, in all layers, on one of `degree` devices.

        KV heads are divided over the devices, but each device stores at least one head. With latent attention, each
        device stores the compressed vector. As in the engine, layers with a sliding window store all tokens.
        """
        if self.latent is not None:
            return self.num_layers * (self.latent.rank + self.latent.rope) * self.item_bytes
        heads = max(self.num_kv_heads / degree, 1.0)
        return self.num_layers * heads * 2 * self.head_dim * self.item_bytes


def _parameters(matrices: tuple[Matrix, ...]) -> int:
    return sum(matrix.inputs * matrix.outputs for matrix in matrices)


@dataclass(frozen=True)
class _Fields:
    """Reader of the fields of a `config.json`."""

    name: str
    config: Mapping[str, Any]

    def get(self, name: str) -> Any:
        return self.config.get(name)

    def positive(self, *names: str, default: int | None = None) -> int:
        """Return the value of the first field of `names` that is set, or `default` if none is set.

        Raises `SimulationError` if the value is not a positive integer.
        """
        value = next((self.config[n] for n in names if self.config.get(n) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SimulationError(f"{self.name}: {names[0]}={value!r:.60} in config.json must be a positive integer")
        return value


def _dense_layers(fields: _Fields, layers: int) -> int:
    first = fields.get("first_k_dense_replace") or 0
    step = fields.get("decoder_sparse_step") or fields.get("moe_layer_freq") or 1
    listed = set(fields.get("mlp_only_layers") or ())
    if not isinstance(first, int) or not isinstance(step, int) or step < 1:
        raise SimulationError(
            f"{fields.name}: first_k_dense_replace={first!r:.60} and decoder_sparse_step={step!r:.60} in config.json "
            "must be integers"
        )
    return sum(index < first or index in listed or (index + 1) % step != 0 for index in range(layers))


def _shared_ffn_size(fields: _Fields, ffn: int) -> int:
    if fields.get("shared_expert_intermediate_size"):
        return fields.positive("shared_expert_intermediate_size")
    return fields.positive("n_shared_experts") * ffn if fields.get("n_shared_experts") else 0


def _window(fields: _Fields, kind: str | None, layers: int) -> Window | None:
    if fields.get("sliding_window") is None or fields.get("use_sliding_window") is False:
        return None
    tokens = fields.positive("sliding_window")
    if kinds := fields.get("layer_types"):
        if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
            raise SimulationError(f"{fields.name}: layer_types has {min(unknown)!r:.60}, which cannot be simulated")
        sliding = list(kinds).count("sliding_attention")
    elif kind in _ALL_SLIDE:
        sliding = layers
    elif kind in _FULL_EVERY:
        sliding = layers - layers // (fields.get("sliding_window_pattern") or _FULL_EVERY[kind])
    elif fields.get("use_sliding_window"):
        sliding = layers - min(fields.get("max_window_layers") or 0, layers)
    else:
        raise SimulationError(
            f"{fields.name}: sliding_window={tokens} in config.json, but neither layer_types nor "
            f"model_type={kind!r:.60} says in which layers"
        )
    return Window(sliding / layers, tokens) if sliding else None


def _latent(fields: _Fields) -> LatentAttention | None:
    if fields.get("kv_lora_rank") is None:
        return None
    rank, rope, nope, value = (fields.positive(name) for name in _MLA)
    query = fields.positive("q_lora_rank") if fields.get("q_lora_rank") is not None else None
    return LatentAttention(rank, rope, nope, value, query)
