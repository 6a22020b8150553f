"""The layout of MiniMax M2, as data: one section holds all calls of a turn.

    <minimax:tool_call>
    <invoke name="add">
    <parameter name="a">1</parameter>
    </invoke>
    </minimax:tool_call>
"""

from __future__ import annotations

from gateway.tools.tags import Tagged, Tags

FORMAT = Tagged(
    name="minimax_m2",
    tags=Tags(
        begin="<minimax:tool_call>",
        head='\n<invoke name="',
        named='">\n',
        key='<parameter name="',
        keyed='">',
        stop="</parameter>",
        gap="\n",
        end="</invoke>",
        joint="",
        close="\n</minimax:tool_call>",
    ),
    signature=("minimax:tool_call", "<invoke"),
    markers=("<minimax:tool_call>", "</minimax:tool_call>"),
)
