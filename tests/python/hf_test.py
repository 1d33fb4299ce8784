"""`tessera_kv.hf`: tiny models of five architectures against transformers' own caches."""

import contextlib
import copy
import os
import pathlib
import subprocess
import sys
import time
from unittest import mock

# First, because it goes on in an interpreter that has the others.
from hf_support import ARCHITECTURES, LAYERS, VOCABULARY, forward, models
from support import WithDaemon, main, tk

import torch
import transformers

import tessera_kv.hf as thf
from tessera_kv.hf import geometry


def text(*shape):
    return torch.randint(3, VOCABULARY, shape)


class WithCache(WithDaemon):
    flags = ("--pool-bytes=2GiB",)  # tail rings of many float32 rows

    def setUp(self):
        super().setUp()
        torch.manual_seed(self.seed)

    def cache(self, model, **options):
        made = thf.cache(model, self.daemon.address, **options)
        self.addCleanup(made.close)
        return made

    def greedy(self, model, ids, tokens=24, **options):
        # Without a mask, generate takes tokens for padding that have the number of padding.
        options.setdefault("attention_mask", torch.ones_like(ids))
        return model.generate(ids, max_new_tokens=tokens, do_sample=False, **options)

    def mine(self, model, cache, ids, tokens=24, **options):
        options.setdefault("attention_mask", torch.ones_like(ids))
        return thf.generate(model, cache, ids, max_new_tokens=tokens, do_sample=False, **options)


class Logits(WithCache):
    # A prompt, tokens, a few at a time, many at once, a token.
    PIECES = (50, 1, 1, 1, 9, 32, 75, 1, 1)

    def check(self, name, dtype):
        eager, model = models(name, dtype, seed=self.seed)
        exact = copy.deepcopy(eager).float()
        cache, other = self.cache(model), transformers.DynamicCache(config=eager.config)
        reference = transformers.DynamicCache(config=eager.config)
        ids, begin = text(2, sum(self.PIECES)), 0
        for piece in self.PIECES:
            part = ids[:, begin:begin + piece]
            wanted = forward(eager, part, other)
            got = forward(model, part, cache)
            most = max(1.0, float(wanted.abs().max()))
            place = f"{name}, {dtype}, token {begin}"
            if dtype == torch.float32:
                self.assertLessEqual(float((wanted - got).abs().max()), 1e-4, place)
            else:  # as good as eager attention: both differ from float32, each in its way
                truth = forward(exact, part, reference)
                own, ours = (float((one - truth).pow(2).mean().sqrt()) for one in (wanted, got))
                self.assertLessEqual(ours, 1.2 * own + 1e-3, place)
                self.assertLessEqual(float((wanted - got).abs().max()), 2e-2 * most, place)
            self.assertGreater(float(wanted.std()), 0.1)
            begin += piece
            self.assertEqual(cache.get_seq_length(), begin)
            self.assertEqual([row.tokens for row in cache.rows], [begin] * 2)

    def test_float32(self):
        for name in ARCHITECTURES:
            with self.subTest(name):
                self.check(name, torch.float32)

    def test_bfloat16(self):
        for name in ARCHITECTURES:
            with self.subTest(name):
                self.check(name, torch.bfloat16)

    def test_without_a_cache(self):
        for name in ARCHITECTURES:
            eager, model = models(name, seed=self.seed)
            ids, mask = text(2, 60), torch.ones(2, 60, dtype=torch.long)
            mask[0, :13] = 0
            for given in (None, mask):
                with torch.no_grad():
                    wanted = eager(ids, attention_mask=given, use_cache=False).logits
                    got = model(ids, attention_mask=given, use_cache=False).logits
                torch.testing.assert_close(got[:, 13:], wanted[:, 13:], atol=1e-4, rtol=0)


