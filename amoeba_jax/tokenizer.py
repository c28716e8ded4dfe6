"""Conversion of text to token ids and back, with the fast tokenizer of a model directory."""

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

# Maximum number of texts in the cache of `token_text`. Most vocabularies fit.
_MOST_TOKEN_TEXTS = 65_536
# `decode` of more ids releases the interpreter lock. Fewer ids take at most 1 ms, and getting the lock back can take
# 5 ms.
_LONG_DECODE = 4096
# One character in Unicode's composed form, four in the decomposed form.
_DECOMPOSED = (
    "\N{GREEK SMALL LETTER ALPHA}\N{COMBINING COMMA ABOVE}\N{COMBINING GRAVE ACCENT}\N{COMBINING GREEK YPOGEGRAMMENI}"
)
_MOST_DECOMPOSED = 4

# Maximum number of tokens of undecodable text that a `DetokenizeStream` holds back.
_MOST_HELD = 16
# Maximum number of tokens that a stream decodes again although their text was returned. A UTF-8 decoder recovers after
# at most 3 bytes.
_MOST_CONTEXT = 8
# Maximum number of tokens of an incomplete character, because a token has at least one byte.
_MOST_CUT = 3
# Number of last prompt tokens that a stream examines.
_MOST_TAIL = 32


