"""A prediction followed through edits, and found again.  No votes."""

from __future__ import annotations

import random

import pytest

from speculative.predicted import Place, Prediction

DRAW = random.Random(2)
LINE = [DRAW.randrange(500) for _ in range(120)]


def place_after(output: list[int], predicted: list[int] = LINE) -> Place:
    prediction, place = Prediction(predicted), Place()
    for end in range(1, len(output) + 1):
        place = prediction.follow(place, output[max(0, end - 16) : end], 1)
    return place


def test_an_output_that_agrees_is_followed():
    assert Prediction(LINE).follow(Place(), [], 0) == Place(0, 0, 0)
    assert place_after(LINE[:30]) == Place(30, 30, 0, 30)


@pytest.mark.parametrize(
    ("name", "new", "old"),
    [("changed", [900], 1), ("changed for more", [900, 901, 902], 1), ("deleted", [], 5),
     ("inserted", list(range(900, 930)), 0), ("shortened", [900], 9)],
)
def test_two_tokens_behind_an_edit_the_place_is_found_again(name, new, old):
    output = LINE[:40] + new + LINE[40 + old : 42 + old]
    place = place_after(output)
    assert (place.at, place.lost) == (42 + old, 0), name
    assert place.run >= 2


def test_a_token_that_differs_is_first_taken_for_a_replaced_one():
    assert place_after([*LINE[:40], 900]) == Place(41, 0, 1, 40)
    assert place_after([*LINE[:40], 900, LINE[41]]).at == 42


def test_a_stretch_that_moved_far_is_found_by_three_tokens():
    assert place_after([*LINE[:30], *LINE[110:113]]).at == 113
    assert place_after([*LINE[:30], *LINE[110:112]]).at < 110


def test_the_nearest_of_equal_places_is_taken():
    line = [*LINE[:12], 7, 8, *LINE[14:20], 7, 8, 1, *LINE[20:40], 7, 8, 3]
    assert place_after([*line[:19], 99, 7, 8], line).at == 22
    assert place_after([*line[:19], 7, 8], line).at == 22


def test_several_tokens_at_once_lead_to_the_same_place():
    output = [*LINE[:20], 900, 901, *LINE[22:40]]
    at_once = Prediction(LINE).follow(Place(), output, len(output))
    assert at_once == place_after(output)


def test_an_end_that_was_reached_is_no_error():
    assert place_after([*LINE, 1, 2, 3]).at >= len(LINE)
    assert place_after([1, 2, 3], [5]).lost == 3
