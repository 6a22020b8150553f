"""White space is free at an answer's seams, and nowhere else.  No ids of a model, no engine."""

from __future__ import annotations

from array import array

import pytest

from gateway.seams import Seams, alike, end_of
from gateway.tokens import Memory, Segment

SEAMS = Seams(["<call>", "<think>", "</think>"], [7])


def rest(sampled: str, rendered: str, before: str = "assistant\n") -> str | None:
    """What follows in `rendered` after an answer that was sampled as one text."""
    parts = SEAMS.parts([before], [sampled], [])
    segment = Segment((before + sampled,), (), array("I", [1]), parts)
    return segment.after([rendered], [], 0)


@pytest.mark.parametrize(
    ("sampled", "rendered", "left"),
    [
        ("Hm.<call>{}", "assistant\nHm.\n\n<call>{}", ""),
        ("Hm. \n<call> {}", "assistant\nHm.<call>\n{}\n", "\n"),
        (" Hm.\n", "assistant\nHm.", ""),
        ("Hm.\n", "assistant\n\nHm.\nuser", "user"),
        ("Hm.", "assistant\n Hm.\nuser", "\nuser"),
        ("<think>a</think>b", "assistant\n\n<think>\na\n</think>\n\nb!", "!"),
        ("a b<call>{}", "assistant\na  b<call>{}", None),
        ("Hm.<call>{ }", "assistant\nHm.\n<call>{}", None),
        ("Hm.<call>{}", "Assistant\nHm.\n<call>{}", None),
        ("Hm.<call>{}", "assistant\nHm.\n", None),
    ],
)
def test_only_white_space_at_a_seam_is_free(sampled, rendered, left):
    assert rest(sampled, rendered) == left


def test_pieces_around_control_tokens_are_free_beside_those_that_are_seams():
    parts = SEAMS.parts(["assistant\n"], ["Hm.", "{} ", " x"], [7, 8])
    assert alike(parts, ["assistant\nHm. ", "\n{} ", " x"], "") == ""
    assert alike(parts, ["assistant\nHm.", "{}", " x"], "") is None  # 8 is no seam
    assert alike(parts, ["assistant\nHm.", "{} ", "x"], "") is None


def test_a_list_of_calls_opens_at_the_name_of_a_tool():
    parts = SEAMS.parts([""], ["Hm.[add(a=1)]"], [], ["add"])
    assert alike(parts, ["Hm.\n[add(a=1)]"], "") == ""
    assert end_of(parts[0], "Hm.\n[sub(a=1)]") == -1


def test_an_answer_that_is_printed_otherwise_from_some_token_on_is_shared_up_to_it():
    segment = Segment(("a", "b", "c"), (7, 8), array("I", [1, 7, 2, 2, 8, 3]))
    memory = Memory(10_000)
    memory.add(b"key", segment)
    assert memory.nearest(b"key", ["a", "b", "x"], [7, 8], 0) == (segment, 2)
    assert memory.nearest(b"key", ["a", "x", "c"], [7, 8], 0) == (segment, 1)
    assert memory.nearest(b"key", ["x", "b", "c"], [7, 8], 0) is None
    assert memory.nearest(b"key", ["a", "b", "c"], [9, 8], 0) is None
    assert memory.nearest(b"other", ["a", "b", "x"], [7, 8], 0) is None
    assert [list(one) for one in segment.piece(2)] == [[1, 7, 2, 2, 8], [3]]
    assert [list(one) for one in segment.piece(1)] == [[1, 7], [2, 2]]
