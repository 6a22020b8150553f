"""The JSON layout of Llama 3.1 to 3.3, as data.  Has no code of its own.

    {"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": ...

Nothing opens a call but its own head, so only a message that starts with all of the head is calls;
one that starts with another object is text.  Behind `<|python_tag|>` calls may follow text.
"""

from __future__ import annotations

from gateway.tools.marked import Marked, Marks

FORMAT = Marked(
    name="llama3",
    marks=Marks(
        begin="",
        before="<|python_tag|>",
        opening='{"name": "',
        again='; {"name": "',
        between=('", "parameters": ',),
        end="}",
    ),
    signature=('"parameters": dictionary of argument name and its value',),
    markers=("<|python_tag|>",),
)
