"""Token counts and log-probabilities in OpenAI's form."""

from collections.abc import Container, Iterable, Sequence
from typing import Any

from amoeba_jax.outputs import CompletionDelta, Logprob, RequestDelta

# JSON has no infinity.
_LOWEST = -9999.0


class Usage:
    """Token counts of one HTTP request, over all its prompts."""

    def __init__(self, num_calls: int = 1):
        self._prompts = [0] * num_calls
        self._cached = [0] * num_calls
        self.completion_tokens = 0
        self.reasoning_tokens = 0

    def add(self, index: int, delta: RequestDelta) -> None:
        """Add new output for prompt number `index`."""
        self._prompts[index] = delta.num_prompt_tokens
        self._cached[index] = delta.metrics.num_cached_tokens
        self.completion_tokens += delta.num_tokens

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(self._prompts)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were found in the prefix cache."""
        return sum(self._cached)

    def to_dict(self, completion_tokens: int | None = None) -> dict[str, Any]:
        """Return the object `usage` of completions and chat completions.

        `completion_tokens` is the number of generated tokens to show. None: the number so far.
        """
        generated = self.completion_tokens if completion_tokens is None else completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


def text_entries(delta: CompletionDelta, stop_ids: Container[int]) -> list[tuple[int, dict[int, Logprob]]]:
    """Return a pair (token, log-probabilities by token id) for each new token of the text.

    If the sequence ended with a token in `stop_ids`, this token is left out. Without log-probabilities, return [].
    """
    entries = list(zip(delta.token_ids, delta.logprobs or (), strict=False))
    # The last token of constrained text can be text.
    ended_by_token = delta.finish_reason == "stop" and bool(entries) and entries[-1][0] in stop_ids
    return entries[:-1] if ended_by_token else entries


def token_entry(token_id: int, entry: Logprob, as_id: bool) -> dict[str, Any]:
    """Return a token with its log-probability, in the form of chat completions.

    If `as_id` is true, show the id of the token instead of its text.
    """
    text = f"token_id:{token_id}" if as_id else entry.decoded_token or ""
    return {"token": text, "logprob": max(entry.logprob, _LOWEST), "bytes": list(text.encode(errors="replace"))}


def chat_logprobs(
    entries: Iterable[tuple[int, dict[int, Logprob]]], num_top: int, as_id: bool = False
) -> list[dict[str, Any]]:
    """Convert the result of `text_entries` to the form of chat completions. `as_id`: see `token_entry`.

    Each token also has the log-probabilities of the `num_top` most probable tokens at its position.
    """
    return [
        token_entry(token, options[token], as_id)
        | {"top_logprobs": [token_entry(other, options[other], as_id) for other in top(options, num_top)]}
        for token, options in entries
    ]


def prompt_entry(entry: dict[int, Logprob] | None) -> dict[str, Any] | None:
    """Convert the log-probabilities at one position of the prompt (by token id) to vLLM's form."""
    if entry is None:
        return None
    return {
        str(token): {"logprob": max(it.logprob, _LOWEST), "rank": it.rank, "decoded_token": it.decoded_token}
        for token, it in entry.items()
    }


def top(options: dict[int, Logprob], num_top: int) -> list[int]:
    """Return the ids of the `num_top` most probable tokens at a position."""
    return sorted(options, key=lambda token: options[token].rank)[:num_top]


class CompletionLogprobs:
    """Builder of log-probabilities in the form of completions. It tracks the position of each token in the text."""

    def __init__(self, num_top: int, as_id: bool):
        self._num_top, self._as_id = num_top, as_id
        self._offset = 0

    def build(self, entries: Sequence[tuple[int, str, dict[int, Logprob] | None]]) -> dict[str, Any]:
        """Return the object `logprobs` for the next tokens.

        An entry has three parts: the id of a token, the text of the token, and the log-probabilities at its position.
        The third part is None if the log-probabilities were not computed.
        """
        tokens, logprobs, tops, offsets = [], [], [], []
        for token, text, options in entries:
            tokens.append(f"token_id:{token}" if self._as_id else text)
            offsets.append(self._offset)
            self._offset += len(text)
            logprobs.append(None if options is None else max(options[token].logprob, _LOWEST))
            tops.append(None if options is None else self._top(token, options))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, token: int, options: dict[int, Logprob]) -> dict[str, float]:
        # As in vLLM, the chosen token is always present.
        chosen = dict.fromkeys((token, *top(options, self._num_top)))
        result: dict[str, float] = {}
        for it in chosen:
            text = f"token_id:{it}" if self._as_id else options[it].decoded_token or ""
            result.setdefault(text, max(options[it].logprob, _LOWEST))
        return result
