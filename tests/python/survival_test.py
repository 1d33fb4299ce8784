"""fork(), a daemon that dies, 1,000 steps that leave nothing behind, the end of the interpreter."""

import asyncio
import gc
import os
import select
import subprocess
import sys
import time
import unittest

from support import Daemon, WithDaemon, main, np, tk
from tessera_kv import aio


class Survival(WithDaemon):
    def test_a_child_raises_and_the_parent_goes_on(self):
        worker = self.attach(threads=2)
        sequence = worker.sequence(self.model(worker))
        sequence.append(*self.prompt(40))
        step = worker.step([sequence])
        key, value = self.prompt(1)
        for _ in range(20):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    for call in (sequence.compress, worker.stats, step.end,
                                 lambda: worker.step([sequence]), lambda: worker.read([sequence])):
                        try:
                            call()
                            break
                        except tk.Forked:
                            pass
                    else:
                        del step, sequence, worker
                        gc.collect()
                        code = 0
                finally:
                    os._exit(code)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
        for layer in range(self.LAYERS):
            step.append(layer, key[layer], value[layer])
        step.end()
        self.assertEqual(sequence.tokens, 41)

    def test_a_thousand_steps_leave_nothing(self):
        worker = self.attach(threads=2)
        sequence = worker.sequence(self.model(worker))
        key, value = self.prompt(1)
        query = self.rows(self.LAYERS, 1, self.QUERY_HEADS, self.DIM)

        def run(steps):
            for _ in range(steps):
                self.decode(worker, sequence, key, value, query)
            with worker.read([sequence]) as read:
                read.attend(0, query[0])
            gc.collect()
            return len(os.listdir("/proc/self/fd")), resident_bytes()

        run(100)
        descriptors, before = run(200)
        sequence.truncate(100)
        after_descriptors, after = run(1000)
        self.assertEqual(after_descriptors, descriptors)
        self.assertLess(after - before, 8 << 20)

    def test_the_interpreter_ends_with_everything_open(self):
        program = ("import sys, tessera_kv as tk\n"
                   "worker = tk.attach(sys.argv[1], threads=2)\n"
                   "model = worker.model('m', layers=1, query_heads=1, kv_heads=1, head_dim=64)\n"
                   "sequence = worker.sequence(model)\n"
                   "step = worker.step([sequence])\n"
                   "read_later = [worker, sequence, step]\n")
        done = subprocess.run([sys.executable, "-c", program, self.daemon.address], check=False,
                              capture_output=True, text=True, timeout=60,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_calls_as_coroutines(self):
        key, value = self.prompt(64)
        model_of = self.model

        async def run():
            async with await aio.attach(self.daemon.address) as worker:
                model = model_of(worker.worker)
                sequence = await worker.sequence(model)
                self.assertEqual(await sequence.append(key, value), 64)
                await asyncio.gather(*[(await sequence.fork()).compress() for _ in range(3)])
                self.assertEqual((await sequence.describe()).tokens, 64)
                published = await sequence.publish(list(range(64)))
                match = await worker.match(model, list(range(64)))
                self.assertEqual(match.prefix, published.prefix)
                self.assertEqual((await worker.fork(match)).sequence.tokens, 64)
                # A cancelled wait is given up; the call ends by itself.
                with self.assertRaises(asyncio.TimeoutError):
                    announced = await worker.match(model, [9] * 64, will_compute=True)
                    self.assertFalse(announced)
                    async with await aio.attach(self.daemon.address) as other:
                        await asyncio.wait_for(
                            other.match(model_of(other.worker), [9] * 64, wait=0.5), 0.05)

        asyncio.run(run())


class Death(unittest.TestCase):
    def test_events_as_an_asynchronous_iterator(self):
        async def run():
            async with await aio.attach(daemon.address) as worker:
                asyncio.get_running_loop().call_later(0.01, daemon.kill)
                async for event in worker.events():
                    return event

        with Daemon() as daemon:
            event = asyncio.run(asyncio.wait_for(run(), 20))
        self.assertEqual(event.kind, "lease_lost")
        self.assertNotEqual(event.text, "")

    def test_a_daemon_that_is_killed_in_a_step(self):
        with Daemon() as daemon:
            worker = tk.attach(daemon.address, name="survivor")
            model = worker.model("m", layers=2, query_heads=2, kv_heads=1, head_dim=64)
            sequence = worker.sequence(model)
            row = np.ones((1, 1, 64), np.uint16)
            query = np.ones((1, 2, 64), np.uint16)
            self.assertEqual(list(worker.events()), [])
            self.assertNotEqual(mapped_memory(), [])
            with self.assertRaises(tk.Unavailable), worker.step([sequence]) as step:
                step.attend(0, query, row, row)
                daemon.kill()
                killed = time.monotonic()
                ready, _, _ = select.select([worker.events_fd()], [], [], 10)
                self.assertLess(time.monotonic() - killed, 1, "the worker learns of it at once")
                self.assertTrue(ready)
                step.attend(1, query, row, row)
            kinds = [event.kind for event in worker.events()]
            self.assertEqual(kinds, ["lease_lost"])
            for call in (worker.check, worker.stats, sequence.compress):
                with self.assertRaises(ConnectionError):
                    call()
            self.assertEqual(mapped_memory(), [])
            worker.close()


def mapped_memory():
    with open("/proc/self/maps") as file:
        return [line for line in file if "memfd:" in line and "tessera" in line]


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    main()
