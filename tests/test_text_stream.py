"""Streamed text, compared with a plain reference: decode everything, then look for stop strings."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from amoeba_jax import text_stream
from amoeba_jax.text_stream import TextStream
from amoeba_jax.tokenizer import DetokenizeStream, Tokenizer

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
LONG_TOKENS = ["ab", "abc", "ca", "aab", "bb", "c a", "#b#", "###", "\n\n", "日é", "🦠🦠"]
FUZZ = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Few letters, so that stop strings occur. Characters have 1 to 4 bytes, and U+FFFD replaces a cut character.
TEXT = st.text(alphabet="aaabbc \n#é日🦠\ufffd", max_size=24)
STOPS = st.lists(st.text(alphabet="aabc#\n 日🦠\ufffd", min_size=1, max_size=5), max_size=4).map(tuple)
# Whole texts as bytes, long tokens (their ids are the lowest), and any tokens.
TOKENS = st.lists(
    st.one_of(TEXT, st.lists(st.integers(0, len(LONG_TOKENS) + 1)), st.lists(st.integers(0, 267), max_size=3)),
    max_size=6,
)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """Return a tokenizer without merges. It has long tokens (two cut a character), all bytes and a special token."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    longer = ["".join(piece for piece, _ in pre.pre_tokenize_str(text)) for text in LONG_TOKENS]
    longer += [longer[-1][:3], longer[-1][3:]]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*longer, *symbols])}
    fast = FastTokenizer(models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast), frozenset())


@pytest.fixture(scope="module")
def real() -> dict[str, Tokenizer]:
    """A byte-level and a SentencePiece tokenizer of real models."""
    if not SHARED.is_dir():
        pytest.skip("needs the shared data ../shared/data")
    names = ("SmolLM2-135M-Instruct", "stories15M")
    return {name: Tokenizer.from_directory(SHARED / "models" / name) for name in names}


