"""A worker's handle of one sequence."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _abi, _arrays, _library
from .errors import Busy, InvalidArgument, check, new_error
from .model import Model

if TYPE_CHECKING:
    from .worker import Worker


@dataclass(frozen=True)
class Needs:
    """What a sequence's policy must observe of a prompt before it compresses it."""

    queries: bool  # the queries of its tokens: `Sequence.observe`
    keys: bool  # also their keys
    token_ids: bool  # their ids: `Sequence.observe_tokens`
    while_decoding: bool  # the policy also acts while decoding, when a step begins


@dataclass(frozen=True)
class Description:
    """What the daemon holds of a sequence. Sizes are in bytes; shares are of what was appended.

    `raw` is the whole answer, as `tessera describe --json` prints it.
    """

    tokens: int
    policy: str
    state: str  # "live", "failed" or "offloaded"
    decoding: bool
    tile_bytes: int
    shared_tile_bytes: int
    rotation_bytes: int
    offloaded_bytes: int
    tokens_kept: float
    elements_kept: float
    bytes_kept: float
    raw: dict[str, Any]


class LaneRows(NamedTuple):
    """Entries of one lane, in lane order: the kv heads of a layer may keep different ones."""

    kv_head: int
    key: Any  # [entries, head_dim], as attention sees them; a copy
    value: Any
    positions: Any  # [entries]: the number of each entry's token
    weights: Any  # [entries]: the tokens that each entry stands for


class Published(NamedTuple):
    prefix: int  # id, for `Worker.free_prefix`
    deduplicated: bool  # another worker had published these tokens before


