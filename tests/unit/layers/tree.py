"""The files of the source tree, as the checkers see them."""

import pathlib
import re

CPP = (".h", ".cc", ".cu", ".cuh")
CODE = CPP + (".proto", ".py", ".sh", ".cmake")


def is_skipped(name):
    """Build outputs, version control and caches: nothing that is ours."""
    return (name == "build" or name.startswith("build-") or name == "__pycache__"
            or (name.startswith(".") and name != ".ci"))


def walk(root):
    """Every file under `root`, as paths relative to it, in order."""
    root = pathlib.Path(root)
    pending, files = [root], []
    while pending:
        for path in pending.pop().iterdir():
            if path.is_symlink() or is_skipped(path.name):
                continue
            if path.is_dir():
                pending.append(path)
            else:
                files.append(path.relative_to(root))
    return sorted(files)


def read_text(path):
    """The text of a file, or None where it is not text."""
    data = path.read_bytes()
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def is_code(path, text):
    return (path.suffix in CODE or path.name == "CMakeLists.txt"
            or (path.suffix == "" and text.startswith("#!")))


# Raw strings are rare and their content is data: they go with the other literals.
_CPP_TOKENS = re.compile(
    r'R"([^(\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def strip_cpp(text):
    """C++ without comments and the content of strings; line numbers stay."""
    return _CPP_TOKENS.sub(lambda m: '""' + "\n" * m.group().count("\n"), text)


def parent(path):
    """The folder of a relative path, "" for the root."""
    folder = path.parent.as_posix()
    return "" if folder == "." else folder
