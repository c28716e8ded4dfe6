"""A Hopper GPU for programs that are lowered, but not run, on CPU."""

import pytest

from amoeba_jax.models import experts
from pallas_kernels import grouped_matmul
from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.mosaic_gpu import launch


class Hopper:
    """Device with the attributes that dispatch reads."""

    platform, compute_capability, core_count, device_kind = "gpu", "9.0", 132, "NVIDIA H200"


def use_device(monkeypatch: pytest.MonkeyPatch, device: Hopper | None) -> None:
    """Let paged attention and experts find this device as JAX's default GPU."""
    for module in (api, launch, grouped_matmul, experts):
        monkeypatch.setattr(module, "gpu_device", lambda: device)


def is_kernel(text: str) -> bool:
    """Return whether a lowered program calls the Hopper kernel."""
    return "mosaic_gpu" in text and "paged_attention_kernel" in text
