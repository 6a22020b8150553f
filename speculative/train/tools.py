"""Made-up agent tools: schemas, requests, arguments, results.  Runs no tool; knows no layout.

    number -> Tool: verb and thing, a schema of some of the thing's fields
                `-> arguments that satisfy it, a request that asks for them, a result

All is drawn from the caller's random numbers, so the same number is the same tool everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from speculative.train.words import CHOICES, CITIES, NAMES, SURNAMES, THINGS, TOPICS, VERBS, WORDS

Make = Callable[[Random], Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """One function of an agent."""

    number: int
    verb: str
    thing: str
    wire: dict[str, Any]  # as in `tools` of a chat request
    kinds: tuple[tuple[str, str], ...]  # (parameter, kind), the required ones first
    required: int

    @property
    def name(self) -> str:
        """The function's name."""
        name: str = self.wire["function"]["name"]
        return name

    @property
    def schema(self) -> str:
        """Its parameters as canonical JSON, for telling two tools apart."""
        return json.dumps(self.wire["function"]["parameters"], sort_keys=True)


def _code(draw: Random) -> str:
    return f"{draw.choice('ABCDEFGHKLMNPQRSTUVWXYZ')}{draw.choice('ABCDEKLMNRSTX')}-" + "".join(
        draw.choice("0123456789") for _ in range(draw.randint(3, 7))
    )


def _person(draw: Random) -> str:
    return f"{draw.choice(NAMES)} {draw.choice(SURNAMES)}"


def _email(draw: Random) -> str:
    return f"{draw.choice(NAMES).lower()}.{draw.choice(SURNAMES).lower()}@example.com"


def _date(draw: Random) -> str:
    return f"{draw.randint(2019, 2031)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"


def _label(draw: Random) -> str:
    return f"{draw.choice(WORDS)} {draw.choice(TOPICS).removeprefix('the ')}"


def _sentence(draw: Random) -> str:
    ending = draw.choice((f"before {_date(draw)}", f"with {_person(draw)}", f"in {_city(draw)}"))
    action = draw.choice(("Check", "Prepare", "Discuss", "Review", "Fix", "Send notes on"))
    return f"{action} the {_label(draw)} {ending}."


def _city(draw: Random) -> str:
    return draw.choice(CITIES)


def _path(draw: Random) -> str:
    folder = draw.choice(("docs", "src", "notes", "data", "tmp", "reports"))
    ending = draw.choice(("txt", "md", "csv"))
    return f"/{folder}/{draw.choice(WORDS)}_{draw.randint(1, 99)}.{ending}"


def _version(draw: Random) -> str:
    return f"{draw.randint(0, 9)}.{draw.randint(0, 30)}.{draw.randint(0, 9)}"


def _position(draw: Random) -> dict[str, float]:
    return {
        "latitude": round(draw.uniform(-60, 60), 3), "longitude": round(draw.uniform(-180, 180), 3),
    }


def _several(make: Make) -> Make:
    return lambda draw: [make(draw) for _ in range(draw.randint(1, 3))]


_TEXT = {"type": "string"}
_POSITION = {
    "type": "object",
    "properties": {"latitude": {"type": "number"}, "longitude": {"type": "number"}},
    "required": ["latitude", "longitude"],
    "additionalProperties": False,
}
#: kind -> (schema, value)
KINDS: dict[str, tuple[dict[str, Any], Make]] = {
    "code": (_TEXT, _code),
    "person": (_TEXT, _person),
    "email": (_TEXT, _email),
    "emails": ({"type": "array", "items": _TEXT}, _several(_email)),
    "date": ({"type": "string", "format": "date"}, _date),
    "time": (_TEXT, lambda draw: f"{draw.randint(6, 22):02}:{draw.choice((0, 15, 30, 45)):02}"),
    "label": (_TEXT, _label),
    "labels": ({"type": "array", "items": _TEXT}, _several(lambda draw: draw.choice(WORDS))),
    "sentence": (_TEXT, _sentence),
    "city": (_TEXT, _city),
    "path": (_TEXT, _path),
    "phone": (_TEXT, lambda draw: f"+{draw.randint(1, 99)} {draw.randint(10**6, 10**8)}"),
    "host": (_TEXT, lambda draw: f"{draw.choice(WORDS)}-{draw.randint(1, 40)}"),
    "symbol": (_TEXT, lambda draw: "".join(draw.choice("ABCDEGLMNPST") for _ in range(4))),
    "version": (_TEXT, _version),
    "count": (
        {"type": "integer", "minimum": 0}, lambda draw: draw.choice((1, 2, 3, 5, 10, 25, 90))
    ),
    "year": ({"type": "integer"}, lambda draw: draw.randint(1950, 2026)),
    "money": ({"type": "number"}, lambda draw: round(draw.uniform(1, 2000), 2)),
    "flag": ({"type": "boolean"}, lambda draw: draw.random() < 0.5),
    "position": (_POSITION, _position),
}


