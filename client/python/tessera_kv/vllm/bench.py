"""vLLM with Tessera beside vLLM with its own attention, by turns on the same machine.

    python -m tessera_kv.vllm.bench MODEL [--address ADDRESS] [--policy POLICY ...]
        [--requests N] [--prompt TOKENS] [--output TOKENS] [--rounds N]

Each engine is a process. All are there from the beginning to the end, and one works at a time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import select
import statistics
import subprocess
import sys
import time
from typing import Any

from ..bench import processor
from ..testing import Daemon
from ..worker import Worker, attach
from . import SWITCH
from .settings import CONNECTOR

OWN = "vLLM's own"
MIB = 1 << 20


class Turns:
    """An engine in this process, and its requests."""

    def __init__(self, options: argparse.Namespace, policy: str) -> None:
        os.environ[SWITCH] = "0" if policy == OWN else "1"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # After the switch is set. By name, because type checkers take this folder for vLLM.
        self.vllm: Any = importlib.import_module("vllm")
        given: dict[str, Any] = {}
        if policy != OWN:
            given["kv_transfer_config"] = {
                "kv_connector": CONNECTOR, "kv_role": "kv_both",
                "kv_connector_module_path": "tessera_kv.vllm.connector",
                "kv_connector_extra_config": {
                    "address": options.address, "policy": "" if policy == "dense" else policy,
                    "share": False}}
        self.engine = self.vllm.LLM(
            model=options.model, enforce_eager=True, enable_prefix_caching=False,
            max_model_len=options.prompt + options.output, skip_tokenizer_init=True, **given)
        self.options = options
        ids = random.Random(1)
        self.prompts = [
            {"prompt_token_ids": [ids.randrange(100, 400) for _ in range(options.prompt)]}
            for _ in range(options.requests)]

    def pool(self) -> dict[str, float]:
        """Bytes that vLLM has taken for keys and values, and those that all tokens fill."""
        core: Any = self.engine.llm_engine.engine_core
        config = core.engine_core.scheduler.kv_cache_config
        block = sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
        tokens = self.options.prompt + self.options.output
        blocks = -(-tokens // config.kv_cache_groups[0].kv_cache_spec.block_size)
        return {"pool": block * config.num_blocks, "filled": block * blocks * len(self.prompts)}

    def turn(self) -> dict[str, float]:
        """Tokens per second, and CPU milliseconds per token, which other programs on the machine
        change less."""
        (first, first_cpu), (both, both_cpu) = self._seconds(1), self._seconds(self.options.output)
        read = len(self.prompts) * self.options.prompt
        written = len(self.prompts) * (self.options.output - 1)
        return {"prompt": read / first, "prompt_cpu": first_cpu / read * 1e3,
                "decode": written / (both - first),
                "decode_cpu": (both_cpu - first_cpu) / written * 1e3}

    def _seconds(self, tokens: int) -> tuple[float, float]:
        sampling = self.vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True,
                                            detokenize=False)
        start, cpu = time.perf_counter(), time.process_time()
        self.engine.generate(self.prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start, time.process_time() - cpu


class Child:
    """A process with an engine. It takes a turn for each line that it reads."""

    def __init__(self, options: argparse.Namespace, policy: str) -> None:
        self.policy = policy
        self.peak = 0  # bytes of tiles and tail rings that the daemon held during its turns
        self.turns: list[dict[str, float]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tessera_kv.vllm.bench", *sys.argv[1:],
             f"--address={options.address}", "--only", policy],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.pool = self._answer()

    def take_turn(self, worker: Worker) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        while not select.select([self.process.stdout], [], [], 0.1)[0]:
            tags = worker.stats()["tenants"][0]["used_bytes_by_tag"]
            self.peak = max(self.peak, tags.get("tiles", 0) + tags.get("tails", 0))
        self.turns.append(self._answer())

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM with {self.policy} ended with code {self.process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found

    def median(self, name: str) -> float:
        return statistics.median(turn[name] for turn in self.turns)

    def close(self) -> None:
        self.process.communicate()  # its input ends, and so does it


def main() -> None:
    """Measures each policy, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m tessera_kv.vllm.bench")
    parser.add_argument("model")
    parser.add_argument("--address", default="", help="default: a tesserad with a pool of 1 GiB")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        _serve(options)
        return
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = f"; busy: load average {load:.1f}" if load > cores / 4 else ""
    print(f"{processor()}, {cores} processors{busy}\n{options.requests} requests of "
          f"{options.prompt} + {options.output} tokens, median of {options.rounds} rounds")
    daemon = None if options.address else Daemon("--pool-bytes=1GiB")
    options.address = options.address or (daemon.address if daemon else "")
    children: list[Child] = []
    try:
        with attach(options.address, name="bench", map_memory=False) as worker:
            for policy in [OWN, *(options.policy or ["dense", "planes"])]:
                children.append(Child(options, policy))
            for _ in range(1 + options.rounds):
                for child in children:
                    child.take_turn(worker)
        _print(children)
    finally:
        for child in children:
            child.close()
        if daemon is not None:
            daemon.close()


def _serve(options: argparse.Namespace) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints
    turns = Turns(options, options.only)
    print(json.dumps(turns.pool()), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(turns.turn()), file=answers, flush=True)


def _print(children: list[Child]) -> None:
    print(f"{'attention':<14}{'prompt tok/s':>13}{'CPU ms/tok':>12}{'decode tok/s':>14}"
          f"{'CPU ms/tok':>12}{'vLLM pool MiB':>15}{'KV MiB':>8}")
    for child in children:
        child.turns = child.turns[1:]  # the first one warms up
        held = child.pool["filled"] if child.policy == OWN else child.peak
        medians = {name: child.median(name) for name in child.turns[0]}
        print(f"{child.policy:<14}{medians['prompt']:>13.0f}{medians['prompt_cpu']:>12.2f}"
              f"{medians['decode']:>14.1f}{medians['decode_cpu']:>12.2f}"
              f"{child.pool['pool'] / MIB:>15.1f}{held / MIB:>8.1f}")


if __name__ == "__main__":
    main()
