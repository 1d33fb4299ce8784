"""Errors by the codes of the C interface. Each is also the built-in error that it resembles."""

from __future__ import annotations

import ctypes

from . import _abi

# Names of `tessera_cause`, as the command line shows them.
CAUSES = (
    "unspecified", "pool_full", "quota", "tail_ring_full", "reader_slots", "host_memory",
    "sequence_failed", "sequence_busy", "lease_lost", "draining", "pin_revoked", "policy",
    "argument", "overloaded",
)


class Error(Exception):
    """A call failed. `message` is the daemon's or the library's own, word for word.

    `cause` is a word for programs (one of `CAUSES`); `retry_after` is in seconds, 0 if unknown.
    """

    code = _abi.TESSERA_UNKNOWN

    def __init__(self, message: str, cause: str = "unspecified", retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause
        self.retry_after = retry_after

    def __str__(self) -> str:
        return self.message


class RetryableError(Error):
    """The same call can succeed later: see `attempts`."""


class Cancelled(Error):
    """The call was cancelled."""

    code = _abi.TESSERA_CANCELLED


class Unknown(Error):
    """A code that this version does not know."""

    code = _abi.TESSERA_UNKNOWN


class InvalidArgument(Error, ValueError):
    """An argument, a policy or a tensor is wrong."""

    code = _abi.TESSERA_INVALID_ARGUMENT


class DeadlineExceeded(Error, TimeoutError):
    """The call took too long; its outcome is unknown."""

    code = _abi.TESSERA_DEADLINE_EXCEEDED


class NotFound(Error, LookupError):
    """A sequence, prefix or socket does not exist, or no longer."""

    code = _abi.TESSERA_NOT_FOUND


class AlreadyExists(Error):
    """It exists already."""

    code = _abi.TESSERA_ALREADY_EXISTS


class PermissionDenied(Error, PermissionError):
    """The tenant or its token may not do this."""

    code = _abi.TESSERA_PERMISSION_DENIED


class ResourceExhausted(Error, MemoryError):
    """Memory, a quota or a tail ring is full: see `cause` and `retry_after`."""

    code = _abi.TESSERA_RESOURCE_EXHAUSTED


class FailedPrecondition(Error, RuntimeError):
    """The call does not fit the state that the worker or sequence is in."""

    code = _abi.TESSERA_FAILED_PRECONDITION


class Aborted(RetryableError):
    """Nothing of the step or read counts: do it again from its beginning."""

    code = _abi.TESSERA_ABORTED


class OutOfRange(Error, IndexError):
    """A number of tokens is beyond what the sequence holds."""

    code = _abi.TESSERA_OUT_OF_RANGE


class Unimplemented(Error, NotImplementedError):
    """This combination is not supported."""

    code = _abi.TESSERA_UNIMPLEMENTED


class Internal(Error):
    """The library or the daemon found a fault of its own."""

    code = _abi.TESSERA_INTERNAL


class Unavailable(RetryableError, ConnectionError):
    """The lease is lost or the daemon does not answer: `Worker.reattach`, or attach again."""

    code = _abi.TESSERA_UNAVAILABLE


class DataLoss(Error):
    """Memory or a transfer did not hold what it must."""

    code = _abi.TESSERA_DATA_LOSS


class Unauthenticated(Error, PermissionError):
    """The session is not known to the daemon."""

    code = _abi.TESSERA_UNAUTHENTICATED


class Busy(FailedPrecondition):
    """Another step or call uses the sequence. A sequence takes one call at a time."""


class Forked(Error, RuntimeError):
    """The handle was made before `fork()`: only the parent can use it."""

    code = _abi.TESSERA_FAILED_PRECONDITION


class LayoutError(InvalidArgument):
    """A tensor whose rows strides cannot express. Nothing is copied silently."""


class Unsupported(Unimplemented):
    """A model or a call that an adapter does not serve. Names the layer and the value."""


class WrongDevice(InvalidArgument):
    """A tensor on another device than the daemon's memory."""


BY_CODE: dict[int, type[Error]] = {
    kind.code: kind
    for kind in (
        Cancelled, Unknown, InvalidArgument, DeadlineExceeded, NotFound, AlreadyExists,
        PermissionDenied, ResourceExhausted, FailedPrecondition, Aborted, OutOfRange,
        Unimplemented, Internal, Unavailable, DataLoss, Unauthenticated,
    )
}


def make_error(code: int, error: _abi.tessera_error) -> Error:
    """The error of a call that returned `code` and filled `error`."""
    cause = CAUSES[error.cause] if error.cause < len(CAUSES) else "unspecified"
    kind = BY_CODE.get(code, Unknown)
    if cause == "sequence_busy" and kind is FailedPrecondition:
        kind = Busy
    return kind(error.message.decode("utf-8", "replace"), cause, error.retry_after_ms / 1000)


def check(code: int, error: _abi.tessera_error) -> None:
    if code != _abi.TESSERA_OK:
        raise make_error(code, error)


def new_error() -> tuple[_abi.tessera_error, object]:
    """The error of one call, and the argument that passes it."""
    error = _abi.tessera_error()
    return error, ctypes.byref(error)