class Generation(WithCache):
    def test_a_batch_with_padding_equals_single_runs(self):
        for name in ("llama", "gemma3", "gpt_oss"):
            eager, model = models(name, seed=self.seed)
            lengths = (61, 17, 44, 3)
            prompts = [text(1, length) for length in lengths]
            ids = torch.zeros(4, 61, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(prompts):
                ids[row, 61 - prompt.shape[1]:] = prompt[0]
                mask[row, 61 - prompt.shape[1]:] = 1
            cache = self.cache(model)
            batch = self.mine(model, cache, ids, attention_mask=mask)
            for row, prompt in enumerate(prompts):
                alone = self.mine(model, self.cache(model), prompt)
                self.assertEqual(batch[row, 61:].tolist(), alone[0, prompt.shape[1]:].tolist())
                wanted = self.greedy(eager, prompt)
                self.assertEqual(alone.tolist(), wanted.tolist())
            self.assertEqual([row.tokens for row in cache.rows],
                             [length + 23 for length in lengths])
            # A second turn: each row has a text of another length, again padded on the left.
            more, new = text(4, 40), (40, 2, 33, 7)
            more_mask = torch.zeros(4, 40, dtype=torch.long)
            for row, count in enumerate(new):
                more_mask[row, 40 - count:] = 1
            whole = torch.cat([batch, more], 1)
            whole_mask = torch.cat([mask, torch.ones(4, 24, dtype=torch.long), more_mask], 1)
            second = self.mine(model, cache, whole, tokens=6, attention_mask=whole_mask)
            for row, prompt in enumerate(prompts):
                conversation = whole[row][whole_mask[row].bool()][None]
                wanted = self.greedy(eager, conversation, tokens=6)
                self.assertEqual(second[row, -6:].tolist(), wanted[0, -6:].tolist())

    def test_beams(self):
        eager, model = models("llama", seed=self.seed)
        ids = text(2, 45)
        cache = self.cache(model)
        wanted = self.greedy(eager, ids, num_beams=4)
        self.assertEqual(self.mine(model, cache, ids, num_beams=4).tolist(), wanted.tolist())
        report = cache.report()
        self.assertEqual(len(report.rows), 8)
        # The prompt of four beams is stored once.
        self.assertTrue(all(row.shared_bytes > 0 for row in report.rows), report)

    def test_assisted_decoding(self):
        eager, model = models("llama", seed=self.seed)
        draft, _ = models("llama", seed=self.seed)
        with torch.no_grad():  # a draft that is right now and then
            for parameter in draft.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        ids = text(1, 45)
        wanted = self.greedy(eager, ids, tokens=40)
        got = self.mine(model, self.cache(model), ids, tokens=40, assistant_model=draft)
        self.assertEqual(got.tolist(), wanted.tolist())
        got = self.mine(model, self.cache(model), ids, tokens=40, prompt_lookup_num_tokens=3)
        self.assertEqual(got.tolist(), wanted.tolist())

    def test_a_second_turn(self):
        for name in ("qwen2", "qwen3"):
            eager, model = models(name, seed=self.seed)
            cache = self.cache(model)
            conversation = text(2, 30)
            for more in (5, 32, 90):  # a step, a step, many at once
                conversation = self.mine(model, cache, conversation, tokens=7)
                conversation = torch.cat([conversation, text(2, more)], 1)
            wanted = self.greedy(eager, conversation, tokens=9)
            got = self.mine(model, cache, conversation, tokens=9)
            self.assertEqual(got.tolist(), wanted.tolist())

    def test_prompts_in_chunks(self):
        eager, model = models("gemma3", seed=self.seed)
        ids = text(1, 200)
        wanted = self.greedy(eager, ids)
        got = self.mine(model, self.cache(model), ids, prefill_chunk_size=64)
        self.assertEqual(got.tolist(), wanted.tolist())

    def test_sampling(self):
        eager, model = models("llama", seed=self.seed)
        ids = text(3, 20)
        outputs = []
        for run in (lambda **options: eager.generate(ids, **options),
                    lambda **options: thf.generate(model, self.cache(model), ids, **options)):
            torch.manual_seed(self.seed)
            outputs.append(run(max_new_tokens=20, do_sample=True, top_k=20).tolist())
        self.assertEqual(*outputs)

    def test_policies(self):
        _, model = models("llama", torch.bfloat16, seed=self.seed)
        ids = text(2, 300)
        for policy in ("chunkkv:budget=0.35", "snapkv:budget=0.35", "quest",
                       "h2o:heavy=32,recent=32",
                       "semantickv:sink=4,keep_total=0.3", "streaming:recent=64", "tova:budget=64",
                       "semanticache:delimiters=0,key_space=pre", "think", "lacache:budget=64",
                       "pyramidkv:budget=0.35", "mosaickv:keep=0.375,select=0,min_segment=32",
                       "planes:book_rows=256"):
            with self.subTest(policy):
                cache = self.cache(model, policy=policy)
                first = self.mine(model, cache, ids, tokens=20)
                again = torch.cat([first, text(2, 60)], 1)
                second = self.mine(model, cache, again, tokens=8)
                self.assertEqual(second.shape[1], again.shape[1] + 8)
                for row in cache.report().rows:
                    self.assertEqual(row.tokens, second.shape[1] - 1)
                    self.assertLessEqual(row.tokens_kept, 1)
                cache.close()


class Caches(WithCache):
    def test_forks_go_on_apart(self):
        eager, model = models("llama", seed=self.seed)
        cache = self.cache(model)
        ids = text(1, 70)
        thf.prefill(model, cache, ids[:, :-1])
        fork = cache.fork(3)
        self.addCleanup(fork.close)
        ends = text(3, 4)
        whole = torch.cat([ids.expand(3, -1), ends], 1)
        self.assertEqual(self.mine(model, fork, whole).tolist(), self.greedy(eager, whole).tolist())
        self.assertEqual(cache.get_seq_length(), 69)
        self.assertEqual(self.mine(model, cache, ids).tolist(), self.greedy(eager, ids).tolist())

    def test_rows_are_selected_repeated_and_cropped(self):
        eager, model = models("llama", seed=self.seed)
        cache = self.cache(model)
        ids = text(3, 40)
        thf.prefill(model, cache, ids)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([5, 0, 0, 3, 2, 1]))
        cache.batch_select_indices(torch.tensor([0, 1, 3]))
        cache.crop(-5)
        cache.crop(33)
        order = ids[[2, 0, 1], :33]
        self.assertEqual(cache.ids, order.tolist())
        whole = torch.cat([order, text(3, 3)], 1)
        self.assertEqual(self.mine(model, cache, whole).tolist(),
                         self.greedy(eager, whole).tolist())

    def test_what_is_closed_is_freed(self):
        _, model = models("llama", seed=self.seed)
        with tk.attach(self.daemon.address) as worker:
            before = worker.stats()["tenants"][0]["sequences"]
            with thf.cache(model, worker=worker) as cache:
                self.mine(model, cache, text(4, 100))
                self.assertGreater(worker.stats()["tenants"][0]["sequences"], before)
            self.assertEqual(worker.stats()["tenants"][0]["sequences"], before)

    def test_an_error_in_a_forward_changes_nothing(self):
        eager, model = models("llama", seed=self.seed)
        ids = text(2, 130)
        wanted = self.greedy(eager, ids)
        for cut in (0, 20, 120):  # a prompt, many tokens, a few
            cache = self.cache(model, policy="")
            if cut:
                thf.prefill(model, cache, ids[:, :cut])
            with mock.patch.object(model.model.layers[2].mlp, "forward",
                                   side_effect=ZeroDivisionError):
                with self.assertRaises(ZeroDivisionError):
                    thf.prefill(model, cache, ids)
            self.assertEqual([row.tokens for row in cache.rows], [cut] * 2)
            self.assertEqual(self.mine(model, cache, ids).tolist(), wanted.tolist())

    def test_report(self):
        _, model = models("llama", seed=self.seed)
        cache = self.cache(model, policy="snapkv:budget=0.25")
        self.mine(model, cache, text(1, 400), tokens=10)
        report = cache.report()
        self.assertEqual((report.forwards, report.repeated), (10, 0))
        self.assertEqual(report.rows[0].tokens, 409)
        self.assertEqual(report.rows[0].dense_bytes, 409 * LAYERS * 2 * 2 * 64 * 4)
        self.assertLess(report.rows[0].tokens_kept, 0.5)
        self.assertGreater(report.prompt_seconds, 0)
        self.assertRegex(str(report), r"policy snapkv.*10 forwards")


