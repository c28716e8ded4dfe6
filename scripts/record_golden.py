"""Record results of `transformers` for the test models, in tests/golden. Needs torch.

Run `python scripts/record_golden.py` after a change of tests/tiny_models.py or tests/chat_prompts.py. If arguments name
tiny models, only these models are recorded.
"""

import json
import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from amoeba_jax.checkpoint import ensure_default_model
from amoeba_jax.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from chat_prompts import CHAT_PROMPTS  # noqa: E402
from tiny_models import (  # noqa: E402
    CLOSE_CALL,
    TINY_CONFIGS,
    ragged_prompts,
    spread_positions,
    tiny_config,
    tiny_model,
)

NEW_TOKENS = 12
GREEDY_TOKENS = 64
# The other implementation of experts needs sizes that are multiples of 4.
EAGER = {"experts_implementation": "eager", "attn_implementation": "eager"}
ANSWER_TOKENS = 64
torch.set_num_threads(1)  # threads would wait for each other: the matrices are tiny


class Routing:
    """Decisions of the routers of a `transformers` model in its last call.

    Attributes:
        gap: smallest difference of router logits between the last chosen and the first rejected expert of a token.
            Infinity for a model without experts, or if every expert computes every token.
        counts: number of tokens of each expert, one array for each layer with experts.
    """

    def __init__(self, model: torch.nn.Module):
        self.gap, self.counts = math.inf, []
        model.register_forward_pre_hook(lambda *_: self._clear())
        for name, module in model.named_modules():
            if name.endswith((".mlp.gate", ".mlp.router")):
                module.register_forward_hook(self._add)

    def _clear(self) -> None:
        self.gap, self.counts = math.inf, []

    def _add(self, module: torch.nn.Module, inputs: tuple[torch.Tensor], outputs: tuple[torch.Tensor, ...]) -> None:
        logits = torch.nn.functional.linear(inputs[0], module.weight, getattr(module, "bias", None))
        chosen, ordered = outputs[2], logits.sort(dim=-1, descending=True).values
        self.counts.append(torch.bincount(chosen.flatten(), minlength=logits.shape[-1]).numpy())
        if (top_k := chosen.shape[-1]) < logits.shape[-1]:
            self.gap = min(self.gap, float((ordered[:, top_k - 1] - ordered[:, top_k]).min()))


def load(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Return the model of `transformers`. MXFP4 weights are dequantized."""
    options = EAGER | {"dtype": dtype}
    if "quantization_config" in json.loads((directory / "config.json").read_text()):
        options |= {"quantization_config": Mxfp4Config(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(directory, **options).to(dtype).eval()


def record(name: str, directory: Path) -> None:
    """Write results for every prompt, in f32 on CPU.

    | array | content |
    | --- | --- |
    | `tokens_i` | prompt i and its greedy continuation of 12 tokens |
    | `logits_i` | logits of the last 16 positions that predict `tokens_i` |
    | `greedy_i` | greedy continuation of 64 tokens |
    | `gaps_i` | at each step of `greedy_i`, the difference of the two best logits, or `Routing.gap` if it is smaller |
    | `spread_logits` | logits at `spread_positions` of the last prompt with its greedy continuation |
    | `bfloat16_logits` | `logits_i` of the last prompt from the model in bfloat16 |
    | `expert_tokens` | tokens of each expert in the last prompt and its continuation, `[layers with experts, E]` |
    """
    path = tiny_model(name, directory)
    model = load(path, torch.float32)
    routing, arrays = Routing(model), {}
    prompts = ragged_prompts(tiny_config(name)["vocab_size"])

    def run(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].float()

    for index, prompt in enumerate(prompts):
        tokens, gaps = list(prompt), []
        for _ in range(GREEDY_TOKENS):
            best = run(model, tokens)[-1].topk(2)
            gaps.append(min(float(best.values[0] - best.values[1]), routing.gap))
            tokens.append(int(best.indices[0]))
        short = tokens[: len(prompt) + NEW_TOKENS]
        arrays[f"tokens_{index}"] = np.array(short, np.int32)
        arrays[f"logits_{index}"] = run(model, short[:-1])[-NEW_TOKENS - 4 :].numpy()
        arrays[f"greedy_{index}"] = np.array(tokens[len(prompt) :], np.int32)
        arrays[f"gaps_{index}"] = np.array(gaps, np.float32)
        close = sum(np.minimum.accumulate(gaps) <= CLOSE_CALL)
        print(f"{name}, prompt {index}: {close} of {GREEDY_TOKENS} tokens after a close call")
    arrays["spread_logits"] = run(model, tokens[:-1])[spread_positions(len(tokens) - 1)].numpy()
    if routing.counts:
        arrays["expert_tokens"] = np.array(routing.counts)
    arrays["bfloat16_logits"] = run(load(path, torch.bfloat16), short[:-1])[-NEW_TOKENS - 4 :].numpy()
    target = ROOT / "tests" / "golden" / f"{name}.npz"
    target.parent.mkdir(exist_ok=True)
    np.savez_compressed(target, **arrays)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size} bytes")


def record_default_model() -> None:
    """Write greedy answers of the default model, with the difference of the two best logits at every step."""
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