class Tokenizer:
    """Tokenizer of one model. Several threads may call its methods at once."""

    def __init__(self, fast: PreTrainedTokenizerFast, eos_token_ids: frozenset[int]):
        self._fast = fast
        # The Rust tokenizer: some configs make `transformers` clean up decoded text ("a ." to "a."), which a stream
        # cannot do.
        self._backend = fast.backend_tokenizer
        # As in `transformers`, prompts are neither truncated nor padded, even if tokenizer.json asks for it.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._token_text = lru_cache(min(self.vocab_size, _MOST_TOKEN_TEXTS))(self._decode_token)
        self._special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self.eos_token_ids = eos_token_ids
        """Token ids that end a generation."""

    @classmethod
    def from_directory(cls, directory: Path | str) -> "Tokenizer":
        """Load the tokenizer from `tokenizer.json` in a Hugging Face model directory.

        The attribute `eos_token_ids` has the ids of `model_eos_ids`, and the tokenizer's own end-of-sequence token.

        Raises:
            CheckpointError: `tokenizer.json` is missing or cannot be read.
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
        """Token id that starts a sequence, or None."""
        token = self._fast.bos_token
        return None if token is None else self._backend.token_to_id(str(token))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added tokens. The embedding table of the model may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """Return the rules of the tokenizer, in the form of `tokenizer.json`."""
        return self._backend.to_str()

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template. Instruction-tuned models usually have one."""
        return bool(self._fast.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        A text of 4 MB (1.4 million tokens) takes 2 s. During this time, other threads are blocked for at most 40 ms.
        The library's own `encode` would block other threads for 2.5 to 3.5 s.

        Args:
            text: text to tokenize.
            add_special_tokens: whether to add the BOS or EOS of tokenizers that add one.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of several texts. See `encode`."""
        for text in texts:  # the library takes a tuple of two strings as a pair of texts
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
        """Maximum number of characters that one token can represent.

        A text with more than `max_tokens * longest_token_chars` characters has more than `max_tokens` tokens. This text
        can be refused without tokenization. The number allows for normalizers (NFC) that compose 4 characters into one.

        Some tokenizers drop characters, such as repeated spaces or characters outside the vocabulary. The number does
        not allow for dropped characters: a text with many dropped characters is refused although its tokens fit.

        The first use takes up to 1 s for a vocabulary of 150,000 tokens.
        """
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        # A vocabulary entry has one character for each character or each byte of the text.
        longest = max(map(len, vocabulary), default=1)
        normalizer = self._backend.normalizer
        if normalizer is not None and len(normalizer.normalize_str(_DECOMPOSED)) < len(_DECOMPOSED):
            ids = [[token_id] for token_id in vocabulary.values()]
            texts = self._backend.decode_batch(ids, skip_special_tokens=False)
            # 1: a decoder may strip a space.
            longest = max(longest, 1 + max(map(_decomposed_length, texts), default=0))
        return longest

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD. Unknown ids are left out."""
        ids = list(ids)
        if len(ids) <= _LONG_DECODE:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        # Unlike `decode`, `decode_batch` releases the interpreter lock.
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_text(self, token_id: int) -> str:
        """Return the text of a token, with the leading space that it has after other tokens.

        Special tokens have text too. The texts of up to 65,536 tokens are cached.
        """
        return self._token_text(token_id)

    def _decode_token(self, token_id: int) -> str:
        text = self.decode([token_id], skip_special_tokens=False)
        # SentencePiece strips the space at the start of a text.
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(text) :] if twice.startswith(text) else text

    def vocabulary_entry(self, token_id: int) -> str:
        """Return the vocabulary entry of a token, or "" if there is none.

        The entry has the tokenizer's own mark for a leading space.
        """
        return self._backend.id_to_token(token_id) or ""

    def has_text(self, token_id: int) -> bool:
        """Return whether the token is in the vocabulary and its text is not empty."""
        return bool(self._backend.id_to_token(token_id))

    @property
    def chat_template(self) -> str:
        """Text of the chat template, or "" if the model has no chat template."""
        template = self._fast.chat_template
        # A model may have several templates by name.
        return template if isinstance(template, str) else (template or {}).get("default", "")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation in the chat format of the model.

        Arguments and errors are the same as for `render_chat`.
        """
        text = self.render_chat(messages, add_generation_prompt, tools, continue_final_message, arguments)
        # The template itself writes BOS if the model needs it.
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation in the chat format of the model.

        Args:
            messages: messages with the strings `role` and `content`. A message with `tool_calls` needs no content.
            add_generation_prompt: whether to append the start of an assistant message.
            tools: descriptions of functions, in OpenAI's form.
            continue_final_message: whether the last message stays open, so that the model continues its text.
            arguments: additional variables for the template.

        Raises:
            RequestError: the model has no template, a message is malformed, or the template fails.
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
            needed = ("role",) if message.get("tool_calls") and message.get("content") is None else ("role", "content")
            for key in needed:
                if not isinstance(message.get(key), str):
                    raise RequestError(f"messages[{index}] needs a string {key!r}, not {shorten(message.get(key))}")
                check_unicode(message[key], f"messages[{index}].{key}")
        try:
            text = self._fast.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,  # type: ignore[arg-type]
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(arguments or {}),
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it may divide by zero or recurse without end
            # A template may put the messages themselves into its error.
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            reason = shorten(str(error), 300)
            raise RequestError(f"the model's chat template refuses these messages: {kind}{reason}") from error
        return str(text)

    def stream(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> "DetokenizeStream":
        """Return a decoder for tokens that arrive one at a time after `prompt`."""
        return DetokenizeStream(self, self._special_ids if skip_special_tokens else frozenset(), prompt)


class DetokenizeStream:
    """Incremental decoder that returns only complete characters.

    The results of `push` and `flush` add up to the text of the output. The output is decoded together with the last
    tokens of the prompt (at most 32). As in vLLM, the first word of the output therefore keeps its leading space. If a
    character starts in the prompt and ends in the output, the whole character is returned.

    The results can be wrong in one case. If one byte token in a run of byte tokens is invalid, SentencePiece decodes
    the whole run as U+FFFD. The stream has then already returned other text for the start of the run. The invalid token
    affects the text of at most 25 further tokens.

    Text that ends in U+FFFD is held back for at most 16 tokens. After that, the text without its last character is
    returned. Each call of `push` decodes at most 50 tokens.

    `DecodeStream` of the library `tokenizers` is not used: it drops text at the end of the stream, and raises an error
    after an invalid byte token.
    """

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int], prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        tail = [token_id for token_id in prompt[-_MOST_TAIL:] if self._has_text(token_id)]
        num_tokens, num_cut = self._end_of_prompt(tail)
        # Last tokens of the returned text: the next token may need a space.
        self._context: list[int] = tail[len(tail) - num_tokens :]
        self._context_text = self._decode(self._context)  # the part of their text that was returned
        # An incomplete character at the end of the prompt: its tokens, and the text before it in two decodings.
        self._cut = self._context[num_tokens - num_cut :]
        whole = self._decode(self._context[: num_tokens - num_cut])
        self._whole_texts: tuple[str, ...] = (self._context_text.removesuffix(REPLACEMENT), whole)
        self._held: list[int] = []  # tokens whose text was not returned yet

    def _end_of_prompt(self, tail: list[int]) -> tuple[int, int]:
        """Return `(kept, cut)` for a prompt that ends with the tokens `tail`.

        The last `kept` tokens of the prompt are the context for decoding the output. The last `cut` tokens of the
        prompt form an incomplete character.
        """
        for num_cut in range(min(_MOST_CUT, len(tail)) + 1):
            # Among four consecutive positions, at least one is the start of a character.
            for num_tokens in range(_MOST_CONTEXT - _MOST_CUT, _MOST_CONTEXT + 1):
                start = max(len(tail) - num_tokens, 0)
                if REPLACEMENT not in self._decode(tail[start : len(tail) - num_cut]):
                    return len(tail) - start, num_cut
        return min(_MOST_CONTEXT, len(tail)), 0

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped_ids and self._tokenizer.has_text(token_id)

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, or "" if the last character is incomplete."""
        if not self._has_text(token_id):
            return ""
        self._held.append(token_id)
        increment = self._pending()
        # U+FFFD at the end is an incomplete character, or the model generated it. The next token decides.
        if increment and not increment.endswith(REPLACEMENT):
            self._keep_context()
            return increment
        if len(self._held) <= _MOST_HELD:
            return ""
        if not increment:  # the decoder drops these tokens: the middle ones affect no other text
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
        """End the stream and return the remaining text, with U+FFFD for an incomplete character."""
        increment = self._pending()
        self._keep_context()
        return increment

    def _pending(self) -> str:
        """Return the text of the tokens that `push` holds back."""
        text = self._decode(self._context + self._held)
        for given_out in (self._context_text, *self._whole_texts):
            if text.startswith(given_out):
                return text[len(given_out) :]
        return self._decode(self._held)  # the exception in the class docstring: returned text has changed

    def _keep_context(self) -> None:
        """Make the tokens in `_held` the context of later tokens, after their text has been returned."""
        self._context = (self._cut + self._held)[-_MOST_CONTEXT:]
        self._context_text = self._decode(self._context)
        self._cut, self._whole_texts, self._held = [], (), []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _decomposed_length(text: str) -> int:
    """Return the maximum number of characters that a normalizer (NFC) can compose into `text`.

    Each U+FFFD counts as 4 characters, because U+FFFD may stand for a part of any character.
    """
    return len(unicodedata.normalize("NFD", text)) + (_MOST_DECOMPOSED - 1) * text.count(REPLACEMENT)


def model_eos_ids(directory: Path | None, config: Mapping[str, Any]) -> frozenset[int]:
    """Return the token ids that end a generation.

    The ids come from `generation_config.json`, or from `config` if `generation_config.json` has no ids.

    Raises:
        CheckpointError: `generation_config.json` cannot be read.
    """
    file = None if directory is None else directory / "generation_config.json"
    generation = read_json_object(file) if file is not None and file.is_file() else {}
    return _eos_ids(generation) or _eos_ids(config)


def _eos_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """Return `eos_token_id` as a set, without negative ids. Some files use a negative id for "none"."""
    named = config.get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    return frozenset(it for it in ids if isinstance(it, int) and not isinstance(it, bool) and it >= 0)
