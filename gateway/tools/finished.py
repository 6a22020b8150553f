"""Validate finished JSON against a schema that was only partly enforced.  Refuses nothing.

What is wrong here is only counted: OpenAI's non-strict contract allows such arguments.  The work is
bounded, because the schema is the caller's and others wait for the thread: no patterns, nothing
fetched, a number of visits, a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

VISITS = 10_000  # of keywords; doubled `allOf`s reach 2^depth
TIME_S = 0.1
NOT_JUDGED = ": not judged"

# jsonschema runs the patterns of these with `re`, whose time a request could make exponential;
# `unevaluatedItems` walks the schema by itself, unbounded.
_SILENT = (
    "pattern", "patternProperties", "additionalProperties", "unevaluatedProperties",
    "unevaluatedItems",
)  # fmt: skip
_WORK = 10  # entries of a list or map in the schema that cost as much as a visit

Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]


class _TooMuch(Exception):
    """The validation would take too long."""


class _Budget:
    """What is left of the visits and the time of one validation."""

    def __init__(self) -> None:
        self._visits = VISITS
        self._end = time.monotonic() + TIME_S

    def counted(self, keyword: Keyword) -> Keyword:
        """The keyword, paying for each visit; it raises _TooMuch when nothing is left."""

        def visit(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            self._visits -= 1 + (len(value) // _WORK if isinstance(value, list | dict) else 0)
            if self._visits < 0 or time.monotonic() > self._end:
                raise _TooMuch
            return keyword(validator, value, instance, schema)

        return visit


def _silent(*_: object) -> None:
    return None


def _unique(_: Any, wanted: Any, instance: Any, __: Any) -> Iterator[ValidationError]:
    """`uniqueItems` in linear time; jsonschema's is quadratic for mixed types."""
    if wanted is True and isinstance(instance, list):
        if len({json.dumps(item, sort_keys=True) for item in instance}) < len(instance):
            yield ValidationError("some items are equal")


def complaint(schema: Any, text: str) -> str:
    """The first rule that the JSON text breaks, as `pointer: keyword`; empty when none is found.

    NOT_JUDGED when the text is no JSON, or the schema asks for too much work.
    """
    keywords = {
        **Draft202012Validator.VALIDATORS, **dict.fromkeys(_SILENT, _silent), "uniqueItems": _unique
    }  # fmt: skip
    budget = _Budget()
    judge = extend(
        Draft202012Validator, {name: budget.counted(check) for name, check in keywords.items()}
    )
    try:
        value = json.loads(text, parse_float=_number)
        # The empty registry keeps jsonschema from fetching what a `$ref` names.
        error: ValidationError | None = next(
            judge(_of_one_dialect(schema), registry=Registry()).iter_errors(value), None
        )
    except (ValueError, ArithmeticError, RecursionError, Unresolvable, _TooMuch):
        return NOT_JUDGED
    if error is None:
        return ""
    return "".join(f"/{part}" for part in error.absolute_path) + f": {error.validator}"


def _number(literal: str) -> int | float:
    """1.0 is 1 in JSON Schema."""
    value = float(literal)
    return int(value) if value.is_integer() else value


def _of_one_dialect(schema: Any) -> Any:
    """The schema without `$schema`, by which jsonschema would choose another, uncounted judge."""
    match schema:
        case dict():
            return {
                key: value if key in ("const", "enum") else _of_one_dialect(value)
                for key, value in schema.items()
                if key != "$schema"
            }
        case list():
            return [_of_one_dialect(value) for value in schema]
        case _:
            return schema
