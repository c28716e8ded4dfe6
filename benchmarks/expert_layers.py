"""Experts of one layer, computed by several methods, for `gpu.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from amoeba_jax.models.experts import Expert, all_experts, grouped_experts, used_experts
from amoeba_jax.models.layers import ACTIVATIONS, matmul
from pallas_kernels.grouped_matmul import unsupported

TOLERANCE = 2e-2
"""Limit for the difference between two ways in bf16, relative to the largest result."""


@dataclass(frozen=True)
class ExpertWork:
    """Tokens and sizes of a layer with experts."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    features: int

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens, top {self.top_k} of {self.experts} experts, {self.hidden} x {self.features}"

    @property
    def elements(self) -> int:
        """Number of weight elements of all experts that get a token, if the tokens are spread evenly."""
        return min(self.experts, self.tokens * self.top_k) * 3 * self.hidden * self.features

    @property
    def flops(self) -> int:
        return self.tokens * self.top_k * 6 * self.hidden * self.features

    def ways(self, dtype: jax.typing.DTypeLike, *, gpu: bool) -> dict[str, Callable[[], jax.Array]]:
        """Return compiled calls that compute the layer on the same random data, by name of the method.

        Methods that the device does not support are left out. Raises `ValueError` if the results differ.
        """
        keys = jax.random.split(jax.random.key(0), 5)
        wide, tall = (self.experts, 2 * self.features, self.hidden), (self.experts, self.hidden, self.features)
        gate_up, down = (
            (jax.random.normal(key, shape, jnp.float32) * shape[2] ** -0.5).astype(dtype)
            for key, shape in zip(keys, (wide, tall), strict=False)
        )
        x = jax.random.normal(keys[2], (self.hidden, self.tokens), jnp.float32).astype(dtype)
        # Expert j of token n is n * k + j: all experts get equally many tokens.
        ids = (jnp.arange(self.tokens)[None] * self.top_k + jnp.arange(self.top_k)[:, None]) % self.experts
        weights = jax.random.uniform(keys[3], ids.shape)

        def loop(way: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
            def call(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
                return way(_expert_of(gate_up, down), x, ids, weights, self.experts)

            return call

        def grouped(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
            return grouped_experts(x, ids, weights, [gate_up, down], activation="silu")

        functions = {"loop over all experts": loop(all_experts)}
        if not gpu:
            functions["blocks of used experts"] = loop(partial(used_experts, model_experts=self.experts))
        elif (reason := unsupported(dtype, (wide[1:], tall[1:]))) is None:
            functions["grouped products"] = grouped
        else:
            print(f"left out, grouped products: {reason}")
        calls = {name: partial(jax.jit(function), x, gate_up, down) for name, function in functions.items()}
        results = {name: call().astype(jnp.float32) for name, call in calls.items()}
        first = results["loop over all experts"]
        for name, result in results.items():
            difference = float(jnp.abs(result - first).max() / jnp.abs(first).max())
            if not difference <= TOLERANCE:
                raise ValueError(f"{name}: results differ by {difference:.2g} of the largest one ({self.name})")
        return calls


def _expert_of(gate_up: jax.Array, down: jax.Array) -> Expert:
    def expert(x: jax.Array, index: jax.Array) -> jax.Array:
        gate, up = jnp.split(matmul(gate_up[index], x), 2)
        return matmul(down[index], ACTIVATIONS["silu"](gate, up).astype(x.dtype))

    return expert
