"""Loads libtessera.so, and knows on which side of a fork() a handle was made.

Two views of one library: `fast` holds Python's GIL during a call, `slow` releases it. Short calls
hold it: after a release, a busy Python thread would keep the caller waiting for its 5 ms. No
callback of the library enters Python.
"""

from __future__ import annotations

import atexit
import ctypes
import ctypes.util
import os
import pathlib
import weakref
from typing import Any, Protocol

from . import _abi
from .errors import Forked

# The library that `import tessera_kv` loads, if it is set; else the wheel's, else the system's.
VARIABLE = "TESSERA_LIBRARY"


def _candidates() -> list[str]:
    named = os.environ.get(VARIABLE)
    if named:
        return [named]
    found = [str(pathlib.Path(__file__).parent / "lib" / "libtessera.so")]
    found += [f"libtessera.so.{_abi.ABI_VERSION}"]
    return found


def _open() -> tuple[str, Any, Any]:
    reasons = []
    for path in _candidates():
        try:
            slow = ctypes.CDLL(path)
        except OSError as error:
            reasons.append(str(error))
            continue
        fast = ctypes.PyDLL(path)
        for library in (slow, fast):
            library.tessera_abi_version.restype = ctypes.c_uint32
            library.tessera_version.restype = ctypes.c_char_p
        version = slow.tessera_abi_version()
        if version != _abi.ABI_VERSION:
            raise ImportError(
                f"{path} has ABI version {version}; tessera_kv needs {_abi.ABI_VERSION}. Install "
                f"the library and the package of one release, or set {VARIABLE}"
            )
        for library in (slow, fast):
            for name, (result, arguments) in _abi.FUNCTIONS.items():
                function = getattr(library, name)
                function.restype = result
                function.argtypes = arguments
        return path, slow, fast
    raise ImportError(
        "libtessera.so was not found: install the wheel or the package libtessera"
        f"{_abi.ABI_VERSION}, or name the file in {VARIABLE}. Tried: " + "; ".join(reasons)
    )


PATH, slow, fast = _open()
VERSION: str = slow.tessera_version().decode()


class Fork:
    """Counts forks: a handle with another count belongs to the parent."""

    count = 0


def _after_fork() -> None:
    Fork.count += 1


os.register_at_fork(after_in_child=_after_fork)


class Closable(Protocol):
    def close(self) -> None: ...


_open_handles: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(handle: Closable) -> None:
    """Closes the handle before ctypes goes away, if nobody has closed it until then."""
    _open_handles.add(handle)


@atexit.register
def _close_handles() -> None:
    for handle in list(_open_handles):
        handle.close()


class Handle:
    """A pointer of the C interface, destroyed once, and only in the process that made it."""

    __slots__ = ("_destroy", "_forks", "pointer", "__weakref__")

    def __init__(self, pointer: int, destroy: Any) -> None:
        self.pointer: int | None = pointer
        self._destroy = destroy
        self._forks = Fork.count

    def get(self) -> int:
        if self._forks != Fork.count:
            raise Forked(
                "the handle was made before fork(); attach again in the child, or start it with "
                "the method 'spawn'"
            )
        if self.pointer is None:
            raise ValueError("the handle is closed")
        return self.pointer

    def close(self) -> None:
        pointer, self.pointer = self.pointer, None
        if pointer is not None and self._forks == Fork.count:
            self._destroy(pointer)

    def __del__(self) -> None:
        self.close()


def text_of(pointer: ctypes.c_void_p) -> str:
    """Takes over a text that the library returned."""
    try:
        return ctypes.string_at(pointer).decode("utf-8", "replace")
    finally:
        slow.tessera_free_text(pointer)
