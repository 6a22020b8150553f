"""POST /v1/chat/completions, top to bottom.  Frames are sse.py's, the engine's side is turn.py's.

body -> request -> session -> plan -> prompt -> place in the queue -> engine -> stream or body
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.messages import Submit
from gateway import drafts, limits, sessions
from gateway.choices import Choice, Said
from gateway.errors import ModelNotFound
from gateway.events import CallArgs, CallStart, Reasoning, Text
from gateway.headers import deadline_of, headers_of
from gateway.protocol import (
    ChatChoice,
    ChatLogprobs,
    ChatReply,
    ChatRequest,
    Function,
    ReplyMessage,
    ToolCall,
)
from gateway.sse import ChatFrames
from gateway.stream import Stream, admitted, gathered
from gateway.tools.thinking import behind, scanner_of
from gateway.turn import Part, Turn
from gateway.validate import chat_request, check_one_call, sampling

if TYPE_CHECKING:
    from gateway.sessions import Session
    from gateway.state import Gateway
    from gateway.tools.choice import ToolPlan


async def create(request: Request) -> Response:
    """Answer a conversation, streamed or as one body; raise ApiError before the 200."""
    begin = time.monotonic()
    gateway: Gateway = request.app.state.gateway
    gateway.admission.check_room()  # a full server refuses at once, and again before it renders
    asked = chat_request(await limits.read_body(request))
    if asked.model != gateway.model:
        raise ModelNotFound(gateway.model)
    # The next turn must be able to show what this one calls.
    parallel = asked.parallel_tool_calls
    if one_call := gateway.prompts.one_call:
        check_one_call(asked.messages)
        asked = msgspec.structs.replace(asked, parallel_tool_calls=False)
    gateway.check_ready()
    asking = _Asking(gateway, request, asked, begin, new_id())
    gateway.admission.check_room()
    plan = await gateway.prompts.plans.of(asked)
    turn = await asking.turn(plan)
    if (nobody := await admitted(turn, request)) is not None:
        return nobody
    headers = headers_of(turn, asking.session, turn.usage().prompt_tokens)
    if plan.schema_header:
        headers["x-slipstream-schema"] = plan.schema_header
    if one_call and plan.tools and parallel is not False:
        headers["x-slipstream-parallel"] = "off; reason=chat-template"
    if asked.stream:
        frames = ChatFrames(
            asking.id, asking.created, gateway.model,
            choices=asked.choices, include_usage=asked.include_usage,
        )  # fmt: skip
        return Stream(turn, frames, gateway.config, headers)
    said = await gathered(turn)
    if isinstance(said, Response):
        return said
    if any(one.closed_early for choice in said for one in choice):
        headers["x-slipstream-call"] = "closed-early"
    reply = ChatReply(
        id=asking.id,
        created=asking.created,
        model=gateway.model,
        choices=[answer(index, one, bool(asked.logprobs)) for index, one in enumerate(said)],
        usage=turn.usage(),
    )
    return Response(msgspec.json.encode(reply), headers=headers, media_type="application/json")


def new_id() -> str:
    """A completion's id; replaced in tests that compare bytes."""
    return "chatcmpl-" + secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class _Asking:
    """A chat request on its way to the engine."""

    gateway: Gateway
    request: Request
    asked: ChatRequest
    begin: float  # monotonic seconds at arrival
    id: str

    @property
    def created(self) -> int:
        """Unix seconds of arrival."""
        return int(time.time() - (time.monotonic() - self.begin))

    @property
    def session(self) -> Session:
        """Which session the request names."""
        asked = self.asked
        return sessions.key_of(
            self.request.headers,
            asked.prompt_cache_key,
            sessions.session_of_user((asked.metadata or {}).get("user_id")),
            self.request.scope["slipstream.principal"],
            self.gateway.model,
        )

    async def turn(self, plan: ToolPlan) -> Turn:
        """Render, check the context, take a place in the queue; raise ApiError."""
        gateway, asked, session = self.gateway, self.asked, self.session
        namespace = sessions.namespace(
            self.request.scope["slipstream.principal"],
            gateway.config.cache_scope,
            session,
            asked.cache_salt,
        )
        prompt = await gateway.prompts.chat(
            asked.messages, plan.tools, scope=namespace, extra=asked.chat_template_kwargs
        )
        gateway.check_ready()  # the engine may have gone while the prompt was rendered
        hello = gateway.link.hello
        assert hello is not None, "check_ready let a request through without an engine"
        layout = gateway.prompts.format
        inside = gateway.prompts.ends_inside_thought(prompt)
        room = gateway.prompts.room(prompt, asked.limit, hello.max_len)
        expected = "" if asked.prediction is None else asked.prediction.text
        submit = Submit(
            id=self.id,
            prompt=prompt.ids,
            max_tokens=room,
            sampling=sampling(asked, hello.vocab, asked.best, gateway.defaults),
            n=asked.choices,
            stop_ids=[] if asked.ignore_eos else hello.stop_ids,
            grammar=behind(plan.grammar) if inside else plan.grammar,
            namespace=namespace,
            session=session.key,
            priority=asked.priority or 0,
            deadline_s=deadline_of(self.request.headers, self.begin),
            overflow=asked.tool_overflow or "close",
            predicted=await gateway.prompts.predicted(expected, room),
            **drafts.fields(asked.speculation, hello),
        )
        choices = [
            Choice(
                index,
                gateway.prompts.vocabulary,
                scanner=scanner_of(layout, plan.checked, inside=inside) if plan.scan else None,
                stand_ins=layout.stand_ins if plan.scan else None,
                stops=asked.stops,
                named=plan.named,
                framed=plan.scan and layout.framed,
                names=frozenset(tool.name for tool in plan.checked),
            )
            for index in range(asked.choices)
        ]
        return Turn(
            gateway,
            [Part(prompt, submit)],
            choices,
            session,
            request_id=self.request.scope["slipstream.request_id"],
            begin=self.begin,
            plan=plan,
            tells_drafts=asked.speculation is not None,
        )


def answer(index: int, said: Sequence[Said], with_logprobs: bool) -> ChatChoice:
    """What a stream of the same events adds up to."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[CallStart, list[str]]] = []
    finish = ""
    for event in (event for one in said for event in one.events):
        match event:
            case Text(text=text):
                texts.append(text)
            case Reasoning(text=text):
                thoughts.append(text)
            case CallStart():
                calls.append((event, []))
            case CallArgs(text=text):
                calls[-1][1].append(text)
            case _:
                finish = getattr(event, "reason", finish)
    content = "".join(texts)
    sent = [
        ToolCall(id=start.id, function=Function(start.name, "".join(pieces)))
        for start, pieces in calls
    ]
    message = ReplyMessage(
        content=content if content or not (calls or thoughts) else None,
        reasoning_content="".join(thoughts) if thoughts else msgspec.UNSET,
        tool_calls=sent or msgspec.UNSET,
    )
    logprobs = ChatLogprobs([entry for one in said for entry in one.logprobs])
    return ChatChoice(
        index=index,
        message=message,
        finish_reason=finish,
        logprobs=logprobs if with_logprobs else None,
    )
