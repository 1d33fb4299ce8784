"""`tessera_kv.vllm` in vLLM itself, on the CPU, beside vLLM's own attention."""

import os
import pathlib
import subprocess
import tempfile
import time
import types
import unittest

from vllm_support import SMOLLM2, Engine, Prompts, equal_share, support, tiny_model

import tessera_kv as tk
from tessera_kv.testing import Daemon
from tessera_kv.vllm import settings, versions

POOL = "--pool-bytes=1GiB"
HEAD = 1024


class Shared(unittest.TestCase):
    """A folder with a tiny model, and what vLLM's own attention answers to all prompts."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="tessera-vllm-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.model = tiny_model(cls.folder / "model")
        prompts = Prompts(5)
        head = prompts.one(HEAD)
        short = prompts.some(*(3 + 3 * i for i in range(20)))
        del short[18]  # its two best tokens have logits of 7.32573 and 7.32571: a tie
        cls.prompts = {
            "short": short,
            "long": prompts.some(700, 333, 1100, 64),  # chunks of 512 tokens, beside decoding rows
            "shared": [head + tail for tail in prompts.some(7, 40, 100, 1)],
            "crowded": prompts.some(*(90 + i for i in range(8))),
        }
        engine = Engine(cls.folder, cls.model)
        cls.own = engine.about
        cls.wanted = {name: engine.generate(given, 24) for name, given in cls.prompts.items()}
        engine.close()

    def daemon(self, *flags):
        daemon = Daemon(POOL, *flags)
        self.addCleanup(daemon.close)
        return daemon

    def engine(self, daemon, policy="", options=None, **more):
        engine = Engine(self.folder, self.model,
                        {"address": daemon.address, "policy": policy, **more}, **(options or {}))
        self.addCleanup(engine.close)
        return engine

    def tenant(self, daemon):
        with tk.attach(daemon.address) as worker:
            return worker.stats()["tenants"][0]

    def wait_until(self, condition):
        """Asks the daemon again and again."""
        deadline = time.monotonic() + 120
        while not condition():
            self.assertLess(time.monotonic(), deadline)


class InVllm(Shared):
    def test_dense_answers_are_those_of_vllm(self):
        daemon = self.daemon()
        engine = self.engine(daemon)
        self.assertGreater(len({tuple(each) for each in self.wanted["short"]}), 15)
        for name in ("short", "long"):
            self.assertEqual(engine.generate(self.prompts[name], 24), self.wanted[name])
        # The pool of vLLM only counts.
        self.assertLess(engine.about["pool_bytes"], self.own["pool_bytes"] / 100)

        before = self.tenant(daemon)["tokens_appended"]
        self.assertEqual(engine.generate(self.prompts["shared"], 24), self.wanted["shared"])
        computed = self.tenant(daemon)["tokens_appended"] - before
        self.assertLess(computed, 2 * HEAD)  # the head of 1,024 tokens was computed once

        # Another engine begins with it, and none of its tokens are computed again.
        other = self.engine(daemon)
        before = self.tenant(daemon)["tokens_appended"]
        self.assertEqual(other.generate(self.prompts["shared"], 24), self.wanted["shared"])
        self.assertLess(self.tenant(daemon)["tokens_appended"] - before, HEAD)

        # It is killed while it generates. The daemon frees what it had; the first engine goes on.
        idle = self.tenant(daemon)
        other.start(self.prompts["long"], 900)
        self.wait_until(lambda: self.tenant(daemon)["sequences"] > idle["sequences"])
        other.kill()
        self.assertEqual(engine.generate(self.prompts["short"], 24), self.wanted["short"])
        self.wait_until(lambda: self.tenant(daemon)["sessions"] == idle["sessions"] - 2)

    def test_preempted_requests_are_kept(self):
        engine = self.engine(self.daemon(), share=False, options={
            "block_size": 32, "max_model_len": 160, "num_gpu_blocks_override": 16})
        engine.start(self.prompts["crowded"], 24)
        answer = engine.answer()
        self.assertEqual(answer["tokens"], self.wanted["crowded"])
        self.assertGreater(answer["vllm:num_preemptions"], 0)

    def test_a_daemon_is_restarted_under_the_engine(self):
        daemon = self.daemon()
        engine = self.engine(daemon, options={"max_num_seqs": 4})
        engine.start(self.prompts["short"], 24)
        self.wait_until(lambda: self.tenant(daemon)["sequences"] > 0)
        daemon.kill()
        with open(daemon.log, "ab") as log:
            daemon.process = subprocess.Popen(daemon.process.args, stdout=log, stderr=log,
                                              stdin=subprocess.DEVNULL)
        self.assertEqual(engine.answer()["tokens"], self.wanted["short"])
        # The scheduler's attachment found the new daemon, too: the head is computed once.
        before = self.tenant(daemon)["tokens_appended"]
        self.assertEqual(engine.generate(self.prompts["shared"], 24), self.wanted["shared"])
        self.assertLess(self.tenant(daemon)["tokens_appended"] - before, 2 * HEAD)

    def test_planes(self):
        daemon = self.daemon()
        engine = self.engine(daemon, policy="planes:book_rows=256")
        got = engine.generate(self.prompts["long"], 24)
        self.assertGreater(self.tenant(daemon)["entries_packed"], 0)
        # Too short to be packed. What a random model makes of packed rows says nothing.
        self.assertEqual(got[3], self.wanted["long"][3])


class Refused(unittest.TestCase):
    def test_versions(self):
        for version in ("0.31.2", "0.33.0", "1.0", ""):
            with self.assertRaisesRegex(tk.Unsupported, "serves 0.32"):
                versions.check(version)
        versions.check("0.32.0+cpu")

    def configuration(self, extra=None, parallel=None, cache=None, **others):
        def some(**values):
            return types.SimpleNamespace(**values)

        return some(
            kv_transfer_config=some(kv_connector="TesseraConnector",
                                    kv_connector_extra_config=extra or {}),
            parallel_config=some(**{"tensor_parallel_size": 1, **(parallel or {})}),
            cache_config=some(**{"enable_prefix_caching": False, "cache_dtype": "auto",
                                 **(cache or {})}),
            **{"speculative_config": None, "lora_config": None, "use_v2_model_runner": False,
               **others})

    def test_configurations(self):
        os.environ["TESSERA_VLLM_CPU"] = "1"
        self.addCleanup(os.environ.pop, "TESSERA_VLLM_CPU")
        found = settings.settings_of(self.configuration({"policy": "planes", "ttl": 5}))
        self.assertEqual((found.policy, found.ttl), ("planes", 5))
        for message, options in (
            ('"polcy"; known are address, policy', {"extra": {"polcy": "planes"}}),
            ('"threads" is \'2\'; expected is int', {"extra": {"threads": "2"}}),
            ("moves positions", {"extra": {"policy": "streaming:keep=64,pos=slot"}}),
            ("tensor_parallel_size is 2; served is 1", {"parallel": {"tensor_parallel_size": 2}}),
            ("--no-enable-prefix-caching", {"cache": {"enable_prefix_caching": True}}),
            ("kv_cache_dtype is fp8", {"cache": {"cache_dtype": "fp8"}}),
            ("speculative decoding", {"speculative_config": object()}),
            ("LoRA", {"lora_config": object()}),
            ("VLLM_USE_V2_MODEL_RUNNER=0", {"use_v2_model_runner": True}),
        ):
            with self.subTest(message), self.assertRaisesRegex(tk.Error, message):
                settings.settings_of(self.configuration(**options))
        del os.environ["TESSERA_VLLM_CPU"]
        with self.assertRaisesRegex(tk.InvalidArgument, "set TESSERA_VLLM_CPU=1"):
            settings.settings_of(self.configuration())
        os.environ["TESSERA_VLLM_CPU"] = "1"


@unittest.skipUnless(SMOLLM2.is_dir(), f"{SMOLLM2} does not exist")
class SmolLM2(unittest.TestCase):
    PROMPTS = (
        "The capital of France is", "Once upon a time, there was a", "def fibonacci(n):\n",
        "Water boils at", "The largest planet of the solar system is", "1. Mix the flour with",
        "Dear Sir or Madam,", "In 1969, two men", "The derivative of x squared is",
        "Three animals that lay eggs are", "import numpy as np\n", "Roses are red,",
        "The opposite of cold is", "What is 7 times 8?", "Shakespeare wrote",
        "The mitochondrion is", "To be, or not to be,", "SELECT name FROM",
        "A triangle has three", "She opened the door and",
    )

    def test_twenty_prompts(self):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
        prompts = [tokenizer(prompt)["input_ids"] for prompt in self.PROMPTS]
        with tempfile.TemporaryDirectory(prefix="tessera-vllm-") as folder, Daemon(POOL) as daemon:
            answers = []
            for tessera in (None, {"address": daemon.address}):
                engine = Engine(folder, str(SMOLLM2), tessera)
                answers.append(engine.generate(prompts, 24))
                engine.close()
        wanted, got = answers
        self.assertEqual(equal_share(got, wanted), 1.0)


if __name__ == "__main__":
    support.main()
