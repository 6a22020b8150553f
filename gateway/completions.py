"""POST /v1/completions: texts or ids to go on from, one or several.  Streams as chat.py's do.

Choices are numbered prompt by prompt: choice i belongs to prompt i // n.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.messages import Submit
from gateway import drafts, limits, sessions
from gateway.choices import Choice, Said
from gateway.errors import BadRequest, ModelNotFound
from gateway.events import Finish, Text
from gateway.headers import deadline_of, headers_of
from gateway.protocol import CompletionRequest, TextChoice, TextReply
from gateway.sse import TextFrames, text_logprobs
from gateway.stream import Stream, admitted, gathered
from gateway.turn import Part, Turn
from gateway.validate import completion_request, sampling

if TYPE_CHECKING:
    from gateway.prompt import Prompt, Prompts
    from gateway.sessions import Session
    from gateway.state import Gateway

PROMPTS = 64  # of one request
CHOICES = 128  # prompts times n
DEFAULT_TOKENS = 16  # max_tokens, as OpenAI has it


async def create(request: Request) -> Response:
    """Continue one or several texts, streamed or as one body; raise ApiError before the 200."""
    begin = time.monotonic()
    gateway: Gateway = request.app.state.gateway
    gateway.admission.check_room()  # a full server refuses at once, and again before it encodes
    asked = completion_request(await limits.read_body(request))
    if asked.model != gateway.model:
        raise ModelNotFound(gateway.model)
    gateway.check_ready()
    gateway.admission.check_room()
    prompts = await encoded(asked, gateway.prompts)
    id, created = new_id(), int(time.time())
    session = sessions.key_of(
        request.headers,
        asked.prompt_cache_key,
        sessions.session_of_user((asked.metadata or {}).get("user_id")),
        request.scope["slipstream.principal"],
        gateway.model,
    )
    turn = _turn(request, asked, prompts, session, id, begin)
    if (nobody := await admitted(turn, request)) is not None:
        return nobody
    headers = headers_of(turn, session, turn.usage().prompt_tokens)
    echoes = _echoes(asked, prompts, gateway.prompts)
    if asked.stream:
        frames = TextFrames(
            id, created, gateway.model,
            choices=len(turn.choices), include_usage=asked.include_usage,
        )  # fmt: skip
        opening = b"".join(frames.echo(i, echo) for i, echo in enumerate(echoes) if echo)
        return Stream(turn, frames, gateway.config, headers, opening)
    said = await gathered(turn)
    if isinstance(said, Response):
        return said
    choices = [
        answer(index, echoes[index], one, asked.logprobs is not None)
        for index, one in enumerate(said)
    ]
    reply = TextReply(
        id=id, created=created, model=gateway.model, choices=choices, usage=turn.usage()
    )
    return Response(msgspec.json.encode(reply), headers=headers, media_type="application/json")


def new_id() -> str:
    """A completion's id; replaced in tests that compare bytes."""
    return "cmpl-" + secrets.token_hex(12)


async def encoded(asked: CompletionRequest, prompts: Prompts) -> list[Prompt]:
    """Every prompt of the request as ids; raise BadRequest."""
    given = prompts_of(asked.prompt)
    if len(given) > PROMPTS or len(given) * asked.choices > CHOICES:
        raise BadRequest(
            f"One request may hold {PROMPTS} prompts and {CHOICES} choices; this one has "
            f"{len(given)} prompts times n = {asked.choices}. Send several requests.",
            param="prompt",
        )
    if asked.echo and asked.logprobs is not None:
        raise BadRequest(
            "`echo` with `logprobs` is not supported: prompts have no logprobs here. Drop one.",
            param="logprobs",
        )
    out: list[Prompt] = []
    for one in given:
        prompt = await prompts.plain(one) if isinstance(one, str) else prompts.given(one)
        if not prompt.ids:
            raise BadRequest("A prompt is empty. Send at least one token.", param="prompt")
        out.append(prompt)
    return out


def prompts_of(field: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The four shapes of `prompt` as a list; raise BadRequest for an empty or a mixed one."""
    if isinstance(field, str):
        return [field]
    kinds = set(map(type, field))  # one pass: a prompt of ids is long
    if kinds == {int}:
        return [cast("list[int]", field)]
    if kinds == {str} or kinds == {list}:
        return [*cast("list[str | list[int]]", field)]
    raise BadRequest(
        "`prompt` is a string, a list of strings, a list of token ids, or a list of such lists; "
        "not empty and not mixed.",
        param="prompt",
    )


def _turn(
    request: Request,
    asked: CompletionRequest,
    prompts: Sequence[Prompt],
    session: Session,
    id: str,
    begin: float,
) -> Turn:
    gateway: Gateway = request.app.state.gateway
    gateway.check_ready()  # the engine may have gone while the prompts were encoded
    hello = gateway.link.hello
    assert hello is not None, "check_ready let a request through without an engine"
    best = -1 if asked.logprobs is None else asked.logprobs
    sampled = sampling(asked, hello.vocab, best, gateway.defaults)
    principal = request.scope["slipstream.principal"]
    scope = gateway.config.cache_scope
    namespace = sessions.namespace(principal, scope, session, asked.cache_salt)
    deadline = deadline_of(request.headers, begin)
    drafting = drafts.fields(asked.speculation, hello)
    parts = [
        Part(
            prompt,
            Submit(
                id=id if len(prompts) == 1 else f"{id}-{number}",
                prompt=prompt.ids,
                max_tokens=gateway.prompts.room(
                    prompt, asked.max_tokens or DEFAULT_TOKENS, hello.max_len, "prompt"
                ),
                sampling=sampled,
                n=asked.choices,
                stop_ids=[] if asked.ignore_eos else hello.stop_ids,
                namespace=namespace,
                session=session.key,
                priority=asked.priority or 0,
                deadline_s=deadline,
                **drafting,
            ),
        )
        for number, prompt in enumerate(prompts)
    ]
    choices = [
        Choice(index, gateway.prompts.vocabulary, stops=asked.stops)
        for index in range(len(parts) * asked.choices)
    ]
    request_id = request.scope["slipstream.request_id"]
    return Turn(gateway, parts, choices, session, request_id=request_id, begin=begin,
                tells_drafts=asked.speculation is not None)


def _echoes(asked: CompletionRequest, prompts: Sequence[Prompt], shared: Prompts) -> list[str]:
    """The text to show before each choice, empty unless `echo` is on."""
    if not asked.echo:
        return [""] * (len(prompts) * asked.choices)
    given = prompts_of(asked.prompt)
    texts = [one if isinstance(one, str) else shared.text_of(one) for one in given]
    return [text for text in texts for _ in range(asked.choices)]


def answer(index: int, echo: str, said: Sequence[Said], with_logprobs: bool) -> TextChoice:
    """What a stream of the same events adds up to."""
    texts = [echo]
    finish = ""
    for event in (event for one in said for event in one.events):
        match event:
            case Text(text=text):
                texts.append(text)
            case Finish(reason=reason):
                finish = reason
            case _:
                raise TypeError(f"a text completion said {type(event).__name__}")
    tokens = [entry for one in said for entry in one.logprobs]
    return TextChoice(
        index=index,
        text="".join(texts),
        finish_reason=finish,
        logprobs=text_logprobs(tokens) if with_logprobs else None,
    )
