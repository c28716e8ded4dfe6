"""The live page: its files, the stream of states, rights, and merges by its buttons.

`test_page_in_browser.py` shows the page in a browser.
"""

import http.client
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, get_args

import pytest
from live_server import TIMEOUT_S

from serving.http_server.cluster_state import OWNER_INDEX, OWNERS, describe
from serving.http_server.page import _FILES
from serving.scheduler import Action, Evict, Migrate, Reject, RejectKind, Replicate
from sharding.owners import Owner

pytestmark = pytest.mark.usefixtures("quick_compile")
StartHttp = Callable[..., AbstractContextManager[Any]]


@contextmanager
def response(
    started: Any, method: str, path: str, body: Any = None, **headers: str
) -> Iterator[http.client.HTTPResponse]:
    """Send a request. Header names have `_` instead of `-`."""
    connection = http.client.HTTPConnection("127.0.0.1", started.http.port, timeout=TIMEOUT_S)
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
        yield connection.getresponse()
    finally:
        connection.close()


def ask(started: Any, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Send a request, and return the status and JSON of the response."""
    with response(started, method, path, body, **headers) as answer:
        return answer.status, json.loads(answer.read())


def events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """Return the events of a stream as (name, data)."""
    name = ""
    while line := answer.readline().decode().rstrip("\n"):
        key, value = line.split(": ", 1)
        if key == "event":
            name = value
            continue
        assert answer.readline() == b"\n"
        yield name, json.loads(value)


def state_of(started: Any, **headers: str) -> Any:
    """Return the first state of a new stream."""
    with response(started, "GET", "/cluster/events", **headers) as answer:
        assert answer.status == 200
        return next(data for name, data in events(answer) if name == "state")


JSON = {"content_type": "application/json"}


def test_files_refer_only_to_each_other(http: Any):
    """The content security policy is strict, and no file loads from another host."""
    texts = {}
    for name in ("", *(f"static/{name}" for name in _FILES)):
        with response(http, "GET", f"/{name}") as answer:
            assert answer.status == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            texts[name.removeprefix("static/")] = answer.read().decode()
    page = texts[""]
    assert page == texts["page.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", page)
    assert {name.removeprefix("static/") for name in re.findall(r'(?:src|href)="([^"]*)"', page)} <= set(_FILES)
    for name, text in texts.items():
        hosts = re.findall(r"https?://[^\s\"')]+", text)
        assert set(hosts) <= {"https://github.com/leeoniya/uPlot", "http://www.w3.org/2000/svg"}, name
        if not name.startswith("uPlot"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)
    status, body = ask(http, "GET", "/static/page.py")
    assert (status, body) == (404, {"error": "there is no such file"})


def test_states_show_the_memory_of_the_devices(http: Any):
    state, memory = state_of(http), http.llm.memory()
    assert [device["device"] for device in state["devices"]] == list(range(http.llm.num_devices))
    for device in state["devices"]:
        number = device["device"]
        assert device["live_bytes"] == memory.device_bytes(number)
        assert device["budget_bytes"] == memory.budget_bytes
        owned = memory.by_owner(number)
        rows = [device["outside"], *(row for row in device["layers"] if row)]
        sums = dict(zip(OWNERS, (sum(column) for column in zip(*rows, strict=True)), strict=True))
        padding = sum(entry.padding_bytes for entry in memory.entries if entry.device == number)
        assert sums["padding"] == padding
        assert sum(sums.values()) == sum(owned.values())
        weights = sums["embedding and head"] + sums["attention and norms"] + sums["FFN"]
        assert weights <= sum(size for owner, size in owned.items() if Owner(owner).is_weights) <= weights + padding
    assert [(i["id"], i["devices"], i["degree"]) for i in state["instances"]] == [(0, [0], 1), (1, [1], 1)]
    assert state["state"] == "ready"
    assert [each["name"] for each in state["queue"]] == ["urgent", "standard", "best effort"]


def test_every_owner_has_a_color():
    assert set(OWNER_INDEX) == set(Owner)


def test_figures_of_the_last_seconds_arrive(http: Any):
    body = {"model": http.llm.name, "prompt": "figures", "max_tokens": 5, "ignore_eos": True}
    assert ask(http, "POST", "/v1/completions", body, **JSON)[0] == 200
    with response(http, "GET", "/cluster/events") as answer:
        stream = events(answer)
        name, history = next(stream)
        assert name == "history"
        assert set(history) == {"seconds", "decisions"}
        rows = {row[0]: row for row in history["seconds"]}
        while sum(row[1] for row in rows.values()) < 5:
            rows |= {row[0]: row for row in next(stream)[1]["seconds"]}
    assert any(row[2] is not None and row[3] >= row[2] for row in rows.values())  # TTFT


def test_instances_merge_and_split_by_the_buttons(http: Any):
    for degree in (2, 1):
        body = {"tensor_parallel_size": degree, "devices": [0, 1]}
        status, report = ask(http, "POST", "/cluster/transform", body, **JSON)
        assert (status, report["tensor_parallel_size"]) == (200, degree)
        assert [instance["degree"] for instance in state_of(http)["instances"]] == [degree] * (2 // degree)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"tensor_parallel_size": 64}, 409, "64"),
        ({"tensor_parallel_size": 0}, 400, "tensor_parallel_size"),
        ({"tensor_parallel_size": "2"}, 400, "tensor_parallel_size"),
        ({}, 400, "tensor_parallel_size is missing"),
        ({"tensor_parallel_size": 2, "devices": [0, 1, 2]}, 400, "devices has 3 elements: this server has 2"),
        ({"tensor_parallel_size": 2, "force": True}, 400, "force"),
        (b"{", 400, "not valid JSON"),
    ],
)
def test_bad_transformations_are_refused(http: Any, body: Any, status: int, text: str):
    found, answer = ask(http, "POST", "/cluster/transform", body, **JSON)
    assert found == status
    assert text in answer["error"]["message"]


def test_forms_of_other_web_sites_change_nothing(http: Any):
    body = {"tensor_parallel_size": 2}
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        status, answer = ask(http, "POST", "/cluster/transform", body, content_type=kind)
        assert (status, answer["error"]["message"]) == (400, f"the content type must be application/json, got {kind!r}")
    for method, path in (("GET", "/cluster/events"), ("POST", "/cluster/transform")):
        status, answer = ask(http, method, path, body, Host="rebound.example:80", **JSON)
        assert status == 403
        assert "IP address or localhost" in answer["error"]["message"]


def test_state_and_changes_need_the_admin_token(start_http: StartHttp):
    with start_http(api_token="of a client", admin_token="of the admin") as started:
        for method, path in (("GET", "/cluster/events"), ("POST", "/cluster/transform")):
            body = {"tensor_parallel_size": 1}
            assert ask(started, method, path, body, **JSON)[0] == 401
            assert ask(started, method, path, body, **JSON, Authorization="Bearer wrong")[0] == 401
            assert ask(started, method, path, body, **JSON, Authorization="Bearer of a client")[0] == 403
        token = {"Authorization": "Bearer of the admin", "Host": "a.name.example"}
        assert state_of(started, **token)["state"] == "ready"
        with response(started, "GET", "/") as answer:
            assert answer.status == 200


def test_without_an_admin_token_no_one_sees_the_state(start_http: StartHttp):
    with start_http(api_token="of a client") as started:
        assert ask(started, "GET", "/cluster/events", Authorization="Bearer of a client")[0] == 403


def test_page_is_not_on_the_http_port_if_administration_has_its_own(start_http: StartHttp):
    with start_http(admin_port=0) as started:
        assert ask(started, "GET", "/")[0] == 404
        assert ask(started, "GET", "/cluster/events")[0] == 404


def test_every_action_has_a_description():
    changes = (Replicate, Evict, Migrate)
    for kind in get_args(Action):
        if kind in changes:
            text = describe(kind(0, (5, 15), 1))
            assert "layers 5-14" in text
        elif kind is Reject:
            text = describe(Reject("0123456789", RejectKind.QUEUE_FULL, ""))
        else:
            numbers = {
                "devices": (0, 1),
                "degree": 2,
                "instance_id": 3,
                "device": 1,
                "size": 4,
                "request_id": "0123456789",
            }
            fields = [name for name in kind.__dataclass_fields__ if name in numbers]
            text = describe(kind(**{name: numbers[name] for name in fields}))
        assert text
        assert "0123456789" not in text
