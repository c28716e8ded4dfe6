"""Models and configurations for tests of the simulator, without files."""

from typing import Any

from serving.bench.workload import WorkloadConfig
from serving.simulator.model_shape import ModelShape
from serving.simulator.settings import SimulationConfig

QWEN_32B = ModelShape.from_hf(
    "Qwen2.5-32B",
    {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    },
)


def config(workload: dict[str, Any] | None = None, **changes: Any) -> SimulationConfig:
    """Return eight H20 and two minutes of AMOEBA's mix, with changes. A TP1 instance holds about 20K tokens."""
    load: dict[str, Any] = {
        "dataset_name": "mix",
        "duration_s": 120.0,
        "long_output_len": 200,
        "long_per_minute": 3.0,
        **(workload or {}),
    }
    settings: dict[str, Any] = {"device": "H20", "activation_gb": 14.3, "policies": ("amoeba",), **changes}
    return SimulationConfig(QWEN_32B, WorkloadConfig(**load), **settings)
