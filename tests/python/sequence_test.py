"""The life of a sequence: prompt, policy, forks, prefixes, residence, hand-over, description."""

import unittest

from support import WithDaemon, attention, from_bf16, main, np, tk


class Life(WithDaemon):
    def check_against_oracle(self, worker, sequence, key, value):
        query = self.rows(5, self.QUERY_HEADS, self.DIM)
        lse = np.empty((5, self.QUERY_HEADS), np.float32)
        with worker.read([sequence]) as read:
            for layer in range(self.LAYERS):
                out = read.attend(layer, query, lse=lse)
                wanted, sums = attention(from_bf16(query), from_bf16(key[layer]),
                                         from_bf16(value[layer]))
                np.testing.assert_allclose(out, wanted, atol=2e-5, rtol=2e-5)
                np.testing.assert_allclose(lse, sums, atol=1e-5, rtol=1e-5)
        np.testing.assert_array_equal(worker.attend_rpc([sequence], self.LAYERS - 1, query), out)

    def test_from_an_empty_sequence_to_a_long_one(self):
        for mapped in (True, False):
            worker = self.attach(name="life", map_memory=mapped, threads=2)
            self.assertEqual(worker.is_mapped, mapped)
            sequence = worker.sequence(self.model(worker))
            key, value = self.prompt(300)
            self.assertEqual((sequence.tokens, sequence.policy), (0, "dense"))
            self.assertEqual(sequence.append(key[:, :100], value[:, :100]), 100)
            for layer in range(self.LAYERS):  # layer by layer
                sequence.append(key[layer, 100:200], value[layer, 100:200], layer=layer)
            self.assertEqual(sequence.tokens, 200)
            self.check_against_oracle(worker, sequence, key[:, :200], value[:, :200])
            self.decode(worker, sequence, key[:, 200:230], value[:, 200:230])
            for token in range(230, 300):
                self.decode(worker, sequence, key[:, token:token + 1], value[:, token:token + 1])
            self.assertEqual((sequence.tokens, sequence.next_position), (300, 300))
            self.check_against_oracle(worker, sequence, key, value)
            self.assertTrue(sequence.describe().decoding == mapped)
            sequence.park()
            self.assertFalse(sequence.describe().decoding)
            sequence.truncate(250)
            self.check_against_oracle(worker, sequence, key[:, :250], value[:, :250])

    def test_policies_observe_and_compress(self):
        worker = self.attach()
        model = self.model(worker, delimiters=(3, 4, 5))
        key, value = self.prompt(200)
        for policy, needs in (
            ("", (False, False, False, False)),
            ("snapkv:budget=0.5,window=8", (True, False, False, False)),
            ("h2o:heavy=30,recent=30", (True, True, False, True)),
            ("semanticache:tau=0.3", (False, False, True, False)),
        ):
            with self.subTest(policy):
                sequence = worker.sequence(model, policy=policy)
                found = sequence.needs
                self.assertEqual(
                    (found.queries, found.keys, found.token_ids, found.while_decoding), needs)
                query = self.rows(self.LAYERS, 200, self.QUERY_HEADS, self.DIM)
                for first in (0, 80):  # in two chunks; the second continues the first
                    chunk = slice(first, 80 if first == 0 else 200)
                    for layer in range(self.LAYERS):
                        sequence.observe(layer, query[layer, chunk], key[layer, chunk])
                        sequence.append(key[layer, chunk], value[layer, chunk], layer=layer)
                sequence.observe_tokens(self.random.integers(0, 10, 200))
                sequence.compress()
                found = sequence.describe(entries=True)
                self.assertEqual((found.tokens, found.state), (200, "live"))
                self.assertEqual(found.policy, policy or found.policy)
                lane = found.raw["lane"][0]
                if policy:
                    self.assertLess(len(lane["position"]), 200)
                    self.assertLess(found.tokens_kept, 1)
                else:
                    self.assertEqual(lane["position"], list(range(200)))

    def test_forks_share_and_part(self):
        worker = self.attach()
        sequence = worker.sequence(self.model(worker))
        key, value = self.prompt(128)
        sequence.append(key, value)
        child = sequence.fork()
        self.assertGreater(child.describe().shared_tile_bytes, 0)
        new_key, new_value = self.prompt(1)
        self.decode(worker, child, new_key, new_value)
        self.assertEqual((sequence.tokens, child.tokens), (128, 129))
        self.check_against_oracle(worker, sequence, key, value)
        self.check_against_oracle(worker, child, np.concatenate([key, new_key], 1),
                                  np.concatenate([value, new_value], 1))
        packed = sequence.fork("mosaickv:keep=0.25,loss_k=1,loss_v=1,recent=0,min_segment=32")
        packed.compress()
        self.assertLess(packed.describe().elements_kept, 0.5)
        sequence.close()  # the children live on
        self.check_against_oracle(worker, child, np.concatenate([key, new_key], 1),
                                  np.concatenate([value, new_value], 1))

    def test_prefixes_between_two_workers(self):
        publisher, reader = self.attach(name="publisher"), self.attach(name="reader")
        ids = self.random.integers(0, 1000, 100)
        key, value = self.prompt(100)
        model = self.model(publisher)
        announced = publisher.match(model, ids, will_compute=True)
        self.assertFalse(announced)
        self.assertNotEqual(announced.computation, 0)
        waiting = reader.match(self.model(reader), ids)
        self.assertEqual((bool(waiting), waiting.computing), (False, 100))
        sequence = publisher.sequence(model)
        sequence.append(key, value)
        published = sequence.publish(ids, ttl=600)
        self.assertFalse(published.deduplicated)
        self.assertTrue(sequence.publish(ids.tolist()).deduplicated)
        match = reader.match(self.model(reader), list(ids) + [7, 8, 9])
        self.assertTrue(match)
        self.assertEqual((match.prefix, match.tokens), (published.prefix, 100))
        fork = reader.fork(match)
        self.assertEqual(fork.tokens, 100)
        self.check_against_oracle(reader, fork, key, value)
        self.assertEqual(reader.fork(match, tokens=64).tokens, 64)
        publisher.free_prefix(published.prefix)
        with self.assertRaises(tk.NotFound):
            reader.fork(match)
        other = publisher.match(model, [1] * 64, will_compute=True)
        other.withdraw()

    def test_prefixes_of_other_weights_and_salts_are_not_found(self):
        ids = list(range(64))
        key, value = self.prompt(64)
        plain, salted = self.attach(), self.attach(cache_salt="red")
        same, other = self.attach(cache_salt=b"red"), self.attach(cache_salt="blue")
        publisher = salted.sequence(self.model(salted, weights_id=b"\0one", adapter_id="lora"))
        publisher.append(key, value)
        publisher.publish(ids)
        for worker, weights, adapter, tokens in (
            (same, b"\0one", b"lora", 64), (same, b"\0two", b"lora", 0), (same, b"\0one", b"", 0),
            (same, b"", b"", 0), (other, b"\0one", b"lora", 0), (plain, b"\0one", b"lora", 0),
        ):
            model = self.model(worker, weights_id=weights, adapter_id=adapter)
            self.assertEqual(worker.match(model, ids).tokens, tokens, (weights, adapter))
        with self.assertRaises(tk.InvalidArgument):
            self.model(plain, weights_id="x" * 65)
        with self.assertRaises(tk.InvalidArgument):
            self.attach(cache_salt="x" * 65)

    def test_a_worker_may_take_longer_for_its_steps(self):
        usual = self.attach().welcome()["pin_limit_ms"]
        self.assertEqual(self.attach(pin_limit=30).welcome()["pin_limit_ms"], 30_000)
        self.assertNotEqual(usual, 30_000)
        with self.assertRaises(tk.InvalidArgument):
            self.attach(pin_limit=0.0001)

    def test_layers_have_rotary_positions_of_their_own(self):
        worker = self.attach()
        layers = [tk.Layer(2, 1, 64), tk.Layer(2, 1, 64, rope_theta=1e6),
                  tk.Layer(2, 1, 64, rope_theta=1e6, rope_frequencies=(0.5, 0.25)),
                  tk.Layer(2, 1, 64)]
        one = worker.model("two bases", layers=layers, rope_theta=1e4)
        self.assertEqual(one.layers[1].rope_theta, 1e6)
        sequence = worker.sequence(one, policy="lacache:budget=64,span=2,overlap=1,pos=slot")
        self.assertIn("pos=slot", sequence.policy)
        layers[1] = tk.Layer(2, 1, 64, rope_theta=1e5)
        with self.assertRaises(tk.AlreadyExists):
            worker.model("two bases", layers=layers, rope_theta=1e4)
        layers[1] = tk.Layer(2, 1, 64, rope_theta=0)
        without = worker.model("no positions", layers=layers, rope_theta=1e4)
        with self.assertRaisesRegex(tk.InvalidArgument, "layer 1 .* no rotary positions"):
            worker.sequence(without, policy="lacache:budget=64,span=2,overlap=1,pos=slot")
        layers[1] = tk.Layer(2, 1, 64, rope_theta=1e5, rope_frequencies=[0.5] * 33)
        with self.assertRaisesRegex(tk.InvalidArgument, "33 rope frequencies"):
            worker.model("many", layers=layers, rope_theta=1e4)

    def test_offload_restore_and_handover(self):
        worker, heir = self.attach(), self.attach()
        sequence = worker.sequence(self.model(worker))
        key, value = self.prompt(150)
        sequence.append(key, value)
        self.assertGreater(sequence.offload(), 0)
        self.assertEqual(sequence.describe().state, "offloaded")
        self.check_against_oracle(worker, sequence, key, value)  # restores it
        self.assertEqual(sequence.describe().state, "live")
        sequence.offload()
        sequence.restore()
        self.assertEqual(sequence.describe().state, "live")
        sequence_id = sequence.id
        sequence.handover(heir.session_id)
        with self.assertRaises(tk.NotFound):
            sequence.compress()
        adopted = heir.adopt(self.model(heir), sequence_id)
        self.check_against_oracle(heir, adopted, key, value)

    def test_rows_are_read_back(self):
        for mapped in (True, False):
            worker = self.attach(map_memory=mapped)
            sequence = worker.sequence(self.model(worker))
            self.assertEqual(sequence.read(0)[1].key.shape, (0, self.DIM))
            key, value = self.prompt(90)
            sequence.append(key[:, :80], value[:, :80])
            self.decode(worker, sequence, key[:, 80:], value[:, 80:])
            for layer in range(self.LAYERS):
                for lane in sequence.read(layer, dtype="bf16"):
                    head = lane.kv_head
                    np.testing.assert_array_equal(lane.key, key[layer, :, head])
                    np.testing.assert_array_equal(lane.value, value[layer, :, head])
                    np.testing.assert_array_equal(lane.positions, np.arange(90))
                    np.testing.assert_array_equal(lane.weights, np.ones(90))
                (lane,) = sequence.read(layer, kv_head=1, first_entry=20, entries=30)
                np.testing.assert_array_equal(lane.key, from_bf16(key[layer, 20:50, 1]))
                np.testing.assert_array_equal(lane.value, from_bf16(value[layer, 20:50, 1]))
            lane.key[:] = 0  # a copy
            self.assertTrue(sequence.read(2, kv_head=1)[0].key.any())
            self.assertEqual(len(sequence.read(0, first_entry=100)[0].positions), 0)
            for wrong in ({"layer": 9}, {"layer": 0, "kv_head": 7}, {"layer": 0, "dtype": "fp16"},
                          {"layer": 0, "dtype": "int4"}):
                with self.assertRaises(tk.InvalidArgument):
                    sequence.read(**wrong)

    def test_rows_of_a_policy_are_those_that_attention_sees(self):
        worker = self.attach()
        sequence = worker.sequence(
            self.model(worker),
            policy="snapkv:budget=0.5,window=8+mosaickv:keep=0.5,loss_k=1,loss_v=1,min_segment=32")
        key, value = self.prompt(200)
        query = self.rows(self.LAYERS, 200, self.QUERY_HEADS, self.DIM)
        for layer in range(self.LAYERS):
            sequence.observe(layer, query[layer], key[layer])
        sequence.append(key, value)
        sequence.compress()
        lanes = sequence.read(1)
        for lane in lanes:
            self.assertLess(len(lane.positions), 150)
            self.assertTrue((np.diff(lane.positions.astype(np.int64)) > 0).all())
        asked = query[1, -1:]
        out = worker.attend_rpc([sequence], 1, asked, selection=tk.Selection(rate=1))
        wanted, _ = attention(from_bf16(asked), np.stack([lane.key for lane in lanes], 1),
                              np.stack([lane.value for lane in lanes], 1), causal=False)
        np.testing.assert_allclose(out, wanted, atol=0.02)

    def test_geometry_of_every_kind(self):
        worker = self.attach()
        layers = [tk.Layer(4, 2, 64, scale=0.1), tk.Layer(4, 4, 128, sliding_window=16),
                  tk.Layer(8, 1, 256, logit_softcap=30, sinks=(0.5,) * 8)]
        model = worker.model("mixed", layers=layers, rope_theta=1e4, dtype="fp32")
        self.assertEqual((model.dtype, model.layers[1].sliding_window), ("fp32", 16))
        sequence = worker.sequence(model)
        rows = {}
        for index, layer in enumerate(layers):
            shape = (40, layer.kv_heads, layer.head_dim)
            rows[index] = [self.random.normal(size=shape).astype(np.float32) for _ in range(2)]
            sequence.append(*rows[index], layer=index)
        query = self.random.normal(size=(3, 4, 64)).astype(np.float32)
        with worker.read([sequence]) as read:
            out = read.attend(0, query)
        wanted, _ = attention(query, rows[0][0], rows[0][1], scale=0.1)
        np.testing.assert_allclose(out, wanted, atol=2e-5)
        self.model(worker, rope_frequencies=[0.5 ** i for i in range(32)])
        with self.assertRaisesRegex(tk.InvalidArgument, "frequencies"):
            self.model(worker, rope_frequencies=[0.5] * 1000)
        with self.assertRaisesRegex(tk.InvalidArgument, "2 sinks for 4"):
            worker.model("sinks", layers=[tk.Layer(4, 2, 64, sinks=(1.0, 2.0))])

    def test_what_the_daemon_says_of_itself(self):
        worker = self.attach(name="stats", prefix_hash="xxh3-128/32")
        stats = worker.stats()
        self.assertEqual((stats["device"], stats["version"]), ("cpu", tk.library_version))
        welcome = worker.welcome()
        self.assertEqual(welcome["prefix_hash"], "xxh3-128/32")
        self.assertIsNone(welcome["session"])
        self.assertIn("on cpu", repr(worker))
        with self.assertRaises(tk.FailedPrecondition):
            self.attach(prefix_hash="md5/16")
        worker.check()

    def test_selections(self):
        worker = self.attach()
        key, value = self.prompt(256)
        sequence = worker.sequence(
            self.model(worker),
            policy="mosaickv:keep=0.5,loss_k=1,loss_v=1,recent=0,select=0.5,min_segment=32")
        sequence.append(key, value)
        sequence.compress()
        query = self.rows(1, self.QUERY_HEADS, self.DIM)
        found = worker.select(sequence, 0, query, tk.Selection(entries=32))
        for head in found["heads"]:
            self.assertEqual(head["selected_entries"], 32)
        with worker.read([sequence]) as read:
            few = read.attend(0, query, selection=tk.Selection(entries=32))
            whole = read.attend(0, query, selection=tk.Selection())
        self.assertFalse((few == whole).all())
        np.testing.assert_array_equal(
            few, worker.attend_rpc([sequence], 0, query, selection=tk.Selection(entries=32)))


if __name__ == "__main__":
    main()
