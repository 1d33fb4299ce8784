"""Decode steps and reads: the calls of every layer, kept short.

A step's state is reused by later steps of the worker. It keeps the arguments of each layer's last
call, so that a call with the same tensors checks nothing again. It knows them by weak references,
and torch tensors also by their address: a tensor that is gone or was moved is looked at anew.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _abi, _arrays, _library
from .errors import FailedPrecondition, Forked, InvalidArgument, check, make_error
from .sequence import Sequence

if TYPE_CHECKING:
    from .worker import Worker

# Attention that takes longer releases the GIL.
SHORT_CALL_NANOSECONDS = 50_000
# Of one query over one key and value of one head, per channel. Measured: 0.08 to 0.10 on one core
# of an AMD EPYC, bf16 in its caches.
NANOSECONDS_PER_CHANNEL = 0.1


@dataclass(frozen=True)
class Selection:
    """What attention reads of segments with block summaries: the best blocks, up to a budget.

    `rate` is a share of the visible entries, `entries` a number that replaces it, `floor` the least
    budget by `rate`. `each_head` chooses for every query head instead of every kv head.
    """

    rate: float = 1.0
    entries: int = 0
    floor: int = 0
    by_logit: bool = False
    first_block: bool = False
    counts_tail: bool = False
    each_head: bool = False

    def to_c(self) -> _abi.tessera_selection:
        """The rule as the C interface takes it."""
        rule = _abi.tessera_selection()
        rule.struct_size = ctypes.sizeof(rule)
        rule.rate, rule.entries, rule.floor = self.rate, self.entries, self.floor
        rule.by_logit, rule.first_block = self.by_logit, self.first_block
        rule.counts_tail, rule.each_head = self.counts_tail, self.each_head
        return rule


_UNKNOWN = object()


def _absent() -> None:
    """Stands for an argument that was None. A weak reference to a dead tensor is something else."""


def _unknown() -> object:
    """Stands for a tensor without weak references: it is looked at in every call."""
    return _UNKNOWN


def _weak(tensor: Any) -> Any:
    if tensor is None:
        return _absent
    try:
        return weakref.ref(tensor)
    except TypeError:
        return _unknown


class _Slot:
    """The arguments of a layer's last call."""

    __slots__ = ("argument", "causal", "key", "lse", "moving", "out", "query", "rows", "selection",
                 "tensors", "value")

    def __init__(self, tensors: _abi.tessera_step_tensors | _abi.tessera_read_tensors) -> None:
        self.tensors: Any = tensors
        tensors.struct_size = ctypes.sizeof(tensors)
        self.argument = ctypes.byref(tensors)
        self.rows = -1
        self.query: Any = _absent
        self.key: Any = _absent
        self.value: Any = _absent
        self.out: Any = _absent
        self.lse: Any = _absent
        self.causal = True
        self.selection: Selection | None = None
        # Tensors whose memory can move while they live, with the address that they had.
        self.moving: list[tuple[Any, int]] = []

    def fits(self, rows: int, query: Any, key: Any, value: Any, out: Any, lse: Any, causal: bool,
             selection: Selection | None) -> bool:
        if not (
            self.rows == rows
            and self.query() is query
            and (self.key is _absent if key is None else self.key() is key)
            and (self.value is _absent if value is None else self.value() is value)
            and out is not None
            and self.out() is out
            and (self.lse is _absent if lse is None else self.lse() is lse)
            and self.causal is causal
            and self.selection is selection
        ):
            return False
        for tensor, pointer in self.moving:
            # It lives: the call has it.
            if tensor().data_ptr() != pointer:
                return False
        return True

    def remember(self, rows: int, query: Any, key: Any, value: Any, out: Any, lse: Any,
                 causal: bool, selection: Selection | None) -> None:
        self.rows = rows
        self.query, self.key, self.value = _weak(query), _weak(key), _weak(value)
        self.out, self.lse = _weak(out), _weak(lse)
        self.causal, self.selection = causal, selection
        self.moving = []
        for tensor, reference in ((query, self.query), (key, self.key), (value, self.value),
                                  (out, self.out), (lse, self.lse)):
            if tensor is not None and hasattr(tensor, "data_ptr"):
                self.moving.append((reference, tensor.data_ptr()))


