"""A worker's attachment to the daemon of its node: the entry point of the package."""

from __future__ import annotations

import ctypes
import json
import math
import threading
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as AnySequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from . import _abi, _arrays, _library
from . import model as models
from .errors import InvalidArgument, NotFound, WrongDevice, check, make_error, new_error
from .model import Layer, Model
from .read import Read, fill
from .sequence import Sequence
from .step import Selection, State, Step

DEFAULT_ADDRESS = "unix:/run/tessera/tesserad.sock"


@dataclass(frozen=True)
class Tls:
    """PEM files for TLS over TCP. Empty names: the system's authorities, no own certificate."""

    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    server_name: str = ""


class Event(NamedTuple):
    """What happened to the attachment: see `Worker.events`."""

    kind: str  # "draining", "lease_lost", "reattached", "gone" or "overflow"
    text: str = ""  # why the lease was lost
    limit: float = 0.0  # seconds until a draining daemon exits
    same_daemon: bool = False  # reattached to the same process
    sequence_id: int = 0  # which is gone


_EVENT_KINDS = ("none", "draining", "lease_lost", "reattached", "gone", "overflow")


@dataclass(frozen=True)
class Match:
    """The longest published prefix of a token list. False if there is none."""

    worker: Worker
    model: Model
    prefix: int  # id; 0: nothing is published
    tokens: int  # that match
    computing: int  # if more than `tokens`: as many are being computed by another worker
    computation: int  # not 0: this worker has announced that it computes the rest

    def __bool__(self) -> bool:
        return self.prefix != 0

    def withdraw(self) -> None:
        """Withdraws the announcement of `will_compute`, for a worker that will not publish."""
        if self.computation:
            self.worker.free_prefix(self.computation)


_CUDA_DEVICES = (2, 13)  # in DLPack: memory of a GPU, managed memory


def _text(text: str | None) -> bytes | None:
    return text.encode() if text else None


