"""How many layers change between two steps."""

import pytest

from amoeba_jax.transform.switch_pace import SwitchPace, SwitchRates


@pytest.fixture(autouse=True)
def one_layer_at_a_time() -> None:
    """Not here: this is what is tested."""


def pace(rates: SwitchRates | None = None, layers: int | str = "auto", step_s: float | None = 0.1) -> SwitchPace:
    return SwitchPace(layers, step_s, rates or SwitchRates(), up=True)


def test_a_number_is_kept_whatever_steps_take():
    fixed = pace(layers=3)
    fixed.step_taken(99.0, 1000)
    assert fixed.num_layers(100) == 3


def test_it_begins_with_one_layer_and_takes_twice_as_many_while_steps_bear_it():
    auto = pace()
    taken = []
    for _ in range(4):
        taken.append(auto.num_layers(100))
        auto.switched(taken[-1] * 100)
        auto.step_taken(0.1, taken[-1] * 100)
    assert taken == [1, 2, 4, 8]


def test_a_step_that_takes_too_long_sets_the_limit():
    """8 layers made a step 0.1 s longer than 0.1 s: a fifth of that is bearable."""
    auto = pace()
    auto.switched(800)
    auto.step_taken(0.2, 800)
    assert auto.num_layers(100) == 1
    assert auto.num_layers(10) == 16
    auto.switched(160)
    assert auto.num_layers(10) == 16, "it does not grow any more"


def test_the_next_transition_begins_with_what_was_bearable():
    rates = SwitchRates()
    first = pace(rates)
    first.switched(400)
    first.step_taken(0.11, 400)
    assert pace(rates).num_layers(100) == 4
    assert pace(rates, step_s=0.2).num_layers(100) == 8, "steps twice as long bear twice as much"
    assert SwitchPace("auto", 0.1, rates, up=False).num_layers(100) == 1, "the other direction is not known"


def test_without_steps_before_it_takes_one_layer_first():
    assert pace(step_s=None).num_layers(100) == 1


def test_nothing_to_move_is_done_at_once():
    assert pace().num_layers(0) >= 1000
