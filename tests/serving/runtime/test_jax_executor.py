"""The executor over a fake engine: its view of sequences, and the actions that it refuses."""

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from amoeba_jax import SamplingParams
from amoeba_jax.engine.engine import Engine
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.sampling.rows import SamplingRow
from serving.runtime.jax_executor import JaxExecutor, _running_request
from serving.runtime.waiting_view import waiting_request
from serving.scheduler import AmoebaConfig, Reject, ScaleDown, ScaleUp
from serving.scheduler.cocoserve.config import CocoServeConfig
from serving.scheduler.cocoserve.monitor import Monitor


def sequence(prompt: int, output: int = 0, computed: int = 0, in_flight: int = 0, **fields: Any) -> Sequence:
    made = Sequence(
        "a",
        tuple(range(prompt)),
        SamplingParams(max_tokens=64),
        cast(SamplingRow, None),
        lambda update: None,
        output=[1] * output,
        num_computed=computed,
        num_in_flight=in_flight,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("state", "left"),
    [
        ({"prompt": 40}, 40),
        ({"prompt": 40, "computed": 32}, 8),
        ({"prompt": 40, "computed": 40, "in_flight": 1}, 0),
        ({"prompt": 40, "output": 9, "computed": 48}, 0),
        ({"prompt": 40, "output": 9, "computed": 49, "in_flight": 1}, 0),
        # Preempted with 30 tokens of output, and started again.
        ({"prompt": 40, "output": 30, "computed": 0}, 69),
        ({"prompt": 40, "output": 30, "computed": 48}, 21),
    ],
)
def test_tokens_that_are_computed_again_count_as_uncomputed(state: dict[str, int], left: int):
    assert _running_request("a", sequence(**state)).uncomputed_tokens == left


def test_only_waiting_counts_as_waiting():
    """The request waited for 5 s, ran for 300 s, was preempted, and has waited for 2 s since."""
    now = time.monotonic()
    preempted = sequence(8)
    preempted.arrival = preempted.waiting_since = now - 307
    preempted.queued_s = 5.0
    preempted.wait_again()
    view = waiting_request("a", preempted)
    assert view.waited_s(now + 2) == pytest.approx(7, abs=0.1)
    assert view.arrival_s == now - 307
    preempted.start()
    assert _running_request("a", preempted).queued_s == pytest.approx(5, abs=0.1)


def executor(*degrees: int) -> JaxExecutor:
    """Return an executor over fake, idle instances of these degrees."""
    instances, device = [], 0
    for tp in degrees:
        instances.append(SimpleNamespace(id=device, tp=tp, running=[]))
        device += tp
    engine = SimpleNamespace(
        cluster=SimpleNamespace(
            plan=SimpleNamespace(
                degrees=[1, 2, 4],
                buckets=lambda tp: SimpleNamespace(max_num_seqs=8),
                capacity_tokens=lambda tp, released: 100 * tp,
            ),
            sub_meshes=SimpleNamespace(devices=()),
        ),
        config=SimpleNamespace(tensor_parallel_size=1),
        capacity_tokens=lambda tp: 100 * tp,
        instances=instances,
    )
    return JaxExecutor(
        cast(Engine, engine), 1, lambda *done: None, lambda *done: None, Monitor(CocoServeConfig(), AmoebaConfig())
    )


@pytest.mark.parametrize("action", [ScaleUp((0, 1, 2, 3), 4), ScaleDown((4, 5), 2)])
def test_a_transformation_to_the_degree_that_is_there_is_refused(action: ScaleUp | ScaleDown):
    outcome = executor(4, 2).apply(action)
    assert not outcome.accepted
    assert f"have degree {action.degree} already" in outcome.detail


@pytest.mark.parametrize(
    "action",
    [
        ScaleUp((0, 1), 2, running="sleep"),  # type: ignore[arg-type]
        Reject("a", "later", "why"),  # type: ignore[arg-type]
        object(),
        None,
    ],
)
def test_what_cannot_be_carried_out_is_refused_and_ends_nothing(action):
    outcome = executor(1, 1).apply(action)
    assert not outcome.accepted
    assert outcome.detail
