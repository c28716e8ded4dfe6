"""Plot of a run."""

import sys
from pathlib import Path

import pytest
from bench_records import make_run, make_samples

from amoeba_jax.errors import ConfigError
from serving.bench.cluster_watch import ClusterWatch
from serving.bench.options import OutputConfig
from serving.bench.plot import degree_steps, draw_run, save_plot

SAMPLES = make_samples((0.5, "1111"), (3.0, "112"), (5.0, "4"), (9.0, "1111"))


def test_degrees_stack_up_to_all_devices():
    times, devices = degree_steps(SAMPLES, 20.0)
    assert times == [0.0, 3.0, 5.0, 9.0, 20.0]
    assert devices == {1: [4, 2, 0, 4, 4], 2: [0, 2, 0, 0, 0], 4: [0, 0, 4, 0, 0]}


def test_picture_has_three_panels_with_every_class(tmp_path: Path):
    pytest.importorskip("matplotlib")
    figure = draw_run(make_run(30, ClusterWatch(SAMPLES)))
    tokens, waits, degrees = figure.axes
    assert {"short", "long", "failed"} == {text.get_text() for text in waits.get_legend().get_texts()}
    assert {"TP1", "TP2", "TP4"} == {text.get_text() for text in degrees.get_legend().get_texts()}
    assert tokens.get_xlim() == waits.get_xlim() == (0, 20)
    save_plot(make_run(30, ClusterWatch(SAMPLES)), tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_picture_of_nothing_says_so(tmp_path: Path):
    pytest.importorskip("matplotlib")
    run = make_run(0, ClusterWatch(problem="PERMISSION_DENIED: not the admin's"))
    assert draw_run(run).axes[2].texts[0].get_text() == "no samples of instances"
    with pytest.raises(ConfigError, match=r"run\.nonsense cannot be written"):
        save_plot(run, tmp_path / "run.nonsense")


def test_missing_matplotlib_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'amoeba-jax\[plots\]'"):
        OutputConfig(plot=tmp_path / "run.png")
