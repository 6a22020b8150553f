"""A stream's usual token: from the engine's out to the socket in one call.  Ends nothing.

Most tokens are whole text by themselves and change nothing but the text.  Their JSON is kept with
the vocabulary, their frame's constant parts with the stream: one lookup and one join make the
bytes that text.py, choices.py and sse.py would make.  Everything else goes `otherwise`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from engine.messages import Out

if TYPE_CHECKING:
    from gateway.choices import Choice


class Socket(Protocol):
    """The guard's shortcut."""

    def room(self) -> bool:
        """Whether a piece may be written now."""

    def write(self, data: bytes) -> None:
        """Write one, not an empty one."""


class Ordinary:
    """The sink of a stream that has begun and has one choice without stop strings."""

    __slots__ = (
        "_after", "_around", "_before", "_call", "_choice", "_otherwise", "_quoted", "_room",
        "_stop", "_tick", "_vocabulary", "_write",
    )  # fmt: skip

    def __init__(
        self,
        choice: Choice,
        around: Callable[[int], tuple[bytes, bytes]],
        socket: Socket,
        *,
        tick: Callable[[], None],
        stop: Callable[[Exception], None],
        otherwise: Callable[[Out], bool],
    ) -> None:
        """`around` of a call's index, or -1: what stands before and after the JSON of a frame's
        arguments, or text; quotes included.

        `tick` notes the time of a token, `stop` ends this turn alone, `otherwise` takes an out that
        is not ordinary, and says whether it did.
        """
        self._choice = choice
        self._around = around
        self._call = -1  # the one whose arguments `_before` and `_after` frame
        self._before, self._after = around(-1)
        self._vocabulary = choice.vocabulary
        self._quoted = choice.vocabulary.quoted
        self._room = socket.room
        self._write = socket.write
        self._tick = tick
        self._stop = stop
        self._otherwise = otherwise

    def __call__(self, out: Out) -> bool:
        """Take an out that ends nothing; False when the reader must take it."""
        tokens = out.tokens
        found = self._quoted.get(tokens[0]) if len(tokens) == 1 else self._joined(tokens)
        if found is None:  # at a token's first use
            for id in tokens:
                self._vocabulary.quote(id)
            found = self._joined(tokens)
        choice = self._choice
        # Decoder and scanner are the choice's of now: it may have begun anew.
        if found is None or out.logprobs or choice.decoder.pending:
            return self._otherwise(out)
        quoted, text = found
        call, scanner = -1, choice.scanner
        if scanner is not None:
            watched, call = scanner.watched, scanner.call
            if watched is None or watched in quoted or choice.dropped:
                return self._otherwise(out)
        if not self._room():
            return False
        try:
            if call != self._call:
                self._enter(call)
            if call >= 0:
                choice.argued(text)
            choice.ids += tokens
            choice.tokens += len(tokens)
            choice.silent = 0
            self._tick()
            self._write(b"".join((self._before, quoted, self._after)))
        except Exception as error:  # of this turn alone: others wait for the same step
            self._stop(error)
        return True

    def _enter(self, call: int) -> None:
        """Text, or the arguments of another call, from here on."""
        self._before, self._after = self._around(call)
        self._call = call

    def _joined(self, tokens: Sequence[int]) -> tuple[bytes, str] | None:
        """Several tokens' text; None when one of them is not known to be whole, or none is here."""
        try:
            found = [self._quoted[id] for id in tokens]
        except KeyError:
            return None
        if not found:
            return None
        return b"".join([one[0] for one in found]), "".join([one[1] for one in found])
