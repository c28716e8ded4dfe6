"""The policy `cocoserve` on two devices. One device is empty at the start."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from prometheus_client import generate_latest
from serving_checks import TIMEOUT_S
from tiny_models import tiny_config, write_model
from transform_cases import Background

from amoeba_jax import LLM, SamplingParams
from serving.runtime.metrics import ServerMetrics
from serving.runtime.scheduling import Scheduling
from serving.runtime.scheduling_config import SchedulingConfig
from sharding.placement import Home, Placement

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

NUM_LAYERS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
ONE = Placement.uniform(Home(0, 1), NUM_LAYERS)
PROMPTS = np.random.default_rng(1).integers(3, 200, (4, 16)).tolist()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with one instance, on the first of two devices."""
    config = tiny_config("llama2") | {"num_hidden_layers": NUM_LAYERS, "max_position_embeddings": 2048}
    with LLM(
        write_model(config, tmp_path_factory.mktemp("models") / "llama2"),
        num_devices=2,
        placement=ONE.to_dict(),
        device_memory="16MiB",
        kv_cache_tokens=4096,
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        prefix_caching=False,
        progress=False,
        compile_cache=compile_cache,
    ) as llm:
        yield llm


def wait_for(what: Callable[[], bool]) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not what():
        assert time.monotonic() < give_up, "it never came to that"
        time.sleep(0.005)


def tokens(outputs: list) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("scale_out", [True, False])
def test_an_empty_device_takes_a_share_of_the_load(llm: LLM, scale_out: bool):
    """All requests get the tokens of an undisturbed run, and no request is preempted."""
    expected, before = tokens(llm.generate(PROMPTS, GREEDY)), llm.stats.preemptions
    metrics = ServerMetrics()
    settings = SchedulingConfig(
        "cocoserve",
        scale_out=scale_out,
        split_batch=1,
        vacancy_threshold=0.05,
        window_s=0.05,
        cool_down_s=1e6,  # allows only one change
        ttft_slo_s=None,
        tpot_slo_s=None,
    )
    scheduling = Scheduling(llm, settings, metrics)
    background = Background(llm, PROMPTS, GREEDY)
    kind = "scale_out" if scale_out else "replicate"
    done = f'amoeba:scaling_operations_total{{kind="{kind}",result="done"}} 1.0'
    wait_for(lambda: done in generate_latest(metrics.registry).decode() or bool(background.outputs))
    assert done in generate_latest(metrics.registry).decode()
    assert tokens(background.result()) == expected
    assert llm.stats.preemptions == before
    assert metrics.monitor is not None
    assert set(metrics.monitor.vacancy) == {0, 1}
    assert metrics.monitor.violations == 0, "there are no SLOs"
    assert llm.stats.placements == ()
    scheduling.close()
    if scale_out:
        assert [view.devices for view in llm.instances] == [(0,), (1,)]
        llm.scale_in(1)
    else:
        assert llm.placement().parallelism() == [2] * NUM_LAYERS
        llm.evict(range(NUM_LAYERS), 1)
    assert llm.placement() == ONE
