"""Drafts from what was said before: output, prompt, session, prediction.  Runs no model.

    ... the newest tokens stood here before, and then came a b c
    ... and here                                           a b d
    ... and here, longer                                   a x y        a vote, token by token

Suffix decoding (arXiv 2411.04975) over hash chains instead of suffix trees: places that agree with
the text so far are carried along as it grows, so the longest match is known without a search, and
a chain lookup finds new ones.  A token's survival is the product of calibrated chances on its way.
Nothing is shared between namespaces but counts of how often guesses of a kind were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.proposer import Key, Turn
from speculative.calibration import Calibration
from speculative.chains import Chains, ids
from speculative.predicted import Place, Prediction
from speculative.sessions import Branch, Session, Sessions
from speculative.voting import PRIORS, REACH, Chain, Spot, lines_of, read, vote

PLACES = 8  # earlier places that vote; 16 gave the same
ENOUGH = 12  # a match this long is followed without looking for others
PIECE = 8192  # prompt tokens indexed a call, so that no step waits long for one prompt
CHOICE_BYTES = 3000  # of a choice: objects, places, trail
COUNTED = 256  # output tokens between two counts of bytes


class Guess(NamedTuple):
    """A chain of guessed tokens; the first `predicted` of them are the client's prediction."""

    tokens: list[int]
    survival: list[float]  # chance that all tokens up to this one are right
    predicted: int = 0


class _Request:
    """What the choices of one request share: its prompt and prediction, indexed once."""

    __slots__ = (
        "branch", "counted", "keys", "prediction", "prompt_len", "rest", "session", "whose",
    )

    def __init__(self, turn: Turn, session: Session, room: int) -> None:
        """`room`: tokens that may be held beside the session."""
        self.whose = (turn.namespace, turn.session)
        self.prompt_len = turn.prompt_len
        self.session = session
        self.keys: set[Key] = set()
        predicted = turn.predicted[:room]
        self.prediction = Prediction(predicted) if predicted else None
        prompt = ids(turn.tokens[: turn.prompt_len])
        self.branch: Branch
        self.branch, held = session.begin(prompt)
        self.rest = prompt[held:]  # not indexed yet
        self.counted = 0  # bytes that the store knows of

    @property
    def nbytes(self) -> int:
        """Bytes held beside the session."""
        predicted = self.prediction.nbytes if self.prediction is not None else 0
        return predicted + self.rest.itemsize * len(self.rest)

    def serves(self, turn: Turn) -> bool:
        """Whether the turn is one of its choices."""
        return self.whose == (turn.namespace, turn.session) and self.prompt_len == turn.prompt_len


class _Choice:
    """One sequence: what it said, and the places that its end was found at."""

    __slots__ = (
        "counted", "next_count", "own", "place", "request", "seen", "spots", "tokens", "trail",
    )

    def __init__(self, turn: Turn, request: _Request) -> None:
        self.request = request
        self.tokens = turn.tokens  # the engine's own list: at the end it holds all that was said
        self.seen = turn.prompt_len
        self.own = Chains()  # the prompt's last token and the output
        self.own.extend(turn.tokens[max(0, turn.prompt_len - 1) : turn.prompt_len])
        self.spots: list[Spot] = []
        self.place = Place()
        self.trail: list[int] = []  # the cells of the newest guess
        self.counted = 0  # bytes that the store knows of
        self.next_count = 0  # tokens at which they are counted again

    @property
    def nbytes(self) -> int:
        """Bytes held beside the request and the session."""
        return CHOICE_BYTES + self.own.nbytes

    def fits(self, turn: Turn) -> bool:
        """Whether this is the sequence that it was."""
        return self.request.serves(turn) and len(turn.tokens) >= self.seen

    def take(self, tokens: Sequence[int], room: int) -> None:
        """Go on to the text's new end; `room`: tokens that may still be indexed."""
        self.tokens = tokens
        new = tokens[self.seen :]
        if not new:
            return
        self.seen = len(tokens)
        if len(new) <= room:
            self.own.extend(new)
        self.spots = _moved(self.spots, new)
        if self.request.prediction is not None:
            output = tokens[max(self.request.prompt_len, len(tokens) - len(new) - REACH) :]
            self.place = self.request.prediction.follow(self.place, output, len(new))

    def look(self, context: Sequence[int], spots: list[Spot]) -> list[Spot]:
        """The best places to read on from: those carried along, and what the chains find."""
        if spots and spots[0][2] >= ENOUGH:
            return spots
        fresh = list(spots)
        for text in (self.own, *self.request.session.texts):
            known = {spot[1] for spot in spots if spot[0] is text}
            for at, length in text.matches(context, PLACES, REACH, known):
                fresh.append((text, at, length))
        if len(fresh) > len(spots):
            fresh.sort(key=_length, reverse=True)
        return fresh[:PLACES]


