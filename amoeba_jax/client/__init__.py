"""Clients of a server: `Client`, and `AsyncClient` for asyncio. They do not import JAX."""

from amoeba_jax.client.aio import AsyncClient
from amoeba_jax.client.connection import Retries
from amoeba_jax.client.results import (
    Chunk,
    Cluster,
    Generation,
    Instance,
    ModelInfo,
    PlacementChange,
    Transformation,
    Usage,
)
from amoeba_jax.client.sync import Client

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "Cluster",
    "Generation",
    "Instance",
    "ModelInfo",
    "PlacementChange",
    "Retries",
    "Transformation",
    "Usage",
]
