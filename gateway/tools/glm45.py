"""The layout of GLM-4.5 and 4.6, as data.

    <tool_call>add
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>
"""

from __future__ import annotations

from gateway.tools.tags import Tagged, Tags

MARKERS = (
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip

FORMAT = Tagged(
    name="glm45",
    tags=Tags(
        begin="<tool_call>",
        head="",
        named="\n",
        key="<arg_key>",
        keyed="</arg_key>\n<arg_value>",
        stop="</arg_value>",
        gap="\n",
        end="</tool_call>",
        joint="\n<tool_call>",
    ),
    signature=("<arg_key>",),
    markers=MARKERS,
)
