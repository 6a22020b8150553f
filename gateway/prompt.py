"""Requests to prompt ids: chat template, control tokens, context check.  Talks to no engine.

messages --render--> text | control | text | control | text --encode--> ids
                      `-- pieces of served turns: the ids that were sampled (tokens.py)
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import anyio.to_thread
from tokenizers import Tokenizer

from gateway.arguments import BY_JSON, BY_PYTHON, PLAIN, Style
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.marks import Marks, Rendered
from gateway.plans import Plans
from gateway.probe import Shown, probe
from gateway.protocol import Message
from gateway.render import MESSAGE, MODELS_OWN, Template, weight_of
from gateway.seams import Seams
from gateway.spellings import Spellings
from gateway.text import Detokenizer, Vocabulary
from gateway.tokens import Encoder, Memory, Segment, Trail
from gateway.tools import Format
from gateway.tools.pythonic import Pythonic
from gateway.tools.tags import Tagged
from gateway.tools.thinking import CLOSE, OPEN, Thinking
from gateway.work import Stopped

INLINE = 8192  # characters; more are rendered and encoded in a thread, never on the event loop
LONGEST = 16  # characters of a token, when a prediction is cut before it is encoded
INLINE_WORK = 100_000  # units of a template's work; what takes more is rendered again in a thread
_TAIL = 16  # tokens that hold the opening of a section of reasoning, if there is one
PIECES_BYTES = 64 * 1024 * 1024
MEMORY_BYTES = 256 * 1024 * 1024
SPELLINGS_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and what remember() needs to continue it next time."""

    ids: list[int]
    key: bytes = b""  # of everything before the tail
    texts: tuple[str, ...] = ("",)  # the tail: what follows the last control token
    controls: tuple[int, ...] = ()
    tail: int = 0  # where the tail's ids begin in `ids`
    scope: bytes = b""  # whose served turns it may continue


