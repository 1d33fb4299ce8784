"""`python -m tessera_kv doctor`: what this installation can use."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys

from . import _abi, _library
from .errors import Error
from .worker import DEFAULT_ADDRESS, attach


def _line(name: str, text: str) -> None:
    print(f"{name:<10} {text}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def doctor(address: str) -> int:
    """Prints what works. 1 if the daemon cannot be used."""
    _line("python", sys.version.split()[0])
    _line("library", f"{_library.PATH}: {_library.VERSION}, ABI {_abi.ABI_VERSION}")
    for package in ("numpy", "torch"):
        _line(package, _version(package))
    try:
        with attach(address, name="doctor", attach_timeout=5) as worker:
            stats = worker.stats()
            way = "mapped memory" if worker.is_mapped else "RPC: mapped memory is not available"
            _line("daemon", f"{stats['version']} on {stats['device']}, {way}")
            _line("kernels", f"{stats['implementation']}; head_dim 64, 128 or 256")
            used, limit = stats["pool_reserved_bytes"], stats["pool_limit_bytes"]
            _line("pool", f"{used >> 20} of {limit >> 20} MiB reserved")
            model = worker.model("doctor", layers=1, query_heads=2, kv_heads=1, head_dim=64)
            with worker.sequence(model) as sequence, worker.step([sequence]) as step:
                row = memoryview(bytearray(256)).cast("H", (1, 2, 64))
                key = memoryview(bytearray(128)).cast("H", (1, 1, 64))
                out = memoryview(bytearray(512)).cast("f", (1, 2, 64))
                step.attend(0, row, key, key, out=out)
            _line("step", "one token was decoded")
    except Error as error:
        _line("daemon", f"{address or DEFAULT_ADDRESS}: {error}")
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tessera_kv")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("doctor", help="what this installation can use")
    check.add_argument("address", nargs="?", default="", help="of the daemon")
    return doctor(parser.parse_args().address)


if __name__ == "__main__":
    raise SystemExit(main())
