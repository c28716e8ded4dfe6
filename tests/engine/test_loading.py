"""Loading keeps no second copy of the model in host memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_config, write_model

_SCRIPT = """
import json, resource, sys
from amoeba_jax import LLM
tiny, large, devices = sys.argv[1], sys.argv[2], int(sys.argv[3])
settings = dict(num_devices=devices, device_memory="700MiB", compile_cache="", progress=False, max_num_seqs=1)
settings["max_model_len"] = 16
LLM(tiny, **settings | {"device_memory": "16MiB"}).close()  # imports, JAX and its threads are not the load
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
from amoeba_jax.engine.cluster import Cluster
marks = []
build = Cluster._build  # makes the KV cache: by then the weights are in place
Cluster._build = lambda self, tp: (marks.append(peak()), build(self, tp))[1]
with LLM(large, **settings) as llm:
    weights = llm._engine.cluster.weights.num_bytes * devices
print(json.dumps({"peak": marks[0] - before, "weights": weights}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux reports it")
@pytest.mark.parametrize("devices", [1, 4])
def test_peak_host_memory_while_loading(tmp_path: Path, devices: int):
    """Peak resident memory, the mapped file's pages included, against the weights kept on all devices."""
    tiny = write_model(tiny_config("llama2"), tmp_path / "tiny")
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 16000}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
    large = write_model(tiny_config("llama2") | shape | heads, tmp_path / "large")
    environment = os.environ | {"NPROC": "16"}
    command = [sys.executable, "-c", _SCRIPT, str(tiny), str(large), str(devices)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["weights"] > 300e6 * devices
    assert figures["peak"] <= 1.2 * figures["weights"], figures
