"""One choice of an answer: engine outs to events, and how it ended.  Knows no frames, no HTTP.

ids --Detokenizer--> text --Scanner--> Text | CallStart | CallArgs | CallEnd --StopStrings--> events
                                       (stop strings look at Text only)

A token is one of reasoning when reasoning comes out of it, or out of one behind it before anything
else does: a section's opening mark counts, its closing mark does not.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace

import msgspec

from engine.messages import Out, TokenLogprobs
from gateway.events import CallArgs, CallEnd, CallStart, Event, Finish, Reasoning, Text
from gateway.protocol import TokenLogprob, TopLogprob
from gateway.text import Detokenizer, StopStrings, Vocabulary
from gateway.tools import Scanner

_log = logging.getLogger("slipstream.gateway.choices")


class Said(msgspec.Struct, frozen=True):
    """What one choice gained: events in order, neighbours of a kind joined, and logprobs.

    A Struct because one is made for every token: a tenth of a frozen dataclass's time.
    """

    index: int
    events: list[Event]
    logprobs: list[TokenLogprob] = []  # a new one each
    closed_early: bool = False  # the engine says that it completed a call for the model
    anew: bool = False  # its engine died: all that it said before, and nobody saw, is void

    def then(self, more: Said) -> Said:
        """This and what the same choice gained after it, as one."""
        events = joined([*self.events, *more.events])
        logprobs = self.logprobs + more.logprobs
        closed_early = self.closed_early or more.closed_early
        return Said(self.index, events, logprobs, closed_early, self.anew)


class Choice:
    """One answer in the making; any grouping of the same tokens gives the same joined events."""

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        *,
        scanner: Scanner | None = None,
        stand_ins: Mapping[int, str] | None = None,
        stops: Sequence[str] = (),
        named: bool = False,
        framed: bool = False,
        names: Collection[str] | None = None,
    ) -> None:
        """`scanner`: None when the output holds no calls.  `stand_ins`: of its format's control
        tokens, when it is bound.  `named`: tool_choice named the tool.  `framed`: the format may
        tell of reasoning.  `names`: of the tools that may be called; None = any."""
        self.index = index
        self.vocabulary = vocabulary
        self._fresh_scanner = scanner
        self._stand_ins = stand_ins
        self._stop_strings = stops
        self._named = named
        self._framed = framed
        self._names = names
        self.begin()

    def begin(self) -> None:
        """Forget all that was taken: the answer is made again, by another engine."""
        self.finish = ""  # stop, length or tool_calls, once it has ended
        self.stopped_here = False  # a stop string ended it: the engine must be told
        self.tokens = 0  # delivered ones, a stop id included
        self.reasoning = 0  # of them, those of reasoning
        self.silent = 0  # tokens since the last event, where the format may tell of reasoning
        self.ids: list[int] = []  # sampled ones, without a stop id
        self.calls: list[tuple[str, str]] = []  # (name, arguments) of the complete ones
        self.decoder = Detokenizer(self.vocabulary, self._stand_ins)
        self.scanner = copy(self._fresh_scanner)  # its state is plain values
        self._stops = StopStrings(self._stop_strings) if self._stop_strings else None
        self._call: tuple[str, list[str]] | None = None  # the one that is open
        self.drafts: Sequence[int] = ()  # draft tokens it had: Out.drafts, at the end
        self.dropped = 0  # calls to tools that there are not
        self._dropping = False  # the call that is open is one
        self._said: list[str] = []  # text that left; kept only when stop strings may cut it

    @property
    def may_stop(self) -> bool:
        """Whether text alone can end it."""
        return self._stops is not None

    @property
    def kept(self) -> str | None:
        """The text that was delivered before a stop string; None when none cut the answer."""
        return "".join(self._said) if self.stopped_here else None

    def take(self, out: Out) -> Said:
        """What the next tokens say.  Nothing may be taken after the finish."""
        assert not self.finish, f"choice {self.index} got tokens after its end"
        if out.finish or out.logprobs or self._stops is not None:
            return self._take(out)
        # The usual step of a decode: some tokens, no end.
        self.ids += out.tokens
        self.tokens += len(out.tokens)
        events: list[Event] = []
        if self._framed and len(out.tokens) > 1:
            self._each(out.tokens, events)
            return Said(self.index, joined(events))
        text = self.decoder.push(out.tokens)
        self.silent += len(out.tokens)
        if not text:
            return Said(self.index, events)
        if self.scanner is None:
            return Said(self.index, [Text(text)])
        self._pass(self.scanner.push(text), events)
        if self._framed:
            self._weigh(events)
        return Said(self.index, joined(events))

    def content(self) -> str:
        """The text of an answer that has ended, read once more from its tokens."""
        again = copy(self)
        again.begin()
        events: list[Event] = []
        again._push(again.decoder.push(self.ids), events)
        again._end(events, unopened=False)
        return "".join(event.text for event in events if isinstance(event, Text))

    def argued(self, text: str) -> None:
        """A piece of the open call's arguments."""
        assert self._call is not None, "arguments outside a call"
        self._call[1].append(text)

    def _take(self, out: Out) -> Said:
        count = len(out.tokens) - out.stopped
        events: list[Event] = []
        if self._stops is None and not self._framed:
            self._push(self.decoder.push(out.tokens[:count]), events)
        else:
            count = self._each(out.tokens[:count], events)
        self.ids += out.tokens[:count]
        self.tokens += count
        if not self.stopped_here:
            self.tokens += out.stopped
            if out.finish:
                self._end(events, out.overflow == "unopened")
        if out.finish or self.stopped_here:
            self.drafts = out.drafts
            self.finish = self._reason(out.finish)
            events.append(Finish(self.finish))
        pairs = zip(out.tokens[:count], out.logprobs, strict=False)
        logprobs = [self._logprob(*pair) for pair in pairs]
        closed_early = out.overflow == "closed" and not self.stopped_here
        return Said(self.index, joined(events), logprobs, closed_early)

    def _each(self, ids: Sequence[int], events: list[Event]) -> int:
        """Push token by token until a stop string, so that no count depends on grouping."""
        for count, id in enumerate(ids, 1):
            before = len(events)
            self._push(self.decoder.push([id]), events)
            self.silent += 1
            self._weigh(events[before:])
            if self.stopped_here:
                return count
        return len(ids)

    def _weigh(self, gained: Sequence[Event]) -> None:
        """Count the tokens since the last event if reasoning came of them."""
        if gained:
            for event in gained:
                if isinstance(event, Reasoning):
                    self.reasoning += self.silent
                    break
            self.silent = 0

    def _push(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        self._pass([Text(text)] if self.scanner is None else self.scanner.push(text), events)

    def _pass(self, found: Iterable[Event], events: list[Event]) -> None:
        """Events on their way out: text through the stop strings, calls noted."""
        for event in found:
            if self.stopped_here:
                return
            if isinstance(event, Text):
                self._say(event.text, events)
            elif (known := self._known(event)) is not None:
                event = known
                self._note(event)
                if self._stops is not None and (rest := self._stops.flush()):
                    self._said.append(rest)
                    events.append(Text(rest))
                events.append(event)

    def _say(self, text: str, events: list[Event]) -> None:
        if self._stops is not None:
            text, self.stopped_here = self._stops.push(text)
            self._said.append(text)
        if text:
            events.append(Text(text))

    def _known(self, event: Event) -> Event | None:
        """The event; None for one of a call to a tool that there is not.

        A grammar lets no model write one.  Were it to fail, the calls beside it must still come,
        with dense indices.
        """
        if isinstance(event, CallStart):
            self._dropping = self._names is not None and event.name not in self._names
            if self._dropping:
                self.dropped += 1
                _log.warning("dropped a call to a tool that the request does not have")
        if not self.dropped or isinstance(event, Reasoning):
            return event
        if self._dropping:
            return None
        assert isinstance(event, CallStart | CallArgs | CallEnd), "only calls have an index"
        return replace(event, index=event.index - self.dropped)

    def _note(self, event: Event) -> None:
        match event:
            case CallStart(name=name):
                self._call = (name, [])
            case CallArgs(text=text):
                self.argued(text)
            case CallEnd():
                assert self._call is not None, "the end of no call"
                self.calls.append((self._call[0], "".join(self._call[1])))
                self._call = None
            case Reasoning():
                pass  # stop strings look at content only
            case _:
                raise TypeError(f"a scanner gave {type(event).__name__}")

    def _end(self, events: list[Event], unopened: bool) -> None:
        """The engine ended the choice: let go of everything that was held back.

        But not of the beginning of a call that was `unopened`: it is no text.
        """
        before = len(events)
        self._push(self.decoder.close(), events)
        if self.scanner is not None:
            held = self.scanner.close()
            self._pass([e for e in held if not (unopened and isinstance(e, Text))], events)
        self._weigh(events[before:])
        if self._stops is not None and not self.stopped_here and (rest := self._stops.flush()):
            events.append(Text(rest))

    def _reason(self, finish: str) -> str:
        if finish == "length" and not self.stopped_here:
            return "length"
        return "tool_calls" if self.calls and not self._named else "stop"

    def _logprob(self, id: int, found: TokenLogprobs) -> TokenLogprob:
        token, raw = self._shown(id)
        top = [TopLogprob(*self._candidate(id, value)) for id, value in found.top]
        return TokenLogprob(token, found.logprob, raw, top)

    def _candidate(self, id: int, value: float) -> tuple[str, float, list[int]]:
        token, raw = self._shown(id)
        return token, value, raw

    def _shown(self, id: int) -> tuple[str, list[int]]:
        raw = self.vocabulary.spelled(id)
        return raw.decode("utf-8", "replace"), list(raw)


def joined(events: Sequence[Event]) -> list[Event]:
    """Neighbouring texts as one, neighbouring pieces of one call's arguments as one."""
    if len(events) < 2:
        return list(events)
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArgs) and isinstance(last, CallArgs):
            out[-1] = CallArgs(event.index, last.text + event.text)
        else:
            out.append(event)
    return out
