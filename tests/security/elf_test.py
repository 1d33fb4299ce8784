#!/usr/bin/env python3
"""Reads the programs and the library as they were linked: what makes a mistake hard to exploit."""

import pathlib
import platform
import re
import shutil
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "ops"))

import cases  # noqa: E402

BUILD = None
FILES = ("bin/tesserad", "bin/tessera", "client/libtessera.so")


def read(flag, file):
    return subprocess.run(["readelf", "--wide", flag, BUILD / file], check=True,
                          capture_output=True, text=True).stdout


def names(file):
    """The functions that a file asks other libraries for."""
    return set(re.findall(r" UND (\w+)", read("--dyn-syms", file)))


@unittest.skipIf(shutil.which("readelf") is None, "readelf is not installed")
class Linked(unittest.TestCase):
    def each(self):
        for file in FILES:
            with self.subTest(file=file):
                yield file

    def test_position_independent(self):
        for file in self.each():
            self.assertRegex(read("--file-header", file), r"Type:\s+DYN")

    def test_tables_are_read_only_after_the_start(self):
        for file in self.each():
            self.assertIn("GNU_RELRO", read("--program-headers", file))
            self.assertRegex(read("--dynamic", file), r"BIND_NOW|\bNOW\b")

    def test_stack_is_not_executable(self):
        for file in self.each():
            stack = re.search(r"GNU_STACK.*", read("--program-headers", file))[0]
            self.assertNotIn("E", stack.split()[-2])

    def test_nothing_is_writable_and_executable(self):
        for file in self.each():
            for line in re.findall(r"^\s+LOAD.*$", read("--program-headers", file), re.MULTILINE):
                self.assertNotRegex(line, r"RWE")

    def test_stack_protector(self):
        for file in self.each():
            self.assertIn("__stack_chk_fail", names(file))

    def test_fortified_functions(self):
        for file in self.each():
            fortified = {name for name in names(file) if name.endswith("_chk")}
            self.assertGreaterEqual(len(fortified), 3, fortified)

    def test_no_search_path_of_libraries(self):
        for file in self.each():
            self.assertNotRegex(read("--dynamic", file), r"\((RPATH|RUNPATH)\)")

    @unittest.skipUnless(platform.machine() == "x86_64", "for x86-64")
    def test_jumps_go_to_marked_places(self):
        mark = bytes.fromhex("f30f1efa")  # endbr64
        for file in self.each():
            self.assertGreater((BUILD / file).read_bytes().count(mark), 1000)



if __name__ == "__main__":
    BUILD = pathlib.Path(sys.argv.pop(1))
    cases.main()
