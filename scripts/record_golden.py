"""Record what `transformers` computes for the tests' tiny models: tests/golden/*.npz. Needs torch.

Run after changing tests/tiny_models.py: `python scripts/record_golden.py`.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from tiny_models import TINY_CONFIGS, ragged_prompts, tiny_config, tiny_model  # noqa: E402

NEW_TOKENS = 12


def record(name: str, directory: Path) -> None:
    """Logits of the last prompt positions and the greedy continuation of every prompt, f32 on CPU."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(name, directory), dtype=torch.float32)
    model.eval()
    arrays = {}
    for index, prompt in enumerate(ragged_prompts(tiny_config(name)["vocab_size"])):
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                logits = model(torch.tensor([tokens])).logits[0]
                tokens.append(int(logits[-1].argmax()))
            logits = model(torch.tensor([tokens[:-1]])).logits[0]
        arrays[f"tokens_{index}"] = np.array(tokens, np.int32)
        arrays[f"logits_{index}"] = logits[-NEW_TOKENS - 4 :].numpy()
    target = ROOT / "tests" / "golden" / f"{name}.npz"
    target.parent.mkdir(exist_ok=True)
    np.savez_compressed(target, **arrays)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for name in TINY_CONFIGS:
            record(name, Path(scratch))
