"""Tiny models that take text, and a cache of the tests' own."""

from pathlib import Path

import pytest
from tiny_models import byte_model


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that continues text and has no chat template."""
    return byte_model(tmp_path_factory.mktemp("models") / "text", chat_template=None)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with a chat template."""
    return byte_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test writes into the user's cache. One for all, so that equal programs compile once."""
    path = tmp_path_factory.getbasetemp() / "amoeba-cache"
    monkeypatch.setenv("AMOEBA_CACHE_DIR", str(path))
    return path
