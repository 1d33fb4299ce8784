"""A model's geometry, as a worker states it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import _abi, _arrays, _library
from .errors import InvalidArgument, check, new_error


@dataclass(frozen=True)
class Layer:
    """One attention layer. `head_dim` is 64, 128 or 256; `query_heads` a multiple of `kv_heads`.

    `scale` 0 means 1 / sqrt(head_dim); `sliding_window` and `logit_softcap` 0 mean none; `sinks`
    has one logit per query head, or none. `rope_theta` None: the layer has the model's RoPE.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float = 0.0
    sliding_window: int = 0
    logit_softcap: float = 0.0
    sinks: tuple[float, ...] = ()
    rope_theta: float | None = None
    rope_interleaved: bool = False
    rope_frequencies: tuple[float, ...] = ()


class Model:
    """A registered model. Made by `Worker.model`."""

    __slots__ = ("_handle", "dtype", "layers", "name", "rope_theta", "type")

    def __init__(self, handle: _library.Handle, name: str, layers: tuple[Layer, ...], kind: int,
                 rope_theta: float) -> None:
        self._handle = handle
        self.name = name
        self.layers = layers
        self.type = kind
        self.dtype = _arrays.TYPE_NAMES[kind]
        self.rope_theta = rope_theta

    def layer(self, index: int) -> Layer:
        """The geometry of a layer. InvalidArgument if the model has fewer."""
        if 0 <= index < len(self.layers):
            return self.layers[index]
        raise InvalidArgument(
            f"layer is {index}; the model has {len(self.layers)} layers", "argument"
        )

    def __repr__(self) -> str:
        return f"<tessera_kv.Model {self.name!r}: {len(self.layers)} layers, {self.dtype}>"


def _set_rope(target: Any, theta: float, interleaved: bool, frequencies: Iterable[float],
              keep: list[Any]) -> None:
    """Sets the RoPE of a layer or a model."""
    target.rope_theta = theta
    target.rope_interleaved = interleaved
    values = [float(value) for value in frequencies]
    if values:
        numbers = (ctypes.c_double * len(values))(*values)
        keep.append(numbers)
        target.rope_frequencies = ctypes.addressof(numbers)
        target.rope_frequency_count = len(values)


def register(
    worker: int,
    name: str,
    layers: tuple[Layer, ...],
    dtype: str,
    rope_theta: float,
    rope_interleaved: bool,
    rope_frequencies: Iterable[float],
    delimiters: Iterable[int],
    weights_id: bytes | str,
    adapter_id: bytes | str,
) -> Model:
    kind = _arrays.TYPES.get(dtype)
    if kind is None:
        raise InvalidArgument(
            f'dtype is "{dtype}"; known are {", ".join(_arrays.TYPES)}', "argument"
        )
    array = (_abi.tessera_layer * len(layers))()
    keep: list[Any] = []
    for target, layer in zip(array, layers):
        target.struct_size = ctypes.sizeof(_abi.tessera_layer)
        target.query_heads = layer.query_heads
        target.kv_heads = layer.kv_heads
        target.head_dim = layer.head_dim
        target.scale = layer.scale
        target.sliding_window = layer.sliding_window
        target.logit_softcap = layer.logit_softcap
        if layer.sinks:
            if len(layer.sinks) != layer.query_heads:
                raise InvalidArgument(
                    f"{len(layer.sinks)} sinks for {layer.query_heads} query heads", "argument"
                )
            sinks = (ctypes.c_float * len(layer.sinks))(*layer.sinks)
            keep.append(sinks)
            target.sinks = ctypes.addressof(sinks)
        if layer.rope_theta is not None:
            target.has_rope = True
            _set_rope(target, layer.rope_theta, layer.rope_interleaved, layer.rope_frequencies,
                      keep)
    ids = _arrays.tokens_of(delimiters)
    options = _abi.tessera_model_options()
    options.struct_size = ctypes.sizeof(options)
    options.name = name.encode()
    options.type = kind
    options.layers = ctypes.addressof(array)
    options.layer_count = len(layers)
    _set_rope(options, rope_theta, rope_interleaved, rope_frequencies, keep)
    for field, value in (("weights_id", weights_id), ("adapter_id", adapter_id)):
        _arrays.set_bytes(options, field, value, keep)
    if len(ids):
        options.delimiter_token_ids = ctypes.addressof(ids)
        options.delimiter_count = len(ids)
    made = ctypes.c_void_p()
    error, argument = new_error()
    check(
        _library.slow.tessera_register_model(
            worker, ctypes.byref(options), ctypes.byref(made), argument
        ),
        error,
    )
    assert made.value is not None
    handle = _library.Handle(made.value, _library.slow.tessera_model_destroy)
    return Model(handle, name, layers, kind, rope_theta)
