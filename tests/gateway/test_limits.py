"""Bodies that are no requests, and the bounded queue.  Decodes no chat."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from gateway import errors, limits
from gateway.limits import Admission
from tests.asking import open_gateway, with_client
from tests.live import Live, gateway, running, with_echo
from tests.scripted import Script, ScriptedLink

RAN: list[bytes] = []
LIMIT = 256 * 1024


@pytest.mark.parametrize("when", ["at arrival", "while the body came"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_full_queue_refuses_before_anything_is_read_or_rendered(
    path: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = open_gateway(ScriptedLink(lambda _: Script.say("x")), max_queued_requests=1)
    for name in ("chat", "plain"):
        monkeypatch.setattr(one.prompts, name, lambda *_, **__: pytest.fail("rendered"))
    read = limits.read_body

    async def reading(request: Request) -> bytes:
        assert when != "at arrival", "the body was read"
        one.admission.enter(1)
        return await read(request)

    monkeypatch.setattr(limits, "read_body", reading)
    if when == "at arrival":
        one.admission.enter(1)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    answer = with_client(one, lambda client: client.post(path, json=body))
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
    assert one.admission.open == 1


@pytest.mark.timed
def test_a_refusal_of_a_full_server_takes_less_than_20_ms_whatever_was_sent() -> None:
    one = open_gateway(ScriptedLink(lambda _: Script.say("x")), max_queued_requests=1)
    messages = [{"role": "user", "content": "hello " * 200_000}]
    with one.admission.enter(1), running(one) as live:
        with httpx.Client(base_url=_url(live)) as http:
            http.get("/health")
            times = []
            for _ in range(5):
                start = time.perf_counter()
                answer = http.post(
                    "/v1/chat/completions", json={"model": "tiny", "messages": messages}
                )
                times.append(time.perf_counter() - start)
                assert answer.status_code == 429
    assert min(times) < 0.02, times


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    one = gateway(max_body_bytes=LIMIT)
    with running(one, with_echo(one, RAN)) as live, httpx.Client(base_url=_url(live)) as http:
        yield http


def _url(live: Live) -> str:
    return f"http://127.0.0.1:{live.port}"


def send(client: httpx.Client, body: bytes, kind: str | None = "application/json", **more: str):
    headers = {} if kind is None else {"content-type": kind}
    return client.post("/echo", content=body, headers=headers | more)


# --- bodies -----------------------------------------------------------------------------------

GOOD = b'{"model":"tiny","messages":[{"role":"user","content":"h\\u00e9llo \\ud83d\\ude00"}],"n":1}'
BAD = {
    "empty": b"",
    "white space": b" \r\n\t ",
    "byte order mark": b"\xef\xbb\xbf" + GOOD,
    "UTF-16": GOOD.decode().encode("utf-16"),
    "UTF-16 without mark": GOOD.decode().encode("utf-16-le"),
    "UTF-32": GOOD.decode().encode("utf-32"),
    "Latin-1": '{"a":"é"}'.encode("latin-1"),
    "half a code point": b'{"a":"\xc3"}',
    "overlong": b'{"a":"\xc0\xaf"}',
    "surrogate as UTF-8": b'{"a":"\xed\xa0\x80"}',
    "beyond Unicode": b'{"a":"\xf4\x90\x80\x80"}',
    "lone high surrogate": b'{"a":"\\ud800"}',
    "lone high surrogate inside": b'{"a":"x\\ud800y"}',
    "lone low surrogate": b'{"a":"\\udc00 b"}',
    "two high surrogates": b'{"a":"\\ud800\\ud800"}',
    "bad escape": b'{"a":"\\x"}',
    "short escape": b'{"a":"\\u12"}',
    "raw newline in a string": b'{"a":"b\nc"}',
    "NUL in a string": b'{"a":"b\0c"}',
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":Infinity}',
    "-Infinity": b'{"a":-Infinity}',
    "lone minus": b'{"a":-}',
    "leading zero": b'{"a":01}',
    "leading plus": b'{"a":+1}',
    "no fraction": b'{"a":1.}',
    "no exponent": b'{"a":1e}',
    "hexadecimal": b'{"a":0x1}',
    "trailing comma": b'{"a":1,}',
    "trailing comma in a list": b"[1,]",
    "no colon": b'{"a" 1}',
    "single quotes": b"{'a':1}",
    "bare key": b"{a:1}",
    "comment": b'{"a":1/*x*/}',
    "two values": b"{}{}",
    "text after": b"{} x",
    "capital": b"True",
    "form": b"model=tiny&n=1",
    "multipart": b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\nb\r\n--x--",
    "XML": b"<a/>",
    "Python": b"{'a': None}",
    "100,000 lists": b"[" * 100_000,
    "100,000 lists, closed": b"[" * 100_000 + b"]" * 100_000,
    "30,000 objects": b'{"a":' * 30_000,
    "deep inside an unknown field": b'{"model":"tiny","x":' + b"[" * 100_000 + b"}",
    "binary": bytes(range(256)),
}


def _mutations() -> dict[str, bytes]:
    """GOOD with one byte replaced, cut or doubled, where that is no JSON text any more."""
    chance = random.Random(7)
    found: dict[str, bytes] = {}
    while len(found) < 160:
        at = chance.randrange(len(GOOD))
        new = chance.choice([b"", bytes([chance.randrange(256)]), GOOD[at : at + 1] * 2])
        body = GOOD[:at] + new + GOOD[at + 1 :] if chance.random() < 0.8 else GOOD[:at]
        try:
            json.loads(body.decode()).__str__().encode()
        except ValueError:
            found[f"mutation {len(found)}"] = body
    return found


CORPUS = BAD | _mutations()


@pytest.mark.parametrize("body", CORPUS.values(), ids=CORPUS.keys())
def test_a_body_that_is_no_json_is_a_400_and_reaches_no_endpoint(
    client: httpx.Client, body: bytes
) -> None:
    RAN.clear()
    answer = send(client, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["code"] == "invalid_json"
    assert answer.headers["x-should-retry"] == "false"
    assert RAN == []


def test_the_corpus_holds_two_hundred_bodies() -> None:
    assert len(CORPUS) >= 200


@pytest.mark.parametrize(
    "body",
    [GOOD, b"{}", b"[]", b'"a"', b"1e999", b' {"a":1,"a":2}\n', b"[" * 200 + b"]" * 200,
     '{"a":"é😀\u2028"}'.encode(), b'{"a":"\\ud83d\\ude00"}', b'{"a":"\\u0000"}'],
)  # fmt: skip
def test_a_json_text_arrives_as_it_was_sent(client: httpx.Client, body: bytes) -> None:
    answer = send(client, body)
    assert answer.status_code == 200
    assert answer.content == body


def test_the_offset_of_the_first_bad_byte_is_told() -> None:
    with pytest.raises(errors.BadRequest, match=r"byte 6"):
        limits.check_json(b'{"a":"\xff"}')
    with pytest.raises(errors.BadRequest, match=r"byte 5"):
        limits.check_json(b'{"a":x}')


def test_an_error_never_repeats_what_was_sent() -> None:
    with pytest.raises(errors.BadRequest) as caught:
        limits.check_json(b'{"prompt":"classified" oops}')
    assert "classified" not in caught.value.message and "oops" not in caught.value.message


@settings(max_examples=150)
@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_a_bad_request(body: bytes) -> None:
    try:
        limits.check_json(body)
    except errors.BadRequest:
        return
    json.loads(body.decode())  # what passes, others can read


def test_a_body_in_many_chunks_is_put_together(client: httpx.Client) -> None:
    def parts() -> Iterator[bytes]:
        yield b'{"a":"'
        for _ in range(100):
            yield b"x" * 1000
        yield b'"}'

    answer = client.post("/echo", content=parts(), headers={"content-type": "application/json"})
    assert answer.content == b'{"a":"' + b"x" * 100_000 + b'"}'


def test_the_size_limit_is_exact(client: httpx.Client) -> None:
    fits = b'"' + b"a" * (LIMIT - 2) + b'"'
    assert send(client, fits).status_code == 200
    answer = send(client, fits + b" ")
    assert answer.status_code == 413
    assert f"{LIMIT:,}" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "kind",
    [None, "application/json", "APPLICATION/JSON", "application/json; charset=utf-8",
     'application/json;charset="UTF-8"', "application/problem+json", "application/json; v=1"],
)  # fmt: skip
def test_json_content_types_pass(client: httpx.Client, kind: str | None) -> None:
    assert send(client, b"{}", kind).status_code == 200


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
     "application/jsonx", "json", "text/json+x", "application/json; charset=utf-16",
     "application/octet-stream"],
)  # fmt: skip
def test_other_content_types_are_a_415(client: httpx.Client, kind: str) -> None:
    answer = send(client, b"{}", kind)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"


def test_compressed_bodies_are_a_415(client: httpx.Client) -> None:
    answer = send(client, b"\x1f\x8b\x08", **{"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert send(client, b"{}", **{"content-encoding": "identity"}).status_code == 200


# --- the queue --------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_queue_takes_so_many_requests_and_then_says_when_to_return() -> None:
    queue = Admission(requests=2, tokens=1000, open_requests=10)
    tickets = [queue.enter(10), queue.enter(10)]
    with pytest.raises(errors.QueueFull) as caught:
        queue.enter(10)
    assert caught.value.status == 429 and caught.value.code == "queue_full"
    assert int(caught.value.headers["retry-after"]) >= 1
    assert int(caught.value.headers["retry-after-ms"]) >= 1
    assert (queue.queued, queue.queued_tokens, queue.open) == (2, 20, 2)
    tickets[0].release()
    queue.enter(10)


def test_the_queue_is_bounded_by_prompt_tokens_but_never_locks_a_long_prompt_out() -> None:
    queue = Admission(requests=10, tokens=100, open_requests=10)
    long = queue.enter(5000)
    with pytest.raises(errors.QueueFull, match="100 tokens"):
        queue.enter(1)
    long.started()
    queue.enter(60)
    with pytest.raises(errors.QueueFull):
        queue.enter(41)
    queue.enter(40)


def test_a_started_request_leaves_the_queue_and_stays_open() -> None:
    queue = Admission(requests=1, tokens=100, open_requests=2)
    first = queue.enter(10)
    first.started()
    assert (queue.queued, queue.queued_tokens, queue.open) == (0, 0, 1)
    second = queue.enter(10)
    second.started()
    with pytest.raises(errors.QueueFull, match="open"):
        queue.enter(10)
    first.release()
    queue.enter(10)


def test_started_and_release_may_come_twice_and_in_any_order() -> None:
    queue = Admission(requests=2, tokens=100, open_requests=2)
    for calls in ("sr", "ssrr", "rs", "rrss", "srs"):
        ticket = queue.enter(10)
        for call in calls:
            ticket.started() if call == "s" else ticket.release()
        assert (queue.queued, queue.queued_tokens, queue.open) == (0, 0, 0)
        queue.check()


def test_a_ticket_releases_itself_when_its_block_fails() -> None:
    queue = Admission(requests=1, tokens=100, open_requests=1)
    with pytest.raises(KeyError), queue.enter(10):
        raise KeyError
    assert queue.open == 0
    with queue.enter(10) as ticket:
        ticket.started()
    assert queue.open == 0


def test_the_time_to_return_follows_the_time_in_the_queue() -> None:
    clock = Clock()
    queue = Admission(requests=1, tokens=100, open_requests=100, clock=clock)

    def wait() -> int:
        with queue.enter(1), pytest.raises(errors.QueueFull) as caught:
            queue.enter(1)
        return int(caught.value.headers["retry-after-ms"])

    before = wait()
    for _ in range(40):
        ticket = queue.enter(1)
        clock.now += 8.0
        ticket.started()
        ticket.release()
    assert before < 1000 < 7000 < wait() < 9000


@given(st.lists(st.tuples(st.sampled_from("esr"), st.integers(0, 30)), max_size=60))
def test_the_counts_agree_after_any_course_of_events(course: list[tuple[str, int]]) -> None:
    queue = Admission(requests=4, tokens=60, open_requests=8)
    tickets = []
    for what, number in course:
        if what == "e":
            try:
                tickets.append(queue.enter(number))
            except errors.QueueFull:
                assert queue.queued >= 1 or queue.open >= 8
        elif tickets:
            ticket = tickets[number % len(tickets)]
            ticket.started() if what == "s" else ticket.release()
        queue.check()
        assert queue.queued <= 4 and queue.open <= 8
    for ticket in tickets:
        ticket.release()
    assert (queue.queued, queue.queued_tokens, queue.open) == (0, 0, 0)


def test_a_gateway_admits_only_what_it_can_serve_now() -> None:
    one = gateway(max_queued_requests=1)
    hello, one.link.hello = one.link.hello, None
    with pytest.raises(errors.Loading):
        one.admit(5)
    one.link.hello = hello
    with one.admit(5), pytest.raises(errors.QueueFull):
        one.admit(5)
    one.link.hello = None
    with pytest.raises(errors.Unavailable) as caught:
        one.admit(5)
    assert caught.value.code == "engine_unavailable"
    one.drain.begin()
    with pytest.raises(errors.Draining):
        one.admit(5)

# --- the same corpus, at the real endpoints ---------------------------------------------------

ODD = [b"null", b"1", b'"a"', b"[]", b"[[]]", b"true", b"{}", b'{"model":1}', b'{"messages":{}}',
       b'{"model":"tiny","messages":[]}', b'{"model":"tiny","messages":[null]}',
       b'{"model":"tiny","messages":[{"role":"user"}]}',
       b'{"model":"tiny","messages":[{"role":"user","content":' + b"[" * 300 + b"]" * 300 + b"}]}",
       b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":1e999}',
       b'{"model":"tiny","prompt":[' + b"1," * 9000 + b"1]}"]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_body_makes_an_endpoint_fail(path: str) -> None:
    link = ScriptedLink(lambda _: Script.say("hi"))

    async def use(client: httpx.AsyncClient) -> list[int]:
        headers = {"content-type": "application/json"}
        answers = [
            await client.post(path, content=body, headers=headers)
            for body in [*CORPUS.values(), *ODD]
        ]
        assert all(set(one.json()["error"]) >= {"message", "type", "param", "code"}
                   for one in answers)  # fmt: skip
        return [one.status_code for one in answers]

    assert set(with_client(open_gateway(link), use)) <= {400, 404}
    assert link.submits == []
