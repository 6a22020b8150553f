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
    """The sink of a stream that has begun, has one choice, no scanner and no stop strings."""

    __slots__ = (
        "_after", "_before", "_choice", "_decoder", "_otherwise", "_quote", "_quoted", "_room",
        "_stop", "_tick", "_write",
    )  # fmt: skip

    def __init__(
        self,
        choice: Choice,
        around: tuple[bytes, bytes],
        socket: Socket,
        *,
        tick: Callable[[], None],
        stop: Callable[[Exception], None],
        otherwise: Callable[[Out], bool],
    ) -> None:
        """`around`: what stands before and after the JSON of a frame's text, quotes included.

        `tick` notes the time of a token, `stop` ends this turn alone, `otherwise` takes an out that
        is not ordinary, and says whether it did.
        """
        self._choice = choice
        self._before, self._after = around
        self._decoder = choice.decoder
        self._quoted = choice.vocabulary.quoted
        self._quote = choice.vocabulary.quote
        self._room = socket.room
        self._write = socket.write
        self._tick = tick
        self._stop = stop
        self._otherwise = otherwise

    def __call__(self, out: Out) -> bool:
        """Take an out that ends nothing; False when the reader must take it."""
        tokens = out.tokens
        text = self._quoted.get(tokens[0]) if len(tokens) == 1 else self._joined(tokens)
        if text is None or out.logprobs or self._decoder.pending:
            for id in tokens:
                self._quote(id)  # for its next use
            return self._otherwise(out)
        if not self._room():
            return False
        try:
            choice = self._choice
            choice.ids += tokens
            choice.tokens += len(tokens)
            self._tick()
            self._write(b"".join((self._before, text, self._after)))
        except Exception as error:  # of this turn alone: others wait for the same step
            self._stop(error)
        return True

    def _joined(self, tokens: Sequence[int]) -> bytes | None:
        """Several tokens' text; None when one of them is not known to be whole, or none is here."""
        quoted = self._quoted
        try:
            return b"".join([quoted[id] for id in tokens]) or None
        except KeyError:
            return None
