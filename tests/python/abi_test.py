"""The structs that ctypes sees are those that a C compiler sees."""

import ctypes
import pathlib
import subprocess
import sys
import tempfile
import unittest

import os
import shutil

from support import ROOT, main, tk
from tessera_kv import _abi, _library

MAKE_ABI = ROOT / "client/python/tools/make_abi.py"


class Abi(unittest.TestCase):
    def test_the_file_is_what_the_headers_say(self):
        subprocess.run([sys.executable, MAKE_ABI, "--check"], check=True)

    def test_sizes_offsets_and_numbers_are_the_compilers(self):
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            self.skipTest("there is no C compiler")
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "abi.c"
            source.write_text(subprocess.run([sys.executable, MAKE_ABI, "--c"], check=True,
                                             capture_output=True, text=True).stdout)
            program = pathlib.Path(folder) / "abi"
            subprocess.run([compiler, f"-I{ROOT}/client/include", "-o", program, source],
                           check=True)
            lines = subprocess.run([program], check=True, capture_output=True,
                                   text=True).stdout.splitlines()
        self.assertGreater(len(lines), 200)
        for line in lines:
            name, number = line.split()
            struct, _, field = name.partition(".")
            found = getattr(_abi, struct)
            if field:
                found = getattr(found, field).offset
            elif isinstance(found, type):
                found = ctypes.sizeof(found)
            self.assertEqual(found, int(number), name)

    def test_every_function_is_in_the_library(self):
        self.assertGreaterEqual(len(_abi.FUNCTIONS), 55)
        for name in _abi.FUNCTIONS:
            self.assertTrue(hasattr(_library.slow, name), name)
        self.assertRegex(tk.library_version, r"^\d+\.\d+\.\d+$")

    def test_another_abi_version_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            library = pathlib.Path(folder) / "libwrong.so"
            source = pathlib.Path(folder) / "wrong.c"
            source.write_text("unsigned tessera_abi_version(void) { return 1; }\n"
                              'const char* tessera_version(void) { return "0.0.1"; }\n')
            compiler = shutil.which(os.environ.get("CC", "cc"))
            if compiler is None:
                self.skipTest("there is no C compiler")
            subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
            done = subprocess.run(
                [sys.executable, "-c", "import tessera_kv"], capture_output=True, text=True,
                check=False, env={**os.environ, "TESSERA_LIBRARY": str(library),
                                  "PYTHONPATH": str(pathlib.Path(tk.__file__).parents[1])})
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"has ABI version 1; tessera_kv needs {_abi.ABI_VERSION}", done.stderr)


if __name__ == "__main__":
    main()
