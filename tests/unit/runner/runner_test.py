"""The counting of tests/run: what each kind of ending counts as."""

import contextlib
import io
import pathlib
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.dont_write_bytecode = True

import record  # noqa: E402
import run_ctest  # noqa: E402


def gtest(name):
    return run_ctest.Entry(name, [f"/b/{name}", f"--gtest_output=xml:/b/{name}.xml"], "b")


def script(name):
    return run_ctest.Entry(name, ["/usr/bin/python3", f"{name}.py"], "b")


def junit(*cases):
    return ElementTree.fromstring(f"<testsuite>{''.join(cases)}</testsuite>")


PASSED_CASE = '<testcase classname="S" name="Good" status="run" result="completed"/>'
FAILED_CASE = ('<testcase classname="S" name="Bad" status="run" result="completed">'
               '<failure message="x"/></testcase>')
SKIPPED_CASE = ('<testcase classname="S" name="NoGpu" status="run" result="skipped">'
                '<skipped message="no GPU"/></testcase>')
DISABLED_CASE = '<testcase classname="S" name="DISABLED_x" status="notrun" result="suppressed"/>'


def cases(*xml):
    return ElementTree.fromstring(
        f"<testsuites><testsuite name='S'>{''.join(xml)}</testsuite></testsuites>")


class Quick(unittest.TestCase):
    """Which tests `tests/run --quick` runs."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.program = self.folder / "t"
        self.program.write_text("one build")
        self.entry = run_ctest.Entry(
            "t", [str(self.program), f"--gtest_output=xml:{self.folder}/t.xml"], "b")

    def test_a_program_that_never_passed(self):
        self.assertTrue(self.entry.is_due())
        run_ctest.stamp_passed([self.entry], {"t": "Failed"})
        self.assertTrue(self.entry.is_due())

    def test_a_program_is_due_again_when_it_changed(self):
        run_ctest.stamp_passed([self.entry], {"t": "passed"})
        self.assertFalse(self.entry.is_due())
        self.program.write_text("another build")
        self.assertTrue(self.entry.is_due())

    def test_no_daemon_is_started(self):
        for label in ("e2e", "fuzz", "ops"):
            self.entry.labels = (label,)
            self.assertFalse(self.entry.is_due())

    def test_scripts_always_run(self):
        self.assertTrue(script("layers").is_due())


class Counting(unittest.TestCase):
    def count(self, entry, outcome, root=None):
        tally = run_ctest.count([entry], {entry.name: outcome} if outcome else {}, lambda _: root)
        return (tally.passed, tally.failed, tally.skipped)

    def test_cases_count_one_each(self):
        root = cases(PASSED_CASE, PASSED_CASE, SKIPPED_CASE, DISABLED_CASE)
        self.assertEqual(self.count(gtest("t"), "passed", root), (2, 0, 2))

    def test_failed_cases_are_not_counted_twice(self):
        root = cases(PASSED_CASE, FAILED_CASE, FAILED_CASE)
        self.assertEqual(self.count(gtest("t"), "Failed", root), (1, 2, 0))

    def test_a_crash_without_xml_is_one_failure(self):
        self.assertEqual(self.count(gtest("t"), "SEGFAULT", None), (0, 1, 0))

    def test_a_crash_after_good_cases_is_one_failure_more(self):
        self.assertEqual(self.count(gtest("t"), "Timeout", cases(PASSED_CASE)), (1, 1, 0))

    def test_a_program_that_says_it_passed_and_shows_nothing_failed(self):
        self.assertEqual(self.count(gtest("t"), "passed", None), (0, 1, 0))
        self.assertEqual(self.count(gtest("t"), "passed", cases()), (0, 1, 0))

    def test_an_entry_that_ctest_never_ran_failed(self):
        self.assertEqual(self.count(gtest("t"), None, None), (0, 1, 0))
        self.assertEqual(self.count(script("s"), None), (0, 1, 0))

    def test_a_skipped_program_is_one_skip(self):
        self.assertEqual(self.count(gtest("t"), "skipped", None), (0, 0, 1))

    def test_scripts_count_one_each(self):
        self.assertEqual(self.count(script("s"), "passed"), (1, 0, 0))
        self.assertEqual(self.count(script("s"), "skipped"), (0, 0, 1))
        self.assertEqual(self.count(script("s"), "Failed"), (0, 1, 0))

    def test_failures_name_the_case_and_the_command(self):
        tally = run_ctest.count([gtest("t")], {"t": "Failed"}, lambda _: cases(FAILED_CASE))
        self.assertEqual(tally.failures, [("t: S.Bad", "/b/t --gtest_filter='S.Bad'")])


    def test_a_case_of_a_script_is_run_again_with_its_script(self):
        entry = run_ctest.Entry("t", ["python3", "t.py", "--gtest_output=xml:/b/t.xml"], "b")
        tally = run_ctest.count([entry], {"t": "Failed"}, lambda _: cases(FAILED_CASE))
        self.assertEqual(tally.failures, [("t: S.Bad", entry.rerun)])


class JUnit(unittest.TestCase):
    def test_outcomes(self):
        root = junit(
            '<testcase name="good" status="run"/>',
            '<testcase name="bad" status="fail"><failure message="SEGFAULT"/></testcase>',
            '<testcase name="skip" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/>'
            '</testcase>',
            '<testcase name="off" status="disabled"><skipped message="Disabled"/></testcase>',
            '<testcase name="gone" status="notrun">'
            '<skipped message="Unable to find executable"/></testcase>')
        self.assertEqual(run_ctest.outcomes_of(root), {
            "good": "passed", "bad": "SEGFAULT", "skip": "skipped", "off": "skipped",
            "gone": "Unable to find executable"})

    def test_no_file_is_no_outcome(self):
        self.assertEqual(run_ctest.outcomes_of(None), {})


class Recording(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.page = pathlib.Path(self.folder.name) / "README.md"
        self.page.write_text("before\n<!-- soak -->\nold\n<!-- end of soak -->\nafter\n")

    def tearDown(self):
        self.folder.cleanup()

    def test_a_block_becomes_what_was_printed(self):
        for output in ("first  \n", "operations  12\nkilled  \\1\n"):
            with contextlib.redirect_stdout(io.StringIO()):
                record.record("soak", "tests/soak --minutes 3", output, self.page)
        text = self.page.read_text()
        self.assertRegex(text, r"^before\n<!-- soak -->\n```\ntests/soak --minutes 3 +# at .*\n"
                               r"operations  12\nkilled  \\1\n```\n<!-- end of soak -->\nafter\n$")

    def test_a_page_without_the_block_is_left_alone(self):
        before = self.page.read_text()
        with self.assertRaisesRegex(SystemExit, "no block"):
            record.record("fuzz", "tests/fuzz/run", "table", self.page)
        self.assertEqual(self.page.read_text(), before)


if __name__ == "__main__":
    unittest.main()
