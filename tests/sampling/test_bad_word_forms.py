"""Bad words by brute force: the mask stops every text with a banned word that real tokenizers encode."""

import gzip
import re
from itertools import product
from pathlib import Path

import pytest

from amoeba_jax import SamplingParams
from amoeba_jax.sampling.rows import SamplingRow, bad_word_ids, bad_word_pairs, sampling_row
from amoeba_jax.tokenizer import Tokenizer

WORDS = ("Lily", "a", "the end", "naïve", "C++", "don't", "it", "猫", "1984", "...", "</b>", "Once upon a time")
# Text before a word. Each ends at a possible start of a word.
BEFORE = ("", " ", "\n", "\n\n", "  ", "\n  ", "He ran. ", "He ran.\n", "x\n\n", "Yes,  ", "<b>\n")
# Text after a word. No vocabulary here merges it with the last token of the word.
AFTER = ("", " and", " Lily")


@pytest.fixture(scope="module", params=["stories260K", "SmolLM2-135M-Instruct", "Qwen2.5", "Qwen3"])
def tokenizer(request: pytest.FixtureRequest, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if not request.param.startswith("Qwen"):
        return Tokenizer.from_directory(shared_data / "models" / request.param)
    packed = shared_data / "tokenizers" / request.param / "tokenizer.json.gz"
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "tokenizer.json").write_bytes(gzip.decompress(packed.read_bytes()))
    return Tokenizer.from_directory(directory)


def row_for(words: list[str], tokenizer: Tokenizer) -> SamplingRow:
    params = SamplingParams(max_tokens=1000, bad_words=words)
    return sampling_row(params, 0, tokenizer.vocab_size, (), bad_word_ids(params.bad_words, tokenizer))


def is_masked(row: SamplingRow, tokens: list[int]) -> bool:
    """Return whether the mask excludes one of the tokens, given the tokens before it."""
    last = {word[-1] for word in row.bad_words}
    for index, token in enumerate(tokens):
        if token in row.banned:
            return True
        if token in last and token in bad_word_pairs(row, tokens[:index], in_flight=False)[1]:
            return True
    return False


@pytest.mark.parametrize("word", WORDS)
def test_no_encoded_text_holds_a_bad_word(tokenizer: Tokenizer, word: str):
    row = row_for([word], tokenizer)
    for before, after in product(BEFORE, AFTER):
        text = before + word + after
        assert is_masked(row, tokenizer.encode(text, add_special_tokens=False)), text


def test_words_of_real_text_are_masked_and_other_text_is_not(tokenizer: Tokenizer, shared_data: Path):
    with gzip.open(shared_data / "prompts" / "tinyshakespeare.txt.gz", "rt", encoding="utf-8") as file:
        play = file.read(15_000)
    words = sorted(set(re.findall(r"(?<=\s)[A-Za-z]{3,}(?=\s)", play)))[::9]
    lines = [line for line in play.splitlines() if line]
    encoded = tokenizer.encode_all(lines, add_special_tokens=False)
    assert len(words) > 30
    for word in words:
        row = row_for([word], tokenizer)
        for line, tokens in zip(lines, encoded, strict=True):
            if re.search(rf"(^|\s){word}($|\s)", line):
                assert is_masked(row, tokens), (word, line)
            elif word not in line:
                assert not is_masked(row, tokens), (word, line)


def test_newline_before_a_word_is_no_way_around_sentencepiece(shared_data: Path):
    """Llama 2's vocabulary encodes a word at the start of a text like a word after a space."""
    tokenizer = Tokenizer.from_directory(shared_data / "models" / "stories260K")
    forms = {tokenizer.decode([tokenizer.encode("x", False)[-1], *form]) for form in bad_word_ids(["Lily"], tokenizer)}
    assert forms == {"xLily", "x Lily"}
