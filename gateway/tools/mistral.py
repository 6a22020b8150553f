"""The array layout of Mistral's tokenizers up to v7, as data.  Has no code of its own.

    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}, ...]

Some of the models' templates have a space before the array.  A model may close a call with an id
(`..., "id": "9 letters"}`).  That comes too late to be the call's id on the wire, so it is read and
left out.
"""

from __future__ import annotations

from gateway.tools.marked import Marked, Marks, mistral_id
from gateway.tools.marked_scanner import Span

FORMAT = Marked(
    name="mistral",
    marks=Marks(
        begin="[TOOL_CALLS]",
        opening='[{"name": "',
        other_opening=' [{"name": "',
        again=', {"name": "',
        between=('", "arguments": ',),
        end="}",
        close="]",
        other_end=(', "id": "', Span("a-zA-Z0-9", 9, 9), '"}'),
        mint=mistral_id,
    ),
    signature=("[TOOL_CALLS]",),
    markers=("[TOOL_CALLS]",),
)
