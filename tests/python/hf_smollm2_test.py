"""`tessera_kv.hf` with a language model: SmolLM2 answers as it does with transformers' own cache.

Skipped without the model: deploy/models/fetch smollm2.
"""

import sys
import unittest

from hf_support import SKIPPED, forward
from support import ROOT, WithDaemon, main

import torch
import transformers

import tessera_kv.hf as thf
from tessera_kv.hf import from_gguf

if not from_gguf.SMOLLM2.exists():
    print(f"skipped: no {from_gguf.SMOLLM2}; deploy/models/fetch smollm2", file=sys.stderr)
    sys.exit(SKIPPED)

QUESTIONS = (
    "What is the capital of France?", "Why is the sky blue?", "Name three fruits.",
    "Write a short poem about rain.", "What does a compiler do?", "Who wrote Hamlet?",
    "How do plants make food?", "What is 12 times 12?", "Explain what a cache is.",
    "Give advice to a new programmer.", "What is the largest planet?", "Define gravity.",
    "Translate 'good morning' to Spanish.", "What is photosynthesis?", "List the primary colors.",
    "How does a bicycle stay upright?", "What is a prime number?", "Describe the ocean.",
    "What causes seasons?", "Tell me a story about a fox.",
)
TOKENS = 64


class SmolLM2(WithDaemon):
    flags = ("--pool-bytes=4GiB",)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        torch.set_num_threads(2)
        cls.model, cls.tokenizer = from_gguf.load(from_gguf.SMOLLM2)
        cls.tokenizer.padding_side = "left"
        cls.tokenizer.pad_token = cls.tokenizer.eos_token

    def generate(self, inputs, cache):
        options = {"max_new_tokens": TOKENS, "do_sample": False,
                   "pad_token_id": self.tokenizer.pad_token_id}
        if cache is not None:
            return thf.generate(self.model, cache, **inputs, **options)
        self.model.set_attn_implementation("sdpa")
        try:
            return self.model.generate(**inputs, **options)
        finally:
            self.model.set_attn_implementation("tessera")

    def ask(self, questions):
        chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                 for question in questions]
        return self.tokenizer(chats, return_tensors="pt", padding=True)

    def test_greedy_tokens_are_those_of_the_models_own_cache(self):
        inputs = self.ask(QUESTIONS)
        wanted = self.generate(inputs, None)
        with thf.cache(self.model, self.daemon.address) as cache:
            got = self.generate(inputs, cache)
            self.assertEqual([row.tokens_kept for row in cache.report().rows], [1.0] * 20)
        for row, question in enumerate(QUESTIONS):
            self.assertEqual(got[row].tolist(), wanted[row].tolist(), question)
        self.assertIn("Paris", self.tokenizer.decode(got[0]))

    def test_text_is_as_likely_as_with_the_models_own_cache(self):
        text = (ROOT / "deploy/docs/operations.md").read_text()
        ids = self.tokenizer(text, return_tensors="pt").input_ids[:, :768]
        self.assertEqual(ids.shape[1], 768)
        with thf.cache(self.model, self.daemon.address) as cache:
            ours = self.nats(ids, cache)
        self.model.set_attn_implementation("sdpa")
        try:
            own = self.nats(ids, transformers.DynamicCache())
        finally:
            self.model.set_attn_implementation("tessera")
        self.assertLess(abs(ours - own), 0.005)
        self.assertLess(own, 6)

    def nats(self, ids, cache):
        pieces = [(0, 512), *((begin, begin + 16) for begin in range(512, ids.shape[1] - 16, 16))]
        total = count = 0
        for begin, end in pieces:
            logits = forward(self.model, ids[:, begin:end], cache)
            if begin:
                total += float(torch.nn.functional.cross_entropy(
                    logits[0], ids[0, begin + 1:end + 1], reduction="sum"))
                count += end - begin
        return total / count


if __name__ == "__main__":
    main()
