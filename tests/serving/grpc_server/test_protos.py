"""The generated modules match the .proto files."""

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GENERATED = ROOT / "amoeba_jax" / "client" / "_proto" / "inference_pb2_grpc.py"


@pytest.mark.skipif(find_spec("grpc_tools") is None, reason="needs grpcio-tools")
def test_generated_modules_are_up_to_date():
    if version("grpcio-tools") not in GENERATED.read_text():
        pytest.skip("another version of grpcio-tools than the one that wrote them")
    check = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate_protos.py"), "--check"], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr
