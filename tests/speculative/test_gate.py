"""Whether texts are asked behind what was dictated: not where they were refused time and again."""

from __future__ import annotations

import speculative.gate as module
from speculative.gate import AGAIN, PATIENCE, Gate


def test_it_shuts_behind_a_pair_that_nothing_was_legal_behind_and_looks_again_now_and_then():
    gate, asked = Gate(), []
    for _ in range(PATIENCE + 10 * AGAIN):
        opened = gate.opens((b"a", 1, 2))
        asked.append(opened)
        if opened:
            gate.learn((b"a", 1, 2), False)
    assert all(asked[:PATIENCE]) and sum(asked[PATIENCE:]) == 10
    assert gate.opens((b"a", 2, 1)) and gate.opens((b"b", 1, 2)), "others"


def test_one_guess_that_is_legal_opens_it_again():
    gate = Gate()
    for _ in range(3 * PATIENCE):
        if gate.opens((b"a", 1, 2)):
            gate.learn((b"a", 1, 2), False)
    while not gate.opens((b"a", 1, 2)):
        pass
    gate.learn((b"a", 1, 2), True)
    for _ in range(PATIENCE):
        assert gate.opens((b"a", 1, 2))
        gate.learn((b"a", 1, 2), False)


def test_it_remembers_so_many_pairs_and_no_more(monkeypatch):
    monkeypatch.setattr(module, "MOST", 10)
    gate = Gate()
    for number in range(1000):
        gate.learn((b"", number, 0), False)
        assert len(gate._refused) <= 10
