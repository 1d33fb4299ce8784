#!/usr/bin/env python3
"""Writes unicode_ranges.inc: the ranges of Unicode's letters (L) and numbers (N)."""

import pathlib
import sys
import unicodedata


def ranges(category):
    found = []
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code))[0] != category:
            continue
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return found


def table(name, category):
    lines = [f"constexpr Range {name}[] = {{"]
    line = "   "
    for first, last in ranges(category):
        item = f" {{{first:#x}, {last:#x}}},"
        if len(line) + len(item) > 100:
            lines.append(line)
            line = "   "
        line += item
    return "\n".join([*lines, line, "};\n"])


pathlib.Path(__file__).with_name("unicode_ranges.inc").write_text(
    f"// Unicode {unicodedata.unidata_version}. Written by make_unicode.py; do not edit.\n"
    + table("kLetters", "L") + table("kNumbers", "N"))
