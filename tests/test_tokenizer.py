import gzip
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from amoeba_jax.errors import CheckpointError, RequestError
from amoeba_jax.tokenizer import Tokenizer

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
MODELS = ["SmolLM2-135M-Instruct", "stories15M", "stories260K", "Qwen3"]
TEXTS = [
    "Once upon a time, there was a dog.",
    "  two spaces,\n\n\ttabs  and\r\nlines ",
    "👍🏽 👩‍👩‍👧‍👦 🇫🇷 😀 日本語 한국어 مرحبا ½ é e\u0301",
    "def f(x):\n    return x ** 2  # 1234567",
    "a\ufffdb \ufffd",
    "",
]
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi 😀\n x"}]


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, Path]:
    if not SHARED.is_dir():
        pytest.skip("needs the shared data ../shared/data")
    found = {name: SHARED / "models" / name for name in MODELS[:3]}
    # The Qwen tokenizers are kept compressed.
    found["Qwen3"] = tmp_path_factory.mktemp("Qwen3")
    for path in (SHARED / "tokenizers" / "Qwen3").iterdir():
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        (found["Qwen3"] / path.name.removesuffix(".gz")).write_bytes(content)
    return found


@pytest.fixture(scope="module")
def loaded(directories) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_directory(path) for name, path in directories.items()}


@pytest.mark.parametrize("name", MODELS)
def test_encodes_and_decodes_as_transformers(name, directories, loaded):
    expected = AutoTokenizer.from_pretrained(directories[name])
    ours = loaded[name]
    assert ours.vocab_size == len(expected)
    assert ours.bos_token_id == expected.bos_token_id
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == expected.encode(text)
        assert ours.encode(text, add_special_tokens=False) == expected.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == expected.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == expected.decode(ids)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "Qwen3"])
def test_chat_template_gives_the_ids_of_transformers(name, prompt, directories, loaded):
    expected = AutoTokenizer.from_pretrained(directories[name])
    ids = expected.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
    assert loaded[name].apply_chat_template(CHAT, add_generation_prompt=prompt) == ids


def test_model_without_template_takes_no_chat(loaded):
    with pytest.raises(RequestError, match="no chat template"):
        loaded["stories15M"].apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "at least one message"),
        (None, "at least one message"),
        (["hello"], r"messages\[0\] is a str: it must be an object"),
        (
            [{"role": "user", "content": "a"}, {"role": "user"}],
            r"messages\[1\] needs a string 'content', not None",
        ),
        ([{"content": "a"}], r"messages\[0\] needs a string 'role', not None"),
        ([{"role": "user", "content": ["a"]}], r"needs a string 'content', not \['a'\]"),
        ([{"role": "user", "content": "a\ud800"}], r"messages\[0\].content must be valid Unicode: character 1"),
    ],
)
def test_malformed_messages_are_named(messages, message, loaded):
    with pytest.raises(RequestError, match=message):
        loaded["SmolLM2-135M-Instruct"].apply_chat_template(messages)


