"""The bug reports that every serving engine had, as requests to ours: see CASES.  Asserts nothing.

Numbers are those of the list of known bugs that tests/gateway/test_cases*.py goes through; each
case gives one good answer, so that it can also be asked for as a stream and put together again.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from engine.loop import Engine
from engine.messages import Out, Submit
from gateway.config import GatewayConfig
from gateway.prompt import Prompts
from gateway.state import Gateway
from gateway.tools import load, pick
from gateway.tools.thinking import CLOSE, OPEN
from tests.asking import ADD, HERMES, PlayedLink, post
from tests.calls import with_controls
from tests.schemas import record, tool, whole
from tests.scripted import EOS, Script, ScriptedLink, byte_tokenizer_json
from tests.tiny import write_llama
from tests.wishing import Drafts, Pieces, Room, Want, in_room, right, wanting

MORE = {"stream": True, "stream_options": {"include_usage": True}}
THINKING = (
    "{{ messages[0].content }}{% if tools %}{{ tools | tojson }}{% endif %}<tool_call> </think>"
)

BOOK = tool("book", record({"seat": whole(1, 99)}))
LAMP = tool("lamp_on")
TIDE = tool("tide", record({"port": {"type": "string"}}))
CITY = tool("weather", record({"city": {"type": "string"}}))
NOTE = tool("write_note", record({"text": {"type": "string"}}))
POINT = {"$ref": "#/$defs/Point"}
FLAT = record({"at": POINT}, **{"$defs": {"Point": record({"x": whole(0, 9), "y": whole(0, 9)})}})
NAMED = record({"at": POINT}, **{"$defs": {"Point": {"enum": ["left", "right"]}}})
WAYS = [tool("dot", FLAT), tool("side", NAMED)]
AGE = {
    "type": "json_schema",
    "json_schema": {"name": "age", "strict": True, "schema": record({"years": whole(0, 120)})},
}
BLANKS = record({"a": {"enum": [1, 2]}, "b": {"type": "array", "items": whole(0, 5),
                                              "minItems": 2, "maxItems": 2}})  # fmt: skip
CALLED = {"tool_choice": "required"}


def call(name: str, **arguments: object) -> tuple[str, str]:
    return name, json.dumps(arguments, ensure_ascii=False)


def written(*calls: tuple[str, str]) -> str:
    """Calls as a model of the hermes layout writes them."""
    return HERMES.write(list(calls))


@dataclass(frozen=True)
class Case:
    """A request, and the engine that answers it: one that plays a script, or one that wishes."""

    fields: Mapping[str, Any]
    script: Callable[[Submit], Script] | None = None
    outs: Callable[[Submit], list[list[Out]]] | None = None
    want: Want | None = None
    drafts: Callable[[Pieces], Drafts] | None = None
    layout: str = "hermes"
    thinks: str = ""  # "text" or "control": the model thinks first, its section's marks are such
    prepare: Callable[[Engine], None] = lambda _: None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def answers(self, folders: Path, *more: Mapping[str, Any]) -> list[httpx.Response]:
        """The answers to this request with `more` fields, one after the other."""
        bodies = [{"temperature": 0, **self.fields, **one} for one in more]
        if self.want is None:
            return [post(self.scripted(), **body) for body in bodies]

        async def use(room: Room) -> list[httpx.Response]:
            return [await room.ask(**body) for body in bodies]

        return self.within(folders, use)

    def within(self, folders: Path, use: Callable[[Room], Awaitable[Any]]) -> Any:
        """Run `use` in a room of its wishing engine."""
        assert self.want is not None
        settings = {"prefix_caching": False, **self.settings}
        return in_room(
            model(folders, self.marked, settings.pop("rows", 0)), self.want, use,
            prompts=self._prompts(), drafts=self.drafts, prepare=self.prepare,
            tokenizer_json=vocabulary() if self.marked else "", **settings,
        )  # fmt: skip

    @property
    def marked(self) -> bool:
        """Whether its vocabulary has the section's marks as control tokens."""
        return self.thinks == "control"

    def _prompts(self) -> Prompts:
        return Prompts(
            vocabulary() if self.marked else byte_tokenizer_json(),
            THINKING if self.thinks else None, max_len=4096, stop_ids=[EOS],
            format=pick(THINKING, self.layout) if self.thinks else load(self.layout),
        )  # fmt: skip

    def scripted(self) -> Gateway:
        """A gateway over its scripted engine."""
        link = PlayedLink(self.outs) if self.outs else ScriptedLink(self.script)
        return Gateway.open(GatewayConfig(), link, self._prompts(), "tiny")


