"""File systems of URLs through fsspec: which package each scheme needs, what an error means, and when to try again."""

import importlib
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.25, 15.0
FIRST_CONTACT_SECONDS = 10.0
"""A server that has never answered is given up after this: more likely its name or port is wrong."""

_CONNECT_SECONDS, _READ_SECONDS = 10, 60
MAX_CONNECTIONS = 32
_opened: dict[int, Any] = {}
"""All file systems of this process and of those it was forked from, so that none is ever finalized."""


class RemoteError(OSError):
    """A remote file that cannot be used; the reason completes "cannot be read:"."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.strerror = reason


class MissingFileError(RemoteError):
    """There is no such file or folder."""


class AccessDeniedError(RemoteError):
    """The file may not be read."""


class RemoteOutage(RemoteError):
    """The server or the credentials fail, so that no other file can be read either."""


class IncompleteBodyError(Exception):
    """The server sent less than it announced."""


@dataclass(frozen=True)
class Scheme:
    """The file system that serves the URLs of one scheme."""

    package: str  # imported by fsspec
    install: str
    credentials: str  # how to give them, or how to do without
    container: str = "bucket"
    can_list: bool = True


_S3 = Scheme(
    "s3fs",
    "pip install s3fs",
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or FSSPEC_S3_ANON=true for a public bucket",
)
_GS = Scheme(
    "gcsfs",
    "pip install gcsfs",
    "run `gcloud auth application-default login` or set GOOGLE_APPLICATION_CREDENTIALS, or FSSPEC_GCS_TOKEN=anon for a"
    " public bucket",
)
_HF = Scheme("huggingface_hub", "pip install huggingface_hub", "run `hf auth login` or set HF_TOKEN", "repository")
_HTTP = Scheme("aiohttp", "pip install aiohttp", "give a URL that needs no login, or a signed one", "server", False)
SCHEMES = {"s3": _S3, "s3a": _S3, "gs": _GS, "gcs": _GS, "hf": _HF, "https": _HTTP, "http": _HTTP}

_BOTO_CONFIG = {
    "connect_timeout": _CONNECT_SECONDS,
    "read_timeout": _READ_SECONDS,
    "max_pool_connections": MAX_CONNECTIONS,
    "retries": {"total_max_attempts": 1},
}


def get_scheme(name: str) -> Scheme:
    """Return what serves a scheme; raise ``RemoteError`` if nothing does."""
    if name not in SCHEMES:
        known = ", ".join(f"{known}://" for known in ("s3", "gs", "hf", "https"))
        raise RemoteError(f"{name}:// is not supported; use {known}, or download the files")
    return SCHEMES[name]


def open_filesystem(scheme: str) -> Any:
    """Return fsspec's file system for URLs of a scheme, without retries of its own: these are ``RetryPolicy``'s.

    fsspec keeps one instance for each process, so that forked workers get one of their own.  It then drops the one of
    the parent, whose finalizer closes the connections in the epoll instance that both share: the parent would wait in
    vain for answers (fsspec 2026.9).
    """
    info = get_scheme(scheme)
    try:
        fsspec = importlib.import_module("fsspec")
        importlib.import_module(info.package)
    except ImportError as error:
        raise RemoteOutage(f"{scheme}:// needs {info.package}: {info.install} ({error})") from None
    options: dict[str, Any] = {} if scheme == "hf" else {"use_listings_cache": False}
    if info is _S3:
        options["config_kwargs"] = _BOTO_CONFIG
    elif info is _HTTP:
        timeouts = importlib.import_module("aiohttp").ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS
        )
        options["client_kwargs"] = {"timeout": timeouts}
    filesystem = fsspec.filesystem("s3" if scheme == "s3a" else scheme, **options)
    if info in (_S3, _GS):
        filesystem.retries = 1
    return _opened.setdefault(id(filesystem), filesystem)


_RETRIED_STATUSES = {408, 425, 429, 500, 502, 503, 504, 509}
_RETRIED_CODES = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling"}
_RETRIED_TYPES = {
    *("IncompleteBodyError", "ConnectionError", "TimeoutError", "TransportError", "HTTPClientError", "ClientError"),
    *("ResponseParserError", "ClientConnectionError", "ClientPayloadError", "ChunkedEncodingError", "ProtocolError"),
    *("IncompleteReadError", "IncompleteRead", "Timeout"),
}
"""Names of exceptions, with those of base classes, that mean a failed connection: the packages may be missing.

``ClientError`` is that of aiohttp; botocore's has a status and is judged by it."""

