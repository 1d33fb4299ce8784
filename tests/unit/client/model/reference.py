"""A language model in numpy: an implementation of its own of GGUF files, quantised blocks and the
forward pass, to compare client/model with."""

import math
import struct

import numpy

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
           12: "d"}
F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K = 0, 1, 2, 3, 8, 12, 14


class Gguf:
    def __init__(self, path):
        self.data = numpy.memmap(path, numpy.uint8, "r")
        self.at = 8
        tensors, values = self.take("QQ")
        self.values = {}
        for _ in range(values):
            key = self.text()
            self.values[key] = self.value(self.take("I")[0])
        entries = []
        for _ in range(tensors):
            name = self.text()
            shape = self.take("Q" * self.take("I")[0])
            entries.append((name, shape[::-1], *self.take("IQ")))
        start = -(-self.at // 32) * 32
        self.tensors = {name: (shape, kind, start + offset)
                        for name, shape, kind, offset in entries}

    def take(self, form):
        form = "<" + form
        size = struct.calcsize(form)
        self.at += size
        return struct.unpack(form, self.data[self.at - size:self.at].tobytes())

    def text(self):
        length, = self.take("Q")
        self.at += length
        return self.data[self.at - length:self.at].tobytes().decode()

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            kind, count = self.take("IQ")
            return [self.value(kind) for _ in range(count)]
        return self.take(SCALARS[kind])[0]

    def blocks(self, name, elements, size):
        shape, _, start = self.tensors[name]
        count = math.prod(shape) // elements
        return numpy.array(self.data[start:start + count * size]).reshape(count, size)

    def tensor(self, name):
        shape, kind, _ = self.tensors[name]
        values = {F32: self.f32, F16: self.f16, Q4_0: self.q4_0, Q4_1: self.q4_1,
                  Q8_0: self.q8_0, Q4_K: self.q4_k, Q6_K: self.q6_k}[kind](name)
        return values.reshape(shape)

    def f32(self, name):
        return self.blocks(name, 1, 4).view(numpy.float32)

    def f16(self, name):
        return self.blocks(name, 1, 2).view(numpy.float16).astype(numpy.float32)

    def q4_0(self, name):
        blocks = self.blocks(name, 32, 18)
        return half(blocks, 0) * (nibbles(blocks[:, 2:]) - 8)

    def q4_1(self, name):
        blocks = self.blocks(name, 32, 20)
        return half(blocks, 0) * nibbles(blocks[:, 4:]) + half(blocks, 2)

    def q8_0(self, name):
        blocks = self.blocks(name, 32, 34)
        return half(blocks, 0) * blocks[:, 2:].view(numpy.int8).astype(numpy.float32)

    def q4_k(self, name):
        blocks = self.blocks(name, 256, 144)
        six = blocks[:, 4:16].astype(numpy.int32)
        low, high, mixed = six[:, :4], six[:, 4:8], six[:, 8:]
        scales = numpy.concatenate([low & 63, (mixed & 15) | (low >> 6) << 4], 1)
        offsets = numpy.concatenate([high & 63, (mixed >> 4) | (high >> 6) << 4], 1)
        pairs = blocks[:, 16:].reshape(-1, 4, 32)
        codes = numpy.stack([pairs & 15, pairs >> 4], 2).reshape(-1, 8, 32).astype(numpy.float32)
        scales = (half(blocks, 0) * scales)[:, :, None]
        return scales * codes - (half(blocks, 2) * offsets)[:, :, None]

    def q6_k(self, name):
        blocks = self.blocks(name, 256, 210)
        low = blocks[:, :128].reshape(-1, 2, 1, 64)
        low = numpy.concatenate([low & 15, low >> 4], 2).reshape(-1, 2, 4, 32)
        high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
        high = numpy.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], 2)
        codes = (low | high << 4).reshape(-1, 16, 16).astype(numpy.float32) - 32
        scales = half(blocks, 208) * blocks[:, 192:208].view(numpy.int8)
        return scales[:, :, None] * codes


