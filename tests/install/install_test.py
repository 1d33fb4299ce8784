#!/usr/bin/env python3
"""Installs the build into a fresh prefix, and uses it as a stranger would (README.md)."""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

SKIPPED = 77
# What libtessera.so may link: the C and C++ runtimes, and the libraries whose archives a
# distribution may have built without -fPIC, with what these link themselves.
RUNTIME = r"linux-vdso|ld-linux|libc\.|libm\.|libdl\.|librt\.|libpthread\.|libstdc\+\+|libgcc_s"
NOT_CONTAINED = r"libprotobuf\.|libabsl_|libre2\.|libz\.|libicu"
FORBIDDEN = r"libcud|libcuda|libtessera"

arguments = None


def run(*command, **options):
    """The output of a command; a failure shows it."""
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, check=False, **options)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}\nexit code {done.returncode}\n"
                             f"{done.stdout}")
    return done.stdout


class Installed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="tessera-install-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.prefix = cls.folder / "prefix"
        cls.files = {}
        for component in ("daemon", "client", "library", "dev"):
            before = cls.listed()
            run(arguments.cmake, "--install", arguments.build, "--prefix", cls.prefix,
                "--component", component)
            cls.files[component] = cls.listed() - before
        cls.lib = next(cls.prefix.rglob("libtessera.so")).parent
        cls.project = cls.folder / "project"
        shutil.copytree(arguments.source / "tests/install/project", cls.project)
        for example in (arguments.source / "client/examples").glob("*.c*"):
            shutil.copy(example, cls.project)

    @classmethod
    def listed(cls):
        return {path.relative_to(cls.prefix).as_posix() for path in cls.prefix.rglob("*")
                if not path.is_dir()}

    def start_daemon(self):
        address = f"unix:{self.folder}/tesserad.sock"
        log = open(self.folder / "log", "w")
        daemon = subprocess.Popen([self.prefix / "bin/tesserad", f"--listen={address}",
                                   "--metrics=", "--pool-bytes=256MiB"], stderr=log, stdout=log)
        self.addCleanup(log.close)
        self.addCleanup(daemon.wait)
        self.addCleanup(daemon.kill)
        deadline = time.monotonic() + 30
        while True:  # every try is a process, so this does not spin
            try:
                self.assertIn("cpu", run(self.prefix / "bin/tessera", "status",
                                         f"--address={address}"))
                return address
            except AssertionError:
                self.assertLess(time.monotonic(), deadline, (self.folder / "log").read_text())
                self.assertIsNone(daemon.poll(), (self.folder / "log").read_text())

    def check_links_only(self, program, allowed):
        needed = [pathlib.PurePath(line.split()[0]).name
                  for line in run("ldd", program).splitlines()]
        print(program.name, "links", " ".join(sorted(needed)))
        for name in needed:
            self.assertTrue(re.match(allowed, name), name)

    def check_example(self, program, address):
        lines = run(program, address).splitlines()
        self.assertEqual(len(lines), 16, lines)
        for line in lines:
            words = re.findall(r"-?\d+\.\d+", line)
            self.assertEqual(len(words), 2, line)
            self.assertAlmostEqual(float(words[0]), float(words[1]), delta=2e-5)

    def test_components(self):
        completions = "share/bash-completion/completions/"
        self.assertEqual(self.files["daemon"],
                         {"bin/tesserad", "share/man/man8/tesserad.8", completions + "tesserad",
                          "share/doc/tesserad/copyright"})
        self.assertEqual(self.files["client"],
                         {"bin/tessera", "share/man/man1/tessera.1", completions + "tessera",
                          "share/doc/tessera/copyright"})
        names = {pathlib.PurePath(file).name for file in self.files["library"]} - {"copyright"}
        self.assertIn("libtessera.so.2", names)
        self.assertTrue(all(name.startswith("libtessera.so.") for name in names), names)
        for wanted in ("include/tessera/worker.h", "include/tessera/tessera.h"):
            self.assertIn(wanted, self.files["dev"])
        for name in ("libtessera-client.a", "TesseraConfig.cmake", "tessera.pc",
                     "tessera-client.pc", "libtessera.so"):
            self.assertTrue(any(file.endswith("/" + name) for file in self.files["dev"]), name)

    def test_examples_with_both_build_systems(self):
        build = self.folder / "build"
        run(arguments.cmake, "-G", arguments.generator, "-S", self.project, "-B", build,
            f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DCMAKE_CXX_COMPILER={arguments.cxx}",
            f"-DCMAKE_C_COMPILER={arguments.cc}")
        run(arguments.cmake, "--build", build)
        environment = {**os.environ, "PKG_CONFIG_PATH": str(self.lib / "pkgconfig"),
                       "CC": arguments.cc, "CXX": arguments.cxx}
        run("make", "-C", self.project, "-e", env=environment)
        self.check_links_only(build / "c_static", f"^({RUNTIME})")
        address = self.start_daemon()
        for program in (build / "c_shared", build / "c_static", build / "cpp_static",
                        self.project / "make_c", self.project / "make_cpp"):
            with self.subTest(program.name):
                self.check_example(program, address)
        # These check what they compute, and exit with an error if it is wrong.
        for name, pattern in (("c_batch", r"sequence 0: 103 tokens.*\nsequence 1: 101 tokens"),
                              ("prefix_sharing", r" 96 of 116 tokens were published"),
                              ("compression", r"kept 128 of 512 tokens, token 137 among them")):
            with self.subTest(name):
                self.assertRegex(run(build / name, address), pattern)

    def test_exports_are_those_of_the_header(self):
        header = "\n".join(file.read_text() for file in
                           sorted((self.prefix / "include/tessera").glob("tessera*.h")))
        declared = set(re.findall(r"^TESSERA_API [^;(]*?\b(tessera_\w+)\(", header, re.MULTILINE))
        self.assertGreaterEqual(len(declared), 55)
        defined = {line.split()[-1].split("@")[0]
                   for line in run("nm", "-D", "--defined-only",
                                   self.lib / "libtessera.so").splitlines()
                   if line.split()[-2] != "A"}  # the name of the version
        print(f"libtessera.so exports {len(defined)} symbols")
        self.assertEqual(defined, declared)

    def test_what_the_shared_library_links(self):
        needed = [line.split()[0] for line in run("ldd", self.lib / "libtessera.so").splitlines()]
        needed = sorted(pathlib.PurePath(name).name for name in needed)
        groups = sorted({re.sub(r"libabsl_.*", "libabsl_*", name) for name in needed})
        print("libtessera.so links", " ".join(groups))
        allowed = f"^({RUNTIME}|{NOT_CONTAINED})"
        for name in needed:
            self.assertFalse(re.match(FORBIDDEN, name), name)
            if arguments.contains_dependencies == "ON":
                self.assertTrue(re.match(allowed, name), name)

    def test_loads_beside_another_protobuf(self):
        program = self.folder / "beside_protobuf"
        run(arguments.cc, self.project / "beside_protobuf.c", "-o", program, "-Wl,--no-as-needed",
            "-lprotobuf", "-ldl")
        run(program, self.lib / "libtessera.so")

    def test_headers_that_a_user_includes(self):
        main = self.project / "cpp_minimal.cc"
        text = run(arguments.cxx, "-std=c++20", "-M", f"-I{self.prefix}/include", main)
        headers = {os.path.normpath(word) for word in text.replace("\\\n", " ").split()[2:]}
        ours = {name for name in headers if name.startswith(str(self.prefix))}
        absl = {name for name in headers if "/absl/" in name}
        print(f"tessera/worker.h: {len(headers)} headers, {len(ours)} of Tessera, {len(absl)} of "
              "Abseil")
        for name in ours:
            self.assertTrue(name.startswith(f"{self.prefix}/include/tessera/"), name)
        for name in headers - ours - absl:
            self.assertRegex(name, r"^/usr/(include/(c\+\+|x86_64-linux-gnu|aarch64-linux-gnu|asm|"
                             r"linux|[\w.-]+\.h$|bits|sys)|lib/(gcc|llvm|clang))")

    def test_a_parent_project_keeps_its_settings(self):
        run(arguments.cmake, "-G", arguments.generator, "-S",
            arguments.source / "tests/install/parent", "-B", self.folder / "parent",
            f"-DTESSERA={arguments.source}", "-DTESSERA_CUDA=OFF",
            f"-DCMAKE_CXX_COMPILER={arguments.cxx}", f"-DCMAKE_C_COMPILER={arguments.cc}")


def main():
    global arguments
    parser = argparse.ArgumentParser()
    for name in ("source", "build"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    for name in ("cmake", "generator", "cxx", "cc", "contains-dependencies"):
        parser.add_argument(f"--{name}", required=True)
    arguments, rest = parser.parse_known_args()
    for tool in ("pkg-config", "make", "nm", "ldd"):
        if shutil.which(tool) is None:
            print(f"skipped: {tool} was not found")
            sys.exit(SKIPPED)
    unittest.main(argv=sys.argv[:1] + rest, verbosity=2)


if __name__ == "__main__":
    main()
