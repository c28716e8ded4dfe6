"""Output items of `/v1/responses` (messages, reasoning, tool calls), and the stream events about them."""

import uuid
from typing import Any

from serving.http_server.chat_generation import Step
from serving.http_server.output_parser import Piece
from serving.http_server.usage import chat_logprobs

Event = dict[str, Any]


class ResponseItems:
    """Output items of one response: messages, reasoning and tool calls.

    Only the last item may be open. Output is added to an open item. A closed item does not change.
    """

    def __init__(self, num_top: int):
        self._items: list[dict[str, Any]] = []
        self._num_top = num_top
        self._logprobs: list[dict[str, Any]] = []
        self._open: str | None = None  # kind of the last item, if it can still grow

    def copy(self) -> list[dict[str, Any]]:
        """Return a copy of the items so far, in the form of OpenAI's API. Later output does not change the copy."""
        return [_copy(item) for item in self._items]

    def take(self, step: Step) -> list[Event]:
        """Add new output. Return the events that tell the client about the new output."""
        events: list[Event] = []
        # Text may lag behind its tokens.
        self._logprobs += chat_logprobs(step.entries, self._num_top)
        for piece in step.pieces:
            if piece.kind != self._open or piece.call_id is not None:
                events += self.close("completed")
                events += self._start(piece)
            if piece.text:
                events.append(self._grow(piece, self._take_logprobs()))
        return events

    def close(self, status: str) -> list[Event]:
        """Close the open item with a status such as `completed`. Return the events that tell the client about this.

        If no item is open, return an empty list.
        """
        if self._open is None:
            return []
        events: list[Event] = []
        item, place = self._items[-1], self._place()
        if self._open == "call":
            done = {"type": "response.function_call_arguments.done", **place, "arguments": item["arguments"]}
            events.append(done | {"name": item["name"]})
        else:
            (part,) = item["content"]
            where = place | {"content_index": 0}
            if self._open == "content":
                more = {"text": part["text"], "logprobs": part["logprobs"]}
                events.append({"type": "response.output_text.done", **where, **more})
            else:
                events.append({"type": "response.reasoning.done", **where, "text": part["text"]})
            events.append({"type": "response.content_part.done", **where, "part": dict(part)})
        if self._open != "reasoning":
            item["status"] = status
        index = len(self._items) - 1
        events.append({"type": "response.output_item.done", "output_index": index, "item": _copy(item)})
        self._open = None
        return events

    def _take_logprobs(self) -> list[dict[str, Any]]:
        logprobs, self._logprobs = self._logprobs, []
        return logprobs

    def end(self, status: str) -> list[Event]:
        """End the answer: close the last item with a status. An answer without items gets an empty message.

        Return the events that tell the client about this.
        """
        events = [] if self._items else self._start(Piece("content", ""))
        if self._open == "content":
            self._items[-1]["content"][0]["logprobs"] += self._take_logprobs()
        return events + self.close(status)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _start(self, piece: Piece) -> list[Event]:
        number = uuid.uuid4().hex
        self._open = piece.kind
        part: dict[str, Any] | None = None
        item: dict[str, Any]
        if piece.kind == "call":
            item = {
                "type": "function_call",
                "id": f"fc_{number}",
                "call_id": piece.call_id,
                "name": piece.name,
                "arguments": "",
                "status": "in_progress",
            }
        elif piece.kind == "reasoning":
            item = {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        else:
            item = {
                "type": "message",
                "id": f"msg_{number}",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items.append(item)
        index = len(self._items) - 1
        events: list[Event] = [{"type": "response.output_item.added", "output_index": index, "item": _copy(item)}]
        if part is not None:
            item["content"].append(part)
            where = self._place() | {"content_index": 0}
            events.append({"type": "response.content_part.added", **where, "part": dict(part)})
        return events

    def _grow(self, piece: Piece, logprobs: list[dict[str, Any]]) -> Event:
        item, place = self._items[-1], self._place()
        if piece.kind == "call":
            item["arguments"] += piece.text
            return {"type": "response.function_call_arguments.delta", **place, "delta": piece.text}
        part = item["content"][0]
        part["text"] += piece.text
        where = place | {"content_index": 0}
        if piece.kind == "reasoning":
            return {"type": "response.reasoning.delta", **where, "delta": piece.text}
        part["logprobs"] += logprobs
        return {"type": "response.output_text.delta", **where, "delta": piece.text, "logprobs": logprobs}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return item | {"content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