PUBLISH = """
import sys, torch
from hf_support import models
import tessera_kv.hf as thf
_, model = models("qwen2", seed=5)
torch.manual_seed(6)
head = torch.randint(3, 128, (1, 128))
with thf.cache(model, sys.argv[1], policy=sys.argv[2]) as cache:
    thf.prefill(model, cache, head)
    print(len(cache.publish(ttl=600)))
"""


class Prefixes(WithCache):
    def publish(self, policy):
        """Another process computes 128 tokens and publishes them."""
        tests = pathlib.Path(__file__).parent
        subprocess.run([sys.executable, "-c", PUBLISH, self.daemon.address, policy], check=True,
                       timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(
                           [str(tests), os.environ.get("PYTHONPATH", "")])})
        torch.manual_seed(6)
        return text(1, 128)

    def test_a_prefix_of_another_process(self):
        head = self.publish("")
        eager, model = models("qwen2", seed=5)
        tails = text(3, 40)
        ids = torch.cat([head.expand(3, -1), tails], 1)
        mask = torch.ones_like(ids)
        ids[1, :17] = mask[1, :17] = 0  # begins elsewhere: only its padding is known
        cache = self.cache(model)
        self.assertEqual(cache.match(ids, mask), 17)
        wanted = self.greedy(eager, ids, attention_mask=mask)
        got = self.mine(model, cache, ids, attention_mask=mask)
        self.assertEqual(got.tolist(), wanted.tolist())
        # Rows that begin with it, one behind padding.
        ids = torch.zeros(2, 180, dtype=torch.long)
        ids[0, 12:] = torch.cat([head[0], tails[0]])
        ids[1] = torch.cat([head[0], tails[1], tails[2, :12]])
        mask = (ids > 0).long()
        cache = self.cache(model)
        self.assertEqual(cache.match(ids, mask), 128)
        self.assertEqual([row.tokens for row in cache.rows], [116, 128])
        shared = [row.describe().shared_tile_bytes for row in cache.rows]
        self.assertTrue(all(shared), shared)
        wanted = self.greedy(eager, ids, attention_mask=mask)
        got = self.mine(model, cache, ids, attention_mask=mask)
        self.assertEqual(got.tolist(), wanted.tolist())
        # Never all of a prompt: its last token gives the first logits.
        self.assertLess(self.cache(model).match(head), 128)

    def test_a_prefix_under_a_policy_that_drops(self):
        policy = "streaming:recent=32"
        head = self.publish(policy)
        _, model = models("qwen2", seed=5)
        cache = self.cache(model, policy=policy)
        ids = torch.cat([head, text(1, 20)], 1)
        self.assertEqual(cache.match(ids), 128)
        alone = self.cache(model, policy=policy)
        thf.prefill(model, alone, head)
        self.assertEqual(self.mine(model, cache, ids).tolist(),
                         self.mine(model, alone, ids).tolist())


