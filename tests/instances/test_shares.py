"""No client takes all slots or pages from others. No client waits for slots or pages that no other client wants."""

import asyncio
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_checks import TIMEOUT_S, alone, check_idle
from tiny_models import tiny_config, write_model

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.instances.queue import Waiting, mark_beyond_share
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.outputs import RequestDelta
from amoeba_jax.sampling.rows import sampling_row

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

SLOTS, PAGES, PAGE_SIZE, CONTEXT = 4, 40, 4, 64


def greedy(max_tokens: int, priority: int = 0) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, priority=priority)


def sequence(client: str, number: int, length: int = 8, priority: int = 0) -> Sequence:
    params = greedy(8, priority)
    return Sequence(
        str(number), (1,) * length, params, sampling_row(params, 0, 211, ()), print, number=number, client=client
    )


client_names = st.sampled_from(["red", "blue", "green"])
queued = st.lists(st.tuples(client_names, st.integers(1, 64), st.integers(-1, 1)), max_size=30)


def beyond_by_definition(running: list[Sequence], waiting: list[Sequence], slots: int, tokens: int) -> set[int]:
    """Return the numbers of sequences beyond their client's share, computed sequence by sequence."""
    clients = {s.client for s in running + waiting}
    found: set[int] = set()
    for client in clients if len(clients) > 1 else ():
        mine = [
            sorted((s for s in group if s.client == client), key=lambda s: s.order_of_client)
            for group in (running, waiting)
        ]
        used = 0
        for count, one in enumerate([*mine[0], *mine[1]], 1):
            used += one.num_tokens
            if count > 1 and (count * len(clients) > slots or used * len(clients) > tokens):
                found.add(one.number)
    return found


def queue_of(sequences: list[Sequence]) -> Waiting:
    waiting = Waiting()
    for one in sequences:
        waiting.add(one)
    return waiting


@given(running=queued, waiting=queued, slots=st.integers(1, 32), tokens=st.integers(64, 512))
def test_shares(running: list, waiting: list, slots: int, tokens: int):
    made = [sequence(client, i, length, priority) for i, (client, length, priority) in enumerate(running + waiting)]
    run, wait = made[: len(running)], made[len(running) :]
    queue = queue_of(wait)
    assert mark_beyond_share(run, queue, slots, tokens) == any(s.beyond_share for s in made)
    assert {s.number for s in made if s.beyond_share} == beyond_by_definition(run, wait, slots, tokens)
    clients = {s.client for s in made}
    within = [s for s in made if not s.beyond_share]
    if len(clients) < 2:
        assert within == made, "there is no one to share with"
        return
    assert {s.client for s in within} == clients, "everyone has something"
    for client in clients:
        beyond = [s for s in run if s.client == client and s.beyond_share]
        if beyond:  # waiting sequences take nothing from running sequences
            assert all(s.beyond_share for s in wait if s.client == client)
    assert not mark_beyond_share(run, queue, slots, tokens), "what is marked once stays so"


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(64, 512))
def test_marks_follow_what_changes(seed: int, slots: int, tokens: int):
    """Sequences arrive, start, are preempted and end. Clients come and go."""
    chance, queue = random.Random(seed), Waiting()
    run: list[Sequence] = []
    for number in range(60):
        wait = [*queue]
        match chance.choice(["come", "come", "start", "end", "preempt", "cancel"]):
            case "come":
                client = chance.choice(["red", "red", "red", "blue", "green"])
                queue.add(sequence(client, number, chance.randint(1, 64), chance.randint(-1, 1)))
            case "start" if wait:
                run.append(one := chance.choice(wait))
                queue.remove(one)
            case "cancel" if wait:
                queue.remove(chance.choice(wait))
            case "preempt" if run:
                queue.add(run.pop(chance.randrange(len(run))))
            case "end" if run:
                run.pop(chance.randrange(len(run)))
        wait, before = [*queue], {s.number for s in [*run, *queue] if s.beyond_share}
        changed = mark_beyond_share(run, queue, slots, tokens)
        expected = beyond_by_definition(run, wait, slots, tokens)
        assert {s.number for s in run + wait if s.beyond_share} == expected
        assert changed == (before != expected)
        assert [*queue] == sorted(wait, key=lambda s: s.order)


