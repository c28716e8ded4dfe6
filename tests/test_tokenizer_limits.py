"""Limits for the cost of a client's text: lengths, many texts at once, short error messages."""

import gzip
import json
import os
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from amoeba_jax.errors import RequestError
from amoeba_jax.tokenizer import Tokenizer

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
TEXTS = ["", "One two.", "  日本語 👍🏽\n\n", "<|endoftext|>x</s><s>", "1234", "e\u0301 \u03b1\u0313\u0300\u0345"]
FUZZ = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Decomposed characters, runs that long tokens cover, and anything.
TEXT = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.text(max_size=20).map(lambda text: unicodedata.normalize("NFD", text)),
        st.tuples(
            st.sampled_from(["e\u0301", "\u03b1\u0313\u0300\u0345", " ", "-", "\u01d5"]), st.integers(1, 300)
        ).map(lambda drawn: drawn[0] * drawn[1]),
    )
).map("".join)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[str, Tokenizer]:
    """Byte-level without and with a normalizer, and SentencePiece."""
    if not SHARED.is_dir():
        pytest.skip("needs the shared data ../shared/data")
    qwen = tmp_path_factory.mktemp("Qwen3")
    packed = (SHARED / "tokenizers" / "Qwen3" / "tokenizer.json.gz").read_bytes()
    (qwen / "tokenizer.json").write_bytes(gzip.decompress(packed))
    directories = {name: SHARED / "models" / name for name in ("SmolLM2-135M-Instruct", "stories15M")} | {"Qwen3": qwen}
    return {name: Tokenizer.from_directory(directory) for name, directory in directories.items()}


NAMES = ["SmolLM2-135M-Instruct", "stories15M", "Qwen3"]


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """The letters a and b, "bbb", and a special token."""
    return of(models.BPE({"a": 0, "b": 1, "bb": 2, "bbb": 3}, [("b", "b"), ("bb", "b")]))


def of(model: models.Model, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    fast = FastTokenizer(model)
    if normalizer is not None:
        fast.normalizer = normalizer
    fast.add_special_tokens([AddedToken("<end>", normalized=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast), frozenset())


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_many_texts_have_the_ids_of_each_alone(name, special, loaded):
    tokenizer = loaded[name]
    alone = [tokenizer._backend.encode(text, add_special_tokens=special).ids for text in TEXTS]
    assert tokenizer.encode_all(TEXTS, special) == alone
    assert tokenizer.encode_all(tuple(TEXTS), add_special_tokens=special) == alone
    assert [tokenizer.encode(text, special) for text in TEXTS] == alone
    assert tokenizer.encode_all([], special) == []


@FUZZ
@given(texts=st.lists(TEXT, max_size=3))
@pytest.mark.parametrize("name", NAMES)
def test_any_texts_have_the_ids_of_the_librarys_encode(name, loaded, texts):
    tokenizer = loaded[name]
    assert tokenizer.encode_all(texts) == [tokenizer._backend.encode(text).ids for text in texts]


def test_long_decodes_have_the_text_of_the_librarys_decode(loaded):
    for tokenizer in loaded.values():
        ids = tokenizer.encode("One two 日本 👍🏽. " * 2000)
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)
        assert tokenizer.decode(ids, False) == tokenizer._backend.decode(ids, skip_special_tokens=False)


def test_prompts_are_neither_cut_nor_padded_as_in_transformers(tmp_path):
    """Padding in `tokenizer.json` is ignored: the ids of one text would depend on other texts."""
    fast = FastTokenizer(models.BPE({"a": 0, "b": 1}, []))
    fast.enable_truncation(4)
    fast.enable_padding(length=8)
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer, expected = Tokenizer.from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode_all(["ab", "ababab"]) == [[0, 1], [0, 1, 0, 1, 0, 1]]
    assert [expected.encode("ab"), expected.encode("ababab")] == [[0, 1], [0, 1, 0, 1, 0, 1]]


def turns_meanwhile(work: Callable[[], object]) -> int:
    """Count the iterations of a loop in another thread while `work` runs."""
    turns = 0
    started, ended = threading.Event(), threading.Event()

    def count() -> None:
        nonlocal turns
        started.set()
        while not ended.is_set():
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    started.wait()
    work()
    ended.set()
    thread.join()
    return turns


def test_other_threads_run_while_a_text_is_encoded_or_decoded(letters):
    """Other threads do not run while the interpreter lock is held, as in the library's `encode` and `decode`."""
    text = "ab" * 300_000
    ids = letters.encode(text) * 10
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        assert turns_meanwhile(lambda: letters.encode(text)) > 2 * turns_meanwhile(
            lambda: letters._backend.encode(text).ids
        )
        assert turns_meanwhile(lambda: letters.decode(ids)) > 2 * turns_meanwhile(lambda: letters._backend.decode(ids))
    finally:
        sys.setswitchinterval(before)


def test_fork_after_many_texts_is_silent(tmp_path):
    """There is no warning of the library about parallelism, and no environment variable to suppress it."""
    code = """
import os, sys
from tokenizers import Tokenizer as Fast, models
from transformers import PreTrainedTokenizerFast
from amoeba_jax.tokenizer import Tokenizer
fast = Fast(models.BPE({"a": 0, "b": 1}, []))
tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast), frozenset())
assert len(tokenizer.encode_all(["ab"] * 100)) == 100
child = os.fork()
if child == 0:
    os._exit(0 if tokenizer.encode_all(["ab", "b"]) == [[0, 1], [1]] else 1)
assert os.waitpid(child, 0)[1] == 0
assert "TOKENIZERS_PARALLELISM" not in os.environ
"""
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "parallelism" not in done.stderr.lower()


@FUZZ
@given(text=TEXT)
@pytest.mark.parametrize("name", NAMES)
def test_no_text_has_fewer_tokens_than_its_length_allows(name, loaded, text):
    """Exceptions are characters that a vocabulary drops, such as U+0016 in SmolLM2's."""
    tokenizer = loaded[name]
    known = "".join(c for c in text if tokenizer.encode(c, add_special_tokens=False))
    assert len(known) <= len(tokenizer.encode(known, add_special_tokens=False)) * tokenizer.longest_token_chars


@pytest.mark.parametrize("name", NAMES)
def test_longest_token_is_that_of_the_vocabulary(name, loaded):
    """No vocabulary has a much shorter limit: most of their longest tokens are spaces."""
    tokenizer = loaded[name]
    longest = max(len(tokenizer.token_text(token)) for token in range(tokenizer.vocab_size))
    assert longest <= tokenizer.longest_token_chars <= longest + 2
    assert tokenizer.longest_token_chars == {"SmolLM2-135M-Instruct": 81, "stories15M": 16, "Qwen3": 129}[name]


def test_longest_token_counts_special_tokens_and_composed_characters(letters):
    assert letters.longest_token_chars == len("<end>")
    text = "\u1f82" * 2  # each character decomposes into 4 characters
    assert of(models.BPE({"\u1f82": 0, text: 1}, [("\u1f82", "\u1f82")])).longest_token_chars == len("<end>")
    composing = of(models.BPE({"\u1f82": 0, text: 1}, [("\u1f82", "\u1f82")]), normalizers.NFC())
    decomposed = unicodedata.normalize("NFD", text)
    assert composing.encode(decomposed) == [1]
    assert composing.longest_token_chars >= len(decomposed) == 8


def test_token_may_begin_a_character_that_the_text_has_decomposed():
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({symbol: index for index, symbol in enumerate(symbols)}, []))
    fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast), frozenset())
    text = "\u03b9\u0308\u0301" * 10
    assert len(tokenizer.encode(text)) == 20
    assert len(text) <= 20 * tokenizer.longest_token_chars <= 20 * 5


