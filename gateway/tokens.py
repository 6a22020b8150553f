"""Text pieces to ids, and the ids that answers were sampled as.  Knows no templates, no requests.

Between two control tokens lies a piece of text.  It is encoded by a tokenizer that has no control
tokens, so it can never become one.  Where a piece continues a turn that this gateway served, the
sampled ids replace the canonical ones, so that the next prompt starts with the former tokens.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Tokenizer

from gateway.seams import Parts, alike, end_of, ending_of

_BRANCHES = 8  # answers kept for one prompt: choices, retries
_ENTRY_BYTES = 200  # of Python objects around each entry, roughly


class Encoder:
    """The model's tokenizer without its control tokens, and a cache of encoded pieces."""

    def __init__(self, tokenizer_json: str, controls: Collection[int], cache_bytes: int) -> None:
        spec = without(msgspec.json.decode(tokenizer_json), controls)
        self._first = Tokenizer.from_str(msgspec.json.encode(spec).decode())
        self._later = self._first
        if (later := without_first_space(spec)) is not None:
            self._later = Tokenizer.from_str(msgspec.json.encode(later).decode())
        self._cache: OrderedDict[tuple[str, bool], array[int]] = OrderedDict()
        self._left = cache_bytes

    def known(self, text: str, first: bool = False) -> array[int] | None:
        """The ids of a piece if they are cached."""
        if not text:
            return array("I")
        found = self._cache.get((text, first))
        if found is not None:
            self._cache.move_to_end((text, first))
        return found

    def encode(self, text: str, first: bool = False) -> array[int]:
        """The ids of a piece; `first` = it opens the prompt.  Safe to call from another thread."""
        tokenizer = self._first if first else self._later
        return array("I", tokenizer.encode(text, add_special_tokens=False).ids)

    def keep(self, text: str, first: bool, ids: array[int]) -> None:
        """Cache a piece, dropping those not used for the longest time."""
        if (text, first) in self._cache:
            return
        self._left -= _size(text, ids)
        self._cache[text, first] = ids
        while self._left < 0:
            (old, _), old_ids = self._cache.popitem(last=False)
            self._left += _size(old, old_ids)


def _size(text: str, ids: array[int]) -> int:
    return 4 * len(text) + 4 * len(ids) + _ENTRY_BYTES


def without(spec: dict[str, Any], controls: Collection[int]) -> dict[str, Any]:
    """A tokenizer's JSON that cannot produce the `controls`: they are no added tokens, and their
    entries in the vocabulary are renamed to what no text spells."""
    model = dict(spec["model"])
    added = [token for token in spec.get("added_tokens") or [] if token["id"] not in controls]
    hidden = f"\ue000{secrets.token_hex(16)}\ue000"
    if isinstance(model["vocab"], dict):
        model["vocab"] = {
            f"{hidden}{id}" if id in controls else piece: id for piece, id in model["vocab"].items()
        }
        if model.get("unk_token") not in model["vocab"]:
            model["unk_token"] = None
    else:
        model["vocab"] = [
            [f"{hidden}{id}", score]
            if id in controls and id != model.get("unk_id")
            else [piece, score]
            for id, (piece, score) in enumerate(model["vocab"])
        ]
    changed = {"model": model, "added_tokens": added, "post_processor": None}
    return {**spec, **changed, "truncation": None, "padding": None}


