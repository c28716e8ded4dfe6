"""Shared set-up: virtual CPU devices, run-time shape checks, real data where it is present."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("NPROC", "16")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-shape-checks", action="store_true", help="run without jaxtyping's run-time checks")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--no-shape-checks"):
        from jaxtyping import install_import_hook

        # Where shapes are. Settings and requests check themselves, and their tests hand in wrong types.
        packages = ["amoeba_jax.models", "amoeba_jax.engine", "sharding", "kvcache", "pallas_kernels"]
        install_import_hook(packages, "beartype.beartype")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real models, traces and texts that are no part of the project."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared data folder (../shared/data) is not present")
    return SHARED_DATA


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """LLVM optimizes little in this module: programs take two thirds of the time to compile. For what happens around
    programs; what they compute is tested as users compile them.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One compilation cache for the session and all its processes: equal programs of different tests compile once."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "executables"
    path.mkdir(mode=0o700, exist_ok=True)
    return str(path)