def cut(text: str, stop: tuple[str, ...], include: bool, exempt: int = 0) -> tuple[str, str | None]:
    """Compute the reference: extend the text character by character until it ends with a stop string."""
    for end in range(exempt + 1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            string = max(found, key=len)
            return text[: end if include else end - len(string)], string
    return text, None


class SearchingTextStream:
    """Compute another reference: search the end of the text for all stop strings after each token."""

    def __init__(self, detokenizer: DetokenizeStream, stop: tuple[str, ...], include: bool, min_tokens: int):
        self.detokenizer, self.stop, self.include, self.min_tokens = detokenizer, stop, include, min_tokens
        self.num_tokens, self.tail = 0, ""
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        if self.stopped is not None:
            return ""
        self.num_tokens += 1
        return self.take(self.detokenizer.push(token_id))

    def finish(self) -> str:
        if self.stopped is not None:
            return ""
        text = self.take(self.detokenizer.flush())
        return text if self.stopped is not None or self.include else text + self.tail

    def take(self, new: str) -> str:
        text, old = self.tail + new, len(self.tail)
        found = []
        for stop in self.stop if self.num_tokens > self.min_tokens else ():
            start = text.find(stop, max(old + 1 - len(stop), 0))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if found:
            _, start, self.stopped = min(found)
            return text[old : start + len(self.stopped)] if self.include else text[:start]
        self.tail = text[len(text) - could_go_on(text, self.stop) :]
        return new if self.include else text[: len(text) - len(self.tail)]


def to_ids(tokenizer: Tokenizer, drawn: list[str | list[int]]) -> list[int]:
    """Return the token ids of a draw of `TOKENS`."""
    return [token for part in drawn for token in (tokenizer.encode(part) if isinstance(part, str) else part)]


def run(stream: TextStream, ids: list[int]) -> list[str]:
    """Return the increments of a request that ends when its stop string is complete."""
    parts = []
    for token_id in ids:
        parts.append(stream.push(token_id))
        if stream.stopped is not None:
            return parts
    return [*parts, stream.finish()]


def could_go_on(text: str, stop: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
    return max((n for string in stop for n in range(1, len(string)) if text.endswith(string[:n])), default=0)


@FUZZ
@given(drawn=TOKENS, stop=STOPS, include=st.booleans(), skip=st.booleans())
def test_increments_add_up_to_the_cut_text(byte_level, drawn, stop, include, skip):
    """The text is equal for any split into tokens, including cut characters and special tokens."""
    ids = to_ids(byte_level, drawn)
    stream = TextStream(byte_level.stream(skip), stop, include)
    expected, stopped = cut(byte_level.decode(ids, skip), stop, include)
    assert "".join(run(stream, ids)) == expected
    assert stream.stopped == stopped


@FUZZ
@given(drawn=TOKENS, stop=STOPS, include=st.booleans())
def test_shown_text_lags_by_no_more_than_a_possible_stop_string(byte_level, drawn, stop, include):
    """After each token the text is a prefix of the final text, without a suffix that may begin a stop string."""
    ids = to_ids(byte_level, drawn)
    final, _ = cut(byte_level.decode(ids), stop, include)
    stream, detokenizer = TextStream(byte_level.stream(), stop, include), byte_level.stream()
    shown = decoded = ""
    for token_id in ids:
        shown += stream.push(token_id)
        decoded += detokenizer.push(token_id)
        assert final.startswith(shown)
        if stream.stopped is not None:
            assert shown == final
            break
        held = 0 if include else could_go_on(decoded, stop)
        assert shown == decoded[: len(decoded) - held]


@FUZZ
@given(drawn=TOKENS, stop=STOPS, include=st.booleans(), min_tokens=st.integers(0, 12))
def test_stop_strings_within_the_first_tokens_do_not_count(byte_level, drawn, stop, include, min_tokens):
    ids = to_ids(byte_level, drawn)
    text, detokenizer = byte_level.decode(ids), byte_level.stream()
    first = "".join(detokenizer.push(token_id) for token_id in ids[:min_tokens])
    stream = TextStream(byte_level.stream(), stop, include, min_tokens)
    expected, stopped = cut(text, stop, include, len(first if len(ids) > min_tokens else text))
    assert "".join(run(stream, ids)) == expected
    assert stream.stopped == stopped


def test_stop_string_in_the_first_tokens_stays_uncounted(byte_level):
    """It is shown at once if it cannot be part of a longer stop string, and is ignored later."""
    stream = TextStream(byte_level.stream(), ("ab", "zzz"), min_tokens=2)
    assert [stream.push(token_id) for token_id in byte_level.encode("abxab")] == ["", "ab", "x", "", ""]
    assert stream.stopped == "ab"
    stream = TextStream(byte_level.stream(), ("b", "abc"), min_tokens=2)
    assert [stream.push(token_id) for token_id in byte_level.encode("abxb")] == ["", "", "abx", ""]
    assert stream.stopped == "b"


LETTERS = st.text(alphabet="ab", min_size=1, max_size=60)
REPEATING = st.tuples(st.text("ab", min_size=1, max_size=4), st.integers(1, 8), st.text("ab", max_size=3)).map(
    lambda drawn: drawn[0] * drawn[1] + drawn[2]
)


@pytest.mark.slow
@settings(FUZZ, max_examples=400)
@given(
    text=st.one_of(LETTERS, st.lists(REPEATING, min_size=1, max_size=4).map("".join)),
    stop=st.lists(st.one_of(REPEATING, st.text("abc", min_size=1, max_size=9)), max_size=5).map(tuple),
    include=st.booleans(),
    min_tokens=st.integers(0, 40),
    data=st.data(),
)
def test_each_increment_is_that_of_a_search_from_the_start(byte_level, text, stop, include, min_tokens, data):
    """Few letters and repetitive strings: most suffixes of the text are prefixes of a stop string."""
    longer = [token for token in range(len(LONG_TOKENS)) if set(LONG_TOKENS[token]) <= set("ab")]
    ids = byte_level.encode(text)
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(ids)))
        ids[place:place] = [data.draw(st.sampled_from(longer))]
    stream = TextStream(byte_level.stream(), stop, include, min_tokens)
    reference = SearchingTextStream(byte_level.stream(), stop, include, min_tokens)
    for token_id in ids:
        assert stream.push(token_id) == reference.push(token_id)
        assert stream.stopped == reference.stopped
    assert stream.finish() == reference.finish()
    assert stream.stopped == reference.stopped


class CountedString(str):
    """Stop string that counts reads of its characters."""

    characters = 0

    def __getitem__(self, key: Any) -> str:
        found = super().__getitem__(key)
        self.characters += len(found)
        return found

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        self.characters += len(prefix)
        return super().startswith(prefix, *bounds)


def steps(stop: tuple[str, ...], ids: list[int], tokenizer: Tokenizer, include: bool = False) -> int:
    """Return the executed lines of the module for these tokens, and the number of reads of stop strings."""
    counted = tuple(CountedString(string) for string in stop)
    stream = TextStream(tokenizer.stream(), counted, include)
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != text_stream.__file__:
            return None
        lines += event in ("call", "line")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for token_id in ids:
            stream.push(token_id)
    finally:
        sys.settrace(before)
    assert stream.stopped is None
    return lines + sum(string.characters for string in counted)


