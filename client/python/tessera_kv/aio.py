"""The long calls as coroutines. Steps and reads stay as they are: use `Worker.step` of `.worker`.

Calls run on a pool of four threads that belongs to the worker. Cancelling one gives up waiting for
it: the call ends by itself, and what it made is freed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from . import sequence as sequences
from . import worker as workers
from .model import Model

T = TypeVar("T")
_THREADS = 4


def _free(done: Future[Any]) -> None:
    """Frees a handle that nobody waits for any more."""
    if not done.cancelled() and done.exception() is None:
        close = getattr(done.result(), "close", None)
        if close is not None:
            close()


async def _run(pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any,
               **options: Any) -> T:
    call = pool.submit(function, *arguments, **options)
    try:
        return await asyncio.shield(asyncio.wrap_future(call))
    except asyncio.CancelledError:
        call.add_done_callback(_free)
        raise


class Sequence:
    """A sequence whose long calls are coroutines; `sequence` is the object for steps."""

    def __init__(self, pool: ThreadPoolExecutor, sequence: sequences.Sequence) -> None:
        self._pool = pool
        self.sequence = sequence

    async def append(self, key: Any, value: Any, **options: Any) -> int:
        return await _run(self._pool, self.sequence.append, key, value, **options)

    async def observe(self, layer: int, query: Any, key: Any = None, **options: Any) -> None:
        await _run(self._pool, self.sequence.observe, layer, query, key, **options)

    async def compress(self) -> None:
        await _run(self._pool, self.sequence.compress)

    async def publish(self, ids: Any, **options: Any) -> sequences.Published:
        return await _run(self._pool, self.sequence.publish, ids, **options)

    async def fork(self, policy: str | None = None) -> Sequence:
        return Sequence(self._pool, await _run(self._pool, self.sequence.fork, policy))

    async def describe(self, **options: Any) -> sequences.Description:
        return await _run(self._pool, self.sequence.describe, **options)

    async def truncate(self, tokens: int) -> None:
        await _run(self._pool, self.sequence.truncate, tokens)

    async def offload(self) -> int:
        return await _run(self._pool, self.sequence.offload)

    async def restore(self) -> None:
        await _run(self._pool, self.sequence.restore)

    async def close(self) -> None:
        await _run(self._pool, self.sequence.close)


class Worker:
    """A worker whose long calls are coroutines; `worker` is the object for steps."""

    def __init__(self, pool: ThreadPoolExecutor, worker: workers.Worker) -> None:
        self._pool = pool
        self.worker = worker

    async def sequence(self, model: Model, *, policy: str = "") -> Sequence:
        made = await _run(self._pool, self.worker.sequence, model, policy=policy)
        return Sequence(self._pool, made)

    async def match(self, model: Model, ids: Any, **options: Any) -> workers.Match:
        return await _run(self._pool, self.worker.match, model, ids, **options)

    async def fork(self, match: workers.Match, *, tokens: int = 0) -> Sequence:
        return Sequence(self._pool, await _run(self._pool, self.worker.fork, match, tokens=tokens))

    async def stats(self) -> dict[str, Any]:
        return await _run(self._pool, self.worker.stats)

    async def reattach(self) -> int:
        return await _run(self._pool, self.worker.reattach)

    async def events(self) -> AsyncIterator[workers.Event]:
        """Events of the attachment, for as long as somebody iterates."""
        loop = asyncio.get_running_loop()
        waiting = asyncio.Event()
        descriptor = self.worker.events_fd()
        loop.add_reader(descriptor, waiting.set)
        try:
            while True:
                await waiting.wait()
                waiting.clear()
                for event in self.worker.events():
                    yield event
        finally:
            loop.remove_reader(descriptor)

    async def close(self) -> None:
        await _run(self._pool, self.worker.close)
        self._pool.shutdown(wait=False)

    async def __aenter__(self) -> Worker:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


async def attach(address: str = "", **options: Any) -> Worker:
    """As `tessera_kv.attach`."""
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tessera")
    return Worker(pool, await _run(pool, workers.attach, address, **options))
