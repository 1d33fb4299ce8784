"""What a `TesseraCache` costs and saves: `python -m tessera_kv.bench --hf`.

SmolLM2 decodes through generate() with transformers' DynamicCache and SDPA, and with Tessera under
each policy, by turns, so that all of them see the same load of the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as AnySequence
from typing import Any

import torch
from transformers import DynamicCache

from ..worker import Worker, attach
from . import cache as new_cache
from . import from_gguf, prefill, versions

OWN = "DynamicCache, sdpa"


class Runner:
    """A model, and random prompts of one length."""

    def __init__(self, model: Any, worker: Worker, tokens: int, batch: int) -> None:
        self.model = model
        self.worker = worker
        torch.manual_seed(1)
        self.ids = torch.randint(1000, 40000, (batch, tokens + 1))

    def decode(self, policy: str, tokens: int) -> tuple[float, float, int]:
        """Seconds of the prompt, tokens a second behind it, and bytes of the cache."""
        clock = time.perf_counter
        start = clock()
        if policy == OWN:
            self.model.set_attn_implementation("sdpa")
            cache: Any = DynamicCache()
        else:
            self.model.set_attn_implementation("tessera")
            cache = new_cache(self.model, worker=self.worker, policy=policy)
        with torch.no_grad():
            self.model(self.ids[:, :-1], use_cache=True, logits_to_keep=1,
                       **{versions.cache_name(self.model): cache})
        begun = clock()
        self.model.generate(self.ids, max_new_tokens=tokens, min_new_tokens=tokens,
                            do_sample=False, pad_token_id=0,
                            **{versions.cache_name(self.model): cache})
        speed = tokens * len(self.ids) / (clock() - begun)
        if policy == OWN:
            held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        else:
            held = sum(row.tile_bytes for row in cache.report().rows)
            cache.close()
        return begun - start, speed, held


def compare(model: Any, worker: Worker, policies: AnySequence[str], tokens: int, batch: int,
            new_tokens: int, rounds: int) -> None:
    """Prints a table. Ratios are medians of each round's ratio to the first policy."""
    runner = Runner(model, worker, tokens, batch)
    found: dict[str, list[tuple[float, float, int]]] = {policy: [] for policy in policies}
    for _ in range(rounds):
        for policy in policies:
            found[policy].append(runner.decode(policy, new_tokens))
    own = found[policies[0]]
    print(f"batch {batch}, {tokens} tokens, then {new_tokens}, {rounds} rounds", flush=True)
    for policy in policies:
        rows = found[policy]
        ratios = sorted(row[1] / base[1] for row, base in zip(rows, own))
        prompts = [row[0] / base[0] for row, base in zip(rows, own)]
        print(f"  {policy or 'tessera, dense':<20} {statistics.median(r[1] for r in rows):7.2f} "
              f"tokens/s, ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to "
              f"{ratios[-1]:.2f}); prompt {statistics.median(r[0] for r in rows):6.2f} s, ratio "
              f"{statistics.median(prompts):.2f}; {rows[-1][2] / 2**20:6.1f} MiB", flush=True)


def first_token(model: Any, worker: Worker, tokens: int, rounds: int) -> None:
    """Time to the first token, the head computed and the head published by another cache."""
    model.set_attn_implementation("tessera")
    computed, matched = [], []
    for number in range(rounds):
        torch.manual_seed(number)
        ids = torch.randint(1000, 40000, (1, tokens + 32))
        with new_cache(model, worker=worker) as cache:
            start = time.perf_counter()
            prefill(model, cache, ids)
            computed.append(time.perf_counter() - start)
        with new_cache(model, worker=worker) as cache:
            prefill(model, cache, ids[:, :tokens])
            prefix = cache.publish()[0]
        with new_cache(model, worker=worker) as cache:
            start = time.perf_counter()
            found = cache.match(ids)
            prefill(model, cache, ids)
            matched.append(time.perf_counter() - start)
        if found != tokens:
            raise RuntimeError(f"{found} of {tokens} tokens were matched")
        worker.free_prefix(prefix)
    ratio = statistics.median(one / other for one, other in zip(matched, computed))
    print(f"first token behind {tokens} published tokens: {statistics.median(matched):.3f} s, "
          f"computed {statistics.median(computed):.3f} s, ratio {ratio:.3f}  (goal: at most 0.15)",
          flush=True)


def main(address: str, dtype: str, tokens: AnySequence[int], batches: AnySequence[int],
         new_tokens: int, rounds: int) -> None:
    """Runs all of it with SmolLM2."""
    model, _ = from_gguf.load(from_gguf.SMOLLM2, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    with attach(address, name="bench", threads=torch.get_num_threads()) as worker:
        print(f"SmolLM2, {dtype}, {torch.get_num_threads()} threads", flush=True)
        for batch in batches:
            for length in tokens:
                compare(model, worker, (OWN, "", "planes"), length, batch, new_tokens, rounds)
        first_token(model, worker, max(tokens), rounds)