class Worker:
    """One attachment. Made by `attach`. May be used from any thread; a context detaches it."""

    def __init__(self, pointer: int, executor: int | None, copy: bool) -> None:
        self._handle = _library.Handle(pointer, _library.slow.tessera_detach)
        self._executor: _library.Handle | None = None
        if executor is not None:
            self._executor = _library.Handle(executor, _library.slow.tessera_executor_destroy)
        # As the options of steps and reads take it.
        self.executor: tuple[int | None, int | None] = (None, None)
        if executor is not None:
            run = ctypes.cast(_library.slow.tessera_executor_run, ctypes.c_void_p)
            self.executor = (run.value, executor)
        self._idle = threading.Condition()
        self._calls = 0
        self._states: list[State] = []
        welcome = self.welcome()
        self.device: str = welcome["device"]
        self.device_uuid: str = welcome["device_uuid_text"]
        self._takes_host = self.device == "cpu" or copy or not self.is_mapped
        _library.close_at_exit(self)

    # ---- state

    @property
    def pointer(self) -> int:
        """The handle of the C interface."""
        return self._handle.get()

    @property
    def is_mapped(self) -> bool:
        """Whether steps use mapped memory instead of RPCs."""
        return bool(_library.fast.tessera_is_mapped(self.pointer))

    @property
    def is_draining(self) -> bool:
        """Whether the daemon has announced that it will exit."""
        return bool(_library.fast.tessera_is_draining(self.pointer))

    @property
    def session_id(self) -> int:
        return int(_library.fast.tessera_session_id(self.pointer))

    def check(self) -> None:
        """Raises `Unavailable` with the reason if the lease is lost."""
        error, argument = new_error()
        check(_library.fast.tessera_status(self.pointer, argument), error)

    def _json(self, function: Any) -> dict[str, Any]:
        text = ctypes.c_void_p()
        error, argument = new_error()
        with self.in_call() as pointer:
            check(function(pointer, ctypes.byref(text), argument), error)
        found: dict[str, Any] = json.loads(_library.text_of(text))
        return found

    def stats(self) -> dict[str, Any]:
        """The daemon, its pool and this worker's tenant, as `tessera status --json` prints them."""
        return self._json(_library.slow.tessera_stats_json)

    def welcome(self) -> dict[str, Any]:
        """How the daemon introduced itself."""
        return self._json(_library.slow.tessera_welcome_json)

    def reattach(self) -> int:
        """Attaches again after the lease was lost. Returns how many sequences are gone."""
        gone = ctypes.c_size_t()
        error, argument = new_error()
        with self.in_call() as pointer:
            check(_library.slow.tessera_reattach(pointer, ctypes.byref(gone), argument), error)
        return gone.value

    def events_fd(self) -> int:
        """A descriptor that is readable while events wait. Poll it; neither read nor close it."""
        return int(_library.fast.tessera_events_fd(self.pointer))

    def events(self) -> Iterator[Event]:
        """Takes the events that wait, oldest first. Never blocks."""
        while True:
            event = _abi.tessera_event()
            event.struct_size = ctypes.sizeof(event)
            error, argument = new_error()
            check(
                _library.fast.tessera_next_event(self.pointer, ctypes.byref(event), argument), error
            )
            if event.kind == _abi.TESSERA_EVENT_NONE:
                return
            yield Event(
                _EVENT_KINDS[event.kind] if event.kind < len(_EVENT_KINDS) else "unknown",
                event.text.decode("utf-8", "replace"),
                event.limit_ms / 1000,
                bool(event.same_daemon),
                event.sequence_id,
            )

    # ---- models, sequences, prefixes

    def model(
        self,
        name: str,
        *,
        layers: int | AnySequence[Layer],
        query_heads: int = 0,
        kv_heads: int = 0,
        head_dim: int = 0,
        dtype: str = "bf16",
        rope_theta: float = 0.0,
        rope_interleaved: bool = False,
        rope_frequencies: Iterable[float] = (),
        delimiters: Iterable[int] = (),
        weights_id: bytes | str = b"",
        adapter_id: bytes | str = b"",
    ) -> Model:
        """Registers a model: a list of `Layer`, or a number of equal layers with this shape.

        `dtype` of K, V and Q: "bf16", "fp16" or "fp32". `rope_theta` 0: no rotary positions;
        `rope_frequencies`: the model's own, in radians per position. `delimiters`: ids of tokens
        that end a chunk of text, for policies that need them. `weights_id`, `adapter_id`: a hash or
        revision of the weights and of an adapter on them, at most 64 bytes: prefixes of other
        weights are never found.
        """
        if isinstance(layers, int):
            layers = [Layer(query_heads, kv_heads, head_dim)] * layers
        elif query_heads or kv_heads or head_dim:
            raise InvalidArgument("a list of layers has its own heads and dimensions", "argument")
        with self.in_call() as pointer:
            return models.register(pointer, name, tuple(layers), dtype, rope_theta,
                                   rope_interleaved, rope_frequencies, delimiters, weights_id,
                                   adapter_id)

    def sequence(self, model: Model, *, policy: str = "") -> Sequence:
        """Creates an empty sequence. `policy`: text such as "chunkkv:budget=0.35"; "" is dense."""
        return self._new_sequence(
            model, _library.slow.tessera_sequence_create, model._handle.get(), policy.encode()
        )

    def adopt(self, model: Model, sequence_id: int) -> Sequence:
        """The handle of a sequence that another session has handed over to this one."""
        return self._new_sequence(
            model, _library.slow.tessera_sequence_adopt, model._handle.get(), sequence_id
        )

    def _new_sequence(self, model: Model, function: Any, *arguments: Any) -> Sequence:
        made = ctypes.c_void_p()
        error, argument = new_error()
        with self.in_call() as pointer:
            check(function(pointer, *arguments, ctypes.byref(made), argument), error)
        assert made.value is not None
        return Sequence(self, model, made.value)

    def match(self, model: Model, ids: Any, *, policy: str = "", wait: float = 0.0,
              will_compute: bool = False) -> Match:
        """Finds the longest published prefix of these token ids under a policy.

        `wait`: seconds to wait if another worker is computing more of them. `will_compute`: this
        worker will compute and publish what is missing, and others may wait for it.
        """
        array = _arrays.tokens_of(ids)
        options = _abi.tessera_match_options()
        options.struct_size = ctypes.sizeof(options)
        options.policy = _text(policy)
        options.token_ids = ctypes.addressof(array)
        options.token_count = len(array)
        options.wait_ms = round(wait * 1000)
        options.will_compute = will_compute
        found = _abi.tessera_prefix_match()
        found.struct_size = ctypes.sizeof(found)
        error, argument = new_error()
        with self.in_call() as pointer:
            check(
                _library.slow.tessera_match(
                    pointer, model._handle.get(), ctypes.byref(options), ctypes.byref(found),
                    argument,
                ),
                error,
            )
        return Match(self, model, found.prefix_id, found.tokens, found.computing_tokens,
                     found.computation_id)

    def fork(self, match: Match, *, tokens: int = 0) -> Sequence:
        """Creates a sequence that begins with the matched tokens, without copying them.

        `tokens`: only the first so many, a multiple of 32; 0: all.
        """
        if not match:
            raise NotFound("the match has no prefix: nothing was published")
        given = _abi.tessera_prefix_match()
        given.struct_size = ctypes.sizeof(given)
        given.prefix_id, given.tokens = match.prefix, match.tokens
        return self._new_sequence(
            match.model, _library.slow.tessera_fork_prefix, match.model._handle.get(),
            ctypes.byref(given), tokens,
        )

    def free_prefix(self, prefix: int) -> None:
        """Removes a prefix from the index; its forks are not affected."""
        error, argument = new_error()
        with self.in_call() as pointer:
            check(_library.slow.tessera_free_id(pointer, prefix, argument), error)

    # ---- decode, read

    def step(self, sequences: AnySequence[Sequence], *, new_tokens: int | AnySequence[int] = 1,
             timeout: float = 1.0, stream: int | None = None) -> Step:
        """Begins a step of sequences of one model.

        `new_tokens`: of each sequence, or one count per sequence. `timeout`: seconds to wait for
        room in the tail rings. `stream`: a cudaStream_t, if the daemon's memory is on a GPU.
        """
        return Step(self, sequences, new_tokens, timeout, stream)

    def read(self, sequences: AnySequence[Sequence], *, timeout: float = 1.0,
             stream: int | None = None) -> Read:
        """Begins a read: attention over committed tokens with any number of queries."""
        return Read(self, sequences, timeout, stream)

    def attend_rpc(
        self,
        sequences: AnySequence[Sequence],
        layer: int,
        query: Any,
        *,
        out: Any = None,
        lse: Any = None,
        causal: bool = True,
        queries: AnySequence[int] | None = None,
        first_query_position: int | AnySequence[int] | None = None,
        selection: Selection | None = None,
    ) -> Any:
        """As `Read.attend`, computed by the daemon in one RPC. Bit for bit the same."""
        tensors, out, keep = fill(self, sequences, layer, query, out, lse, causal, queries,
                                  first_query_position, selection)
        handles = (ctypes.c_void_p * len(sequences))(*[each.pointer for each in sequences])
        error, argument = new_error()
        with self.in_call() as pointer:
            code = _library.slow.tessera_attend_rpc(
                pointer, handles, len(sequences), layer, ctypes.byref(tensors), argument
            )
        del keep
        check(code, error)
        return out

    def select(self, sequence: Sequence, layer: int, query: Any, selection: Selection, *,
               causal: bool = True, first_query_position: int | None = None) -> dict[str, Any]:
        """The entries that attention would read under a rule: ranges of positions per head."""
        shape = sequence.model.layer(layer)
        rows = _arrays.layout("query", query, shape.query_heads, shape.head_dim,
                              (sequence.model.type,))
        rule = selection.to_c()
        tensors = _abi.tessera_read_tensors()
        tensors.struct_size = ctypes.sizeof(tensors)
        tensors.queries = rows.tokens
        tensors.query = rows.pointer
        tensors.query_bytes = (rows.tokens * shape.query_heads * shape.head_dim
                               * _arrays.ITEM_BYTES[sequence.model.type])
        _, tensors.query_strides.token, tensors.query_strides.head = rows.strides
        tensors.causal = causal
        tensors.selection = ctypes.addressof(rule)
        position = ctypes.c_uint64(first_query_position or 0)
        if first_query_position is not None:
            tensors.first_query_positions = ctypes.addressof(position)
        text = ctypes.c_void_p()
        error, argument = new_error()
        with self.in_call() as pointer, sequence.exclusive():
            check(
                _library.slow.tessera_select_json(
                    pointer, sequence.pointer, layer, ctypes.byref(tensors), ctypes.byref(text),
                    argument,
                ),
                error,
            )
        found: dict[str, Any] = json.loads(_library.text_of(text))
        return found

    # ---- for steps

    def check_device(self, name: str, tensor: Any) -> None:
        """WrongDevice if the daemon's memory and the tensor are on different devices."""
        is_cuda = getattr(tensor, "is_cuda", None)
        if is_cuda is None:
            is_cuda = hasattr(tensor, "__cuda_array_interface__")
            if not is_cuda and hasattr(tensor, "__dlpack_device__"):
                is_cuda = tensor.__dlpack_device__()[0] in _CUDA_DEVICES
        if is_cuda and self.device == "cpu":
            raise WrongDevice(
                f"{name} is on {getattr(tensor, 'device', 'a GPU')}; the daemon keeps KV in host "
                "memory. Use the daemon of that GPU (attach with device=...), or pass host tensors",
                "argument",
            )
        if not is_cuda and not self._takes_host:
            raise WrongDevice(
                f"{name} is in host memory; the daemon keeps KV on {self.device} "
                f"({self.device_uuid}). Pass tensors of that GPU, or attach with copy=True",
                "argument",
            )

    def take_state(self) -> State:
        """What a step uses while it is open; `give_state` returns it."""
        try:
            return self._states.pop()
        except IndexError:
            return State()

    def give_state(self, state: State) -> None:
        """For a later step."""
        self._states.append(state)

    @contextmanager
    def in_call(self) -> Iterator[int]:
        """A call that releases the GIL: `close` waits for its end."""
        with self._idle:
            pointer = self.pointer
            self._calls += 1
        try:
            yield pointer
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    # ---- life

    def close(self) -> None:
        """Detaches: the daemon frees the worker's sequences. Waits for calls of other threads."""
        with self._idle:
            pointer, self._handle.pointer = self._handle.pointer, None
            if pointer is None or self._handle._forks != _library.Fork.count:
                return
            self._idle.wait_for(lambda: self._calls == 0)
        _library.slow.tessera_detach(pointer)

    def __enter__(self) -> Worker:
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
            return "<tessera_kv.Worker, closed>"
        return f"<tessera_kv.Worker of session {self.session_id:#x} on {self.device}>"


