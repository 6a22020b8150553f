"""Every layout with real vocabularies: reading, grammar, endings, history.  Loads no model.

    python -m tests.bench.check_vocabularies FOLDER --outputs 20

FOLDER holds `tokenizer.json` files under any names.  Each is taken as it is, and once more with the
markers of all layouts as control tokens.  A row tells of one layout there:

    markers  how many of them are control tokens, added tokens that are text, or only text
    read     random outputs, in the tokenizer's own tokens, read back at every cut
    grammar  the same outputs taken whole; mutants of the example refused, or valid calls
    endings  outputs of hostile samplers, closed and valid inside of as many tokens as the shortest
             takes, and up to 60 more
    history  the next prompt starts with the ids of this turn; of layouts whose markers are there
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path

import jsonschema
from tokenizers import Tokenizer

from engine.grammar.closing import Closing
from engine.grammar.matcher import Compiler
from engine.messages import Grammar
from gateway.prompt import Prompts
from gateway.protocol import Function, Message, ToolCall
from gateway.text import Detokenizer, Vocabulary
from gateway.tokens import without
from gateway.tools import FORMATS, load
from tests.calls import Dialect, takes
from tests.hostile import LIKES, Hostile, write
from tests.outputs import TOOLS, Saying, merged, says
from tests.prompting import chat, prompts, user

ENDS = ("<|im_end|>", "<|eot_id|>", "<|return|>", "<｜end▁of▁sentence｜>", "</s>", "<|endoftext|>")
MARKERS = sorted({marker for name in FORMATS for marker in load(name).markers})
#: An answer may begin with a space that counts; a marker holds the letter that means one.
NO_SENTENCE_PIECE = ("harmony", "deepseek", "deepseek31")
MUTANTS = 200


class Words:
    """One vocabulary and what can be done with it."""

    def __init__(self, tokenizer_json: str) -> None:
        self.json = tokenizer_json
        self.vocabulary = Vocabulary(tokenizer_json)
        added = {text: id for id, text in self.vocabulary.added.items()}
        self.added = added
        shown = Tokenizer.from_str(tokenizer_json)
        if any(shown.token_to_id(text) != id for text, id in added.items()):
            raise SystemExit("the added tokens have other ids than the file says: it is damaged")
        self.stop = next((added[one] for one in ENDS if one in added), -1)
        if self.stop < 0:
            raise SystemExit(f"no end of a turn among the added tokens; known: {', '.join(ENDS)}")
        self.compiler = Compiler(tokenizer_json, len(self.vocabulary), [self.stop])

    @cached_property
    def hostile(self) -> Hostile:
        return Hostile(self.compiler.vocabulary)

    @cached_property
    def _encoder(self) -> Tokenizer:
        """Without control tokens, and without the space that SentencePiece begins a text with: no
        call begins with one."""
        spec = without(json.loads(self.json), self.vocabulary.specials().values())
        if spec.get("normalizer"):
            steps = spec["normalizer"].get("normalizers", [])
            spec["normalizer"]["normalizers"] = [one for one in steps if one["type"] != "Prepend"]
        return Tokenizer.from_str(json.dumps(spec))

    def encode(self, said: Dialect, seen: str) -> list[int]:
        """What a model samples for a text that a scanner sees: canonical ids between controls."""
        letters = {letter: id for id, letter in said.fmt.stand_ins.items()}
        ids, text = list[int](), ""
        for letter in [*seen, ""]:
            if letter and letter not in letters:
                text += letter
                continue
            if text:
                ids += self._encoder.encode(text, add_special_tokens=False).ids
            text = ""
            ids += [letters[letter]] if letter else []
        return ids

    def reader(self, said: Dialect) -> Detokenizer:
        return Detokenizer(self.vocabulary, said.fmt.stand_ins)

    def dialect(self, name: str) -> Dialect:
        fmt = load(name)
        ids = {one: id for one, id in self.vocabulary.specials().items() if one in fmt.markers}
        return Dialect(fmt.bound(ids), self.json, ids)


def grafted(tokenizer_json: str) -> str:
    """The tokenizer with every marker of every layout as a control token."""
    spec = json.loads(tokenizer_json)
    there = {token["content"]: token for token in spec["added_tokens"]}
    vocab = spec["model"]["vocab"]
    next_id = 1 + max(*vocab.values(), *(token["id"] for token in there.values()))
    for marker in MARKERS:
        if marker in there:
            there[marker]["special"] = True
            continue
        spec["added_tokens"].append(
            {"id": next_id, "content": marker, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
        )  # fmt: skip
        next_id += 1
    return json.dumps(spec, ensure_ascii=False)


def read(words: Words, said: Dialect, count: int) -> str:
    """Outputs in the tokenizer's own tokens, read back at every cut, and taken by the grammar."""
    saying, cuts, taken = Saying(said, said, strict=True), 0, 0
    lark = said.fmt.grammar(TOOLS, "auto", True)
    for seen, wanted in saying.outputs("vocabularies", count, 8):
        if not wanted:
            continue
        tokens = words.encode(said, seen)
        reader, scanner, events = words.reader(said), said.fmt.scanner(TOOLS), []
        texts = [reader.push([token]) for token in tokens] + [reader.close()]
        assert "".join(texts) == seen, f"decoded as {''.join(texts)!r}: {seen!r}"
        want = wanted if saying.verbatim else [
            [one[0], json.loads(one[1])] if isinstance(one, list) else one for one in wanted
        ]  # fmt: skip
        for at, text in enumerate(texts, 1):
            events += scanner.push(text)
            rest = copy(scanner)
            tail = [*rest.push("".join(texts[at:])), *rest.close()]
            assert says(merged([*events, *tail]), saying.verbatim) == want, (seen, at)
            cuts += 1
        calls = sum(isinstance(one, list) for one in wanted)
        if isinstance(wanted[-1], list) or not (calls or said.framed):
            assert takes(words.compiler, lark, tokens), f"refused by the grammar: {seen!r}"
            taken += 1
    return f"{cuts} cuts, {taken} taken"


