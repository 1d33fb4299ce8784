#!/usr/bin/env python3
"""Writes golden.json and samples.json next to this file. Uses only the standard library.

    make_golden.py FOLDER     the training folder, with golden.npz and generate_tasks.py

golden.npz holds the results of a float32 forward pass for three prompts. golden.json keeps the
logits of the last position and some rows of every layer. samples.json holds one sample of each task
and hashes of many more.
"""

import array
import ast
import json
import pathlib
import struct
import sys
import zipfile

LENGTHS = (256, 512, 1024, 2048)
DEPTHS = (0, 0.3, 0.5, 1)
SEEDS = range(1000000, 1000008)


def load(archive, name):
    """The numbers of one array of an .npz file, and its shape."""
    data = archive.read(name + ".npy")
    assert data[:8] == b"\x93NUMPY\x01\x00"
    length = struct.unpack("<H", data[8:10])[0]
    header = ast.literal_eval(data[10:10 + length].decode())
    assert not header["fortran_order"] and sys.byteorder == "little"
    numbers = array.array({"<i4": "i", "<f4": "f"}[header["descr"]])
    numbers.frombytes(data[10 + length:])
    return numbers, header["shape"]


def shortened(numbers):
    return [float("%.6g" % number) for number in numbers]


def rows(archive, prompt, name, tokens):
    """From [layer][token][head][128]: one token's first head and the other's last, per layer."""
    numbers, (layers, count, heads, dim) = load(archive, f"{prompt}_{name}")
    for layer in range(layers):
        for token, head in zip(tokens, (0, heads - 1)):
            at = ((layer * count + token) * heads + head) * dim
            yield {"what": name, "layer": layer, "token": token, "head": head,
                   "values": shortened(numbers[at:at + dim])}


def golden(path):
    prompts = []
    with zipfile.ZipFile(path) as archive:
        for prompt in ("p0", "p1", "p2"):
            ids = load(archive, prompt + "_ids")[0].tolist()
            tokens = (len(ids) // 2, len(ids) - 1)
            prompts.append({
                "ids": ids,
                "answer": load(archive, prompt + "_answer")[0].tolist(),
                "logits": shortened(load(archive, prompt + "_logits")[0]),
                "rows": [row for name in ("q", "k", "v")
                         for row in rows(archive, prompt, name, tokens)],
            })
    return {"prompts": prompts}


def fnv1a(tokens, value=0xcbf29ce484222325):
    for token in tokens:
        value = ((value ^ token) * 0x100000001b3) & (2 ** 64 - 1)
    return value


def samples(generator):
    full, hashes = [], []
    for task in generator.TASKS:
        prompt, answer = generator.sample(task, 160, 0.4, 12345)
        full.append({"task": task, "length": 160, "depth": 0.4, "seed": 12345,
                     "prompt": prompt, "answer": answer})
        for length in LENGTHS:
            for depth in DEPTHS:
                value = fnv1a([])
                for seed in SEEDS:
                    prompt, answer = generator.sample(task, length, depth, seed)
                    value = fnv1a(answer, fnv1a(prompt, value))
                hashes.append({"task": task, "length": length, "depth": depth,
                               "first_seed": SEEDS[0], "seeds": len(SEEDS),
                               "hash": "%016x" % value})
    return {"samples": full, "hashes": hashes}


def write(name, content):
    """Prints one list item per line."""
    lists = []
    for key, items in content.items():
        lines = ",\n".join(json.dumps(item, separators=(",", ":")) for item in items)
        lists.append(f'"{key}": [\n{lines}\n]')
    path = pathlib.Path(__file__).resolve().parent / name
    path.write_text("{" + ",\n".join(lists) + "}\n")


def main(folder):
    sys.dont_write_bytecode = True
    sys.path.insert(0, folder)
    import generate_tasks
    write("golden.json", golden(pathlib.Path(folder) / "golden.npz"))
    write("samples.json", samples(generate_tasks))


if __name__ == "__main__":
    main(sys.argv[1])
