"""The filters and tests that chat templates have, each counted.  Has none of the layouts' own.

Jinja's others are left out: they make HTML, pad, group or draw lots, which no prompt needs, and
each would need its own bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from jinja2.filters import FILTERS
from jinja2.tests import TESTS

from gateway.work import FILTER, Work

_FILTERS: dict[str, Any] = {**FILTERS}
_TESTS: dict[str, Any] = {**TESTS}
#: Jinja's filters that cost one unit, if the value has a length.
_CONSTANT = ("count", "d", "default", "first", "items", "last", "length")
#: Those that only walk a value's items.
_WALKING = ("list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
#: Those that read all that is in a value, and make about as much.
_READING = (
    "abs", "capitalize", "dictsort", "e", "escape", "float", "int", "lower", "max", "min", "safe",
    "sort", "string", "title", "trim", "unique", "upper",
)  # fmt: skip
_STEP = 4  # further units for an item that a filter looks at
#: Tests that read their values.
_COMPARING = (
    "!=", "<", "<=", "==", ">", ">=", "divisibleby", "eq", "equalto", "ge", "greaterthan", "gt",
    "in", "le", "lessthan", "lower", "lt", "ne", "upper",
)  # fmt: skip


def filters(work: Work, getitem: Callable[[Any, Any], Any]) -> dict[str, Callable[..., Any]]:
    """Name -> filter.  `getitem`: of the environment, for `attribute`."""
    made: dict[str, Callable[..., Any]] = {}
    made |= {name: _walking(work, _FILTERS[name], 0) for name in _CONSTANT}
    made |= {name: _walking(work, _FILTERS[name], _STEP) for name in _WALKING}
    made |= {name: _reading(work, _FILTERS[name]) for name in _READING}

    def replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
        parts = (work.text(value), work.text(old), work.text(new))
        return work.replaced(*parts, -1 if count is None else count)

    def join(value: Any, d: str = "", attribute: Any = None) -> str:
        found = work.items(value)
        if attribute is not None:
            found = [getitem(one, attribute) for one in found]
        return work.joined(work.text(d), [work.text(one) for one in found])

    def format(value: Any, *args: Any, **kwargs: Any) -> str:
        return work.percent(work.text(value), kwargs or args)

    def indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        work.width(len(width) if isinstance(width, str) else width)
        text = work.text(value)
        inset = len(width) if isinstance(width, str) else width
        work.letters(len(text) + (text.count("\n") + text.count("\r") + 2) * inset)
        indented: str = _FILTERS["indent"](text, width, first, blank)
        return indented

    def round(value: Any, precision: int = 0, method: Any = "common") -> Any:
        work.width(precision, 20)
        return _FILTERS["round"](value, precision, method)

    def sum_of(values: Any, attribute: Any = None) -> Any:
        found = work.items(values)
        if attribute is not None:
            found = [getitem(one, attribute) for one in found]
        return sum(one for one in found if isinstance(one, int | float))

    own = (replace, join, format, indent, round)
    return {**made, **{one.__name__: one for one in own}, "sum": sum_of}


def tests(work: Work) -> dict[str, Callable[..., Any]]:
    """Name -> test."""
    made: dict[str, Callable[..., Any]] = {**_TESTS}
    for name in _COMPARING:
        made[name] = partial(_compared, work, _TESTS[name])
    return made


def _compared(work: Work, function: Callable[..., Any], value: Any, *other: Any) -> Any:
    work.spend(1 + work.weight(value) + work.weight(other))
    if function is _TESTS["divisibleby"] and isinstance(value, str):
        raise TypeError("text is divisible by nothing")  # Python would format it
    return function(value, *other)


def _walking(work: Work, function: Callable[..., Any], step: int) -> Callable[..., Any]:
    """`step`: further units for an item; 0: none at all for those of what has a length."""
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        work.spend(FILTER)
        value = args[at]
        if step or not hasattr(value, "__len__"):
            value = work.items(value, step)
        return function(*args[:at], value, *args[at + 1 :], **kwargs)

    return counted


def _reading(work: Work, function: Callable[..., Any]) -> Callable[..., Any]:
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        value = args[at]
        if hasattr(value, "__iter__") and not hasattr(value, "__len__"):
            value = list(work.items(value))
        if not isinstance(value, str) and hasattr(value, "__len__"):
            work.items(value, _STEP)
        work.spend(FILTER + work.weight(value))
        found = function(*args[:at], value, *args[at + 1 :], **kwargs)
        if isinstance(found, str) and found == value:
            return value  # it may know how it is to be printed
        # Text that is marked as safe for HTML would escape what it is joined with.
        return "".join(found) if isinstance(found, str) and type(found) is not str else found

    return counted
