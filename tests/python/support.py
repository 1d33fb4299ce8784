"""What the tests of the Python package share: a daemon, a worker, rows and their oracle."""

import os
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/ops"), str(ROOT / "client/python")]
# An installed package, as client/python/run tests it, comes before the source tree.
if os.environ.get("TESSERA_KV_INSTALLED"):
    sys.path.remove(str(ROOT / "client/python"))

import cases  # noqa: E402

try:
    import numpy as np
except ImportError as error:
    print(f"skipped: {error}; install python3-numpy", file=sys.stderr)
    sys.exit(cases.SKIPPED)

import tessera_kv as tk  # noqa: E402
from tessera_kv.testing import Daemon  # noqa: E402


def to_bf16(values):
    """float32 to the nearest bf16, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def attention(query, key, value, first_position=None, causal=True, scale=None):
    """Exact attention in float64: [queries, heads, dim] over [tokens, kv heads, dim], and lse."""
    queries, heads, dim = query.shape
    tokens, kv_heads, _ = key.shape
    group = heads // kv_heads
    first_position = tokens - queries if first_position is None else first_position
    scale = dim**-0.5 if scale is None else scale
    output = np.empty((queries, heads, dim))
    lse = np.empty((queries, heads))
    for i in range(queries):
        seen = min(tokens, first_position + i + 1) if causal else tokens
        for head in range(heads):
            k = key[:seen, head // group].astype(np.float64)
            v = value[:seen, head // group].astype(np.float64)
            logits = k @ query[i, head].astype(np.float64) * scale
            most = logits.max()
            weights = np.exp(logits - most)
            output[i, head] = weights @ v / weights.sum()
            lse[i, head] = most + np.log(weights.sum())
    return output, lse


class WithDaemon(unittest.TestCase):
    """Cases that share a daemon."""

    flags = ()
    LAYERS, QUERY_HEADS, KV_HEADS, DIM = 3, 4, 2, 64

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(*cls.flags)
        cls.addClassCleanup(cls.daemon.close)

    def setUp(self):
        self.seed = int.from_bytes(os.urandom(4), "little")
        self.random = np.random.default_rng(self.seed)
        self.addCleanup(self.show_seed)

    def show_seed(self):
        outcome = getattr(self, "_outcome", None)
        if outcome is not None and not outcome.success:
            print(f"seed {self.seed}", file=sys.stderr)

    def attach(self, **options):
        worker = tk.attach(self.daemon.address, **options)
        self.addCleanup(worker.close)
        return worker

    def model(self, worker, **options):
        options = {"layers": self.LAYERS, "query_heads": self.QUERY_HEADS,
                   "kv_heads": self.KV_HEADS, "head_dim": self.DIM, **options}
        return worker.model(options.pop("name", "test"), **options)

    def rows(self, *shape):
        return to_bf16(self.random.normal(size=shape))

    def prompt(self, tokens):
        """Keys and values of all layers."""
        return (self.rows(self.LAYERS, tokens, self.KV_HEADS, self.DIM),
                self.rows(self.LAYERS, tokens, self.KV_HEADS, self.DIM))

    def decode(self, worker, sequence, key, value, query=None):
        """One step of key.shape[1] tokens. Returns the outputs of every layer."""
        tokens = key.shape[1]
        if query is None:
            query = self.rows(self.LAYERS, tokens, self.QUERY_HEADS, self.DIM)
        with worker.step([sequence], new_tokens=tokens) as step:
            return [step.attend(layer, query[layer], key[layer], value[layer])
                    for layer in range(self.LAYERS)]


main = cases.main
