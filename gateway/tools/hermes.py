"""The Hermes layout (Hermes 2/3, Qwen 2.5 and 3), as data: literals and a chat template.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

The template is ChatML as SmolLM2 knows it: without tools it prints what the model's own prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.tools import Choice, Tool
from gateway.tools.marked import MarkedScanner, Marks, grammar

MARKS = Marks(
    begin="<tool_call>",
    head='\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
    joint="\n",
)

# SmolLM2-135M called no tool in any of ten wordings of instructions.  Of four forms of example this
# one made it call: one turn that shows the first tool being called.
# Each message is printed without looking at later ones, so a longer conversation starts with the
# text of a shorter one.  A tool result is a user turn of its own for the same reason.
TEMPLATE = r"""
{%- macro instructions() -%}
{{- '\n\nYou may call these tools, given as JSON:\n<tools>\n' -}}
{%- for tool in tools -%}{{- tool | tojson -}}{{- '\n' -}}{%- endfor -%}
{{- '</tools>\nTo call a tool, write its name and arguments as JSON like this:\n' -}}
{{- '<tool_call>\n{"name": "tool_name", "arguments": {"key": "value"}}\n</tool_call>' -}}
{%- endmacro -%}
{%- macro value(schema) -%}
{%- if schema.enum -%}{{- schema.enum[0] | tojson -}}
{%- elif schema.type in ['integer', 'number'] -%}1
{%- elif schema.type == 'boolean' -%}true
{%- elif schema.type == 'array' -%}[]
{%- elif schema.type == 'object' -%}{}
{%- else -%}"text"
{%- endif -%}
{%- endmacro -%}
{%- macro shown(tool) -%}
{{- '<|im_start|>user\nUse the ' ~ tool.name ~ ' tool.<|im_end|>\n' -}}
{{- '<|im_start|>assistant\n<tool_call>\n{"name": "' ~ tool.name ~ '", "arguments": {' -}}
{%- for name, schema in (tool.parameters.properties or {}) | items -%}
{%- if not loop.first -%}{{- ', ' -}}{%- endif -%}
{{- name | tojson -}}{{- ': ' -}}{{- value(schema) -}}
{%- endfor -%}
{{- '}}\n</tool_call><|im_end|>\n' -}}
{%- endmacro -%}
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, ' -}}
{{- 'trained by Hugging Face' -}}
{%- if tools -%}{{- instructions() -}}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- if tools -%}{{- shown(tools[0].function) -}}{%- endif -%}
{%- endif -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' -}}
{{- message.content -}}
{{- '\n</tool_response><|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' -}}{{- message.role -}}{{- '\n' -}}
{{- message.content or '' -}}
{%- if loop.first and message.role == 'system' and tools -%}{{- instructions() -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- if not loop.first -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n{"name": "' -}}{{- call.name -}}{{- '", "arguments": ' -}}
{{- call.arguments -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- if loop.first and message.role == 'system' and tools -%}
{{- shown(tools[0].function) -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


class Hermes:
    """The format; see gateway.tools.Format for what each member means."""

    name = "hermes"
    begin = MARKS.begin
    example = MARKS.write("add", '{"a": 1, "b": 2}')
    template = TEMPLATE

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model writes them."""
        return MARKS.joint.join(MARKS.write(name, arguments) for name, arguments in calls)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: Choice,
        parallel: bool,
        answer: Mapping[str, object] | None = None,
    ) -> str:
        """Lark text; see Format.grammar."""
        return grammar(MARKS, tools, choice, parallel, answer)

    def scanner(self) -> MarkedScanner:
        """A fresh scanner for one choice."""
        return MarkedScanner(MARKS)


FORMAT = Hermes()
