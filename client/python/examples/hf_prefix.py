"""Two processes, one prompt: the second neither computes nor stores its head.

hf_prefix.py ADDRESS [publish]      needs SmolLM2: deploy/models/fetch smollm2
"""
import subprocess
import sys
import time

import torch
import tessera_kv.hf as thf
from tessera_kv.hf import from_gguf

HEAD = "You are a careful assistant. Answer in one sentence. " * 80

model, tokenizer = from_gguf.load(from_gguf.SMOLLM2)
head = tokenizer(HEAD, return_tensors="pt").input_ids
tail = tokenizer("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
                 "<|im_start|>assistant\n", return_tensors="pt").input_ids
ids = torch.cat([head, tail], 1)
name = "first" if sys.argv[2:] == ["publish"] else "second"
if name == "second":
    subprocess.run([sys.executable, __file__, sys.argv[1], "publish"], check=True)

with thf.cache(model, sys.argv[1]) as cache:
    start = time.perf_counter()
    found = cache.match(ids)  # what generate() need not compute
    if name == "first":
        thf.prefill(model, cache, head)
        cache.publish(ttl=600)
    output = thf.generate(model, cache, ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
    first = time.perf_counter() - start
    output = thf.generate(model, cache, output, max_new_tokens=10, do_sample=False, pad_token_id=0)
    row = cache.report().rows[0]
    text = tokenizer.decode(output[0, ids.shape[1]:], skip_special_tokens=True).strip()
    print(f"{name}: {found} of {ids.shape[1]} tokens were there, first token after {first:.2f} s, "
          f"{row.shared_bytes} of {row.tile_bytes} bytes are shared: {text}", flush=True)
