"""What Python costs on top of the library: `python -m tessera_kv.bench`.

Decodes steps of one sequence at 32 tokens, so that attention itself is short, through the package
and through bare calls of the C interface, by turns. The difference, with what ctypes takes for the
bare calls themselves, is what Python adds to a C++ engine's step. With a busy Python thread beside,
it shows how long a step then takes.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import threading
import time
from typing import Any

from . import _abi, _library, attach
from .sequence import Sequence
from .testing import Daemon
from .worker import Worker

LAYERS, QUERY_HEADS, KV_HEADS, DIM = 30, 9, 3, 64
CONTEXT = 32


class Setup:
    """A sequence at 32 tokens, and the rows of a step."""

    def __init__(self, worker: Worker) -> None:
        import numpy as np

        random = np.random.default_rng(1)
        self.worker = worker
        self.model = worker.model("bench", layers=LAYERS, query_heads=QUERY_HEADS,
                                  kv_heads=KV_HEADS, head_dim=DIM)
        self.sequence: Sequence = worker.sequence(self.model)

        def rows(*shape: int) -> Any:
            return (random.integers(0, 0x100, shape) + 0x3F00).astype(np.uint16)

        self.sequence.append(rows(LAYERS, CONTEXT, KV_HEADS, DIM),
                             rows(LAYERS, CONTEXT, KV_HEADS, DIM))
        self.query = [rows(1, QUERY_HEADS, DIM) for _ in range(LAYERS)]
        self.key = [rows(1, KV_HEADS, DIM) for _ in range(LAYERS)]
        self.value = [rows(1, KV_HEADS, DIM) for _ in range(LAYERS)]
        self.out = [np.empty((1, QUERY_HEADS, DIM), np.float32) for _ in range(LAYERS)]

    def back(self) -> None:
        """Keeps the context short."""
        if self.sequence.tokens >= CONTEXT + 64:
            self.sequence.truncate(CONTEXT)
            with self.worker.step([self.sequence]) as step:  # opens the tail again
                for layer in range(LAYERS):
                    step.append(layer, self.key[layer], self.value[layer])


def package_step(setup: Setup) -> tuple[float, float]:
    """Seconds of a layer's call, and of begin and end together."""
    clock = time.perf_counter
    query, key, value, out = setup.query, setup.key, setup.value, setup.out
    start = clock()
    step = setup.worker.step([setup.sequence])
    begun = clock()
    for layer in range(LAYERS):
        step.attend(layer, query[layer], key[layer], value[layer], out=out[layer])
    attended = clock()
    step.end()
    return (attended - begun) / LAYERS, (begun - start) + (clock() - attended)


class BareStep:
    """The same calls, with arguments that were made before, as a C++ engine has them."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.error = _abi.tessera_error()
        self.made = ctypes.c_void_p()
        self.options = _abi.tessera_step_options()
        self.options.struct_size = ctypes.sizeof(self.options)
        self.options.new_tokens = 1
        self.options.timeout_ms = 1000
        self.handles = (ctypes.c_void_p * 1)(setup.sequence.pointer)
        self.tensors = []
        for layer in range(LAYERS):
            tensors = _abi.tessera_step_tensors()
            tensors.struct_size = ctypes.sizeof(tensors)
            tensors.key = setup.key[layer].ctypes.data
            tensors.value = setup.value[layer].ctypes.data
            tensors.key_bytes = setup.key[layer].nbytes
            tensors.query = setup.query[layer].ctypes.data
            tensors.query_bytes = setup.query[layer].nbytes
            tensors.output = setup.out[layer].ctypes.data
            tensors.output_bytes = setup.out[layer].nbytes
            tensors.output_type = _abi.TESSERA_FP32
            tensors.causal = 1
            self.tensors.append(tensors)
        self.references = [ctypes.byref(tensors) for tensors in self.tensors]
        self.worker = setup.worker.pointer

    def run(self) -> tuple[float, float]:
        clock, error = time.perf_counter, ctypes.byref(self.error)
        library, made = _library.fast, self.made
        start = clock()
        code = library.tessera_step_begin(self.worker, self.handles, 1, ctypes.byref(self.options),
                                          ctypes.byref(made), error)
        begun = clock()
        attend = library.tessera_step_append_and_attend
        for layer, reference in enumerate(self.references):
            code |= attend(made, layer, reference, error)
        attended = clock()
        code |= library.tessera_step_end(made, None, 0, error)
        library.tessera_step_destroy(made)
        if code:
            raise RuntimeError(self.error.message.decode())
        return (attended - begun) / LAYERS, (begun - start) + (clock() - attended)


def measure_cost(setup: Setup, steps: int) -> tuple[list[float], list[float]]:
    """Medians in microseconds, package then bare: of a layer, and of a step's begin and end."""
    bare = BareStep(setup)
    layers: list[list[float]] = [[], []]
    ends: list[list[float]] = [[], []]
    for _ in range(steps):
        for which, run in enumerate((lambda: package_step(setup), bare.run)):
            layer, rest = run()
            layers[which].append(layer * 1e6)
            ends[which].append(rest * 1e6)
        setup.back()
    return ([statistics.median(each) for each in layers],
            [statistics.median(each) for each in ends])


