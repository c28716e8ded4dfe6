"""A request's tokens as text that may be shown, cut at its stop strings."""

from amoeba_jax.tokenizer import DetokenizeStream


class TextStream:
    """Turns tokens into text as they come, until a stop string completes.

    The string that completes first in the text ends it; of several that complete with the same character, the
    longest. This depends on the text alone, not on where tokens begin and end. The text is cut before the stop
    string, or after it with `include_stop_str_in_output`.

    The increments, `finish()` included, add up to the final text, and nothing is ever taken back: text that may be the
    beginning of a stop string is held back until that is decided (or is shown, where the stop string is to be).

    As in vLLM, only stop strings that end after the text of the first `min_tokens` tokens count. They may begin in it.

    Without a tokenizer there is no text: all increments are "".
    """

    def __init__(
        self,
        detokenizer: DetokenizeStream | None,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ):
        self._detokenizer = detokenizer
        self._stop = stop
        self._longest = max((len(string) for string in stop), default=1)
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._tail = ""  # the longest end of the text that a stop string may begin with
        self.stopped: str | None = None
        """The stop string that ended the text. No token adds text after that."""

    def push(self, token_id: int) -> str:
        """The text that may be shown now that `token_id` has come: often ""."""
        if self._detokenizer is None or self.stopped is not None:
            return ""
        self._num_tokens += 1
        return self._take(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The rest: what was held back, with U+FFFD for a character that was cut off. Ends the stream.

        The U+FFFD can complete a stop string: look at `stopped` again afterwards.
        """
        if self._detokenizer is None or self.stopped is not None:
            return ""
        text = self._take(self._detokenizer.flush())
        held, self._tail = self._tail, ""
        # A tail that is part of the output has been shown already.
        return text if self.stopped is not None or self._include else text + held

    def _take(self, new: str) -> str:
        """What to show after `new`, the text that the tokenizer gave out."""
        text, old = self._tail + new, len(self._tail)
        match = self._first_match(text, old) if self._num_tokens > self._min_tokens else None
        if match is not None:
            start, self.stopped = match
            self._tail = ""
            return text[old : start + len(self.stopped)] if self._include else text[:start]
        tail = self._possible_start(text)
        self._tail = text[tail:]
        return new if self._include else text[:tail]

    def _first_match(self, text: str, old: int) -> tuple[int, str] | None:
        """Start and string of the stop string that completes first behind position `old`."""
        matches = []
        for stop in self._stop:
            start = text.find(stop, max(old + 1 - len(stop), 0))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        return min(matches)[1:] if matches else None

    def _possible_start(self, text: str) -> int:
        """Where the longest end of `text` begins that is the beginning of a stop string, but not all of one."""
        for start in range(max(len(text) - self._longest + 1, 0), len(text)):
            end = text[start:]
            if any(len(end) < len(stop) and stop.startswith(end) for stop in self._stop):
                return start
        return len(text)
