import gzip
import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer, GPT2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from amoeba_jax.checkpoint.gguf_tokenizer import LLAMA3_WORDS, write_tokenizer
from amoeba_jax.errors import CheckpointError
from amoeba_jax.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def metadata_of(tokenizer_json: Path, kind: str, pre: str | None = None, **extra: Any) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter would write for a Hugging Face tokenizer."""
    text = tokenizer_json.read_bytes()
    content = json.loads(gzip.decompress(text) if tokenizer_json.suffix == ".gz" else text)
    ids = dict(content["model"]["vocab"])
    added = {token["content"]: token for token in content["added_tokens"]}
    ids |= {token: entry["id"] for token, entry in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)

    def type_of(token: str) -> int:
        if token in added:
            return CONTROL if added[token]["special"] else USER_DEFINED
        return BYTE if kind == "llama" and token.startswith("<0x") else NORMAL

    found = {
        "model": kind,
        "tokens": tokens,
        "token_type": [type_of(token) for token in tokens],
        **extra,
    }
    if kind == "gpt2":
        merges = content["model"]["merges"]
        found["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    else:
        # The score of a piece falls with the rank of its merge, as in SentencePiece's trainer.
        places: dict[str, int] = {}
        for place, merge in enumerate(content["model"]["merges"]):
            places.setdefault("".join(merge), place)
        found["scores"] = [-float(places.get(token, 0)) for token in tokens]
    if pre is not None:
        found["pre"] = pre
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def build(metadata: dict[str, Any], directory: Path) -> tokenizers.Tokenizer:
    write_tokenizer(metadata, 2048, directory)
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def read_expected(path: Path) -> tokenizers.Tokenizer:
    if path.suffix == ".gz":
        return tokenizers.Tokenizer.from_str(gzip.decompress(path.read_bytes()).decode())
    return tokenizers.Tokenizer.from_file(str(path))


def assert_same(built: tokenizers.Tokenizer, expected: tokenizers.Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = built.encode(text).ids
        assert ids == expected.encode(text).ids, text
        assert built.decode(ids) == expected.decode(ids), text
        assert built.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("model", ["stories260K", "stories15M"])
def test_sentencepiece_vocabulary_tokenizes_as_the_original(model, shared_path, texts, tmp_path):
    source = shared_path("models", model, "tokenizer.json")
    metadata = metadata_of(source, "llama", bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    assert_same(build(metadata, tmp_path), read_expected(source), texts)


@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3"])
def test_qwen_vocabulary_tokenizes_as_the_original(name, shared_path, texts, tmp_path):
    source = shared_path("tokenizers", name, "tokenizer.json.gz")
    metadata = metadata_of(source, "gpt2", "qwen2", bos_token_id=151643, eos_token_id=151645)
    assert_same(build(metadata, tmp_path), read_expected(source), texts)


def test_smollm_vocabulary_tokenizes_as_the_original(shared_path, texts, tmp_path):
    source = shared_path("models", "SmolLM2-135M-Instruct", "tokenizer.json")
    assert_same(build(metadata_of(source, "gpt2", "smollm"), tmp_path), read_expected(source), texts)


@pytest.mark.parametrize("pre", ["gpt-2", "default", None])
def test_plain_byte_level_splits_as_gpt2(pre, shared_path, texts, tmp_path):
    source = shared_path("models", "SmolLM2-135M-Instruct", "tokenizer.json")
    metadata = metadata_of(source, "gpt2", pre)
    built = build(metadata, tmp_path)
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    expected = GPT2Tokenizer(vocab=vocabulary, merges=merges)  # pyright: ignore[reportArgumentType]
    for text in texts:
        if "<" not in text:  # GPT2Tokenizer does not know these special tokens
            assert built.encode(text).ids == expected.encode(text), text


def test_llama3_splits_as_tiktoken_and_starts_with_bos(shared_path, tmp_path):
    assert signature(TikTokenConverter).parameters["pattern"].default == LLAMA3_WORDS
    source = shared_path("models", "SmolLM2-135M-Instruct", "tokenizer.json")
    built = build(metadata_of(source, "gpt2", "llama-bpe", bos_token_id=1, eos_token_id=2), tmp_path)
    assert built.encode("hello").ids[0] == 1
    assert built.encode("hello", add_special_tokens=False).ids[0] != 1
    pieces = built.pre_tokenizer.pre_tokenize_str("12345 don't\n\n x")
    assert [piece for piece, _ in pieces] == ["123", "45", "Ġdon", "'t", "ĊĊ", "Ġx"]


def small(**changes: Any) -> dict[str, Any]:
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["h", "e", "l", "o", "he", "ll", "<|a|>", "<|b|>", "<tool>"],
        "token_type": [1, 1, 1, 1, 1, 1, 3, 3, 4],
        "merges": ["h e", "l l"],
        "bos_token_id": 6,
        "eos_token_id": 7,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def test_token_types_become_special_and_added_tokens(tmp_path):
    built = build(small(), tmp_path)
    ids = built.encode("hello<|a|><tool>").ids
    assert ids == [4, 5, 3, 6, 8]
    assert built.decode(ids) == "hello<tool>"
    assert built.get_vocab_size() == 9


def test_bos_and_eos_are_added_where_the_file_says_so(tmp_path):
    assert build(small(add_bos_token=True, add_eos_token=True), tmp_path).encode("he").ids == [6, 4, 7]
    assert build(small(add_bos_token=True), tmp_path).encode("he").ids == [6, 4]
    assert build(small(), tmp_path).encode("he").ids == [4]


def test_files_load_in_transformers(tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}<|b|>"
    metadata = small(eot_token_id=6, padding_token_id=7) | {"tokenizer.chat_template": template}
    write_tokenizer(metadata, 77, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<|a|>", "<|b|>", "<|b|>")
    assert loaded.unk_token is None
    assert loaded.model_max_length == 77
    assert loaded.encode("hello") == [4, 5, 3]
    chat = [{"role": "user", "content": "he"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == "he<|b|>"
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 6, "eos_token_id": [7, 6], "pad_token_id": 7}


@pytest.mark.parametrize(
    ("names", "kind", "expected"),
    [
        (["<|eot_id|>", "<|eom_id|>"], CONTROL, [7, 9, 10]),
        (["<|im_end|>", "<|endoftext|>"], CONTROL, [7, 9, 10]),
        (["<|end|>", "<end_of_turn>"], CONTROL, [7, 9, 10]),
        (["<EOT>", "_<EOT>"], CONTROL, [7, 9, 10]),
        (["<|im_start|>", "<|start_header_id|>"], CONTROL, 7),
        (["<|eot_id|>", "<|im_end|>"], NORMAL, 7),
        (["<|eot_id|>", "<|im_end|>"], USER_DEFINED, 7),
    ],
)
def test_control_tokens_with_the_name_of_an_end_are_ends(names, kind, expected, tmp_path):
    """Files of chat models often name only `eos`. A word from a user is never an end, even if it looks like an end."""
    metadata = small()
    metadata["tokenizer.ggml.tokens"] += names
    metadata["tokenizer.ggml.token_type"] += [kind] * len(names)
    write_tokenizer(metadata, 128, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == expected
    found = Tokenizer.from_directory(tmp_path).eos_token_ids
    assert found == ({expected} if isinstance(expected, int) else set(expected))


@pytest.mark.parametrize("roles", [{}, {"eot_token_id": 9}, {"eos_token_id": None}])
def test_ends_by_key_come_first_and_once(roles, tmp_path):
    metadata = small(tokens=[*"helo", "he", "ll", "<|a|>", "<|b|>", "<tool>", "<|eot_id|>"], **roles)
    metadata["tokenizer.ggml.token_type"] = [1] * 6 + [3, 3, 4, 3]
    write_tokenizer(metadata, 128, tmp_path)
    expected = 9 if "eos_token_id" in roles else [7, 9]
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model is 'bert': only 'gpt2'.* and 'llama'"),
        ({"model": None}, r"tokenizer\.ggml\.model is None"),
        ({"pre": "tekken"}, r"tokenizer\.ggml\.pre is 'tekken': only deepseek-r1-qwen, default, gpt-2"),
        ({"tokens": None}, r"has 0 tokens and 9 token types"),
        ({"token_type": [1]}, r"has 9 tokens and 1 token types"),
        ({"merges": None}, r"merges is missing or damaged"),
        ({"merges": ["h e", "ll"]}, r"merges is missing or damaged"),
        ({"merges": ["h z"]}, r"vocabulary cannot be used: .*z"),
        ({"bos_token_id": 9}, r"bos_token_id is 9, but it has 9 tokens"),
        ({"model": "llama"}, r"has 9 tokens but 0 scores"),
    ],
)
def test_contradictions_are_named(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        write_tokenizer(small(**changes), 128, tmp_path)