def call_cost(calls: int = 20000) -> float:
    """Microseconds that ctypes takes for a call with a few arguments that does nothing."""
    function = _library.fast.tessera_delimiters
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            function(None, 0, None)
        times.append((time.perf_counter() - start) / calls * 1e6)
    return min(times)


def measure_beside(setup: Setup, steps: int) -> list[float]:
    """Milliseconds of whole steps while another Python thread computes without pause."""
    stop = threading.Event()

    def busy() -> None:
        number = 0
        while not stop.is_set():
            number = (number * 31 + 7) % 1_000_003

    thread = threading.Thread(target=busy)
    thread.start()
    times = []
    try:
        for _ in range(steps):
            start = time.perf_counter()
            package_step(setup)
            times.append((time.perf_counter() - start) * 1e3)
            setup.back()
    finally:
        stop.set()
        thread.join()
    return sorted(times)


def processor() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "unknown processor"


def measure_hf(options: argparse.Namespace) -> int:
    """SmolLM2 through transformers' generate()."""
    from .hf import bench as hf_bench

    daemon = None if options.address else Daemon("--pool-bytes=4GiB")
    try:
        print(processor())
        hf_bench.main(options.address or (daemon.address if daemon else ""), options.dtype,
                      options.tokens, options.batch, options.new_tokens, options.rounds)
    finally:
        if daemon is not None:
            daemon.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--address", default="", help="a daemon; default: a temporary one")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--hf", action="store_true", help="SmolLM2 in transformers instead")
    parser.add_argument("--dtype", default="bfloat16", help="with --hf: of the model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="with --hf")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="with --hf")
    parser.add_argument("--new-tokens", type=int, default=32, help="with --hf")
    parser.add_argument("--rounds", type=int, default=3, help="with --hf")
    options = parser.parse_args()
    if options.hf:
        return measure_hf(options)
    daemon = None if options.address else Daemon()
    try:
        worker = attach(options.address or (daemon.address if daemon else ""), name="bench")
        setup = Setup(worker)
        for _ in range(50):
            package_step(setup)
            setup.back()
        layers, ends = measure_cost(setup, options.steps)
        beside = measure_beside(setup, min(options.steps, 600))
        worker.close()
    finally:
        if daemon is not None:
            daemon.close()
    call = call_cost()  # a layer is one call; begin, end and destroy are three
    added = (layers[0] - layers[1] + call, ends[0] - ends[1] + 3 * call)
    p99 = beside[int(len(beside) * 0.99)]
    print(f"{LAYERS} layers, {QUERY_HEADS}/{KV_HEADS} heads of {DIM}, {CONTEXT} to "
          f"{CONTEXT + 64} tokens, {options.steps} steps, {processor()}; a call "
          f"by ctypes: {call:.2f} us")
    print(f"a layer:        package {layers[0]:6.2f} us, bare calls {layers[1]:6.2f} us, "
          f"added {added[0]:5.2f} us  (goal: at most 5)")
    print(f"begin and end:  package {ends[0]:6.2f} us, bare calls {ends[1]:6.2f} us, "
          f"added {added[1]:5.2f} us  (goal: at most 15)")
    print(f"beside a busy Python thread: a step's median {beside[len(beside) // 2]:.2f} ms, "
          f"p99 {p99:.1f} ms, most {beside[-1]:.1f} ms  (goal: p99 at most 30)")
    return 0 if added[0] <= 5 and added[1] <= 15 and p99 <= 30 else 1


if __name__ == "__main__":
    raise SystemExit(main())
