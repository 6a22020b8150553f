"""The layout of DeepSeek V3 and R1-0528, as data.  Has no code of its own.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add
    ```json
    {"a": 1, "b": 2}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Calls are separated by a newline.
"""

from __future__ import annotations

from gateway.tools.marked import Marked, Marks

FORMAT = Marked(
    name="deepseek",
    marks=Marks(
        begin="<｜tool▁calls▁begin｜>",
        opening="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        again="\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        between=("\n```json\n",),
        end="\n```<｜tool▁call▁end｜>",
        close="<｜tool▁calls▁end｜>",
    ),
    signature=("<｜tool▁calls▁begin｜>", "```json"),
    markers=(
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
)  # fmt: skip