@cache
def vocabulary() -> str:
    """Bytes, and the marks of a section as control tokens."""
    return with_controls([OPEN, CLOSE])[0]


def model(folders: Path, marked: bool = False, rows: int = 0) -> Path:
    """A tiny model in `folders`, made once; `rows` of its head, 0 = as many as there are tokens."""
    found = folders / f"model-{marked}-{rows}"
    if not found.exists():
        write_llama(found, max_len=4096, vocab=rows or (261 if marked else 259))
        if marked:
            (found / "tokenizer.json").write_text(vocabulary())
    return found


def said(*groups: str) -> Callable[[Submit], Script]:
    """An engine that says this, a group a step."""
    batches = [list(group.encode()) for group in groups]
    return lambda _: Script([*batches, [EOS]])


def wished(*texts: str, **more: Any) -> Case:
    """Free choice among the tools of all cases, unless `more` has other fields."""
    given = {"tools": [ADD, BOOK, LAMP, TIDE, CITY, NOTE], "max_tokens": 400}
    return Case({**given, **more.pop("fields", {})}, want=wanting(*texts), **more)


def whole_run(*texts: str, **more: Any) -> Case:
    """The same, and all of it drafted: one step accepts a whole call, its end and what follows."""
    want = wanting(*texts)
    settings = {"max_drafts": 200, "max_batch_tokens": 1024}
    return wished(*texts, drafts=lambda pieces: right(pieces, want), settings=settings, **more)


def newlines(_: str, __: bytes) -> Sequence[bytes]:
    return [b"\n", b" ", b"\t"]


def sections(text: str) -> list[list[int]]:
    """Groups of tokens of a text whose marks are control tokens: one token each."""
    return [[id] for id in Pieces(vocabulary(), EOS).all(text.encode())]


def later_first(submit: Submit) -> list[list[Out]]:
    """Choice 2 begins, then 1, then 0."""
    return [
        *([Out(submit.id, index, [97 + index])] for index in (2, 1, 0)),
        *([Out(submit.id, index, [EOS], "stop", True)] for index in (1, 0, 2)),
    ]


SEAT = written(call("book", seat=42))
HEAD, TAIL = SEAT.split('{"seat": ')
TWO_TIDES = written(call("tide", port="Oban"), call("tide", port="Skye"))
MIXED = written(call("add", a=1), call("nope"), call("add", a=2))
SAO = written(call("weather", city="São Tomé"))
LONG = written(call("write_note", text="dear diary, " * 30))
SHORTEST = len(written(call("write_note", text="")))
FENCE = f"{OPEN}a <b>{CLOSE}" + written(call("add", a=7))
HARMONY = "<|channel|>analysis<|message|>a <b>|<|end|><|start|>assistant<|channel|>"

