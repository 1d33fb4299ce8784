#!/usr/bin/env python3
"""Makes position independent copies of Debian's archives of Abseil, protobuf and RE2.

    tools/pic_archives.py FOLDER

Debian compiles these archives as for programs, where thread-local variables and variables of the C
library have fixed places. A shared library cannot contain the objects that use them so, or cannot
be loaded once the program runs: there is little room for such variables. They are compiled again,
with -fPIC, from Debian's own sources of the installed versions, which apt fetches and checks. All
other objects are taken as they are. FOLDER keeps the result: a second run does nothing.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

LIBRARIES = pathlib.Path("/usr/lib/x86_64-linux-gnu")
# Package with the archives, its source package, and where an object's source file is searched.
PACKAGES = (("libabsl-dev", "abseil", "libabsl_*.a"),
            ("libprotobuf-dev", "protobuf", "libprotobuf.a"),
            ("libre2-dev", "re2", "libre2.a"))
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fstack-protector-strong"]
MIRRORS = ("http://deb.debian.org/debian bookworm main",
           "http://deb.debian.org/debian bookworm-updates main",
           "http://deb.debian.org/debian-security bookworm-security main")


def run(*command, **options):
    return subprocess.run([str(word) for word in command], check=True, text=True,
                          stdout=subprocess.PIPE, **options).stdout


# A thread-local variable, or one of the C library, at a fixed place.
FIXED = re.compile(r" R_X86_64_(GOT)?TPOFF(32)? | R_X86_64_PC32 .* (stderr|stdout|stdin|environ) ")
# Folders of the sources that these libraries are not made of; `.pc` has unpatched copies.
ELSEWHERE = {".pc", "compiler", "conformance", "csharp", "java", "objectivec", "php", "python"}


def fixed_objects(archive):
    """The members that a shared library cannot contain."""
    found, member = set(), ""
    for line in run("readelf", "-rW", archive, stderr=subprocess.DEVNULL).splitlines():
        if line.startswith("File:"):
            member = re.search(r"\((.*)\)", line).group(1)
        elif FIXED.search(line):
            found.add(member)
    return sorted(found)


def fetch(source, version, folder):
    """Debian's source of a package, with its patches."""
    (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
    signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    (folder / "sources.list").write_text("".join(f"deb-src {signed} {m}\n" for m in MIRRORS))
    apt = ["apt-get", "-q", "-o", f"Dir::Etc::SourceList={folder}/sources.list",
           "-o", "Dir::Etc::SourceParts=/dev/null", "-o", f"Dir::State::Lists={folder}/lists",
           "-o", "APT::Sandbox::User=root"]
    run(*apt, "update", cwd=folder)
    run(*apt, "source", "--download-only", f"{source}={version}", cwd=folder)
    (description,) = folder.glob(f"{source}_*.dsc")
    run("dpkg-source", "-x", description, folder / source, cwd=folder)
    return folder / source


def compile_member(member, tree, target):
    """Compiles the source file of an archive's member."""
    stem = re.sub(r"(\.cc)?\.o$", ".cc", member)
    found = [path for path in tree.rglob(stem) if not ELSEWHERE.intersection(path.parts)]
    if len(found) != 1:
        raise SystemExit(f"{member}: expected is one {stem} in {tree}, found are {found}")
    includes = [tree / "src", tree] if tree.name == "protobuf" else [tree]
    run("g++", *FLAGS, *[f"-I{path}" for path in includes], "-c", found[0], "-o", target)


def main(folder):
    target = pathlib.Path(folder).resolve()
    if (target / "complete").exists():
        return
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        for package, source, pattern in PACKAGES:
            version = run("dpkg-query", "-W", "-f=${source:Version}", package)
            tree = None
            for archive in sorted(LIBRARIES.glob(pattern)):
                members = fixed_objects(archive)
                if not members:
                    continue
                tree = tree or fetch(source, version, pathlib.Path(temporary))
                shutil.copy(archive, target)
                made = [pathlib.Path(temporary) / member for member in members]
                with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                    list(pool.map(lambda path, tree=tree: compile_member(path.name, tree, path),
                                  made))
                run("ar", "r", target / archive.name, *made, stderr=subprocess.DEVNULL)
                print(f"{archive.name}: compiled again: {' '.join(members)}", flush=True)
    (target / "complete").touch()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
