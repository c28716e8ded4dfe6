"""A short run of the engine, and a simulation of the same engine."""

import asyncio
from pathlib import Path

import pytest
from tiny_models import tiny_model
from typer.testing import CliRunner

from amoeba_jax import LLM
from serving.bench.workload import WorkloadConfig
from serving.cli import app
from serving.commands.calibrate import _switch_beside, calibrate
from serving.simulator.calibration import Calibration
from serving.simulator.errors import SimulationError
from serving.simulator.settings import SimulationConfig
from serving.simulator.simulate import simulate


@pytest.mark.slow
def test_an_engine_is_timed_and_then_simulated(tmp_path: Path, compile_cache: str, quick_compile: None):
    with LLM(
        tiny_model("llama2", tmp_path / "model"),
        num_devices=2,
        device_memory="8MiB",
        kv_cache_tokens=128,
        page_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        segment_layers=2,
        progress=False,
        compile_cache=compile_cache,
    ) as llm:
        found = calibrate(llm, layers_per_step=1)
        beside = asyncio.run(_switch_beside(llm, 1, 2, 2))
        assert beside is not None, "requests held pages when the instances merged"
        assert min(beside) > 0
        llm.transform(1)
        assert [view.tensor_parallel_size for view in llm.instances] == [1, 1]
        assert found.capacity_tokens == {tp: llm._engine.capacity_tokens(tp) for tp in (1, 2)}
    assert all(seconds > 0 for table in found.decode_s.values() for seconds in table.values())
    assert all(seconds > 0 for table in found.prompt_s.values() for seconds in table.values())
    assert found.crowding[2] >= 1.0
    assert found.prompt_crowding[2] >= 1.0
    assert 0 <= found.latency_s < 10 * min(found.prompt_s[1].values())
    assert found.up_layer_s > 0
    assert found.down_layer_s > 0
    assert found.page_layer_s >= 0
    path = tmp_path / "calibration.json"
    found.save(path)
    assert Calibration.load(path) == found

    load = WorkloadConfig(num_prompts=20, request_rate=5.0, random_input_len=16, random_output_len=8)
    config = SimulationConfig("tiny", load, num_devices=2, calibration=found)
    result = simulate(config, "amoeba")
    assert result.completed.all()
    alone_s = found.latency_s + found.prompt_s[1][min(found.prompt_s[1])]
    assert result.ttft_s.min() == pytest.approx(alone_s, rel=1.0)
    with pytest.raises(SimulationError, match="policy 'seesaw' is no policy of the engine"):
        simulate(config, "seesaw")


MEASURED = Calibration(
    model="tiny",
    num_devices=2,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    page_size=16,
    max_model_len=512,
    num_layers=4,
    layers_per_step=2,
    capacity_tokens={1: 256, 2: 768},
    max_requests={1: 2, 2: 4},
    decode_s={1: {1: 0.010, 2: 0.012}, 2: {1: 0.015, 2: 0.016, 4: 0.020}},
    prompt_s={1: {16: 0.02, 64: 0.05}, 2: {16: 0.02, 64: 0.03}},
    prompts_s={1: {}, 2: {16: 0.025}},
    few_rows=2,
    latency_s=0.003,
    context_s={1: 0.0, 2: 0.0},
    crowding={2: 1.5},
    prompt_crowding={2: 2.0},
    up_layer_s=0.01,
    down_layer_s=0.02,
)


def test_a_calibration_is_saved_and_simulated(tmp_path: Path):
    path = tmp_path / "calibration.json"
    MEASURED.save(path)
    assert Calibration.load(path) == MEASURED
    one = WorkloadConfig(num_prompts=1, random_input_len=64, random_output_len=11)
    alone = simulate(SimulationConfig("tiny", one, num_devices=2, calibration=Calibration.load(path)), "amoeba")
    assert alone.ttft_s[0] == pytest.approx(0.053)
    assert alone.tpot_s[0] == pytest.approx(0.010)
    two = WorkloadConfig(num_prompts=2, random_input_len=64, random_output_len=11)
    beside = simulate(SimulationConfig("tiny", two, num_devices=2, calibration=MEASURED), "amoeba")
    assert 0.010 < beside.tpot_s.min() <= beside.tpot_s.max() <= 0.015 + 1e-9, "busy neighbours cost half of a step"
    assert beside.ttft_s.max() == pytest.approx(2 * 0.05 + 0.003), "and twice the time of a prompt's step"
    long = WorkloadConfig(num_prompts=1, random_input_len=400, random_output_len=11)
    merged = simulate(SimulationConfig("tiny", long, num_devices=2, calibration=MEASURED), "amoeba")
    assert merged.counters["scale_ups"] == 1
    assert merged.ttft_s[0] == pytest.approx(4 * 0.01 + 7 * 0.03, rel=0.2)


def test_what_a_calibration_says_cannot_be_given(tmp_path: Path):
    path = tmp_path / "calibration.json"
    MEASURED.save(path)
    arguments = ["simulate", "--calibration", str(path), "--dataset-name", "random", "--num-prompts", "2"]
    lengths = ["--random-input-len", "16", "--random-output-len", "4", "--policies", "amoeba"]
    assert CliRunner().invoke(app, arguments + lengths).exit_code == 0
    result = CliRunner().invoke(app, [*arguments, "--max-num-seqs", "64", "--device", "H20"])
    assert result.exit_code == 2
    assert "--device, --max-num-seqs cannot be combined with --calibration" in " ".join(result.output.split())
    result = CliRunner().invoke(app, [*arguments, "--num-devices", "4"])
    assert result.exit_code == 2
    assert "num_devices=4 is more than the 2 devices of the calibration" in " ".join(result.output.split())


def test_a_damaged_calibration_says_so(tmp_path: Path):
    path = tmp_path / "calibration.json"
    path.write_text('{"version": 7}')
    with pytest.raises(SimulationError, match="version=7 must be 2: calibrate again"):
        Calibration.load(path)
