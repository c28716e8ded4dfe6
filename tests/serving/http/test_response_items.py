"""Items and events of a response with reasoning, text and tool calls."""

from serving.http_server.chat_generation import Step
from serving.http_server.output_parser import Piece
from serving.http_server.response_items import ResponseItems


def test_each_part_of_an_answer_becomes_an_item():
    items = ResponseItems(0)
    pieces = [
        Piece("reasoning", "h"),
        Piece("reasoning", "m"),
        Piece("content", "so"),
        Piece("content", "!"),
        Piece("call", '{"a"', 0, "c1", "f"),
        Piece("call", ": 1}"),
        Piece("call", "{}", 1, "c2", "g"),
    ]
    events = [event for piece in pieces for event in items.take(Step(0, [piece], [], (), None, None))]
    before = items.copy()
    events += items.end("completed")
    assert before[-1]["status"] == "in_progress"
    reasoning, message, first, second = items.copy()
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (message["content"][0]["text"], message["status"]) == ("so!", "completed")
    assert [(it["name"], it["call_id"], it["arguments"]) for it in (first, second)] == [
        ("f", "c1", '{"a": 1}'),
        ("g", "c2", "{}"),
    ]
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("output_item.added", "content_part.added", "reasoning.delta", "reasoning.delta", "reasoning.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
    ]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == items.copy()
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert [event["output_index"] for event in events] == sorted(event["output_index"] for event in events)


def test_answer_without_text_has_an_empty_message():
    items = ResponseItems(0)
    items.end("incomplete")
    (message,) = items.copy()
    assert (message["content"][0]["text"], message["status"]) == ("", "incomplete")
