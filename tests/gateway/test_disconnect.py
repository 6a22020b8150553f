"""Clients that leave, or stop reading, at every point of a request.  Real server and sockets."""

from __future__ import annotations

import json
import socket
import struct
import time

import openai
import pytest

from engine.messages import Pause, Resume, SessionEnd, Submit
from tests.asking import ADD, HERMES, USER, PlayedLink, open_gateway, saying
from tests.auditor import Auditor
from tests.live import Answer, Live, running
from tests.patience import until
from tests.scripted import Script, ScriptedLink

pytestmark = pytest.mark.timed

LONG = "x" * 4000
CALL = HERMES.write([("add", '{"a": 1}')])



def ask(live: Live, path: str, headers: bytes = b"", **fields: object) -> socket.socket:
    """Send a request and return its socket."""
    start = {"prompt": "hi"} if path.endswith("/completions") and "chat" not in path else {
        "messages": [USER]
    }  # fmt: skip
    body = json.dumps({"model": "tiny", **start, **fields}).encode()
    sock = live.connect()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode()[:-2] + headers + b"\r\n" + body)
    return sock


def leave(sock: socket.socket, abruptly: bool) -> None:
    """Close, with FIN or with RST."""
    if abruptly:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


PHASES = {
    "queued": lambda: PlayedLink(lambda _: [], admit_s=30),
    "prefill": lambda: ScriptedLink(lambda _: Script.say("late", before_s=30)),
    "decode": lambda: ScriptedLink(lambda _: Script.say(LONG, 1, delay_s=0.005)),
    "decode in a call": lambda: ScriptedLink(lambda _: Script.say(CALL * 40, 1, delay_s=0.005)),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "body"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_leaves_frees_everything_at_once(phase, stream, path):
    link = PHASES[phase]()
    gateway = open_gateway(link)
    fields = {"tools": [ADD]} if "call" in phase and "chat" in path else {}
    with running(gateway) as live:
        for number, abruptly in enumerate((False, True), 1):
            sock = ask(live, path, stream=stream, **fields)
            until(lambda: len(link.submits) == number)
            if stream and phase.startswith("decode"):
                while b"finish_reason" not in sock.recv(65536):
                    pass
            elif phase != "queued":
                box = next(iter(link.boxes._open.values()))
                until(lambda: box.admitted is not None)
                if phase.startswith("decode"):
                    until(lambda: sum(gateway.metrics._first.counts) == number)
            left = time.monotonic()
            leave(sock, abruptly)
            until(lambda: len(link.closed) == number)
            assert time.monotonic() - left < 1.0
            until(lambda: gateway.admission.open == 0 and gateway.drain.active == 0)
            counted = gateway.metrics._left[phase.split()[0]]
            assert counted == number
    assert not link.tasks


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_client_that_leaves_with_its_last_request_ends_its_session_once(phase):
    link = PHASES[phase]()
    with running(open_gateway(link)) as live:
        sock = ask(live, "/v1/chat/completions", b"X-Session-Id: s\r\nX-Session-End: 1\r\n")
        until(lambda: bool(link.submits))
        sock.close()
        until(lambda: bool(link.notes))
        until(lambda: not link.boxes.open_boxes())
    assert link.notes == [SessionEnd(link.submits[0].session)]


def test_a_client_that_never_reads_is_dropped_after_the_send_timeout():
    link = ScriptedLink(lambda _: Script.say("x" * 8_000_000, 100_000, delay_s=0.001))
    gateway = open_gateway(link, send_timeout_s=0.3)
    with running(gateway) as live:
        sock = ask(live, "/v1/chat/completions", stream=True)
        until(lambda: gateway.drain.active == 1 and bool(link.submits))
        until(lambda: gateway.drain.active == 0 and gateway.admission.open == 0)
        sock.close()


def test_a_client_that_reads_late_pauses_its_request_and_gets_every_word():
    text = "".join(f"{number:07}," for number in range(1_000_000))
    link = ScriptedLink(lambda _: Script.say(text, 20_000))
    with running(open_gateway(link)) as live:
        sock = ask(live, "/v1/chat/completions", stream=True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        until(lambda: bool(link.boxes.open_boxes()))
        (box,) = link.boxes.open_boxes()
        still = 0
        while still < 10:  # until the kernel's own buffers are full, it is resumed now and then
            noted = len(link.notes)
            time.sleep(0.05)
            paused = noted > 0 and isinstance(link.notes[-1], Pause) and noted == len(link.notes)
            still = still + 1 if paused else 0
        assert len(box._outs) == 1
        assert box.waiting_tokens <= 40_000
        raw = bytearray()
        while not raw.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
            raw += sock.recv(1 << 20)
        sock.close()
    body = Answer.of(bytes(raw)).body
    assert Auditor().hear(body).choices[0].content == text
    assert [type(note) for note in link.notes] == [Pause, Resume] * (len(link.notes) // 2)


def test_openais_own_client_reads_a_stream_over_a_real_connection():
    link = saying("Look:\n" + CALL, 3, before_s=0.15)
    with running(open_gateway(link, ping_s=0.05)) as live:
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{live.port}/v1", api_key="x", max_retries=0
        ) as client:
            with client.chat.completions.stream(
                model="tiny", messages=[USER], tools=[ADD], stream_options={"include_usage": True}
            ) as stream:
                final = stream.get_final_completion()
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="tiny", messages=[USER], temperature=9)
    message = final.choices[0].message
    assert message.content == "Look:\n"
    assert message.tool_calls[0].function.arguments == '{"a": 1}'
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage.completion_tokens == len(CALL) + 7
    assert caught.value.param == "temperature"


def test_many_streams_at_once_are_kept_apart():
    def script(submit: Submit) -> Script:
        return Script.say(bytes(submit.prompt[-30:-14]).decode() * 20, 3)

    def prompt(number: int) -> str:
        return f"{number:016}" + "x" * 14

    with running(open_gateway(ScriptedLink(script))) as live:
        socks = {
            number: ask(live, "/v1/completions", prompt=prompt(number), stream=True, max_tokens=500)
            for number in range(40)
        }
        for number, sock in socks.items():
            raw = b""
            while b"[DONE]" not in raw:
                raw += sock.recv(65536)
            said = [
                json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")
            ]
            text = "".join(frame["choices"][0]["text"] for frame in said)
            assert text == f"{number:016}" * 20
            sock.close()