def grammar(words: Words, said: Dialect, count: int) -> str:
    """The example is taken; a mutant of its tokens is refused, or is a valid call."""
    lark, rng = said.fmt.grammar(TOOLS[:1], "named", True), random.Random(said.fmt.name)
    tokens, fine = words.encode(said, said.seen(said.fmt.example)), 0
    assert takes(words.compiler, lark, tokens), "its own example is refused"
    for _ in range(MUTANTS):
        at, other = rng.randrange(len(tokens)), rng.randrange(len(words.vocabulary))
        mutant = tokens[:at] + rng.choice([[], [other], [tokens[at]] * 2]) + tokens[at + 1 :]
        if words.stop not in mutant and takes(words.compiler, lark, mutant):
            validated(words, said, mutant, calls=1)
            fine += 1
    return f"{MUTANTS - fine} refused, {fine} valid"


def endings(words: Words, said: Dialect, count: int) -> str:
    """Outputs of hostile samplers within a few tokens are calls that are closed and valid."""
    rng, written = random.Random(said.fmt.name), 0
    compiled = words.compiler.compile(Grammar(said.fmt.grammar(TOOLS, "required", True), "tools"))
    shortest = len(compiled.planner.start_plan or [])
    assert not Closing(compiled.planner, compiled.start()).admit(shortest - 1)
    for budget in range(shortest, shortest + 61, 6):
        for sampler in rng.sample(list(LIKES), 3):
            state = compiled.start()
            closing = Closing(compiled.planner, state)
            assert closing.admit(budget)
            out = write(closing, state, budget, lambda: words.hostile.draw(sampler, state, rng))
            assert state.accepting and len(out) <= budget
            validated(words, said, out, calls=-1)
            written += 1
    return f"{written} valid, the shortest {shortest}"


def validated(words: Words, said: Dialect, tokens: Sequence[int], calls: int) -> None:
    """The tokens are nothing but valid calls (so many, or -1: at least one)."""
    reader, scanner = words.reader(said), said.fmt.scanner(TOOLS)
    events = scanner.push(reader.push(tokens) + reader.close()) + scanner.close()
    found = [one for one in says(merged(events), False) if isinstance(one, list)]
    assert len(found) == calls if calls >= 0 else found, f"{len(found)} calls"
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for name, arguments in found:
        jsonschema.validate(arguments, dict(schemas[name]))


def history(words: Words, said: Dialect, count: int) -> str:
    """The next prompt starts with this one's ids and with what was sampled."""
    if not any(marker in words.added for marker in said.fmt.markers):
        return "-"
    made: Prompts = prompts(words.json, None, format=load(said.fmt.name), stop_ids=[words.stop])
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    calls = [("add", '{"a": 1}'), ("add", '{"a": -7}')]
    turns, before = [user("one é")], list[int]()
    for turn in range(3):
        prompt = chat(made, turns, tools, scope=b"check")
        assert prompt.ids[: len(before)] == before, f"turn {turn} begins with other ids"
        sampled = words.encode(said, "x" + said.written(calls))[1:] if turn else (
            words.encode(said, said.written(calls)))  # fmt: skip
        before = [*prompt.ids, *sampled]
        made.remember(prompt, sampled, calls=calls)
        sent = [ToolCall(id=f"functions.add:{at}", function=Function(*call))
                for at, call in enumerate(calls)]  # fmt: skip
        turns += [Message("assistant", None, tool_calls=sent), user("more")]
    return f"{len(before)} ids"


CHECKS: Sequence[Callable[[Words, Dialect, int], str]] = (read, grammar, endings, history)


def row(words: Words, name: str, count: int) -> tuple[list[str], bool]:
    """One layout's cells, and whether all is well."""
    said = words.dialect(name)
    markers = said.fmt.markers
    control = sum(marker in said.ids for marker in markers)
    text = sum(marker in words.added for marker in markers) - control
    cells, fine = [f"{control}/{text}/{len(markers) - control - text}"], True
    for check in CHECKS:
        try:
            cells.append(check(words, said, count))
        except Exception as error:
            cells.append(f"FAILED: {type(error).__name__}: {error}"[:300])
            fine = False
    return cells, fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--outputs", type=int, default=20, help="of each layout and vocabulary")
    parser.add_argument("--layouts", default=",".join(FORMATS), help="separated by commas")
    parser.add_argument("--files", default="*.json", help="which of the folder's files")
    args = parser.parse_args()
    failed, paths = 0, sorted(args.folder.glob(args.files))
    if not paths:
        raise SystemExit(f"no file {args.files} in {args.folder}: put `tokenizer.json` files there")
    for path in paths:
        for what, text in (("", path.read_text()), (" + markers", grafted(path.read_text()))):
            start = time.monotonic()
            words = Words(text)
            print(f"\n{path.stem}{what}: {len(words.vocabulary)} tokens", flush=True)
            for name in args.layouts.split(","):
                if words.vocabulary.strip_first and name in NO_SENTENCE_PIECE:
                    continue
                cells, fine = row(words, name, args.outputs)
                failed += not fine
                print(f"  {name:12}" + " | ".join(cells), flush=True)
            print(f"  {time.monotonic() - start:.0f} s")
    print(f"\n{failed} rows failed" if failed else "\nall is well")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
