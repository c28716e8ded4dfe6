"""Totals of an engine since its start."""

from dataclasses import dataclass, field

from amoeba_jax.views import DegreePrograms, PlacementStatus, TransformStatus

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper limits, in tokens, of the size classes of `EngineStats.steps_by_tokens`. One more class has no limit."""


@dataclass
class EngineStats:
    """Totals of an engine since its start. `LLM.stats` returns a copy."""

    steps: int = 0
    """Launched steps of all instances."""
    prompt_tokens: int = 0
    """Tokens computed as part of prompts. Tokens that are computed again after a preemption count again."""
    decode_tokens: int = 0
    """Tokens computed by decoding."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache when a request first started."""
    preemptions: int = 0
    """Number of times that a running request lost its pages to other requests."""
    nan_logits: int = 0
    """Sequences that failed because their logits were infinite or NaN."""
    failed_steps: int = 0
    """Steps that failed on the devices. After a failed step, the requests of its instance were computed again."""
    output_backlog: int = 0
    """Generated tokens that the output thread has not converted to output yet (current value)."""
    output_stalls: int = 0
    """Number of times that the engine launched no step because the output backlog was full."""
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    """Number of steps by tokens in the step. `STEP_TOKENS` has the size classes. The last class has no limit."""
    compiled_programs: int = 0
    """Programs that were compiled or loaded from the compilation cache."""
    late_programs: int = 0
    """Programs that were compiled or loaded after a warm-up of all degrees. Each program delayed requests."""
    awaited_programs: int = 0
    """Programs that were compiled or loaded only when requests needed them."""
    degrees: tuple[DegreePrograms, ...] = ()
    """Progress of the background warm-up, for each degree. Empty if there was no background warm-up."""
    transformations: tuple[TransformStatus, ...] = ()
    """Transformations that have not ended."""
    placements: tuple[PlacementStatus, ...] = ()
    """Changes of placements that have not ended."""
