"""Sentences that compare each policy with the best policy: differences in latency, and their causes."""

from collections.abc import Mapping

from serving.simulator.result import PolicyResult
from serving.simulator.tally import Ending

_PARTS = {
    "ttft_queue_s": "waiting in the queue",
    "ttft_prefill_s": "computing prompts, including prompts of other requests in the same steps",
    "token_decode_s": "decoding",
    "token_prompts_s": "prompts in the same steps",
    "token_transformations_s": "transformations",
}
_WORTH_TELLING = 0.02
"""Minimum difference to report, as a share of the mean TTFT, or mean time of a token, of the best policy."""


def winner(results: Mapping[str, PolicyResult]) -> str:
    """Return the name of the policy with the largest `kept_share`.

    If several policies have the same share, rounded to 0.1%, return the policy with the lowest mean TTFT.
    """

    def key(name: str) -> tuple[float, float]:
        result = results[name]
        parts = result.parts()
        return (-round(result.kept_share, 3), parts["ttft_queue_s"] + parts["ttft_prefill_s"])

    return min(results, key=key)


def explain(results: Mapping[str, PolicyResult]) -> list[str]:
    """Return one line about the best policy, and a line for each other policy that compares this policy with the best
    policy."""
    best = winner(results)
    lines = [f"{best}: most requests within the objectives ({results[best].kept_share:.1%})."]
    if unfit := int((results[best].ending == Ending.NEVER_FITS).sum()):
        lines[0] += f" But {unfit} requests fit none of its instances."
    return lines + [_against(result, results[best]) for name, result in results.items() if name != best]


def _against(result: PolicyResult, best: PolicyResult) -> str:
    own, other = result.parts(), best.parts()
    parts = [f"{result.policy}: {result.kept_share:.1%} within the objectives."]
    refused = {ending: int((result.ending == ending).sum()) for ending in Ending}
    if refused[Ending.NEVER_FITS] > int((best.ending == Ending.NEVER_FITS).sum()):
        parts.append(f"{refused[Ending.NEVER_FITS]} requests fit none of its instances.")
    if refused[Ending.OPEN]:
        parts.append(f"{refused[Ending.OPEN]} requests had not ended: overloaded.")
    for title, names, form in (
        ("Mean TTFT", ("ttft_queue_s", "ttft_prefill_s"), "{:.2f} s"),
        ("A token", ("token_decode_s", "token_prompts_s", "token_transformations_s"), "{:.4f} s"),
    ):
        mine, theirs = sum(own[n] for n in names), sum(other[n] for n in names)
        more = {n: own[n] - other[n] for n in names}
        told = [
            n for n in sorted(more, key=lambda n: -abs(more[n])) if abs(more[n]) > _WORTH_TELLING * max(theirs, 1e-9)
        ]
        if told:
            why = "; ".join(f"{'+' if more[n] > 0 else '-'}{form.format(abs(more[n]))} {_PARTS[n]}" for n in told)
            parts.append(f"{title} {form.format(mine)} against {form.format(theirs)}: {why}.")
    changes = (int(own["transformations"]), int(other["transformations"]))
    if changes[0] != changes[1]:
        moved = own["moved_kv_gb"] + own["moved_weights_gb"]
        parts.append(
            f"{changes[0]} transformations against {changes[1]}, {own['transformation_s']:.1f} s in all, "
            f"{moved:.1f} GB moved."
        )
    if len(parts) == 1:
        parts.append("No relevant difference.")
    return " ".join(parts)
