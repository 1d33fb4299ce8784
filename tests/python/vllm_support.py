"""What tests of `tessera_kv.vllm` share: engines in processes, a tiny model, prompts."""

import importlib.util
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

import support
from support import ROOT, Daemon, cases, tk

if importlib.util.find_spec("vllm") is None:
    print("skipped: vLLM is not installed; client/python/run --vllm makes an environment",
          file=sys.stderr)
    sys.exit(cases.SKIPPED)

HERE = pathlib.Path(__file__).resolve().parent
MODELS = pathlib.Path.home() / ".cache/tessera/models"
VOCABULARY = 512
POOL = "--pool-bytes=1GiB"
HEAD = 1024  # tokens that prompts share


def smollm2():
    """A folder with SmolLM2, made once of the file that deploy/models/fetch has fetched."""
    folder, file = MODELS / "smollm2-bf16", MODELS / "smollm2/model.gguf"
    if not folder.is_dir():
        if not file.exists():
            raise unittest.SkipTest(f"no {file}; deploy/models/fetch smollm2")
        from tessera_kv.hf import from_gguf
        from_gguf.convert(file, folder)
    return str(folder)


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
            "VLLM_NO_USAGE_STATS": "1"}


def tiny_model(folder):
    """A random llama of four layers. Random weights make every token depend on all before it."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
        initializer_range=0.25, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)  # servers insist on one
    return str(folder)


class Prompts:
    """Random token ids, the same for the same seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def one(self, tokens):
        return [self.random.randrange(3, VOCABULARY) for _ in range(tokens)]

    def some(self, *lengths):
        return [self.one(length) for length in lengths]


def connector(tessera):
    """`kv_transfer_config` with these options."""
    return {"kv_connector": "TesseraConnector", "kv_role": "kv_both",
            "kv_connector_module_path": "tessera_kv.vllm.connector",
            "kv_connector_extra_config": tessera}


class Engine:
    """vLLM in a process. `tessera`: options of the connector, None for vLLM's own attention."""

    def __init__(self, folder, model, tessera=None, **options):
        options = {"model": model, "skip_tokenizer_init": True, "dtype": "float32",
                   "max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 16,
                   **options}
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log", dir=folder, delete=False)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "vllm_engine.py"),
             json.dumps({"engine": options,
                         "tessera": None if tessera is None else connector(tessera)})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=environment(folder))
        self.about = self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError("the engine ended:\n" + self.log.read()[-6000:])
        return json.loads(line)

    def start(self, prompts, tokens, best=0):
        """Begins to generate; `answer` waits for it. `best`: likeliest tokens to tell of each."""
        print(json.dumps({"prompts": prompts, "tokens": tokens, "best": best}),
              file=self.process.stdin, flush=True)

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


class Server:
    """vLLM's HTTP server on the loopback, in the processes that users have: the server's, the
    engine's and the worker's. `tessera`: options of the connector."""

    def __init__(self, folder, model, tessera, *flags):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log", dir=folder, delete=False)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}",
             "--served-model-name=model", "--host=127.0.0.1", f"--port={self.port}",
             "--dtype=float32", "--enforce-eager", "--no-enable-prefix-caching",
             "--max-num-batched-tokens=512", "--max-num-seqs=16",
             f"--kv-transfer-config={json.dumps(connector(tessera))}", *flags],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True,
            env={**environment(folder), "TESSERA_VLLM_CPU": "1", "OMP_NUM_THREADS": "1"})

    def wait_until_ready(self):
        deadline = time.monotonic() + 600
        while not self._is_ready():
            try:
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                pass
            if self.process.returncode is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server is not ready:\n{self.text()[-8000:]}")

    def _is_ready(self):
        try:
            return self._ask("/health", timeout=5) is not None
        except OSError:
            return False

    def _ask(self, path, body=None, timeout=300):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data,
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{error}: {error.read()}\n{self.text()[-8000:]}") from error

    def generate(self, prompts, tokens):
        """Greedy tokens of each prompt. The engine has all prompts at once."""
        answer = json.loads(self._ask("/v1/completions", {
            "model": "model", "prompt": prompts, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}))
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [choice["token_ids"] for choice in choices]

    def counter(self, name):
        """One of vLLM's own metrics."""
        return sum(float(line.rpartition(" ")[2]) for line in self._ask("/metrics").splitlines()
                   if line.startswith((name + "{", name + " ")))

    def text(self):
        """What it has printed."""
        return pathlib.Path(self.log.name).read_text(errors="replace")

    def process_id(self, title):
        """Of one of its processes, by the title that vLLM gives it."""
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                session = int((process / "stat").read_text().rpartition(")")[2].split()[3])
                name = (process / "cmdline").read_text()
            except (OSError, IndexError):
                continue  # it has ended
            if session == self.process.pid and name.startswith(title):
                return int(process.name)
        raise LookupError(f"no process {title} of session {self.process.pid}")

    def kill(self):
        """As when the machine's memory is full: every process of it at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                pass
        self.kill()
        self.log.close()


class Shared(unittest.TestCase):
    """A folder with a tiny model, and what vLLM's own attention answers to all prompts."""

    TOKENS = 24

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="tessera-vllm-", ignore_cleanup_errors=True)
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
            "crowded": prompts.some(*(90 + i % 4 for i in range(14))),
        }
        engine = Engine(cls.folder, cls.model)
        cls.own = engine.about
        cls.wanted = {name: engine.generate(given, cls.TOKENS)
                      for name, given in cls.prompts.items()}
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

    def appended(self, daemon):
        """Tokens that engines have computed."""
        return self.tenant(daemon)["tokens_appended"]

    def wait_until(self, condition):
        """Asks the daemon again and again."""
        deadline = time.monotonic() + 120
        while not condition():
            self.assertLess(time.monotonic(), deadline)


def restart(daemon):
    """Kills a daemon, and starts it again at the same address."""
    daemon.kill()
    with open(daemon.log, "ab") as log:
        daemon.process = subprocess.Popen(daemon.process.args, stdout=log, stderr=log,
                                          stdin=subprocess.DEVNULL)


def first_difference(got, wanted):
    """The place of the first token that differs, None without one."""
    return next((i for i, (one, other) in enumerate(zip(got, wanted)) if one != other), None)


__all__ = ["HEAD", "POOL", "ROOT", "Daemon", "Engine", "Prompts", "Server", "Shared",
           "first_difference", "restart", "smollm2", "support", "tiny_model", "tk"]