class SuffixDrafts:
    """Guesses from each sequence's own text, its session and its prediction."""

    source = "suffix"

    def __init__(self, session_bytes: int = 8 << 20, total_bytes: int = 256 << 20) -> None:
        """`session_bytes`: what one session may hold; `total_bytes`: all that is held."""
        self._sessions = Sessions(session_bytes, total_bytes)
        self._requests: dict[str, _Request] = {}
        self._choices: dict[Key, _Choice] = {}
        self._calibration = Calibration(PRIORS)

    @property
    def nbytes(self) -> int:
        """Bytes held, as of the newest count; a sequence is counted every COUNTED tokens."""
        return self._sessions.nbytes

    def guess(self, turn: Turn, ahead: Sequence[int], limit: int) -> Guess:
        """What may follow `turn.tokens` and then `ahead`, which another source drafted.

        At most `limit` tokens; none where nothing was found.  Survival takes `ahead` as right.
        Never raises.
        """
        choice = self._choices.get(turn.key)
        if choice is None or not choice.fits(turn):
            choice = self._begin(turn)
        self._grow(choice, turn.tokens)
        count = len(turn.tokens)
        context = list(turn.tokens[max(0, count - REACH) :])
        spots, place = choice.spots, choice.place
        prediction = choice.request.prediction
        chances = self._calibration.chances
        line: Chain = ([], [], [])
        if ahead:
            context += ahead
            spots = _moved(spots, ahead)
        if prediction is not None:
            if ahead:
                place = prediction.follow(place, context, len(ahead))
            line = read(prediction, place, limit, chances)
        found: Chain = ([], [], [])
        if place.run < ENOUGH or len(line[0]) < limit:
            spots = choice.look(context, spots)
            if not ahead:
                choice.spots = spots
            found = vote(lines_of(spots, limit, choice.own, ahead), limit, chances)
        if sum(line[1]) >= sum(found[1]):
            choice.trail = line[2]
            return Guess(line[0], line[1], len(line[0]))
        choice.trail = found[2]
        return Guess(found[0], found[1])

    def observe(self, key: Key, verified: int, matched: int) -> None:
        """Of the newest guess of `key`, `verified` tokens were looked at; `matched` were right."""
        choice = self._choices.get(key)
        if choice is None or verified < 1:
            return
        for place, cell in enumerate(choice.trail[:verified]):
            self._calibration.learn(cell, place < matched)
            if place >= matched:
                break
        choice.trail = []

    def forget(self, key: Key) -> None:
        """The sequence ended: what it said goes into its session's text."""
        choice = self._choices.pop(key, None)
        if choice is None:
            return
        request = choice.request
        session = request.session
        self._sessions.add(-choice.counted)
        if session.key is not None:
            if request.rest:
                self._index(request, len(request.rest))
            session.end(
                request.branch, choice.tokens[request.prompt_len :], self._sessions.room
            )
        request.keys.discard(key)
        if not request.keys:
            session.drop(request.branch)
            self._sessions.add(-request.counted)
            if self._requests.get(key[0]) is request:
                del self._requests[key[0]]
        self._sessions.leave(session)

    def ended(self, session: bytes) -> None:
        """The session is over: nothing that it said is kept."""
        self._sessions.end(session)

    def _begin(self, turn: Turn) -> _Choice:
        self.forget(turn.key)
        request = self._requests.get(turn.key[0])
        if request is None or not request.serves(turn):
            session = self._sessions.enter(turn.namespace, turn.session)
            request = self._requests[turn.key[0]] = _Request(turn, session, self._sessions.room)
            self._recount(request)
        else:
            self._sessions.join(request.session)
        request.keys.add(turn.key)
        choice = self._choices[turn.key] = _Choice(turn, request)
        return choice

    def _grow(self, choice: _Choice, tokens: Sequence[int]) -> None:
        """Index what is new, and count its bytes now and then."""
        if choice.request.rest:
            self._index(choice.request, PIECE)
        choice.take(tokens, self._sessions.room)
        if choice.seen >= choice.next_count:
            choice.next_count = choice.seen + COUNTED
            self._recount(choice)

    def _index(self, request: _Request, count: int) -> None:
        """Write so many more tokens of the prompt into the session."""
        room = self._sessions.room
        request.session.write(request.branch, request.rest[:count], room)
        request.rest = request.rest[count:]
        self._sessions.count(request.session)
        self._recount(request)

    def _recount(self, holder: _Request | _Choice) -> None:
        more = holder.nbytes - holder.counted
        holder.counted += more
        self._sessions.add(more)


def _length(spot: Spot) -> int:
    return spot[2]


def _moved(spots: list[Spot], tokens: Sequence[int]) -> list[Spot]:
    """The places that go on with these tokens, moved behind them."""
    kept = []
    for text, at, length in spots:
        there = text.tokens
        for token in tokens:
            if at >= len(there) or there[at] != token:
                break
            at += 1
        else:
            if at < len(there):
                kept.append((text, at, length + len(tokens)))
    return kept
