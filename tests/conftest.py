"""Shared set-up: virtual CPU devices, run-time shape checks, real data where it is present."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("NPROC", "16")

import hypothesis
import jax
import pytest
from quick_compiling import compiling_quickly

jax.config.update("jax_num_cpu_devices", 8)

# Property tests have no limit of time for an example: machines that run tests may be slow or busy.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-shape-checks", action="store_true", help="run without jaxtyping's run-time checks")
    parser.addoption("--slow-part", metavar="I/N", help="of the slow tests, run only every N-th, from the I-th on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take minutes come first: processes that share the tests then end at the same time. Of those, the ones
    with many steps: others then have the programs that are fast to run, too. With `--slow-part`, leave out the other
    parts of the slow tests. All parts together are all of them."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        used = {name for mark in item.iter_markers("usefixtures") for name in mark.args}
        return not item.path.is_relative_to(ROOT / "tests" / "transform"), "quick_steps" not in used

    items.sort(key=place)
    if (chosen := config.getoption("--slow-part")) is None:
        return
    part, num_parts = (int(number) for number in chosen.split("/"))
    if not 0 <= part < num_parts:
        raise pytest.UsageError(f"--slow-part={chosen} must be from 0/{num_parts} to {num_parts - 1}/{num_parts}")
    slow = [item for item in items if item.get_closest_marker("slow")]
    left_out = {item for index, item in enumerate(slow) if index % num_parts != part}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def modules_with_shapes() -> list[str]:
    """Modules with shapes in their annotations. In all others pyright is enough, and checks at run time would take a
    quarter of the time of all tests.
    """
    packages = ("amoeba_jax", "sharding", "kvcache", "pallas_kernels")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    with_shapes = [file for file in files if "from jaxtyping import" in file.read_text("utf-8")]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in with_shapes]


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--no-shape-checks"):
        from jaxtyping import install_import_hook

        install_import_hook(modules_with_shapes(), "beartype.beartype")


def freeze_heap() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not go through it again and again.

    Tracing programs makes objects by the hundred thousand, none of which are garbage until it is through: by the usual
    thresholds a twentieth of the time of tests of transformations was spent looking for some. What tests want collected
    they collect, and modules begin with a collection.
    """
    gc.set_threshold(1_000_000, 50, 1000)
    freeze_heap()


@pytest.fixture(scope="module", autouse=True)
def what_is_there_stays() -> None:
    """Nor what earlier modules have left in JAX's caches: after a thousand tests that takes a second, and every engine
    that is closed collects garbage."""
    freeze_heap()


@pytest.fixture(scope="session", autouse=True)
def compile_between_steps() -> Iterator[None]:
    """Engines of tests compile between steps unless they say otherwise: requests that were made at once are served at
    once, whatever is compiled by then. test_compile_beside.py is about the other way, and servers that tests start in
    processes of their own have it."""
    from amoeba_jax import LLM  # when the hook for shape checks is there

    make = LLM.__init__

    def __init__(self: LLM, *args: Any, **settings: Any) -> None:
        make(self, *args, **{"compile_beside": False, **settings})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "__init__", __init__)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real models, traces and texts that are no part of the project."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared data folder (../shared/data) is not present")
    return SHARED_DATA


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """`compiling_quickly` in this module: for what happens around programs. What they compute is tested as users
    compile them.
    """
    with compiling_quickly():
        yield


@pytest.fixture(scope="module")
def quick_steps(quick_compile: None) -> Iterator[None]:
    """`quick_compile` but for steps of layers, of which LLVM optimizes somewhat more: they take half as long again to
    compile, and less than half of the time to run. For modules whose time goes into steps rather than into compiling.
    """
    from amoeba_jax.cpu_cache import Options, few_kernels
    from amoeba_jax.programs import program_specs

    def options(platform: str) -> Options:
        return few_kernels(platform) | {"xla_backend_optimization_level": "1"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_specs, "step_options", options)
        yield


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One compilation cache for the session and all its processes: equal programs of different tests compile once."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "amoeba-cache" / "executables"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(path)
