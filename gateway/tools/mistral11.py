"""The layout of Mistral's tokenizers v11 and v12, as data.  Has no code of its own.

    [TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]...
"""

from __future__ import annotations

from gateway.tools.marked import Marked, Marks, mistral_id
from gateway.tools.marked_scanner import Span

FORMAT = Marked(
    name="mistral11",
    marks=Marks(
        begin="[TOOL_CALLS]",
        opening="",
        again="[TOOL_CALLS]",
        between=("[CALL_ID]", Span("a-zA-Z0-9", 9, 9), "[ARGS]"),
        end="",
        id_written=(
            "(call.id if call.id is defined and call.id | length == 9 else '%09d' % loop.index0)"
        ),
        mint=mistral_id,
    ),
    signature=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
