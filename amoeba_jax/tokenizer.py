"""Text to token ids and back, whole or as a stream, with a model directory's own fast tokenizer."""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from amoeba_jax.errors import CheckpointError, RequestError
from amoeba_jax.json_object import read_json_object
from amoeba_jax.shorten import shorten
from amoeba_jax.valid_text import check_unicode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Most token texts that `token_text` keeps: the vocabularies of most models fit.
_MOST_TOKEN_TEXTS = 65_536
# `decode` of more ids releases the interpreter lock. It does not for fewer: they take 1 ms at most, and to get the lock
# back from a busy thread can take 5 ms.
_LONG_DECODE = 4096
# One character in Unicode's composed form, four in the decomposed form.
_DECOMPOSED = (
    "\N{GREEK SMALL LETTER ALPHA}\N{COMBINING COMMA ABOVE}\N{COMBINING GRAVE ACCENT}\N{COMBINING GREEK YPOGEGRAMMENI}"
)
_MOST_DECOMPOSED = 4

# Most tokens of undecodable text that a `DetokenizeStream` holds.
_MOST_HELD = 16
# Most tokens of text given out that it decodes again. A UTF-8 decoder is in step again after at most 3 bytes.
_MOST_CONTEXT = 8
# A token has a byte at least: those of a character that are missing a last one.
_MOST_CUT = 3
# Tokens at a prompt's end among which a stream looks for those that have text.
_MOST_TAIL = 32


