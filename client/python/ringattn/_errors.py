"""Exceptions of the service, typed by status code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class FieldViolation(NamedTuple):
    """A violation in one field of the request."""

    field: str  #: as the protos name it, "options.softcap"
    description: str


class RingattnError(Exception):
    """A call that the service, or the client library in its stead, has not served.

    Attributes:
        code: the gRPC status code's name, "INVALID_ARGUMENT".
        message: the service's words.
        reason: ErrorInfo.reason, such as "WORKER_LOST"; empty if there is none.
        violations: the fields that are wrong, and how.
        retry_after: seconds after which another attempt makes sense; None where the service does not say.
        metadata: more about the reason.
    """

    def __init__(self, code: str, message: str, *, reason: str = "",
                 violations: tuple[FieldViolation, ...] = (), retry_after: float | None = None,
                 metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = tuple(violations)
        self.retry_after = retry_after
        self.metadata = dict(metadata or {})

    def __str__(self) -> str:
        lines = [f"{self.code}: {self.message}"]
        lines += [f"  {field}: {description}" for field, description in self.violations]
        if self.reason:
            lines.append(f"  reason: {self.reason}")
        return "\n".join(lines)

    def __reduce__(self):
        return (_rebuild, (type(self), self.code, self.message, self.reason, self.violations,
                           self.retry_after, self.metadata))


class InvalidArgumentError(RingattnError, ValueError):
    """The request is wrong: `violations` name the fields."""


class UnimplementedError(RingattnError, NotImplementedError):
    """A field or combination that the service, or the devices of its ring, does not serve."""


class FailedPreconditionError(RingattnError):
    """More workers asked for than are ready, or a handle that is stale."""


class ResourceExhaustedError(RingattnError):
    """Over a limit of size, or the queue is full; with `retry_after` where waiting helps."""


class UnavailableError(RingattnError, ConnectionError):
    """No server, no ring yet, or the server drains; and the replays of the client library did not help."""


class AbortedError(RingattnError):
    """A worker was lost while it had the request, as often as the client library sent it."""


class DeadlineExceededError(RingattnError, TimeoutError):
    """The deadline, the caller's own or one of the service's (`reason`)."""


class CancelledError(RingattnError):
    """A client (`Client.cancel_operation`) or an operator cancelled the operation."""


class PermissionDeniedError(RingattnError, PermissionError):
    """The service does not know this client, or not for this (UNAUTHENTICATED, PERMISSION_DENIED)."""


class NotFoundError(RingattnError, LookupError):
    """The operation does not exist."""


class DataLossError(RingattnError):
    """A result arrived damaged."""


class CacheFencedError(AbortedError):
    """Another writer has opened the K/V cache (KV_FENCED)."""


class CacheLostError(DataLossError):
    """A worker of the K/V cache was lost, or its workers disagree. Create another cache and prefill it."""


class CacheExpiredError(FailedPreconditionError):
    """The K/V cache has expired or was deleted. Create another cache and prefill it."""


class StepRefusedError(FailedPreconditionError):
    """The service refused a step of a K/V cache. Nothing of the step was done.

    Attributes:
        rows: the protos RowRefusal as dicts: row, command, reason ("KV_FULL"), length, blocks_missing, detail.
    """

    rows: list[dict[str, Any]] = []

    @classmethod
    def of(cls, details: Mapping[str, Any], rows: list[dict[str, Any]]) -> "StepRefusedError":
        error = cls(details["code"], details["message"], reason=details["reason"])
        error.rows = rows
        return error


_BY_REASON: dict[str, type[RingattnError]] = {
    "KV_FENCED": CacheFencedError,
    "KV_LOST": CacheLostError,
    "KV_RANKS_DIFFER": CacheLostError,
    "KV_INCONSISTENT": CacheLostError,
    "KV_EXPIRED": CacheExpiredError,
    "KV_DELETED": CacheExpiredError,
}

_BY_CODE: dict[str, type[RingattnError]] = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "OUT_OF_RANGE": InvalidArgumentError,
    "UNIMPLEMENTED": UnimplementedError,
    "FAILED_PRECONDITION": FailedPreconditionError,
    "RESOURCE_EXHAUSTED": ResourceExhaustedError,
    "UNAVAILABLE": UnavailableError,
    "ABORTED": AbortedError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "CANCELLED": CancelledError,
    "UNAUTHENTICATED": PermissionDeniedError,
    "PERMISSION_DENIED": PermissionDeniedError,
    "NOT_FOUND": NotFoundError,
    "DATA_LOSS": DataLossError,
}


def _rebuild(kind, code, message, reason, violations, retry_after, metadata) -> RingattnError:
    return kind(code, message, reason=reason, violations=violations, retry_after=retry_after, metadata=metadata)


def error_of(details: Mapping[str, Any]) -> RingattnError:
    """The exception for an error of the extension module."""
    kind = _BY_REASON.get(details["reason"]) or _BY_CODE.get(details["code"], RingattnError)
    return kind(details["code"], details["message"], reason=details["reason"],
                violations=tuple(FieldViolation(*violation) for violation in details["violations"]),
                retry_after=details["retry_after"], metadata=details["metadata"])


def invalid(field: str, description: str) -> InvalidArgumentError:
    """Returns the service's error about `field`, for checks before anything is sent."""
    return InvalidArgumentError("INVALID_ARGUMENT", f"{field}: {description}",
                                violations=(FieldViolation(field, description),))
