#!/usr/bin/env python3
"""Draws deploy/docs/dashboard-*.png: a daemon works for a while, then draw.py asks Prometheus.

Usage: draw_pictures.py --binaries=FOLDER [--seconds=N] [--python=PYTHON with matplotlib]
"""

import argparse
import math
import pathlib
import subprocess
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import cases  # noqa: E402
import sources  # noqa: E402
from load import Load  # noqa: E402
from processes import until  # noqa: E402
from stage import Stage  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description="Draws the dashboards of a daemon under load.")
    parser.add_argument("--binaries", required=True)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    stage = Stage(arguments.binaries, cases.tool("prometheus"))
    try:
        load = Load(stage)
        while time.time() < stage.started + arguments.seconds:
            load.run_round()
        load.decode()
        until("Prometheus sees it", 20, lambda: stage.prometheus.instant(
            'tessera_sequences{state="decoding"} > 0'))
        subprocess.run([arguments.python, sources.GRAFANA / "draw.py",
                        f"--prometheus={stage.prometheus.url}", "--job=tesserad",
                        f"--seconds={math.ceil(time.time() - stage.started)}", "--step=1",
                        f"--folder={sources.DOCS}"], check=True)
    finally:
        stage.close()


if __name__ == "__main__":
    main()
