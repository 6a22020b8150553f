"""Who is calling: API keys to tenants.  Knows no routes; app.py lists the open ones.

A tenant is HMAC(server secret, key): it names cache entries and sessions, and reveals no key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.config import ConfigError
from gateway.errors import InvalidApiKey

_SECRET_BYTES = 32
_KEY_LIMIT = 512  # characters


@dataclass(frozen=True, slots=True)
class Principal:
    """One caller."""

    tenant: bytes  # 32 bytes; the root of its cache namespace
    name_hash: str  # 8 hex digits, for logs


class Keys:
    """The keys that this server accepts; none at all means that everyone is one tenant."""

    def __init__(self, secret: bytes, path: Path | None = None) -> None:
        self._secret = secret
        self._path = path
        self._known: list[tuple[bytes, Principal]] = []  # (sha256 of the key, who it is)
        self.anonymous = self._principal(b"")
        if path is not None:
            self._known = self._read(path)

    @classmethod
    def from_file(cls, path: str | Path, secret: bytes) -> Keys:
        """Keys of a file, one a line, `#` begins a comment; raise ConfigError if it has none."""
        return cls(secret, Path(path))

    @classmethod
    def none(cls, secret: bytes) -> Keys:
        """No keys: every caller is the same tenant."""
        return cls(secret)

    @property
    def required(self) -> bool:
        """Whether callers must show a key."""
        return self._path is not None

    def reload(self) -> int:
        """Read the file again and return the number of keys; on ConfigError the old ones stay."""
        if self._path is not None:
            self._known = self._read(self._path)
        return len(self._known)

    def principal(self, headers: Sequence[tuple[bytes, bytes]]) -> Principal:
        """Who sent these (lower-case) raw headers; raise InvalidApiKey."""
        if self._path is None:
            return self.anonymous
        digest = hashlib.sha256(_offered(headers)).digest()
        found: Principal | None = None
        for known, who in self._known:  # no early exit: the time must not tell which key came close
            if hmac.compare_digest(known, digest):
                found = who
        if found is None:
            raise InvalidApiKey
        return found

    def _principal(self, key: bytes) -> Principal:
        tenant = hmac.digest(self._secret, b"tenant\0" + key, "sha256")
        return Principal(tenant, hmac.digest(self._secret, b"name\0" + key, "sha256")[:4].hex())

    def _read(self, path: Path) -> list[tuple[bytes, Principal]]:
        try:
            lines = path.read_text("ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The API key file {path} cannot be read ({type(error).__name__}). It must be a "
                f"readable ASCII file with one key a line."
            ) from error
        keys: list[bytes] = []
        for number, line in enumerate(lines, 1):
            key = line.partition("#")[0].strip()
            if len(key) > _KEY_LIMIT or not all("!" <= letter <= "~" for letter in key):
                raise ConfigError(
                    f"Line {number} of the API key file {path} is no key: use at most {_KEY_LIMIT} "
                    f"visible characters without spaces."
                )
            if key:
                keys.append(key.encode())
        if not keys:
            raise ConfigError(
                f"The API key file {path} holds no key. Add one a line, or drop --api-key-file."
            )
        return [(hashlib.sha256(key).digest(), self._principal(key)) for key in keys]


def _offered(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The key in `Authorization: Bearer` or else `x-api-key`; raise InvalidApiKey if none."""
    bearer = [value for name, value in headers if name == b"authorization"]
    plain = [value for name, value in headers if name == b"x-api-key"]
    if len(bearer) > 1 or len(plain) > 1:
        raise InvalidApiKey
    if bearer:
        scheme, _, key = bearer[0].partition(b" ")
        if scheme.lower() == b"bearer" and key.strip():
            return key.strip()
    if plain and plain[0].strip():
        return plain[0].strip()
    raise InvalidApiKey


def load_secret(path: str | None) -> bytes:
    """The server's secret: 32 random bytes, kept in `path` (made with mode 0600) if given."""
    if path is None:
        return secrets.token_bytes(_SECRET_BYTES)
    file = Path(path)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        secret = file.read_bytes()
        if len(secret) < _SECRET_BYTES:
            raise ConfigError(
                f"The secret file {path} has {len(secret)} bytes; it needs {_SECRET_BYTES}. "
                f"Remove it and a new one is made."
            ) from None
        return secret
    with os.fdopen(descriptor, "wb") as out:
        out.write(secret := secrets.token_bytes(_SECRET_BYTES))
    return secret
