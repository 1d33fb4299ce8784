"""The checkers find violations planted in a made-up tree, one at a time, and nothing else."""

import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True

import check_layers
import check_tidy
import table

HEADER = "#pragma once\n"
# Like tests/layers.txt, and smaller.
LAYERS = table.Layers("""
kernels/format:
kernels/cpu: kernels/format
kernels/dispatch: kernels/cpu kernels/format
kernels: +kernels/dispatch
proto/shm: kernels/format
proto/tessera:
proto:
daemon/base:
daemon/pool: +kernels daemon/base proto/shm
daemon/tiers: daemon/base
daemon/cache: +daemon/pool daemon/tiers
daemon/compaction: +daemon/cache
daemon/config: daemon/base
daemon/residency: +daemon/cache
daemon/serving: +daemon/residency daemon/compaction proto/tessera
daemon: +daemon/serving
client/include:
client: client/include daemon/base proto/shm +kernels
client/cli: +client
order daemon/serving: call rpc .
""")


class Tree(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.root = pathlib.Path(directory.name)
        # A small tree without fault.
        self.write("README.md", "# top\n")
        for folder in ("daemon", "daemon/base", "daemon/pool", "daemon/cache", "daemon/compaction",
                       "daemon/residency", "daemon/tiers", "kernels", "kernels/format",
                       "kernels/cpu", "kernels/dispatch", "proto", "proto/shm", "client", "tests"):
            self.write(f"{folder}/README.md", f"# {folder}\n")
        for folder in ("daemon/base", "daemon/pool", "daemon/tiers", "daemon/cache",
                       "daemon/compaction", "daemon/residency", "daemon/serving", "kernels/format",
                       "kernels/cpu", "kernels/dispatch", "proto/shm", "client", "tests/fakes"):
            self.write(f"{folder}/a.h", HEADER)
            self.write(f"{folder}/README.md", f"# {folder}\n")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def includes(self, path, *targets):
        self.write(path, HEADER + "".join(f'#include "{target}"\n' for target in targets))


class Layers(Tree):
    def found(self):
        return check_layers.LayerCheck(self.root, LAYERS).run()

    def assert_one(self, *words):
        found = self.found()
        self.assertEqual(len(found), 1, found)
        for word in words:
            self.assertIn(word, found[0])

    def test_the_good_tree_is_good(self):
        self.includes("daemon/cache/b.h", "daemon/pool/a.h", "daemon/base/a.h", "daemon/cache/a.h",
                      "kernels/dispatch/a.h", "proto/shm/a.h", "absl/status/status.h")
        self.includes("kernels/cpu/b.h", "kernels/format/a.h")
        self.includes("daemon/serving/b.h", "tessera/v1/x.pb.h", "daemon/compaction/a.h")
        self.includes("tests/unit/cache/b.h", "daemon/serving/a.h", "tests/fakes/a.h",
                      "gtest/gtest.h")
        self.assertEqual(self.found(), [])

    def test_upward(self):
        self.includes("daemon/pool/b.h", "daemon/cache/a.h")
        self.assert_one("daemon/pool/b.h:2", "daemon/pool may not include daemon/cache")

    def test_sideways(self):
        for one, other in (("daemon/compaction", "daemon/residency"),
                           ("daemon/pool", "daemon/tiers"), ("kernels/cpu", "kernels/dispatch")):
            with self.subTest(one=one):
                self.includes(f"{one}/b.h", f"{other}/a.h")
                self.assert_one(f"{one} may not include {other}")
                (self.root / one / "b.h").unlink()

    def test_angle_brackets_hide_nothing(self):
        self.write("daemon/base/b.cc", "#  include <daemon/pool/a.h>\n")
        self.assert_one("daemon/base may not include daemon/pool")

    def test_folders_inside_a_layer_belong_to_it(self):
        self.includes("daemon/pool/deep/er/b.h", "daemon/cache/a.h")
        self.assert_one("daemon/pool may not include daemon/cache")

    def test_the_client_does_not_reach_into_the_daemon(self):
        self.includes("client/b.h", "daemon/base/a.h", "daemon/pool/a.h")
        self.assert_one("client may not include daemon/pool")

    def test_kernels_know_nobody(self):
        self.includes("kernels/cpu/b.h", "daemon/base/a.h")
        self.assert_one("kernels/cpu may not include daemon/base")
        self.includes("kernels/cpu/b.h", "absl/status/status.h")
        self.assert_one("kernels/cpu may not include absl/status/status.h")

    def test_the_mapped_protocol_uses_formats_only(self):
        self.includes("proto/shm/b.h", "kernels/format/a.h", "kernels/dispatch/a.h")
        self.assert_one("proto/shm may not include kernels/dispatch")

    def test_protobuf_stops_at_the_door(self):
        self.includes("daemon/cache/b.h", "tessera/v1/x.pb.h")
        self.assert_one("daemon/cache may not include proto/tessera")

    def test_only_tests_include_tests(self):
        self.includes("daemon/pool/b.h", "tests/fakes/a.h")
        self.assert_one("only tests include tests")
        self.includes("daemon/pool/b.h", "gtest/gtest.h")
        self.assert_one("daemon/pool may not include gtest/gtest.h: only tests may")

    def test_unknown_folders(self):
        self.write("daemon/utils/a.h", HEADER)
        self.assert_one("daemon/utils", "unknown folder")
        (self.root / "daemon/utils/a.h").unlink()
        self.write("scripts/a.py", "")
        self.assert_one("scripts", "the top level is fixed")

    def test_paths_start_at_the_root(self):
        self.includes("daemon/pool/b.h", "a.h")
        self.assert_one('"a.h" is no path from the root')
        self.includes("daemon/pool/b.h", "daemon/base/gone.h")
        self.assert_one("daemon/base/gone.h does not exist")

    def test_links(self):
        self.write("daemon/pool/CMakeLists.txt",
                   "tessera_library(tessera_pool\n  SOURCES a.cc\n  LINK tessera_base)\n")
        self.write("daemon/base/CMakeLists.txt", "tessera_library(tessera_base SOURCES a.cc)\n")
        self.assertEqual(self.found(), [])
        self.write("daemon/base/CMakeLists.txt",
                   "tessera_library(tessera_base SOURCES a.cc)\n"
                   "target_link_libraries(tessera_base PRIVATE tessera_pool)  # comment (\n")
        self.assert_one("tessera_base (daemon/base) may not link tessera_pool (daemon/pool)")

    def test_parts_keep_their_order(self):
        self.write("daemon/serving/call/a.h", HEADER)
        self.write("daemon/serving/rpc/a.h", HEADER)
        self.includes("daemon/serving/rpc/b.h", "daemon/serving/call/a.h", "daemon/pool/a.h")
        self.includes("daemon/serving/b.h", "daemon/serving/call/a.h", "daemon/serving/rpc/a.h")
        self.assertEqual(self.found(), [])
        self.includes("daemon/serving/call/b.h", "daemon/serving/rpc/a.h")
        self.assert_one("daemon/serving/call/b.h:2", "a higher part of daemon/serving")

    def test_parts_have_a_place(self):
        self.write("daemon/serving/others/a.h", HEADER)
        self.write("daemon/serving/others/README.md", "# others\n")
        self.assert_one("daemon/serving/others", "unknown folder")

    def test_public_headers_go_by_their_installed_names(self):
        self.write("client/include/tessera/a.h", HEADER)
        self.includes("client/cli/b.h", "tessera/a.h")
        self.assertEqual(self.found(), [])
        self.includes("daemon/pool/b.h", "tessera/a.h")
        self.assert_one("daemon/pool may not include client/include")

    def test_public_headers_need_little(self):
        self.includes("client/include/tessera/a.h", "absl/status/statusor.h")
        self.assertEqual(self.found(), [])
        for target, words in (
                ("absl/strings/cord.h", "public headers may not include absl/strings"),
                ("grpcpp/grpcpp.h", "public headers may not include grpcpp"),
                ("google/protobuf/message.h", "public headers may not include google"),
                ("tessera/v1/x.pb.h", "client/include may not include proto/tessera"),
                ("daemon/base/a.h", "client/include may not include daemon/base")):
            with self.subTest(target):
                self.includes("client/include/tessera/a.h", target)
                self.assert_one(words)

    def test_the_list_of_this_project(self):
        layers = table.load()
        self.assertIn("daemon/cache", layers.may_include["daemon/serving"])
        self.assertNotIn("daemon/serving", layers.may_include["daemon/cache"])

    def test_the_list_itself(self):
        for text, words in (("a: b\n", '"b" is not a layer above this line'),
                            ("a b c: d\n", "expected"), ("a\n", "expected"),
                            ("order a: b\n", "names no layer")):
            with self.subTest(text=text):
                with self.assertRaisesRegex(table.Malformed, words):
                    table.Layers(text)
        layers = table.Layers("a:\nb: a\nc: +b  # comment\norder c: x .\n")
        self.assertEqual(layers.may_include["c"], ("b", "a"))
        self.assertEqual(layers.part_of("c/x/y", "c"), 0)
        self.assertEqual(layers.part_of("c", "c"), 1)


class Tidy(Tree):
    def found(self):
        return check_tidy.TidyCheck(self.root).run()

    def assert_one(self, *words):
        found = self.found()
        self.assertEqual(len(found), 1, found)
        for word in words:
            self.assertIn(word, found[0])

    def test_the_good_tree_is_good(self):
        self.write("daemon/pool/b.cc", "x" * 100 + "\n" + "\n" * 499)
        self.write("daemon/config/README.md", "# config\n")
        self.write("daemon/config/b.cc", "getenv(name);\n")
        self.write("daemon/base/b.cc", '// sleeps, and getenv("X") or throw in words\n"throw"\n')
        self.write("tests/b.cc", "asleep(); Sleepless sleep_forever;\n")
        self.write("tests/c.cc", 'const char* name = "x_' + "X" * 6 + '";\n')
        self.assertEqual(self.found(), [])

    def test_columns(self):
        self.write("daemon/pool/b.cc", "\n" + "x" * 101 + "\n")
        self.assert_one("daemon/pool/b.cc:2", "101 columns")

    def test_scripts_without_a_suffix_are_code(self):
        self.write("tests/go", "#!/bin/sh\n" + "x" * 101 + "\n")
        self.assert_one("tests/go:2", "101 columns")

    def test_trailing_space(self):
        self.write("daemon/pool/b.cc", "x \n")
        self.assert_one("daemon/pool/b.cc:1", "white space")

    def test_long_files_need_a_reason(self):
        self.write("daemon/pool/b.cc", "x\n" * 501)
        self.assert_one("daemon/pool/b.cc", "501 lines")
        self.write("tests/unit/layers/exceptions.txt", "lines daemon/pool/b.cc: one long table\n")
        self.assertEqual(self.found(), [])
        self.write("daemon/pool/b.cc", "x\n")
        self.assert_one("lines daemon/pool/b.cc", "not needed any more")

    def test_exceptions_need_their_form(self):
        self.write("tests/unit/layers/exceptions.txt", "lines daemon/pool/b.cc\n")
        self.assert_one("exceptions.txt:1", "expected")

    def test_getenv(self):
        self.write("daemon/pool/b.cc", 'auto x = std::getenv("X");\n')
        self.assert_one("daemon/pool/b.cc:1", "environment")

    def test_sleeping_tests(self):
        for line in ("std::this_thread::sleep_for(x);", "usleep(1);", "sleep(1);"):
            with self.subTest(line=line):
                self.write("tests/unit/b.cc", line + "\n")
                self.assert_one("tests/unit/b.cc:1", "do not sleep")
        (self.root / "tests/unit/b.cc").unlink()
        self.write("tests/unit/b.py", "time.sl" "eep(1)\n")
        self.assert_one("tests/unit/b.py:1", "do not sleep")

    def test_unfinished_work(self):
        for word in ("TO" "DO", "FIX" "ME", "X" "XX"):
            with self.subTest(word=word):
                self.write("daemon/pool/README.md", f"later ({word}: more)\n")
                self.assert_one("daemon/pool/README.md:1", "unfinished")

    def test_paths_of_the_machine(self):
        for path in ("/wo" "rk/main", "see /fa" "rm/x", "/ro" "ot/.cache", "the .lib" "rary"):
            with self.subTest(path=path):
                self.write("daemon/pool/README.md", f"{path}\n")
                self.assert_one("daemon/pool/README.md:1", "machine")
        self.write("daemon/pool/README.md", "frame" "work/x and ${dir}/wo" "rk/x\n")
        self.assertEqual(self.found(), [])

    def test_throw(self):
        self.write("daemon/pool/b.cc", "throw 1;\n")
        self.assert_one("daemon/pool/b.cc:1", "no exceptions")

    def test_headers(self):
        self.write("daemon/pool/b.h", "// #pragma once\n")
        self.assert_one("daemon/pool/b.h", "#pragma once")
        self.write("daemon/pool/b.h", HEADER + "using namespace std;\n")
        self.assert_one("daemon/pool/b.h:2", "using namespace")

    def test_suppressions(self):
        self.write("tests/x.supp", "# not of tessera\nrace:libgrpc\nrace:tessera::pool\n")
        self.assert_one("tests/x.supp:3", "our own code")

    def test_crowded_folders(self):
        for number in range(30):
            self.write(f"daemon/pool/f{number}.h", HEADER)
        self.assert_one("daemon/pool", "31 source files")

    def test_readmes(self):
        (self.root / "daemon/pool/README.md").unlink()
        self.assert_one("daemon/pool", "README")

    def test_builds_and_hidden_folders_are_not_ours(self):
        self.write("build/b.cc", "throw 1;\n")
        self.write("build-asan/b.cc", "throw 1;\n")
        self.write(".cache/b.cc", "throw 1;\n")
        self.assertEqual(self.found(), [])


if __name__ == "__main__":
    unittest.main()