def test_those_whose_share_has_changed_move():
    """Sequences of a client that is alone again move too."""
    run, wait, other = [sequence("red", 0)], [sequence("red", n) for n in range(1, 6)], sequence("blue", 6)
    queue = queue_of(wait)
    assert not mark_beyond_share(run, queue, 4, 1_000)
    queue.add(other)
    assert mark_beyond_share(run, queue, 4, 1_000)
    assert [*queue] == [wait[0], other, *wait[1:]]
    assert mark_beyond_share([], queue, 4, 1_000), "one more of them is within it"
    assert [*queue] == [*wait[:2], other, *wait[2:]]
    queue.remove(other)
    assert mark_beyond_share([], queue, 4, 1_000)
    assert not any(s.beyond_share for s in queue)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with four slots, and pages for two and a half sequences of the full context."""
    directory = write_model(tiny_config("llama2") | {"num_hidden_layers": 1}, tmp_path_factory.mktemp("models") / "one")
    with LLM(
        directory,
        device_memory="16MiB",
        kv_cache_tokens=PAGES * PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_num_batched_tokens=16,
        max_num_seqs=SLOTS,
        max_model_len=CONTEXT,
        compile_cache=compile_cache,
        progress=False,
    ) as llm:
        yield llm


async def ask(llm: LLM, ended: list[str], client: str, prompt: list[int], params: SamplingParams) -> list[int]:
    """Return the tokens of a request. Append its client to `ended` when the request ends."""
    tokens: list[int] = []
    deltas: list[RequestDelta] = []
    async for _, delta in llm.astream_deltas(prompt, params, client=client):
        deltas.append(delta)
        for completion in delta.completions:
            tokens += completion.token_ids
    ended.append(client)
    return tokens


async def beside(
    llm: LLM, hostile: list[tuple[list[int], SamplingParams]], late: str, params: SamplingParams
) -> tuple[list[str], list[list[int]]]:
    """Submit a request of `late` while all requests of `red` run or wait.

    Returns the clients in the order in which their requests ended, and the tokens of all requests.
    """
    ended: list[str] = []
    tasks = [asyncio.ensure_future(ask(llm, ended, "red", prompt, p)) for prompt, p in hostile]
    while llm.stats.decode_tokens == 0 or sum(view.waiting for view in llm.instances) < len(hostile) - SLOTS:
        await asyncio.sleep(0)
    tasks.append(asyncio.ensure_future(ask(llm, ended, late, [7, 8, 9], params)))
    return ended, await asyncio.gather(*tasks)


@pytest.mark.first_by_default
@pytest.mark.parametrize("length", [4, 30], ids=["slots", "pages"])
@pytest.mark.parametrize("priority", [0, -9], ids=["equal", "urgent"])
def test_another_client_goes_before_what_is_beyond_a_share(llm: LLM, length: int, priority: int):
    """This holds even if all requests of the first client are urgent."""
    hostile = [([n + 1] * length, greedy(CONTEXT - length, priority)) for n in range(12)]
    before = llm.stats.preemptions
    ended, tokens = asyncio.run(beside(llm, hostile, "blue", greedy(2)))
    assert ended.index("blue") < 4, "it waited for a share, not for the queue"
    assert llm.stats.preemptions > before
    for (prompt, params), got in zip([*hostile, ([7, 8, 9], greedy(2))], tokens, strict=True):
        assert tuple(got) == alone(llm, prompt, params)[0].token_ids
    check_idle(llm)


def test_a_client_alone_has_everything(llm: LLM):
    hostile = [([n + 1] * 4, greedy(30)) for n in range(12)]
    before = llm.stats.preemptions
    ended, _ = asyncio.run(beside(llm, hostile, "red", greedy(2)))
    assert ended == ["red"] * 13
    assert llm.stats.preemptions == before
    check_idle(llm)
