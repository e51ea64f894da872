"""Exceptions of the service, typed by status code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class FieldViolation(NamedTuple):
    """A violation in one field of the request."""

    field: str  #: path in the protos, such as "options.softcap"
    description: str


class RingattnError(Exception):
    """A failed call. The service or the client library reports it.

    Attributes:
        code: name of the gRPC status code, such as "INVALID_ARGUMENT".
        message: the error text.
        reason: ErrorInfo.reason, such as "WORKER_LOST"; empty if the error has none.
        violations: the invalid fields.
        retry_after: seconds to wait before another attempt; None if retrying is not recommended.
        metadata: ErrorInfo.metadata.
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
    """The request is invalid. `violations` names the fields."""


class UnimplementedError(RingattnError, NotImplementedError):
    """The service, or the devices of its ring, do not support an option or a combination."""


class FailedPreconditionError(RingattnError):
    """The service's state does not permit the call: fewer workers are ready than requested, or a residual has ended."""


class ResourceExhaustedError(RingattnError):
    """A limit, a quota or the queue is exceeded. `retry_after` is set if waiting helps."""


class UnavailableError(RingattnError, ConnectionError):
    """The server cannot be reached, has no ring, or drains. The client library's replays failed too."""


class AbortedError(RingattnError):
    """A worker was lost during the request. The client library's replays failed too."""


class DeadlineExceededError(RingattnError, TimeoutError):
    """The caller's deadline, or a time limit of the service (`reason`), has passed."""


class CancelledError(RingattnError):
    """The request was cancelled by `Client.cancel_operation` or by an operator."""


class PermissionDeniedError(RingattnError, PermissionError):
    """The client is not known or not permitted to make the call (UNAUTHENTICATED, PERMISSION_DENIED)."""


class NotFoundError(RingattnError, LookupError):
    """The request, residual or cache does not exist."""


class DataLossError(RingattnError):
    """A result was damaged in transit, or a K/V cache was lost."""


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


class OfOneProcess:
    """Base of objects with connections or shared memory. Copies and pickles of them are rejected by name."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"ringattn.{type(self).__name__}: cannot be pickled or copied, because its connections and memory "
                        "belong to one process; share the object between threads, and connect in each process")


#: Error text of forward-mode derivatives.
NO_FORWARD_MODE = ("forward-mode derivatives (torch.func.jvp, jacfwd, dual tensors) of ringattn's attention are not "
                   "supported; use reverse mode (torch.autograd.grad)")

#: Error text of objects whose process was forked.
FORKED = ("this process was forked from one that has used ringattn; connections do not survive a fork: start processes "
          "with 'spawn' or 'forkserver', or connect after the fork")


def invalid(field: str, description: str) -> InvalidArgumentError:
    """Returns the error that the service reports for `field`, for checks before a request is sent."""
    return InvalidArgumentError("INVALID_ARGUMENT", f"{field}: {description}",
                                violations=(FieldViolation(field, description),))
