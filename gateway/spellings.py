"""How arguments were spelled in the calls of served turns.  Knows no ids and no templates.

A client may parse a call's arguments and write them anew: keys sorted, no spaces, `1.0` as `1`.  It
still says the same, so the next prompt spells it as the model did, and continues its tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from msgspec.structs import replace

from gateway.arguments import BadArguments, meaning
from gateway.protocol import Message, ToolCall

_LONGEST = 64 * 1024  # characters of arguments that are remembered
_ENTRY_BYTES = 300  # of Python objects around each entry, roughly

Key = tuple[bytes, str, str]  # scope, function, text


class Spellings:
    """Text of arguments as the model wrote it, by what it says; forgets the least recently used."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes
        self._written: OrderedDict[Key, str] = OrderedDict()

    def remember(self, scope: bytes, calls: Sequence[tuple[str, str]]) -> None:
        """The (name, arguments) of a finished turn."""
        for name, text in calls:
            if len(text) <= _LONGEST:
                self._keep((scope, name, text), text)
                try:
                    self._keep((scope, name, meaning(text)), text)
                except BadArguments:
                    continue

    def restored(self, scope: bytes, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with each call's arguments as the model wrote them, where it did."""
        if not self._written:
            return messages
        return [self._restored(scope, message) for message in messages]

    def _restored(self, scope: bytes, message: Message) -> Message:
        if not message.tool_calls:
            return message
        calls = [self._call(scope, call) for call in message.tool_calls]
        if all(new is old for new, old in zip(calls, message.tool_calls, strict=True)):
            return message
        return replace(message, tool_calls=calls)

    def _call(self, scope: bytes, call: ToolCall) -> ToolCall:
        name, text = call.function.name, call.function.arguments
        if len(text) > _LONGEST:
            return call
        key = (scope, name, text)
        written = self._written.get(key)
        if written is None:
            written = self._written.get((scope, name, meaning(text or "{}")), text)
            self._keep(key, written)  # the next turn sends it again
        else:
            self._written.move_to_end(key)
        if written == text:
            return call
        return replace(call, function=replace(call.function, arguments=written))

    def _keep(self, key: Key, written: str) -> None:
        old = self._written.pop(key, None)
        if old is not None:
            self._left += _size(key, old)
        self._written[key] = written
        self._left -= _size(key, written)
        while self._left < 0:
            dropped, text = self._written.popitem(last=False)
            self._left += _size(dropped, text)


def _size(key: Key, written: str) -> int:
    return 4 * (len(key[2]) + len(written)) + _ENTRY_BYTES
