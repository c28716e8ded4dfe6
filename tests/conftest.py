"""Shared set-up: virtual CPU devices, run-time shape checks, and real data if it is present."""

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

# Examples of property tests have no time limit, because machines may be slow or busy.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-shape-checks", action="store_true", help="run without jaxtyping's run-time checks")
    parser.addoption("--slow-part", metavar="I/N", help="of the slow tests, run only every N-th, from the I-th on")


def leave_one_case_by_default(items: list[pytest.Item]) -> None:
    """Mark all cases of a test with the mark `first_by_default` as slow, except for the first case that is not slow."""
    seen = set()
    for item in items:
        if item.get_closest_marker("first_by_default") and not item.get_closest_marker("slow"):
            name = item.nodeid.split("[")[0]
            if name in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(name)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests, and select a part of the slow tests if `--slow-part` is given.

    Files that take minutes come first, so that all worker processes end at about the same time. Among these, files with
    many steps come first: they compile programs that are fast to run, and later files find them in the cache.
    """

    def place(item: pytest.Item) -> tuple[bool, bool]:
        used = {name for mark in item.iter_markers("usefixtures") for name in mark.args}
        return not item.path.is_relative_to(ROOT / "tests" / "transform"), "quick_steps" not in used

    leave_one_case_by_default(items)
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
    """Return the modules with array shapes in their annotations.

    Only these are checked at run time. Checks of all other modules would take a quarter of the time of all tests, and
    pyright covers them.
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
    """Collect garbage rarely, and never visit imported objects again.

    Tracing a program creates hundreds of thousands of objects that live until it ends. With the default thresholds, 5%
    of the time of the transformation tests was garbage collection. Tests that need a collection run it themselves, and
    every module begins with one.
    """
    gc.set_threshold(1_000_000, 50, 1000)
    freeze_heap()


@pytest.fixture(scope="module", autouse=True)
def freeze_heap_of_earlier_modules() -> None:
    """Exclude JAX's caches of earlier modules from garbage collection.

    After a thousand tests a collection would take a second, and every engine runs one when it closes.
    """
    freeze_heap()


@pytest.fixture(scope="session", autouse=True)
def compile_between_steps() -> Iterator[None]:
    """Let engines compile between steps by default, so that steps do not depend on the progress of a compile thread.

    `test_compile_beside.py` tests compilation in parallel with steps, and so do servers in separate processes.
    """
    from amoeba_jax import LLM  # imported here, after the import hook for shape checks is installed

    make = LLM.__init__

    def __init__(self: LLM, *args: Any, **settings: Any) -> None:
        make(self, *args, **{"compile_beside": False, **settings})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "__init__", __init__)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real models, traces and texts, which are not part of the project. Skip if it is missing."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared data folder (../shared/data) is not present")
    return SHARED_DATA


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """Compile quickly in this module. For tests of everything except the numerical results of programs."""
    with compiling_quickly():
        yield


@pytest.fixture(scope="module")
def quick_steps(quick_compile: None) -> Iterator[None]:
    """Compile quickly, but optimize the steps of layers a little: they compile 1.5 times as long and run more than
    twice as fast. For modules that spend more time in steps than in compilation.
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
    """Return the compile cache of the session and all its processes: equal programs compile once.

    The environment variable `AMOEBA_TEST_CACHE` names a directory that keeps programs between sessions.
    """
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "amoeba-cache" / "executables"
    if kept := os.environ.get("AMOEBA_TEST_CACHE"):
        path = Path(kept)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(path)