class Aborted(WithCache):
    def test_a_forward_is_repeated_whichever_layer_is_aborted(self):
        eager, model = models("llama", seed=self.seed)
        ids = text(2, 40)
        more = torch.cat([self.greedy(eager, ids, tokens=8), text(2, 50)], 1)
        wanted = self.greedy(eager, more, tokens=4)
        for layer in (*range(LAYERS), "end"):
            cache = self.cache(model)
            failures = {"step": 1, "read": 1}
            with self.aborting(layer, failures):
                self.assertEqual(self.mine(model, cache, ids, tokens=8).tolist(),
                                 more[:, :48].tolist())
                got = self.mine(model, cache, more, tokens=4)
            self.assertEqual(got.tolist(), wanted.tolist())
            self.assertEqual(failures, {"step": 0, "read": 0})
            self.assertEqual(cache.report().repeated, 2)

    def aborting(self, layer, failures):
        """Raises Aborted once in a step and once in a read: at a layer, or at the end."""
        patches = contextlib.ExitStack()
        for kind, name in ((tk.Step, "step"), (tk.Read, "read")):
            method = "end" if layer == "end" else "attend"

            def failing(this, *arguments, _true=getattr(kind, method), _name=name, **options):
                if (layer == "end" or arguments[0] == layer) and failures[_name]:
                    failures[_name] -= 1
                    this.abandon()
                    raise tk.Aborted("the pin was revoked", "pin_revoked")
                return _true(this, *arguments, **options)

            patches.enter_context(mock.patch.object(kind, method, failing))
        return patches

    def test_it_gives_up_after_eight(self):
        _, model = models("llama", seed=self.seed)
        cache = self.cache(model)
        ids = text(1, 20)
        thf.prefill(model, cache, ids)
        with self.aborting(1, {"step": 100, "read": 0}), self.assertRaises(tk.Aborted):
            forward(model, text(1, 1), cache)
        self.assertEqual(cache.report().repeated, 7)
        self.assertEqual(cache.get_seq_length(), 20)


