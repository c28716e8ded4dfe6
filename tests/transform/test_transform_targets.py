"""Devices that count as being transformed, with stand-ins for cluster and transitions."""

from types import SimpleNamespace
from typing import Any, cast

from amoeba_jax.transform.change import Change
from amoeba_jax.transform.changes import Changes
from amoeba_jax.transform.options import TransformOptions


def instance(first: int, tp: int) -> Any:
    group = SimpleNamespace(device_indices=tuple(range(first, first + tp)))
    return SimpleNamespace(id=first, tp=tp, attention_degree=tp, group=group)


def transformations(*instances: Any) -> Changes:
    cluster = SimpleNamespace(instances=instances)
    return Changes(cast(Any, cluster), cast(Any, None))


def begin(made: Changes, degree: int, devices: tuple[int, ...], *changing: tuple[int, ...]) -> Change:
    """Add a transformation of `devices`. The groups in `changing` have begun."""
    one = Change(TransformOptions(degree, devices))
    one.transitions = [cast(Any, SimpleNamespace(devices=group)) for group in changing]
    made._present.append(one)
    return one


def test_a_group_that_has_ended_is_not_busy_until_the_last_group_ends():
    made = transformations(instance(0, 2), instance(2, 2), instance(4, 1), instance(5, 1))
    begin(made, 2, (0, 1, 2, 3, 4, 5), (2, 3))
    assert made.targets() == {2: 2, 3: 2, 4: 2, 5: 2}


def test_a_group_whose_last_step_still_runs_is_busy():
    made = transformations(instance(0, 2), instance(2, 2))
    begin(made, 2, (0, 1, 2, 3), (0, 1))
    assert made.targets() == {0: 2, 1: 2}


def test_groups_that_will_not_begin_are_not_busy():
    """Another group of the same transformation has failed."""
    made = transformations(instance(0, 1), instance(1, 1), instance(2, 1), instance(3, 1))
    one = begin(made, 2, (0, 1, 2, 3), (2, 3))
    one.fail(RuntimeError("injected"), "as it was")
    assert made.targets() == {2: 2, 3: 2}


def test_a_transformation_that_awaits_programs_makes_nothing_busy():
    made = transformations(instance(0, 1), instance(1, 1))
    one = begin(made, 2, (0, 1))
    one.update_programs(1, None)
    assert made.targets() == {}
