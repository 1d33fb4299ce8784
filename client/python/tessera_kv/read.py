"""Attention over committed tokens, without new ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as AnySequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _abi, _arrays, _library, step
from .errors import FailedPrecondition, Forked, InvalidArgument, check, make_error, new_error
from .sequence import Sequence

if TYPE_CHECKING:
    from .worker import Worker


def fill(
    worker: Worker,
    sequences: AnySequence[Sequence],
    layer: int,
    query: Any,
    out: Any,
    lse: Any,
    causal: bool,
    queries: AnySequence[int] | None,
    first_query_position: int | AnySequence[int] | None,
    selection: step.Selection | None,
) -> tuple[Any, Any, list[Any]]:
    """The arguments of a call: its struct, `out`, and what must be kept alive."""
    model = sequences[0].model
    shape = model.layer(layer)
    slot = step._Slot(_abi.tessera_read_tensors())
    tensors = slot.tensors
    given = _arrays.layout("query", query, shape.query_heads, shape.head_dim, (model.type,))
    keep: list[Any] = []
    if queries is None:
        tensors.queries, rest = divmod(given.tokens, len(sequences))
        if rest:
            raise InvalidArgument(
                f"query has {given.tokens} rows for {len(sequences)} sequences; set queries",
                "argument",
            )
    else:
        if len(queries) != len(sequences) or sum(queries) != given.tokens:
            raise InvalidArgument(
                f"queries is {list(queries)} for {len(sequences)} sequences and {given.tokens} "
                "rows",
                "argument",
            )
        counts = (ctypes.c_uint32 * len(queries))(*queries)
        tensors.queries_each = ctypes.addressof(counts)
        keep.append(counts)
    if first_query_position is not None:
        if isinstance(first_query_position, int):
            first_query_position = [first_query_position] * len(sequences)
        if len(first_query_position) != len(sequences):
            raise InvalidArgument("one first_query_position per sequence is needed", "argument")
        positions = (ctypes.c_uint64 * len(sequences))(*first_query_position)
        tensors.first_query_positions = ctypes.addressof(positions)
        keep.append(positions)
    if out is None:
        out = step.new_output(query, shape.query_heads, shape.head_dim, given.tokens)
    keep += step.set_queries(slot, worker, shape, model.type, given.tokens, query, out, lse,
                             causal, selection)
    return tensors, out, keep


class Read:
    """Attention over what is committed when it begins. Made by `Worker.read`; use it as a context.

    Outputs are valid only once the context was left without an error. Used by one thread.
    """

    def __init__(self, worker: Worker, sequences: AnySequence[Sequence], timeout: float,
                 stream: int | None) -> None:
        self._pointer: int | None = None
        self._keep: list[Any] = []
        self._worker = worker
        self._sequences = tuple(sequences)
        if not self._sequences:
            raise InvalidArgument("a read needs at least one sequence", "argument")
        self._forks = _library.Fork.count
        options = _abi.tessera_read_options()
        options.struct_size = ctypes.sizeof(options)
        options.timeout_ms = round(timeout * 1000)
        options.cuda_stream = stream
        options.parallel_for, options.parallel_context = worker.executor
        count = len(self._sequences)
        handles = (ctypes.c_void_p * count)(*[each.pointer for each in self._sequences])
        made = ctypes.c_void_p()
        error, argument = new_error()
        with worker.in_call() as pointer:
            code = _library.slow.tessera_read_begin(
                pointer, handles, count, ctypes.byref(options), ctypes.byref(made), argument
            )
        check(code, error)
        self._pointer = made.value

    def attend(
        self,
        layer: int,
        query: Any,
        *,
        out: Any = None,
        lse: Any = None,
        causal: bool = True,
        queries: AnySequence[int] | None = None,
        first_query_position: int | AnySequence[int] | None = None,
        selection: step.Selection | None = None,
    ) -> Any:
        """Attends over a layer's committed entries with any number of queries.

        `query`: [queries of all sequences, query_heads, head_dim]; `queries`: how many each
        sequence has, if not all the same. `first_query_position`: of each sequence's first query;
        None means that the last query has the position of the last token. `lse` (float32,
        [queries, query_heads]) allows to merge the result with attention over other rows. Any
        number of calls per layer. Returns `out`.
        """
        tensors, out, keep = fill(self._worker, self._sequences, layer, query, out, lse, causal,
                                  queries, first_query_position, selection)
        self._keep.append((query, out, lse, keep))
        pointer = self._take()
        self._pointer = None  # another thread must not end the read meanwhile
        error, argument = new_error()
        code = _library.slow.tessera_read_attend(pointer, layer, ctypes.byref(tensors), argument)
        self._pointer = pointer
        check(code, error)
        return out

    def _take(self) -> int:
        if self._forks != _library.Fork.count:
            raise Forked("the read was begun before fork(); only the parent can use it")
        if self._pointer is None:
            raise FailedPrecondition("the read is over, or another thread uses it")
        return self._pointer

    def end(self) -> None:
        """Ends the read; `Aborted` if its results are not valid. Leaving the context does it."""
        pointer = self._take()
        error, argument = new_error()
        code = _library.fast.tessera_read_end(pointer, argument)
        self.abandon()
        if code:
            raise make_error(code, error)

    def abandon(self) -> None:
        """Ends it without results. Does nothing if it is over."""
        pointer, self._pointer = self._pointer, None
        if pointer is None or self._forks != _library.Fork.count:
            return
        _library.fast.tessera_read_destroy(pointer)
        self._keep = []

    def __enter__(self) -> Read:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.end()
        else:
            self.abandon()

    def __del__(self) -> None:
        self.abandon()