def without_first_space(spec: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON for pieces that do not open the prompt, if they are encoded in another way."""
    pre = spec.get("pre_tokenizer") or {}
    steps = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    if not any(step.get("prepend_scheme") == "first" for step in steps):
        return None
    changed = [
        {**step, "prepend_scheme": "never"} if step.get("prepend_scheme") == "first" else step
        for step in steps
    ]
    is_list = pre.get("type") == "Sequence"
    return {**spec, "pre_tokenizer": {**pre, "pretokenizers": changed} if is_list else changed[0]}


@dataclass(frozen=True, slots=True)
class Segment:
    """What stood after a prompt's last control token, and the answer: as text and as ids."""

    texts: tuple[str, ...]  # one more than controls
    controls: tuple[int, ...]
    ids: array[int]
    parts: tuple[Parts, ...] = ()  # of `texts`, at the seams of the answer

    def after(self, texts: Sequence[str], controls: Sequence[int], at: int) -> str | None:
        """What follows this segment in its last piece if the pieces from `at` on begin with it."""
        last = at + len(self.controls)
        if last >= len(texts) or tuple(controls[at:last]) != self.controls:
            return None
        if tuple(texts[at:last]) == self.texts[:-1] and texts[last].startswith(self.texts[-1]):
            return texts[last].removeprefix(self.texts[-1])
        if not self.parts:
            return None
        return alike(self.parts, texts[at : last + 1], ending_of(self.texts[-1]))

    def shared(self, texts: Sequence[str], controls: Sequence[int], at: int) -> int:
        """How many pieces, each with the control token behind it, both begin with."""
        count = 0
        for text, control in zip(self.texts, self.controls, strict=False):
            here = at + count
            if here >= len(controls) or controls[here] != control:
                break
            parts = self.parts[count] if self.parts else (text,)
            if texts[here] != text and end_of(parts, texts[here]) != len(texts[here]):
                break
            count += 1
        return count

    def piece(self, number: int) -> tuple[array[int], array[int]]:
        """The ids before a piece, and those of the piece."""
        start = 0
        for control in self.controls[:number]:
            start = self.ids.index(control, start) + 1
        end = len(self.ids)
        if number < len(self.controls):
            end = self.ids.index(self.controls[number], start)
        return self.ids[:start], self.ids[start:end]

    @property
    def size(self) -> int:
        """Bytes, roughly."""
        return 8 * sum(map(len, self.texts)) + 4 * len(self.ids) + _ENTRY_BYTES


class Memory:
    """Segments by what came before them, in one scope.  Forgets the least recently used."""

    def __init__(self, limit_bytes: int) -> None:
        self._segments: OrderedDict[bytes, list[Segment]] = OrderedDict()
        self._left = limit_bytes

    def __len__(self) -> int:
        return len(self._segments)

    def find(
        self, key: bytes, texts: Sequence[str], controls: Sequence[int], at: int
    ) -> Segment | None:
        """The longest segment under `key` that the pieces from `at` on begin with."""
        segments = self._segments.get(key, ())
        found = [one for one in segments if one.after(texts, controls, at) is not None]
        if not found:
            return None
        self._segments.move_to_end(key)
        return max(found, key=lambda segment: sum(map(len, segment.texts)))

    def nearest(
        self, key: bytes, texts: Sequence[str], controls: Sequence[int], at: int
    ) -> tuple[Segment, int] | None:
        """A segment that begins as the pieces do, and how many pieces; for answers of which the
        template prints a part in another way."""
        found = [(one.shared(texts, controls, at), one) for one in self._segments.get(key, ())]
        count, segment = max(found, key=lambda one: one[0], default=(0, None))
        return None if segment is None or not count else (segment, count)

    def add(self, key: bytes, segment: Segment) -> None:
        """Remember a segment; one of the same text replaces the older one."""
        branches = self._segments.setdefault(key, [])
        self._segments.move_to_end(key)
        same = [
            old
            for old in branches
            if (old.texts, old.controls) == (segment.texts, segment.controls)
        ]
        for old in same or branches[: max(0, len(branches) - _BRANCHES + 1)]:
            branches.remove(old)
            self._left += old.size
        branches.append(segment)
        self._left -= segment.size
        while self._left < 0:
            _, dropped = self._segments.popitem(last=False)
            self._left += sum(old.size for old in dropped)


class Trail:
    """The name of everything up to a point of a prompt: a hash chain over texts and control tokens.

    BLAKE2b, keyed by the scope: no text can be made to collide with another's name.
    """

    def __init__(self, scope: bytes) -> None:
        self._hash = hashlib.blake2b(key=scope[:64], digest_size=16)

    def pass_by(self, text: str, control: int) -> None:
        """Go on past a piece and the control token behind it."""
        raw = text.encode("utf-8", "surrogatepass")
        self._hash.update(len(raw).to_bytes(8, "little") + raw + control.to_bytes(8, "little"))

    @property
    def key(self) -> bytes:
        """16 bytes."""
        return self._hash.digest()
