"""vLLM with Tessera beside vLLM with its own attention, one after the other on the same machine.

    python -m tessera_kv.vllm.bench MODEL [--address ADDRESS] [--policy POLICY ...]
        [--requests N] [--prompt TOKENS] [--output TOKENS]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import time
from typing import Any

from ..worker import attach
from . import SWITCH
from .settings import CONNECTOR

OWN = "vLLM's own"
MIB = 1 << 20


def measure(options: argparse.Namespace, policy: str) -> dict[str, float]:
    """Runs one engine in this process. Returns tokens per second, CPU milliseconds per token, which
    other programs on the machine change less, and bytes of vLLM's pool."""
    os.environ[SWITCH] = "0" if policy == OWN else "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # After the switch is set. By name, because type checkers take this folder for vLLM.
    vllm: Any = importlib.import_module("vllm")
    given: dict[str, Any] = {}
    if policy != OWN:
        given["kv_transfer_config"] = {
            "kv_connector": CONNECTOR, "kv_role": "kv_both",
            "kv_connector_module_path": "tessera_kv.vllm.connector",
            "kv_connector_extra_config": {
                "address": options.address, "policy": "" if policy == "dense" else policy,
                "share": False}}
    engine = vllm.LLM(
        model=options.model, enforce_eager=True, enable_prefix_caching=False,
        max_model_len=options.prompt + options.output, skip_tokenizer_init=True, **given)
    ids = random.Random(1)
    prompts = [{"prompt_token_ids": [ids.randrange(100, 400) for _ in range(options.prompt)]}
               for _ in range(options.requests)]

    def seconds(tokens: int) -> tuple[float, float]:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True,
                                       detokenize=False)
        start, cpu = time.perf_counter(), time.process_time()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start, time.process_time() - cpu

    seconds(1)  # warm
    (first, first_cpu), (both, both_cpu) = seconds(1), seconds(options.output)
    core: Any = engine.llm_engine.engine_core
    pool = sum(tensor.size for tensor in
               core.engine_core.scheduler.kv_cache_config.kv_cache_tensors)
    read, written = options.requests * options.prompt, options.requests * (options.output - 1)
    return {"prompt": read / first, "prompt_cpu": first_cpu / read * 1e3,
            "decode": written / (both - first),
            "decode_cpu": (both_cpu - first_cpu) / written * 1e3, "pool": pool}


def main() -> None:
    """Measures each policy in a process of its own, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m tessera_kv.vllm.bench")
    parser.add_argument("model")
    parser.add_argument("--address", default="")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what vLLM prints
        print(json.dumps(measure(options, options.only)), file=answers, flush=True)
        return
    print(f"{options.requests} requests of {options.prompt} + {options.output} tokens\n"
          f"{'attention':<14}{'prompt tok/s':>13}{'CPU ms/tok':>12}{'decode tok/s':>14}"
          f"{'CPU ms/tok':>12}{'vLLM pool MiB':>15}{'daemon peak MiB':>17}")
    for policy in [OWN, *(options.policy or ["dense", "planes"])]:
        found, peak = _run(options, policy)
        print(f"{policy:<14}{found['prompt']:>13.0f}{found['prompt_cpu']:>12.2f}"
              f"{found['decode']:>14.1f}{found['decode_cpu']:>12.2f}{found['pool'] / MIB:>15.1f}"
              f"{peak / MIB:>17.1f}", flush=True)


def _run(options: argparse.Namespace, policy: str) -> tuple[dict[str, float], int]:
    """One engine, and the most bytes of tiles that the daemon held meanwhile."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tessera_kv.vllm.bench", *sys.argv[1:], "--only", policy],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = 0
    if policy != OWN:
        with attach(options.address, name="bench", map_memory=False) as worker:
            while child.poll() is None:
                tags = worker.stats()["tenants"][0]["used_bytes_by_tag"]
                peak = max(peak, tags.get("tiles", 0))
                time.sleep(0.1)
    output, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"vLLM with {policy} ended with code {child.returncode}")
    found: dict[str, float] = json.loads(output)
    return found, peak


if __name__ == "__main__":
    main()
