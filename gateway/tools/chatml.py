"""The one chat template of our own, for models whose template takes no tools.  Writes no call.

It is ChatML as SmolLM2 knows it: without tools it prints what the model's own template prints.  How
a call is written is the layout's: a Jinja macro body over `calls`, dicts of name and arguments.
"""

from __future__ import annotations

# SmolLM2-135M called no tool in any of ten wordings of instructions.  Of four forms of example this
# one made it call: one turn that shows the first tool being called.
# Each message is printed without looking at later ones, so a longer conversation starts with the
# text of a shorter one.  A tool result is a user turn of its own for the same reason.
_TEMPLATE = r"""
{%- macro written(calls) -%}@WRITTEN@{%- endmacro -%}
{%- macro instructions() -%}
{{- '\n\nYou may call these tools, given as JSON:\n<tools>\n' -}}
{%- for tool in tools -%}{{- tool | tojson -}}{{- '\n' -}}{%- endfor -%}
{{- '</tools>\nTo call a tool, write its name and arguments as @KIND@ like this:\n' -}}
{{- written([{'name': 'tool_name', 'arguments': '{"key": "value"}'}]) -}}
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
{%- macro sample(tool) -%}
{{- '{' -}}
{%- for name, schema in ((tool.parameters or {}).properties or {}) | items -%}
{%- if not loop.first -%}{{- ', ' -}}{%- endif -%}
{{- name | tojson -}}{{- ': ' -}}{{- value(schema) -}}
{%- endfor -%}
{{- '}' -}}
{%- endmacro -%}
{%- macro shown(tool) -%}
{{- '<|im_start|>user\nUse the ' ~ tool.name ~ ' tool.<|im_end|>\n<|im_start|>assistant\n' -}}
{{- written([{'name': tool.name, 'arguments': sample(tool)}]) -}}
{{- '<|im_end|>\n' -}}
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
{%- if message.tool_calls -%}{{- written(message.tool_calls) -}}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- if loop.first and message.role == 'system' and tools -%}
{{- shown(tools[0].function) -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def chatml(written: str, kind: str = "JSON") -> str:
    """The template for a layout.

    `written`: Jinja that prints `calls` as the model writes them; `arguments` of each is JSON text,
    `id` is missing in samples.  `kind`: what the instructions call it.
    """
    return _TEMPLATE.replace("@WRITTEN@", written).replace("@KIND@", kind)
