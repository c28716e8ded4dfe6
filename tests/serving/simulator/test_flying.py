"""Rules of the policy `flying`, tested on a simulated host."""

from itertools import pairwise

import numpy as np
import pytest
from flying_runs import DEGREES, Asked, Run, fly
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from serving.scheduler import FlyingConfig, FlyingPolicy, Preempt, ScaleDown, ScaleUp, make_policy

BUSY = [Asked(0.2 * n, output=300) for n in range(60)]
"""Best-effort requests that keep four devices busy for 25 s."""
URGENT = [Asked(2.0 + 3 * n, output=60, priority=-1) for n in range(5)]
ALL = (0, 1, 2, 3)


def urgent(run: Run) -> np.ndarray:
    priority = run.cluster.requests.priority
    assert priority is not None
    return priority < 0


def alone() -> Run:
    """Return a run of one urgent request on an idle group."""
    return fly([Asked(0.0, output=60, priority=-1)], degrees_at_start=(4,))


# Urgent requests


def test_hard_has_requests_pause_and_go_on_with_none_computed_again():
    run = fly([*BUSY, *URGENT])
    assert run.all_completed()
    assert not any(run.preemptions)
    ups, downs = run.of(ScaleUp), run.of(ScaleDown)
    assert all((a.devices, a.degree, a.running, a.release_weights) == (ALL, 4, "pause", False) for _, a in ups)
    assert [at_s for at_s, _ in ups] == pytest.approx([request.at_s for request in URGENT])
    assert all(down_s - up_s < 1.3 for (up_s, _), (down_s, _) in zip(ups, downs, strict=True)), "as long as it runs"
    rows = urgent(run)
    assert run.tpot_s[rows].mean() <= 1.05 * alone().tpot_s[0]
    assert run.ttft_s[rows].max() <= alone().ttft_s[0] + 0.05, "and the step that ran"


def test_soft_has_requests_go_on_in_the_group_and_the_urgent_one_begin_at_once():
    run = fly([*BUSY, *URGENT[:1]], FlyingConfig(preemption="soft"))
    assert run.all_completed()
    assert not any(run.preemptions)
    ((up_s, up),) = run.of(ScaleUp)
    assert (up.running, up.release_weights) == ("migrate", False)
    names = [action.request_id for at_s, action in run.log if at_s == up_s and hasattr(action, "instance_id")]
    (row,) = np.flatnonzero(urgent(run))
    assert names[-1] == f"r{row}", "it is on a member already when the group is made"


def test_sequential_has_requests_waited_for():
    run = fly([*BUSY[:20], *URGENT[:1]], FlyingConfig(preemption="sequential", calm_requests=1e-6))
    assert run.all_completed()
    assert not any(run.preemptions)
    ((up_s, up),) = run.of(ScaleUp)
    assert up.running == "wait"
    ends = np.array(run.cluster.records.end_s)
    before = ends[run.cluster.requests.arrival_s < up_s]
    (row,) = np.flatnonzero(urgent(run))
    assert run.cluster.records.first_token_s[row] > before.max()


def test_hard_is_sooner_than_soft_and_that_than_sequential():
    means = []
    for preemption in ("hard", "soft", "sequential"):
        run = fly([*BUSY, *URGENT], FlyingConfig(preemption=preemption))
        means.append(run.ttft_s[urgent(run)].mean())
    assert means == sorted(means)
    assert means[0] < means[1] / 2


def test_an_urgent_request_takes_the_group_that_is_there():
    run = fly([*BUSY, Asked(2.0, output=200, priority=-1), Asked(3.0, output=60, priority=-1)])
    assert len(run.of(ScaleUp)) == 1


def test_a_request_that_is_not_urgent_waits_while_others_pause():
    run = fly([*BUSY[:20], *URGENT[:1]])
    ((up_s, _),), ((down_s, _),) = run.of(ScaleUp), run.of(ScaleDown)
    dispatched = np.array(run.cluster.records.dispatch_s)[~urgent(run)]
    assert not ((dispatched > up_s) & (dispatched < down_s)).any()


def test_an_urgent_request_that_lacks_pages_takes_those_of_paused_ones():
    """Each device uses 11,000 of its 12,000 tokens. The urgent request needs 8,000 of 48,000."""
    full = [Asked(0.0, 10_900, 600) for _ in ALL]
    run = fly([*full, Asked(8.0, 8_000, 60, priority=-1)], FlyingConfig(calm_requests=1e-6))
    assert run.all_completed()
    assert len(run.of(Preempt)) == sum(run.preemptions) == 4


# Length of pauses


