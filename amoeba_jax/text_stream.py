"""A request's tokens as text that may be shown, cut at its stop strings."""

from collections import deque

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

    The work is at most a few steps for each character and stop string, however long the strings are.
    """

    def __init__(
        self,
        detokenizer: DetokenizeStream | None,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ):
        self._detokenizer = detokenizer
        self._stop = tuple(_StopString(string) for string in stop)
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        # Characters of the longest end of the text that is the beginning of a stop string. Empty if that is shown.
        self._held: deque[str] = deque()
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
        # A beginning that is part of the output has been shown already.
        return text if self.stopped is not None else text + self._release(len(self._held), "")

    def _take(self, new: str) -> str:
        """What to show after `new`, the text that the tokenizer gave out."""
        if not self._stop:
            return new
        counts = self._num_tokens > self._min_tokens
        ends = [(string.read(new, counts), string) for string in self._stop]
        matches = [(end, -len(string.text), string.text) for end, string in ends if end is not None]
        if matches:
            end, _, self.stopped = min(matches)
            if self._include:
                return new[:end]
            return self._release(len(self._held) + end - len(self.stopped), new[:end])
        if self._include:
            return new
        may_begin = max([string.matched for string in self._stop])
        return self._release(len(self._held) + len(new) - may_begin, new)

    def _release(self, length: int, new: str) -> str:
        """Hold `new` too and return the first `length` characters of what is held, which end their hold."""
        if not self._held and length == len(new):
            return new
        self._held.extend(new)
        return "".join([self._held.popleft() for _ in range(length)])


class _StopString:
    """Finds a string in a text that comes in pieces (Knuth, Morris and Pratt).

    The table is computed as far as the text has matched: a stream with long stop strings costs nothing at its start.
    """

    def __init__(self, text: str):
        self.text = text
        self.matched = 0
        """Length of the longest end of what was read that is the beginning of the string, but not all of it."""
        self._borders = [0]  # i: length of the longest end of text[: i + 1] that is its beginning too, but not all

    def read(self, new: str, counts: bool) -> int | None:
        """Read on, and return the end in `new` of the first occurrence. None: there is none, or none of them `counts`.

        After an occurrence that counts there is nothing more to read.
        """
        text, borders, matched = self.text, self._borders, self.matched
        if not matched and text[0] not in new:
            return None
        for position, character in enumerate(new):
            while matched and character != text[matched]:
                matched = borders[matched - 1]
            if character == text[matched]:
                matched += 1
                if matched > len(borders):
                    self._add_border()
                if matched == len(text):
                    if counts:
                        return position + 1
                    matched = borders[matched - 1]
        self.matched = matched
        return None

    def _add_border(self) -> None:
        text, borders = self.text, self._borders
        character, border = text[len(borders)], borders[-1]
        while border and character != text[border]:
            border = borders[border - 1]
        borders.append(border + (character == text[border]))
