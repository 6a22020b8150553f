"""The layout of GLM-4.7 and GLM-5, as data: that of GLM-4.5 without line breaks.

    <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
"""

from __future__ import annotations

from gateway.tools.glm45 import MARKERS
from gateway.tools.tags import Tagged, Tags

FORMAT = Tagged(
    name="glm47",
    tags=Tags(
        begin="<tool_call>",
        head="",
        named="",
        key="<arg_key>",
        keyed="</arg_key><arg_value>",
        stop="</arg_value>",
        gap="",
        end="</tool_call>",
        joint="<tool_call>",
    ),
    signature=("<arg_key>", "</arg_key><arg_value>"),
    markers=MARKERS,
)
