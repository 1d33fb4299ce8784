"""The smallest worker: prefill a prompt, decode a token, check it.   numpy_worker.py [ADDRESS]"""
import sys

import numpy as np
import tessera_kv as tk

LAYERS, HEADS, DIM, PROMPT = 2, 4, 64, 100
random = np.random.default_rng(7)
rows = [random.normal(size=(LAYERS, PROMPT + 1, HEADS, DIM)).astype(np.float32) for _ in range(3)]
query, key, value = rows

with tk.attach(*sys.argv[1:2], name="numpy") as worker:
    model = worker.model("tiny", layers=LAYERS, query_heads=HEADS, kv_heads=HEADS, head_dim=DIM,
                         dtype="fp32")
    sequence = worker.sequence(model)
    sequence.append(key[:, :PROMPT], value[:, :PROMPT])
    for attempt in tk.attempts():  # a step that the daemon aborts is repeated
        with attempt, worker.step([sequence]) as step:
            outputs = [step.attend(layer, query[layer, -1:], key[layer, -1:], value[layer, -1:])
                       for layer in range(LAYERS)]
    print(f"{sequence.tokens} tokens, {sequence.describe().tile_bytes} bytes")

for layer, output in enumerate(outputs):  # softmax(q k) v, by hand
    logits = np.einsum("hd,thd->ht", query[layer, -1], key[layer]) / DIM**0.5
    weights = np.exp(logits - logits.max(1, keepdims=True))
    wanted = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), value[layer])
    print(f"layer {layer}: largest difference {np.abs(output[0] - wanted).max():.1e}")
    assert np.allclose(output[0], wanted, atol=1e-5)
