"""Runs CTest in a build directory and counts individual test cases; the end of tests/run.

CTest knows programs, GoogleTest knows cases. Each GoogleTest program writes its cases to the XML
file that its command line names (deploy/cmake/targets.cmake); CTest's own JUnit file says how each
program ended. Python scripts do the same with tests/ops/cases.py. A program that CTest calls failed
and whose XML shows no failed case crashed, hung or was killed by a sanitizer: that is one failure
more, and so is a program that ran no case at all.

With --quick it leaves out tests that start a daemon, and programs that have not changed since they
last passed: a file beside the results holds the checksum of each program that passed.
"""

import argparse
import hashlib
import json
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

GTEST_OUTPUT = "--gtest_output=xml:"
SLOW = frozenset(("e2e", "fuzz", "ops"))  # labels of what --quick leaves out


@dataclass
class Tally:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list = field(default_factory=list)  # (what failed, command that runs it again)

    def fail(self, what, rerun):
        self.failed += 1
        self.failures.append((what, rerun))


@dataclass
class Entry:
    """One CTest entry."""

    name: str
    command: list
    build: str
    labels: tuple = ()

    @property
    def xml(self):
        for argument in self.command:
            if argument.startswith(GTEST_OUTPUT):
                return pathlib.Path(argument[len(GTEST_OUTPUT):])
        return None

    @property
    def stamp(self):
        """Where the checksum of the program is kept once it has passed."""
        return self.xml.with_suffix(".passed")

    def checksum(self):
        return hashlib.sha1(pathlib.Path(self.command[0]).read_bytes()).hexdigest()

    def is_due(self):
        """Whether --quick runs it: always a script, else a program that changed since it passed."""
        if SLOW.intersection(self.labels):
            return False
        if self.xml is None:
            return True
        try:
            return self.stamp.read_text() != self.checksum()
        except OSError:
            return True

    def rerun_of(self, case):
        """The command that runs one case again; of a script, the whole script."""
        is_program = len(self.command) > 1 and self.command[1].startswith("--gtest_")
        return f"{self.command[0]} --gtest_filter='{case}'" if is_program else self.rerun

    @property
    def rerun(self):
        return f"ctest --test-dir {self.build} --output-on-failure -R '^{self.name}$'"


def list_entries(build, selection):
    shown = subprocess.run(
        ["ctest", "--test-dir", build, "--show-only=json-v1", *selection],
        check=True, capture_output=True, text=True)
    return [Entry(test["name"], test.get("command", []), build, labels_of(test))
            for test in json.loads(shown.stdout)["tests"]]


def labels_of(test):
    for one in test.get("properties", ()):
        if one["name"] == "LABELS":
            return tuple(one["value"])
    return ()


def read_xml(path):
    """The root element, or None where there is no whole XML file."""
    try:
        return ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return None


def outcomes_of(junit):
    """How each CTest entry ended: name -> "passed", "skipped" or why it failed."""
    outcomes = {}
    if junit is None:
        return outcomes
    for case in junit.iter("testcase"):
        status = case.get("status")
        failure = case.find("failure")
        skipped = case.find("skipped")
        reason = skipped.get("message", "") if skipped is not None else ""
        if status == "run" and failure is None:
            outcomes[case.get("name")] = "passed"
        elif status == "disabled" or (status == "notrun" and reason.startswith("SKIP_")):
            outcomes[case.get("name")] = "skipped"
        else:
            why = failure.get("message", "") if failure is not None else reason
            outcomes[case.get("name")] = why or "failed"
    return outcomes


def count_gtest(entry, outcome, root, tally):
    before = tally.failed
    cases = 0
    for case in root.iter("testcase") if root is not None else ():
        cases += 1
        name = f"{case.get('classname')}.{case.get('name')}"
        if case.find("failure") is not None:
            tally.fail(f"{entry.name}: {name}", entry.rerun_of(name))
        elif case.get("status") == "notrun" or case.get("result") == "skipped":
            tally.skipped += 1
        else:
            tally.passed += 1
    if outcome != "passed" and tally.failed == before:
        why = "crashed or hung" if outcome == "failed" else outcome
        tally.fail(f"{entry.name}: {why}, and no case is to blame", entry.rerun)
    elif cases == 0 and tally.failed == before:
        tally.fail(f"{entry.name}: ran no test case", entry.rerun)


def count_script(entry, outcome, tally):
    if outcome == "passed":
        tally.passed += 1
    elif outcome == "skipped":
        tally.skipped += 1
    else:
        tally.fail(f"{entry.name}: {outcome}", entry.rerun)


def count(entries, outcomes, read=read_xml):
    tally = Tally()
    for entry in entries:
        outcome = outcomes.get(entry.name, "did not run")
        # A program that CTest skipped as a whole wrote no cases: it counts as one, like a script.
        if entry.xml is None or outcome == "skipped":
            count_script(entry, outcome, tally)
        else:
            count_gtest(entry, outcome, read(entry.xml), tally)
    return tally


def stamp_passed(entries, outcomes):
    for entry in entries:
        if entry.xml is not None and outcomes.get(entry.name) == "passed":
            entry.stamp.write_text(entry.checksum())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", required=True)
    parser.add_argument("--jobs", default="1")
    parser.add_argument("--filter", default="")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    selection = ["-R", options.filter] if options.filter else []

    tally = Tally()
    try:
        entries = list_entries(options.build, selection)
        if options.quick:
            entries = [entry for entry in entries if entry.is_due()]
            print("\n".join(f"  {entry.name}" for entry in entries), flush=True)
            selection = ["-R", "^(" + "|".join(entry.name for entry in entries) + ")$"]
        for entry in entries:
            if entry.xml is not None:
                entry.xml.unlink(missing_ok=True)
                entry.stamp.unlink(missing_ok=True)
        junit = pathlib.Path(options.build).resolve() / "test-results" / "ctest.junit.xml"
        junit.parent.mkdir(exist_ok=True)
        junit.unlink(missing_ok=True)
        subprocess.run(["ctest", "--test-dir", options.build, "--output-on-failure", "--parallel",
                        options.jobs, "--output-junit", str(junit), *selection], check=False)
        outcomes = outcomes_of(read_xml(junit))
        tally = count(entries, outcomes)
        stamp_passed(entries, outcomes)
        if not entries:
            print("No test was found" + (f" for --filter {options.filter}" if selection else ""))
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        tally.fail(f"running CTest: {error}", f"ctest --test-dir {options.build}")

    if tally.failures:
        print("\nFailed, with the command that runs each again:")
        for what, rerun in tally.failures:
            print(f"  {what}\n    {rerun}")
    print(f"\n{tally.passed} passed, {tally.failed} failed, {tally.skipped} skipped", flush=True)
    return 0 if tally.failed == 0 and tally.passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
