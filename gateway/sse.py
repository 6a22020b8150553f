"""Events to SSE bytes: the only file that knows frames.  Waits for nothing and reads no ids.

A stream's constant parts are encoded once; a token then costs one JSON string and one join.  No
`id:`, `retry:` or event-only blocks: OpenAI's SDKs fail on them.

    data: {"id": ..., "choices": [{"index": 0, "delta": {...}, ...}]}      ...      data: [DONE]
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.choices import Said
from gateway.errors import ApiError
from gateway.events import CallArgs, CallEnd, CallStart, Event, Finish, Reasoning, Text
from gateway.protocol import ChatLogprobs, TextLogprobs, TokenLogprob, Usage

PING = b": ping\n"  # a comment without a blank line: some clients fail on an empty event
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_ARGUMENTS, _ARGUMENTS_END = b'"tool_calls":[{"index":%d,"function":{"arguments":', b"}}]"
_CLOSED = b',"x-slipstream-call":"closed-early"'  # the header's name: a stream's has left
_FINISHES = {reason: _encode(reason) for reason in ("stop", "length", "tool_calls")}


def error_frames(error: ApiError) -> bytes:
    """The typed end of a stream that failed after its 200."""
    return b"data: " + error.body() + b"\n\n" + DONE


class _Frames:
    """What both kinds of stream share: the constant parts around each choice."""

    kind: bytes
    close: bytes  # between a choice's own fields and `logprobs`
    _texts: list[bytes]  # of each choice, up to its text

    def __init__(self, id: str, created: int, model: str, include_usage: bool) -> None:
        """`created`: Unix seconds, one value for the whole stream."""
        constant = msgspec.json.encode({"id": id, "object": self.kind.decode(), "created": created,
                                        "model": model, "system_fingerprint": None})  # fmt: skip
        self._head = b"data: " + constant[:-1] + b',"choices":['
        self._include_usage = include_usage
        self._usage = b',"usage":null' if include_usage else b""
        self._closed = b""  # what stands beside the stream's usage
        self._tail = self.close + b',"logprobs":null,"finish_reason":null}]' + self._usage
        self._tail += b"}\n\n"

    def around(self, index: int, call: int) -> tuple[bytes, bytes]:
        """What stands before and after the JSON of a frame's only text, or of the arguments of
        `call` when that is not -1; quotes included."""
        assert call < 0, "a text completion has no calls"
        return self._texts[index] + b'"', b'"' + self._tail

    def _choice(self, index: int) -> bytes:
        return self._head + b'{"index":%d,' % index

    def _tailed(self, logprobs: bytes, reason: bytes = b"null", beside: bytes = b"") -> bytes:
        """The rest of a frame that is not the plain one."""
        return b"".join(
            (self.close, b',"logprobs":', logprobs, b',"finish_reason":', reason, b"}]",
             beside, self._usage, b"}\n\n")
        )  # fmt: skip

    def end(self, usage: Usage) -> bytes:
        """Usage if it was asked for, and the end of the stream."""
        if not self._include_usage:
            return DONE
        return self._head + b"]" + self._closed + b',"usage":' + _encode(usage) + b"}\n\n" + DONE


class ChatFrames(_Frames):
    """Frames of one chat stream."""

    kind = b"chat.completion.chunk"
    close = b"}"

    def __init__(
        self, id: str, created: int, model: str, *, choices: int, include_usage: bool
    ) -> None:
        super().__init__(id, created, model, include_usage)
        self._deltas = [self._choice(index) + b'"delta":{' for index in range(choices)]
        self._texts = [delta + b'"content":' for delta in self._deltas]
        self._opened = [False] * choices
        self._waiting: list[Said] = []  # of later choices, until choice 0 has opened
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(choices)]

    def batch(self, batch: Sequence[Said]) -> bytes:
        """All that is new, as one run of bytes; empty when nothing may leave yet."""
        if not self._opened[0]:
            batch = self._after_first(batch)
        if len(batch) == 1:
            return self._said(batch[0])
        return b"".join(map(self._said, batch))

    def _after_first(self, batch: Sequence[Said]) -> Sequence[Said]:
        """SDKs build their answer from the first chunk they see: it must be of choice 0."""
        anew = {said.index for said in batch if said.anew}
        waiting = [said for said in self._waiting if said.index not in anew]
        everything = [*waiting, *batch]
        if not any(said.index == 0 and said.events for said in everything):
            self._waiting = everything
            return ()
        self._waiting = []
        return sorted(everything, key=lambda said: said.index)

    def _said(self, said: Said) -> bytes:
        index = said.index
        events = said.events
        if said.anew:
            self._logprobs[index].clear()
        if said.logprobs:
            self._logprobs[index] += said.logprobs
        if not events:
            return b""
        if len(events) == 1 and self._opened[index] and not self._logprobs[index]:
            only = events[0]
            if isinstance(only, Text):  # the usual step of a decode
                return b"".join((self._texts[index], _encode(only.text), self._tail))
        frames: list[bytes] = []
        if not self._opened[index]:
            self._opened[index] = True
            content = b"null" if isinstance(events[0], CallStart | Reasoning) else b'""'
            role = b'"role":"assistant","content":' + content + b',"refusal":null'
            frames += (self._deltas[index], role, self._tail)
        for event in events:
            frames += self._event(index, event, said.closed_early)
        return b"".join(frames)

    def around(self, index: int, call: int) -> tuple[bytes, bytes]:
        """See _Frames.around."""
        if call < 0:
            return super().around(index, call)
        return self._deltas[index] + _ARGUMENTS % call + b'"', b'"' + _ARGUMENTS_END + self._tail

    def _event(self, index: int, event: Event, closed_early: bool) -> tuple[bytes, ...]:
        match event:
            case Text(text=text):
                return self._texts[index], _encode(text), self._rest(index)
            case CallArgs(index=call, text=text):
                opening = _ARGUMENTS % call, _encode(text), _ARGUMENTS_END
                return self._deltas[index], *opening, self._rest(index)
            case CallStart(index=call, id=id, name=name):
                start = (
                    b'"tool_calls":[{"index":%d,"id":' % call, _encode(id),
                    b',"type":"function","function":{"name":', _encode(name), b',"arguments":""}}]',
                )  # fmt: skip
                return self._deltas[index], *start, self._rest(index)
            case Reasoning(text=text):
                delta = self._deltas[index], b'"reasoning_content":', _encode(text)
                return *delta, self._rest(index)
            case CallEnd():
                return ()
            case Finish(reason=reason):
                beside = _CLOSED if closed_early else b""
                self._closed = self._closed or beside
                return (
                    self._deltas[index],
                    self._tailed(self._taken(index), _FINISHES[reason], beside),
                )
            case _:
                raise TypeError(f"no frame for {type(event).__name__}")

    def _rest(self, index: int) -> bytes:
        return self._tailed(self._taken(index)) if self._logprobs[index] else self._tail

    def _taken(self, index: int) -> bytes:
        """The logprobs that no frame has carried yet."""
        waiting, self._logprobs[index] = self._logprobs[index], []
        return _encode(ChatLogprobs(waiting)) if waiting else b"null"


class TextFrames(_Frames):
    """Frames of one text completion's stream."""

    kind = b"text_completion"
    close = b""

    def __init__(
        self, id: str, created: int, model: str, *, choices: int, include_usage: bool
    ) -> None:
        super().__init__(id, created, model, include_usage)
        self._texts = [self._choice(index) + b'"text":' for index in range(choices)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(choices)]
        self._sent = [0] * choices  # characters, for text_offset

    def echo(self, index: int, text: str) -> bytes:
        """The prompt itself, before what the model says."""
        return b"".join((self._texts[index], _encode(text), self._tail))

    def batch(self, batch: Sequence[Said]) -> bytes:
        """All that is new, as one run of bytes; empty when nothing may leave yet."""
        return b"".join(frame for said in batch for frame in self._said(said))

    def _said(self, said: Said) -> list[bytes]:
        index = said.index
        if said.anew:
            self._logprobs[index].clear()
        self._logprobs[index] += said.logprobs
        frames: list[bytes] = []
        for event in said.events:
            match event:
                case Text(text=text):
                    frames += (self._texts[index], _encode(text), self._rest(index))
                case Finish(reason=reason):
                    tail = self._tailed(self._taken(index), _FINISHES[reason])
                    frames += (self._texts[index], b'""', tail)
                case _:
                    raise TypeError(f"no text frame for {type(event).__name__}")
        return frames

    def _rest(self, index: int) -> bytes:
        return self._tailed(self._taken(index)) if self._logprobs[index] else self._tail

    def _taken(self, index: int) -> bytes:
        waiting, self._logprobs[index] = self._logprobs[index], []
        if not waiting:
            return b"null"
        found = text_logprobs(waiting, self._sent[index])
        self._sent[index] += sum(len(one.token) for one in waiting)
        return _encode(found)


def text_logprobs(tokens: Sequence[TokenLogprob], offset: int = 0) -> TextLogprobs:
    """Chat-shaped logprobs as the four lists of text completions; `offset` in characters."""
    offsets: list[int] = []
    for one in tokens:
        offsets.append(offset)
        offset += len(one.token)
    return TextLogprobs(
        tokens=[one.token for one in tokens],
        token_logprobs=[one.logprob for one in tokens],
        top_logprobs=[
            {best.token: best.logprob for best in one.top_logprobs} or None for one in tokens
        ],
        text_offset=offsets,
    )
