"""The layout of Mistral's tokenizers from v13 on, as data.  Has no code of its own.

    [TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]...
"""

from __future__ import annotations

from gateway.tools.marked import Marked, Marks, mistral_id

FORMAT = Marked(
    name="mistral13",
    marks=Marks(
        begin="[TOOL_CALLS]",
        opening="",
        again="[TOOL_CALLS]",
        between=("[ARGS]",),
        end="",
        mint=mistral_id,
    ),
    signature=("[TOOL_CALLS]", "[ARGS]"),
    markers=("[TOOL_CALLS]", "[ARGS]"),
)
