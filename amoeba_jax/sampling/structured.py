"""Grammars of constrained requests: their compilation, with limits, and the state of each sequence."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int32
from llguidance import LLMatcher, LLTokenizer

from amoeba_jax.errors import QueueFullError, RequestError
from amoeba_jax.sampling import grammar_check
from amoeba_jax.sampling.rows import mask_words
from amoeba_jax.structured_output import StructuredOutput
from amoeba_jax.tokenizer import Tokenizer

MAX_COMPILE_S = 5.0
"""Limit for the trial compilation of a grammar on a busy machine, in seconds. Its processor time is limited to 1 s."""
MAX_GRAMMARS = 64
"""Compiled grammars that are kept for later requests."""

MAX_PENDING_GRAMMARS = 8
"""New grammars of one client that are compiled or wait for it at the same time."""

# Threads of `compile_soon`. Slow grammars then occupy no other threads.
_COMPILE_THREADS = ThreadPoolExecutor(2, thread_name_prefix="amoeba-grammar")

# A matcher may spend this much processor time: seconds at once, and in the long run seconds per token.
_BURST_S, _TOKEN_S = 0.25, 0.005
# White space in JSON: a space, or a line break with indentation. Without a limit, models may generate it endlessly.
_WHITE_SPACE = r"( |\n[ \t]{0,64})"


class Matcher:
    """State of a constrained sequence: the tokens that its grammar allows next.

    Attributes:
        mask: allowed next tokens as packed bits (see `rows.Masks`). Read-only.
        is_complete: whether the text matches the grammar, and no further text is allowed.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int):
        """Compute the first mask. Raises `RequestError` if the grammar allows no text, or is over a limit."""
        self._matcher, self._vocab_size = matcher, vocab_size
        self._spent_s, self._num_tokens = 0.0, 0
        self.mask: Int32[np.ndarray, " words"] = self._next_mask()
        self.is_complete = False

    def copy(self) -> "Matcher":
        """Return a new matcher in the same state. Both matchers advance independently."""
        copy = object.__new__(Matcher)
        copy.__dict__.update(self.__dict__)
        copy._matcher = self._matcher.deep_copy()
        return copy

    def advance(self, token: int) -> None:
        """Add the next token to the text, and compute which tokens may follow.

        Raises `RequestError` if the grammar does not allow the token, or needs too much time or memory.
        """
        start = time.thread_time()
        self._matcher.consume_token(token)
        self._check()
        self._num_tokens += 1
        self.is_complete = self._matcher.is_stopped()
        if not self.is_complete:
            self.mask = self._next_mask()
        self._spent_s += time.thread_time() - start
        if self._spent_s > _BURST_S + _TOKEN_S * self._num_tokens:
            raise RequestError(
                f"the grammar of the structured output is too slow: it took {self._spent_s:.2f} s for "
                f"{self._num_tokens} tokens, over the limit of {_BURST_S} s and {_TOKEN_S} s per token"
            )

    def _next_mask(self) -> Int32[np.ndarray, " words"]:
        bits = self._matcher.compute_bitmask()
        self._check()
        return np.frombuffer(bits, np.int32)[: mask_words(self._vocab_size)]

    def _check(self) -> None:
        if self._matcher.is_error():
            error = _on_one_line(self._matcher.get_error())
            if error == "NoExtensionBias":
                raise RequestError(f"structured output allows no text after {self._num_tokens} tokens")
            raise RequestError(f"structured output failed: {error}")


