"""Answers as openai-python sees them: a stream put together again, a body.  Sends nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from openai import LengthFinishReasonError
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

#: Fields that openai-python adds to what a server sends, and sets to None.
ADDED = ("annotations", "audio", "function_call", "parsed")


def chunks(stream: bytes) -> Iterator[ChatCompletionChunk]:
    """Every chunk of a stream that went well."""
    for block in stream.decode().split("\n\n"):
        data = block.rpartition("data: ")[2]
        if data and data != "[DONE]":
            yield ChatCompletionChunk.model_validate_json(data)


def rebuilt(stream: bytes) -> dict[str, Any]:
    """The completion that openai-python makes of a stream."""
    state: ChatCompletionStreamState = ChatCompletionStreamState()
    for chunk in chunks(stream):
        state.handle_chunk(chunk)
    try:
        return state.get_final_completion().model_dump()
    except LengthFinishReasonError as cut:  # whatever was cut, it holds the completion
        return cut.completion.model_dump()


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """A completion without what is random (ids), and without the None's of openai-python."""
    ChatCompletion.model_validate(body)
    choices = json.loads(json.dumps(body["choices"]))
    for choice in choices:
        message = choice["message"]
        for name in ADDED:
            assert message.pop(name, None) is None
        message["tool_calls"] = calls = message.get("tool_calls") or []
        ids = [call["id"] for call in calls]
        assert len({*ids}) == len(ids) and all(ids)
        for number, call in enumerate(calls):
            assert call.pop("index", number) == number
            assert call["type"] == "function"
            call["id"] = number, len(call["id"])  # of one shape; a repeated one would be longer
            call["function"].pop("parsed_arguments", None)
    usage = body["usage"] and {
        name: {key: value for key, value in part.items() if value is not None}
        if isinstance(part, dict) else part
        for name, part in body["usage"].items()
    }  # fmt: skip
    return {"model": body["model"], "choices": choices, "usage": usage}