class Prompts:
    """Renders and encodes prompts for one model; the only owner of its tokenizer in the gateway."""

    def __init__(
        self,
        tokenizer_json: str,
        chat_template: str | None,
        *,
        max_len: int,
        format: Format,
        add_bos: bool = False,
        bos_id: int | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """`max_len`: tokens of prompt and output together.  Raises BadTokenizer or BadTemplate when
        the model's files cannot be used."""
        self.max_len = max_len
        self.vocabulary = Vocabulary(tokenizer_json)
        #: The layout of calls, bound to the control tokens of this model.
        self.format = format = format.bound(self.vocabulary.specials())
        self.plans = Plans(format)
        own = chat_template or format.template
        self._controls = self._pick_controls(own + format.template)
        self._ids = {text: id for id, text in self._controls.items()}
        marks = Marks(sorted(self._ids))
        names = {
            "bos_token": self.vocabulary.added.get(-1 if bos_id is None else bos_id, ""),
            "eos_token": self.vocabulary.added.get(stop_ids[0] if stop_ids else -1, ""),
        }
        ours = f"the chat template of the layout {format.name}"
        layout = format.layout if isinstance(format, Thinking) else format
        self._plain = self._with_tools = Template(
            own, marks, names, objects=chat_template is not None,
            style=_style(layout), name=ours if chat_template is None else MODELS_OWN,
        )  # fmt: skip
        shown = probe(self._plain)
        takes_tools = chat_template is not None and "tools" in own and shown.tools is not False
        if not takes_tools and chat_template is not None:
            self._with_tools = Template(format.template, marks, names, objects=False, name=ours)
            shown = probe(self._with_tools)
        self._bos = [bos_id] if add_bos and bos_id is not None else []
        self._raw = Tokenizer.from_str(tokenizer_json)
        self._encoder = Encoder(tokenizer_json, self._controls, PIECES_BYTES)
        self._memory = Memory(MEMORY_BYTES)
        marks_of_answers = (layout.begin, OPEN, CLOSE)
        self._seams = Seams(
            marks_of_answers, [self._ids[one] for one in marks_of_answers if one in self._ids]
        )
        self._spellings = Spellings(SPELLINGS_BYTES)
        #: The template cannot show two calls of one message, so no answer may have two.
        self.one_call = shown.parallel is False
        #: One line for the start banner: which template shows tools, and why.
        self.note = _note(shown, format.name, takes_tools=takes_tools)

    def _pick_controls(self, templates: str) -> dict[int, str]:
        """id -> text of the tokens that callers must not write: the special ones, and those added
        ones that the templates or the format use as markers."""
        special = self.vocabulary.special
        used = templates + self.format.example
        return {
            id: text
            for id, text in self.vocabulary.added.items()
            if text and (id in special or text in used)
        }

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] = (),
        *,
        scope: bytes = b"",
        extra: Mapping[str, object] | None = None,
    ) -> Prompt:
        """The ids of a conversation up to where the assistant speaks; raise BadRequest.

        `tools` are dicts as on the wire.  `scope`: whose served turns may be continued, the cache
        namespace.  `extra`: variables for the template.
        """
        calls = any(message.tool_calls or message.role == "tool" for message in messages)
        template = self._with_tools if tools or calls else self._plain
        variables = extra or {}
        messages = self._spellings.restored(scope, messages)
        if template.weight_of(tools) + weight_of(messages, variables) <= INLINE:
            with contextlib.suppress(Stopped):
                rendered = template.render(messages, tools, variables, INLINE_WORK)
                return await self._encoded(rendered, scope)
        rendered = await anyio.to_thread.run_sync(template.render, messages, tools, variables)
        return await self._encoded(rendered, scope)

    def ends_inside_thought(self, prompt: Prompt) -> bool:
        """Whether the template opened a section of reasoning for the model to go on with."""
        if not isinstance(self.format, Thinking):
            return False
        tail = b"".join(self.vocabulary.spelled(id) for id in prompt.ids[-_TAIL:])
        return tail.rstrip().endswith(OPEN.encode())

    async def plain(self, text: str) -> Prompt:
        """The ids of a text completion's prompt, written as the tokenizer reads it: control tokens
        in it count, because the whole prompt is the caller's."""
        if len(text) <= INLINE:
            ids = self._raw.encode(text, add_special_tokens=False).ids
        else:
            encoding = await anyio.to_thread.run_sync(
                lambda: self._raw.encode(text, add_special_tokens=False)
            )
            ids = encoding.ids
        return Prompt(ids if ids[:1] == self._bos else self._bos + ids)

    async def predicted(self, text: str, most: int) -> list[int]:
        """The ids of what an output may be, at most so many: a guess, so cut where it is long."""
        if not text:
            return []
        given = await self.plain(text[: most * LONGEST])
        ids = given.ids[len(self._bos) :] if self._bos else given.ids
        return ids[:most]

    def given(self, ids: Sequence[int]) -> Prompt:
        """A prompt that came as ids; raise BadRequest for one outside the vocabulary, and
        ContextLengthExceeded before it looks at more ids than any prompt may have."""
        if len(ids) >= self.max_len:
            raise ContextLengthExceeded(len(ids), 1, self.max_len, "prompt")
        vocab = len(self.vocabulary)
        if ids and not (min(ids) >= 0 and max(ids) < vocab):
            raise BadRequest(f"Token ids go from 0 to {vocab - 1:,}.", param="prompt")
        return Prompt(list(ids))

    def room(
        self, prompt: Prompt, wanted: int | None, engine_len: int, param: str = "messages"
    ) -> int:
        """Tokens that may be generated: `wanted`, or all that the context leaves; raise
        ContextLengthExceeded when prompt and output do not fit together.

        `engine_len`: what the engine can hold, which may be less than the model's context.
        """
        limit = min(self.max_len, engine_len)
        left = limit - len(prompt.ids)
        if left < (wanted or 1):
            raise ContextLengthExceeded(len(prompt.ids), wanted or 1, limit, param)
        return wanted or left

    def remember(
        self,
        prompt: Prompt,
        sampled: Sequence[int],
        keep: str | None = None,
        calls: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Continue this prompt with these ids when the next request holds the same text.

        `sampled`: the answer's ids without the stop id that ended it.  `keep`: the text that was
        delivered, when a stop string cut it: ids behind it are forgotten.  `calls`: (name,
        arguments) of those that were made.
        """
        self._spellings.remember(prompt.scope, calls)
        if not prompt.key:
            return
        if keep is not None:
            sampled = self._within(sampled, keep)
        texts, controls = self._pieces(sampled)
        if texts == [""]:
            return
        joint = prompt.texts[-1] + texts[0]
        listed = () if self.format.begin else [name for name, _ in calls]
        segment = Segment(
            (*prompt.texts[:-1], joint, *texts[1:]),
            (*prompt.controls, *controls),
            array("I", [*prompt.ids[prompt.tail :], *sampled]),
            self._seams.parts(prompt.texts, texts, controls, listed),
        )
        self._memory.add(prompt.key, segment)

    def _within(self, sampled: Sequence[int], keep: str) -> Sequence[int]:
        """The longest start of `sampled` whose text fits into `keep`."""
        left = len(keep.encode())
        table = self.vocabulary.bytes
        for count, id in enumerate(sampled):
            left -= len(table[id]) if id < len(table) else 0
            if left < 0:
                return sampled[:count]
        return sampled

    def _pieces(self, ids: Sequence[int]) -> tuple[list[str], list[int]]:
        """Sampled ids as texts around control tokens."""
        texts: list[str] = []
        controls: list[int] = []
        start = 0
        for at, id in enumerate(ids):
            if id in self._controls:
                texts.append(self.text_of(ids[start:at]))
                controls.append(id)
                start = at + 1
        return [*texts, self.text_of(ids[start:])], controls

    def text_of(self, ids: Sequence[int]) -> str:
        """What ids say, without control tokens."""
        detokenizer = Detokenizer(self.vocabulary)
        return detokenizer.push(ids) + detokenizer.close()

    async def _encoded(self, rendered: Rendered, scope: bytes) -> Prompt:
        walk = _Walk(rendered.texts, [self._ids[text] for text in rendered.controls], scope)
        walk.go(self._memory, self.vocabulary.bytes)
        wanted = {piece for piece in walk.parts if isinstance(piece, tuple)}
        found = {piece: self._encoder.known(*piece) for piece in wanted}
        missing = [piece for piece, ids in found.items() if ids is None]
        if sum(MESSAGE + len(text) for text, _ in missing) <= INLINE:
            encoded = [self._encoder.encode(*piece) for piece in missing]
        else:
            encoded = await anyio.to_thread.run_sync(
                lambda: [self._encoder.encode(*piece) for piece in missing]
            )
        for (text, first), ids in zip(missing, encoded, strict=True):
            self._encoder.keep(text, first, ids)
            found[text, first] = ids
        return self._assembled(walk, found, scope)

    def _assembled(
        self, walk: _Walk, found: Mapping[tuple[str, bool], array[int] | None], scope: bytes
    ) -> Prompt:
        ids: list[int] = []
        if self._bos and (not walk.controls or walk.texts[0] or walk.controls[0] != self._bos[0]):
            ids.extend(self._bos)
        tail = 0
        for number, part in enumerate(walk.parts):
            if number == walk.tail_part:
                tail = len(ids)
            match part:
                case int():
                    ids.append(part)
                case tuple():
                    piece = found[part]
                    assert piece is not None, "a piece was not encoded"
                    ids.extend(piece)
                case _:
                    ids.extend(part)
        return Prompt(ids, walk.key, walk.tail_texts, walk.tail_controls, tail, scope)


def _style(layout: Format) -> Style:
    """How a layout writes arguments."""
    match layout:
        case Tagged():
            return BY_JSON
        case Pythonic():
            return BY_PYTHON
        case _:
            return PLAIN


def _note(shown: Shown, layout: str, *, takes_tools: bool) -> str:
    """Which template shows tools, and what it leaves out."""
    if not takes_tools:
        return f"{MODELS_OWN} takes no tools: requests with tools use the layout of {layout}"
    gone = [
        what
        for what, there in (("calls in history", shown.calls), ("tools' results", shown.results))
        if there is False
    ]
    note = "tools are shown by the model's own chat template"
    if gone:
        note += f", which leaves out {' and '.join(gone)}"
    if shown.parallel is False:
        note += ", which shows one call a message: parallel calls are off"
    return note


class _Walk:
    """A rendered prompt, piece by piece: what is known as sampled ids, and what must be encoded."""

    def __init__(self, texts: Sequence[str], controls: Sequence[int], scope: bytes) -> None:
        self.texts = texts
        self.controls = controls
        #: A control token's id; (text, opens the prompt) to encode; or ids that were sampled.
        self.parts: list[int | tuple[str, bool] | array[int]] = []
        self.tail_part = 0  # where the tail begins in `parts`
        self.tail_texts: tuple[str, ...] = ()
        self.tail_controls: tuple[int, ...] = ()
        self.key = b""
        self._trail = Trail(scope)

    def go(self, memory: Memory, table: Sequence[bytes]) -> None:
        """Fill the parts, from the start to the end.  `table`: the bytes of each id."""
        at = 0
        while True:
            self.key = self._trail.key
            self.tail_part = len(self.parts)
            end, rest, known = at, self.texts[at], False
            if len(memory):
                end, rest, known = self._continued(memory, table, at)
            self.parts.append((rest, end == 0 and not known))
            if end == len(self.controls):
                break
            for passed in range(at, end + 1):
                self._trail.pass_by(self.texts[passed], self.controls[passed])
            self.parts.append(self.controls[end])
            at = end + 1
        self.tail_texts = tuple(self.texts[at:])
        self.tail_controls = tuple(self.controls[at:])

    def _continued(
        self, memory: Memory, table: Sequence[bytes], at: int
    ) -> tuple[int, str, bool]:
        """Add what was sampled from piece `at` on: the piece that it ends in, what is left of that
        one, and whether there was something."""
        texts, controls = self.texts, self.controls
        segment = memory.find(self.key, texts, controls, at)
        if segment is not None:
            self.parts.append(segment.ids)
            end = at + len(segment.controls)
            return end, segment.after(texts, controls, at) or "", True
        near = memory.nearest(self.key, texts, controls, at)
        if near is None:
            return at, texts[at], False
        segment, count = near
        before, piece = segment.piece(count)
        end = at + count
        kept, rest = _common(piece, texts[end], table)
        self.parts.append(before + piece[:kept])
        return end, rest, True


def _common(ids: Sequence[int], text: str, table: Sequence[bytes]) -> tuple[int, str]:
    """How many of the ids the text begins with, and the text behind them."""
    raw = text.encode("utf-8", "surrogatepass")
    at = kept = end = 0
    for number, id in enumerate(ids, 1):
        spelled = table[id] if id < len(table) else b""
        if not spelled or not raw.startswith(spelled, at):
            break
        at += len(spelled)
        if at == len(raw) or raw[at] & 0xC0 != 0x80:  # between code points
            kept, end = number, at
    return kept, raw[end:].decode("utf-8", "surrogatepass")
