"""Order of the queue, and rejections."""

from cluster_views import cluster, waiting

from serving.scheduler import Admission, QueueOrder, RejectKind, WaitingRequest


def order(*requests: WaitingRequest, now_s: float = 0.0, **fields) -> list[str]:
    rule = QueueOrder(**fields)
    return [r.request_id for r in sorted(requests, key=lambda r: rule.key(r, now_s))]


def screen(*requests: WaitingRequest, now_s: float = 0.0, max_model_len: int | None = None, **fields):
    view = cluster(queue=requests, now_s=now_s, max_model_len=max_model_len)
    admission = Admission(**fields)
    rejects, queue = admission.screen(view, view.longest.capacity_tokens, "a TP4 instance")
    return {r.request_id: r for r in rejects}, [r.request_id for r in queue]


def test_first_come_first_served():
    assert order(waiting("b", arrival_s=1), waiting("a", arrival_s=2), waiting("c", arrival_s=0)) == ["c", "b", "a"]


def test_lower_priority_number_goes_first():
    assert order(waiting("a", priority=1), waiting("b", priority=-1), waiting("c")) == ["b", "c", "a"]


def test_waiting_makes_up_for_priority():
    old, new = waiting("old", priority=1, arrival_s=0), waiting("new", arrival_s=61)
    assert order(old, new, level_s=60) == ["old", "new"]
    assert order(old, new, level_s=62) == ["new", "old"]


def test_near_deadline_goes_first():
    near = waiting("near", arrival_s=5, deadline_s=8)
    far = waiting("far", arrival_s=5, deadline_s=1_000)
    assert order(waiting("none", arrival_s=4), near, far, patience_s=30) == ["near", "none", "far"]


def test_starving_request_goes_first_whatever_its_priority():
    starving = waiting("starving", priority=1_000_000, arrival_s=0)
    urgent = waiting("urgent", priority=-1_000_000, arrival_s=250)
    assert order(starving, urgent, now_s=299) == ["urgent", "starving"]
    assert order(starving, urgent, now_s=300) == ["starving", "urgent"]


def test_expired_deadline_is_rejected_with_times():
    rejects, queue = screen(waiting("late", arrival_s=1, deadline_s=3), waiting("kept", deadline_s=4.1), now_s=4)
    assert queue == ["kept"]
    assert rejects["late"].kind is RejectKind.DEADLINE
    assert "2.000 s" in rejects["late"].reason
    assert "3.000 s" in rejects["late"].reason


def test_model_context_is_a_limit():
    rejects, queue = screen(waiting("a", 4_097), waiting("b", 4_096), max_model_len=4_096)
    assert queue == ["b"]
    assert rejects["a"].kind is RejectKind.NEVER_FITS
    assert "4097 tokens, over the limit of 4096: the model's context" in rejects["a"].reason


def test_last_to_arrive_are_turned_away_from_a_full_queue():
    requests = [waiting(f"r{n}", arrival_s=n, priority=-n) for n in range(4)]
    rejects, queue = screen(*requests, max_queued_requests=2)
    assert set(rejects) == {"r2", "r3"}
    assert queue == ["r1", "r0"]
    assert rejects["r2"].kind is RejectKind.QUEUE_FULL
    assert "max_queued_requests=2" in rejects["r2"].reason


def test_queued_tokens_are_limited():
    rejects, queue = screen(waiting("a", 600), waiting("b", 700), waiting("c", 400), max_queued_tokens=900)
    assert set(rejects) == {"b"}
    assert set(queue) == {"a", "c"}
    assert "max_queued_tokens=900" in rejects["b"].reason


def test_preempted_requests_are_not_turned_away():
    rejects, queue = screen(waiting("a"), waiting("b", arrival_s=1, started=True), max_queued_requests=1)
    assert rejects == {}
    assert queue == ["a", "b"]
