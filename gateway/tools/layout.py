"""What every layout is besides its literals: an example, a binding.  Writes and reads no call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from engine.grammar.schema import Dropped
from gateway.tools import Tool
from gateway.tools.control import UNBOUND, Bound, bind


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(ABC):
    """A format; see gateway.tools.Format for what each member means."""

    name: str
    signature: tuple[str, ...]
    markers: tuple[str, ...] = ()
    control: Bound = UNBOUND

    @property
    def opening(self) -> str:
        """Nothing."""
        return ""

    @property
    def framed(self) -> bool:
        """Not."""
        return False

    @property
    def example(self) -> str:
        """One call as the model writes it."""
        return self.write([("add", '{"a": 1, "b": 2}')])

    @property
    def stand_ins(self) -> Mapping[int, str]:
        """For the Detokenizer."""
        return self.control.stand_ins()

    def bound(self, special: Mapping[str, int]) -> Self:
        """The same format for a vocabulary."""
        control = bind(self.markers, special)
        return replace(self, control=control) if control.ids else self

    def unenforced(self, tool: Tool) -> Sequence[Dropped]:
        """Nothing where arguments are JSON."""
        return ()

    def _free(self, begin: str, rest: str) -> list[str]:
        """The first rules of a grammar: a text, or a text, the trigger and the rule `rest`."""
        text, trigger = "TEXT: /(.|\\n)*/", self.control.lark(begin)
        if begin in self.control.ids:  # text cannot hold a control token
            return [f"start: TEXT | TEXT {trigger} {rest}", text]
        # The lazy rule wins as soon as the trigger is complete; until then both are alive.
        return [f"start: TEXT | head {rest}", text, f"head[lazy]: /(.|\\n)*/ {trigger}"]

    @abstractmethod
    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model writes them."""
