"""One chain out of many places: a vote, token by token, with its survival.  Finds no places.

A token's survival is the product of the chances on its way.  The chance of a vote's winner is
calibrated by where the longest match stands, how long it is, and which share of the weight it won;
a prediction's, by how long the output has agreed with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from speculative.chains import NO_ID, Chains, ids
from speculative.predicted import LOST, Place, Prediction

REACH = 32  # a match that is longer counts as this long
FLOOR = 0.05  # survival below which a chain ends
GAIN = 1.2  # a vote's weight, for each token of its match up to LONG
LONG = 12
OLDER = 0.85  # a vote's weight, for each better place before it
DOUBT = 0.2  # weight of the unseen voter that disagrees with everybody: many agree more than one
WEIGHTS = tuple(GAIN ** min(length, LONG) for length in range(REACH + 1))
DOUBTS = tuple(DOUBT * weight for weight in WEIGHTS)

Chain = tuple[list[int], list[float], list[int]]  # tokens, their survival, their cells
Spot = tuple[Chains, int, int]  # (text, index of the token that should come next, match length)
Line = tuple[float, Sequence[int], int, int]  # (weight, what comes next, match length, first cell)

# Cells of the calibration: source, then match length, then share of the vote.
SHARES = 8
LENGTHS = [SHARES * row for row in (0, 0, 0, 1, 2, 3, 3, 4, 4, 4, *[5] * 6, *[6] * 16, 7)]
OWN, SAID, PREDICTED = 0, 8 * SHARES, 16 * SHARES
RUNS = [PREDICTED + cell for cell in (0, 4, 5, 6, 6, 7, 7, 7, 7, *[8] * 8, *[9] * 16)]
# Chances before anything was seen, by match length (rows) and share of the vote: as measured by
# tests/bench/bench_suffix.py over edits of this project and answers of SmolLM2.
VOTE_PRIORS = (
    (0.04, 0.10, 0.16, 0.21, 0.28, 0.38, 0.47, 0.76),  # 2 tokens
    (0.04, 0.10, 0.19, 0.23, 0.29, 0.44, 0.68, 0.84),  # 3
    (0.05, 0.13, 0.21, 0.26, 0.37, 0.50, 0.77, 0.92),  # 4
    (0.05, 0.18, 0.28, 0.35, 0.58, 0.80, 0.88, 0.96),  # 5, 6
    (0.05, 0.20, 0.29, 0.43, 0.60, 0.85, 0.90, 0.97),  # 7 to 9
    (0.06, 0.25, 0.33, 0.45, 0.68, 0.90, 0.94, 0.98),  # 10 to 15
    (0.06, 0.25, 0.40, 0.60, 0.72, 0.86, 0.95, 0.98),  # 16 to 31
    (0.06, 0.25, 0.40, 0.55, 0.70, 0.88, 0.99, 0.99),  # 32 and more
)
PRIORS = [
    *(chance for _ in (OWN, SAID) for row in VOTE_PRIORS for chance in row),
    0.7, 0.12, 0.08, 0.06,  # a prediction: at the start, and so many tokens after an edit
    0.3, 0.45, 0.55, 0.8, 0.95, 0.98,  # after 1, 2, 3 or 4, 5 to 8, to 16, more that agreed
]


def lines_of(spots: list[Spot], limit: int, own: Chains, ahead: Sequence[int]) -> list[Line]:
    """What each place goes on with, `limit` tokens, and its vote."""
    lines: list[Line] = []
    older = 1.0
    for text, at, length in spots:
        line = text.tokens[at : at + limit]
        if len(line) < limit:
            line.extend(ids(ahead) if text is own else (NO_ID,))
            while len(line) < limit:  # a text that repeats goes on repeating behind its end
                line.extend(line if text is own else (NO_ID,))
        lines.append((
            older * WEIGHTS[min(length, REACH)], line, length, OWN if text is own else SAID,
        ))
        older *= OLDER
    return lines


def vote(lines: list[Line], limit: int, chances: Sequence[float]) -> Chain:
    """The chain that most weight goes along."""
    tokens: list[int] = []
    survival: list[float] = []
    cells: list[int] = []
    alive = 1.0
    asked = sum([one[0] for one in lines])
    for place in range(limit if lines else 0):
        first = lines[0]
        token, won = first[1][place], asked
        for one in lines:
            if one[1][place] != token:
                token, won, lines = _majority(lines, place)
                first = lines[0]
                break
        length = first[2] + place
        if length > REACH:
            length = REACH
        cell = first[3] + LENGTHS[length] + int(won / (asked + DOUBTS[length]) * SHARES)
        alive *= chances[cell]
        if alive < FLOOR or token < 0:
            break
        tokens.append(token)
        survival.append(alive)
        cells.append(cell)
        asked = won
    return tokens, survival, cells


def _majority(lines: list[Line], place: int) -> tuple[int, float, list[Line]]:
    """The token with the most weight, its weight, and the lines that go on with it."""
    votes: dict[int, float] = {}
    for weight, line, _, _ in lines:
        votes[line[place]] = votes.get(line[place], 0.0) + weight
    token = max(votes, key=votes.__getitem__)  # of equals the first, which is the longest match
    return token, votes[token], [one for one in lines if one[1][place] == token]


def read(prediction: Prediction, place: Place, limit: int, chances: Sequence[float]) -> Chain:
    """The chain that the prediction goes on with."""
    tokens: list[int] = []
    survival: list[float] = []
    cells: list[int] = []
    at, run, lost, _ = place
    if lost > LOST:
        return tokens, survival, cells
    alive = 1.0
    for token in prediction.tokens[at : at + limit]:
        cell = RUNS[min(run, REACH)] if run else PREDICTED + lost
        alive *= chances[cell]
        if alive < FLOOR or token < 0:
            break
        tokens.append(token)
        survival.append(alive)
        cells.append(cell)
        run += 1
    return tokens, survival, cells
