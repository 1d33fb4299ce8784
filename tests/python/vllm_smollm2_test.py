"""`tessera_kv.vllm` with a language model: SmolLM2 in vLLM itself, beside vLLM's own attention.

Skipped without the model: deploy/models/fetch smollm2.
"""

import pathlib
import tempfile
import unittest

from vllm_support import POOL, ROOT, Daemon, Engine, first_difference, smollm2, support, tk

STARTS = (
    "The capital of France is", "Once upon a time, there was a", "def fibonacci(n):\n",
    "Water boils at", "The largest planet of the solar system is", "1. Mix the flour with",
    "In 1969, two men", "Three animals that lay eggs are", "import numpy as np\n",
    "The opposite of cold is", "Shakespeare wrote", "To be, or not to be,", "SELECT name FROM",
    "She opened the door and",
)
LONG = 6  # more prompts, of the licence's text
LONG_TOKENS = 700
TOKENS = 64
# Logarithms of probabilities: float32 attention, added up in another order, moves them by less.
TIE = 1e-3
# Of each text, nearly so many tokens are compressed, for which the policy wants 1,024 to learn from
# and 128 behind them, and so many more predicted, each from those before.
HEAD, PREDICTED = 1280, 96


class SmolLM2(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        from transformers import AutoTokenizer

        cls.model = smollm2()
        tokenizer = AutoTokenizer.from_pretrained(cls.model)
        text = tokenizer((ROOT / "LICENSE").read_text())["input_ids"]
        cls.prompts = [tokenizer(start)["input_ids"] for start in STARTS]
        cls.prompts += [text[begin:begin + LONG_TOKENS] for begin in range(0, 250 * LONG, 250)]
        assert len(cls.prompts) == 20 and len(cls.prompts[-1]) == LONG_TOKENS
        cls.texts = [text[:HEAD + PREDICTED], text[-HEAD - PREDICTED:]]
        folder = tempfile.TemporaryDirectory(prefix="tessera-vllm-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)

    @classmethod
    def answer(cls, tessera, *calls):
        """What an engine answers to calls of `Engine.start`."""
        engine = Engine(cls.folder, cls.model, tessera, max_num_seqs=20)
        try:
            answers = []
            for prompts, tokens, best in calls:
                engine.start(prompts, tokens, best)
                answers.append(engine.answer())
            return answers
        finally:
            engine.close()

    def test_greedy_tokens_are_those_of_vllms_own_attention(self):
        call = (self.prompts, TOKENS, 2)
        (own,) = self.answer(None, call)
        with Daemon(POOL) as daemon:
            (found,) = self.answer({"address": daemon.address}, call)
            with tk.attach(daemon.address) as worker:
                self.assertGreater(worker.stats()["tenants"][0]["tokens_appended"], 20 * TOKENS)
        ties = []
        for row, (got, wanted) in enumerate(zip(found["tokens"], own["tokens"])):
            place = first_difference(got, wanted)
            if place is None:
                continue
            (first, likeliest), (second, next_one) = sorted(
                own["best"][row][place], key=lambda one: -one[1])[:2]
            self.assertEqual({got[place], wanted[place]}, {first, second})
            self.assertLess(likeliest - next_one, TIE, f"prompt {row}, token {place}")
            ties.append(row)
        self.assertLessEqual(len(ties), 1)

    def test_planes_predict_as_dense_rows_do(self):
        calls = [([text[:HEAD + more] for more in range(1, PREDICTED + 1)], 1, 1)
                 for text in self.texts]
        with Daemon(POOL) as daemon:
            dense = self.answer({"address": daemon.address}, *calls)
            planes = self.answer({"address": daemon.address, "policy": "planes"}, *calls)
            with tk.attach(daemon.address) as worker:
                tenant = worker.stats()["tenants"][0]
        # The heads and nearly nothing else were computed, and those of planes are codes.
        self.assertGreater(tenant["entries_packed"], 2 * HEAD)
        pairs = [(one[0][0], other[0][0]) for a, b in zip(dense, planes)
                 for one, other in zip(a["best"], b["best"])]
        self.assertEqual(len(pairs), 2 * PREDICTED)
        same = [(p, q) for (token, p), (other, q) in pairs if token == other]
        moved = sum(abs(p - q) for p, q in same) / len(same)
        print(f"planes: {len(same)} of {len(pairs)} greedy tokens as dense; their logprobs differ "
              f"by {moved:.4f} nats on average")
        self.assertGreaterEqual(len(same), 0.95 * len(pairs))
        self.assertLess(moved, 0.05)


if __name__ == "__main__":
    support.main()
