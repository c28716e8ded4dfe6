"""Tokens/s of decoding with and without constrained output, in alternating runs.

    python benchmarks/structured.py [--model smollm2-135m] [--batch 32] [--max-tokens 48] [--repeats 5] [--json OUT]

In each run, a JSON schema constrains all rows, half of the rows, or none. All requests sample at temperature 1. The
schema has so many required properties that no text is complete before `--max-tokens`.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM, SamplingParams, StructuredOutput

_PROPERTIES = {f"field_{i}": {"type": "string", "minLength": 4, "maxLength": 40} for i in range(200)}
SCHEMA = {
    "type": "object",
    "properties": _PROPERTIES,
    "required": list(_PROPERTIES),
    "additionalProperties": False,
}
CONSTRAINED = StructuredOutput(json_schema=SCHEMA)


def tokens_per_s(llm: LLM, batch: int, max_tokens: int, constrained: int) -> tuple[float, float]:
    """Run a batch, and return (tokens/s of constrained requests, tokens/s of other requests), after the first token.

    `constrained`: number of constrained requests.
    """
    free = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
    bound = SamplingParams(seed=1, max_tokens=max_tokens, structured=CONSTRAINED)
    prompts = [[5 + i, 6, 7, 8] for i in range(batch)]
    outputs = llm.generate(prompts, [bound] * constrained + [free] * (batch - constrained))
    rates = [1 / it.metrics.tpot_s for it in outputs if it.metrics.tpot_s]
    assert all(len(it.outputs[0].token_ids) == max_tokens for it in outputs), "a text was complete too early"
    return sum(rates[:constrained]), sum(rates[constrained:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = {"none": 0, "half": options.batch // 2, "all": options.batch}
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    with LLM(options.model, max_num_seqs=options.batch, compile_beside=False, progress=False) as llm:
        for count in cases.values():
            tokens_per_s(llm, options.batch, options.max_tokens, count)  # compiles
        start = time.perf_counter()
        for _ in range(options.repeats):
            for case, count in cases.items():
                found[case].append(tokens_per_s(llm, options.batch, options.max_tokens, count))
        seconds = time.perf_counter() - start
    table = Table(title=f"{options.model}, batch {options.batch}, median of {options.repeats}, {seconds:.0f} s")
    for column in ("constrained rows", "tokens/s, constrained", "tokens/s, others", "all, relative to none"):
        table.add_column(column, justify="right")
    none = np.array([free for _, free in found["none"]])
    for case, rates in found.items():
        bound, free = np.median(rates, axis=0)
        table.add_row(case, f"{bound:.1f}", f"{free:.1f}", f"{np.median(np.sum(rates, axis=1) / none):.3f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
