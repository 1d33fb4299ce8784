"""The recall model in numpy: a Llama whose KV cache is a sequence of Tessera."""

import json
import struct

from support import ROOT, from_bf16, np, tk, to_bf16

FOLDER = ROOT / "tests/golden/recall"


def load(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            bits = np.frombuffer(data[first:end], np.uint16)
            tensors[name] = from_bf16(bits).reshape(entry["shape"])
    return tensors


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class Recall:
    def __init__(self, worker):
        self.config = config = json.loads((FOLDER / "config.json").read_text())
        self.weights = load(FOLDER / "model.safetensors")
        self.layers, self.dim = config["num_hidden_layers"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.frequencies = config["rope_theta"] ** (-np.arange(0, self.dim, 2) / self.dim)
        self.worker = worker
        self.model = worker.model(
            "recall", layers=self.layers, query_heads=self.heads, kv_heads=self.kv_heads,
            head_dim=self.dim, rope_theta=config["rope_theta"], delimiters=range(3, 10))

    def weight(self, name, layer=None):
        prefix = "model." if layer is None else f"model.layers.{layer}."
        return self.weights[prefix + name + ".weight"]

    def norm(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def rotate(self, x, first):
        angles = (first + np.arange(len(x)))[:, None, None] * self.frequencies
        low, high = np.split(x, 2, -1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def forward(self, ids, first, attend):
        """Logits of the last token; attend(layer, query, key, value) returns attention's output."""
        x = self.weight("embed_tokens")[ids]
        for layer in range(self.layers):
            h = self.norm(x, self.weight("input_layernorm", layer))
            q, k, v = (
                (h @ self.weight(f"self_attn.{n}_proj", layer).T).reshape(len(ids), -1, self.dim)
                for n in "qkv")
            rows = [to_bf16(self.rotate(q, first)), to_bf16(self.rotate(k, first)), to_bf16(v)]
            out = attend(layer, *rows).reshape(len(ids), -1)
            x = x + out @ self.weight("self_attn.o_proj", layer).T
            h = self.norm(x, self.weight("post_attention_layernorm", layer))
            gate = h @ self.weight("mlp.gate_proj", layer).T
            up = h @ self.weight("mlp.up_proj", layer).T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.weight("mlp.down_proj", layer).T
        return self.norm(x[-1], self.weight("norm")) @ self.weights["lm_head.weight"].T

    def prefill(self, sequence, ids):
        def attend(layer, query, key, value):
            sequence.observe(layer, query, key, prompt_tokens=len(ids))
            sequence.append(key, value, layer=layer)
            q, k, v = from_bf16(query), from_bf16(key), from_bf16(value)
            mask = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
            group = self.heads // self.kv_heads
            return np.stack([
                softmax(q[:, h] @ k[:, h // group].T * self.dim**-0.5 + mask) @ v[:, h // group]
                for h in range(self.heads)], 1)

        return self.forward(ids, 0, attend)

    def generate(self, sequence, ids, tokens):
        """Greedy answer, and the logits behind the prompt."""
        first_logits = logits = self.prefill(sequence, ids)
        sequence.observe_tokens(ids)
        sequence.compress()
        answer = [int(logits.argmax())]
        while len(answer) < tokens:
            for attempt in tk.attempts():
                with attempt, self.worker.step([sequence]) as step:
                    logits = self.forward(answer[-1:], sequence.next_position, step.attend)
            answer.append(int(logits.argmax()))
        return answer, first_logits
