#!/usr/bin/env python3
"""KV events of a daemon, read with pyzmq and msgspec through the structures of vLLM.

Usage: events_test.py --build=FOLDER
"""

import json
import os
import pathlib
import shutil
import struct
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1]),
                str(pathlib.Path(__file__).resolve().parents[1] / "prometheus"),
                str(pathlib.Path(__file__).resolve().parents[3] / "client/python")]

import cases  # noqa: E402

cases.use_environment("python-events")
BUILD = pathlib.Path(next(word.partition("=")[2] for word in sys.argv
                          if word.startswith("--build=")))
sys.argv = [word for word in sys.argv if not word.startswith("--build=")]
os.environ["TESSERA_LIBRARY"] = str(BUILD / "client/libtessera.so")

import msgspec  # noqa: E402
import tessera_kv  # noqa: E402
import zmq  # noqa: E402
from processes import Programs, free_port, until  # noqa: E402

BLOCK = 32
HEAD_DIM = 64
WORKER, MODEL = "10.1.2.3:8000", "llama"
TOPIC = f"kv@{WORKER}@{MODEL}"
END = (1 << 64) - 1  # the number that ends a replay


# The fields that vLLM publishes, in their order.
def structures(**options):
    class Event(msgspec.Struct, **options):
        pass

    class BlockStored(Event, tag=True):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None = None
        medium: str | None = None
        lora_name: str | None = None

    class BlockRemoved(Event, tag=True):
        block_hashes: list[int]
        medium: str | None = None

    class AllBlocksCleared(Event, tag=True):
        pass

    class Batch(msgspec.Struct, array_like=True):
        ts: float
        events: list[BlockStored | BlockRemoved | AllBlocksCleared]
        data_parallel_rank: int | None = None

    return BlockStored, BlockRemoved, AllBlocksCleared, msgspec.msgpack.Decoder(Batch)


class Router:
    """Knows the blocks of one topic. Asks for what it has missed."""

    def __init__(self, address, replays, encoding):
        self.stored, self.removed, _, self.decoder = structures(array_like=encoding == "array")
        context = zmq.Context.instance()
        self.events = context.socket(zmq.SUB)
        self.events.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self.events.connect(f"tcp://{address}")
        self.replay_address = f"tcp://{replays}"
        self.next = 0
        self.ids = {}  # token ids from the first on, by hash
        self.replayed = 0
        self.media = set()

    def close(self):
        self.events.close(linger=0)

    def apply(self, number, payload):
        batch = self.decoder.decode(payload)
        assert abs(batch.ts - time.time()) < 60, batch.ts
        for event in batch.events:
            if isinstance(event, self.stored):
                assert event.block_size == BLOCK
                assert len(event.token_ids) == BLOCK * len(event.block_hashes)
                path = self.ids[event.parent_block_hash] if event.parent_block_hash else []
                for i, block in enumerate(event.block_hashes):
                    path = path + event.token_ids[BLOCK * i:BLOCK * (i + 1)]
                    self.ids[block] = path
                self.media.add(event.medium)
            elif isinstance(event, self.removed):
                for block in event.block_hashes:
                    del self.ids[block]
            else:
                self.ids.clear()
        self.next = number + 1

    def ask_again(self):
        """As a REQ socket would, whose empty first frame a DEALER has to write itself."""
        with zmq.Context.instance().socket(zmq.DEALER) as asking:
            asking.connect(self.replay_address)
            asking.send_multipart([b"", struct.pack(">Q", self.next), TOPIC.encode()])
            while True:
                assert asking.poll(10_000), "no answer to a replay"
                _, number, payload = asking.recv_multipart()
                number = struct.unpack(">Q", number)[0]
                if number == END:
                    return
                self.apply(number, payload)
                self.replayed += 1

    def read(self):
        while self.events.poll(20):
            topic, number, payload = self.events.recv_multipart()
            assert topic.decode() == TOPIC
            number = struct.unpack(">Q", number)[0]
            if number > self.next:
                self.ask_again()
            if number == self.next:
                self.apply(number, payload)
        if self.next == 0:
            self.ask_again()  # it may have come late

    def skip(self):
        """Misses what is published now."""
        while self.events.poll(500):
            self.events.recv_multipart()

    def prefixes(self):
        return sorted(self.ids.values())