_CREDENTIAL_TYPES = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"),
    *("TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "RefreshError"),
    *("DefaultCredentialsError", "GatedRepoError"),
}
_CREDENTIAL_CODES = {
    *("ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "TokenRefreshRequired"),
    *("RequestTimeTooSkewed", "InvalidSecurity"),
}


@dataclass(frozen=True)
class Verdict:
    """The meaning of an exception of a file system."""

    error: RemoteError
    is_transient: bool = False
    is_answer: bool = True  # whether the server answered


def judge_error(error: Exception, scheme: str, container: str) -> Verdict:
    """Tell failures that pass from missing files, missing permissions and wrong credentials."""
    if isinstance(error, RemoteError):
        return Verdict(error)
    chain = list(_iter_causes(error))
    statuses = {status for item in chain if (status := _get_status(item))}
    codes = {code for item in chain if (code := _get_code(item))}
    names = {base.__name__ for item in chain for base in type(item).__mro__}
    info, reason = SCHEMES[scheme], _format_reason(chain)
    if names & _CREDENTIAL_TYPES or codes & _CREDENTIAL_CODES or 401 in statuses:
        kind = "credentials are missing or not valid" if "ExpiredToken" not in codes else "credentials have expired"
        return Verdict(RemoteOutage(f"{kind} ({reason}); {info.credentials}"))
    if statuses & _RETRIED_STATUSES or codes & _RETRIED_CODES:
        return Verdict(RemoteOutage(f"the server fails ({reason})"), True)
    if "NoSuchBucket" in codes or "RepositoryNotFoundError" in names or "RevisionNotFoundError" in names:
        hint = f"; {info.credentials}, if it is private" if info is _HF else ""
        return Verdict(RemoteOutage(f"the {info.container} {container!r} does not exist; check its name{hint}"))
    if isinstance(error, PermissionError) or 403 in statuses:
        return Verdict(AccessDeniedError(f"access denied ({reason}); check the permissions, or {info.credentials}"))
    if 404 in statuses or 410 in statuses or (isinstance(error, FileNotFoundError) and not _has_transport_cause(chain)):
        return Verdict(MissingFileError("does not exist"))
    if 416 in statuses:
        return Verdict(RemoteError("has fewer bytes than when it was listed; it has changed on the server"))
    if names & _RETRIED_TYPES and not statuses:
        return Verdict(RemoteOutage(f"no answer from the server ({reason})"), True, is_answer=False)
    return Verdict(RemoteError(reason))


def _has_transport_cause(chain: list[BaseException]) -> bool:
    """Whether a file is only not found because the server could not be asked; fsspec says so for https."""
    names = {base.__name__ for item in chain[1:] for base in type(item).__mro__}
    return bool(names & _RETRIED_TYPES)


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _get_status(error: BaseException) -> int | None:
    """Return the HTTP status: of aiohttp, of gcsfs, of botocore or of huggingface_hub."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif type(error).__name__ == "HttpError":  # of gcsfs; aiohttp gives codes to answers that it cannot read
        status = getattr(error, "code", None)
    else:
        status = getattr(response, "status_code", None) or getattr(error, "status", None)
    return status if isinstance(status, int) and 100 <= status < 600 else None


def _get_code(error: BaseException) -> str | None:
    """Return the error code of S3."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code")) if isinstance(response, dict) else None


def _format_reason(chain: list[BaseException]) -> str:
    """Return the first line of the deepest cause, or two if it ends with a colon, without the secrets of a URL."""
    text = next((str(item) for item in reversed(chain) if str(item)), "") or type(chain[0]).__name__
    lines = text.splitlines()[:2]
    line = " ".join(lines if lines[0].endswith(":") else lines[:1])
    return re.sub(r"\?[^\s\"'()]*|(?<=://)[^\s/@]*@", "", line)[:200]


@dataclass
class RetryPolicy:
    """The time that a request is repeated; servers that are known to be down are not waited for again."""

    seconds: float
    has_answered: set[str] = field(default_factory=set)  # servers
    is_down: set[str] = field(default_factory=set)
    is_announced: set[str] = field(default_factory=set)  # the servers that the log names as down

    def call(self, request: Callable[[], T], scheme: str, container: str, shown: str, *, may_expire: bool = False) -> T:
        """Return the result of ``request``; raise ``RemoteError`` when it cannot succeed or has failed for too long.

        ``may_expire``: access was given by a signed URL; that it is denied now is no fault of the file.
        """
        server = f"{scheme}://{container}"
        started, wait = time.monotonic(), FIRST_WAIT_SECONDS
        while True:
            try:
                result = request()
            except Exception as error:  # each package raises exceptions of its own
                verdict = judge_error(error, scheme, container)
                if verdict.is_answer:
                    self.has_answered.add(server)
                if may_expire and isinstance(verdict.error, AccessDeniedError):
                    raise RemoteOutage(f"{verdict.error}; the signed URL may have expired") from error
                if not verdict.is_transient:
                    raise verdict.error from error
                patience = self.seconds if server in self.has_answered else min(self.seconds, FIRST_CONTACT_SECONDS)
                if server in self.is_down or time.monotonic() - started + wait > patience:
                    self.is_down.add(server)
                    raise RemoteOutage(
                        f"{verdict.error}, tried for {patience:.0f} seconds; --remote_retry_seconds sets for how long"
                    ) from error
                if wait > 1 and server not in self.is_announced:
                    self.is_announced.add(server)
                    logger.warning("%s: %s; trying again for up to %.0f seconds", shown, verdict.error, patience)
                time.sleep(wait * random.uniform(0.75, 1.25))  # so that processes do not come back at once
                wait = min(2 * wait, MAX_WAIT_SECONDS)
                continue
            self.has_answered.add(server)
            self.is_down.discard(server)
            self.is_announced.discard(server)
            return result
