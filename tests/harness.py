"""The one place where tests reach behind the public API of an `LLM`: its engine, its thread and its requests."""

from collections.abc import Callable
from typing import Any, TypeVar

from amoeba_jax import LLM
from amoeba_jax.engine.engine import Engine
from amoeba_jax.request_registry import RequestRegistry

T = TypeVar("T")
CALL_TIMEOUT_S = 300.0


def engine_of(llm: LLM) -> Engine:
    """The engine. Its state changes in the dispatcher thread: read it while nothing runs, or by `in_dispatcher`."""
    return llm._engine


def registry_of(llm: LLM) -> RequestRegistry:
    """The requests that have not ended."""
    return llm._registry


def in_dispatcher(llm: LLM, function: Callable[..., T], *args: Any) -> T:
    """Run a function in the thread that launches all steps, between two of them, and return what it returns."""
    return llm._dispatcher.call(function, *args).result(CALL_TIMEOUT_S)


def ledger_entries(llm: LLM) -> list[dict[Any, int]]:
    """Bytes of each owner, by device."""
    return [dict(ledger.entries) for ledger in engine_of(llm).cluster.ledgers]
