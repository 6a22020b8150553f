"""Which session a request belongs to: headers and body fields to a 16 byte key.  Keeps no state.

The key steers placement and retention.  It is no isolation boundary (the tenant is), and a strange
value never fails a request: it counts as no session.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers

from gateway.auth import Principal

VALUE_LIMIT = 256  # visible ASCII characters
_BEFORE_BODY = ("x-session-affinity", "x-session-id")
_AFTER_BODY = ("x-claude-code-session-id", "session-id", "thread-id")


class _ClaudeUser(msgspec.Struct):
    session_id: str = ""


_user_decoder = msgspec.json.Decoder(_ClaudeUser)


@dataclass(frozen=True, slots=True)
class Session:
    """What a request says about its session."""

    key: bytes | None  # 16 bytes, tenant-scoped; None = no session
    source: str  # which field gave it, "none" without one; from a fixed list, fit for a label
    end: bool  # the session ends with this request
    invalid: bool = False  # some field held a value that had to be ignored


def key_of(
    headers: Headers,
    cache_key: str | None,
    user_session: str | None,
    principal: Principal,
    model: str,
) -> Session:
    """The session of a request: the first usable value in the contract's order.

    `cache_key` is the body's `prompt_cache_key`; `user_session` is what `session_of_user` found in
    its `metadata.user_id`.  Nothing here raises.
    """
    end = headers.get("x-session-end", "").strip() in ("1", "true")
    offers: list[tuple[str, list[str]]] = [
        *((name, headers.getlist(name)) for name in _BEFORE_BODY),
        ("prompt_cache_key", [] if cache_key is None else [cache_key]),
        *((name, headers.getlist(name)) for name in _AFTER_BODY),
        ("user_id", [] if user_session is None else [user_session]),
    ]
    invalid = False
    for source, values in offers:
        if not values:
            continue
        if value := usable(values):
            return Session(key(value, principal, model), source, end, invalid)
        invalid = True
    return Session(None, "none", end, invalid)


def session_of_user(user_id: str | None) -> str | None:
    """The `session_id` inside a JSON `metadata.user_id`; a plain user id names no session."""
    if not user_id or not user_id.lstrip().startswith("{"):
        return None
    try:
        return _user_decoder.decode(user_id.encode("utf-8", "replace")).session_id or None
    except (msgspec.DecodeError, RecursionError):
        return None


def usable(values: list[str]) -> str | None:
    """The one value that all of `values` agree on after trimming, if it is 1-256 visible ASCII."""
    different = {value.strip() for value in values}
    if len(different) != 1:
        return None
    (value,) = different
    if not 1 <= len(value) <= VALUE_LIMIT or not all("!" <= letter <= "~" for letter in value):
        return None
    return value


def key(value: str, principal: Principal, model: str) -> bytes:
    """16 bytes that stand for `value` within this tenant and model; it cannot be read back."""
    text = b"slipstream-session-1" + _framed(model.encode(), value.encode())
    return hmac.digest(principal.tenant, text, "sha256")[:16]


def namespace(principal: Principal, scope: str, session: Session, cache_salt: str | None) -> bytes:
    """The cache namespace of a request, 16 bytes: equal prompts share blocks only within one.

    Scope "tenant": all of the tenant's requests.  Scope "session": one session; a request without
    one shares with nobody.  The caller's `cache_salt` only narrows this further.
    """
    own = b""
    if scope == "session":
        own = session.key or secrets.token_bytes(16)
    text = b"slipstream-namespace-1" + _framed(own, (cache_salt or "").encode("utf-8", "replace"))
    return hmac.digest(principal.tenant, text, "sha256")[:16]


def _framed(*parts: bytes) -> bytes:
    """Each part behind its length, so that no two lists give the same bytes."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)
