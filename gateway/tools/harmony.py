"""The harmony layout (gpt-oss): messages with channels.  Reads none; see harmony_scanner.py.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant
    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>
    <|channel|>final<|message|>The answer.<|return|>

(Line breaks are only shown here.)  The prompt ends with `<|start|>assistant`.  `<|call|>` and
`<|return|>` end the output where the model's stop ids hold them, so no grammar needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.grammar.schema import embed
from gateway.tools import Choice, Tool
from gateway.tools.chatml import chatml
from gateway.tools.harmony_scanner import HarmonyScanner, Seen
from gateway.tools.layout import Layout

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
START, END, CALL, RETURN = "<|start|>", "<|end|>", "<|call|>", "<|return|>"
_NEXT = f"{START}assistant"
_TO = f"{CHANNEL}commentary to=functions."
_JSON = f" {CONSTRAIN}json{MESSAGE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Harmony(Layout):
    """The format."""

    begin = CHANNEL
    framed = True
    template = chatml(
        "{%- for call in calls -%}{%- if not loop.first -%}{{- '" + CALL + _NEXT + "' -}}"
        "{%- endif -%}{{- '" + _TO + "' -}}{{- call.name -}}{{- '" + _JSON + "' -}}"
        "{{- call.arguments -}}{%- endfor -%}"
    )

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model writes them, without the `<|call|>` that ends the output."""
        return f"{CALL}{_NEXT}".join(f"{_TO}{name}{_JSON}{text}" for name, text in calls)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: Choice,
        parallel: bool,
        answer: Mapping[str, object] | None = None,
    ) -> str:
        """Lark text; see Format.grammar.

        Reasoning and preambles may come first, whatever is chosen.  No `tools`: only an answer.
        """
        lark = self.control.lark
        ways = ["before next"]
        if tools:
            ways.append("calls")
        if choice == "auto":
            ways.append("final")
        roles = " | role_calls" if tools else ""
        if choice == "auto" and answer is None:
            starts = self._free(CHANNEL, f"rest{roles}")
            starts.append(f"final: {lark(f'final{MESSAGE}')} TEXT")
        else:
            starts = [f"start: {lark(CHANNEL)} rest{roles}"]
            if choice == "auto":
                json = f'("" | " " {lark(f"{CONSTRAIN}json")})'
                starts.append(f'final: "final" {json} {lark(MESSAGE)} answer')
                starts[0] += " | answer"  # without a channel, as everywhere else
                starts.append(f"answer: %json {embed(answer or {})}")
        lines = [
            *starts,
            f"rest: {' | '.join(ways)}",
            f"next: {lark(CHANNEL)} rest{roles}",
            f'before: ("analysis" | "commentary") {lark(MESSAGE)} said {lark(_NEXT)}',
            *self._said(),
        ]
        more = parallel and choice != "named"
        return "\n".join([*lines, *self._calls(tools, more)]) + "\n"

    def _said(self) -> list[str]:
        """A text and the end of its message."""
        end = self.control.lark(END)
        if END in self.control.ids:
            return [f"said: SAID {end}", "SAID: /(.|\\n)*/"]
        return [f"said[lazy]: /(.|\\n)*/ {end}"]

    def _calls(self, tools: Sequence[Tool], more: bool) -> list[str]:
        """One call or several, with the recipient in the channel or in the role."""
        if not tools:
            return []
        lark = self.control.lark
        joint = f"{lark(CALL + _NEXT)} ({lark(CHANNEL)} call | role_call)"
        again = f" ({joint})*" if more else ""
        lines = [
            f"calls: call{again}",
            f"role_calls: role_call{again}",
            "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
            "role_call: " + " | ".join(f"role_{i}" for i in range(len(tools))),
            f'json: ("" | " ") {lark(f"{CONSTRAIN}json{MESSAGE}")}',
        ]
        for i, tool in enumerate(tools):
            to = f" to=functions.{tool.name}"
            lines += [
                f"call_{i}: {lark(f'commentary{to}')} json args_{i}",
                f"role_{i}: {lark(f'{to}{CHANNEL}commentary')} json args_{i}",
                f"args_{i}: %json {embed(tool.parameters)}",
            ]
        return lines

    def scanner(self, tools: Sequence[Tool] = ()) -> HarmonyScanner:
        """A fresh scanner for one choice."""
        seen = self.control.seen
        return HarmonyScanner(
            Seen(
                channel=seen(CHANNEL),
                message=seen(MESSAGE),
                start=seen(START),
                ends=(seen(END), seen(CALL), seen(RETURN), seen(START)),
            )
        )


FORMAT = Harmony(
    name="harmony",
    signature=(CHANNEL, MESSAGE),
    markers=(CHANNEL, MESSAGE, CONSTRAIN, START, END, CALL, RETURN),
)
