"""An engine for the tests of transformations, and that engine between two of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_checks import check_idle
from tiny_models import tiny_model
from transform_cases import SHARED, make

from amoeba_jax import LLM
from amoeba_jax.instances.pace import Pace
from amoeba_jax.transform.switch_pace import SwitchPace


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with make(directory, compile_cache, **SHARED) as llm:
        yield llm


@pytest.fixture(autouse=True)
def one_layer_at_a_time() -> Iterator[None]:
    """`auto` takes one layer a step here, however long steps take: so every state between two layouts is run in."""

    def num_layers(pace: SwitchPace, layer_bytes: int) -> int:
        return 1 if pace._layers_per_step == "auto" else pace._layers_per_step

    with pytest.MonkeyPatch.context() as patch:  # one of its own: tests undo theirs before `idle` ends
        patch.setattr(SwitchPace, "num_layers", num_layers)
        yield


@pytest.fixture(autouse=True)
def always_in_step() -> Iterator[None]:
    """Instances get in step before they change together, however short their steps are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amoeba_jax.transform.in_step._LEAST_STEP_S", 0.0)
        yield


@pytest.fixture(autouse=True)
def launched_ahead() -> Iterator[None]:
    """Steps are launched ahead at once, however long the first ones took: by hand, `advance` launches all there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "expected", lambda *_: None)
        yield


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """The engine as 4 x TP1 without requests, and found so afterwards, with no page lost."""
    yield llm
    if any(view.tensor_parallel_size > 1 for view in llm.instances):
        llm.transform(1)
    check_idle(llm)
