"""The examples run, the README shows them as they are, the commands of the package work."""

import json
import os
import pathlib
import re
import subprocess
import sys
import unittest

from support import ROOT, Daemon, main, tk

PYTHON = ROOT / "client/python"


def run(*command):
    package = str(pathlib.Path(tk.__file__).parents[1])
    return subprocess.run([sys.executable, *map(str, command)], check=False, text=True, timeout=100,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, "PYTHONPATH": package})


class Examples(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon()
        cls.addClassCleanup(cls.daemon.close)

    def check(self, pattern, *command):
        done = run(*command)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertRegex(done.stdout, pattern)

    def test_numpy_worker(self):
        program = PYTHON / "examples/numpy_worker.py"
        self.check(r"101 tokens, \d+ bytes\nlayer 0: .*\nlayer 1: ", program, self.daemon.address)
        text = program.read_text()
        self.assertLessEqual(text.count("\n"), 34)
        self.assertIn(f"```python\n{text}```\n", (PYTHON / "README.md").read_text())

    def test_notebooks_are_the_scripts(self):
        done = run(PYTHON / "examples/make_notebooks", "--check")
        self.assertEqual(done.returncode, 0, done.stdout)
        # Cell by cell, as a notebook runs it: later cells see the names of earlier ones.
        notebook = json.loads((PYTHON / "examples/notebooks/numpy_worker.ipynb").read_text())
        cells = ["".join(cell["source"]) for cell in notebook["cells"]
                 if cell["cell_type"] == "code"]
        self.assertGreater(len(cells), 3)
        names = {}
        argv = sys.argv
        self.addCleanup(setattr, sys, "argv", argv)
        for cell in cells:
            exec(cell.replace("unix:/run/tessera/tesserad.sock", self.daemon.address), names)
        self.assertEqual(len(names["outputs"]), names["LAYERS"])

    def test_two_processes_one_prefix(self):
        self.check(r"publisher: 1024 tokens, (\d+) bytes.*\n"
                   r"reader: 1024 tokens, \1 bytes, of which \1 are shared\n",
                   PYTHON / "examples/two_processes.py", self.daemon.address)

    def test_doctor(self):
        self.check(r"(?s)library .*ABI 2\n.* on cpu, mapped memory\n.*one token was decoded",
                   "-m", "tessera_kv", "doctor", self.daemon.address)
        done = run("-m", "tessera_kv", "doctor", "unix:/nonexistent/socket")
        self.assertEqual(done.returncode, 1)
        self.assertIn("/nonexistent/socket", done.stdout)

    def test_benchmark_prints_its_goals(self):
        done = run("-m", "tessera_kv.bench", "--steps=20", "--address", self.daemon.address)
        self.assertIn(done.returncode, (0, 1), done.stdout)  # a busy machine may miss a goal
        self.assertEqual(len(re.findall(r"goal: ", done.stdout)), 3, done.stdout)

    def test_every_public_name_says_what_it_is(self):
        for name in tk.__all__:
            item = getattr(tk, name)
            if isinstance(item, str):
                continue
            self.assertTrue(item.__doc__, name)
            for attribute, member in vars(item).items() if isinstance(item, type) else ():
                if not attribute.startswith("_") and callable(member):
                    self.assertTrue(member.__doc__, f"{name}.{attribute}")


if __name__ == "__main__":
    main()
