"""Fails on what the house style forbids and a compiler does not see."""

import collections
import pathlib
import re
import sys

sys.dont_write_bytecode = True

import table
import tree

MAX_COLUMNS = 100
MAX_LINES = 500
MAX_FILES = 30  # of source, in one folder

# Written so that this file does not match itself.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" "DO", "FIX" "ME", "X" "XX")) + r")\b")
BUILD_MACHINE = re.compile(r"(?<![\w.$}])/(wo" r"rk|fa" r"rm|ro" r"ot)/|\.lib" r"rary\b")
GETENV = re.compile(r"\b(secure_)?getenv\s*\(")
SLEEP = re.compile(r"\b(sleep_for|sleep_until|usleep|nanosleep|clock_nanosleep)\b|\bsleep\s*\(")
THROW = re.compile(r"\bthrow\b")
USING_NAMESPACE = re.compile(r"^\s*using\s+namespace\b")

# Folders that are explained by the README above them.
NO_README = (
    re.compile(r"proto/tessera"),       # only a part of the path to v1
    re.compile(r"tests/unit"),          # mirrors the source, which has the READMEs
    re.compile(r"tests/\w+/.*"),        # the README of tests/NAME explains its sub-folders
    re.compile(r"helm/.*/templates(/.*)?"),  # Helm renders whatever is in there
    re.compile(r"helm/.*/files(/.*)?"),      # made by helm/generate
    re.compile(r"\.ci"),
)


class Exceptions:
    """Lines of "rule path: reason"; each must be needed, or it is a violation itself."""

    def __init__(self, root, file):
        self.file = file
        self.reasons = {}
        self.used = set()
        self.malformed = []
        text = tree.read_text(root / file) if (root / file).exists() else ""
        for number, line in enumerate(text.splitlines(), 1):
            line = line.split("#")[0].strip()
            match = re.fullmatch(r"(\S+) (\S+): (\S.*)", line)
            if match:
                self.reasons[match[1], match[2]] = match[3]
            elif line:
                self.malformed.append(f"{file}:{number}: expected \"rule path: reason\"")

    def allow(self, rule, path):
        if (rule, path) not in self.reasons:
            return False
        self.used.add((rule, path))
        return True

    def violations(self):
        unused = set(self.reasons) - self.used
        return self.malformed + [f"{self.file}: \"{rule} {path}\" is not needed any more"
                                 for rule, path in sorted(unused)]


class TidyCheck:
    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.files = tree.walk(self.root)
        self.exceptions = Exceptions(self.root, "tests/unit/layers/exceptions.txt")
        self.layers = table.load()
        self.found = []

    def complain(self, rule, path, what, line=None):
        if not self.exceptions.allow(rule, path):
            place = f"{path}:{line}" if line else path
            self.found.append(f"{place}: {what} [{rule}]")

    def run(self):
        for file in self.files:
            text = tree.read_text(self.root / file)
            if text is None:
                continue
            path = file.as_posix()
            self.check_text(path, text)
            if tree.is_code(file, text):
                self.check_code(path, text)
            if file.suffix in tree.CPP:
                self.check_cpp(path, file, text)
            elif path.startswith("tests/") and tree.is_code(file, text):
                self.search("sleep", path, text, SLEEP, "tests do not sleep")
            if file.suffix == ".supp":
                self.check_suppressions(path, text)
        self.check_folder_sizes()
        self.check_readmes()
        return self.found + self.exceptions.violations()

    def search(self, rule, path, text, pattern, what):
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                self.complain(rule, path, what, number)

    def check_text(self, path, text):
        self.search("unfinished", path, text, UNFINISHED, "a mark of unfinished work")
        self.search("machine", path, text, BUILD_MACHINE, "a path of the machine it was written on")

    def check_code(self, path, text):
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS:
                self.complain("columns", path, f"{len(line)} columns, the limit is {MAX_COLUMNS}",
                              number)
            if line != line.rstrip():
                self.complain("space", path, "white space at the end of the line", number)
        if len(lines) > MAX_LINES:
            self.complain("lines", path, f"{len(lines)} lines, the limit is {MAX_LINES}")

    def check_cpp(self, path, file, text):
        code = tree.strip_cpp(text)
        if not path.startswith("daemon/config/"):
            self.search("getenv", path, code, GETENV, "only daemon/config reads the environment")
        if path.startswith("tests/"):
            self.search("sleep", path, code, SLEEP, "tests do not sleep")
        self.search("throw", path, code, THROW, "no exceptions")
        if file.suffix in (".h", ".cuh"):
            self.search("namespace", path, code, USING_NAMESPACE, "using namespace in a header")
            if "#pragma once" not in code:
                self.complain("pragma", path, "a header without #pragma once")

    def check_suppressions(self, path, text):
        for number, line in enumerate(text.splitlines(), 1):
            if not line.startswith("#") and "tessera" in line.lower():
                self.complain("suppression", path, "suppresses reports about our own code", number)

    def check_folder_sizes(self):
        sizes = collections.Counter(tree.parent(file) for file in self.files
                                    if file.suffix in tree.CPP)
        for folder, size in sorted(sizes.items()):
            if size > MAX_FILES:
                self.complain("files", folder, f"{size} source files in one folder, the limit is "
                              f"{MAX_FILES}: give its parts folders of their own")

    def check_readmes(self):
        folders = set()
        for file in self.files:
            for folder in file.parents:
                folders.add(folder.as_posix())
        for folder in sorted(folders):
            if any(pattern.fullmatch(folder) for pattern in NO_README):
                continue
            if folder.split("/")[0] in table.LAYERED and self.layers.layer_of(folder) != folder:
                continue  # a part of a layer
            if not (self.root / folder / "README.md").exists():
                self.complain("readme", folder, "a folder without a README.md")


def main(root):
    check = TidyCheck(root)
    violations = check.run()
    for violation in violations:
        print(violation)
    print(f"{len(check.files)} files checked, {len(violations)} violations")
    return 1 if violations or not check.files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
