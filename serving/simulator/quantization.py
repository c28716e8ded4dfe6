"""Sizes of quantized weights, according to the `quantization_config` of a `config.json`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.simulator.errors import SimulationError

METHODS = ("fp8", "mxfp4", "gptq", "awq")
_MXFP4_BYTES = 17 / 32
"""A block of 32 weights has 4 bits for each weight, and a scale of one byte."""
_ATTENTION, _FFN = ("self_attn",), ("gate_proj", "up_proj", "down_proj", "experts")
_MAX_NAMES = 10_000


@dataclass(frozen=True)
class Quantization:
    """Bytes of one quantized weight in attention and in FFNs, with its share of the scales. None: not quantized."""

    attention_bytes: float | None = None
    ffn_bytes: float | None = None

    @classmethod
    def from_hf(cls, name: str, config: Any, has_experts: bool) -> "Quantization":
        """Return the bytes of one weight for a `quantization_config`.

        Embeddings, routers and the output projection count as not quantized. Raises `SimulationError` if the method
        cannot be simulated.

        Args:
            name: name of the model, for errors.
            config: value of `quantization_config`. None: the weights are not quantized.
            has_experts: whether the model has experts. MXFP4 quantizes experts only.
        """
        if config is None:
            return cls()
        if not isinstance(config, Mapping) or (method := config.get("quant_method")) not in METHODS:
            found = config.get("quant_method") if isinstance(config, Mapping) else config
            raise SimulationError(
                f"{name}: quant_method={found!r:.60} cannot be simulated: it must be one of {', '.join(METHODS)}"
            )
        if method == "mxfp4":
            if not has_experts:
                raise SimulationError(f"{name}: quant_method='mxfp4' without experts cannot be simulated")
            return cls(None, _MXFP4_BYTES)
        size = _fp8_bytes(name, config) if method == "fp8" else _integer_bytes(name, config)
        kept = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
        if not isinstance(kept, list | tuple) or len(kept) > _MAX_NAMES:
            raise SimulationError(
                f"{name}: modules_to_not_convert={kept!r:.60} must be a list of at most {_MAX_NAMES} names"
            )
        names = [str(item) for item in kept if not str(item).endswith("norm")]
        if partial := next((item for item in names if any(part in item for part in _FFN)), None):
            raise SimulationError(f"{name}: modules_to_not_convert has {partial!r:.60}: such FFNs cannot be simulated")
        return cls(None if any(part in item for item in names for part in _ATTENTION) else size, size)


def _fp8_bytes(name: str, config: Mapping[str, Any]) -> float:
    block = config.get("weight_block_size") or ()
    if not all(isinstance(side, int) and side > 0 for side in block):
        raise SimulationError(f"{name}: weight_block_size={block!r:.60} must have positive integers")
    return 1.0 + (4 / math.prod(block) if block else 0.0)


def _integer_bytes(name: str, config: Mapping[str, Any]) -> float:
    """Return the bytes of one GPTQ or AWQ weight. Each group of weights has a scale of two bytes and a zero point."""
    bits, group = config.get("bits"), config.get("group_size", 128)
    if bits not in (2, 3, 4, 8) or not isinstance(group, int) or group == 0:
        raise SimulationError(f"{name}: bits={bits!r:.60} and group_size={group!r:.60} cannot be simulated")
    return bits / 8 + ((2 + bits / 8) / group if group > 0 else 0.0)
