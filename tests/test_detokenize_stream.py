"""Streamed text of arbitrary tokens: the parts add up to the text of all tokens, with bounded work for each."""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from amoeba_jax.tokenizer import Tokenizer

MODELS = Path(__file__).resolve().parents[2] / "shared" / "data" / "models"
FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
MOST_DECODED = 50
"""Limit of tokens decoded by each `push`, as documented by `DetokenizeStream`."""

# Tokens that end inside a character, tokens that also begin inside one, and parts of a U+FFFD from the model.
PIECES = [b"\x9f\xa6\xa0\xf0", b"\xa6\xa0\xf0\x9f", b"\xa5\xe6", b"\xef\xbf", b"\xbd\xef", b"ab\xe6", b"\xbda", b" a"]
BYTES = [bytes([byte]) for byte in range(256)]
UNKNOWN, EMPTY = 100_000, len(PIECES) + len(BYTES)


class CountingTokenizer(Tokenizer):
    """Tokenizer that counts decoded tokens."""

    decoded = 0

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        ids = list(ids)
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


def counting(fast: FastTokenizer) -> CountingTokenizer:
    return CountingTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast), frozenset())


@pytest.fixture(scope="module")
def byte_level() -> CountingTokenizer:
    """`PIECES`, `BYTES`, and a token that is empty."""
    symbols = {ord(symbol): symbol for symbol in pre_tokenizers.ByteLevel.alphabet()}
    others = iter(symbol for code, symbol in sorted(symbols.items()) if code > 255)
    by_byte = [symbols[byte] if byte in symbols else next(others) for byte in range(256)]
    tokens = ["".join(by_byte[byte] for byte in token) for token in [*PIECES, *BYTES]]
    fast = FastTokenizer(models.BPE({token: index for index, token in enumerate([*tokens, ""])}, []))
    fast.decoder = decoders.ByteLevel()
    tokenizer = counting(fast)
    assert tokenizer.decode([*range(len(PIECES), len(PIECES) + 128)]) == bytes(range(128)).decode()
    return tokenizer


