#!/usr/bin/env python3
"""Writes fleet.json, node.json and tenant.json from fleet.py, node.py and tenant.py.

Usage: generate.py [--check] [--folder=FOLDER]
  --check          write nothing; exit with 1 if a file differs from what would be written
  --folder=FOLDER  where the files are (default: the folder of this script)
"""

import argparse
import json
import pathlib
import sys

sys.dont_write_bytecode = True

import fleet
import node
import tenant

DASHBOARDS = (fleet, node, tenant)


def files():
    return {f"{module.__name__}.json":
            json.dumps(module.dashboard().to_json(), indent=1, ensure_ascii=False) + "\n"
            for module in DASHBOARDS}


def main():
    parser = argparse.ArgumentParser(description="Writes the dashboards.")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    arguments = parser.parse_args()
    stale = []
    for name, text in files().items():
        file = arguments.folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not arguments.check:
                file.write_text(text, encoding="utf-8")
    if arguments.check and stale:
        print(f"{', '.join(stale)}: differs from its source; run deploy/grafana/generate.py",
              file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
