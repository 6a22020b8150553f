"""The layout of Qwen3-Coder and Qwen3.5, as data.

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

One line break on each side of a value is layout; the rest is the value.
"""

from __future__ import annotations

from gateway.tools.tags import Tagged, Tags

FORMAT = Tagged(
    name="qwen3_coder",
    tags=Tags(
        begin="<tool_call>",
        head="\n<function=",
        named=">\n",
        key="<parameter=",
        keyed=">\n",
        stop="\n</parameter>",
        gap="\n",
        end="</function>\n</tool_call>",
        joint="\n<tool_call>",
    ),
    signature=("<function=", "<parameter="),
    markers=("<tool_call>", "</tool_call>"),
)