def endless(config: FlyingConfig | None = None) -> Run:
    """Return a run with urgent requests that keep a group busy for a minute."""
    best_effort = [Asked(0.5 * n, output=200) for n in range(60)]
    return fly([*best_effort, *(Asked(1.0 + 0.9 * n, output=60, priority=-1) for n in range(66))], config)


def pauses(run: Run, device: int) -> list[tuple[float, float]]:
    """Return the start and end times of the pauses on a device."""
    found, since = [], None
    for at_s, action in run.of(ScaleUp, ScaleDown):
        if device in action.devices and isinstance(action, ScaleUp) and action.running == "pause":
            since = at_s
        elif device in action.devices and isinstance(action, ScaleDown) and since is not None:
            found.append((since, at_s))
            since = None
    return found


def test_best_effort_requests_go_on_beside_endless_urgent_ones():
    run = endless()
    assert run.all_completed()
    assert not any(run.preemptions)
    longest = [end_s - start_s for device in ALL for start_s, end_s in pauses(run, device)]
    assert longest
    assert max(longest) <= 10.0 + 1.0, "a decision is made once a second"


def test_after_a_pause_requests_have_as_much_time():
    run = endless(FlyingConfig(max_pause_s=4.0, calm_requests=1e-6))
    for device in ALL:
        known = pauses(run, device)
        for (start_s, end_s), (again_s, _) in pairwise(known):
            if end_s - start_s >= 4.0:
                assert again_s - end_s >= 4.0 - 0.01
    assert run.all_completed()


def test_short_pauses_add_up():
    """Each pause lasts a second, with a tenth of a second between two pauses."""
    busy = [Asked(0.01 * n, output=800) for n in range(60)]
    stream = [Asked(2.0 + 1.15 * n, output=60, priority=-1) for n in range(20)]
    run = fly([*busy, *stream], FlyingConfig(max_pause_s=4.0))
    known = [it for it in pauses(run, 0) if it[0] < 25]
    assert len(known) > 3
    paused_s = sum(end_s - start_s for start_s, end_s in known)
    assert paused_s <= 4.0 + 0.55 * (known[-1][1] - known[0][0])
    assert run.all_completed()


# Load


def phases(low: float, high: float, seed: int, seconds: int = 60, count: int = 8) -> list[Asked]:
    """Return Poisson arrivals with alternating low and high rates, which vary by up to 30% from second to second."""
    random = np.random.default_rng(seed)
    asked = []
    for phase in range(count):
        for second in range(seconds):
            rate = (low, high)[phase % 2] * random.uniform(0.7, 1.3)
            start_s = phase * seconds + second
            asked += [Asked(start_s + float(random.random())) for _ in range(random.poisson(rate))]
    return asked


@pytest.mark.first_by_default
@pytest.mark.parametrize("seed", [4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4))])
def test_load_causes_one_change_a_phase_under_noise(seed: int):
    run = fly(phases(0.75, 10.0, seed))
    assert run.all_completed()
    assert not any(run.preemptions)
    changes = run.of(ScaleUp, ScaleDown)
    assert len(changes) == 8
    assert [int(at_s // 60) for at_s, _ in changes] == list(range(8)), "one in each"
    assert all(a.running == "migrate" and not a.release_weights for _, a in changes if isinstance(a, ScaleUp))


@pytest.mark.first_by_default
@pytest.mark.parametrize(
    "rate", [0.5, 1.0, 2.0, 3.0, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (4.0, 5.0, 6.0, 8.0))]
)
def test_noise_about_any_load_causes_one_change_at_most(rate: float):
    """This also holds for rates at the limits."""
    for seed in range(2):
        run = fly(phases(rate, rate, seed, seconds=30, count=8))
        assert len(run.of(ScaleUp, ScaleDown)) <= 1, f"{rate} a second"


@pytest.mark.slow
def test_a_light_load_is_served_sooner_than_by_data_parallel_and_a_burst_as_soon():
    """The first low phase has the latency of a group. Bursts have the TTFT of four instances."""
    asked = phases(0.75, 10.0, 0)
    flying, never = fly(asked), fly(asked, FlyingConfig(calm_requests=1e-6))
    arrival_s = flying.cluster.requests.arrival_s
    low, high = (arrival_s > 12) & (arrival_s < 60), (arrival_s > 75) & (arrival_s < 120)
    assert flying.tpot_s[low].mean() < 0.5 * never.tpot_s[low].mean()
    assert flying.ttft_s[low].mean() < 0.5 * never.ttft_s[low].mean()
    assert np.percentile(flying.ttft_s[high], 90) < 1.10 * np.percentile(never.ttft_s[high], 90)


def test_a_short_request_without_room_has_groups_split():
    """The mean load does not matter."""
    asked = [Asked(20.0 + 0.001 * n, 100, 400) for n in range(200)]
    run = fly(asked, FlyingConfig(load_window_s=1e6))
    down_s = next(at_s for at_s, action in run.of(ScaleDown))
    assert down_s <= 22


def test_groups_bind_no_sooner_than_dwell_s_after_they_split():
    burst = [Asked(20.0 + 0.001 * n, 100, 20) for n in range(200)]
    run = fly([*burst, Asked(60.0)], FlyingConfig(dwell_s=15.0))
    ((up_s, _), (again_s, _)), ((down_s, _),) = run.of(ScaleUp), run.of(ScaleDown)
    assert up_s == pytest.approx(15.0, abs=1.0)
    assert 15.0 <= again_s - down_s <= 16.0


# Long requests


@pytest.mark.parametrize(("tokens", "degree", "released"), [(20_000, 2, False), (40_000, 4, False), (60_000, 4, True)])
def test_a_long_request_gets_the_least_degree_with_weights_kept_else_released(tokens: int, degree: int, released: bool):
    config = FlyingConfig(calm_requests=1e-6)
    run = fly([*BUSY[:4], Asked(1.0, tokens, 100)], config)
    assert run.all_completed()
    ((_, up),), ((_, down),) = run.of(ScaleUp), run.of(ScaleDown)
    assert (up.degree, up.release_weights, up.running) == (degree, released, "migrate")
    assert (down.devices, down.degree) == (up.devices, 1)


def test_a_group_does_not_split_under_a_request_that_it_is_given():
    """The second request needs weights released, and waits for the first."""
    run = fly([Asked(15.0, 40_000, 100), Asked(15.0, 60_000, 100)])
    assert run.all_completed()
    assert not any(run.preemptions)


def test_a_group_that_keeps_weights_splits_for_a_request_that_needs_them_released():
    run = fly([Asked(15.0, 60_000, 100)])
    kinds = [(type(a), a.degree, getattr(a, "release_weights", None)) for _, a in run.of(ScaleUp, ScaleDown)]
    assert kinds[:3] == [(ScaleUp, 4, False), (ScaleDown, 1, None), (ScaleUp, 4, True)]
    assert run.all_completed()


# Random requests

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)

