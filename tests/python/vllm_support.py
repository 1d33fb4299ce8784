"""What tests of `tessera_kv.vllm` share: engines in processes, a tiny model, prompts."""

import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

import support
from support import ROOT, cases

if importlib.util.find_spec("vllm") is None:
    print("skipped: vLLM is not installed; client/python/run --vllm makes an environment",
          file=sys.stderr)
    sys.exit(cases.SKIPPED)

HERE = pathlib.Path(__file__).resolve().parent
SMOLLM2 = pathlib.Path.home() / ".cache/tessera/models/smollm2-bf16"
VOCABULARY = 512



def environment(folder):
    """Of processes that find the package and its entry point."""
    path = [entry for entry in sys.path if entry.endswith("client/python")]
    if not os.environ.get("TESSERA_KV_INSTALLED"):
        info = pathlib.Path(folder) / "tessera_kv-0.1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tessera-kv\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\ntessera = tessera_kv.vllm:register\n")
        path.append(str(folder))
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": ":".join(path), "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}


def tiny_model(folder):
    """A random llama of four layers. Random weights make every token depend on all before it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
        initializer_range=0.25, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


class Prompts:
    """Random token ids, the same for the same seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def one(self, tokens):
        return [self.random.randrange(3, VOCABULARY) for _ in range(tokens)]

    def some(self, *lengths):
        return [self.one(length) for length in lengths]


class Engine:
    """vLLM in a process. `tessera`: options of the connector, None for vLLM's own attention."""

    def __init__(self, folder, model, tessera=None, **options):
        options = {"model": model, "skip_tokenizer_init": True, "dtype": "float32",
                   "max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 16,
                   **options}
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log", dir=folder, delete=False)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "vllm_engine.py"),
             json.dumps({"engine": options, "tessera": tessera})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=environment(folder))
        self.about = self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError("the engine ended:\n" + self.log.read()[-6000:])
        return json.loads(line)

    def start(self, prompts, tokens):
        """Begins to generate; `answer` waits for it."""
        print(json.dumps({"prompts": prompts, "tokens": tokens}), file=self.process.stdin,
              flush=True)

    def answer(self):
        return self._answer()

    def generate(self, prompts, tokens):
        """Greedy tokens of each prompt."""
        self.start(prompts, tokens)
        return self._answer()["tokens"]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        self.process.stdout.close()
        self.log.close()


def equal_share(got, wanted):
    """How many answers are the same."""
    return sum(one == other for one, other in zip(got, wanted)) / len(wanted)


__all__ = ["Engine", "Prompts", "ROOT", "SMOLLM2", "equal_share", "support",
           "tiny_model"]
