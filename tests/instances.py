"""Random values of the schemas in tests/schemas.py, made to be hard to read back.  No checks."""

from __future__ import annotations

import random
from typing import Any

#: Pieces that a careless reader of calls trips over.
NASTY = ['"', "\\", "{", "}", "[", "]", "}}", '"}', "}\n", ", ", ": ", "; ", "'", "\n", "\t", "é",
         "日本", "🌊", " ", "null", "<", ">", "</", "`", "```", '{"name": "', '"}]']  # fmt: skip


def text(rng: random.Random, limit: int, pieces: list[str] = NASTY) -> str:
    return "".join(rng.choices([*pieces, "a", "b", "x1"], k=rng.randrange(8)))[:limit]


def instance(schema: dict[str, Any], rng: random.Random, pieces: list[str] = NASTY) -> Any:
    """A random value that satisfies the schema."""
    return _value(schema, schema, rng, pieces, 0)


def _value(at: Any, root: Any, rng: random.Random, pieces: list[str], depth: int) -> Any:
    def below(schema: Any) -> Any:
        return _value(schema, root, rng, pieces, depth + 1)

    match at:
        case {"$ref": ref}:
            return below(root["$defs"][ref.rpartition("/")[2]])
        case {"anyOf": ways}:
            return below(rng.choice(ways))
        case {"enum": values}:
            return rng.choice(values)
        case {"const": value}:
            return value
        case {"pattern": pattern}:
            return _spelled(pattern, rng)
        case {"type": "object", "properties": properties}:
            required = at.get("required", ())
            wanted = [key for key in properties if key in required or rng.random() < 0.5]
            return {key: below(properties[key]) for key in wanted}
        case {"type": "array"}:
            low = at.get("minItems", 0)
            high = low if depth > 4 else at.get("maxItems", 3)
            return [below(at["items"]) for _ in range(rng.randint(low, high))]
        case {"type": "integer"}:
            return rng.randint(at["minimum"], at["maximum"])
        case {"type": "number"}:
            return rng.choice([0.5, 12, 3.25, 99999.5])
        case {"type": "boolean"}:
            return rng.random() < 0.5
        case {"type": "string"}:
            return text(rng, at.get("maxLength", 200), pieces)
        case _:
            raise TypeError(at)


def _spelled(pattern: str, rng: random.Random) -> str:
    """A text of one of the patterns `^[class]{count}...$`, literals between."""
    out, at = "", pattern.removeprefix("^").removesuffix("$")
    while at:
        if not at.startswith("["):
            out, at = out + at[0], at[1:]
            continue
        letters, _, rest = at[1:].partition("]{")
        count, _, at = rest.partition("}")
        low, high = letters[0], letters[-1]
        out += "".join(chr(rng.randint(ord(low), ord(high))) for _ in range(int(count)))
    return out
