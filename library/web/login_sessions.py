"""The token of a page that other machines can reach, and the sessions of browsers that have given it."""

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

COOKIE = "lorikeet_session"
TOKEN_BYTES = 32
WRONG_TOKEN_DELAY_SECONDS = 1.0
MAX_SESSIONS = 256


@dataclass
class Sessions:
    """Sessions live in memory: a restart ends them all.  Only hashes are kept of the token and of the cookies."""

    token_hash: bytes | None
    """The hash of the token, or ``None`` if no token is needed."""

    seconds: float = 12 * 3600.0
    expiry_by_hash: dict[bytes, float] = field(default_factory=dict)

    @classmethod
    def build_with_token(cls, seconds: float) -> "tuple[Sessions, str]":
        """Return the sessions and the token, which is not stored."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        return cls(_hash_text(token), seconds), token

    def matches_token(self, text: str) -> bool:
        """Compare in constant time."""
        return self.token_hash is not None and hmac.compare_digest(_hash_text(text.strip()), self.token_hash)

    def start_session(self) -> str:
        """Return the ``Set-Cookie`` header of a new session."""
        self._drop_expired()
        while len(self.expiry_by_hash) >= MAX_SESSIONS:
            del self.expiry_by_hash[min(self.expiry_by_hash, key=lambda key: self.expiry_by_hash[key])]
        name = secrets.token_urlsafe(TOKEN_BYTES)
        self.expiry_by_hash[_hash_text(name)] = time.monotonic() + self.seconds
        return f"{COOKIE}={name}; Path=/; Max-Age={int(self.seconds)}; HttpOnly; SameSite=Strict"

    def end_session(self, cookie_header: str) -> str:
        """Forget the session; return the ``Set-Cookie`` header that deletes its cookie."""
        self.expiry_by_hash.pop(_hash_text(_read_cookie(cookie_header)), None)
        return f"{COOKIE}=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict"

    def is_open(self, cookie_header: str) -> bool:
        """Whether a request may see the page."""
        if self.token_hash is None:
            return True
        self._drop_expired()
        return _hash_text(_read_cookie(cookie_header)) in self.expiry_by_hash

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for key in [key for key, expiry in self.expiry_by_hash.items() if expiry <= now]:
            del self.expiry_by_hash[key]


def _read_cookie(header: str) -> str:
    try:
        cookie = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return cookie.value if cookie is not None else ""


def _hash_text(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
