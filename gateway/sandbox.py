"""Where chat templates run: what they may call, and how much they may do.  Renders no message.

A template comes with a model that somebody downloaded.  Jinja's immutable sandbox keeps it from
Python's insides; this one also counts (work.py) and stops it.  That is complete because the rest is
a list: a call is of METHODS, of `functions`, of a macro, or Forbidden; filters and tests are those
of filters.py; and operators that make or walk something are hidden filters (rewrite.py).
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template as Compiled
from jinja2 import TemplateSyntaxError, nodes, pass_context
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Joiner, Namespace

from gateway.filters import filters, tests
from gateway.rewrite import rewrite
from gateway.work import CALL, WIDTH, WORK, Forbidden, Stopped, Work

SOURCE = 512 * 1024  # characters of a template
#: Methods that a template may call, by the type that has them.
METHODS = {
    str: frozenset(
        """capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal
        isdigit islower isnumeric isspace istitle isupper join ljust lower lstrip partition
        removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split
        splitlines startswith strip swapcase title upper zfill""".split()
    ),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    list: frozenset({"count", "index", "copy"}),
    tuple: frozenset({"count", "index"}),
    LoopContext: frozenset({"cycle", "changed"}),
}
_JINJAS = ("_loop_vars", "_block_vars")  # that Jinja adds to every call within a loop or block
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})


class BadTemplate(ValueError):
    """A chat template that cannot be served; the message says why, and where if it can."""


class Box(Namespace):
    """A namespace that prints without its contents, which may hold each other."""

    def __repr__(self) -> str:
        return "<namespace>"


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template, which several threads may render."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(
        self, more: Mapping[str, Callable[..., Any]], functions: Mapping[str, Callable[..., Any]]
    ) -> None:
        """`more`: filters by name; `functions`: globals.  Each spends what it costs."""
        # Autoescape is for HTML; a prompt is plain text.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self.work = work = Work()
        self.finalize = self._printed
        given = {"range": work.range_of, "dict": work.dict_of, "namespace": Box, "joiner": Joiner}
        self.globals = {**given, **functions}
        self._functions = tuple(self.globals.values())
        hidden: dict[str, Callable[..., Any]] = {
            "looped": work.items, "passed": work.begins, "joined": self._joined, "made": work.read,
            "sliced": self._sliced, "within": self._within,
        }  # fmt: skip
        known: dict[str, Any] = {**filters(work, self.getitem), **more}
        for name, one in hidden.items():
            known[f" {name}"] = pass_context(partial(_later, one))
        for table, ours in ((self.filters, known), (self.tests, tests(work))):
            table.clear()
            table.update(ours)

    def compiled(self, source: str, name: str) -> Compiled:
        """The template; raise BadTemplate."""
        if len(source) > SOURCE:
            raise BadTemplate(f"{name} has {len(source):,} characters; at most {SOURCE:,} may be.")
        self.work.begin(WORK)
        try:
            return self.from_string(source)
        except TemplateSyntaxError as error:
            why = f"is no Jinja (line {error.lineno}): {(error.message or '').rstrip('.')}"
        except (Stopped, Forbidden) as error:
            why = str(error)
        except (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError):
            why = "is nested too deeply, or holds a number that is too large"
        raise BadTemplate(
            f"{name} {why}. Correct it, or serve with --chat-template and another file."
        ) from None

    # --- hooks of Jinja's ----------------------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return rewrite(super()._parse(source, name, filename))

    def _printed(self, value: Any) -> Any:
        return value if type(value) is str else self.work.read(value)

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        """The pieces that a template, macro or block printed."""
        texts = list(parts)
        self.work.count_of(texts)
        return "".join(texts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call, if it is of what is on a list."""
        __self.work.spend(CALL)
        if any(__obj is one for one in __self._functions):
            return __context.call(__obj, *args, **kwargs)
        if isinstance(__obj, BuiltinMethodType | MethodType):
            named = {key: one for key, one in kwargs.items() if key not in _JINJAS}
            return __self._method(__obj, args, named)
        if isinstance(__obj, LoopContext):
            return __obj(__self.work.items(args[0], WIDTH))
        if isinstance(__obj, Macro | BlockReference | Joiner | Undefined | _Format):
            return __context.call(__obj, *args, **kwargs)
        raise Forbidden(f"calls a {type(__obj).__name__}, which no chat template may")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+ - * ** %`, their results bounded before they are made."""
        work = self.work
        if isinstance(left, str) and operator == "%":
            return work.percent(left, right)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            work.letters(len(left) + len(right))
            return str(left) + str(right)
        if operator == "+" and isinstance(left, str):
            work.letters(len(left))
        elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            work.spend(len(left) + len(right))
        elif operator == "*":
            work.repeated(left, right)
        elif operator == "**":
            work.power(left, right)
        found = super().call_binop(context, operator, left, right)
        if isinstance(found, int):
            work.bits(found.bit_length())
        return found

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, which fills in attributes only as the sandbox lets it."""
        found = super().wrap_str_format(value)
        return None if found is None else _Format(self.work, value.__self__, found)

    # --- what is counted by what it is given ---------------------------------------------------

    def _joined(self, *parts: object) -> str:
        return self.work.joined("", [self.work.text(part) for part in parts])

    def _sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        found = value[start:stop:step]
        if isinstance(found, str):
            self.work.letters(len(found))
        else:
            self.work.items(found)
        return found

    def _within(self, value: Any, item: Any) -> bool:
        if isinstance(value, str):
            self.work.letters(len(value))
        elif isinstance(item, list | tuple | Mapping):
            self.work.spend(self.work.weight(value) + self.work.weight(item))
        elif not isinstance(value, Mapping):
            value = self.work.items(value)
        return item in value

    def _method(self, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        owner, name, work = method.__self__, method.__name__, self.work
        if not any(isinstance(owner, kind) and name in METHODS[kind] for kind in METHODS):
            raise Forbidden(f"calls .{name} of a {type(owner).__name__}, which no template may")
        if not isinstance(owner, str):
            work.spend(work.weight(args))
            if name in ("count", "index"):
                work.read(owner)
            elif name == "copy":
                work.items(owner)
            return method(*args, **kwargs)
        work.letters(len(owner))
        if name == "join":
            return work.joined(owner, *args)
        if name == "replace":
            return work.replaced(owner, *args)
        if name in _PADDING:
            work.width(args[0])
        found = method(*args, **kwargs)
        if isinstance(found, list):
            work.items(found)
        return owner if found == owner else found  # it may know how it is to be printed


class _Format:
    """`str.format` of one text, with its widths checked."""

    def __init__(self, work: Work, form: str, filled: Callable[..., str]) -> None:
        self._work, self._form, self._filled = work, form, filled

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        fields = 0
        for _, name, spec, _ in string.Formatter().parse(self._form):
            fields += name is not None
            if "{" in (spec or "") or re.search(r"\d{4}", spec or ""):
                raise Stopped(f"asks `format` for a width above {WIDTH - 1}")
        weight = self._work.weight(args) + self._work.weight(kwargs)
        self._work.letters(len(self._form))
        self._work.spend(fields * (1 + weight))
        return self._filled(*args, **kwargs)


def _later(function: Callable[..., Any], context: Context, *args: Any) -> Any:
    """Taking the context keeps Jinja from calling a filter while it compiles."""
    return function(*args)