CASES: dict[str, Case] = {
    "01 two braces in one step": Case(
        {"tools": [BOOK], **CALLED}, said(HEAD, '{"seat": ' + TAIL)
    ),
    "01 two braces in one run": whole_run(SEAT),
    "02 a whole call in one run": whole_run("Look:\n" + SEAT),
    "02 a whole call in one step": Case({"tools": [BOOK]}, said("Look:\n" + SEAT)),
    "03 too short for a call": wished(LONG, fields={"max_tokens": 12, **CALLED}),
    "03 closed by the plan": wished(LONG, fields={"max_tokens": SHORTEST + 12, **CALLED}),
    "03 cut": wished(
        LONG, fields={"max_tokens": SHORTEST, "tool_overflow": "cut", **CALLED}
    ),
    "04 no call wanted": wished(
        "I would rather talk.", fields={"tools": [LAMP, BOOK], **CALLED}
    ),
    "05 no parameters": wished(written(call("lamp_on"))),
    "05 no parameters, in one run": whole_run(written(call("lamp_on"))),
    "06 an unknown name, constrained": wished(MIXED, fields={"tools": [ADD], "seed": 1}),
    "06 an unknown name": Case({"tools": [ADD]}, said(*MIXED)),
    "06 an unknown name, in one step": Case({"tools": [ADD]}, said(MIXED)),
    "07 one tool twice": wished(TWO_TIDES),
    "08 one tool twice, in one run": whole_run(TWO_TIDES),
    "09 a fence behind the thought": wished(
        FENCE, thinks="control", fields=CALLED,
        drafts=lambda pieces: Drafts(
            pieces, lambda said: pieces.all(b"</think>```")[:-1] if said.endswith(b"<b>") else []
        ),
    ),
    "09 blank lines behind the thought": wished(
        FENCE, thinks="control", fields=CALLED,
        drafts=lambda pieces: Drafts(
            pieces, lambda said: pieces.all(b"</think>" + b"\n" * 9)[:-1]
            if said.endswith(b"<b>") else [EOS]
        ), settings={"max_drafts": 16},
    ),
    "10 a wrong end in every draft": wished(
        '{"years": 42}', fields={"response_format": AGE, "tools": []},
        drafts=lambda pieces: Drafts(pieces, lambda _: [ord("}"), EOS]),
    ),
    "11 two shapes of one name": wished(
        written(
            call("side", at="left"), call("dot", at={"x": 1, "y": 2}), call("side", at="right")
        ),
        fields={"tools": WAYS},
    ),
    "11 each in the other's shape": wished(
        written(call("side", at={"x": 1, "y": 2})), fields={"tools": WAYS, "max_tokens": 90}
    ),
    "12 a call beside a schema": wished(SEAT, fields={"response_format": AGE}),
    "12 the schema beside calls": wished('{"years": 42}', fields={"response_format": AGE}),
    "13 letters of several bytes": wished(SAO),
    "13 in three pieces": Case({"tools": [CITY]}, said(SAO[:50], SAO[50:56], SAO[56:])),
    "14 endless line breaks in a call": Case(
        {"tools": [tool("fill", BLANKS)], "max_tokens": 400, "parallel_tool_calls": False,
         **CALLED}, want=newlines,
    ),
    "14 endless line breaks in an answer": Case(
        {"response_format": {"type": "json_schema",
                             "json_schema": {"name": "b", "schema": BLANKS}}, "max_tokens": 400},
        want=newlines,
    ),
    "15 a lone bracket in a thought": Case(
        {"tools": [ADD]}, said(*"<think>a <b> </thin k>", "</th", "ink>\n\nSo <tool."),
        thinks="text",
    ),
    "15 between control tokens": Case(
        {"tools": [ADD]}, lambda _: Script(sections(FENCE)), thinks="control"
    ),
    "15 in a channel": Case(
        {"tools": [ADD]}, said(*HARMONY, "final<|message|>", "It is ", "3."), layout="harmony"
    ),
    "c rows that are no tokens": wished(SEAT, settings={"rows": 300}),
    "d a later choice begins": Case({"n": 3}, outs=later_first),
}  # fmt: skip


def pair(case: Case, folders: Path) -> tuple[httpx.Response, httpx.Response]:
    """The answer in one body, and as a stream."""
    plain, stream = case.answers(folders, {}, MORE)
    assert plain.status_code == stream.status_code == 200, (plain.text, stream.text)
    return plain, stream