def _choice_of(names: tuple[str, ...]) -> Make:
    return lambda draw: draw.choice(names)


KINDS |= {
    kind: ({"type": "string", "enum": list(names)}, _choice_of(names))
    for kind, names in CHOICES.items()
}


def tool(number: int, seed: int) -> Tool:
    """Tool `number` of the library that `seed` names."""
    draw = Random(f"tool {seed} {number}")
    thing = draw.choice(sorted(THINGS))
    verb = draw.choice(VERBS)
    fields = [tuple(field.split(":")) for field in THINGS[thing].split()]
    draw.shuffle(fields)
    picked = [(name, kind) for name, kind in fields[: draw.randint(1, min(5, len(fields)))]]
    required = draw.randint(1, len(picked))
    prefix = draw.choice(("", "", f"{draw.choice(WORDS)}_", f"{draw.choice(WORDS)}_"))
    plural = "s" if verb in ("list", "search", "count", "export") else ""
    properties = {
        name: _described(kind, name, thing, draw) for name, kind in draw.sample(picked, len(picked))
    }
    wire = {
        "type": "function",
        "function": {
            "name": f"{prefix}{verb}_{thing}{plural}",
            "description": f"{verb.capitalize()} {thing + 's' if plural else _article(thing)}"
                           f"{draw.choice(('', ' by its fields', ' of this account'))}.",
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": [name for name, _ in picked[:required]],
                **({"additionalProperties": False} if draw.random() < 0.5 else {}),
            },
        },
    }
    return Tool(number, verb, thing, wire, tuple(picked), required)


def arguments(tool: Tool, draw: Random) -> dict[str, Any]:
    """Arguments that satisfy the tool's schema: all required ones, some of the others."""
    return {
        name: KINDS[kind][1](draw)
        for i, (name, kind) in enumerate(tool.kinds)
        if i < tool.required or draw.random() < 0.5
    }


def request(tool: Tool, given: dict[str, Any], draw: Random) -> str:
    """What a user says who wants this call."""
    action = f"{tool.verb} the {tool.thing}"
    parts = [f"{name.replace('_', ' ')} {_spoken(value)}" for name, value in given.items()]
    detail = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return draw.choice((
        "Please {a} with {d}.", "Can you {a}? {u}.", "I need you to {a}: {d}.", "{c}, {d}.",
        "Could you {a} for me, with {d}?", "{u}. Now {a}.", "Hi! I want to {a}, {d}. Thanks!",
    )).format(a=action, d=detail, c=action.capitalize(), u=detail[:1].upper() + detail[1:])


def result(tool: Tool, given: dict[str, Any], draw: Random) -> str:
    """What the tool answers, as JSON text."""
    if draw.random() < 0.08:
        return json.dumps({"error": draw.choice(("not found", "permission denied", "timed out"))})
    fields = [field.split(":") for field in THINGS[tool.thing].split()]
    one = {name: given.get(name, KINDS[kind][1](draw)) for name, kind in fields}
    if tool.verb in ("list", "search", "find", "export"):
        others = [{name: KINDS[kind][1](draw) for name, kind in fields[:3]}
                  for _ in range(draw.randint(0, 2))]
        return json.dumps({"results": [one, *others], "total": 1 + len(others)})
    if tool.verb == "count":
        return json.dumps({"count": draw.randint(0, 400)})
    if tool.verb in ("delete", "archive", "share"):
        return json.dumps({"ok": True, **dict(list(one.items())[:2])})
    return json.dumps(one)


def _described(kind: str, name: str, thing: str, draw: Random) -> dict[str, Any]:
    schema = dict(KINDS[kind][0])
    if draw.random() < 0.6:
        schema["description"] = f"The {name.replace('_', ' ')} of the {thing}"
    return schema


def _article(thing: str) -> str:
    return f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"


def _spoken(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case list():
            return " and ".join(map(str, value))
        case dict():
            return ", ".join(f"{name} {inner}" for name, inner in value.items())
        case _:
            return str(value)
