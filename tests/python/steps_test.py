"""Decode steps: batches, drafts, known tensors, threads and busy threads, revoked steps."""

import ctypes
import gc
import sys
import threading
import time
import unittest
import weakref

from support import WithDaemon, attention, from_bf16, main, np, tk


class LikeTorch:
    """What the package uses of a torch tensor. Like one, it can move while it lives."""

    def __init__(self, array, device="cpu"):
        self.array, self.device = array, device
        self.dtype = {np.uint16: "torch.bfloat16", np.float32: "torch.float32"}[array.dtype.type]

    shape = property(lambda self: self.array.shape)
    is_cuda = property(lambda self: self.device.startswith("cuda"))

    def data_ptr(self):
        return self.array.ctypes.data

    def element_size(self):
        return self.array.itemsize

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def new_empty(self, shape):
        return LikeTorch(np.empty(shape, self.array.dtype))


class Steps(WithDaemon):
    def setUp(self):
        super().setUp()
        self.worker = self.attach(threads=2)
        self.registered = self.model(self.worker)

    def started(self, tokens=50):
        sequence = self.worker.sequence(self.registered)
        key, value = self.prompt(tokens)
        sequence.append(key, value)
        return sequence, key, value

    def check(self, out, query, key, value):
        wanted, _ = attention(from_bf16(query), from_bf16(key), from_bf16(value))
        np.testing.assert_allclose(out, wanted, atol=2e-5, rtol=2e-5)

    def test_a_batch_with_different_numbers_of_tokens(self):
        batch = [self.started(tokens) for tokens in (50, 33, 200)]
        counts = [2, 1, 4]
        key, value = self.prompt(7)
        query = self.rows(self.LAYERS, 7, self.QUERY_HEADS, self.DIM)
        with self.worker.step([each[0] for each in batch], new_tokens=counts) as step:
            outs = [step.attend(layer, query[layer], key[layer], value[layer])
                    for layer in range(self.LAYERS)]
        first = 0
        for (sequence, old_key, old_value), count in zip(batch, counts):
            new = slice(first, first + count)
            for layer in range(self.LAYERS):
                self.check(outs[layer][new], query[layer, new],
                           np.concatenate([old_key[layer], key[layer, new]]),
                           np.concatenate([old_value[layer], value[layer, new]]))
            self.assertEqual(sequence.tokens, len(old_key[0]) + count)
            first += count

    def test_drafts_that_are_rejected(self):
        sequence, old_key, old_value = self.started()
        key, value = self.prompt(5)
        with self.worker.step([sequence], new_tokens=5) as step:
            for layer in range(self.LAYERS):
                step.append(layer, key[layer], value[layer])
            step.accept([2])
        self.assertEqual(sequence.tokens, 52)
        query = self.rows(1, self.QUERY_HEADS, self.DIM)
        with self.worker.read([sequence]) as read:
            out = read.attend(1, query)
        self.check(out, query, np.concatenate([old_key[1], key[1, :2]]),
                   np.concatenate([old_value[1], value[1, :2]]))

    def test_an_exception_abandons(self):
        sequence, *_ = self.started()
        key, value = self.prompt(1)
        with self.assertRaises(KeyError), self.worker.step([sequence]) as step:
            step.append(0, key[0], value[0])
            raise KeyError
        self.assertEqual(sequence.tokens, 50)
        # Leaving without all layers is an error of the caller, and commits nothing.
        with self.assertRaisesRegex(tk.FailedPrecondition, "missing: 1-2"), \
                self.worker.step([sequence]) as step:
            step.append(0, key[0], value[0])
        self.decode(self.worker, sequence, key, value)
        self.assertEqual(sequence.tokens, 51)
        # A step that nobody ended ends with its object.
        step = self.worker.step([sequence])
        del step
        gc.collect()
        self.decode(self.worker, sequence, key, value)

    def test_known_tensors_are_taken_again_and_changed_ones_are_not(self):
        sequence, old_key, old_value = self.started()
        key, value = self.prompt(1)
        query = self.rows(self.LAYERS, 1, self.QUERY_HEADS, self.DIM)
        q, k, v = query[0].copy(), key[0].copy(), value[0].copy()
        out = np.zeros((1, self.QUERY_HEADS, self.DIM), np.float32)
        lse = np.zeros((1, self.QUERY_HEADS), np.float32)
        keys, values = [old_key[0]], [old_value[0]]
        for turn in range(6):
            q[:] = self.rows(*q.shape)  # in place
            k[:] = self.rows(*k.shape)
            if turn == 3:  # other memory, same shape
                q, v = q.copy(), v.copy()
            if turn == 4:  # gone without a trace: its memory must not be written again
                kept = weakref.ref(lse)
                lse = None
                gc.collect()
                self.assertIsNone(kept())
            if turn == 5:
                out = None
            with self.worker.step([sequence]) as step:
                got = step.attend(0, q, k, v, out=out, lse=lse)
                for layer in range(1, self.LAYERS):
                    step.append(layer, k, v)
            keys.append(k.copy())
            values.append(v.copy())
            self.check(got, q, np.concatenate(keys), np.concatenate(values))

    def test_tensors_of_every_kind(self):
        sequence, old_key, old_value = self.started(31)
        key, value = self.prompt(1)
        query = self.rows(1, self.QUERY_HEADS, self.DIM)

        class Interface:
            def __init__(self, array):
                self.__array_interface__ = array.__array_interface__
                self.array = array

        class OnlyDlpack:
            def __init__(self, array):
                self.array = array

            def __dlpack__(self):
                return self.array.__dlpack__()

        def in_ctypes(array):
            flat = (ctypes.c_uint16 * array.size).from_buffer_copy(array.tobytes())
            return memoryview(flat).cast("B").cast("H", array.shape)

        kinds = [np.asarray, Interface, in_ctypes]
        if hasattr(np.ndarray, "__dlpack__"):
            kinds.append(OnlyDlpack)
        keys, values = [old_key[0]], [old_value[0]]
        for kind in kinds * 2:
            with self.subTest(kind.__name__), self.worker.step([sequence]) as step:
                out = step.attend(0, kind(query), kind(key[0]), kind(value[0]))
                for layer in range(1, self.LAYERS):
                    step.append(layer, kind(key[layer]), kind(value[layer]))
                keys.append(key[0])
                values.append(value[0])
                self.check(out, query, np.concatenate(keys), np.concatenate(values))

    def test_torch_tensors_in_place_and_moved(self):
        sequence, old_key, old_value = self.started()
        key, value = self.prompt(1)
        query = LikeTorch(self.rows(1, self.QUERY_HEADS, self.DIM))
        out = LikeTorch(np.empty((1, self.QUERY_HEADS, self.DIM), np.float32))
        k, v = LikeTorch(key[0]), LikeTorch(value[0])
        keys, values = [old_key[0]], [old_value[0]]
        for turn in range(4):
            if turn == 2:  # as after tensor.set_(): the same object, other memory
                before = out.array.copy()
                old, out.array = out.array, np.empty_like(out.array)
                query.array = self.rows(*query.shape)
            with self.worker.step([sequence]) as step:
                self.assertIs(step.attend(0, query, k, v, out=out), out)
                for layer in range(1, self.LAYERS):
                    step.append(layer, k, v)
            if turn == 2:
                np.testing.assert_array_equal(old, before)
            keys.append(k.array)
            values.append(v.array)
            self.check(out.array, query.array, np.concatenate(keys), np.concatenate(values))
        with self.worker.read([sequence]) as read:
            made = read.attend(0, query)
        self.assertEqual((made.dtype, made.shape), ("torch.bfloat16", query.shape))

    def test_tensors_of_another_device(self):
        sequence, *_ = self.started()
        query = LikeTorch(self.rows(1, self.QUERY_HEADS, self.DIM), device="cuda:1")
        with self.worker.read([sequence]) as read:
            with self.assertRaisesRegex(tk.WrongDevice, "query is on cuda:1.*host memory"):
                read.attend(0, query)
        with self.assertRaisesRegex(tk.WrongDevice, "key is on cuda:1"):
            sequence.append(query, query, layer=0)

    def test_outputs_in_the_models_type(self):
        sequence, key, value = self.started()
        query = self.rows(2, self.QUERY_HEADS, self.DIM)
        out = np.zeros((2, self.QUERY_HEADS, self.DIM), np.uint16)
        with self.worker.read([sequence]) as read:
            self.assertIs(read.attend(0, query, out=out), out)
        wanted, _ = attention(from_bf16(query), from_bf16(key[0]), from_bf16(value[0]))
        np.testing.assert_allclose(from_bf16(out), wanted, atol=0.01)

    def test_many_threads_with_sequences_of_their_own(self):
        errors = []

        def work():
            try:
                sequence, key, value = self.started(20)
                for _ in range(60):
                    new_key, new_value = self.prompt(1)
                    self.decode(self.worker, sequence, new_key, new_value)
                assert sequence.tokens == 80
                sequence.close()
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])

    def test_one_sequence_in_many_threads_is_busy_or_right(self):
        sequence, key, value = self.started(20)
        outcomes = []

        def work():
            for _ in range(30):
                try:
                    sequence.describe()
                    outcomes.append(True)
                except tk.Busy:
                    outcomes.append(False)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        self.addCleanup(sys.setswitchinterval, interval)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(outcomes), 120)
        self.assertIn(True, outcomes)
        sequence.describe()

    def test_closing_the_worker_waits_for_calls(self):
        worker = self.attach()
        model = self.model(worker)
        worker.match(model, [5] * 64, will_compute=True)
        other = self.attach()
        model = self.model(other)
        results = []

        def wait():
            try:
                results.append(other.match(model, [5] * 64, wait=0.5))
            except tk.Error as error:
                results.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while other._calls == 0 and thread.is_alive():
            pass
        other.close()
        thread.join()
        self.assertEqual(len(results), 1)


