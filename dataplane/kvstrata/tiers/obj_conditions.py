"""What an object store's errors mean.

Missing                the object isn't there (`errors`)
AlreadyThere           a conditional put found an object
Unsupported            the service doesn't know conditional puts, or batches of deletes
Fault                  everything else, by `Condition`; `again`: trying again may help
"""

from __future__ import annotations

import enum

from kvstrata.errors import Corrupt, KVStrataError, Missing

__all__ = ["AlreadyThere", "Condition", "Fault", "Unsupported", "meaning"]


class Condition(enum.StrEnum):
    UNREACHABLE = "unreachable"  # no connection, or it broke
    UNTRUSTED = "certificate not trusted"
    TIMEOUT = "timed out"
    DENIED = "access denied"
    NO_BUCKET = "no such bucket"
    REPLACED = "another store is there"
    SLOW_DOWN = "asked to slow down"
    SERVER_ERROR = "server error"
    FULL = "full"
    REFUSED = "refused"  # the request itself

    @property
    def lasting(self) -> bool:
        """Of the store as a whole, until somebody does something about it."""
        return self in _LASTING

    @property
    def passing(self) -> bool:
        """Of the store as a whole, but maybe gone with the next request."""
        return self in (Condition.SLOW_DOWN, Condition.SERVER_ERROR, Condition.TIMEOUT)


_LASTING = frozenset(
    {
        Condition.UNREACHABLE,
        Condition.UNTRUSTED,
        Condition.DENIED,
        Condition.NO_BUCKET,
        Condition.REPLACED,
    }
)


class AlreadyThere(KVStrataError):  # noqa: N818 - named after the condition
    """A conditional put found an object."""


class Unsupported(KVStrataError):  # noqa: N818 - named after the condition
    """The service doesn't know what was asked of it."""


class Damaged(Corrupt):
    """An object failed verification; `tag` is the store's name of this version of it."""

    def __init__(self, message: str, tag: str) -> None:
        super().__init__(message)
        self.tag = tag


class NixlFailed(KVStrataError):  # noqa: N818 - named after the condition
    """NIXL could not read an object, or may not begin to: load it in another way."""


class Fault(KVStrataError):  # noqa: N818 - named after the condition
    """The store failed; `again` says whether trying again may help."""

    def __init__(self, condition: Condition, detail: str, again: bool = False) -> None:
        super().__init__(f"{condition}: {detail}" if detail else str(condition))
        self.condition = condition
        self.again = again


_DENIED = frozenset(
    {
        "AccessDenied",
        "AllAccessDisabled",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
    }
)
_SLOW = frozenset(
    {"SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "RequestLimitExceeded"}
)
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"})
# The request was hurt on its way, or came too slowly.
_HURT = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"})
_RACED = frozenset({"ConditionalRequestConflict", "OperationAborted"})
_UNKNOWN = frozenset({"NotImplemented", "InvalidArgument", "InvalidRequest", "MissingContentMD5"})


def meaning(error: Exception) -> Exception:
    """Of an exception from aiobotocore or aiohttp; ours and others are returned as they are."""
    import aiohttp  # aioboto3 brings them
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    if isinstance(error, KVStrataError):
        return error
    if isinstance(error, boto.ClientError):
        answer = error.response
        status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return _of_answer(str(answer.get("Error", {}).get("Code", "")), status, str(error))
    told = str(error) or type(error).__name__
    match error:
        case boto.SSLError():
            return Fault(Condition.UNTRUSTED, told)
        case (
            boto.NoCredentialsError()
            | boto.PartialCredentialsError()
            | boto.CredentialRetrievalError()
        ):
            return Fault(Condition.DENIED, told)
        case ResponseParserError():
            return Fault(Condition.SERVER_ERROR, told, again=True)
        case boto.ConnectionError() | boto.HTTPClientError() | aiohttp.ClientError() | OSError():
            return Fault(Condition.UNREACHABLE, told, again=True)
        case boto.BotoCoreError():
            return Fault(Condition.REFUSED, told)
    return error


def _of_answer(code: str, status: int, told: str) -> Exception:
    if code == "NoSuchBucket":
        return Fault(Condition.NO_BUCKET, told)
    if code in _FULL or status == 507:
        return Fault(Condition.FULL, told)
    if code in _HURT or code in _RACED:
        return Fault(Condition.SERVER_ERROR, told, again=True)
    if status == 404:
        return Missing(told)
    if status in (304, 412):
        return AlreadyThere(told)
    if status == 501 or code in _UNKNOWN:
        return Unsupported(told)
    if code in _DENIED or status in (401, 403):
        return Fault(Condition.DENIED, told)
    if code in _SLOW or status in (429, 503):
        return Fault(Condition.SLOW_DOWN, told, again=True)
    if status >= 500:
        return Fault(Condition.SERVER_ERROR, told, again=True)
    return Fault(Condition.REFUSED, told)
