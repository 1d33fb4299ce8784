"""What a tensor is: torch and numpy tensors, CUDA arrays, DLPack, and buffers, all used in place.

A tensor becomes `Rows`: an address, and strides between rows. Nothing is copied here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as AnySequence
from typing import Any, NamedTuple

from . import _abi
from .errors import InvalidArgument, LayoutError

BF16, FP16, FP32 = _abi.TESSERA_BF16, _abi.TESSERA_FP16, _abi.TESSERA_FP32
TYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
TYPE_NAMES = {number: name for name, number in TYPES.items()}
ITEM_BYTES = {BF16: 2, FP16: 2, FP32: 4}

_TYPES_BY_NAME = {
    "bfloat16": BF16, "torch.bfloat16": BF16, "float16": FP16, "torch.float16": FP16,
    "float32": FP32, "torch.float32": FP32,
}
# numpy has no bf16: two-byte integers carry the bits.
_ANY_TWO_BYTES = 0


class Rows(NamedTuple):
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    type: int  # 0: two bytes an element, of the type that the model has
    owner: Any  # keeps the memory alive


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DL_FLOAT, _DL_BFLOAT, _DL_UINT, _DL_INT = 2, 4, 1, 0


def _dense_strides(shape: AnySequence[int], item: int) -> tuple[int, ...]:
    strides = []
    for size in reversed(shape):
        strides.append(item)
        item *= size
    return tuple(reversed(strides))


_torch_types: dict[Any, int] = {}  # by dtype: its name takes microseconds


def _torch_type(dtype: Any) -> int:
    found = _torch_types.get(dtype)
    if found is None:
        found = _torch_types[dtype] = _TYPES_BY_NAME.get(str(dtype), -1)
    return found


def _from_torch(tensor: Any) -> Rows:
    item = tensor.element_size()
    return Rows(
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(stride * item for stride in tensor.stride()),
        _torch_type(tensor.dtype),
        tensor,
    )


def _from_interface(interface: dict[str, Any], tensor: Any) -> Rows:
    code = interface["typestr"]
    kinds = {"<f2": FP16, "<f4": FP32, "<u2": _ANY_TWO_BYTES, "<i2": _ANY_TWO_BYTES}
    kind = kinds.get(code, -1)
    if kind < 0:  # ml_dtypes.bfloat16 calls itself two bytes of anything
        kind = _TYPES_BY_NAME.get(str(getattr(tensor, "dtype", "")), -1)
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or _dense_strides(shape, int(code[2:]))
    return Rows(interface["data"][0], shape, tuple(strides), kind, tensor)


def _from_dlpack(tensor: Any) -> Rows:
    capsule = tensor.__dlpack__()
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    found = _DLTensor.from_address(get_pointer(capsule, b"dltensor"))
    shape = tuple(found.shape[i] for i in range(found.ndim))
    item = found.bits // 8
    if found.strides:
        strides = tuple(found.strides[i] * item for i in range(found.ndim))
    else:
        strides = _dense_strides(shape, item)
    kinds = {
        (_DL_FLOAT, 16): FP16, (_DL_FLOAT, 32): FP32, (_DL_BFLOAT, 16): BF16,
        (_DL_UINT, 16): _ANY_TWO_BYTES, (_DL_INT, 16): _ANY_TWO_BYTES,
    }
    kind = kinds.get((found.code, found.bits), -1) if found.lanes == 1 else -1
    return Rows((found.data or 0) + found.byte_offset, shape, strides, kind, (tensor, capsule))


def _from_buffer(tensor: Any) -> Rows:
    view = memoryview(tensor)
    kinds = {"e": FP16, "f": FP32, "H": _ANY_TWO_BYTES, "h": _ANY_TWO_BYTES}
    if view.readonly or not view.c_contiguous:
        raise LayoutError("a buffer must be writable and dense; use numpy for others")
    pointer = ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0
    return Rows(pointer, tuple(view.shape or ()), tuple(view.strides or ()),
                kinds.get(view.format, -1), view)


def describe(tensor: Any) -> Rows:
    """The rows of anything that is a tensor. TypeError for anything else."""
    if hasattr(tensor, "data_ptr"):
        return _from_torch(tensor)
    if hasattr(tensor, "__cuda_array_interface__"):
        return _from_interface(tensor.__cuda_array_interface__, tensor)
    if hasattr(tensor, "__array_interface__"):
        return _from_interface(tensor.__array_interface__, tensor)
    if hasattr(tensor, "__dlpack__"):
        return _from_dlpack(tensor)
    try:
        return _from_buffer(tensor)
    except TypeError:
        raise TypeError(
            f"a tensor of torch or numpy, DLPack or a buffer is needed, not {type(tensor).__name__}"
        ) from None


def is_writable(tensor: Any) -> bool:
    if hasattr(tensor, "data_ptr"):
        return True
    interface = getattr(tensor, "__array_interface__", None)
    return interface is None or not interface["data"][1]


class Layout(NamedTuple):
    """Rows as the C interface takes them: [layers][tokens][heads][head_dim]."""

    pointer: int
    layers: int
    tokens: int
    strides: tuple[int, int, int]  # of layer, token and head, in bytes; 0: dense
    type: int
    owner: Any


def _merge(name: str, rows: Rows, last: int) -> tuple[int, int]:
    """One number of rows and one stride for all dimensions before the last `last` ones."""
    count, stride = 1, 0
    for size, step in zip(reversed(rows.shape[:-last]), reversed(rows.strides[:-last])):
        if size == 1:
            continue
        if count > 1 and step != count * stride:
            raise LayoutError(
                f"{name} has the shape {list(rows.shape)} and strides of {list(rows.strides)} "
                "bytes: its tokens do not follow each other at one distance; use reshape() or copy "
                "it"
            )
        if count == 1:
            stride = step
        count *= size
    return count, stride


def layout(
    name: str,
    tensor: Any,
    heads: int,
    head_dim: int,
    types: tuple[int, ...],
    *,
    with_layers: bool = False,
) -> Layout:
    """Checks a tensor of rows. `types`: which are allowed; the first is the model's."""
    rows = describe(tensor)
    kind = types[0] if rows.type == _ANY_TWO_BYTES and ITEM_BYTES[types[0]] == 2 else rows.type
    if kind not in types:
        wanted = " or ".join(TYPE_NAMES[t] for t in types)
        given = getattr(tensor, "dtype", None) or type(tensor).__name__
        raise InvalidArgument(f"{name} is {given}; expected is {wanted}", "argument")
    item = ITEM_BYTES[kind]
    least = 4 if with_layers else 2
    if len(rows.shape) < least or rows.shape[-2:] != (heads, head_dim):
        expected = f"{'layers, ' if with_layers else ''}tokens, {heads}, {head_dim}"
        raise InvalidArgument(
            f"{name} has the shape {list(rows.shape)}; expected is [{expected}]", "argument"
        )
    for size, stride, what in (
        (head_dim, rows.strides[-1] - item, "elements of a row"),
        (heads, rows.strides[-2] or -1, "heads"),
    ):
        if size > 1 and ((what == "heads" and stride == -1) or (what != "heads" and stride != 0)):
            raise LayoutError(
                f"{name} has strides of {list(rows.strides)} bytes: its {what} "
                f"{'share memory' if what == 'heads' else 'do not follow each other'}; copy it"
            )
    layers, layer_stride = 1, 0
    if with_layers:
        layers, layer_stride = rows.shape[0], rows.strides[0]
        rows = rows._replace(shape=rows.shape[1:], strides=rows.strides[1:])
    tokens, token_stride = _merge(name, rows, 2)
    if (tokens > 1 and token_stride == 0) or (layers > 1 and layer_stride == 0):
        raise LayoutError(f"{name} repeats rows (a stride is 0); copy it")
    strides = (layer_stride if layers > 1 else 0, token_stride if tokens > 1 else 0,
               rows.strides[-2] if heads > 1 else 0)
    return Layout(rows.pointer, layers, tokens, strides, kind, rows.owner)


def tokens_of(ids: Any) -> Any:
    """Token ids as an array of uint32 for a call."""
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    values = list(ids)
    return (ctypes.c_uint32 * len(values))(*values)


def set_bytes(target: Any, field: str, value: bytes | str, keep: list[Any]) -> None:
    """Sets a field of bytes, and the field that has their number. `keep`: what must stay alive."""
    data = value.encode() if isinstance(value, str) else bytes(value)
    if data:
        buffer = (ctypes.c_char * len(data)).from_buffer_copy(data)
        keep.append(buffer)
        setattr(target, field, ctypes.addressof(buffer))
        setattr(target, f"{field}_bytes", len(data))
