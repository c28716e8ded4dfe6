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


def switch(auto: SwitchPace, layers: int, layer_bytes: int, seconds: float) -> None:
    """Layers switch, and the step behind them takes that long."""
    auto.switched(layers * layer_bytes)
    auto.step_taken(seconds, layers * layer_bytes)


def test_it_begins_with_one_layer_and_takes_twice_as_many_while_steps_bear_it():
    auto = pace()
    taken = []
    for _ in range(4):
        taken.append(auto.num_layers(100))
        switch(auto, taken[-1], 100, 0.1)
    assert taken == [1, 2, 4, 8]


def test_a_step_that_takes_too_long_sets_the_limit_until_two_do_not():
    """8 layers made a step 0.1 s longer than 0.1 s: a fifth of that is bearable."""
    auto = pace()
    switch(auto, 8, 100, 0.2)
    assert auto.num_layers(100) == 1
    assert auto.num_layers(10) == 16
    switch(auto, 16, 10, 0.1)
    assert auto.num_layers(10) == 3, "the step before took too long"
    switch(auto, 3, 10, 0.1)
    assert auto.num_layers(10) == 6


def test_a_step_that_waits_for_the_launch_of_the_next_switch_says_what_that_one_takes():
    auto = pace()
    auto.switched(100)
    auto.switched(400)
    auto.step_taken(0.14, 100)
    assert auto.num_layers(100) == 2, "4 layers made it 0.04 s longer, where 0.02 s are bearable"


def test_the_next_transition_goes_on_with_what_was_bearable():
    """Behind one layer at first, and no more than twice as many from one step to the next."""
    rates = SwitchRates()
    switch(pace(rates), 4, 100, 0.11)
    for step_s, expected in ((0.1, [1, 2, 4, 4]), (0.2, [1, 2, 4, 8, 8])):
        known, taken = pace(rates, step_s=step_s), []
        for _ in expected:
            taken.append(known.num_layers(100))
            known.switched(taken[-1] * 100)
        assert taken == expected, "steps twice as long bear twice as much"
    other = SwitchPace("auto", 0.1, rates, up=False)
    other.switched(100)
    assert other.num_layers(100) == 1, "the other direction is not known"


def test_without_steps_before_it_takes_one_layer_first_and_then_twice_as_many():
    auto, taken = pace(step_s=None), []
    for _ in range(4):
        taken.append(auto.num_layers(100))
        switch(auto, taken[-1], 100, 9.0)
    assert taken == [1, 2, 4, 8]


def test_nothing_to_move_is_done_at_once():
    assert pace().num_layers(0) >= 1000
