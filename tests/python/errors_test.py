"""Every code arrives as its error, with the message word for word; and real calls that fail."""

import ctypes
import unittest

from support import WithDaemon, main, np, tk
from tessera_kv import _abi, _library, errors

BUILT_IN = {
    "InvalidArgument": ValueError, "DeadlineExceeded": TimeoutError, "NotFound": LookupError,
    "PermissionDenied": PermissionError, "ResourceExhausted": MemoryError,
    "FailedPrecondition": RuntimeError, "OutOfRange": IndexError,
    "Unimplemented": NotImplementedError, "Unavailable": ConnectionError,
    "Unauthenticated": PermissionError, "Aborted": tk.RetryableError,
}


class Codes(unittest.TestCase):
    def test_each_code_has_an_error(self):
        names = {name: number for name, number in vars(_abi).items()
                 if name.startswith("TESSERA_") and 1 <= number <= 16}
        codes = {code: kind for code, kind in errors.BY_CODE.items()}
        self.assertEqual(set(codes), set(range(1, 17)))
        for code, kind in codes.items():
            self.assertEqual(names["TESSERA_" + _upper(kind.__name__)], code)
            given = _abi.tessera_error()
            given.code = code
            given.message = "word for word: é".encode()
            given.cause = 3
            given.retry_after_ms = 1500
            with self.assertRaises(kind) as raised:
                errors.check(code, given)
            self.assertEqual(str(raised.exception), "word for word: é")
            self.assertEqual(raised.exception.cause, "tail_ring_full")
            self.assertEqual(raised.exception.retry_after, 1.5)
            self.assertTrue(issubclass(kind, BUILT_IN.get(kind.__name__, tk.Error)))
        errors.check(0, _abi.tessera_error())

    def test_attempts_repeat_what_was_aborted_and_nothing_else(self):
        tries = 0
        for attempt in tk.attempts(limit=5, pause=0):
            with attempt:
                tries += 1
                if tries < 3:
                    raise tk.Aborted("again")
        self.assertEqual(tries, 3)
        for kind in (tk.Unavailable, tk.NotFound, KeyError):
            with self.assertRaises(kind):
                for attempt in tk.attempts(pause=0):
                    with attempt:
                        raise kind("no")
        tries = 0
        with self.assertRaises(tk.Aborted):
            for attempt in tk.attempts(limit=4, pause=0):
                with attempt:
                    tries += 1
                    raise tk.Aborted("for ever")
        self.assertEqual(tries, 4)


def _upper(name):
    return "".join("_" + c if c.isupper() and i else c for i, c in enumerate(name)).upper()


