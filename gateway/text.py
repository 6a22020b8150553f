"""Token ids to text, never half a code point; stop strings.  Encodes nothing and knows no model.

The bytes of every id come out of the tokenizer's JSON once.  ByteLevel vocabularies spell each byte
as one letter; SentencePiece ones write a space as U+2581 and odd bytes as `<0xAB>`.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from encodings.utf_8 import IncrementalDecoder

import msgspec

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class BadTokenizer(ValueError):
    """The tokenizer's JSON is of a kind that this gateway cannot decode; the message names it."""


@functools.cache
def _letters() -> dict[str, int]:
    """ByteLevel's letter -> byte: printable Latin-1 stands for itself, the rest from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


class Vocabulary:
    """The bytes of every token id, and which ids are control tokens."""

    def __init__(self, tokenizer_json: str) -> None:
        spec = msgspec.json.decode(tokenizer_json)
        kinds = set(_types(spec.get("decoder")))
        pieces = _pieces(spec["model"])
        byte_level = "ByteLevel" in kinds
        if not byte_level and not kinds & {"Metaspace", "ByteFallback", "Replace", "Fuse"}:
            raise BadTokenizer(
                f"The tokenizer's decoder is {sorted(kinds) or 'missing'}; this gateway reads "
                f"ByteLevel and SentencePiece tokenizers. Convert the model's tokenizer.json."
            )
        spell = _byte_level if byte_level else _sentence_piece
        #: An answer's first space is the tokenizer's own mark, not the model's text.
        self.strip_first = not byte_level and bool(kinds & {"Metaspace", "Strip"})
        #: Text of the added tokens: a piece of user text must never become one of these ids.
        self.added: dict[int, str] = {}
        self.special: set[int] = set()
        self._marks: set[int] = set()
        #: JSON without its quotes, and text, of tokens that quote() found to be whole text.
        self.quoted: dict[int, tuple[bytes, str]] = {}
        for token in spec.get("added_tokens") or []:
            pieces[token["id"]] = token["content"]
            self.added[token["id"]] = token["content"]
            if token.get("special"):
                self.special.add(token["id"])
            if token.get("special") or (token["content"][:1], token["content"][-1:]) == ("<", ">"):
                self._marks.add(token["id"])
        self.bytes: list[bytes] = [b""] * (max(pieces, default=-1) + 1)
        for id, piece in pieces.items():
            self.bytes[id] = b"" if id in self.special else spell(piece)

    def __len__(self) -> int:
        return len(self.bytes)

    def specials(self) -> dict[str, int]:
        """Text -> id of the tokens that no text spells for a grammar: the control tokens, and added
        ones in angle brackets.  Qwen's and DeepSeek's markers of calls are of the second kind."""
        return {self.added[id]: id for id in self._marks}

    def quote(self, id: int) -> None:
        """Note a token's text if it has some that begins and ends between code points; never that
        of a mark, which may be more than text."""
        if id in self._marks or id in self.quoted:
            return
        with contextlib.suppress(UnicodeDecodeError, IndexError):
            if text := self.bytes[id].decode():
                self.quoted[id] = msgspec.json.encode(text)[1:-1], text

    def spelled(self, id: int) -> bytes:
        """The bytes of one token as logprobs show it: a control token by its name."""
        if id in self.special:
            return self.added[id].encode()
        return self.bytes[id] if 0 <= id < len(self.bytes) else b""


def _types(part: object) -> Iterable[str]:
    if isinstance(part, Mapping):
        yield str(part.get("type"))
        for child in part.get("decoders", []):
            yield from _types(child)


def _pieces(model: Mapping[str, object]) -> dict[int, str]:
    """id -> piece, of a BPE's dict or a Unigram's list."""
    vocab = model.get("vocab")
    if isinstance(vocab, Mapping):
        return {id: piece for piece, id in vocab.items()}
    if isinstance(vocab, Sequence):
        return {id: entry[0] for id, entry in enumerate(vocab)}
    raise BadTokenizer(f"The tokenizer's model {model.get('type')!r} has no vocabulary; use BPE.")


def _byte_level(piece: str) -> bytes:
    letters = _letters()
    try:
        return bytes([letters[letter] for letter in piece])
    except KeyError:  # an added token in plain text
        return piece.encode()


def _sentence_piece(piece: str) -> bytes:
    if found := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(found[1], 16)])
    return piece.replace(_SPACE, " ").encode()


class Detokenizer:
    """One choice's ids to text in any grouping: equal to decoding all at once, control ids skipped.

    Invalid bytes become U+FFFD as soon as it is certain that nothing can complete them.
    """

    def __init__(self, vocabulary: Vocabulary, stand_ins: Mapping[int, str] | None = None) -> None:
        """`stand_ins`: control ids that are not skipped but shown, each as this text; what came
        before one is whole (gateway/tools/control.py)."""
        self._stand_ins = stand_ins or {}
        self._bytes = vocabulary.bytes
        self._strip = vocabulary.strip_first
        self._decoder = IncrementalDecoder("replace")
        #: Whether the next text is not just its token's: it completes one, or loses its space.
        self.pending = self._strip

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; ids outside the vocabulary have none."""
        if self._stand_ins and not self._stand_ins.keys().isdisjoint(ids):
            return self._among(ids)
        table = self._bytes
        try:
            raw = b"".join([table[id] for id in ids])
        except IndexError:  # rows that pad the output head
            raw = b"".join([table[id] for id in ids if id < len(table)])
        text = self._first(self._decoder.decode(raw)) if self._strip else self._decoder.decode(raw)
        self.pending = self._strip or self._decoder.buffer != b""
        return text

    def _among(self, ids: Sequence[int]) -> str:
        """The text of ids of which some are shown by stand-ins."""
        texts: list[str] = []
        start = 0
        for at, id in enumerate(ids):
            if shown := self._stand_ins.get(id):
                texts += self.push(ids[start:at]), self.close(), shown
                start = at + 1
        return "".join(texts) + self.push(ids[start:])

    def close(self) -> str:
        """No more ids come: an incomplete tail is U+FFFD."""
        rest = self._decoder.decode(b"", True)
        return self._first(rest) if self._strip else rest

    def _first(self, text: str) -> str:
        if text:
            self._strip = False
        return text.removeprefix(" ")


class StopStrings:
    """Cut text at the first stop string to be completed; hold back only what may still become one.

    The result does not depend on how the text is grouped: of the stop strings that occur, the one
    that ends first wins, and the longest of those.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; return the text that may leave, and whether a stop was hit."""
        if not self._stops:
            return text, False
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at = min(found)
            free, self._held = self._held[:at], ""
            return free, True
        keep = self._may_begin()
        free, self._held = self._held[:keep], self._held[keep:]
        return free, False

    def flush(self) -> str:
        """Text of another kind follows, or none: what was held back is plain text."""
        rest, self._held = self._held, ""
        return rest

    def _may_begin(self) -> int:
        """Where the longest suffix that is a proper prefix of a stop string begins."""
        held = self._held
        for at in range(max(0, len(held) - self._longest + 1), len(held)):
            if held[at] in self._firsts and any(stop.startswith(held[at:]) for stop in self._stops):
                return at
        return len(held)