class State:
    """What one step at a time uses."""

    def __init__(self) -> None:
        self.error = _abi.tessera_error()
        self.error_argument = ctypes.byref(self.error)
        self.made = ctypes.c_void_p()
        self.made_argument = ctypes.byref(self.made)
        self.options = _abi.tessera_step_options()
        self.options.struct_size = ctypes.sizeof(self.options)
        self.options_argument = ctypes.byref(self.options)
        self.slots: dict[tuple[int, int], _Slot] = {}


def new_output(query: Any, heads: int, head_dim: int, rows: int) -> Any:
    """Memory for outputs: a torch tensor of the query's type, or float32 in numpy."""
    if hasattr(query, "data_ptr"):
        return query.new_empty((rows, heads, head_dim))
    import numpy

    return numpy.empty((rows, heads, head_dim), numpy.float32)


def set_queries(slot: _Slot, worker: Worker, shape: Any, kind: int, rows: int, query: Any, out: Any,
                lse: Any, causal: bool, selection: Selection | None) -> list[Any]:
    """Fills in what steps and reads have in common. Returns what must be kept alive."""
    tensors = slot.tensors
    worker.check_device("query", query)
    worker.check_device("out", out)
    queries = _arrays.layout("query", query, shape.query_heads, shape.head_dim, (kind,))
    outputs = _arrays.layout("out", out, shape.query_heads, shape.head_dim,
                             (kind, _arrays.FP32))
    if not _arrays.is_writable(out):
        raise InvalidArgument("out is read-only", "argument")
    for name, count in (("query", queries.tokens), ("out", outputs.tokens)):
        if count != rows:
            raise InvalidArgument(f"{name} has {count} tokens; expected are {rows}", "argument")
    elements = rows * shape.query_heads * shape.head_dim
    tensors.query = queries.pointer
    tensors.query_bytes = elements * _arrays.ITEM_BYTES[kind]
    tensors.output = outputs.pointer
    tensors.output_bytes = elements * _arrays.ITEM_BYTES[outputs.type]
    tensors.output_type = outputs.type
    for strides, given in ((tensors.query_strides, queries), (tensors.output_strides, outputs)):
        _, strides.token, strides.head = given.strides
    tensors.causal = causal
    tensors.lse = None
    tensors.lse_count = 0
    keep = [queries.owner, outputs.owner]
    if lse is not None:
        sums = _arrays.describe(lse)
        if sums.type != _arrays.FP32 or not _is_dense(sums, 4) or not _arrays.is_writable(lse):
            raise InvalidArgument("lse must be dense, writable float32", "argument")
        tensors.lse = sums.pointer
        tensors.lse_count = _product(sums.shape)
        keep.append(sums.owner)
    tensors.selection = None
    if selection is not None:
        rule = selection.to_c()
        tensors.selection = ctypes.addressof(rule)
        keep.append(rule)
    return keep


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _is_dense(rows: _arrays.Rows, item: int) -> bool:
    for size, stride in zip(reversed(rows.shape), reversed(rows.strides)):
        if size != 1 and stride != item:
            return False
        item *= size
    return True