class Calls(WithDaemon):
    flags = ("--pool-bytes=128MiB", "--pool-extent-bytes=16MiB", "--staging-bytes=8MiB",
             "--host-tier-bytes=0",
             "--max-sequences-per-tenant=40")

    def test_what_callers_do_wrong(self):
        worker = self.attach()
        model = self.model(worker)
        sequence = worker.sequence(model)
        key, value = self.prompt(40)
        sequence.append(key, value)
        with self.assertRaisesRegex(tk.InvalidArgument, "nowhere"):
            tk.attach("nowhere")
        with self.assertRaises(ConnectionError):
            tk.attach("unix:/nonexistent/tesserad.sock", attach_timeout=0.2)
        with self.assertRaisesRegex(tk.InvalidArgument, "mosaickv"):
            worker.sequence(model, policy="mosaic")
        with self.assertRaises(IndexError):
            sequence.truncate(1000)
        with self.assertRaises(LookupError):
            worker.adopt(model, 0x123456)
        with self.assertRaisesRegex(ValueError, "bf17"):
            self.model(worker, dtype="bf17")
        with self.assertRaisesRegex(tk.InvalidArgument, "head_dim"):
            self.model(worker, head_dim=80)
        with self.assertRaisesRegex(ValueError, "layer is 3; the model has 3"):
            sequence.append(key[0], value[0], layer=3)
        with self.assertRaisesRegex(tk.InvalidArgument, "threads is 0"):
            tk.attach(self.daemon.address, threads=0)
        with self.assertRaisesRegex(tk.NotFound, "nothing was published"):
            worker.fork(worker.match(model, range(64)))

    def test_tensors_that_do_not_fit(self):
        worker = self.attach()
        sequence = worker.sequence(self.model(worker))
        key, value = self.prompt(40)
        sequence.append(key, value)
        query = self.rows(1, 4, 64)
        with worker.read([sequence]) as read:
            for wrong, kind, words in (
                (query.astype(np.float64), tk.InvalidArgument, "float64; expected is bf16"),
                (query.view(np.float16), tk.InvalidArgument, "float16; expected is bf16"),
                (query[:, :3], tk.InvalidArgument, r"\[1, 3, 64\]; expected is \[tokens, 4, 64\]"),
                (np.asfortranarray(self.rows(3, 4, 64)), tk.LayoutError, "elements of a row"),
                (np.broadcast_to(query[:, :1], (1, 4, 64)), tk.LayoutError, "heads share memory"),
                (np.broadcast_to(query, (3, 4, 64)), tk.LayoutError, "repeats rows"),
                (self.rows(4, 4, 4, 64)[::2, ::3], tk.LayoutError, "do not follow each other"),
                ("text", TypeError, "not str"),
            ):
                with self.subTest(words), self.assertRaisesRegex(kind, words):
                    read.attend(0, wrong)
            out = np.empty((1, 4, 64), np.float32)
            out.setflags(write=False)
            with self.assertRaisesRegex(tk.InvalidArgument, "out is read-only"):
                read.attend(0, query, out=out)
            with self.assertRaisesRegex(tk.InvalidArgument, "out has 2 tokens"):
                read.attend(0, query, out=np.empty((2, 4, 64), np.float32))
            with self.assertRaisesRegex(tk.InvalidArgument, "lse"):
                read.attend(0, query, lse=np.empty((1, 4)))
            read.attend(0, query)  # the read is still sound

    def test_a_sequence_in_a_step_is_busy(self):
        worker = self.attach()
        sequence = worker.sequence(self.model(worker))
        key, value = self.prompt(4)
        with worker.step([sequence], new_tokens=4) as step:
            with self.assertRaises(tk.Busy) as raised:
                sequence.append(key, value)
            self.assertEqual(raised.exception.cause, "sequence_busy")
            self.assertIsInstance(raised.exception, RuntimeError)
            for layer in range(self.LAYERS):
                step.append(layer, key[layer], value[layer])
        self.assertEqual(sequence.tokens, 4)
        with self.assertRaisesRegex(tk.FailedPrecondition, "the step is over"):
            step.append(0, key[0], value[0])

    def test_limits_of_the_daemon(self):
        worker = self.attach()
        model = self.model(worker)
        kept = []
        with self.assertRaises(MemoryError) as raised:
            for _ in range(100):
                kept.append(worker.sequence(model))
        self.assertEqual(raised.exception.cause, "quota")
        key, value = self.prompt(8000)
        with self.assertRaises(tk.ResourceExhausted):
            for sequence in kept:
                sequence.append(key, value)

    def test_a_closed_handle_says_so(self):
        worker = self.attach()
        sequence = worker.sequence(self.model(worker))
        sequence.close()
        sequence.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            sequence.compress()
        self.assertIn("closed", repr(sequence))
        kept = worker.sequence(self.model(worker))
        worker.close()
        worker.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            worker.stats()
        with self.assertRaises(tk.Unavailable):
            kept.compress()

    def test_the_error_of_a_call_is_its_own(self):
        error = _abi.tessera_error()
        code = _library.fast.tessera_status(None, ctypes.byref(error))
        with self.assertRaises(tk.InvalidArgument) as raised:
            errors.check(code, error)
        self.assertEqual(raised.exception.cause, "argument")


if __name__ == "__main__":
    main()
