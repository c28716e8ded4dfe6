"""Admission limits for each priority class of requests."""

from contextlib import ExitStack

import pytest

from amoeba_jax.sampling_params import SamplingParams
from serving.grpc_server.callers import Caller
from serving.grpc_server.config import Limits
from serving.grpc_server.open_requests import OpenRequests, Ticket
from serving.grpc_server.priority_classes import PriorityClass, class_of
from serving.grpc_server.statuses import LimitError

URGENT, STANDARD, BEST_EFFORT = -1, 0, 1


class Door:
    """Admission control, and the requests that it has admitted."""

    def __init__(self, **limits: int):
        self.admission, self.open = OpenRequests(Limits(**limits)), ExitStack()

    def admit(self, priority: int, client: str = "someone", n: int = 1) -> Ticket:
        params = SamplingParams(priority=priority, n=n)
        return self.open.enter_context(self.admission.admit(Caller(client, client, client), params=params))

    def refuses(self, priority: int, match: str, client: str = "someone", n: int = 1) -> None:
        with pytest.raises(LimitError, match=match):
            self.admit(priority, client, n)


def test_classes_follow_from_priorities():
    assert [class_of(p).label for p in (-5, -1, 0, 1, 9)] == ["urgent"] * 2 + ["standard"] + ["best_effort"] * 2


def test_queued_best_effort_requests_keep_out_no_urgent_one():
    door = Door(max_queued_requests=3)
    for _ in range(3):
        door.admit(BEST_EFFORT)
    door.refuses(BEST_EFFORT, r"3 requests are queued, .*max_queued_requests")
    for priority in (STANDARD, URGENT):
        for _ in range(2 if priority == STANDARD else 1):
            door.admit(priority)
    door.refuses(STANDARD, r"3 requests are queued of class standard or more urgent")


def test_more_urgent_requests_count_against_those_behind_them():
    door = Door(max_queued_requests=2)
    door.admit(URGENT)
    door.admit(URGENT)
    door.refuses(URGENT, "of class urgent")
    door.refuses(STANDARD, "max_queued_requests")
    door.refuses(BEST_EFFORT, "max_queued_requests")


def test_a_class_has_a_limit_of_its_own():
    door = Door(max_queued_requests=9, max_queued_best_effort_requests=1, max_queued_urgent_requests=2)
    door.admit(BEST_EFFORT)
    door.refuses(BEST_EFFORT, r"1 best_effort requests .*max_queued_best_effort_requests")
    door.admit(URGENT)
    door.admit(URGENT)
    door.refuses(URGENT, r"2 urgent requests .*max_queued_urgent_requests")
    for _ in range(5):
        door.admit(STANDARD)


def test_queued_tokens_of_best_effort_requests_keep_out_no_urgent_prompt():
    door = Door(max_queued_tokens=100)
    door.admit(BEST_EFFORT).count_tokens(100)
    with pytest.raises(LimitError, match=r"100 tokens are queued: 5 more"):
        door.admit(BEST_EFFORT).count_tokens(5)
    urgent = door.admit(URGENT)
    urgent.count_tokens(90)
    with pytest.raises(LimitError, match=r"90 tokens are queued of class urgent"):
        door.admit(URGENT).count_tokens(20)
    urgent.leave_queue()
    door.admit(URGENT).count_tokens(20)


def test_a_client_may_send_urgent_requests_beside_its_best_effort_ones():
    door = Door(max_requests_per_client=2)
    door.admit(BEST_EFFORT)
    door.admit(BEST_EFFORT)
    door.refuses(BEST_EFFORT, "max_requests_per_client")
    door.admit(URGENT)
    door.admit(BEST_EFFORT, client="other")


def test_samples_of_a_client_are_bounded():
    """Each sample of a request counts."""
    door = Door(max_samples_per_client=10)
    door.admit(STANDARD, n=8)
    door.refuses(STANDARD, r"or more urgent have 8 samples: 3 more .*of 10 \(max_samples_per_client\)", n=3)
    door.admit(STANDARD, n=2)
    door.refuses(BEST_EFFORT, "have 10 samples: 1 more")
    door.admit(URGENT, n=10)
    door.admit(STANDARD, client="other", n=10)
    door.open.close()
    door.refuses(STANDARD, "have 0 samples: 11 more", n=11)
    door.admit(STANDARD, n=10)


def test_nothing_is_counted_any_more_when_requests_have_ended():
    door = Door()
    for priority in (URGENT, STANDARD, BEST_EFFORT):
        door.admit(priority).count_tokens(7)
    admission = door.admission
    assert dict(admission.requests_by_class) == dict.fromkeys(PriorityClass, 1)
    assert (admission.requests_by_class.total(), admission.tokens_by_class.total()) == (3, 21)
    door.open.close()
    assert (admission.requests_by_class.total(), admission.tokens_by_class.total(), admission.ids) == (0, 0, set())
    assert admission._requests_of == admission._samples_of == {}