def copy_with(source: Path, target: Path, **files: dict) -> Path:
    """Return a tokenizer directory with other JSON files beside its tokenizer.json."""
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (target / f"{name}.json").write_text(json.dumps(content))
    return target


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError: 'integer division"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{{ 2.0 ** 5000 }}", "OverflowError"),
        ("{{ messages[7].content.strip() }}", "refuses these messages: "),
        ("{{ {}['a'] + 1 }}", "refuses these messages: "),
        ("{{ '%d' % 'x' }}", "TypeError"),
        ("{{ 'x'.encode('no such codec') }}", "LookupError"),
        ("{{ '\\ud800' }}", "valid Unicode"),
        ("{% for %}", "refuses these messages: "),
    ],
)
def test_every_failure_of_a_template_is_the_requests_fault(template, reason, directories, tmp_path):
    directory = copy_with(directories["stories260K"], tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(RequestError, match=reason) as caught:
        Tokenizer.from_directory(directory).apply_chat_template(CHAT)
    assert len(str(caught.value)) < 600
    str(caught.value).encode()


def test_refusal_by_the_template_is_the_requests_fault(directories, tmp_path):
    template = "{{ raise_exception('Conversation roles must alternate') }}"
    directory = copy_with(directories["stories260K"], tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(RequestError, match="refuses these messages: 'Conversation roles must alternate'"):
        Tokenizer.from_directory(directory).apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\ud800b", r"must be valid Unicode: character 1 is the unpaired surrogate U\+D800$"),
        ("\udcff", r"character 0 is the unpaired surrogate U\+DCFF \(the byte 0xFF of a text that is not UTF-8\)"),
        (("a", "b"), "must be a string, got"),
        (["a"], "must be a string, got"),
        (b"a", "must be a string, got"),
        (None, "must be a string, got"),
    ],
)
def test_texts_that_are_no_unicode_are_refused(text, message, loaded):
    with pytest.raises(RequestError, match=message):
        loaded["stories15M"].encode(text)
    with pytest.raises(RequestError, match=message):
        loaded["stories15M"].encode_all(["fine", text])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [1, 2]}, "config": {"eos_token_id": 5}}, {1, 2}),
        ({"generation_config": {"eos_token_id": 7}}, {7}),
        ({"generation_config": {}, "config": {"eos_token_id": 5}}, {5}),
        ({"generation_config": {"eos_token_id": [-1]}, "config": {"eos_token_id": 5}}, {5}),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": "</s>"}}, {2}),
        ({"generation_config": {"eos_token_id": 7}, "tokenizer_config": {"eos_token": "</s>"}}, {2, 7}),
        ({"config": {"eos_token_id": 7}, "tokenizer_config": {"eos_token": "</s>"}}, {2, 7}),
        ({}, set()),
    ],
)
def test_ends_of_generation_are_the_models_and_the_tokenizers(files, expected, directories, tmp_path):
    directory = copy_with(directories["stories260K"], tmp_path, **files)
    assert Tokenizer.from_directory(directory).eos_token_ids == expected


def test_directory_without_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json: make one"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0", "model": 3}'])
def test_damaged_tokenizer_is_named(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_directory(tmp_path)


def increments(tokenizer: Tokenizer, ids: list[int], skip: bool = True, prompt: tuple[int, ...] = ()) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip, prompt=prompt)
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=40)))
def test_increments_add_up_to_the_text(name, loaded, text):
    tokenizer = loaded[name]
    ids = tokenizer.encode(text)
    assert "".join(increments(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(increments(tokenizer, ids, skip=False)) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "Qwen3"])
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), skip=st.booleans())
def test_increments_add_up_for_any_tokens_of_byte_level_vocabularies(name, loaded, data, skip):
    tokenizer = loaded[name]
    # Half of the ids are low: special tokens and single bytes.
    token = st.one_of(st.integers(0, 300), st.integers(0, tokenizer.vocab_size - 1))
    ids = data.draw(st.lists(token, max_size=20))
    assert "".join(increments(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), skip=st.booleans())
def test_sentencepiece_increments_add_up_unless_bytes_are_invalid(loaded, data, skip):
    tokenizer = loaded["stories15M"]
    token = st.one_of(st.integers(0, 300), st.integers(0, tokenizer.vocab_size - 1))
    ids = data.draw(st.lists(token, max_size=20))
    streamed = "".join(increments(tokenizer, ids, skip))
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in text:
        assert streamed == text


def given_out(tokenizer: Tokenizer, ids: list[int], end: int, skip: bool = True) -> str:
    """Return the text of `ids[:end]` without a character that is cut at the end."""
    texts = [tokenizer.decode(ids[:place], skip) for place in range(end + 1)]
    whole = tokenizer.decode(ids, skip)
    return max((text for text in (*texts, texts[-1].rstrip("\ufffd")) if whole.startswith(text)), key=len)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=40)), skip=st.booleans())