asked = st.builds(
    Asked,
    st.floats(0, 40),
    st.sampled_from([10, 400, 3_000, 11_000, 20_000, 40_000, 60_000]),
    st.integers(1, 400),
    st.sampled_from([0, 0, -1, 1]),
)


@settings(max_examples=40, phases=NO_SHRINKING)
@given(
    st.lists(asked, min_size=1, max_size=40),
    st.sampled_from(["hard", "soft", "sequential"]),
    st.sampled_from([(1, 1, 1, 1), (2, 2), (2, 1, 1)]),
    st.sampled_from([0.5, 3.0]),
)
def test_all_requests_end_whatever_comes(requests: list[Asked], preemption, start: tuple[int, ...], max_pause_s: float):
    """Each action is checked strictly."""
    config = FlyingConfig(preemption=preemption, max_pause_s=max_pause_s, dwell_s=2.0)
    run = fly(requests, config, degrees_at_start=start)
    fits = [it for it in requests if it.prompt + it.output <= DEGREES[-1].capacity_tokens]
    assert sum(ending == 1 for ending in run.cluster.records.ending) == len(fits)


@settings(max_examples=25, phases=NO_SHRINKING)
@given(st.lists(asked, min_size=5, max_size=40), st.sampled_from(["amoeba", "static", "round_robin", "amoeba_paper"]))
def test_requests_that_paused_go_on_under_another_policy(requests: list[Asked], name: str):
    """`SetPolicy` is called while requests are paused."""

    class Replaced(FlyingPolicy):
        """Policy that another policy replaces 2 s after the first pause."""

        pauses = True
        since_s: float | None = None

        def decide(self, view):
            if self.since_s is None and any(i.paused_degree is not None for i in view.instances):
                self.since_s = view.now_s
            if self.since_s is not None and view.now_s > self.since_s + 2:
                self.pauses, self.other = False, getattr(self, "other", None) or make_policy(name)
                return self.other.decide(view)
            return super().decide(view)

    short = [it for it in requests if it.prompt < 11_000]
    run = fly([*BUSY[:20], *URGENT[:2], *short], policy=Replaced(FlyingConfig(calm_requests=1e-6)))
    assert run.all_completed()


def test_a_group_for_urgent_requests_is_not_split_for_long_ones():
    """If a group split for the long request and merged again for each urgent request, no request would be served."""
    urgent = [Asked(n * 3.0, 9_000, 300, -10) for n in range(30)]
    ran = fly([*urgent, Asked(7.0, 19_500, 300)])
    assert ran.all_completed()
    assert len(ran.of(ScaleUp, ScaleDown)) < 20
    assert np.median(ran.ttft_s) < 5.0
