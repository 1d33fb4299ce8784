"""Runs unittest cases so that tests/run counts each of them; the frame of every Python test here.

A test script ends with `cases.main()`. It takes unittest's own arguments, and
--gtest_output=xml:FILE, the argument with which CTest starts GoogleTest programs, too. It exits
with 77, which CTest counts as skipped, if every case was skipped.
"""

import functools
import os
import pathlib
import subprocess
import sys
import time
import unittest
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77
GTEST_OUTPUT = "--gtest_output=xml:"


@functools.cache
def find_tool(name):
    """The path of a tool of tests/ops/tools, or the reason why it cannot be had."""
    done = subprocess.run([sys.executable, ROOT / "tests/ops/tools", name], text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode == 0:
        return pathlib.Path(done.stdout.strip()), ""
    if done.returncode == SKIPPED:
        return None, done.stderr.strip()
    raise AssertionError(done.stderr)


def tool(name):
    """The path of a tool; skips the test that asks where it cannot be had."""
    path, reason = find_tool(name)
    if path is None:
        raise unittest.SkipTest(reason)
    return path


def use_environment(name):
    """Goes on in the Python environment of this name; ends the script as skipped if there is none.

    To be called before packages of that environment are imported.
    """
    path, reason = find_tool(name)
    if path is None:
        print(f"skipped: {reason}", file=sys.stderr)
        sys.exit(SKIPPED)
    if pathlib.Path(sys.prefix) != path.parents[1]:
        os.execv(path, [path, *sys.argv])


class Recorder(unittest.TextTestResult):
    """Keeps what became of each case: (class, case, seconds, kind, message)."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.rows = []
        self.started = 0.0

    def startTest(self, test):
        super().startTest(test)
        self.started = time.monotonic()

    def keep(self, test, kind, message=""):
        place, _, case = test.id().rpartition(".")
        if case.endswith(")"):  # "setUpClass (module.Class)", which is no case
            place, case = case[:-1], place.partition(" ")[0]
        self.rows.append((place.rpartition(".")[2], case, time.monotonic() - self.started, kind,
                          message))

    def addSuccess(self, test):
        super().addSuccess(test)
        self.keep(test, "passed")

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.keep(test, "failed", self.failures[-1][1])

    def addError(self, test, err):
        super().addError(test, err)
        self.keep(test, "failed", self.errors[-1][1])

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.keep(test, "skipped", reason)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.keep(test, "failed", f"{subtest}: {err[1]}")


def as_xml(rows):
    """The rows in the format of GoogleTest."""
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", name="cases")
    for place, case, seconds, kind, message in rows:
        element = ElementTree.SubElement(
            suite, "testcase", classname=place, name=case, time=f"{seconds:.3f}", status="run",
            result="skipped" if kind == "skipped" else "completed")
        if kind == "failed":
            ElementTree.SubElement(element, "failure", message=message)
    return ElementTree.ElementTree(suites)


def main(module="__main__"):
    output = next((word for word in sys.argv if word.startswith(GTEST_OUTPUT)), None)
    if output is not None:
        sys.argv.remove(output)
    runner = unittest.TextTestRunner(resultclass=Recorder, verbosity=1)
    result = unittest.main(module, testRunner=runner, exit=False).result
    if output is not None:
        file = pathlib.Path(output[len(GTEST_OUTPUT):])
        file.parent.mkdir(parents=True, exist_ok=True)
        as_xml(result.rows).write(file, encoding="utf-8")
    kinds = {row[3] for row in result.rows}
    for reason in sorted({row[4] for row in result.rows if row[3] == "skipped"}):
        print(f"skipped: {reason}", file=sys.stderr)
    if kinds == {"skipped"}:
        sys.exit(SKIPPED)
    sys.exit(0 if result.wasSuccessful() and kinds else 1)