class Sequence:
    """A sequence of tokens in the daemon. Made by `Worker.sequence`, `fork` and `Worker.fork`.

    One call at a time: a second one raises `Busy` and never waits. Closing it, or leaving it as a
    context, frees it in the daemon.
    """

    def __init__(self, worker: Worker, model: Model, pointer: int) -> None:
        self._handle = _library.Handle(pointer, _library.slow.tessera_sequence_destroy)
        self._lock = threading.Lock()
        self.worker = worker
        self.model = model
        self.is_warm = False  # the last call was a step: the next one begins without an RPC
        self.about_tokens = self.tokens  # an estimate of the work of attention
        self._next_observed = [self.about_tokens] * len(model.layers)
        self.needs = self._read_needs()

    # ---- state

    @property
    def pointer(self) -> int:
        """The handle of the C interface."""
        return self._handle.get()

    @property
    def id(self) -> int:
        """The daemon's 64-bit id."""
        return int(_library.fast.tessera_sequence_id(self.pointer))

    @property
    def tokens(self) -> int:
        """Committed tokens, dropped ones included."""
        return int(_library.fast.tessera_sequence_tokens(self.pointer))

    @property
    def next_position(self) -> int:
        """The rotary position of the next token: `tokens`, unless the policy moves positions."""
        return int(_library.fast.tessera_sequence_next_position(self.pointer))

    @property
    def policy(self) -> str:
        text: bytes = _library.fast.tessera_sequence_policy(self.pointer)
        return text.decode()

    def _read_needs(self) -> Needs:
        needs = _abi.tessera_needs()
        needs.struct_size = ctypes.sizeof(needs)
        error, argument = new_error()
        check(_library.fast.tessera_sequence_needs(self.pointer, ctypes.byref(needs), argument),
              error)
        return Needs(bool(needs.queries), bool(needs.keys), bool(needs.token_ids),
                     bool(needs.while_decoding))

    def _describe(self, detail: int) -> dict[str, Any]:
        text = ctypes.c_void_p()
        with self._call() as (pointer, error, argument):
            check(
                _library.slow.tessera_sequence_describe_json(
                    pointer, detail, ctypes.byref(text), argument
                ),
                error,
            )
        found: dict[str, Any] = json.loads(_library.text_of(text))
        return found

    def describe(self, *, lanes: bool = False, entries: bool = False) -> Description:
        """Asks the daemon. `lanes`: `raw` also has every lane; `entries`: every position, too."""
        found = self._describe(2 if entries else 1 if lanes else 0)
        fields = {name: found[name] for name in Description.__dataclass_fields__ if name != "raw"}
        return Description(**fields, raw=found)

    def read(self, layer: int, *, kv_head: int | None = None, first_entry: int = 0,
             entries: int | None = None, dtype: str = "fp32") -> list[LaneRows]:
        """Copies rows of a layer out of the daemon, one `LaneRows` of numpy arrays per kv head.

        Rows of any form are decoded; dense rows come back bit for bit. `entries`: how many of each
        lane from `first_entry` on, all by default. `dtype`: "fp32" or the model's; bf16 rows are
        arrays of uint16, which carry the bits.
        """
        heads = range(self.model.layer(layer).kv_heads)
        if kv_head is not None:
            heads = range(kv_head, kv_head + 1)
        kind = _arrays.TYPES.get(dtype)
        if kind is None:
            raise InvalidArgument(
                f'dtype is "{dtype}"; known are {", ".join(_arrays.TYPES)}', "argument"
            )
        with self._call() as (pointer, error, argument):
            return [self._read_lane(pointer, error, argument, layer, head, first_entry, entries,
                                    kind) for head in heads]

    def _read_lane(self, pointer: int, error: _abi.tessera_error, argument: object, layer: int,
                   head: int, first: int, entries: int | None, kind: int) -> LaneRows:
        import numpy

        def ask(room: int, arrays: tuple[Any, ...]) -> _abi.tessera_lane_rows:
            call = _abi.tessera_lane_rows()
            call.struct_size = ctypes.sizeof(call)
            call.layer, call.kv_head, call.type = layer, head, kind
            call.first_entry, call.entries = first, room
            if arrays:
                call.key, call.value, call.position, call.weight = (
                    array.ctypes.data for array in arrays
                )
            check(
                _library.slow.tessera_sequence_read(pointer, ctypes.byref(call), argument), error
            )
            return call

        item = {_arrays.FP32: numpy.float32, _arrays.FP16: numpy.float16}.get(kind, numpy.uint16)
        shape = (self.model.layer(layer).head_dim,)
        held = ask(0, ()).lane_entries
        while True:
            room = max(held - first, 0)
            if entries is not None:
                room = min(room, entries)
            arrays = (
                numpy.empty((room, *shape), item), numpy.empty((room, *shape), item),
                numpy.empty(room, numpy.uint64), numpy.empty(room, numpy.float32),
            )
            if room == 0:
                return LaneRows(head, *arrays)
            call = ask(room, arrays)
            if call.lane_entries == held:
                return LaneRows(head, *arrays)
            held = call.lane_entries  # compressed meanwhile

    # ---- prompts

    def append(
        self,
        key: Any,
        value: Any,
        *,
        layer: int | None = None,
        first_layer: int = 0,
        end_of_prompt: bool = False,
    ) -> int:
        """Appends rows in bulk. Returns the tokens that every layer then holds.

        With `layer`: rows of that layer, [tokens, kv_heads, head_dim]. Without: rows of consecutive
        layers from `first_layer` on, [layers, tokens, kv_heads, head_dim]. Any strides.
        `end_of_prompt`: the prompt of these layers ends, and the daemon compresses it.
        """
        first = first_layer if layer is None else layer
        shape = self.model.layer(first)
        types = (self.model.type,)
        layouts = []
        for name, tensor in (("key", key), ("value", value)):
            self.worker.check_device(name, tensor)
            layouts.append(
                _arrays.layout(name, tensor, shape.kv_heads, shape.head_dim, types,
                               with_layers=layer is None)
            )
        keys, values = layouts
        if (keys.layers, keys.tokens) != (values.layers, values.tokens):
            raise InvalidArgument("key and value have different shapes", "argument")
        call = _abi.tessera_append()
        call.struct_size = ctypes.sizeof(call)
        call.key = keys.pointer
        call.value = values.pointer
        call.bytes = (keys.layers * keys.tokens * shape.kv_heads * shape.head_dim
                      * _arrays.ITEM_BYTES[self.model.type])
        call.tokens = keys.tokens
        call.first_layer = first
        call.layers = keys.layers
        call.end_of_prompt = end_of_prompt
        _set_strides(call.key_strides, keys)
        _set_strides(call.value_strides, values)
        held = ctypes.c_uint64()
        with self._call() as (pointer, error, argument):
            check(
                _library.slow.tessera_sequence_append(
                    pointer, ctypes.byref(call), ctypes.byref(held), argument
                ),
                error,
            )
        self.about_tokens = held.value
        return held.value

    def observe(
        self,
        layer: int,
        query: Any,
        key: Any = None,
        *,
        first_token: int | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        """Lets the policy observe rows of a prompt, before the append that ends it.

        `query`: [tokens, query_heads, head_dim]; `key`: [tokens, kv_heads, head_dim], used if
        `needs.keys`. `first_token` defaults to the token after the last observed one of the layer.
        `prompt_tokens`: how long the prompt will be, if known. Does nothing if the policy needs
        nothing.
        """
        if not self.needs.queries:
            return
        shape = self.model.layer(layer)
        types = (self.model.type,)
        queries = _arrays.layout("query", query, shape.query_heads, shape.head_dim, types)
        item = _arrays.ITEM_BYTES[self.model.type]
        call = _abi.tessera_observation()
        call.struct_size = ctypes.sizeof(call)
        call.layer = layer
        call.first_token = self._next_observed[layer] if first_token is None else first_token
        call.query = queries.pointer
        call.query_bytes = queries.tokens * shape.query_heads * shape.head_dim * item
        call.prompt_tokens = prompt_tokens
        _set_strides(call.query_strides, queries)
        if self.needs.keys and key is not None:
            keys = _arrays.layout("key", key, shape.kv_heads, shape.head_dim, types)
            call.key = keys.pointer
            call.key_bytes = keys.tokens * shape.kv_heads * shape.head_dim * item
            _set_strides(call.key_strides, keys)
        with self._call() as (pointer, error, argument):
            check(
                _library.slow.tessera_sequence_observe(pointer, ctypes.byref(call), argument), error
            )
        self._next_observed[layer] = call.first_token + queries.tokens

    def observe_tokens(self, ids: Any, *, first_token: int = 0) -> None:
        """Gives the ids of tokens, decoded ones too, if `needs.token_ids`."""
        if not self.needs.token_ids:
            return
        array = _arrays.tokens_of(ids)
        with self._call() as (pointer, error, argument):
            check(
                _library.slow.tessera_sequence_observe_tokens(
                    pointer, first_token, array, len(array), argument
                ),
                error,
            )

    def end_prompt(self) -> None:
        """Ends the prompt in every layer: the daemon compresses it in the background."""
        self._plain(_library.slow.tessera_sequence_end_prompt)

    def compress(self) -> None:
        """Has the daemon compress the sequence as its policy says, and waits."""
        self._plain(_library.slow.tessera_sequence_compress)

    # ---- forks, prefixes, residence

    def fork(self, policy: str | None = None) -> Sequence:
        """A sequence with the same tokens, under the same policy or another. Copies no rows."""
        child = ctypes.c_void_p()
        with self._call() as (pointer, error, argument):
            if policy is None:
                code = _library.slow.tessera_sequence_fork(pointer, ctypes.byref(child), argument)
            else:
                code = _library.slow.tessera_sequence_fork_as(
                    pointer, policy.encode(), ctypes.byref(child), argument
                )
            check(code, error)
        assert child.value is not None
        return Sequence(self.worker, self.model, child.value)

    def publish(self, ids: Any, *, ttl: float = 0.0, pinned: bool = False) -> Published:
        """Publishes the tokens with these ids for every worker of the tenant.

        `ttl`: seconds that the prefix may be unused, 0 for no limit. `pinned`: kept until it is
        freed. Under a policy that drops tokens, `ids` must name all tokens of the sequence.
        """
        array = _arrays.tokens_of(ids)
        options = _abi.tessera_publish_options()
        options.struct_size = ctypes.sizeof(options)
        options.ttl_ms = round(ttl * 1000)
        options.pinned = pinned
        prefix, deduplicated = ctypes.c_uint64(), ctypes.c_int()
        with self._call() as (pointer, error, argument):
            check(
                _library.slow.tessera_sequence_publish(
                    pointer, array, len(array), ctypes.byref(options), ctypes.byref(prefix),
                    ctypes.byref(deduplicated), argument,
                ),
                error,
            )
        return Published(prefix.value, bool(deduplicated.value))

    def truncate(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens. OutOfRange if there are fewer."""
        with self._call() as (pointer, error, argument):
            check(_library.slow.tessera_sequence_truncate(pointer, tokens, argument), error)
        self._next_observed = [min(tokens, each) for each in self._next_observed]
        self.about_tokens = tokens

    def park(self) -> None:
        """Gives the tail rings back, for a sequence that will not decode for a while."""
        self._plain(_library.slow.tessera_sequence_park)

    def offload(self) -> int:
        """Moves its memory to the daemon's host tier. Returns the bytes that this frees."""
        moved = ctypes.c_uint64()
        with self._call() as (pointer, error, argument):
            check(
                _library.slow.tessera_sequence_offload(pointer, ctypes.byref(moved), argument),
                error,
            )
        return moved.value

    def restore(self) -> None:
        """Moves it back ahead of time; any call that needs it does."""
        self._plain(_library.slow.tessera_sequence_restore)

    def handover(self, session_id: int) -> None:
        """Gives the sequence to another session of the tenant, which adopts it by its id."""
        with self._call() as (pointer, error, argument):
            check(_library.slow.tessera_sequence_handover(pointer, session_id, argument), error)

    # ---- life

    def close(self) -> None:
        """Frees the sequence in the daemon, unless it was handed over."""
        with self.exclusive():
            self._handle.close()

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._handle.pointer is None:
            return "<tessera_kv.Sequence, closed>"
        return f"<tessera_kv.Sequence {self.id:#x}: {self.tokens} tokens, {self.policy or 'dense'}>"

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Raises `Busy` if another thread is in a call of this sequence."""
        if not self._lock.acquire(blocking=False):
            raise Busy("another thread is in a call of this sequence", "sequence_busy")
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _call(self) -> Iterator[tuple[int, _abi.tessera_error, object]]:
        with self.exclusive():
            self.is_warm = False
            error, argument = new_error()
            yield self.pointer, error, argument

    def _plain(self, function: Any) -> None:
        with self._call() as (pointer, error, argument):
            check(function(pointer, argument), error)


def _set_strides(strides: _abi.tessera_strides, rows: _arrays.Layout) -> None:
    strides.layer, strides.token, strides.head = rows.strides