class ShortPins(WithDaemon):
    flags = ("--pin-limit-ms=50", "--pool-bytes=128MiB", "--pool-extent-bytes=16MiB",
             "--staging-bytes=8MiB", "--host-tier-bytes=0")

    def test_an_aborted_step_is_repeated(self):
        worker, rival = self.attach(), self.attach()
        model, rivals = self.model(worker), self.model(rival)
        sequence = worker.sequence(model)
        key, value = self.prompt(64)
        sequence.append(key, value)
        new_key, new_value = self.prompt(1)
        deadline = time.monotonic() + 90
        committed = aborted = 0
        while aborted == 0:
            self.assertLess(time.monotonic(), deadline, "no pin was revoked")
            for attempt in tk.attempts():
                with attempt, worker.step([sequence]) as step:
                    for layer in range(self.LAYERS):
                        step.append(layer, new_key[layer], new_value[layer])
                    if attempt.number == 0:
                        self.free_memory(rival, rivals, seconds=0.3)
                aborted += attempt.error is not None
            committed += 1
            self.assertEqual(sequence.tokens, 64 + committed)

    def free_memory(self, worker, model, seconds):
        """Memory waits to be freed while the step is open: the daemon revokes its pin."""
        end = time.monotonic() + seconds
        key, value = self.prompt(500)
        while time.monotonic() < end:
            with worker.sequence(model) as other:
                other.append(key, value)


if __name__ == "__main__":
    main()
