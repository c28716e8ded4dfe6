"""Matrix products of groups of rows, with one matrix for each group: JAX's kernel for Hopper GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention.tuning import gpu_device

BLOCK_INPUTS = 64
"""Input features that the kernel loads at once."""
STEPS = 4
"""Blocks of inputs in flight."""


def unsupported(dtype: jax.typing.DTypeLike, sizes: tuple[tuple[int, int], ...]) -> str | None:
    """Return the reason why `grouped_matmul` does not run on the default device, or None if it runs.

    `sizes` has (outputs, inputs) of each kind of matrix.
    """
    device = gpu_device()
    if device is None:
        return "the default device is no GPU"
    if not (capability := getattr(device, "compute_capability", "")).startswith("9."):
        return f"it needs Hopper (compute capability 9); {device.device_kind} has {capability}"
    if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
        return f"matrices are {jnp.dtype(dtype)}, and tensor cores round f32 to 10 bits of mantissa (tf32)"
    for outputs, inputs in sizes:
        if outputs % BLOCK_INPUTS or inputs % BLOCK_INPUTS:
            return f"sizes of a matrix, {outputs} x {inputs}, must be multiples of {BLOCK_INPUTS}"
    return None


def grouped_matmul(
    rows: Float[Array, "M I"], matrices: Float[Array, "G O I"], group_sizes: Int32[Array, " G"]
) -> Float[Array, "M O"]:
    """Multiply each row by the matrix of its group `g`: row i of the result is `rows[i] @ matrices[g].T`.

    The first `group_sizes[0]` rows are group 0, the next `group_sizes[1]` rows are group 1, and so on. Results of rows
    after the last group are undefined and may be NaN. Sums are in f32, and the result has the dtype of `rows`. Call
    this function only if `unsupported` returns None.
    """
    # A private import of JAX's module takes 2 s, so only GPU programs pay for it.
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    num_rows, (num_groups, outputs, _) = rows.shape[0], matrices.shape
    block_rows = 64 if num_rows <= 64 * num_groups else 128
    # The kernel copies tiles of 8 rows, and whole blocks.
    padding = max(block_rows - num_rows, -num_rows % 8)
    sizes: dict[str, Any] = {
        "block_m": block_rows,
        "block_n": 128 if outputs % 128 == 0 else 64,
        "block_k": BLOCK_INPUTS,
        "max_concurrent_steps": STEPS,
        "grid_block_n": 1,
    }
    padded = jnp.pad(rows, ((0, padding), (0, 0)))
    product = ragged_dot_mgpu.ragged_dot(padded, matrices, group_sizes=group_sizes, transpose_rhs=True, **sizes)
    return product[:num_rows]
