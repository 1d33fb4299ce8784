"""Two workers in two processes share a prompt: the second computes and stores nothing of it.

two_processes.py ADDRESS [publish]
"""
import subprocess
import sys

import numpy as np
import tessera_kv as tk

LAYERS, QUERY_HEADS, KV_HEADS, DIM, PROMPT = 4, 8, 2, 64, 1024
IDS = list(range(PROMPT))


def attach(name):
    worker = tk.attach(sys.argv[1], name=name)
    return worker, worker.model("shared", layers=LAYERS, query_heads=QUERY_HEADS,
                                kv_heads=KV_HEADS, head_dim=DIM)


def publish():
    """What the first worker does: computes the prompt and publishes it."""
    worker, model = attach("publisher")
    with worker:
        sequence = worker.sequence(model)
        rows = np.random.default_rng(1).integers(0x3F00, 0x4000, (2, LAYERS, PROMPT, KV_HEADS, DIM))
        key, value = rows.astype(np.uint16)  # bits of bf16
        sequence.append(key, value)
        published = sequence.publish(IDS, ttl=60)
        print(f"publisher: {sequence.tokens} tokens, {sequence.describe().tile_bytes} bytes; "
              f"prefix {published.prefix:#x}", flush=True)


def use():
    """What every other worker does: forks what is published."""
    worker, model = attach("reader")
    with worker:
        match = worker.match(model, IDS + [7, 7, 7], wait=2)
        sequence = worker.fork(match)
        found = sequence.describe()
        print(f"reader: {sequence.tokens} tokens, {found.tile_bytes} bytes, of which "
              f"{found.shared_tile_bytes} are shared")
        query = np.full((1, QUERY_HEADS, DIM), 0x3F80, np.uint16)
        with worker.read([sequence]) as read:
            output = read.attend(0, query)
        print(f"reader: attends over them, mean output {output.mean():.3f}")


if sys.argv[2:] == ["publish"]:
    publish()
else:
    subprocess.run([sys.executable, __file__, sys.argv[1], "publish"], check=True)
    use()