class Tokenizer:
    """The tokenizer of one model. Its methods may be called from several threads at once."""

    def __init__(self, fast: PreTrainedTokenizerFast, eos_token_ids: frozenset[int]):
        self._fast = fast
        # The Rust tokenizer: where a config says so, `transformers` cleans up decoded text ("a ." to "a."),
        # which a stream could not follow.
        self._backend = fast.backend_tokenizer
        # As in `transformers`, a prompt is neither cut nor padded, whatever tokenizer.json says. With padding, the ids
        # of a text would depend on the others of its batch.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._token_text = lru_cache(min(self.vocab_size, _MOST_TOKEN_TEXTS))(self._decode_token)
        self._special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self.eos_token_ids = eos_token_ids
        """Ids that end a generation."""

    @classmethod
    def from_directory(cls, directory: Path | str) -> "Tokenizer":
        """The tokenizer of a Hugging Face model directory, from its `tokenizer.json`.

        The ends of generation are those of `generation_config.json`, else `config.json`, and the tokenizer's own.
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
        except Exception as error:  # the Rust parser raises bare Exception
            raise CheckpointError(f"the tokenizer files in {directory} cannot be read: {error}") from error
        config = directory / "config.json"
        known = set(model_eos_ids(directory, read_json_object(config) if config.is_file() else {}))
        if fast.eos_token is not None and (own := fast.convert_tokens_to_ids(str(fast.eos_token))) is not None:
            known.add(own)
        return cls(fast, frozenset(known))

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

        Other threads run meanwhile. During 4 MB of English text (1.4 million tokens, 2 s) another thread waits for 25
        to 40 ms at most, while the list of ids is built; the library's `encode` stops all threads for 2.5 to 3.5 s.

        Raises `RequestError` for text that is not valid Unicode (unpaired surrogates, which JSON can carry).
        """
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text, as `encode` does, in one call. Other threads run meanwhile.

        Raises `RequestError` for a text that is not valid Unicode.
        """
        for text in texts:  # the library would take two strings for a pair of texts
            if not isinstance(text, str):
                raise RequestError(f"the text must be a string, got {shorten(text)}")
        try:
            # Unlike `encode`, the batch calls release the interpreter lock. The fast one computes no offsets.
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:
            for text in texts:
                check_unicode(text, "the text")
            raise RequestError(f"the text cannot be tokenized: {shorten(str(error))}") from error
        return [encoding.ids for encoding in encodings]

    @cached_property
    def longest_token_chars(self) -> int:
        """The most characters of a text that one token can stand for.

        A text of more than `max_tokens * longest_token_chars` characters has more than `max_tokens` tokens, so it can
        be refused by its length alone. A normalizer may compose characters (NFC: up to 4 to 1); that is counted.

        Assumes that the tokenizer drops no characters of a text: what it does drop (spaces that a normalizer collapses
        or a special token swallows, characters unknown to a vocabulary without bytes) counts as text here. A text that
        is mostly such characters can be refused although its tokens would fit.

        Computed at the first use: up to 1 s for 150,000 tokens.
        """
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        # The vocabulary has a character for each character of the text, or for each of its bytes.
        longest = max(map(len, vocabulary), default=1)
        normalizer = self._backend.normalizer
        if normalizer is not None and len(normalizer.normalize_str(_DECOMPOSED)) < len(_DECOMPOSED):
            ids = [[token_id] for token_id in vocabulary.values()]
            texts = self._backend.decode_batch(ids, skip_special_tokens=False)
            # 1: a decoder may strip a space. U+FFFD may be a part of any character.
            longest = max(longest, 1 + max(map(_decomposed_length, texts), default=0))
        return longest

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD, unknown ids are left out."""
        ids = list(ids)
        if len(ids) <= _LONG_DECODE:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        # Unlike `decode`, it releases the interpreter lock.
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_text(self, token_id: int) -> str:
        """Return what one token adds to a text before it, also a special token: with its space, where it has one.

        Remembers the texts of up to 65,536 tokens.
        """
        return self._token_text(token_id)

    def _decode_token(self, token_id: int) -> str:
        text = self.decode([token_id], skip_special_tokens=False)
        # SentencePiece strips the space at the beginning of a text.
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(text) :] if twice.startswith(text) else text

    def has_text(self, token_id: int) -> bool:
        """Whether the token is in the vocabulary and not empty: others add nothing to any text."""
        return bool(self._backend.id_to_token(token_id))

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
                    raise RequestError(f"messages[{index}] needs a string {key!r}, not {shorten(message.get(key))}")
                check_unicode(message[key], f"messages[{index}].{key}")
        try:
            text = self._fast.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it may divide by zero or recurse without end
            # A template may put the messages themselves into its error.
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            reason = shorten(str(error), 300)
            raise RequestError(f"the model's chat template refuses these messages: {kind}{reason}") from error
        # The template writes BOS itself where the model wants it.
        return self.encode(str(text), add_special_tokens=False)

    def stream(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> "DetokenizeStream":
        """A decoder for tokens that arrive one at a time, after those of `prompt`, of which it reads the end."""
        return DetokenizeStream(self, self._special_ids if skip_special_tokens else frozenset(), prompt)


class DetokenizeStream:
    """Turns tokens into text as they come, and never half a character.

    The increments, `flush()` included, add up to `Tokenizer.decode` of the prompt's tokens and these, less that of the
    prompt's alone: as in vLLM and the pipelines of `transformers`, the first word has its space, and a character that
    the prompt's end cuts off comes whole. After special tokens that are skipped, the space is that of what is before
    them; where that is nothing, as after BOS alone, there is none. No more than the last 32 tokens are looked at.

    One exception: the byte fallback of SentencePiece replaces a whole run of byte tokens if any is invalid, but text
    given out stays, and an invalid token is forgotten after 8 to 25 others.

    The last tokens are decoded with and without the new ones; the difference is the increment. The library's
    `DecodeStream` works alike, but keeps what it holds back at the end, and raises in that exception.

    The work for a token is bounded: `push` decodes at most 50 tokens, whatever comes. Text that ends in U+FFFD waits
    for the next token, but for no more than 16 tokens. Then all but its last character is given out.
    """

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int], prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        tail = [token_id for token_id in prompt[-_MOST_TAIL:] if self._has_text(token_id)]
        num_tokens, num_cut = self._end_of_prompt(tail)
        # The last tokens of what was given out: what follows may need a space.
        self._context: list[int] = tail[len(tail) - num_tokens :]
        self._context_text = self._decode(self._context)  # the part of their text that was given out
        # A character that the prompt's end cuts off: its tokens, and the text before it, by characters and by tokens.
        self._cut = self._context[num_tokens - num_cut :]
        whole = self._decode(self._context[: num_tokens - num_cut])
        self._whole_texts: tuple[str, ...] = (self._context_text.removesuffix(REPLACEMENT), whole)
        self._held: list[int] = []  # tokens since then

    def _end_of_prompt(self, tail: list[int]) -> tuple[int, int]:
        """How many last tokens of a prompt begin with a whole character, and how many of them are a part of one."""
        for num_cut in range(min(_MOST_CUT, len(tail)) + 1):
            # One of four beginnings in a row is that of a character.
            for num_tokens in range(_MOST_CONTEXT - _MOST_CUT, _MOST_CONTEXT + 1):
                start = max(len(tail) - num_tokens, 0)
                if REPLACEMENT not in self._decode(tail[start : len(tail) - num_cut]):
                    return len(tail) - start, num_cut
        return min(_MOST_CONTEXT, len(tail)), 0

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped_ids and self._tokenizer.has_text(token_id)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: often "", while a character's bytes are still coming."""
        if not self._has_text(token_id):
            return ""
        self._held.append(token_id)
        increment = self._pending()
        # U+FFFD at the end is a character cut short, or one the model means: the next token tells.
        if increment and not increment.endswith(REPLACEMENT):
            self._keep_context()
            return increment
        if len(self._held) <= _MOST_HELD:
            return ""
        if not increment:  # a decoder that swallows these tokens: those in the middle touch no other text
            half = _MOST_CONTEXT // 2
            self._held = self._held[:half] + self._held[-half:]
            return ""
        self._keep_context()
        if not self._context_text.endswith(REPLACEMENT):
            return increment
        # In the bytes of a byte-level vocabulary, only the last U+FFFD can still become another character.
        self._context_text = self._context_text[:-1]
        return increment[:-1]

    def flush(self) -> str:
        """The rest, with U+FFFD for a character that was cut off. Ends the stream."""
        increment = self._pending()
        self._keep_context()
        return increment

    def _pending(self) -> str:
        """The text that was not given out yet."""
        text = self._decode(self._context + self._held)
        for given_out in (self._context_text, *self._whole_texts):
            if text.startswith(given_out):
                return text[len(given_out) :]
        return self._decode(self._held)  # the exception: text given out would be another one by now

    def _keep_context(self) -> None:
        """Take what is held for given out."""
        self._context = (self._cut + self._held)[-_MOST_CONTEXT:]
        self._context_text = self._decode(self._context)
        self._cut, self._whole_texts, self._held = [], (), []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _decomposed_length(text: str) -> int:
    """The most characters that a normalizer can compose to `text`, or to what completes it."""
    return len(unicodedata.normalize("NFD", text)) + (_MOST_DECOMPOSED - 1) * text.count(REPLACEMENT)


def model_eos_ids(directory: Path | None, config: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end a generation: of the directory's `generation_config.json`, else of a model's `config`.

    Raises `CheckpointError` if the file cannot be read.
    """
    file = None if directory is None else directory / "generation_config.json"
    generation = read_json_object(file) if file is not None and file.is_file() else {}
    return _eos_ids(generation) or _eos_ids(config)


def _eos_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """`eos_token_id`, one or several; -1 and the like, which some files have for none, are left out."""
    named = config.get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    return frozenset(it for it in ids if isinstance(it, int) and not isinstance(it, bool) and it >= 0)
