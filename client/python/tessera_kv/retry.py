"""Repeats steps that the daemon aborted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType

from .errors import RetryableError


class Attempt:
    """One try. As a context it swallows a `RetryableError`, unless it is the last one."""

    def __init__(self, number: int, is_last: bool) -> None:
        self.number = number
        self.error: RetryableError | None = None
        self._is_last = is_last
        self.done = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, RetryableError) and not isinstance(error, ConnectionError):
            self.error = error
            return not self._is_last
        self.done = True
        return False


def attempts(limit: int = 8, pause: float = 0.001) -> Iterator[Attempt]:
    """Yields tries of one step or read until one succeeds; the last error is raised.

        for attempt in attempts():
            with attempt, worker.step([sequence]) as step:
                ...

    `pause`: seconds before the second try, doubled before each further one. A lost lease is not
    retried: reattach first.
    """
    for number in range(limit):
        attempt = Attempt(number, is_last=number == limit - 1)
        yield attempt
        if attempt.done or attempt.error is None:
            return
        time.sleep(min(max(pause * 2**number, attempt.error.retry_after), 1.0))
