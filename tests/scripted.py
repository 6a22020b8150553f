"""A scripted engine behind the Link protocol, and a byte tokenizer, for tests.  Runs no model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.messages import (
    Admitted,
    Failed,
    Hello,
    Out,
    Pause,
    Refused,
    Resume,
    Stats,
    Step,
    Submit,
)
from gateway.link import EngineLost, Mailbox, Mailboxes

EOS = 258
BOS = 257


def byte_tokenizer_json() -> str:
    """A `tokenizers` JSON: a token a byte, then <|endoftext|>, <|im_start|>, <|im_end|>."""
    letters = _byte_letters()
    vocab = {letters[b]: b for b in range(256)}
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    added = [
        {
            "id": 256 + i, "content": text, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": True,
        }
        for i, text in enumerate(special)
    ]
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    }
    return json.dumps(
        {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                "ignore_merges": False, "vocab": vocab, "merges": [],
            },
        }
    )


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in shown}
    hidden = 0
    for b in range(256):
        if b not in letters:
            letters[b] = chr(256 + hidden)
            hidden += 1
    return letters


@dataclass
class Script:
    """What the scripted engine says to one request: token batches, then a finish."""

    batches: list[list[int]]
    finish: str = "stop"
    stopped: bool = True  # the last token is EOS
    delay_s: float = 0.0  # before each batch
    before_s: float = 0.0  # before the first (prefill)
    cached: int = 0
    refuse: Refused | None = None
    fail_after: int | None = None  # batches sent before Failed

    @classmethod
    def say(cls, text: str, group: int = 4, **kw) -> Script:
        """`text` as UTF-8 bytes in groups of `group` tokens, then EOS."""
        ids = [*text.encode(), EOS]
        return cls([ids[i : i + group] for i in range(0, len(ids), group)], **kw)


@dataclass
class ScriptedLink:
    """A Link whose engine follows `script(submit)`; records what it was sent."""

    script: Callable[[Submit], Script]
    hello: Hello | None = field(
        default_factory=lambda: Hello(1, "scripted", 259, 4096, 64, 1024, [EOS], "test")
    )
    restarts: int = 0
    submits: list[Submit] = field(default_factory=list)
    notes: list[object] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)  # ids closed while a choice still ran
    tasks: dict[str, asyncio.Task] = field(default_factory=dict)
    boxes: Mailboxes = field(default_factory=Mailboxes)
    beat: float = field(default_factory=time.monotonic)
    paused: set[str] = field(default_factory=set)  # ids; their scripts stand still

    @property
    def stats(self) -> Stats:
        return Stats(running=len(self.tasks), blocks_total=1024)

    @property
    def stats_age_s(self) -> float:
        return time.monotonic() - self.beat if self.hello is None else 0.0

    async def start(self) -> None:
        pass

    def submit(self, submit: Submit) -> Mailbox:
        if self.hello is None:
            raise EngineLost("no engine")
        self.submits.append(submit)
        box = self.boxes.open(submit)
        self._begin(submit)
        return box

    def _begin(self, submit: Submit) -> None:
        task = asyncio.get_running_loop().create_task(self._play(submit))
        self.tasks[submit.id] = task

        def ended(_: object) -> None:
            if self.tasks.get(submit.id) is task:
                del self.tasks[submit.id]

        task.add_done_callback(ended)

    async def _play(self, submit: Submit) -> None:
        script = self.script(submit)
        if script.refuse:
            self.boxes.deliver([Refused(submit.id, script.refuse.code, script.refuse.message,
                                        script.refuse.param, script.refuse.status)])
            return
        self.boxes.deliver([Admitted(submit.id, script.cached, 0)])
        await asyncio.sleep(script.before_s)
        for number, batch in enumerate(script.batches):
            await asyncio.sleep(script.delay_s)
            while submit.id in self.paused:  # noqa: ASYNC110 a set that tests can look into
                await asyncio.sleep(0.001)
            if script.fail_after == number:
                self.boxes.deliver([Failed(submit.id, "internal", "The engine gave up on this.")])
                return
            last = number == len(script.batches) - 1
            outs = [
                Out(submit.id, index, batch, finish=script.finish if last else "",
                    stopped=script.stopped and last, cached=script.cached)
                for index in range(submit.n)
            ]
            self.boxes.deliver([Step(number, outs)])

    def send(self, message: object) -> None:
        self.notes.append(message)
        if isinstance(message, Pause):
            self.paused.add(message.id)
        elif isinstance(message, Resume):
            self.paused.discard(message.id)

    def close(self, mailbox: Mailbox) -> None:
        if self.boxes.close(mailbox):
            self.closed.append(mailbox.submit.id)
        self.paused.discard(mailbox.submit.id)
        if task := self.tasks.pop(mailbox.submit.id, None):
            task.cancel()

    def die(self) -> None:
        """The engine is gone: every open mailbox ends."""
        self.hello = None
        for task in list(self.tasks.values()):
            task.cancel()
        for box in self.boxes.open_boxes():
            box.fail(EngineLost("the engine died"))

    def restart(self) -> None:
        """The engine dies and is back at once: what was shown to nobody begins anew, but once."""
        for task in list(self.tasks.values()):
            task.cancel()
        self.tasks.clear()
        self.paused.clear()
        self.restarts += 1
        for box in self.boxes.running():
            if box.started or box.lives:
                box.fail(EngineLost("the engine died"))
            else:
                self.boxes.rewind(box)
                self._begin(box.submit)

    async def stop(self) -> None:
        for task in list(self.tasks.values()):
            task.cancel()


def words(texts: Iterable[str]) -> list[list[int]]:
    """Each text as one batch of byte tokens."""
    return [list(text.encode()) for text in texts]
