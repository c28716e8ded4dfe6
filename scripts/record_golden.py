"""Record results of `transformers` for the models of the tests in tests/golden. Needs torch.

Run `python scripts/record_golden.py` after a change of tests/tiny_models.py or tests/chat_prompts.py. With names of
tiny models, it records only these.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from amoeba_jax.checkpoint import ensure_default_model
from amoeba_jax.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from chat_prompts import CHAT_PROMPTS  # noqa: E402
from tiny_models import TINY_CONFIGS, ragged_prompts, tiny_config, tiny_model  # noqa: E402

NEW_TOKENS = 12
# The other implementation of experts needs sizes that are multiples of 4.
EAGER = {"experts_implementation": "eager", "attn_implementation": "eager"}
ANSWER_TOKENS = 64


def record(name: str, directory: Path) -> None:
    """Return logits of the last prompt positions and the greedy continuation of every prompt, in f32 on CPU."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(name, directory), dtype=torch.float32, **EAGER)
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


def record_default_model() -> None:
    """Return greedy answers of the default model, with the difference of the two best logits at every step."""
    directory = ensure_default_model()
    tokenizer = Tokenizer.from_directory(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    cases = []
    for question in CHAT_PROMPTS:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}])
        tokens, gaps = list(prompt), []
        while len(gaps) < ANSWER_TOKENS and (not gaps or tokens[-1] not in tokenizer.eos_token_ids):
            with torch.no_grad():
                best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
            gaps.append(round(float(best.values[0] - best.values[1]), 5))
            tokens.append(int(best.indices[0]))
        answer = tokens[len(prompt) :]
        cases.append({"question": question, "prompt_ids": prompt, "greedy_ids": answer, "top2_gap": gaps})
        print(question, "->", tokenizer.decode(answer))
    (ROOT / "tests" / "golden" / "smollm2-135m.json").write_text(json.dumps({"cases": cases}) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for name in sys.argv[1:] or TINY_CONFIGS:
            record(name, Path(scratch))
    if not sys.argv[1:]:
        record_default_model()