def test_prompt_and_increments_add_up_to_the_text(name, loaded, data, text, skip):
    """The prompt may end in the middle of a word or of a character."""
    tokenizer = loaded[name]
    ids = tokenizer.encode(text.replace("\ufffd", ""))
    end = data.draw(st.integers(0, len(ids)))
    added = "".join(increments(tokenizer, ids[end:], skip, tuple(ids[:end])))
    assert given_out(tokenizer, ids, end, skip) + added == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", ["stories15M", "stories260K"])
def test_first_word_after_a_prompt_keeps_its_space(name, skip, loaded):
    tokenizer = loaded[name]
    bos, *blue = tokenizer.encode("blue")
    for prompt in ("The sea is", "日本語日本語", "x"):
        ids = tokenizer.encode(prompt)
        assert "".join(increments(tokenizer, blue, skip, tuple(ids))) == " blue"
        # Tokens without text hide no word. If special tokens are in the text, a word after them has a space.
        assert "".join(increments(tokenizer, blue, skip, (*ids, bos, bos, tokenizer.vocab_size))) == " blue"
    assert "".join(increments(tokenizer, blue, skip, (bos,))) == ("blue" if skip else " blue")
    assert "".join(increments(tokenizer, blue, skip)) == "blue"
    assert "".join(increments(tokenizer, [], skip, tuple(ids))) == ""


@pytest.mark.parametrize("name", MODELS)
def test_character_that_the_prompt_cuts_off_comes_whole(name, loaded):
    tokenizer = loaded[name]
    ids = tokenizer.encode("a 日 🦠🦠 b", add_special_tokens=False)
    ends = [end for end in range(len(ids)) if "\ufffd" in tokenizer.decode(ids[:end])]
    assert len(ends) >= 2
    for end in ends:
        added = "".join(increments(tokenizer, ids[end:], prompt=tuple(ids[:end])))
        assert given_out(tokenizer, ids, end) + added == "a 日 🦠🦠 b"


def test_characters_split_over_tokens_come_whole(loaded):
    for name in ("SmolLM2-135M-Instruct", "stories15M"):
        tokenizer = loaded[name]
        ids = tokenizer.encode("a 🦠🦠 b", add_special_tokens=False)
        parts = [part for part in increments(tokenizer, ids) if part]
        assert "".join(parts) == "a 🦠🦠 b"
        assert len(ids) > len(parts)
        assert all("\ufffd" not in part for part in parts)
        assert sum("🦠" in part for part in parts) == 2


def test_flush_gives_what_a_cut_character_leaves(loaded):
    tokenizer = loaded["SmolLM2-135M-Instruct"]
    ids = tokenizer.encode("ok 🦠")[:-1]
    parts = increments(tokenizer, ids)
    assert "\ufffd" not in "".join(parts[:-1])
    assert parts[-1].endswith("\ufffd")
    assert "".join(parts) == tokenizer.decode(ids)


def test_words_keep_their_spaces_after_a_skipped_token(loaded):
    tokenizer = loaded["stories15M"]
    ids = tokenizer.encode("one two", add_special_tokens=False)
    ids = [1, ids[0], 2, 1, *ids[1:]]
    assert "".join(increments(tokenizer, ids)) == tokenizer.decode(ids) == "one two"


def test_streams_of_one_tokenizer_are_independent(loaded):
    tokenizer = loaded["stories15M"]
    ids = [tokenizer.encode(text) for text in ("the red 🦠 cat", "a 日本 dog ran")]
    streams = [tokenizer.stream(), tokenizer.stream()]
    texts = ["", ""]
    for step in range(max(map(len, ids))):
        for i, stream in enumerate(streams):
            if step < len(ids[i]):
                texts[i] += stream.push(ids[i][step])
    assert [text + stream.flush() for text, stream in zip(texts, streams, strict=True)] == [
        "the red 🦠 cat",
        "a 日本 dog ran",
    ]


def test_decode_is_the_librarys_own(directories, loaded):
    raw = tokenizers.Tokenizer.from_file(str(directories["stories15M"] / "tokenizer.json"))
    ids = loaded["stories15M"].encode("A dog . A cat , don 't")
    assert loaded["stories15M"].decode(ids) == raw.decode(ids) == "A dog . A cat , don 't"
