"""Policies over minutes of load, in virtual time."""

import random
from collections.abc import Callable

import pytest
from cluster_views import DEGREES
from policy_runs import Arrivals, PolicyRun, simulate

from serving.scheduler import (
    AmoebaConfig,
    AmoebaPolicy,
    LeastLoadFirstPolicy,
    Policy,
    RoundRobinPolicy,
    ScaleDown,
    ScaleUp,
    SplitConfig,
    WaitingRequest,
)


def poisson(rng: random.Random, name: str, per_minute: float, prompt: int, output: int, until_s: float) -> Arrivals:
    """Return requests at exponential intervals, with `output` generated tokens on average."""
    arrivals, now_s = [], 0.0
    while (now_s := now_s + rng.expovariate(per_minute / 60)) < until_s:
        tokens = rng.randint(output // 2, output * 3 // 2)
        arrivals.append(
            (WaitingRequest(f"{name}-{len(arrivals)}", prompt, prompt + 2 * output, arrival_s=now_s), tokens)
        )
    return arrivals


def mix(seed: int, until_s: float, shorts_per_minute: float = 60, longs_per_minute: float = 1) -> Arrivals:
    """Return AMOEBA's mix: 1K-token prompts at 60 a minute and 50K-token prompts at 1 a minute."""
    rng = random.Random(seed)
    return [
        *poisson(rng, "short", shorts_per_minute, 1_000, 250, until_s),
        *poisson(rng, "long", longs_per_minute, 50_000, 400, until_s),
    ]


@pytest.mark.parametrize("linger_s", [0.0, 60.0])
def test_one_long_request_among_short_ones_causes_one_merge_and_one_split(linger_s: float):
    rng = random.Random(0)
    arrivals = poisson(rng, "short", 120, 1_000, 200, 150)
    arrivals.append((WaitingRequest("long", 50_000, 50_400, arrival_s=20.0), 400))
    policy = AmoebaPolicy(AmoebaConfig(linger_s=linger_s))
    ran = simulate(policy, arrivals, 300, DEGREES)
    assert (ran.count(ScaleUp), ran.count(ScaleDown)) == (1, 1)
    assert len(ran.finished_s) == len(arrivals)
    assert [len(i.devices) for i in ran.executor.instances] == [1] * 8
    assert ran.scheduler.counters.refused == 0


@pytest.mark.parametrize("linger_s", [0.0, 60.0])
def test_consecutive_long_requests_cause_no_second_merge(linger_s: float):
    arrivals = [(WaitingRequest(f"long-{n}", 50_000, 50_400, arrival_s=5.0 + 3 * n), 400) for n in range(6)]
    ran = simulate(AmoebaPolicy(AmoebaConfig(linger_s=linger_s)), arrivals, 400, DEGREES)
    assert (ran.count(ScaleUp), ran.count(ScaleDown)) == (1, 1)
    assert len(ran.finished_s) == 6


def test_long_requests_with_gaps_shorter_than_linger_s_share_a_merge():
    arrivals = [(WaitingRequest(f"long-{n}", 50_000, 50_400, arrival_s=60.0 * n), 400) for n in range(5)]
    ran = simulate(AmoebaPolicy(), arrivals, 500, DEGREES)
    assert (ran.count(ScaleUp), ran.count(ScaleDown)) == (1, 1)
    apart = simulate(AmoebaPolicy(AmoebaConfig(linger_s=0)), arrivals, 500, DEGREES)
    assert (apart.count(ScaleUp), apart.count(ScaleDown)) == (5, 5)


def test_long_request_into_a_full_cluster_is_served():
    rng = random.Random(1)
    arrivals = poisson(rng, "short", 700, 1_000, 250, 60)
    arrivals.append((WaitingRequest("long", 50_000, 50_400, arrival_s=40.0), 400))
    ran = simulate(AmoebaPolicy(AmoebaConfig(linger_s=0)), arrivals, 200, DEGREES)
    assert ran.finished_s["long"] < 150
    assert (ran.count(ScaleUp), ran.count(ScaleDown)) == (1, 1)


def test_failing_transformations_are_not_asked_for_in_every_tick():
    arrivals = [(WaitingRequest("long", 50_000, 50_400, arrival_s=0.0), 400)]
    ran = simulate(AmoebaPolicy(), arrivals, 120, DEGREES, fail_transformations=5)
    assert ran.scheduler.counters.transformations_failed == 5
    assert ran.count(ScaleUp) == 6
    assert "long" in ran.finished_s


@pytest.mark.slow
def test_amoeba_transforms_less_often_than_the_baselines_with_as_much_throughput():
    """All policies use the same split rule."""
    until_s = 1_200.0
    rows: dict[str, tuple[int, float]] = {}
    at_once = SplitConfig(linger_s=0)
    policies: list[Callable[[], Policy]] = [
        lambda: RoundRobinPolicy(splits=at_once),
        lambda: LeastLoadFirstPolicy(splits=at_once),
        lambda: AmoebaPolicy(AmoebaConfig(linger_s=0)),
        RoundRobinPolicy,
        LeastLoadFirstPolicy,
        AmoebaPolicy,
    ]
    names = ["round_robin", "least_load_first", "amoeba"]
    names = [*(f"{name}, linger_s=0" for name in names), *names]
    print("\npolicy                        merges  splits  tokens/s  TTFT p50, p99 (s)  long, mean (s)")
    for name, policy in zip(names, policies, strict=True):
        arrivals = mix(seed=0, until_s=until_s)
        ran = simulate(policy(), arrivals, until_s, DEGREES)
        throughput = ran.generated_tokens() / until_s
        merges, splits = ran.count(ScaleUp), ran.count(ScaleDown)
        rows[name] = (merges + splits, throughput)
        ttft = sorted(ran.first_token_s[r.request_id] - r.arrival_s for r, _ in arrivals if served(ran, r))
        long = [
            ran.finished_s[r.request_id] - r.arrival_s
            for r, _ in arrivals
            if r.request_id.startswith("long") and served(ran, r)
        ]
        print(
            f"{name:29} {merges:6}  {splits:6}  {throughput:8.1f}  {ttft[len(ttft) // 2]:8.2f}"
            f"  {ttft[len(ttft) * 99 // 100]:6.2f}  {sum(long) / len(long):14.1f}"
        )
    for baseline in ("round_robin", "least_load_first"):
        for linger in ("", ", linger_s=0"):
            ours, theirs = rows[f"amoeba{linger}"], rows[f"{baseline}{linger}"]
            assert ours[0] < theirs[0]
            assert ours[1] >= theirs[1] * 0.99


@pytest.mark.slow
def test_amoeba_serves_as_much_as_the_baselines_near_the_limit():
    """Tokens are summed over three seeds. The p99 TTFT shows that requests do not queue while instances have room."""
    until_s = 150.0
    tokens: dict[str, int] = {}
    slowest_s: dict[str, list[float]] = {}
    for policy in (RoundRobinPolicy, LeastLoadFirstPolicy, AmoebaPolicy):
        for seed in range(3):
            arrivals = mix(seed, until_s, shorts_per_minute=450, longs_per_minute=2)
            ran = simulate(policy(), arrivals, until_s, DEGREES, shows_timing=True)
            tokens[policy.name] = tokens.get(policy.name, 0) + ran.generated_tokens()
            arrival_s = {r.request_id: r.arrival_s for r, _ in arrivals}
            ttft = sorted(at_s - arrival_s[name] for name, at_s in ran.first_token_s.items())
            slowest_s.setdefault(policy.name, []).append(ttft[len(ttft) * 99 // 100])
    print(f"\ntokens: {tokens}\np99 TTFT (s): {slowest_s}")
    for baseline in (RoundRobinPolicy.name, LeastLoadFirstPolicy.name):
        assert tokens["amoeba"] >= tokens[baseline]
        assert max(slowest_s["amoeba"]) < min(slowest_s[baseline])


def served(ran: PolicyRun, request: WaitingRequest) -> bool:
    return request.request_id in ran.finished_s
