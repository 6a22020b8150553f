"""The schemas that tool calls are judged by, plain and odd, and helpers for tools.  No checks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tests.scripted import byte_tokenizer_json

STRING = {"type": "string"}
SHORT = {"type": "string", "maxLength": 40}


def whole(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def record(
    properties: dict[str, Any], required: list[str] | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }


_CURRENCY = {"enum": ["EUR", "USD", "JPY"]}
_NODE = record(
    {
        "name": {"type": "string", "maxLength": 12},
        "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}},
    }
)
_ITEM = record(
    {
        "sku": {"type": "string", "pattern": "^[a-z]{2}[0-9]{4}$"},
        "qty": whole(1, 20),
        "size": {"enum": ["S", "M", "L", None]},
    }
)
_TAG = {"type": "string", "maxLength": 12}

#: Ten families that must be enforced in full.
FAMILIES: dict[str, dict[str, Any]] = {
    "string": record({"path": SHORT}),
    "enum": record(
        {"status": {"enum": ["open", "closed", "blocked"]}, "notify": {"type": "boolean"}}
    ),
    "int-range": record({"minutes": whole(1, 90), "volume": whole(0, 10)}),
    "number+opt": record(
        {
            "amount": {"type": "number", "exclusiveMinimum": 0, "maximum": 100000},
            "from": _CURRENCY,
            "to": _CURRENCY,
            "note": SHORT,
        },
        ["amount", "from", "to"],
    ),
    "array-min": record({"tags": {"type": "array", "items": _TAG, "minItems": 2, "maxItems": 4}}),
    "nested": record(
        {
            "user": record(
                {
                    "name": SHORT,
                    "age": whole(18, 120),
                    "address": record({"city": SHORT, "zip": SHORT}),
                }
            ),
            "role": {"enum": ["admin", "editor", "viewer"]},
        }
    ),
    "pattern": record(
        {
            "date": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
            "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{3}$"},
        }
    ),
    "array-of-objects": record(
        {"items": {"type": "array", "minItems": 1, "maxItems": 3, "items": _ITEM}}
    ),
    "anyOf+const": record(
        {
            "shape": {
                "anyOf": [
                    record({"kind": {"const": "circle"}, "r": whole(1, 50)}),
                    record({"kind": {"const": "rect"}, "w": whole(1, 50), "h": whole(1, 50)}),
                ]
            }
        }
    ),
    "ref-recursive": record({"root": {"$ref": "#/$defs/node"}}, **{"$defs": {"node": _NODE}}),
}

#: What no grammar can promise of `x`.
UNIQUE = record({"x": {"type": "array", "items": whole(1, 3), "maxItems": 3, "uniqueItems": True}})

#: Ten odd ones: schema, and the (code, pointer, keyword) it is refused with when strict.
ODD: dict[str, tuple[dict[str, Any], tuple[str, str, str] | None]] = {
    "lookahead-pattern": (
        record({"x": {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{4}$"}}),
        ("unsupported_schema_keyword", "/properties/x", "pattern"),
    ),
    "remote-ref": (
        record({"x": {"$ref": "https://example.com/none.json#/x"}}),
        ("invalid_schema", "/properties/x", "$ref"),
    ),
    "dangling-ref": (
        record({"x": {"$ref": "#/$defs/missing"}}),
        ("invalid_schema", "/properties/x", "$ref"),
    ),
    "not": (
        record({"x": {"type": "string", "not": {"const": "a"}, "maxLength": 6}}),
        None,
    ),
    "if-then": (
        record(
            {"a": {"enum": [1, 2]}, "b": whole(0, 9)},
            ["a"],
            **{"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
        ),
        None,
    ),
    "multipleOf": (
        record({"x": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 1000}}),
        None,
    ),
    "uniqueItems": (
        record(
            {
                "x": {
                    "type": "array",
                    "items": {"enum": [1, 2, 3]},
                    "minItems": 3,
                    "maxItems": 3,
                    "uniqueItems": True,
                }
            }
        ),
        None,
    ),
    "bad-type": (
        record({"x": {"type": "strin"}}),
        ("invalid_schema", "/properties/x", "type"),
    ),
    "not-an-object": ({"type": "array", "items": STRING}, ("invalid_schema", "", "type")),
    "format-date-time": (record({"x": {"type": "string", "format": "date-time"}}), None),
}


def tool(name: str, parameters: Any = None, strict: bool = True, **more: Any) -> dict[str, Any]:
    """A tool as on the wire."""
    function = {"name": name, "description": f"It does {name}.", "strict": strict, **more}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def merged_tokenizer_json(words: Iterable[str]) -> tuple[str, int]:
    """The byte tokenizer with each printable ASCII word merged into one token; its size."""
    parsed = json.loads(byte_tokenizer_json())
    vocab, merges = parsed["model"]["vocab"], parsed["model"]["merges"]
    # An added token that the model's vocabulary lacks gets the id behind that, whatever it says.
    vocab.update({added["content"]: added["id"] for added in parsed["added_tokens"]})
    size = len(vocab)
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = size
                merges.append([word[: end - 1], word[end - 1]])
                size += 1
    return json.dumps(parsed), size
