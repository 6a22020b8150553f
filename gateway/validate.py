"""Decode requests and check the rules between their fields.  Defines no types, reads no schema.

Every refusal is a BadRequest whose `param` is the path of the field and whose message says the next
step; no message repeats what a prompt says.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from engine.messages import Sampling
from gateway.arguments import DEPTH, BadArguments, check
from gateway.errors import BadRequest
from gateway.protocol import (
    ChatRequest,
    CompletionRequest,
    Message,
    Part,
    Sampled,
    ToolCall,
)

STOPS = 16
STOP_LENGTH = 1000  # characters of one stop string; longer ones would make matching slow
BIASES = 1024
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Request = TypeVar("Request", bound=Sampled)
_PATH = re.compile(r"^(?P<what>.*) - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`")
_BYTE = re.compile(r"\(byte \d+\)")


@functools.cache
def _decoder(kind: type[Request]) -> msgspec.json.Decoder[Request]:
    return msgspec.json.Decoder(kind)


def chat_request(body: bytes) -> ChatRequest:
    """Decode and check a chat request; raise BadRequest naming the field."""
    request = _decode(body, ChatRequest)
    check_sampled(request)
    check_only_text(request)
    check_history(request.messages)
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest(
            "`top_logprobs` needs `logprobs: true`. Set it, or drop top_logprobs.",
            param="top_logprobs",
        )
    return request


def completion_request(body: bytes) -> CompletionRequest:
    """Decode and check a text completion request; raise BadRequest naming the field."""
    request = _decode(body, CompletionRequest)
    check_sampled(request)
    if request.suffix:
        raise BadRequest(
            "`suffix` is not supported: this model cannot fill in the middle. Drop it.",
            param="suffix",
        )
    if (request.best_of or 1) > 1:
        raise BadRequest(
            "`best_of` above 1 is not supported. Use `n` and choose yourself.", param="best_of"
        )
    return request


def _decode(body: bytes, kind: type[Request]) -> Request:
    try:
        request: Request = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        at = _BYTE.search(str(error))
        raise BadRequest(
            f"The body is not valid JSON{' ' + at[0] if at else ''}. Send one JSON object.",
            code="invalid_json",
        ) from None
    except RecursionError:
        raise BadRequest(
            "The body is nested too deeply. Send JSON with fewer levels.", code="invalid_json"
        ) from None
    return request


def _invalid(message: str) -> BadRequest:
    """A validation message of msgspec as our error: the path becomes `param`."""
    found = _PATH.match(message)
    what, path = (found["what"], found["path"]) if found else (message, "")
    if missing := _MISSING.match(what):
        path = f"{path}.{missing['name']}" if path else missing["name"]
        what = "This field is required but missing"
    if not path:
        return BadRequest(f"{what}. Send one JSON object.", code="invalid_type")
    return BadRequest(f"`{path}`: {what[0].lower()}{what[1:]}.", param=path, code="invalid_value")


def check_sampled(request: Sampled) -> None:
    """The rules between fields that every kind of request shares; raise BadRequest."""
    if not request.model:
        raise BadRequest(
            "`model` is empty. Name the model; GET /v1/models lists it.", param="model"
        )
    if len(request.stops) > STOPS:
        raise BadRequest(
            f"`stop` has {len(request.stops)} strings; at most {STOPS} are allowed.", param="stop"
        )
    for at, stop in enumerate(request.stops):
        if not 1 <= len(stop) <= STOP_LENGTH:
            raise BadRequest(
                f"A stop string must have 1 to {STOP_LENGTH:,} characters; this one has "
                f"{len(stop):,}.",
                param=f"stop[{at}]" if isinstance(request.stop, list) else "stop",
            )


def check_only_text(request: ChatRequest) -> None:
    """Refuse what a text model cannot serve, and the fields that `tools` replaced."""
    for name in ("functions", "function_call"):
        if not is_null(getattr(request, name)):
            raise BadRequest(
                f"`{name}` is deprecated and not supported. Use `tools` and `tool_choice`.",
                param=name,
            )
    for name in ("audio", "web_search_options", "moderation"):
        if not is_null(getattr(request, name)):
            raise BadRequest(f"`{name}` is not supported by this server. Drop it.", param=name)
    if request.modalities not in (None, [], ["text"]):
        raise BadRequest('Only `modalities: ["text"]` is supported.', param="modalities")


def check_history(messages: Sequence[Message]) -> None:
    """Parts are text, calls carry one JSON object, results belong to a call; else BadRequest."""
    called: set[str] = set()
    for at, message in enumerate(messages):
        path = f"messages[{at}]"
        if isinstance(message.content, list):
            _check_parts(message.content, path)
        if message.role == "assistant":
            for number, call in enumerate(message.tool_calls or ()):
                _check_call(call, f"{path}.tool_calls[{number}]")
                called.add(call.id)
        elif message.content is None:
            raise BadRequest(
                f"`{path}.content` is missing. Send a string.", param=f"{path}.content"
            )
        if message.role == "tool":
            _check_result(message, called, path)


def _check_parts(parts: Sequence[Part], path: str) -> None:
    for at, part in enumerate(parts):
        if part.type not in ("text", "refusal"):
            raise BadRequest(
                "This is a text model: only parts of type `text` are accepted, and nothing is "
                "ever fetched. Remove this part or describe it in words.",
                param=f"{path}.content[{at}].type",
            )
        if part.text is None and part.refusal is None:
            raise BadRequest(
                f"This part has no `{part.type}`.", param=f"{path}.content[{at}].{part.type}"
            )


def _check_call(call: ToolCall, path: str) -> None:
    if not TOOL_NAME.fullmatch(call.function.name):
        raise BadRequest(
            f"`{path}.function.name`: a function's name has 1 to 64 letters, digits, `_` or `-`.",
            param=f"{path}.function.name",
        )
    try:
        check(call.function.arguments or "{}")
    except BadArguments:
        raise BadRequest(
            f"`{path}.function.arguments` is not one JSON object, nested at most {DEPTH} deep. "
            "Send the string that the assistant's reply held, or leave this message out.",
            param=f"{path}.function.arguments",
        ) from None


def check_one_call(messages: Sequence[Message]) -> None:
    """For a chat template that shows one call a message; raise BadRequest for a second one."""
    for at, message in enumerate(messages):
        if message.role == "assistant" and len(message.tool_calls or ()) > 1:
            raise BadRequest(
                f"`messages[{at}]` has {len(message.tool_calls or ())} calls, and this model's "
                "chat template shows one a message. Send each in an assistant message of its own, "
                "followed by its result.",
                param=f"messages[{at}].tool_calls",
            )


def _check_result(message: Message, called: set[str], path: str) -> None:
    if not message.tool_call_id:
        raise BadRequest(
            f"`{path}` has role `tool` and needs the `tool_call_id` that it answers.",
            param=f"{path}.tool_call_id",
        )
    if message.tool_call_id not in called:
        raise BadRequest(
            f"`{path}.tool_call_id` belongs to no call of an earlier assistant message. Send that "
            "message with its `tool_calls`, too.",
            param=f"{path}.tool_call_id",
        )


def is_null(raw: msgspec.Raw) -> bool:
    """Whether a raw field is absent or null."""
    return bytes(raw) == b"null"


_PLAIN = Sampling()


def sampling(
    request: Sampled, vocab: int, logprobs: int, defaults: Sampling = _PLAIN
) -> Sampling:
    """How the engine shall sample this request; a seed is minted when it has none.

    `defaults` are the model's own, for what the request leaves out.
    """

    def given(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    seed = secrets.randbits(63) if request.seed is None else request.seed & (2**64 - 1)
    return Sampling(
        temperature=given(request.temperature, defaults.temperature),
        top_p=given(request.top_p, defaults.top_p),
        top_k=max(int(given(request.top_k, defaults.top_k)), 0),
        min_p=given(request.min_p, defaults.min_p),
        seed=seed,
        repetition=given(request.repetition_penalty, defaults.repetition),
        frequency=request.frequency_penalty or 0.0,
        presence=request.presence_penalty or 0.0,
        bias=_bias(request.logit_bias or {}, vocab),
        min_tokens=request.min_tokens or 0,
        logprobs=logprobs,
    )


def _bias(wanted: Mapping[str, float], vocab: int) -> tuple[tuple[int, float], ...]:
    """`logit_bias` with its keys as ids below `vocab`; raise BadRequest."""
    if len(wanted) > BIASES:
        raise BadRequest(
            f"`logit_bias` has {len(wanted):,} entries; at most {BIASES:,} are allowed.",
            param="logit_bias",
        )
    for key in wanted:
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab):
            raise BadRequest(
                f"The keys of `logit_bias` are token ids from 0 to {vocab - 1:,}, as strings.",
                param="logit_bias",
            )
    return tuple((int(key), value) for key, value in wanted.items())
