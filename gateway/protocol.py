"""The wire's types: requests with their ranges, and replies.  Holds no rules between fields.

validate.py decodes and checks them.  Unknown fields are ignored.  `tools` and schemas stay raw,
so that equal ones are parsed and compiled once.  Stream chunks are sse.py's.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

CHOICES = 8  # n
MESSAGES = 4096
NULL = msgspec.Raw(b"null")

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(Struct, frozen=True):
    """`stream_options`; obfuscation is accepted and never sent."""

    include_usage: bool | None = None


class Speculation(Struct, frozen=True):
    """`speculation`: who may draft tokens ahead, and how many a step; never changes an answer."""

    mode: Annotated[str, Meta(max_length=32)] = "auto"  # or off, or a source that the server has
    max: Annotated[int, Meta(ge=0, le=64)] | None = None


class Sampled(Struct, frozen=True, kw_only=True):
    """What chat and text completions share."""

    model: str
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # 0 and -1 = off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Int64 | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES)] | None = None
    stop: str | list[str] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def choices(self) -> int:
        """`n`, 1 when absent."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


class Part(Struct, frozen=True):
    """One part of a message's content; only text can be served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Function(Struct, frozen=True):
    """The function of a call in the history."""

    name: str
    arguments: str = ""


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call that an assistant message made."""

    id: str
    type: Literal["function"] = "function"
    function: Function


class Message(Struct, frozen=True):
    """One message; developer is system, function is tool."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as some clients name it

    @property
    def thoughts(self) -> str:
        """What an assistant message thought before it spoke."""
        return (self.reasoning_content or self.reasoning or "") if self.role == "assistant" else ""

    @property
    def text(self) -> str:
        """The content as one string; parts are joined as they are."""
        if isinstance(self.content, list):
            return "".join(part.text or part.refusal or "" for part in self.content)
        return self.content or ""


class Prediction(Struct, frozen=True):
    """`prediction`: what the answer will mostly be, for edits; served as drafts."""

    type: Literal["content"]
    content: str | list[Part]

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content)


class ChatRequest(Sampled, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES)]
    tools: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
    parallel_tool_calls: bool | None = None
    tool_overflow: Literal["close", "cut"] | None = None
    response_format: msgspec.Raw = NULL
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    functions: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
    modalities: list[str] | None = None
    audio: msgspec.Raw = NULL
    prediction: Prediction | None = None
    web_search_options: msgspec.Raw = NULL
    moderation: msgspec.Raw = NULL

    @property
    def limit(self) -> int | None:
        """The most tokens to generate; None = what the context leaves."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def best(self) -> int:
        """Logprobs as the engine counts them: -1 = none, k = the sampled one's and the k best."""
        return (self.top_logprobs or 0) if self.logprobs else -1


class CompletionRequest(Sampled, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None


class PromptDetails(Struct, frozen=True):
    """Where the prompt's tokens came from."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """What the generated tokens were; predictions are predicted outputs, never our own drafts."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Speculated(Struct, frozen=True):
    """`usage.speculation`: draft tokens that were verified, and of them those that were right."""

    drafted: int
    accepted: int
    sources: dict[str, dict[str, int]]


class Usage(Struct, frozen=True):
    """Tokens of a request; completion tokens are the delivered ones, of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()
    completion_tokens_details: OutputDetails = OutputDetails()
    speculation: Speculated | UnsetType = UNSET  # only for requests with that field


class TopLogprob(Struct, frozen=True):
    """One candidate for a token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    """One delivered token, with the best candidates for its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(Struct, frozen=True):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(Struct, frozen=True):
    """`logprobs` of a text completion's choice: four lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters from the start of the choice's text


class ReplyMessage(Struct, frozen=True, kw_only=True):
    """An assistant message; `reasoning_content` and `tool_calls` are absent when there are none."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One answer."""

    index: int
    message: ReplyMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatReply(Struct, frozen=True, kw_only=True):
    """The body of an unstreamed chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int  # Unix seconds
    model: str
    system_fingerprint: None = None
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(Struct, frozen=True):
    """One continued text."""

    index: int
    text: str
    finish_reason: str
    logprobs: TextLogprobs | None = None


class TextReply(Struct, frozen=True, kw_only=True):
    """The body of an unstreamed text completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int  # Unix seconds
    model: str
    system_fingerprint: None = None
    choices: list[TextChoice]
    usage: Usage
