"""Which header names the session, and what key and namespace depend on.  Keeps no sessions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from gateway import sessions
from gateway.auth import Keys
from gateway.sessions import Session, key_of, namespace, session_of_user
from tests.asking import open_gateway, post, saying

ALICE = Keys.none(b"a" * 32).anonymous
BOB = Keys.none(b"b" * 32).anonymous


def of(*headers: tuple[str, str], cache_key: str | None = None, user: str | None = None) -> Session:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return key_of(Headers(raw=raw), cache_key, user, ALICE, "tiny")


ORDER = [
    ("x-session-affinity", "v0"), ("x-session-id", "v1"), ("prompt_cache_key", "v2"),
    ("x-claude-code-session-id", "v3"), ("session-id", "v4"), ("thread-id", "v5"),
    ("user_id", "v6"),
]  # fmt: skip


@pytest.mark.parametrize("count", range(1, len(ORDER) + 1))
def test_the_first_present_source_wins_in_the_contracts_order(count: int) -> None:
    present = ORDER[-count:]
    fields = dict(present)
    found = of(
        *((name, value) for name, value in reversed(present) if "_" not in name),
        cache_key=fields.get("prompt_cache_key"),
        user=fields.get("user_id"),
    )
    name, value = present[0]
    assert found == Session(sessions.key(value, ALICE, "tiny"), name, end=False)


def test_without_any_source_there_is_no_session() -> None:
    assert of() == Session(None, "none", end=False)
    assert of(("x-other", "a")) == Session(None, "none", end=False)


@pytest.mark.parametrize("value", ["a", "a" * 256, "ses_01.~!", "  padded  ", "\ttab\t"])
def test_a_visible_ascii_value_counts_after_trimming(value: str) -> None:
    found = of(("x-session-affinity", value))
    assert found.key == sessions.key(value.strip(), ALICE, "tiny") and not found.invalid


@pytest.mark.parametrize("value", ["", " ", "a" * 257, "a b", "caf\xe9", "a\x7f", "a\x01", "\xa0"])
def test_another_value_is_counted_and_ignored_and_the_next_source_is_used(value: str) -> None:
    found = of(("x-session-affinity", value))
    assert found == Session(None, "none", end=False, invalid=True)
    found = of(("x-session-affinity", value), ("x-session-id", "next"))
    assert (found.key, found.source, found.invalid) == (
        sessions.key("next", ALICE, "tiny"), "x-session-id", True,
    )  # fmt: skip
    found = of(cache_key=value)
    assert found == Session(None, "none", end=False, invalid=True)


def test_several_equal_headers_are_one_and_several_different_ones_are_none() -> None:
    header = "x-session-affinity"
    assert of((header, "a"), (header, " a")).key == sessions.key("a", ALICE, "tiny")
    assert of((header, "a"), (header, "b")) == Session(None, "none", end=False, invalid=True)


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ('{"session_id":"s-1","device_id":"d"}', "s-1"),
        (' {"session_id":"s-1"}', "s-1"),
        ('{"session_id":""}', None),
        ('{"session_id":7}', None),
        ('{"other":"s"}', None),
        ("{broken", None),
        ("user-42", None),
        ('"s"', None),
        ("{" * 100_000, None),
        ('{"a":' * 5000, None),
        ('{"session_id":"\ud800"}', "?"),
        ("", None),
        (None, None),
    ],
)
def test_claude_codes_user_id_holds_the_session_as_json(
    user_id: str | None, session: str | None
) -> None:
    assert session_of_user(user_id) == session


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("user_id", "said"),
    [
        ('{"session_id":"s-1","device_id":"d"}', "active; source=user_id"),
        ("user-42", "none"),
        ('{"device_id":"d"}', "none"),
    ],
)
def test_a_request_takes_only_the_session_out_of_its_user_id(
    path: str, user_id: str, said: str
) -> None:
    link = saying("hello")
    answer = post(link, path, metadata={"user_id": user_id})
    assert answer.headers["x-slipstream-session"] == said
    assert (link.submits[0].session is None) == (said == "none")


def test_sessions_of_a_user_id_and_of_a_header_are_one() -> None:
    link = saying("hello")
    gateway = open_gateway(link)
    post(gateway, metadata={"user_id": '{"session_id": "s-1"}'})
    post(gateway, headers={"x-session-affinity": "s-1"})
    assert link.submits[0].session == link.submits[1].session is not None


def test_only_an_explicit_word_ends_the_session() -> None:
    for value, end in [("1", True), ("true", True), (" 1 ", True), ("0", False), ("no", False)]:
        assert of(("x-session-end", value)).end is end


def test_the_key_depends_on_tenant_model_and_value_and_hides_the_value() -> None:
    found = [
        sessions.key(value, who, model)
        for value, who, model in itertools.product("ab", (ALICE, BOB), ("m", "n"))
    ]
    assert len(set(found)) == 8
    assert all(len(one) == 16 and b"a" * 3 not in one for one in found)
    # Lengths are part of the text: a letter that moves from model to value gives another key.
    assert sessions.key("bc", ALICE, "a") != sessions.key("c", ALICE, "ab")


def test_one_tenants_namespace_is_shared_unless_a_session_or_a_salt_narrows_it() -> None:
    one, two, none = of(("x-session-id", "1")), of(("x-session-id", "2")), of()

    def space(session: Session, scope: str = "tenant", salt: str | None = None) -> bytes:
        return namespace(ALICE, scope, session, salt)

    assert space(one) == space(two) == space(none) == space(none, salt="")
    assert namespace(BOB, "tenant", one, None) != space(one)
    assert space(one, salt="x") == space(two, salt="x") != space(one)
    assert space(one, salt="x") != space(one, salt="y")
    assert space(one, "session") == space(one, "session") != space(two, "session")
    assert space(one, "session") != space(one)
    assert space(none, "session") != space(none, "session"), "nothing is shared with strangers"
    assert len(space(one)) == 16


def test_no_salt_of_a_caller_reaches_another_scope_or_tenant() -> None:
    session = of(("x-session-id", "1"))
    assert session.key is not None
    wide = namespace(ALICE, "tenant", session, session.key.decode("latin-1"))
    assert wide != namespace(ALICE, "session", session, None)
    assert namespace(ALICE, "tenant", session, "\ud800")  # even that does not raise


@given(
    st.lists(st.tuples(st.sampled_from([n for n, _ in ORDER if "_" not in n]), st.binary())),
    st.none() | st.text(),
    st.none() | st.text(),
)
def test_no_header_or_field_ever_fails_a_request(
    headers: list[tuple[str, bytes]], cache_key: str | None, user: str | None
) -> None:
    raw = [(name.encode(), value) for name, value in headers]
    found = key_of(Headers(raw=raw), cache_key, session_of_user(user), ALICE, "tiny")
    assert found.key is None or len(found.key) == 16
    assert (found.source == "none") == (found.key is None)
