"""A family of models: how it writes, its chat template, its control tokens.  Serves nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from gateway.prompt import Prompts
from gateway.tools import load
from gateway.tools.thinking import thinking
from tests.calls import with_controls
from tests.family_templates import (
    DEEPSEEK,
    DEEPSEEK31,
    HARMONY,
    KIMI,
    LLAMA3,
    MISTRAL,
    MISTRAL11,
    MISTRAL13,
    PYTHONIC,
)
from tests.family_thinkers import GLM45, GLM47, HERMES, MINIMAX, QWEN3, QWEN3_CODER
from tests.prompting import SPECIAL, small_bpe


@dataclass(frozen=True)
class Family:
    """One family."""

    layout: str
    controls: tuple[str, ...]  # of the template; the layout's markers come with it
    stop: str  # ends a message of calls
    template: str
    final: str = ""  # ends a message of text; "" = the same
    think: str = "<think>\n{}\n</think>\n\n"  # how the model writes its reasoning
    always: bool = False  # and it always does
    kept: bool = False  # the template shows the reasoning of a running turn
    several: bool = True  # calls in one message
    added: tuple[str, ...] = ()  # markers that are added tokens, but no special ones
    markers: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        known = [*self.controls, *load(self.layout).markers]
        object.__setattr__(self, "markers", tuple(dict.fromkeys(known)))


_IM = ("<|im_start|>", "<|im_end|>")
_SEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁output▁begin｜>",
         "<｜tool▁output▁end｜>")  # fmt: skip
_INST = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]", "[TOOL_CONTENT]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
         "</s>")  # fmt: skip
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
        "<think>", "</think>")  # fmt: skip
_TAGS = ("<tool_call>", "</tool_call>")
_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

#: By name; each layout of FORMATS has the family of its name.
FAMILIES = {
    "hermes": Family("hermes", _IM, "<|im_end|>", HERMES, added=_TAGS),
    "qwen3": Family("hermes", _IM, "<|im_end|>", QWEN3, added=(*_TAGS, "<think>", "</think>"),
                    kept=True),
    "qwen3_coder": Family("qwen3_coder", _IM, "<|im_end|>", QWEN3_CODER, added=_TAGS),
    "llama3": Family("llama3", _LLAMA, "<|eot_id|>", LLAMA3, several=False),
    "pythonic": Family("pythonic", ("<|header_start|>", "<|header_end|>", "<|eot|>"), "<|eot|>",
                       PYTHONIC),
    "mistral": Family("mistral", _INST, "</s>", MISTRAL),
    "mistral11": Family("mistral11", _INST, "</s>", MISTRAL11),
    "mistral13": Family("mistral13", _INST, "</s>", MISTRAL13),
    "deepseek": Family("deepseek", _SEEK, "<｜end▁of▁sentence｜>", DEEPSEEK),
    "deepseek31": Family("deepseek31", (*_SEEK, "<think>", "</think>"), "<｜end▁of▁sentence｜>",
                         DEEPSEEK31),
    "kimi": Family("kimi", ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>",
                            "<|im_end|>"), "<|im_end|>", KIMI),
    "harmony": Family("harmony", ("<|start|>",), "<|call|>", HARMONY, final="<|return|>",
                      several=False),
    "glm45": Family("glm45", _GLM, "<|observation|>", GLM45, final="<|user|>",
                    think="<think>{}</think>\n", always=True, kept=True),
    "glm47": Family("glm47", _GLM, "<|observation|>", GLM47, final="<|user|>",
                    think="{}</think>", always=True, kept=True),
    "minimax_m2": Family("minimax_m2", ("]~!b[", "]~b]", "[e~[", "<think>", "</think>"), "[e~[",
                         MINIMAX, think="{}\n</think>\n\n", always=True, kept=True),
}  # fmt: skip


def open_prompts(family: Family, **more: object) -> tuple[Prompts, dict[str, int]]:
    """Its prompts over a small BPE, and the ids of its control tokens and markers."""
    more_tokens = [one for one in family.markers + family.added if one not in SPECIAL]
    text, ids = with_controls(more_tokens, small_bpe())
    parsed = json.loads(text)
    for token in parsed["added_tokens"]:
        token["special"] = token["content"] not in family.added
    ids = {token["content"]: token["id"] for token in parsed["added_tokens"]}
    prompts = Prompts(
        json.dumps(parsed),
        family.template,
        max_len=1 << 16,
        format=thinking(load(family.layout), family.template),
        bos_id=0,
        stop_ids=[ids[stop] for stop in (family.stop, family.final) if stop],
        **more,  # type: ignore[arg-type]
    )
    return prompts, ids
