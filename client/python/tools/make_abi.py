#!/usr/bin/env python3
"""Writes tessera_kv/_abi.py from the C headers: structs, enumerations and functions for ctypes.

    tools/make_abi.py            writes the file
    tools/make_abi.py --check    fails if the file is not what would be written
    tools/make_abi.py --c        prints a C program that prints the size and offsets of every struct

The headers are regular C: typedef'd structs and enumerations, and functions marked TESSERA_API.
"""

import argparse
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
HEADERS = HERE.parent.parent / "include" / "tessera"
TARGET = HERE.parent / "tessera_kv" / "_abi.py"
NAMES = ("tessera.h", "tessera_decode.h")

SCALARS = {
    "size_t": "c_size_t", "uint32_t": "c_uint32", "int32_t": "c_int32", "uint64_t": "c_uint64",
    "int64_t": "c_int64", "int": "c_int", "float": "c_float", "double": "c_double",
}
# Callbacks and text are passed as addresses: Python never runs on a thread of the library.
ADDRESSES = ("tessera_parallel_for", "tessera_text")


def read_headers():
    text = "\n".join((HEADERS / name).read_text() for name in NAMES)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def parse_enums(text):
    enums = {}
    for body, name in re.findall(r"typedef enum \w+ \{(.*?)\} (\w+);", text, re.DOTALL):
        enums[name] = re.findall(r"(\w+)\s*=\s*(-?\d+)", body)
    return enums


def parse_structs(text):
    """name -> [(type words, field, array length or None)], in the order of the header."""
    structs = {}
    for name, body, _ in re.findall(r"typedef struct (\w+) \{(.*?)\} (\w+);", text, re.DOTALL):
        fields = []
        for declaration in body.split(";"):
            declaration = " ".join(declaration.split())
            if not declaration:
                continue
            callback = re.match(r"void \(\*(\w+)\)\(", declaration)
            if callback:
                fields.append(("void*", callback.group(1), None))
                continue
            kind, field, length = re.match(r"(.*?)(\w+)(?:\[(\d+)\])?$", declaration).groups()
            fields.append((kind.replace(" ", ""), field, length))
        structs[name] = fields
    return structs


def parse_functions(text):
    functions = []
    pattern = r"TESSERA_API\s+([\w\s\*]+?)\b(tessera_\w+)\((.*?)\);"
    for result, name, arguments in re.findall(pattern, text, re.DOTALL):
        # A callback among the arguments contains commas, too.
        arguments = re.sub(r"void \(\*(\w+)\)\([^)]*\)", r"void* \1", arguments)
        functions.append((result, name, [" ".join(a.split()) for a in arguments.split(",")]))
    return functions


def ctype(kind, enums, structs):
    kind = kind.replace("const", "").replace(" ", "")
    if kind in ADDRESSES or kind.endswith("*"):
        # Strings that the library returns are read with ctypes.string_at; all others are addresses.
        return "c_char_p" if kind == "char*" else "c_void_p"
    if kind in enums:
        return "c_int"
    if kind in structs:
        return kind
    return SCALARS[kind]


def make(text):
    enums, structs, functions = parse_enums(text), parse_structs(text), parse_functions(text)
    version = re.search(r"#define TESSERA_ABI_VERSION (\d+)", text).group(1)
    out = ['"""The C interface for ctypes. tools/make_abi.py writes it; do not edit."""', "",
           "from ctypes import (", "    Structure,"]
    out += [f"    {name}," for name in sorted({"c_char", "c_char_p", "c_double", "c_float", "c_int",
                                               "c_int32", "c_int64", "c_size_t", "c_uint32",
                                               "c_uint64", "c_void_p"})]
    out += [")", "from typing import Any", "", f"ABI_VERSION = {version}", ""]
    for name, values in enums.items():
        out.append(f"# {name}")
        out += [f"{value} = {number}" for value, number in values]
        out.append("")
    for name, fields in structs.items():
        out += ["", f"class {name}(Structure):"]
        if fields[0][1] == "struct_size":
            out += ['    """Begins with its own size; the other fields are zero."""', ""]
        out.append("    _fields_ = [")
        for kind, field, length in fields:
            kind = ctype(kind, enums, structs) if kind != "char" else "c_char"
            out.append(f'        ("{field}", {kind}{f" * {length}" if length else ""}),')
        out += ["    ]"]
        out.append("")
    out += ["", "# Function -> (result, arguments).",
            "FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {"]
    for result, name, arguments in functions:
        result = result.strip()
        result = "None" if result == "void" else ctype(result, enums, structs)
        kinds = []
        for argument in arguments:
            if argument != "void":
                kinds.append(ctype(re.match(r"(.*?)\w+$", argument).group(1), enums, structs))
        line = f'    "{name}": ({result}, [{", ".join(kinds)}]),'
        if len(line) > 100:
            line = (f'    "{name}": (\n        {result},\n        [{", ".join(kinds)}],\n    ),')
        out.append(line)
    out += ["}", ""]
    return "\n".join(out)


def c_program(text):
    out = ["#include <stddef.h>", "#include <stdio.h>", '#include "tessera/tessera.h"',
           "int main(void) {"]
    for name, fields in parse_structs(text).items():
        out.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        out += [f'  printf("{name}.{field} %zu\\n", offsetof({name}, {field}));'
                for _, field, _ in fields]
    for values in parse_enums(text).values():
        out += [f'  printf("{value} %d\\n", (int){value});' for value, _ in values]
    return "\n".join(out + ["  return 0;", "}", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--c", action="store_true")
    options = parser.parse_args()
    text = read_headers()
    if options.c:
        print(c_program(text), end="")
        return 0
    wanted = make(text)
    if options.check:
        if TARGET.read_text() == wanted:
            return 0
        print(f"{TARGET} does not match the headers; run tools/make_abi.py", file=sys.stderr)
        return 1
    TARGET.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
