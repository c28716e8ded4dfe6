"""A process cannot hold all programs. The store drops the least recently used before the limit is reached."""

import gc
import logging
import sys

import jax
import jax.numpy as jnp
import pytest

from amoeba_jax.cpu_cache import ProgramStore, program_store


def test_programs_are_made_once():
    store = ProgramStore[object]()
    made = [store.get("a", object) for _ in range(3)]
    assert made[0] is made[1] is made[2]
    assert ("a" in store, "b" in store, len(store), store.num_added) == (True, False, 1, 1)


def test_least_recently_used_go_first(caplog: pytest.LogCaptureFixture):
    """Each program takes 10 mappings, and the limit is 1,000. With 91 programs none is dropped, with 92 a quarter."""
    store = ProgramStore[int](lambda: 10 * len(store), 1000)
    with caplog.at_level(logging.WARNING):
        for number in range(91):
            store.add(number, number)
            store.get(0, lambda: -1)
        assert not caplog.records
        store.add(91, 91)
    assert len(store) == 69
    assert 0 in store, "it is used all the time"
    assert [number in store for number in (1, 23, 24)] == [False, False, True]
    assert "92 programs took 920 of the 1000 memory mappings" in caplog.text
    assert store.get(5, lambda: 555) == 555
    assert store.num_added == 93


@pytest.mark.parametrize("of_a_program", [80, 450, 9600])
def test_mappings_are_counted_as_rarely_as_is_safe(of_a_program: int):
    """For any size, the store notices the limit within one program, drop after drop.

    If programs are small, only few additions count the mappings.
    """
    counted = 0

    def count() -> int:
        nonlocal counted
        counted += 1
        return of_a_program * len(store)

    store, full = ProgramStore[int](count, 65530), program_store._FULL_SHARE * 65530
    for _ in range(5):
        present = -1
        while len(store) > present:
            present = len(store)
            assert of_a_program * present < full
            store.add(store.num_added, 0)
        assert of_a_program * (present + 1) >= full, "there was room"
    if of_a_program == 80:
        assert counted < store.num_added / 8


def test_mappings_of_unlike_programs():
    """Small programs come first, and then only large ones."""
    store = ProgramStore[int](lambda: sum(store), 65530)
    sizes = [*[60] * 600, *[460] * 200]
    for number, size in enumerate(sizes):
        store.add(number, size)
        assert sum(store) < 0.93 * 65530
    assert len(store) < len(sizes)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mappings are counted on Linux")
def test_dropped_programs_give_their_mappings_back():
    def compiled(number: int) -> jax.stages.Compiled:
        def function(x: jax.Array) -> jax.Array:
            for step in range(6):
                x = jnp.tanh(x @ x + number * step) * jax.nn.softmax(x)
            return x

        return jax.jit(function).lower(jnp.ones((8, 8))).compile()

    count = program_store._num_mappings
    before = count()
    store = ProgramStore[jax.stages.Compiled](max_mappings=int((before + 1000) / program_store._FULL_SHARE) + 1)
    most = 0
    for number in range(400):
        store.add(number, compiled(number))
        most = max(most, count())
        if len(store) < store.num_added:
            break
    assert most > before + 800, "programs take mappings"
    assert count() < most - (most - before) / 8
    assert len(store) == store.num_added - store.num_added // 4
    store = None  # type: ignore[assignment]
    gc.collect()
    assert count() < before + (most - before) / 2


def test_mappings_of_others_do_not_empty_it():
    store = ProgramStore[int](lambda: 990, 1000)
    for number in range(100):
        store.add(number, number)
    assert len(store) > 30, "dropping more of them makes no room"


def test_without_a_limit_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program_store, "_max_mappings", lambda: None)
    store = ProgramStore[int](lambda: 1 << 40)
    for number in range(100):
        store.add(number, number)
    assert len(store) == 100