def test_text_of_a_token_is_what_it_adds_to_a_text(loaded):
    for name, tokenizer in loaded.items():
        before = tokenizer.encode("x", add_special_tokens=False)
        for token in [*range(1000), tokenizer.vocab_size - 1, tokenizer.vocab_size + 7]:
            for _ in range(2):
                text = tokenizer.decode([*before, token], skip_special_tokens=False)
                assert text == "x" + tokenizer.token_text(token), name
    assert loaded["Qwen3"].token_text(151_645) == "<|im_end|>"
    assert [loaded["stories15M"].token_text(token) for token in (2, 278, 29874)] == ["</s>", " the", "a"]


def test_text_of_a_token_is_decoded_once_and_not_kept_for_ever(letters):
    class Counting(Tokenizer):
        decodes = 0

        def decode(self, ids, skip_special_tokens=True):
            self.decodes += 1
            return super().decode(ids, skip_special_tokens)

    tokenizer = Counting(letters._fast, frozenset())
    # Without a decoder, tokens are words.
    assert [tokenizer.token_text(token) for token in (0, 1, 4, 0, 1, 4)] == [" a", " b", " <end>"] * 2
    assert tokenizer.decodes == 2 * 3
    # Ids beyond the vocabulary, which a model's padded logits can have, replace others.
    for token in range(1000):
        tokenizer.token_text(token)
    assert tokenizer._token_text.cache_info().currsize == tokenizer.vocab_size == 5


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ["x" * 100_000] * 1000},
        {"role": "user", "content": [[[["x"] * 1000] * 1000] * 1000] * 1000},
        {"role": 10**5000, "content": "x"},
        {"role": "user", "content": "x" * 1_000_000},  # echoed by the template
        {"role": "user", "content": "\ud800" * 1_000_000},
    ],
)
def test_errors_about_large_values_are_short(message, letters):
    fast = PreTrainedTokenizerFast(tokenizer_object=letters._backend)
    fast.chat_template = "{{ raise_exception('no ' + messages[0].content) }}"
    if "\ud800" in message["content"]:
        fast.chat_template = "{{ messages[0].content }}"
    with pytest.raises(RequestError) as caught:
        Tokenizer(fast, frozenset()).apply_chat_template([message])
    assert len(str(caught.value)) < 600
    str(caught.value).encode()
