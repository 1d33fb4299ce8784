"""Which versions of transformers are served, and what differs between them."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
import transformers

from ..errors import Unsupported

OLDEST, NEWEST = (4, 57), (5, 24)  # tested, both and one between
OLDEST_TORCH = (2, 6)


def numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check() -> None:
    """Raises Unsupported for versions before the oldest ones. Newer ones are tried."""
    for name, version, oldest in (
        ("transformers", transformers.__version__, OLDEST),
        ("torch", torch.__version__, OLDEST_TORCH),
    ):
        if numbers(version) < oldest:
            raise Unsupported(
                f"{name} is {version}; tessera_kv.hf needs {oldest[0]}.{oldest[1]} or newer"
            )


def cache_name(model: Any) -> str:
    """The argument of the model's forward that takes the cache: its name changed in 5.24."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else (
        "past_key_values"
    )