class Step:
    """One decode iteration of a batch. Made by `Worker.step`; use it as a context.

    Leaving the context commits the new tokens; an exception abandons them. Outputs are valid only
    once that has succeeded. Used by one thread.
    """

    def __init__(self, worker: Worker, sequences: AnySequence[Sequence],
                 new_tokens: int | AnySequence[int], timeout: float, stream: int | None) -> None:
        self._pointer: int | None = None
        self._keep: list[Any] = []
        self._accepted: Any = None
        self._worker = worker
        self._sequences = sequences = tuple(sequences)
        if not sequences:
            raise InvalidArgument("a step needs at least one sequence", "argument")
        self._model = sequences[0].model
        if isinstance(new_tokens, int):
            each = None
            self._rows = new_tokens * len(sequences)
        else:
            each = (ctypes.c_uint32 * len(sequences))(*new_tokens)
            self._rows = sum(each)
        self._new_tokens = new_tokens
        self._forks = _library.Fork.count
        self._state = state = worker.take_state()
        options = state.options
        options.new_tokens = new_tokens if each is None else 1
        options.new_tokens_each = None if each is None else ctypes.addressof(each)
        options.timeout_ms = 0
        options.cuda_stream = stream
        options.parallel_for, options.parallel_context = worker.executor
        handles = (ctypes.c_void_p * len(sequences))(*[each.pointer for each in sequences])
        try:
            self._begin(handles, timeout)
        except BaseException:
            worker.give_state(state)
            raise
        self._pointer = state.made.value
        entries = 0
        for sequence in sequences:
            sequence.is_warm = True
            entries += sequence.about_tokens
        self._channels = (entries + self._rows) * max(1, self._rows // len(sequences))
        self._model_key = id(self._model)

    def _begin(self, handles: Any, timeout: float) -> None:
        state, sequences = self._state, self._sequences
        # A step whose sequences decoded before begins in microseconds. It is tried without
        # waiting, so that the GIL is held no longer.
        if all(each.is_warm and not each.needs.while_decoding for each in sequences):
            code = _library.fast.tessera_step_begin(
                self._worker.pointer, handles, len(sequences), state.options_argument,
                state.made_argument, state.error_argument,
            )
            if code == _abi.TESSERA_OK:
                return
            if code != _abi.TESSERA_RESOURCE_EXHAUSTED:
                raise make_error(code, state.error)
        state.options.timeout_ms = round(timeout * 1000)
        with self._worker.in_call() as worker:
            code = _library.slow.tessera_step_begin(
                worker, handles, len(sequences), state.options_argument, state.made_argument,
                state.error_argument,
            )
        check(code, state.error)

    def _slot(self, layer: int) -> _Slot:
        key = (self._model_key, layer)
        slot = self._state.slots.get(key)
        if slot is None:
            self._model.layer(layer)
            slot = self._state.slots[key] = _Slot(_abi.tessera_step_tensors())
        return slot

    def attend(
        self,
        layer: int,
        query: Any,
        key: Any = None,
        value: Any = None,
        *,
        out: Any = None,
        lse: Any = None,
        causal: bool = True,
        selection: Selection | None = None,
    ) -> Any:
        """Appends the layer's new rows, if `key` and `value` are given, and attends over all.

        Rows are [new tokens of all sequences, heads, head_dim], token after token, sequence after
        sequence; [batch, new tokens, heads, head_dim] is the same. Any strides between rows. `out`:
        the query's shape, in the model's type or float32; made if it is None. `lse`: float32,
        [tokens, query_heads], receives natural log-sum-exps. Returns `out`.
        """
        slot = self._slot(layer)
        if not slot.fits(self._rows, query, key, value, out, lse, causal, selection):
            out = self._fill(slot, layer, query, key, value, out, lse, causal, selection)
        self._keep.append((query, key, value, out, lse))
        name = "tessera_step_attend" if key is None else "tessera_step_append_and_attend"
        self._run(name, layer, slot)
        return out

    def append(self, layer: int, key: Any, value: Any) -> None:
        """Appends the layer's new rows without attending. Once per layer and step."""
        slot = _Slot(_abi.tessera_step_tensors())
        self._set_rows(slot, layer, key, value)
        self._run("tessera_step_append", layer, slot)

    def _fill(self, slot: _Slot, layer: int, query: Any, key: Any, value: Any, out: Any, lse: Any,
              causal: bool, selection: Selection | None) -> Any:
        slot.rows = -1
        shape = self._model.layer(layer)
        if out is None:
            out = new_output(query, shape.query_heads, shape.head_dim, self._rows)
        self._keep += set_queries(slot, self._worker, shape, self._model.type, self._rows, query,
                                  out, lse, causal, selection)
        if (key is None) != (value is None):
            raise InvalidArgument("key and value must be given together", "argument")
        if key is not None:
            self._set_rows(slot, layer, key, value)
        if selection is None:  # a rule's memory is not kept from step to step
            slot.remember(self._rows, query, key, value, out, lse, causal, selection)
        return out

    def _set_rows(self, slot: _Slot, layer: int, key: Any, value: Any) -> None:
        shape, kind = self._model.layer(layer), self._model.type
        tensors = slot.tensors
        layouts = []
        for name, tensor in (("key", key), ("value", value)):
            self._worker.check_device(name, tensor)
            rows = _arrays.layout(name, tensor, shape.kv_heads, shape.head_dim, (kind,))
            if rows.tokens != self._rows:
                raise InvalidArgument(
                    f"{name} has {rows.tokens} tokens; expected are {self._rows}", "argument"
                )
            layouts.append(rows)
        keys, values = layouts
        tensors.key, tensors.value = keys.pointer, values.pointer
        tensors.key_bytes = (self._rows * shape.kv_heads * shape.head_dim
                             * _arrays.ITEM_BYTES[kind])
        _, tensors.key_strides.token, tensors.key_strides.head = keys.strides
        _, tensors.value_strides.token, tensors.value_strides.head = values.strides
        self._keep += [keys.owner, values.owner]

    def _run(self, name: str, layer: int, slot: _Slot) -> None:
        pointer = self._take()
        shape = self._model.layers[layer]
        work = self._channels * shape.query_heads * shape.head_dim * NANOSECONDS_PER_CHANNEL
        state = self._state
        if work < SHORT_CALL_NANOSECONDS:
            code = getattr(_library.fast, name)(pointer, layer, slot.argument, state.error_argument)
        else:
            self._pointer = None  # another thread must not end the step meanwhile
            code = getattr(_library.slow, name)(pointer, layer, slot.argument, state.error_argument)
            self._pointer = pointer
        if code:
            slot.rows = -1
            raise make_error(code, state.error)

    def _take(self) -> int:
        if self._forks != _library.Fork.count:
            raise Forked("the step was begun before fork(); only the parent can use it")
        if self._pointer is None:
            raise FailedPrecondition("the step is over, or another thread uses it")
        return self._pointer

    def accept(self, counts: AnySequence[int]) -> None:
        """Commits only the first `counts[s]` new tokens of sequence s (speculative decoding)."""
        self._accepted = (ctypes.c_uint32 * len(counts))(*counts)

    def end(self) -> None:
        """Commits. Leaving the context does it."""
        pointer = self._take()
        state, accepted = self._state, self._accepted
        count = 0 if accepted is None else len(accepted)
        code = _library.fast.tessera_step_end(pointer, accepted, count, state.error_argument)
        if code:
            failed = make_error(code, state.error)
            self.abandon()
            raise failed
        new = self._new_tokens
        for i, sequence in enumerate(self._sequences):
            if accepted is not None:
                sequence.about_tokens += accepted[i]
            else:
                sequence.about_tokens += new if isinstance(new, int) else new[i]
        self.abandon()

    def abandon(self) -> None:
        """Ends the step with nothing committed. Does nothing if it is over."""
        pointer, self._pointer = self._pointer, None
        if pointer is None or self._forks != _library.Fork.count:
            return
        _library.fast.tessera_step_destroy(pointer)
        self._keep = []
        self._worker.give_state(self._state)

    def __enter__(self) -> Step:
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
