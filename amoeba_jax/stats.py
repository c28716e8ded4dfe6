"""Running totals of an engine."""

from dataclasses import dataclass, field

from amoeba_jax.views import DegreePrograms

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Largest number of tokens of each of `EngineStats.steps_by_tokens`, but for the last, which has no limit."""


@dataclass
class EngineStats:
    """What an engine has done since it was started. `LLM.stats` is a copy."""

    steps: int = 0
    """Steps launched, over all instances."""
    prompt_tokens: int = 0
    """Tokens computed as part of prompts, those computed again after a preemption included."""
    decode_tokens: int = 0
    """Tokens computed one at a time."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed, as the prefix cache had them (at a request's first start)."""
    preemptions: int = 0
    """Times that a running request had to give up its pages."""
    nan_logits: int = 0
    """Sequences that ended as their logits were infinite or not numbers."""
    failed_steps: int = 0
    """Steps that failed on their devices; the requests of their instances were computed again."""
    output_backlog: int = 0
    """Now: tokens that were generated and not made into outputs yet, of all requests."""
    output_stalls: int = 0
    """Times that no steps were launched, as that backlog was at its limit."""
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    """Steps of at most 1 token, of at most 8, and so on: see `STEP_TOKENS`."""
    compiled_programs: int = 0
    """Programs compiled, or loaded from the compilation cache."""
    late_programs: int = 0
    """Programs compiled or loaded after a warm-up of all degrees: each held requests up."""
    awaited_programs: int = 0
    """Programs compiled or loaded when requests needed them, and not before."""
    degrees: tuple[DegreePrograms, ...] = ()
    """How far a warm-up in the background has come; none where there was none."""
