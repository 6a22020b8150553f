"""Forty things that users ask of tools, with the right calls, and a server whose model makes them.

    python -m tests.errands serve smollm2 --port 8321     `slipstream serve` with such an engine

Everything but the wish is the product's own: see wishing.py.  Judges no answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from tests.asking import HERMES
from tests.wishing import Pieces, Wishes

#: Family of tests/schemas.py -> the tool; what is asked of it -> the arguments that are right.
ERRANDS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "string": ("read_file", {
        "Open README.md.": {"path": "README.md"},
        "Show me src/main.py.": {"path": "src/main.py"},
        "Read the file setup.cfg.": {"path": "setup.cfg"},
        "Look at docs/index.rst.": {"path": "docs/index.rst"},
    }),
    "enum": ("set_status", {
        "Close the ticket.": {"status": "closed", "notify": False},
        "Mark it blocked and tell the team.": {"status": "blocked", "notify": True},
        "Reopen the ticket quietly.": {"status": "open", "notify": False},
        "It is done.": {"status": "closed", "notify": True},
    }),
    "int-range": ("set_timer", {
        "Wake me in 25 minutes, loud.": {"minutes": 25, "volume": 10},
        "Timer for an hour.": {"minutes": 60, "volume": 5},
        "Five minutes, volume 3.": {"minutes": 5, "volume": 3},
        "Ninety minutes, silent.": {"minutes": 90, "volume": 0},
    }),
    "number+opt": ("convert", {
        "How much is 12.50 euro in dollars?": {"amount": 12.5, "from": "EUR", "to": "USD"},
        "Convert 3000 yen to euro.": {"amount": 3000, "from": "JPY", "to": "EUR", "note": "yen"},
        "80 USD to JPY.": {"amount": 80, "from": "USD", "to": "JPY"},
        "Change 1.5 EUR to USD.": {"amount": 1.5, "from": "EUR", "to": "USD", "note": ""},
    }),
    "array-min": ("tag", {
        "Tag this as urgent and billing.": {"tags": ["urgent", "billing"]},
        "Add the tags red, green, blue.": {"tags": ["red", "green", "blue"]},
        "Label it bug.": {"tags": ["bug", "label"]},
        "Tag: api, docs.": {"tags": ["api", "docs"]},
    }),
    "nested": ("create_user", {
        "Add Ada, 36, London N1, as admin.": {
            "user": {"name": "Ada", "age": 36, "address": {"city": "London", "zip": "N1"}},
            "role": "admin"},
        "New viewer: Bruno, 41, Porto 4000.": {
            "user": {"name": "Bruno", "age": 41, "address": {"city": "Porto", "zip": "4000"}},
            "role": "viewer"},
        "Add editor Chen, 29, Oslo 0150.": {
            "user": {"name": "Chen", "age": 29, "address": {"city": "Oslo", "zip": "0150"}},
            "role": "editor"},
        "Create Farah, 52, Lyon 69001, admin.": {
            "user": {"name": "Farah", "age": 52, "address": {"city": "Lyon", "zip": "69001"}},
            "role": "admin"},
    }),
    "pattern": ("book", {
        "Book room ABC-123 on 2 May 2026.": {"date": "2026-05-02", "code": "ABC-123"},
        "Reserve XYZ-007 for 2026-12-24.": {"date": "2026-12-24", "code": "XYZ-007"},
        "Book QRS-555 tomorrow.": {"date": "2026-11-30", "code": "QRS-555"},
        "I need DEF-111 on New Year's Eve 2026.": {"date": "2026-12-31", "code": "DEF-111"},
    }),
    "array-of-objects": ("order", {
        "Two of ab1234 in M.": {"items": [{"sku": "ab1234", "qty": 2, "size": "M"}]},
        "One cd0001 and three ef7777, size L.": {"items": [
            {"sku": "cd0001", "qty": 1, "size": "L"}, {"sku": "ef7777", "qty": 3, "size": "L"}]},
        "Ten gh4242.": {"items": [{"sku": "gh4242", "qty": 10, "size": None}]},
        "Order ij9999, small.": {"items": [{"sku": "ij9999", "qty": 1, "size": "S"}]},
    }),
    "anyOf+const": ("draw", {
        "Draw a circle of radius 4.": {"shape": {"kind": "circle", "r": 4}},
        "Draw a 3 by 9 box.": {"shape": {"kind": "rect", "w": 3, "h": 9}},
        "A big circle, please.": {"shape": {"kind": "circle", "r": 50}},
        "A square of side 5.": {"shape": {"kind": "rect", "w": 5, "h": 5}},
    }),
    "ref-recursive": ("make_tree", {
        "A tree: src with api and core.": {"root": {"name": "src", "children": [
            {"name": "api", "children": []}, {"name": "core", "children": []}]}},
        "Make a folder docs that is empty.": {"root": {"name": "docs", "children": []}},
        "a over b over c.": {"root": {"name": "a", "children": [
            {"name": "b", "children": [{"name": "c", "children": []}]}]}},
        "root, two leaves.": {"root": {"name": "root", "children": [
            {"name": "left", "children": []}, {"name": "right", "children": []}]}},
    }),
}  # fmt: skip

#: What a model may say before it calls; they go round.
LEADS = ("", "Let me do that.\n", "On it: ")
#: Of a schema that says little: the first of these that it allows.
ODD = ("Call f.", "f", [{"x": 49}, {"x": "2026-05-02T10:00:00Z"}, {"x": [1, 2, 3]}, {"a": 2}])


def _wishes() -> dict[str, list[bytes]]:
    """What is asked -> texts: words and a call, only the call, or its arguments alone."""
    asked = [
        (text, name, [right]) for name, turns in ERRANDS.values() for text, right in turns.items()
    ]
    found = {}
    for number, (text, name, rights) in enumerate([*asked, ODD]):
        lead = LEADS[number % len(LEADS)]
        spelled = [json.dumps(right) for right in rights]
        calls = [HERMES.write([(name, one)]) for one in spelled]
        found[text] = [one.encode() for one in [lead + calls[0], *calls, *spelled]]
    return found


WISHES = _wishes()


def want(prompt: str, said: bytes) -> Sequence[bytes]:
    """The right call for what the prompt's last user turn asks; see wishing.Want."""
    text = max(WISHES, key=lambda one: (prompt.rfind(f"user\n{one}"), len(one)))
    return [one[len(said) :] for one in WISHES[text] if one.startswith(said)]


def main() -> int:
    """`slipstream ...` with engines that wish; with --socket: such an engine's process."""
    import engine.server
    import engine.starting

    if "--socket" in sys.argv:
        make = engine.server.make

        def wishing(config, checkpoint, *more):
            made = make(config, checkpoint, *more)
            Wishes(made, Pieces(checkpoint.tokenizer_json, checkpoint.stop_ids[0]), want)
            return made

        engine.server.make = wishing
        return engine.server.main()
    import slipstream

    command = engine.starting.command

    def ours(config):
        line, environment = command(config)
        return [part.replace("engine.server", "tests.errands") for part in line], environment

    engine.starting.command = ours
    return slipstream.main()


if __name__ == "__main__":
    sys.exit(main())
