"""Validate finished JSON against a schema that was only partly enforced.  Refuses nothing.

What is wrong here is only counted and logged: OpenAI's non-strict contract allows such arguments.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

# jsonschema runs the patterns of these with `re`, whose time a request could make exponential.
_PATTERNED = ("pattern", "patternProperties", "additionalProperties", "unevaluatedProperties")


@cache
def _judge() -> Any:
    """The validator class without the keywords that run patterns."""
    return extend(Draft202012Validator, dict.fromkeys(_PATTERNED, _silent))


def _silent(*_: object) -> None:
    return None


def complaint(schema: Any, text: str) -> str:
    """The first rule that the JSON text breaks, as `pointer: keyword`; empty when none is found."""
    try:
        value = json.loads(text)
        # The empty registry keeps jsonschema from fetching what a `$ref` names.
        error: ValidationError | None = next(
            _judge()(schema, registry=Registry()).iter_errors(value), None
        )
    except (ValueError, RecursionError, Unresolvable):
        return ": not judged"
    if error is None:
        return ""
    return "".join(f"/{part}" for part in error.absolute_path) + f": {error.validator}"
