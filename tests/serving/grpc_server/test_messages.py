"""Messages of amoeba.v1: each contains only new tokens, so its size does not grow with the answer."""

from dataclasses import replace

from amoeba_jax.client.results import collect, read_chunks
from amoeba_jax.outputs import CompletionDelta, Logprob, RequestDelta, RequestMetrics
from serving.grpc_server import messages
from serving.grpc_server.messages import responses
from serving.grpc_server.output_coalescer import DeltaSum

METRICS = RequestMetrics(arrival=0.0)


def delta(*tokens: int, index: int = 0, finished: bool = False, logprobs: int | None = None) -> RequestDelta:
    entries = None
    if logprobs is not None:
        entries = tuple({token + rank: Logprob(-rank, rank + 1) for rank in range(logprobs)} for token in tokens)
    reason = "length" if finished else None
    text = "".join(f"<{token}>" for token in tokens)
    completion = CompletionDelta(index, text, tokens, entries, None if entries is None else 0.0, reason, None)
    return RequestDelta("r", 3, (completion,), METRICS, finished)


def test_bytes_for_a_token_do_not_grow_over_a_long_answer():
    sizes = [
        sum(message.ByteSize() for message in responses("r", delta(7, finished=n == 9_999), None))
        for n in range(10_000)
    ]
    assert len(set(sizes[:-1])) == 1
    assert sizes[-1] < sizes[0] + 8, "the finish reason, and no token besides its own"


def test_slow_reader_gets_every_token_once():
    """Tokens that arrive during a write are merged into the next message."""
    total, sent = DeltaSum(), []
    for number in range(3_000):
        total.add(delta(number))
        if number % 7 == 0 and (added := total.take()) is not None:
            sent += [m for message in responses("r", added, None) for m in message.completions]
    if (added := total.take()) is not None:
        sent += [m for message in responses("r", added, None) for m in message.completions]
    assert [token for it in sent for token in it.token_ids] == list(range(3_000))
    assert "".join(it.text for it in sent) == "".join(f"<{number}>" for number in range(3_000))
    assert total.take() is None


def test_long_delta_is_several_messages(monkeypatch):
    monkeypatch.setattr(messages, "_MAX_ENTRIES", 10)
    parts = list(responses("r", delta(*range(8), finished=True, logprobs=4), None))
    assert [len(it.completions[0].token_ids) for it in parts] == [2, 2, 2, 2]
    assert [it.completions[0].text for it in parts[:-1]] == [""] * 3
    assert parts[-1].completions[0].text == "".join(f"<{number}>" for number in range(8))
    assert parts[-1].completions[0].finish_reason == messages.FINISH_REASONS["length"]


def test_messages_of_a_long_prompts_log_probabilities_alone_are_read(monkeypatch):
    monkeypatch.setattr(messages, "_MAX_ENTRIES", 4)
    positions = (None, *({token: Logprob(-1.0, 5, "x"), 1: Logprob(-0.5, 1, "y")} for token in (7, 3, 9)))
    answer = replace(delta(7, 8, finished=True), prompt_logprobs=positions)
    parts = list(responses("r", answer, messages.usage(answer, 2)))
    assert [(len(it.prompt_logprobs), len(it.completions)) for it in parts] == [(2, 0), (2, 1), (0, 1)]
    chunks = [chunk for message in parts for chunk in read_chunks(message)]
    assert [chunk.prompt_logprobs for chunk in chunks] == [positions[:2], positions[2:], (), ()]
    (generation,) = collect(chunks)
    assert (generation.prompt_logprobs, generation.token_ids) == (positions, (7, 8))
    assert [next(iter(it)) for it in generation.prompt_logprobs or () if it] == [7, 3, 9], "own tokens come first"
    (generation,) = collect(read_chunks(next(responses("r", delta(7, finished=True), messages.usage(answer, 1)))))
    assert generation.prompt_logprobs is None
