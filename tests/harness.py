"""Access of tests to the engine, the thread and the requests behind an `LLM`. No other file uses private attributes for
this."""

from collections.abc import Callable
from typing import Any, TypeVar

from amoeba_jax import LLM
from amoeba_jax.engine.engine import Engine
from amoeba_jax.request_registry import RequestRegistry

T = TypeVar("T")
CALL_TIMEOUT_S = 300.0


def engine_of(llm: LLM) -> Engine:
    """Return the engine. Read its state only while idle, or in `in_dispatcher`: another thread changes it."""
    return llm._engine


def registry_of(llm: LLM) -> RequestRegistry:
    """Return the registry of unfinished requests."""
    return llm._registry


def in_dispatcher(llm: LLM, function: Callable[..., T], *args: Any) -> T:
    """Run a function between two steps, in the dispatcher thread. Return its result."""
    return llm._dispatcher.call(function, *args).result(CALL_TIMEOUT_S)


def ledger_entries(llm: LLM) -> list[dict[Any, int]]:
    """Return the bytes of each owner, by device."""
    return [dict(ledger.entries) for ledger in engine_of(llm).cluster.ledgers]
