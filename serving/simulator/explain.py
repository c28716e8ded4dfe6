"""Sentences that compare each policy with the best policy: differences in latency, and their causes."""

from collections.abc import Mapping
from functools import cmp_to_key

from serving.simulator.layouts import is_static
from serving.simulator.result import PolicyResult
from serving.simulator.tally import Ending

_PARTS = {
    "ttft_queue_s": "waiting in the queue",
    "ttft_prefill_s": "computing prompts, including prompts of other requests in the same steps",
    "token_decode_s": "decoding",
    "token_prompts_s": "prompts in the same steps",
    "token_transformations_s": "transformations",
}
_LIMITS = {
    "cache": "room in the KV cache",
    "slots": "slots (--max-num-seqs)",
    "degree": "instances large enough for the longest requests",
}
_WORTH_TELLING = 0.02
"""Minimum difference to report, relative to the best policy's mean TTFT or mean time of a token."""


_ALL = 0.99
"""If at least this share of the requests is within the objectives, the speed of steps is no limit."""
_SAME_SHARE, _SAME_TTFT = 0.001, 0.02
"""Differences that count as none: of the share of requests within the objectives, and of the mean TTFT (a ratio)."""


def compare(one: PolicyResult, two: PolicyResult) -> int:
    """Return -1 if result `one` is better, 1 if result `two` is better, and 0 if they are equal.

    The results are compared by the share of requests within the latency limits. If the shares are equal, they are
    compared by the number of refused requests, and then by the mean time to first token (TTFT). Shares count as equal
    up to a difference of 0.1 percentage points, and TTFT up to 2%. Both results must be for the same requests.
    """
    if abs(difference := two.kept_share - one.kept_share) > _SAME_SHARE:
        return 1 if difference > 0 else -1
    if refused := int(one.refused.sum()) - int(two.refused.sum()):
        return 1 if refused > 0 else -1
    own_s, other_s = mean_ttft_s(one), mean_ttft_s(two)
    if abs(own_s - other_s) <= _SAME_TTFT * max(own_s, other_s):
        return 0
    return 1 if own_s > other_s else -1


def mean_ttft_s(result: PolicyResult) -> float:
    """Return the mean time to first token (TTFT) of the completed requests, in seconds."""
    parts = result.parts()
    return parts["ttft_queue_s"] + parts["ttft_prefill_s"]


def ranking(results: Mapping[str, PolicyResult]) -> list[str]:
    """Return the names of the policies, best first."""
    return sorted(results, key=cmp_to_key(lambda one, two: compare(results[one], results[two])))


def explain(results: Mapping[str, PolicyResult]) -> list[str]:
    """Return sentences that compare policies.

    The first sentence names the best policy, and all policies that are equally good. Each further sentence compares
    another policy with the best policy.
    """
    names = ranking(results)
    best = results[names[0]]
    equal = [name for name in names if compare(best, results[name]) == 0]
    what = "within the objectives" if best.has_objectives else "completed (no objective is set: use --slo)"
    goodput = float(best.kept.sum()) / (best.duration_s or 1.0)
    first = f"Best: {', '.join(equal)}{' (no relevant difference)' if len(equal) > 1 else ''}: "
    first += f"{best.kept_share:.1%} of the requests {what}, {goodput:.3g} requests/s."
    if unfit := _refused(best):
        first += f" But {unfit}."
    return [first] + [_against(results[name], best) for name in names if name not in equal]


def _refused(result: PolicyResult) -> str:
    """Return a clause that says how many requests a policy refuses, in total and by class.

    The result is empty if the policy refuses no request.
    """
    if not (count := int(result.refused.sum())):
        return ""
    requests = result.requests
    numbers = [int((result.refused & (requests.kinds == kind)).sum()) for kind in range(len(requests.kind_names))]
    classes = [f"{number} {name}" for name, number in zip(requests.kind_names, numbers, strict=True) if number]
    text = f"{count} requests fit none of its instances"
    return text + (f" ({', '.join(classes)})" if len(requests.kind_names) > 1 else "")


def limits_line(result: PolicyResult) -> str:
    """Return a line that lists the resources of a policy, and the resources that waiting requests lacked."""
    limits = result.limits()
    start = ", ".join(f"{count} x TP{degree}" for degree, count in limits["instances_at_start"].items())
    degrees = ", ".join(f"TP{degree}" for degree in limits["degrees"])
    if len(limits["degrees"]) == 1:
        degrees += " only"
    if is_static(result.policy) or result.policy == "shift":
        degrees = "fixed"
    text = f"{result.policy}: {start}; degrees: {degrees}; {limits['cache_tokens']:,} tokens of cache, "
    text += f"{limits['slots']:,} slots. "
    waited = {name: seconds for name, seconds in limits["waited_s"].items() if seconds > 0}
    span_s = (result.duration_s or 1.0) * len(result.hosts)
    if sum(waited.values()) < _WORTH_TELLING * span_s:
        is_slow = result.has_objectives and result.kept_share < _ALL
        return text + f"Limit: {'the speed of steps' if is_slow else 'none'}, requests hardly waited."
    most = max(waited, key=lambda name: waited[name])
    shares = ", ".join(f"{name} {seconds / span_s:.0%}" for name, seconds in waited.items())
    return text + f"Limit: {_LIMITS[most]}. Requests waited for: {shares} of the time."


def _against(result: PolicyResult, best: PolicyResult) -> str:
    own, other = result.parts(), best.parts()
    parts = [
        f"{result.policy}: {result.kept_share:.1%} {'within the objectives' if best.has_objectives else 'completed'}."
    ]
    if result.refused.sum() > best.refused.sum():
        parts.append(f"{_refused(result)}.")
    if unfinished := int((result.ending == Ending.OPEN).sum()):
        parts.append(f"{unfinished} requests had not ended: overloaded.")
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
