"""The logits of a real model, SmolLM2, against the independent implementation in reference.py.

Skipped unless numpy is installed and deploy/models/fetch has the model in its cache.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

SKIPPED = 77
DISTRIBUTION = pathlib.Path("/usr/bin/python3")
TEXTS = [
    "The cat sat on the mat, and in 1984 it didn't move: 3.14 is near pi.\n\nWhy?",
    "def area(radius):\n    return 3.14159 * radius ** 2\n\nprint(area(10))  # about 314\n",
    "La temp\u00e9rature \u00e9tait de 12 degr\u00e9s \u2013 \u4e2d\u6587, \u03b1+\u03b2=\u03b3.",
]


def main(source, program):
    try:
        import numpy
    except ImportError:
        # The distribution's package is for the distribution's Python.
        if DISTRIBUTION.exists() and not DISTRIBUTION.samefile(sys.executable):
            os.execv(DISTRIBUTION, [str(DISTRIBUTION), *sys.argv])
        print("skipped: numpy is not installed")
        return SKIPPED
    fetch = subprocess.run([sys.executable, source / "deploy/models/fetch", "--cached", "smollm2"],
                           capture_output=True, text=True)
    if fetch.returncode != 0:
        print("skipped:", fetch.stderr.strip())
        return SKIPPED
    path = fetch.stdout.strip()
    sys.dont_write_bytecode = True
    import reference
    model = reference.Model(path)
    names = model.file.values["tokenizer.ggml.tokens"]
    for text in TEXTS:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "text").write_text(text, encoding="utf-8")
            subprocess.run([program, path, folder / "text", folder / "out"], check=True)
            data = (folder / "out").read_bytes()
        count = int.from_bytes(data[:4], "little")
        tokens = numpy.frombuffer(data, "<u4", count, 4)
        logits = numpy.frombuffer(data, "<f4", -1, 4 + 4 * count).reshape(count, len(names))
        expected = model.logits(tokens)
        scale = abs(expected).max()
        worst = abs(logits - expected).max() / scale
        print(f"{count} tokens: worst error {worst:.2g} of the largest logit, {scale:.3g}")
        # Thirty layers of fp32 arithmetic in another order.
        assert worst < 3e-5, worst
        assert (logits.argmax(1) == expected.argmax(1)).all()
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).absolute(), sys.argv[2]))
