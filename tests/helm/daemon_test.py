"""The real daemon accepts the rendered configurations and arguments."""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import chart
import cases
import certificates
from chart import container, rendered

GPU_STANDS_IN = ["--device=CPU-00000000-0000-0000-0000-000000000001", "--pool-bytes=256MiB"]

programs = None  # where tesserad and tessera are


class Configurations(unittest.TestCase):
    """`tesserad --check-config` with the rendered arguments and files."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="tessera-helm-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def check(self, name):
        for part in ("tls", "tokens", "config"):
            (self.folder / part).mkdir()
        if name.startswith("tls") or name == "everything":
            for key, text in certificates.make(self.folder).items():
                (self.folder / "tls" / key).write_text(text)
                (self.folder / "tls" / key).chmod(0o400)
        made = rendered(name)
        for daemon, (key, text) in zip(made.daemons(), made.configurations().items()):
            config = json.loads(text)
            for tenant in config.get("tenants", ()):
                token = self.folder / "tokens" / tenant["name"]
                token.write_text(tenant["name"])
                token.chmod(0o400)
            # The files of a pod are below /etc/tessera.
            file = self.folder / "config/tesserad.json"
            file.write_text(text.replace('"/etc/tessera/', f'"{self.folder}/'))
            arguments = [word.replace("/etc/tessera", str(self.folder))
                         for word in container(daemon)["args"]]
            self.assertIn(f"--config={file}", arguments)
            if config["device"] != "cpu":
                arguments += GPU_STANDS_IN
            done = subprocess.run([programs / "tesserad", *arguments, "--check-config"],
                                  capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stdout), (0, "ok\n"), (key, done.stderr))

    def test_a_wrong_file_is_not_accepted(self):
        file = self.folder / "config.json"
        file.write_text('{"no_such_field": 1}')
        done = subprocess.run([programs / "tesserad", f"--config={file}", "--check-config"],
                              capture_output=True, text=True, check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no_such_field", done.stderr)


def add_cases():
    for name in chart.values_files():
        def case(self, name=name):
            self.check(name)
        setattr(Configurations, "test_" + name.replace("-", "_"), case)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=pathlib.Path, required=True)
    options, sys.argv[1:] = parser.parse_known_args()
    programs = options.programs.resolve()
    add_cases()
    cases.main()
