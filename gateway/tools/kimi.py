"""The layout of Kimi K2, as data.  Has no code of its own.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>
    {"a": 1}<|tool_call_end|>...<|tool_calls_section_end|>, all on one line

What stands between the first two markers of a call is its id: the model wrote it, and wants to read
it again in the history.
"""

from __future__ import annotations

from gateway.tools.marked import Marked, Marks
from gateway.tools.marked_scanner import Span

FORMAT = Marked(
    name="kimi",
    marks=Marks(
        begin="<|tool_calls_section_begin|>",
        opening="<|tool_call_begin|>functions.",
        again="<|tool_call_begin|>functions.",
        between=(":", Span("0-9", 1, 4), "<|tool_call_argument_begin|>"),
        end="<|tool_call_end|>",
        close="<|tool_calls_section_end|>",
        id_shape="functions.{name}:{id}",
        id_written=(
            "(call.id.rpartition(':')[2]"
            " if call.id is defined and call.id.startswith('functions.') else loop.index0)"
        ),
    ),
    signature=("<|tool_calls_section_begin|>",),
    markers=(
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
        "<|tool_call_end|>", "<|tool_calls_section_end|>",
    ),
)  # fmt: skip