def attach(
    address: str = "",
    *,
    name: str = "",
    threads: int = 1,
    tenant_token: str = "",
    group: str = "",
    rank: int = 0,
    group_size: int = 0,
    map_memory: bool = True,
    reattach: bool = False,
    attach_timeout: float = 10.0,
    rpc_timeout: float = 60.0,
    reattach_timeout: float = 60.0,
    tls: Tls | None = None,
    device: str = "",
    implementation: str = "",
    prefix_hash: str = "",
    copy: bool = False,
    cache_salt: bytes | str = b"",
    pin_limit: float = 0.0,
) -> Worker:
    """Attaches to the daemon of this node. Times are in seconds.

    `address`: "unix:PATH", "unix:DIRECTORY/" or "HOST:PORT"; "" is the default socket. `threads`
    compute attention, the caller's among them. `map_memory=False` uses RPCs for everything.
    `reattach`: attach again without being asked when the lease is lost. `device`: the UUID of the
    daemon's device, or "cuda:N". `copy`: allow host tensors if the daemon's memory is on a GPU.
    `cache_salt`: sets this worker's prefixes apart, at most 64 bytes. `pin_limit`: how long a step
    may take while memory of the tenant waits to be freed; 0: as the daemon says in `welcome()`.
    """
    options = _abi.tessera_attach_options()
    options.struct_size = ctypes.sizeof(options)
    options.address = _text(address)
    options.tenant_token = _text(tenant_token)
    options.worker_name = _text(name)
    options.group = _text(group)
    options.rank, options.group_size = rank, group_size
    options.map_memory = map_memory
    options.reattach_automatic = reattach
    options.attach_timeout_ms = round(attach_timeout * 1000)
    options.rpc_timeout_ms = round(rpc_timeout * 1000)
    options.reattach_timeout_ms = round(reattach_timeout * 1000)
    if tls is not None:
        options.tls = 1
        options.tls_ca_file = _text(tls.ca_file)
        options.tls_certificate_file = _text(tls.certificate_file)
        options.tls_key_file = _text(tls.key_file)
        options.tls_server_name = _text(tls.server_name)
    options.device = _text(device)
    options.implementation = _text(implementation)
    options.prefix_hash = _text(prefix_hash)
    keep: list[Any] = []
    _arrays.set_bytes(options, "cache_salt", cache_salt, keep)
    options.pin_limit_ms = math.ceil(pin_limit * 1000)
    made, team = ctypes.c_void_p(), ctypes.c_void_p()
    error, argument = new_error()
    if threads != 1:
        check(
            _library.slow.tessera_executor_create(max(threads, 0), ctypes.byref(team), argument),
            error,
        )
    code = _library.slow.tessera_attach(ctypes.byref(options), ctypes.byref(made), argument)
    if code != _abi.TESSERA_OK:
        _library.slow.tessera_executor_destroy(team)
        raise make_error(code, error)
    assert made.value is not None
    return Worker(made.value, team.value, copy)
