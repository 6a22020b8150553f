"""The layout of DeepSeek V3.1, as data.  Has no code of its own.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>...
    <｜tool▁calls▁end｜>, all on one line
"""

from __future__ import annotations

from gateway.tools.marked import Marked, Marks

FORMAT = Marked(
    name="deepseek31",
    marks=Marks(
        begin="<｜tool▁calls▁begin｜>",
        opening="<｜tool▁call▁begin｜>",
        again="<｜tool▁call▁begin｜>",
        between=("<｜tool▁sep｜>",),
        end="<｜tool▁call▁end｜>",
        close="<｜tool▁calls▁end｜>",
    ),
    signature=("<｜tool▁calls▁begin｜>",),
    markers=(
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
)  # fmt: skip