@pytest.mark.first_by_default
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("period", ["a", "ab", "aab"])
def test_work_for_a_character_does_not_grow_with_the_stop_strings(byte_level, period, include):
    """The text is always a prefix of all stop strings, and falls back to a shorter one repeatedly."""
    ids = byte_level.encode((period * 400 + "b") * 3)
    for length in (32, 1000):
        beginning = (period * length)[: length - 1]
        stop = tuple(beginning[i:] + "c" for i in range(16))
        assert steps(stop, ids, byte_level, include) < 32 * len(stop) * len(ids)


def test_stop_strings_cost_nothing_before_the_text_comes_near_them(byte_level):
    """Each of 128 continuations has its own stream."""
    long = tuple("a" * 100_000 + letter for letter in "bcdefghi")
    ids = byte_level.encode("x" * 50)
    assert steps(long, ids, byte_level) < 50 * 100


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "stories15M"])
@settings(FUZZ, max_examples=100)
@given(data=st.data(), text=st.text(max_size=30), include=st.booleans())
def test_real_tokenizers_stop_at_pieces_of_their_text(real, name, data, text, include):
    tokenizer = real[name]
    ids = tokenizer.encode(text)
    decoded = tokenizer.decode(ids)
    pieces = [decoded[i : i + n] for i in range(len(decoded)) for n in (1, 3, 7)] or ["x"]
    stop = tuple(data.draw(st.lists(st.sampled_from(pieces), max_size=3)))
    stream = TextStream(tokenizer.stream(), stop, include)
    expected, stopped = cut(decoded, stop, include)
    assert "".join(run(stream, ids)) == expected
    assert stream.stopped == stopped


@pytest.mark.parametrize(
    ("text", "stop", "shown", "stopped"),
    [
        ("one stop two", ("stop",), "one ", "stop"),
        ("the end", (), "the end", None),
        ("xabcd", ("abcd", "bc"), "xa", "bc"),  # completes first
        ("xabcd", ("bcd", "abcd", "d"), "x", "abcd"),  # complete together: the longest
        ("aaab", ("aab",), "a", "aab"),  # a beginning that starts again later
        ("ab", ("abc",), "ab", None),  # only ever a beginning
        ("🦠🦠x", ("🦠x",), "🦠", "🦠x"),
    ],
)
def test_which_stop_string_ends_the_text(byte_level, text, stop, shown, stopped):
    stream = TextStream(byte_level.stream(), stop)
    assert "".join(run(stream, byte_level.encode(text))) == shown
    assert stream.stopped == stopped
    included = TextStream(byte_level.stream(), stop, include_stop_str_in_output=True)
    assert "".join(run(included, byte_level.encode(text))) == shown + (stopped or "")


def test_stop_string_may_begin_with_the_space_of_the_first_word(real):
    for tokenizer in real.values():
        prompt, ids = tokenizer.encode("The sea is"), tokenizer.encode("The sea is blue and")
        assert ids[: len(prompt)] == prompt
        for include in (False, True):
            stream = TextStream(tokenizer.stream(prompt=prompt), (" blue",), include)
            assert [stream.push(token_id) for token_id in ids[len(prompt) :]] == [" blue" * include, ""]
            assert stream.stopped == " blue"


def test_beginning_of_a_stop_string_waits_until_it_is_decided(byte_level):
    stream = TextStream(byte_level.stream(), ("<b>",))
    assert [stream.push(token_id) for token_id in byte_level.encode("a<b b<")] == ["a", "", "", "<b ", "b", ""]
    assert stream.finish() == "<"
    assert stream.stopped is None


def test_character_cut_off_at_the_end_can_complete_a_stop_string(byte_level):
    ids = byte_level.encode("ok 🦠")[:-1]
    stream = TextStream(byte_level.stream(), (" \ufffd",))
    assert [stream.push(token_id) for token_id in ids] == ["o", "k", "", "", "", ""]
    assert stream.finish() == ""
    assert stream.stopped == " \ufffd"


def test_tokens_after_the_stop_add_nothing(byte_level):
    """A batch may have continued before the stop string was found."""
    stream = TextStream(byte_level.stream(), ("b",))
    assert [stream.push(token_id) for token_id in byte_level.encode("abcb")] == ["a", "", "", ""]
    assert stream.finish() == ""
    assert stream.stopped == "b"


def test_without_a_tokenizer_there_is_no_text():
    stream = TextStream(None, ("a",))
    assert (stream.push(7), stream.finish(), stream.stopped) == ("", "", None)
