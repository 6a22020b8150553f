"""A small BPE and prompts made with it, for tests of prompts.  Runs no model."""

from __future__ import annotations

from functools import cache

import anyio
import anyio.lowlevel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.prompt import Prompt, Prompts
from gateway.protocol import Message
from gateway.tools import load

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]
END = 2


@cache
def small_bpe() -> str:
    """A byte-level BPE with merges, so that many id sequences spell one text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = [
        CHATML,
        'assistant user system tool_call {"name": "add", "arguments": {"a": 1}} hello',
    ]
    tokenizer.train_from_iterator(corpus * 3, trainer)
    return tokenizer.to_str()


def prompts(
    tokenizer: str | None = None, template: str | None = CHATML, max_len: int = 4096, **more
) -> Prompts:
    return Prompts(
        tokenizer or small_bpe(),
        template,
        max_len=max_len,
        format=more.pop("format", load("hermes")),
        **more,
    )


def chat(made: Prompts, messages: list[Message], tools=(), scope=b"", **more) -> Prompt:
    return anyio.run(lambda: made.chat(messages, tools, scope=scope, **more))


def user(text: str) -> Message:
    return Message("user", text)


def decoded(made: Prompts, ids: list[int]) -> str:
    return Tokenizer.from_str(small_bpe()).decode(ids, skip_special_tokens=False)


def single_bytes(text: str) -> list[int]:
    """The text as one token a byte: almost never the canonical ids."""
    vocab = Tokenizer.from_str(small_bpe()).get_vocab()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    (piece, _), *_ = letters.pre_tokenize_str(text)
    return [vocab[letter] for letter in piece]
