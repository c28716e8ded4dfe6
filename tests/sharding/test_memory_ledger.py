"""Memory sizes as text, and the ledger that holds them against a budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.errors import MemoryBudgetError
from sharding.ledger import Ledger, format_bytes, parse_bytes

GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * GIB),
        ("512 MiB", 512 * MIB),
        (" 1.5gib ", 3 * GIB // 2),
        ("1.5GB", 1_500_000_000),
        ("3kb", 3000),
        ("2TiB", 2048 * GIB),
        ("17 B", 17),
        ("0", 0),
        (12345, 12345),
        ("98765", 98765),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1,5GiB", "1.GiB", "2 XiB", "1e9", "1 GiB x", "lots", -5])
def test_what_is_no_size_is_refused_with_its_value(text):
    with pytest.raises(MemoryBudgetError, match="is not a memory size: write bytes, or a number with MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 * MIB, "5.0 MiB"),
        (5 * GIB // 2, "2.50 GiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_are_written(size, text):
    assert format_bytes(size) == text


@given(st.integers(0, 1 << 44))
def test_written_sizes_read_back_to_what_was_shown(size):
    back = parse_bytes(format_bytes(size))
    assert abs(back - size) <= max(1, 0.06 * size)


def test_budget_is_shared_by_buffers_and_reservations():
    ledger = Ledger(100)
    ledger.add("ffn weights", 30, layer=0)
    ledger.add("ffn weights", 20, layer=0)
    ledger.add("ffn weights", 5, layer=1)
    ledger.reserve("activations", 25)
    assert (ledger.live_bytes, ledger.free_bytes) == (55, 20)
    assert ledger.entries == {(0, "ffn weights"): 50, (1, "ffn weights"): 5}
    ledger.add("KV cache", 20)
    assert ledger.free_bytes == 0


def test_buffer_that_does_not_fit_is_refused_and_changes_nothing():
    ledger = Ledger(10 * MIB)
    ledger.add("embedding", 4 * MIB)
    ledger.reserve("activations", 2 * MIB)
    with pytest.raises(MemoryBudgetError, match=r"KV cache needs 5.0 MiB but only 4.0 MiB of the 10.0 MiB"):
        ledger.add("KV cache", 5 * MIB, layer=3)
    assert ledger.entries == {(None, "embedding"): 4 * MIB}
    assert ledger.free_bytes == 4 * MIB


def test_reservation_replaces_the_one_of_the_same_name():
    ledger = Ledger(100)
    ledger.reserve("activations", 80)
    ledger.reserve("activations", 90)
    ledger.reserve("staging", 10)
    assert ledger.reserved == {"activations": 90, "staging": 10}
    assert ledger.free_bytes == 0


def test_reservation_that_does_not_fit_is_refused_and_changes_nothing():
    ledger = Ledger(100)
    ledger.add("embedding", 40)
    ledger.reserve("activations", 50)
    with pytest.raises(
        MemoryBudgetError, match=r"activations need 70 B but only 60 B of the 100 B.*max_num_batched_tokens"
    ):
        ledger.reserve("activations", 70)
    assert ledger.reserved == {"activations": 50}, "the old reservation stands"
    assert ledger.free_bytes == 10


def test_budgets_of_two_devices_are_apart():
    first, second = Ledger(10), Ledger(10)
    first.add("embedding", 10)
    first.reserve("nothing", 0)
    assert second.free_bytes == 10
