"""Fails on an #include or a CMake link that tests/layers.txt does not allow."""

import pathlib
import re
import sys

sys.dont_write_bytecode = True

import table
import tree

INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
CMAKE_COMMENT = re.compile(r"#[^\n]*")
CMAKE_CALL = re.compile(r"\b(tessera_library|add_library|add_executable|tessera_executable"
                        r"|target_link_libraries)\s*\(([^()]*)\)")


def is_within(folder, prefix):
    return folder == prefix or folder.startswith(prefix + "/")


class LayerCheck:
    def __init__(self, root, layers):
        self.root = pathlib.Path(root)
        self.layers = layers
        self.files = tree.walk(self.root)
        self.known = {file.as_posix() for file in self.files}
        self.violations = []
        self.includes = 0
        self.links = 0

    def complain(self, where, what):
        self.violations.append(f"{where}: {what}")

    def run(self):
        self.check_folders()
        for file in self.files:
            if file.suffix in tree.CPP:
                self.check_includes(file)
        self.check_links()
        return self.violations

    def check_folders(self):
        for folder in sorted({tree.parent(file) for file in self.files} - {""}):
            top = folder.split("/")[0]
            if top not in table.TOP and not top.startswith("."):
                self.complain(folder, "the top level is fixed, and this folder is not part of it")
            elif top in table.LAYERED and self.layers.layer_of(folder) is None:
                self.complain(folder, "unknown folder: give it a place in tests/layers.txt")

    def check_includes(self, file):
        folder = tree.parent(file)
        text = tree.read_text(self.root / file) or ""
        for number, line in enumerate(text.splitlines(), 1):
            match = INCLUDE.match(line)
            if match:
                self.includes += 1
                self.check_include(f"{file.as_posix()}:{number}", folder, *match.groups())

    def check_include(self, where, folder, quote, target):
        in_tests = is_within(folder, "tests")
        if table.PUBLIC + target in self.known:
            target = table.PUBLIC + target
        top = target.split("/")[0]
        if target.startswith("tessera/v1/"):
            if not in_tests:
                self.check_layers(where, folder, "proto/tessera", target)
        elif "/" in target and top in table.TOP:
            if target not in self.known:
                self.complain(where, f"{target} does not exist")
            elif top == "tests" and not in_tests:
                self.complain(where, f"includes {target}: only tests include tests")
            elif not in_tests:
                self.check_layers(where, folder, target.rsplit("/", 1)[0], target)
        else:
            self.check_third_party(where, folder, quote, target, in_tests)

    def check_layers(self, where, folder, target_folder, target):
        layer = self.layers.layer_of(folder)
        target_layer = self.layers.layer_of(target_folder)
        if layer is None or target_layer is None:
            return  # check_folders has said so
        if target_layer != layer:
            if target_layer not in self.layers.may_include[layer]:
                self.complain(where, f"{layer} may not include {target_layer} ({target})")
            return
        part = self.layers.part_of(folder, layer)
        target_part = self.layers.part_of(target_folder, layer)
        if part is not None and target_part is not None and target_part > part:
            self.complain(where, f"{folder} may not include {target_folder}, a higher part of "
                          f"{layer} ({target})")

    def check_third_party(self, where, folder, quote, target, in_tests):
        if quote == '"' and not target.startswith(table.THIRD_PARTY):
            self.complain(where, f'"{target}" is no path from the root of the tree')
        if is_within(folder, table.PUBLIC.rstrip("/")) and "/" in target and not target.startswith(
                table.PUBLIC_MAY_INCLUDE):
            self.complain(where, f"public headers may not include {target}: the standard library, "
                          f"{', '.join(table.PUBLIC_MAY_INCLUDE)} and each other alone")
            return
        for prefix, homes in table.ONLY_IN:
            if in_tests or not target.startswith(prefix):
                continue
            if folder == "daemon" and homes:
                continue  # main.cc wires everything
            if not any(is_within(folder, home) for home in homes):
                self.complain(where, f"{folder} may not include {target}: "
                              f"{', '.join(homes) or 'only tests'} may")

    def check_links(self):
        calls = []  # (where, folder, name, other arguments)
        homes = {}
        for file in self.files:
            folder = tree.parent(file)
            if file.name != "CMakeLists.txt" or folder.split("/")[0] not in table.LAYERED:
                continue
            text = CMAKE_COMMENT.sub("", tree.read_text(self.root / file) or "")
            for command, body in CMAKE_CALL.findall(text):
                words = body.split()
                if not words:
                    continue
                calls.append((file.as_posix(), folder, words[0], words[1:]))
                if command != "target_link_libraries":
                    homes[words[0]] = table.LIBRARY_HOME.get(words[0], folder)
        for where, folder, name, words in calls:
            layer = self.layers.layer_of(homes.get(name, folder))
            for word in words:
                target = self.layers.layer_of(homes[word]) if word in homes else None
                if target is None or layer is None:
                    continue
                self.links += 1
                if target != layer and target not in self.layers.may_include[layer]:
                    self.complain(where, f"{name} ({layer}) may not link {word} ({target})")


def main(root):
    check = LayerCheck(root, table.load())
    violations = check.run()
    for violation in violations:
        print(violation)
    print(f"{check.includes} includes and {check.links} links checked, "
          f"{len(violations)} violations")
    return 1 if violations or check.includes == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