class GrammarCompiler:
    """Compiler of grammars for one model. Methods may be called from any thread.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: number of tokens with logits. Tokens that the tokenizer does not know are never allowed.
        eos_token_ids: end-of-sequence tokens, allowed if the text so far matches the grammar.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]):
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._tokens: LLTokenizer | None = None
        self._matchers: OrderedDict[StructuredOutput, Matcher] = OrderedDict()
        self._pending: dict[StructuredOutput, tuple[Future[Any], str]] = {}  # with the name of the client
        self._lock = threading.Lock()
        self._tokens_lock = threading.Lock()

    def compile(self, structured: StructuredOutput) -> Matcher:
        """Return a matcher for a new text. Compiled grammars are cached.

        Raises `RequestError`, with the reason, if the grammar is invalid, not supported, or over a limit.
        """
        with self._lock:
            matcher = self._matchers.get(structured)
            if matcher is not None:
                self._matchers.move_to_end(structured)
                return matcher.copy()
        matcher = self._compile(structured)
        with self._lock:
            self._matchers[structured] = matcher
            while len(self._matchers) > MAX_GRAMMARS:
                self._matchers.popitem(last=False)
            return matcher.copy()

    def compile_soon(self, structured: StructuredOutput, client: str = "") -> "Future[Any] | None":
        """Compile a grammar in another thread, so that a later `compile` finds it in the cache.

        Return a future that is done when the compilation ends, or None if the grammar is already compiled. Callers with
        the same grammar share one future.

        Raises `QueueFullError` if `MAX_PENDING_GRAMMARS` grammars of `client` are still being compiled. If `client` is
        "", there is no limit.
        """
        with self._lock:
            if structured in self._matchers:
                return None
            if structured in self._pending:
                return self._pending[structured][0]
            if client and sum(owner == client for _, owner in self._pending.values()) >= MAX_PENDING_GRAMMARS:
                raise QueueFullError(
                    f"{MAX_PENDING_GRAMMARS} new grammars of this client are being compiled, which is the limit: try "
                    "again later"
                )
            future = _COMPILE_THREADS.submit(self.compile, structured)
            self._pending[structured] = future, client
        future.add_done_callback(partial(self._forget, structured))
        return future

    def _forget(self, structured: StructuredOutput, _: "Future[Any]") -> None:
        with self._lock:
            del self._pending[structured]

    def _compile(self, structured: StructuredOutput) -> Matcher:
        try:
            grammar = _grammar(structured)
        except ValueError as error:
            raise RequestError(f"structured.{structured.kind} cannot be used: {_on_one_line(str(error))}") from error
        if message := _trial(grammar):
            raise RequestError(f"structured.{structured.kind} cannot be used: {message}")
        matcher = LLMatcher(self.load_vocabulary(), grammar, log_level=0, limits=grammar_check.limits())
        if matcher.is_error():
            raise RequestError(f"structured.{structured.kind} cannot be used: {_on_one_line(matcher.get_error())}")
        return Matcher(matcher, self._vocab_size)

    def load_vocabulary(self) -> LLTokenizer:
        """Return the vocabulary in the form that llguidance needs.

        The first call takes 0.2 to 0.8 s for 49,152 tokens. In this time, no other thread can run Python.
        """
        with self._tokens_lock:
            if self._tokens is None:
                size = max(self._vocab_size, self._tokenizer.vocab_size)
                ends, rules = sorted(self._eos_token_ids), self._tokenizer.to_json()
                if not ends:
                    ends, rules, size = [size], _with_end(rules, size), size + 1
                try:
                    self._tokens = LLTokenizer(rules, n_vocab=size, eos_token=ends)
                except ValueError as error:
                    text = _on_one_line(str(error))
                    raise RequestError(f"structured output is not available for this tokenizer: {text}") from error
            return self._tokens


def _with_end(rules: str, token: int) -> str:
    """Return the tokenizer's rules (JSON) with an added end-of-sequence token, because llguidance needs such a token.

    `token` is the id of the added token.
    """
    values = json.loads(rules)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    values["added_tokens"].append({"id": token, "content": "<|end of the text|>", "special": True, **flags})
    return json.dumps(values)


def _grammar(structured: StructuredOutput) -> str:
    """Return a constraint as a grammar in the form of llguidance. Most errors appear only when the grammar is compiled.

    Raises `ValueError` if a schema is `false`, or is nested more than 127 levels deep.
    """
    if structured.json_object:
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults={"whitespace_pattern": _WHITE_SPACE})
    if structured.json_schema is not None:
        schema = str(structured.json_schema)
        if schema == "false":
            raise ValueError("it allows no text")
        return LLMatcher.grammar_from_json_schema(
            "{}" if schema == "true" else schema, defaults={"whitespace_pattern": _WHITE_SPACE}
        )
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.grammar is not None:
        return LLMatcher.grammar_from_lark(structured.grammar)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, structured.choice or ())))


def _trial(grammar: str) -> str:
    """Compile a grammar in another process (`grammar_check`). Return the error message, or "" without an error."""
    command = [sys.executable, "-S", "-P", grammar_check.__file__]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, input=grammar.encode(), capture_output=True, timeout=MAX_COMPILE_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its compilation took more than {MAX_COMPILE_S:g} s"
    if done.returncode:
        return "it is too complex: its compilation exceeded the limits on time, memory or nesting"
    return _on_one_line(json.loads(done.stdout)[0])


def _on_one_line(message: str) -> str:
    """Return an error message of llguidance on one line. A long message is reduced to its reason."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text if len(text) <= 300 else f"{text[:100]} ... {text[max(text.rfind('error:'), 100) :][:200]}"
