"""Running totals of an engine."""

from dataclasses import dataclass


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
    compiled_programs: int = 0
    """Programs compiled, or loaded from the compilation cache."""