@pytest.fixture(scope="module")
def byte_fallback() -> CountingTokenizer:
    """A SentencePiece vocabulary: all bytes, and after them "▁", "▁a", "b" and U+FFFD with a space before it."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁\ufffd"]
    fast = FastTokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return counting(fast)


@pytest.fixture(scope="module")
def word_piece() -> CountingTokenizer:
    fast = FastTokenizer(models.WordPiece({"a": 0, "##": 1, "##b": 2, "[UNK]": 3}, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return counting(fast)


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    """A byte-level vocabulary with merges."""
    if not MODELS.is_dir():
        pytest.skip("needs the shared data ../shared/data")
    return Tokenizer.from_directory(MODELS / "SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def cut_tokens(real) -> list[int]:
    """Return the tokens with only a part of a character."""
    return [token for token in range(real.vocab_size) if "\ufffd" in real.token_text(token)]


def ids_of(*pieces: bytes) -> list[int]:
    return [[*PIECES, *BYTES].index(piece) for piece in pieces]


def increments(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=False)
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


def repeated(tokens: list[int]) -> st.SearchStrategy[list[int]]:
    """Return short lists of tokens, each repeated many times."""
    part = st.tuples(st.lists(st.sampled_from(tokens), min_size=1, max_size=4), st.integers(1, 30))
    return st.lists(part.map(lambda drawn: drawn[0] * drawn[1]), min_size=1, max_size=5).map(
        lambda parts: [*chain(*parts)]
    )


HOSTILE = [*range(len(PIECES)), EMPTY, UNKNOWN]
HOSTILE += ids_of(*(bytes([byte]) for byte in b"\x41\x80\xa5\xbd\xbf\xc3\xe6\xef\xf0\xf4\xff\x97"))


@FUZZ
@given(ids=st.one_of(repeated(HOSTILE), st.lists(st.sampled_from(HOSTILE), min_size=40, max_size=120)))
def test_increments_of_hostile_bytes_add_up(byte_level, ids):
    text = byte_level.decode(ids)
    shown = ""
    stream = byte_level.stream()
    for token_id in ids:
        before = byte_level.decoded
        shown += stream.push(token_id)
        assert byte_level.decoded - before <= MOST_DECODED
        assert text.startswith(shown)
    assert shown + stream.flush() == text
    assert stream.flush() == ""


@FUZZ
@given(prompt=st.lists(st.sampled_from(HOSTILE), max_size=40), ids=st.lists(st.sampled_from(HOSTILE), max_size=60))
def test_increments_after_hostile_bytes_add_up(byte_level, prompt, ids):
    """A character that begins in the prompt belongs to the output."""
    before = byte_level.decoded
    stream = byte_level.stream(prompt=prompt)
    assert byte_level.decoded - before <= 150
    shown = ""
    for token_id in ids:
        before = byte_level.decoded
        shown += stream.push(token_id)
        assert byte_level.decoded - before <= MOST_DECODED
    shown += stream.flush()
    text, given_out = byte_level.decode(prompt + ids), byte_level.decode(prompt)
    assert shown == text[len(given_out) - (not text.startswith(given_out)) :]


@FUZZ
@given(ids=st.lists(st.integers(len(PIECES), EMPTY), min_size=40, max_size=150))
def test_increments_of_any_bytes_add_up(byte_level, ids):
    assert "".join(increments(byte_level, ids)) == byte_level.decode(ids)


@settings(FUZZ, max_examples=100)
@given(data=st.data())
def test_increments_of_a_real_vocabulary_add_up(real, cut_tokens, data):
    token = st.one_of(st.sampled_from(cut_tokens), st.sampled_from(cut_tokens), st.integers(0, real.vocab_size + 5))
    ids = data.draw(st.one_of(repeated(cut_tokens), st.lists(token, max_size=150)))
    assert "".join(increments(real, ids)) == real.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "ids",
    [
        ids_of(b"\xff"),
        ids_of(b"\x80"),
        ids_of(b"\xe6", b"\x97"),
        ids_of(b"\xef\xbf", b"\xbd\xef", b"\xbf", b"\xbd"),  # U+FFFD that the model means
        ids_of(b"\x9f\xa6\xa0\xf0"),  # characters, but each token ends in the middle of one
        ids_of(b"\xa5\xe6", b"\x97"),
        ids_of(b"\xe6") + [EMPTY] * 5,
        [EMPTY],
        [UNKNOWN],
        [UNKNOWN] * 7 + ids_of(b"\xf0"),
    ],
)
def test_work_for_a_byte_token_is_bounded(byte_level, ids):
    """If text is held back forever, n tokens cause n**2 / 2 decoded tokens."""
    ids = (ids * 2000)[:2000]
    before = byte_level.decoded
    parts = increments(byte_level, ids)
    assert byte_level.decoded - before <= MOST_DECODED * len(ids)
    text = byte_level.decode(ids)
    assert "".join(parts) == text
    # Only a few tokens are held back at the end.
    assert len(parts[-1]) <= 17


@pytest.mark.parametrize(
    "tokens",
    [[0xFF], [0x80], [0xE6, 0x97], [0xFF, 0x41], [0xFF, 0xE6, 0x97, 0xA5], [258, 0xC3], [259], [256], [UNKNOWN]],
)
def test_work_for_a_byte_fallback_token_is_bounded(byte_fallback, tokens):
    ids = [258, *(tokens * 2000)[:2000], 257]
    before = byte_fallback.decoded
    text = "".join(increments(byte_fallback, ids))
    assert byte_fallback.decoded - before <= MOST_DECODED * len(ids)
    assert text == byte_fallback.decode(ids)


@FUZZ
@given(runs=st.lists(repeated([0x41, 0x97, 0xA5, 0xC3, 0xE6, 0xF0, 0xFF]), max_size=4))
def test_words_between_invalid_bytes_are_kept(byte_fallback, runs):
    """The bytes themselves are the documented exception."""
    words = [257, 258]
    ids = [token for run in runs for token in (*words, *run)] + words
    text = "".join(increments(byte_fallback, ids))
    assert f" {text}".count(" ab") == len(runs) + 1


def test_work_for_tokens_that_the_decoder_swallows_is_bounded(word_piece):
    ids = [1] * 1000 + [0] + [1] * 1000 + [2, 0]
    before = word_piece.decoded
    parts = increments(word_piece, ids)
    assert word_piece.decoded - before <= MOST_DECODED * len(ids)
    assert "".join(parts).endswith("ab a")


def test_work_for_characters_after_an_invalid_byte_of_their_run_is_bounded(byte_fallback):
    """The text of all tokens has U+FFFD for these characters."""
    ids = [0xFF, *[0xE6, 0x97, 0xA5] * 500, 257]
    before = byte_fallback.decoded
    text = "".join(increments(byte_fallback, ids))
    assert byte_fallback.decoded - before <= MOST_DECODED * len(ids)
    assert text.startswith("\ufffd" * 8)
    assert text.endswith(" a")


def test_character_after_undecodable_bytes_comes_whole(byte_level):
    parts = increments(byte_level, ids_of(*[b"\x80"] * 100, b"\xe6", b"\x97", b"\xa5", b"a"))
    assert "".join(parts) == "\ufffd" * 100 + "日a"
    assert next(part for part in parts if "日" in part).endswith("日")
    assert all(len(part) <= 17 for part in parts)
