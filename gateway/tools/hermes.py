"""The Hermes layout (Hermes 2/3, Qwen 2.5 and 3), as data.  Has no code of its own.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

Hermes' vocabularies spell its tags as text; Qwen 3 has them as added tokens that are not special,
which is text too.
"""

from __future__ import annotations

from gateway.tools.marked import Marked, Marks

FORMAT = Marked(
    name="hermes",
    marks=Marks(
        begin="<tool_call>",
        opening='\n{"name": "',
        again='\n<tool_call>\n{"name": "',
        between=('", "arguments": ',),
        end="}\n</tool_call>",
    ),
    signature=("<tool_call>",),
    markers=("<tool_call>", "</tool_call>"),
)