class Revoked(WithCache):
    """A daemon that frees memory soon after a step began."""

    flags = ("--pin-limit-ms=50", "--pool-bytes=128MiB", "--pool-extent-bytes=16MiB",
             "--staging-bytes=8MiB", "--host-tier-bytes=0")

    def test_a_forward_whose_pin_the_daemon_revoked(self):
        eager, model = models("llama", seed=self.seed)
        rival = self.attach()
        rivals = self.model(rival)
        ids = text(1, 40)
        cache = self.cache(model)
        attempts = []

        def need_memory(*_):
            """Another worker does, while a step is open: once it was aborted, no more."""
            if not cache.columns or cache.repeated:
                return
            attempts.append(1)
            end = time.monotonic() + 0.3
            key, value = self.prompt(500)
            while time.monotonic() < end:
                with rival.sequence(rivals) as other:
                    other.append(key, value)

        model.model.layers[1].register_forward_pre_hook(need_memory)
        got = self.mine(model, cache, ids, tokens=40)
        self.assertEqual(got.tolist(), self.greedy(eager, ids, tokens=40).tolist())
        self.assertGreater(cache.report().repeated, 0, f"{len(attempts)} attempts")


class NotServed(WithCache):
    def refuse(self, pattern, name="llama", policy="", model=None, **changes):
        if model is None:
            _, model = models(name, **changes)
        with self.assertRaisesRegex(tk.Unsupported, pattern):
            self.cache(model, policy=policy)

    def test_models(self):
        self.refuse("layer 0 of llama has head_dim 32; served are 64, 128, 256", head_dim=32)
        _, model = models("llama")
        model.config.kv_lora_rank = 16
        self.refuse("kv_lora_rank=16: latent attention", model=model)
        _, model = models("gemma3")
        model.config.layer_types = ["full_attention", "linear_attention"] * 2
        self.refuse("layer 1 of gemma3_text is linear_attention", model=model)
        _, model = models("llama")
        model.double()
        self.refuse("torch.float64", model=model)
        eager, _ = models("llama")
        with self.assertRaisesRegex(tk.InvalidArgument, "attn_implementation is eager"):
            self.cache(eager)

    def test_policies_that_move_positions(self):
        self.refuse("pos=slot", policy="streaming:recent=64,pos=slot")
        self.refuse("2 different RoPE bases", "gemma3", policy="semanticache:key_space=pre")

    def test_a_layer_that_changes(self):
        _, model = models("gemma3")
        cache = self.cache(model)
        model.model.layers[2].self_attn.sliding_window = 17
        with self.assertRaisesRegex(tk.Unsupported, "layer 2 .*sliding_window 17 .registered: 40"):
            self.mine(model, cache, text(1, 60))

    def test_masks(self):
        _, model = models("llama")
        ids = text(2, 20)
        mask = torch.ones(2, 20, dtype=torch.long)
        mask[1, 15:] = 0
        for given, pattern in ((mask, "row 1 has padding behind tokens"),
                               (torch.ones(2, 1, 20, 20, dtype=torch.bool), "of 4 dimensions")):
            with self.assertRaisesRegex(tk.Unsupported, pattern):
                forward(model, ids, self.cache(model), given)
        cache = self.cache(model)
        forward(model, ids, cache)
        hiding = torch.ones(2, 21, dtype=torch.long)
        hiding[0, :4] = 0
        with self.assertRaisesRegex(tk.Unsupported, "row 0 has 16 tokens of the cache's 20"):
            forward(model, text(2, 1), cache, hiding)
        positions = torch.arange(20).repeat(2, 1)
        positions[:, 10:] -= 10  # two texts in a row
        with torch.no_grad(), self.assertRaisesRegex(tk.Unsupported, "packed"):
            model(ids, position_ids=positions, use_cache=False)

    def test_other_caches_and_batches(self):
        _, model = models("llama")
        with self.assertRaisesRegex(tk.InvalidArgument, "layer 0 has another cache"):
            self.greedy(model, text(1, 20))
        cache = self.cache(model)
        forward(model, text(2, 20), cache)
        with self.assertRaisesRegex(tk.InvalidArgument, "batch has 3 rows; the cache holds 2"):
            forward(model, text(3, 1), cache)
        model.train()
        model.config.attention_dropout = 0.1
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with self.assertRaisesRegex(tk.Unsupported, "dropout 0.1"):
            forward(model, text(2, 1), cache)

    def test_weights_have_names(self):
        (_, one), (_, other) = (models("llama", seed=seed) for seed in (1, 2))
        name = geometry(one).name
        self.assertNotEqual(geometry(other).name, name)
        with torch.no_grad():
            one.model.layers[3].mlp.up_proj.weight[77, 77] += 0.01
        self.assertNotEqual(geometry(one).name, name)


if __name__ == "__main__":
    main()
