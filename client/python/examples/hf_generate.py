"""A language model through transformers' generate(), its cache in Tessera under several policies.

hf_generate.py ADDRESS [TOKENS]      needs SmolLM2: deploy/models/fetch smollm2
"""
import sys
import time

import tessera_kv.hf as thf
import torch
from tessera_kv.hf import from_gguf

POLICIES = ("", "quest", "mosaickv:keep=0.375,select=0,recent=32+int8", "planes:book_rows=256",
            "snapkv:budget=0.35", "streaming:recent=256")
LENGTH = int(sys.argv[2]) if len(sys.argv) > 2 else 1500

model, tokenizer = from_gguf.load(from_gguf.SMOLLM2)
filler = tokenizer("The grass is green. The sky is blue. The sun is yellow. Here we go.").input_ids
whole = torch.tensor([(filler * (LENGTH // len(filler) + 1))[:LENGTH]])

print(f"{'policy':<46} {'bytes':>9} {'of dense':>9} {'tokens/s':>9}  text goes on")
for policy in POLICIES:
    with thf.cache(model, sys.argv[1], policy=policy) as cache:
        thf.prefill(model, cache, whole[:, :-1])  # and compressed
        start = time.perf_counter()
        output = thf.generate(model, cache, whole, attention_mask=torch.ones_like(whole),
                              max_new_tokens=24, do_sample=False, pad_token_id=0)
        seconds = time.perf_counter() - start
        row = cache.report().rows[0]
        new = output[0, whole.shape[1]:]
        text = tokenizer.decode(new, skip_special_tokens=True).strip().split("\n")[0]
        print(f"{policy or 'dense':<46} {row.tile_bytes:>9} "
              f"{row.tile_bytes / row.dense_bytes:>9.0%} {len(new) / seconds:>9.1f}  {text[:24]}",
              flush=True)
