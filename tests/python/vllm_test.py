"""`tessera_kv.vllm` in vLLM itself, on the CPU, beside vLLM's own attention."""

import os
import types
import unittest

import numpy as np
from vllm_support import HEAD, POOL, Daemon, Shared, restart, support, tk

from tessera_kv.vllm import settings, versions
from tessera_kv.vllm.geometry import Geometry
from tessera_kv.vllm.scheduling import Scheduling
from tessera_kv.vllm.state import State


class InVllm(Shared):
    def test_dense_answers_are_those_of_vllm(self):
        daemon = self.daemon()
        engine = self.engine(daemon)
        self.assertGreater(len({tuple(each) for each in self.wanted["short"]}), 15)
        for name in ("short", "long"):
            self.assertEqual(engine.generate(self.prompts[name], 24), self.wanted[name])
        # The pool of vLLM only counts.
        self.assertLess(engine.about["pool_bytes"], self.own["pool_bytes"] / 100)

        before = self.appended(daemon)
        self.assertEqual(engine.generate(self.prompts["shared"], 24), self.wanted["shared"])
        computed = self.appended(daemon) - before
        self.assertLess(computed, 2 * HEAD)  # the head of 1,024 tokens was computed once

        # Another engine begins with it, and none of its tokens are computed again.
        other = self.engine(daemon)
        before = self.appended(daemon)
        self.assertEqual(other.generate(self.prompts["shared"], 24), self.wanted["shared"])
        self.assertLess(self.appended(daemon) - before, HEAD)

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
        restart(daemon)
        self.assertEqual(engine.answer()["tokens"], self.wanted["short"])
        # The scheduler's attachment found the new daemon, too: the head is computed once.
        before = self.appended(daemon)
        self.assertEqual(engine.generate(self.prompts["shared"], 24), self.wanted["shared"])
        self.assertLess(self.appended(daemon) - before, 2 * HEAD)

    def test_planes(self):
        daemon = self.daemon()
        engine = self.engine(daemon, policy="planes:book_rows=256")
        got = engine.generate(self.prompts["long"], 24)
        self.assertGreater(self.tenant(daemon)["entries_packed"], 0)
        # Too short to be packed. What a random model makes of packed rows says nothing.
        self.assertEqual(got[3], self.wanted["long"][3])


class Restarted(unittest.TestCase):
    """A daemon gives the ids of the one before it to others."""

    def publish(self, state, ids):
        rows = np.zeros((2, len(ids), 2, 64), np.float32)
        with state.worker.sequence(state.model) as sequence:
            sequence.append(rows, rows)
            return sequence.publish(ids).prefix

    def test_a_prompt_of_the_daemon_before_is_not_used(self):
        shape = tk.Layer(4, 2, 64)
        geometry = Geometry("restarted", (shape, shape), "fp32", 0.0, ())
        with Daemon(POOL) as daemon:
            given = settings.Settings(address=daemon.address, threads=1)
            state, scheduling = State(given, geometry), Scheduling(given)
            self.addCleanup(state.close)
            self.addCleanup(scheduling.close)
            scheduling.open(geometry)
            first = self.publish(state, range(64))
            request = types.SimpleNamespace(
                request_id="a", prompt_token_ids=list(range(80)), all_token_ids=list(range(80)),
                num_tokens=80, num_prompt_tokens=80, prompt_embeds=None, mm_features=[],
                lora_request=None, cache_salt=None)
            self.assertEqual(scheduling.held(request), 64)
            scheduling.admit(request, 64)
            (part,) = scheduling.plan(types.SimpleNamespace(
                preempted_req_ids=None, num_scheduled_tokens={"a": 16},
                scheduled_new_reqs=[types.SimpleNamespace(req_id="a", block_ids=[[7]],
                                                          num_computed_tokens=64)],
                scheduled_cached_reqs=types.SimpleNamespace(
                    req_ids=[], new_block_ids=[], num_computed_tokens=[]))).parts
            self.assertEqual((part.prefix, part.ids), (first, list(range(64, 80))))
            row = state._row(part, 0, 16, 80)
            self.assertEqual(row.sequence.tokens, 64)

            restart(daemon)
            state._reattach(tk.Unavailable("restarted"))
            self.assertEqual(self.publish(state, range(100, 164)), first)  # others, same id
            self.assertIsNone(state._row(part, 0, 16, 80))


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


if __name__ == "__main__":
    support.main()
