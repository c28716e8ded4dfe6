"""Text to token ids and back, whole or as a stream, with a model directory's own fast tokenizer."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from amoeba_jax.errors import CheckpointError, RequestError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """The tokenizer of one model. Its methods may be called from several threads at once."""

    def __init__(self, fast: PreTrainedTokenizerFast, eos_token_ids: frozenset[int]):
        self._fast = fast
        # The Rust tokenizer: where a config says so, `transformers` cleans up decoded text ("a ." to "a."),
        # which a stream could not follow.
        self._backend = fast.backend_tokenizer
        self._special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self.eos_token_ids = eos_token_ids
        """Ids that end a generation."""

    @classmethod
    def from_directory(cls, directory: Path | str) -> "Tokenizer":
        """The tokenizer of a Hugging Face model directory, from its `tokenizer.json`.

        The ends of generation come from `generation_config.json`, else `config.json`, else the tokenizer.
        Raises `CheckpointError` if there is no `tokenizer.json` or it cannot be read.
        """
        directory = Path(directory)
        if not (directory / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{directory} has no tokenizer.json: make one with transformers "
                f"(AutoTokenizer.from_pretrained(directory).save_pretrained(directory))"
            )
        try:
            # Not AutoTokenizer: that may rebuild the rules from a class name instead of tokenizer.json.
            fast = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
            eos = [_eos(directory / file) for file in ("generation_config.json", "config.json")]
        except Exception as error:  # the Rust parser raises bare Exception
            raise CheckpointError(f"the tokenizer files in {directory} cannot be read: {error}") from error
        known = next((ids for ids in eos if ids), None)
        if known is None and fast.eos_token is not None:
            known = [fast.convert_tokens_to_ids(str(fast.eos_token))]
        return cls(fast, frozenset(known or ()))

    @property
    def bos_token_id(self) -> int | None:
        """The id that starts a sequence, or None."""
        token = self._fast.bos_token
        return None if token is None else self._backend.token_to_id(str(token))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's table of embeddings may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work: instruction-tuned models have one."""
        return bool(self._fast.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds the BOS (or EOS) of tokenizers that have one.

        Raises `RequestError` for text that is not valid Unicode (unpaired surrogates, which JSON can carry).
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise RequestError(f"the text cannot be encoded, it must be a string of valid Unicode: {error}") from error

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD, unknown ids are left out."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation in the model's own chat format.

        Each message has string `role` and `content`. `add_generation_prompt` opens the assistant's turn.
        Raises `RequestError` if the model has no template, or if it or a message is not as required.
        """
        if not self._fast.chat_template:
            raise RequestError(
                "this model has no chat template, so it takes no messages: send a plain prompt, "
                "or serve an instruction-tuned model"
            )
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError("messages must be a list of at least one message with a role and a content")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise RequestError(f"messages[{index}] is a {type(message).__name__}: it must be an object")
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise RequestError(f"messages[{index}] needs a string {key!r}, not {message.get(key)!r}")
        try:
            text = self._fast.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error
        # The template writes BOS itself where the model wants it.
        return self.encode(str(text), add_special_tokens=False)

    def stream(self, skip_special_tokens: bool = True) -> "DetokenizeStream":
        """A decoder for tokens that arrive one at a time."""
        return DetokenizeStream(self, self._special_ids if skip_special_tokens else frozenset())


class DetokenizeStream:
    """Turns tokens into text as they come, and never half a character.

    The increments, `flush()` included, add up to `Tokenizer.decode` of all tokens. One exception: the byte
    fallback of SentencePiece replaces a whole run of byte tokens if any is invalid, but text given out stays.

    The last tokens are decoded with and without the new ones; the difference is the increment. The library's
    `DecodeStream` works alike, but keeps what it holds back at the end, and raises in that exception.
    """

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int]):
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        self._context: list[int] = []  # tokens of the last increment: what follows may need a space after them
        self._context_text = ""
        self._held: list[int] = []  # tokens since then

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: often "", while a character's bytes are still coming."""
        if token_id in self._skipped_ids:
            return ""
        self._held.append(token_id)
        increment = self._pending()
        # U+FFFD at the end is a character cut short, or one the model means: the next token tells.
        if not increment or increment.endswith(REPLACEMENT):
            return ""
        self._context, self._held = self._held, []
        self._context_text = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return increment

    def flush(self) -> str:
        """The rest, with U+FFFD for a character that was cut off. Ends the stream."""
        increment = self._pending()
        self._held = []
        return increment

    def _pending(self) -> str:
        text = self._tokenizer.decode(self._context + self._held, skip_special_tokens=False)
        return text[len(self._context_text) :]


def _eos(path: Path) -> list[int]:
    """`eos_token_id` of a JSON file as a list: empty where there is no file or no id."""
    if not path.is_file():
        return []
    ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
