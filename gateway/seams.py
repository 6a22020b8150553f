"""White space that a template prints otherwise than the model wrote it.  Holds no ids.

    sampled   assistant\\nHm.<tool_call>...          rendered   assistant\\nHm.\\n\\n<tool_call>...

Templates trim content and put line breaks before calls and around reasoning.  There, at the seams
of an answer, two texts are alike whatever white space they have; anywhere else it is the text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_SPACE = " \t\r\n"

#: Literal texts with any white space between two neighbours; "" at an end: there too.
Parts = tuple[str, ...]


class Seams:
    """Where the answers of one layout have seams."""

    def __init__(self, literals: Collection[str], controls: Collection[int]) -> None:
        """`literals`: texts that open calls, open or close reasoning; `controls`: such tokens."""
        self._literals = [literal for literal in literals if literal]
        self._controls = frozenset(controls)

    def parts(
        self,
        before: Sequence[str],
        texts: Sequence[str],
        controls: Sequence[int],
        names: Sequence[str] = (),
    ) -> tuple[Parts, ...]:
        """Of an answer's `texts` around `controls`; the first continues the last of `before`.

        `names`: of the tools that it calls, where a list of calls opens with no other literal.
        """
        literals = [*self._literals, *(f"[{name}(" for name in names)]
        found: list[Parts] = [(text,) for text in before[:-1]]
        for at, text in enumerate(texts):
            parts = _cut(text, literals)
            if at == 0:
                parts = [before[-1].rstrip(_SPACE), parts[0].lstrip(_SPACE), *parts[1:]]
            elif controls[at - 1] in self._controls:
                parts = ["", parts[0].lstrip(_SPACE), *parts[1:]]
            if at == len(controls):
                parts[-1] = parts[-1].rstrip(_SPACE)
            elif controls[at] in self._controls:
                parts = [*parts[:-1], parts[-1].rstrip(_SPACE), ""]
            found.append(tuple(parts))
        return tuple(found)

def _cut(text: str, literals: Sequence[str]) -> list[str]:
    """At each literal, without the white space around it."""
    parts: list[str] = []
    at = 0
    while True:
        places = [(text.find(one, at), one) for one in literals]
        start, literal = min((one for one in places if one[0] >= 0), default=(-1, ""))
        piece = text[at:start] if literal else text[at:]
        piece = piece.lstrip(_SPACE) if parts else piece
        if not literal:
            return [*parts, piece]
        parts += piece.rstrip(_SPACE), literal
        at = start + len(literal)


def end_of(parts: Parts, text: str) -> int:
    """Where the parts end in a text that begins like them; -1 = it does not."""
    at = 0
    for number, part in enumerate(parts):
        while number and at < len(text) and text[at] in _SPACE:
            at += 1
        if not text.startswith(part, at):
            return -1
        at += len(part)
    return at


def alike(pieces: Sequence[Parts], texts: Sequence[str], ending: str) -> str | None:
    """What follows the pieces in the last of as many texts; None = they are not alike.

    `ending`: white space that the answer ended with.
    """
    for parts, text in zip(pieces[:-1], texts, strict=False):
        if end_of(parts, text) != len(text):
            return None
    end = end_of(pieces[-1], texts[-1])
    if end < 0:
        return None
    rest = texts[-1][end:]
    if rest.startswith(ending):
        return rest.removeprefix(ending)
    return rest if rest.strip(_SPACE) else ""


def ending_of(text: str) -> str:
    """The white space at the end of a text."""
    return text[len(text.rstrip(_SPACE)) :]
