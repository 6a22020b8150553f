"""What each session said, once, bounded and never across tenants.  Guesses nothing.

    text      [ prompt 1 | output 1 | what turn 2 added | output 2 ]  NO_ID [ another branch's end ]
    branch    one turn's prompt and output: spans of texts that spell it, in order

A turn's prompt mostly begins with the turn before it, so it is laid along the newest branches and
only what they do not hold is written.  A session has two texts: when the newer one is full it
becomes the older one, and the oldest is dropped, so that nothing is ever indexed anew.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from speculative.chains import NO_ID, Chains

TOKEN_BYTES = 18  # at most, of a text: 4 token, 4 link, 8 head table, spare room
FIXED_BYTES = 800  # of a session: its objects, keys and branches
BRANCHES = 8  # newest first; a session with more at a time writes some prompts twice

Span = tuple[int, int, int]  # a text's number, and which of its tokens: start .. end
Branch = list[Span]
LOST: Span = (-1, 0, 0)  # here a branch left out what had no room: nothing is laid along it


class Session:
    """The texts of one session, or of one request without a session."""

    __slots__ = ("_newest", "branches", "counted", "key", "most", "texts", "users")

    def __init__(self, key: tuple[bytes, bytes] | None, most_bytes: int) -> None:
        self.key = key  # None: nobody can find it again
        self.most = max(0, (most_bytes - FIXED_BYTES) // 2 // TOKEN_BYTES)  # tokens a text
        self.texts: list[Chains] = [Chains()]  # newest first
        self._newest = 0  # the number of texts[0]; the one behind it has the number before
        self.branches: list[Branch] = []  # newest first
        self.users = 0  # sequences that live
        self.counted = 0  # bytes that the store knows of

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return FIXED_BYTES + sum(text.nbytes for text in self.texts)

    def begin(self, prompt: array[int]) -> tuple[Branch, int]:
        """The branch of a new turn, and how many tokens of its prompt it holds already."""
        best: Branch = []
        held = 0
        for branch in self.branches:
            spans, count = self._along(branch, prompt)
            if count > held:
                best, held = spans, count
        self.branches = [one for one in self.branches if one != best]  # it only grew
        self._keep(best)
        return best, held

    def write(self, branch: Branch, tokens: Sequence[int], most: int) -> None:
        """What a branch says next; of more than `most` tokens or a text's size only the newest."""
        most = min(most, self.most)
        if len(tokens) > most:
            branch[:] = [LOST]
            tokens = tokens[len(tokens) - most :]
        if not tokens:
            return
        if len(self.texts[0]) + len(tokens) >= self.most:
            self.texts = [Chains(), *self.texts[:1]]
            self._newest += 1
        text, start = self.texts[0], len(self.texts[0])
        if branch and branch[-1][0] == self._newest and branch[-1][2] == start:
            start = branch.pop()[1]
        elif start:
            text.extend((NO_ID,))
            start += 1
        text.extend(tokens)
        branch.append((self._newest, start, len(text)))

    def end(self, prompt: Branch, output: Sequence[int], most: int) -> None:
        """Write what a choice said behind its prompt."""
        branch = list(prompt)
        self.write(branch, output, most)
        self._keep(branch)

    def drop(self, branch: Branch) -> None:
        """No turn will begin with this branch."""
        self.branches = [one for one in self.branches if one is not branch]

    def clear(self) -> None:
        """Forget all."""
        self.texts, self.branches = [Chains()], []
        self._newest += 2  # no branch that somebody holds names a text of these

    def _keep(self, branch: Branch) -> None:
        self.branches = [branch, *self.branches[: BRANCHES - 1]]

    def _along(self, branch: Branch, prompt: array[int]) -> tuple[Branch, int]:
        """The spans that a prompt shares with a branch, and their tokens."""
        shared: Branch = []
        done = 0
        for number, start, end in branch:
            age = self._newest - number
            count = min(end - start, len(prompt) - done)
            if age >= len(self.texts) or count < 1:
                break
            ours = np.frombuffer(self.texts[age].tokens, np.int32)[start : start + count]
            differ = ours != np.frombuffer(prompt, np.int32)[done : done + count]
            same = int(differ.argmax()) if differ.any() else count
            if same:
                shared.append((number, start, start + same))
            done += same
            if same < end - start:
                break
        return shared, done


class Sessions:
    """All sessions, the least recently used dropped first, within so many bytes."""

    def __init__(self, session_bytes: int, total_bytes: int) -> None:
        self._each = min(session_bytes, total_bytes)
        self._total = total_bytes
        self._named: OrderedDict[tuple[bytes, bytes], Session] = OrderedDict()
        self.nbytes = 0  # as of the newest count
        self._live = 0  # of these, what sequences use that live

    @property
    def room(self) -> int:
        """Tokens that may be written before the bytes in use are all there are."""
        return max(0, self._total - self._live) // TOKEN_BYTES

    def enter(self, namespace: bytes, name: bytes | None) -> Session:
        """The session of a new sequence; one of its own where it names none."""
        key = None if name is None else (namespace, name)
        session = None if key is None else self._named.get(key)
        if session is None:
            session = Session(key, self._each)
            if key is not None:
                self._named[key] = session
        if not session.users:
            self._live += session.counted
        self.join(session)
        self.count(session)
        return session

    def join(self, session: Session) -> None:
        """One more sequence lives in the session."""
        session.users += 1

    def leave(self, session: Session) -> None:
        """A sequence ended; what nobody can find or use is gone."""
        self.count(session)
        session.users -= 1
        if not session.users:
            self._live -= session.counted
            if not self._holds(session):
                self.nbytes -= session.counted
                session.counted = 0

    def count(self, session: Session) -> None:
        """A session with users has another size: make room for it by dropping the oldest."""
        if session.key is not None and self._holds(session):
            self._named.move_to_end(session.key)
        more = session.nbytes - session.counted
        session.counted += more
        self.add(more)

    def add(self, size_bytes: int) -> None:
        """Count bytes that a sequence which lives takes, or gives back if negative."""
        self.nbytes += size_bytes
        self._live += size_bytes
        while self.nbytes > self._total and self._named:
            self._evict(self._named.popitem(last=False)[1])

    def end(self, name: bytes) -> None:
        """The session is over: what it said is dropped, in whichever namespace."""
        for key in [key for key in self._named if key[1] == name]:
            self._evict(self._named.pop(key))

    def _holds(self, session: Session) -> bool:
        return session.key is not None and self._named.get(session.key) is session

    def _evict(self, session: Session) -> None:
        """Drop a session's texts; sequences that live in it go on with an empty one."""
        session.clear()
        left = session.nbytes if session.users else 0
        self.nbytes += left - session.counted
        if session.users:
            self._live += left - session.counted
        session.counted = left