def half(blocks, at):
    return numpy.ascontiguousarray(blocks[:, at:at + 2]).view(numpy.float16).astype(numpy.float32)


def nibbles(packed):
    return numpy.concatenate([packed & 15, packed >> 4], 1).astype(numpy.float32)


def rows_in_order(matrix, heads):
    """A Llama file stores channels i and i + d/2 of a head as rows 2i and 2i + 1."""
    rows = matrix.reshape(heads, -1, 2, *matrix.shape[1:])
    return rows.swapaxes(1, 2).reshape(matrix.shape)


class Model:
    def __init__(self, path):
        self.file = Gguf(path)
        self.kind = self.file.values["general.architecture"]
        self.heads = self.fact("attention.head_count")
        self.kv_heads = self.fact("attention.head_count_kv")
        self.layers = self.fact("block_count")
        self.dim = self.fact("embedding_length") // self.heads

    def fact(self, name):
        return self.file.values[f"{self.kind}.{name}"]

    def norm(self, rows, name):
        mean = (rows * rows).mean(1, keepdims=True)
        epsilon = numpy.float32(self.fact("attention.layer_norm_rms_epsilon"))
        return rows / numpy.sqrt(mean + epsilon) * self.file.tensor(name)

    def project(self, rows, name, heads):
        """[heads][tokens][dim]"""
        matrix = self.file.tensor(name + ".weight")
        in_order = self.kind != "llama" or "attn_v" in name
        product = rows @ (matrix if in_order else rows_in_order(matrix, heads)).T
        if name + ".bias" in self.file.tensors:
            product += self.file.tensor(name + ".bias")
        return product.reshape(len(rows), heads, self.dim).swapaxes(0, 1)

    def turn(self, rows):
        frequencies = self.fact("rope.freq_base") ** (
            -2 * numpy.arange(self.dim // 2, dtype=numpy.float64) / self.dim)
        angles = numpy.arange(rows.shape[1])[:, None] * frequencies
        cosine, sine = (f(angles).astype(numpy.float32) for f in (numpy.cos, numpy.sin))
        low, high = numpy.split(rows, 2, 2)
        return numpy.concatenate([low * cosine - high * sine, high * cosine + low * sine], 2)

    def attention(self, rows, block):
        query = self.turn(self.project(rows, block + "attn_q", self.heads))
        key = self.turn(self.project(rows, block + "attn_k", self.kv_heads))
        value = self.project(rows, block + "attn_v", self.kv_heads)
        hidden = numpy.triu(numpy.full((len(rows), len(rows)), -numpy.inf, numpy.float32), 1)
        heads = []
        for head in range(self.heads):
            kv_head = head // (self.heads // self.kv_heads)
            logits = query[head] @ key[kv_head].T / numpy.float32(math.sqrt(self.dim)) + hidden
            shares = numpy.exp(logits - logits.max(1, keepdims=True))
            heads.append(shares / shares.sum(1, keepdims=True) @ value[kv_head])
        return numpy.concatenate(heads, 1) @ self.file.tensor(block + "attn_output.weight").T

    def mlp(self, rows, block):
        gate = rows @ self.file.tensor(block + "ffn_gate.weight").T
        up = rows @ self.file.tensor(block + "ffn_up.weight").T
        return gate / (1 + numpy.exp(-gate)) * up @ self.file.tensor(block + "ffn_down.weight").T

    def logits(self, tokens):
        """Of the token after each of `tokens`: [tokens][vocabulary]."""
        embedding = self.file.tensor("token_embd.weight")
        hidden = embedding[tokens]
        for layer in range(self.layers):
            block = f"blk.{layer}."
            hidden = hidden + self.attention(self.norm(hidden, block + "attn_norm.weight"), block)
            hidden = hidden + self.mlp(self.norm(hidden, block + "ffn_norm.weight"), block)
        output = embedding
        if "output.weight" in self.file.tensors:
            output = self.file.tensor("output.weight")
        return self.norm(hidden, "output_norm.weight") @ output.T
