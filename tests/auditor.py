"""A state machine over a chat stream's bytes: asserts the wire contract.  Sends nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass
class Heard:
    """What one choice said."""

    content: str | None = None
    thoughts: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[dict] = field(default_factory=list)
    frames: int = 0


@dataclass
class Auditor:
    """Feed it a whole stream; it raises AssertionError on the first thing that must not be."""

    include_usage: bool = False
    choices: dict[int, Heard] = field(default_factory=dict)
    usage: dict | None = None
    error: dict | None = None
    pings: int = 0
    _constant: tuple | None = None
    _done: bool = False

    def hear(self, stream: bytes) -> Auditor:
        """Check every frame and the end."""
        assert b"\r" not in stream
        while stream.startswith(b": ping\n"):
            stream = self._ping(stream)
        assert stream.endswith(b"\n\n"), stream[-100:]
        for block in stream.decode().removesuffix("\n\n").split("\n\n"):
            while block.startswith(": ping\n"):
                block = self._ping(block.encode()).decode()
            assert block.startswith("data: ") and "\n" not in block, block
            self._frame(block.removeprefix("data: "))
        assert self._done, "no [DONE]"
        if self.error is None:
            assert self.choices and all(heard.finish for heard in self.choices.values())
            assert (self.usage is not None) == self.include_usage
        return self

    def _ping(self, stream: bytes) -> bytes:
        self.pings += 1
        return stream.removeprefix(b": ping\n")

    def _frame(self, data: str) -> None:
        assert not self._done, "a frame after [DONE]"
        if data == "[DONE]":
            self._done = True
            return
        assert self.error is None and self.usage is None, "a frame after the end"
        frame = json.loads(data)
        if "error" in frame:
            assert set(frame["error"]) == {"message", "type", "param", "code"}
            self.error = frame["error"]
            return
        constant = (frame["id"], frame["object"], frame["created"], frame["model"])
        assert self._constant in (None, constant), "id, created or model changed"
        self._constant = constant
        assert frame["object"] == "chat.completion.chunk"
        assert ("usage" in frame) == self.include_usage
        if not frame["choices"]:
            self.usage = frame["usage"]
            return
        assert frame.get("usage") is None
        assert len(frame["choices"]) == 1
        self._choice(frame["choices"][0])

    def _choice(self, choice: dict) -> None:
        index, delta = choice["index"], choice["delta"]
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason"}
        assert index == 0 or 0 in self.choices, "the first chunk is not of choice 0"
        if "role" in delta:
            assert index not in self.choices, "the role came twice"
            assert delta["role"] == "assistant" and delta["refusal"] is None
            self.choices[index] = Heard(delta["content"])
            return
        heard = self.choices[index]
        assert heard.finish is None, "a delta after the finish"
        heard.frames += 1
        if choice["logprobs"]:
            heard.logprobs += choice["logprobs"]["content"]
        if choice["finish_reason"]:
            assert delta == {}
            heard.finish = choice["finish_reason"]
            assert heard.finish in ("stop", "length", "tool_calls")
            assert heard.finish != "tool_calls" or heard.calls
            return
        assert len(delta) == 1
        if "content" in delta:
            assert delta["content"], "an empty delta"
            heard.content = (heard.content or "") + delta["content"]
        elif "reasoning_content" in delta:
            assert delta["reasoning_content"], "an empty delta"
            heard.thoughts += delta["reasoning_content"]
        else:
            self._call(heard, delta["tool_calls"])

    def _call(self, heard: Heard, calls: list[dict]) -> None:
        assert len(calls) == 1
        call = calls[0]
        if "id" in call:
            assert call["index"] == len(heard.calls), "indices are not dense"
            assert call["type"] == "function" and call["function"]["arguments"] == ""
            assert call["id"] not in [other["id"] for other in heard.calls]
            heard.calls.append(
                {"id": call["id"], "name": call["function"]["name"], "arguments": ""}
            )
            return
        assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
        assert call["index"] == len(heard.calls) - 1, "calls interleave"
        assert call["function"]["arguments"], "an empty piece of arguments"
        heard.calls[-1]["arguments"] += call["function"]["arguments"]
