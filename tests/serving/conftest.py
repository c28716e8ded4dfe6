"""A tiny model that takes text: every byte is a token."""

import json
from pathlib import Path

import pytest
from tiny_models import tiny_config, write_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"


def write_byte_tokenizer(directory: Path, chat_template: str | None) -> None:
    """A byte-level tokenizer without merges, and without a token that ends an answer."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if chat_template:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that continues text and has no chat template."""
    return _byte_model(tmp_path_factory.mktemp("models") / "text", None)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with a chat template."""
    return _byte_model(tmp_path_factory.mktemp("models") / "chat", CHAT_TEMPLATE)


def _byte_model(directory: Path, chat_template: str | None) -> Path:
    size = {"vocab_size": 256, "max_position_embeddings": 4096, "num_hidden_layers": 1}
    config = tiny_config("smollm2") | size
    write_model(config, directory)
    write_byte_tokenizer(directory, chat_template)
    return directory


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test writes into the user's cache. One for all, so that equal programs compile once."""
    path = tmp_path_factory.getbasetemp() / "amoeba-cache"
    monkeypatch.setenv("AMOEBA_CACHE_DIR", str(path))
    return path