class Worker:
    """Publishes prefixes."""

    def __init__(self, address, name=WORKER):
        self.worker = tessera_kv.attach(address, name=name)
        self.model = self.worker.model(MODEL, layers=1, query_heads=1, kv_heads=1,
                                       head_dim=HEAD_DIM, dtype="fp32")

    def publish(self, ids):
        sequence = self.worker.sequence(self.model)
        rows = memoryview(bytearray(4 * HEAD_DIM * len(ids))).cast("B").cast(
            "f", shape=[len(ids), 1, HEAD_DIM])
        sequence.append(rows, rows, layer=0)
        return sequence.publish(ids).prefix


def boundaries(*lists):
    return sorted({tuple(ids[:end]) for ids in lists
                   for end in range(BLOCK, len(ids) + 1, BLOCK)})


class Events(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tessera-events-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.programs = Programs(self.folder)
        self.addCleanup(self.programs.close)
        self.address = f"unix:{self.folder}/d.sock"
        self.events = f"127.0.0.1:{free_port()}"
        self.replays = f"127.0.0.1:{free_port()}"

    def start(self, encoding, **more):
        config = {"listen": [self.address], "metrics_address": "", "device": "cpu",
                  "pool_bytes": "268435456", "pool_extent_bytes": "16777216",
                  "staging_bytes": "2097152", "host_tier_bytes": "0",
                  "raw_copy_bytes": "16777216",
                  "kv_events": self.events, "kv_events_replay": self.replays,
                  "kv_events_encoding": encoding, **more}
        file = self.folder / "config.json"
        file.write_text(json.dumps(config))
        self.programs.start("tesserad", [BUILD / "bin/tesserad", f"--config={file}",
                                         "--unused-system-calls=kill"])
        until("the daemon serves", 20, lambda: (self.folder / "d.sock").exists()
              or self.programs.has_ended("tesserad"))
        self.assertFalse(self.programs.has_ended("tesserad"), self.programs.log("tesserad"))

    def router(self, encoding):
        router = Router(self.events, self.replays, encoding)
        self.addCleanup(router.close)
        return router

    def await_prefixes(self, router, expected):
        def known():
            router.read()
            return [tuple(ids) for ids in router.prefixes()] == expected
        until(f"the router knows {len(expected)} blocks", 20, known)

    def check_life(self, encoding):
        self.start(encoding)
        router = self.router(encoding)
        worker = Worker(self.address)
        first, second = list(range(100)), list(range(64)) + list(range(900, 1000))
        one = worker.publish(first)
        self.await_prefixes(router, boundaries(first))
        worker.publish(second)
        self.await_prefixes(router, boundaries(first, second))
        self.assertEqual(router.media, {"CPU"})
        worker.worker.free_prefix(one)
        self.await_prefixes(router, boundaries(second))
        # Blocks stay when their publisher leaves; only who can read them changes.
        other = Worker(self.address)
        worker.worker.close()
        self.await_prefixes(router, boundaries(second))
        other.worker.close()
        self.await_prefixes(router, [])

    def test_maps(self):
        self.check_life("map")

    def test_arrays(self):
        self.check_life("array")

    def test_what_was_missed_is_asked_for(self):
        self.start("map")
        router = self.router("map")
        worker = Worker(self.address)
        lists = []
        for number in range(20):
            lists.append(list(range(1000 * number, 1000 * number + 40)))
            worker.publish(lists[-1])
            if number == 5:
                self.await_prefixes(router, boundaries(*lists))
            if 5 < number < 15:
                router.skip()
        self.await_prefixes(router, boundaries(*lists))
        self.assertGreater(router.replayed, 0)

    def test_a_worker_that_comes_later_has_all_blocks(self):
        self.start("map")
        first = Worker(self.address, name="another")
        ids = list(range(500))
        first.publish(ids)
        router = self.router("map")
        late = Worker(self.address)
        self.await_prefixes(router, boundaries(ids))
        late.worker.close()

    def test_nothing_listens_without_the_option(self):
        self.start("map", kv_events="", kv_events_replay="")
        Worker(self.address).publish(list(range(64)))
        router = self.router("map")
        self.assertFalse(router.events.poll(500))


if __name__ == "__main__":
    cases.main()
