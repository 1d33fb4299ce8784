#!/usr/bin/env python3
"""Writes the output of a run into tests/README.md, between the markers of its block.

A block is  <!-- NAME -->  ...  <!-- end of NAME -->. Its new content is the command, the commit and
the output.
"""

import pathlib
import re
import subprocess
import sys

README = pathlib.Path(__file__).resolve().parent / "README.md"


def commit():
    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=README.parent, capture_output=True,
                              text=True, check=False).stdout.strip()
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!README.md")
    return git("rev-parse", "--short", "HEAD") + (", with changes" if changed else "")


def record(name, command, output, readme=README):
    text = readme.read_text()
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if len(block.findall(text)) != 1:
        sys.exit(f"tests/record.py: {readme} has no block \"{name}\", or several")
    lines = "\n".join(line.rstrip() for line in output.strip("\n").split("\n"))
    body = f"```\n{command}        # at {commit()}\n{lines}\n```\n"
    readme.write_text(block.sub(lambda found: found[1] + body + found[2], text))
    print(f"recorded in {readme}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] in ("-h", "--help"):
        sys.exit("Usage: tests/record.py NAME COMMAND < OUTPUT\n\n" + __doc__)
    record(sys.argv[1], sys.argv[2], sys.stdin.read())
