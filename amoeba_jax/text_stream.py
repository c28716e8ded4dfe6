"""Text of a stream of tokens, cut at stop strings."""

from collections import deque

from amoeba_jax.tokenizer import DetokenizeStream


class TextStream:
    """Converter of tokens to text. The text ends at the first stop string.

    A stop string may end inside a token. If several stop strings end at the same character, the longest stop string
    counts. As in vLLM, a stop string that ends within the first `min_tokens` tokens is ignored.

    By default, the text is cut before the stop string. If the end of the text may be the start of a stop string, this
    end is held back until more text arrives. With `include_stop_str_in_output`, the text is cut after the stop string,
    and no text is held back.

    The results of `push` and `finish` add up to the final text. Without a tokenizer, both return "".
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
        # Longest suffix of the text that is a prefix of a stop string. Empty if stop strings are part of the output.
        self._held: deque[str] = deque()
        self.stopped: str | None = None
        """Stop string that has ended the text, or None. After a stop string, tokens add no text."""

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` adds. The result is often ""."""
        if self._detokenizer is None or self.stopped is not None:
            return ""
        self._num_tokens += 1
        return self._take(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """End the stream and return the text that was held back, with U+FFFD for an incomplete character.

        The U+FFFD can complete a stop string, so check `stopped` again afterwards.
        """
        if self._detokenizer is None or self.stopped is not None:
            return ""
        text = self._take(self._detokenizer.flush())
        # If stop strings are part of the output, nothing is held back.
        return text if self.stopped is not None else text + self._release(len(self._held), "")

    def _take(self, new: str) -> str:
        """Search newly decoded text for stop strings. Return the text that can be shown now."""
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
        """Append `new` to the text that is held back. Then remove the first `length` characters and return them."""
        if not self._held and length == len(new):
            return new
        self._held.extend(new)
        return "".join([self._held.popleft() for _ in range(length)])


class _StopString:
    """Incremental search for one string (algorithm of Knuth, Morris and Pratt).

    The table of the algorithm is not built at once. The table grows with the longest partial match.
    """

    def __init__(self, text: str):
        self.text = text
        self.matched = 0
        """Length of the current partial match in characters. The match is at the end of the text so far."""
        self._borders = [0]  # [i]: length of the longest proper prefix of text[: i + 1] that is also its suffix

    def read(self, new: str, counts: bool) -> int | None:
        """Search the text `new`, which follows the text of earlier calls. An occurrence may start in earlier text.

        Return the index in `new` right after the first occurrence. Return None if there is no occurrence, or if
        `counts` is false. Do not call this method again after it has found an occurrence.
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
