#!/usr/bin/env python3
"""Draws pictures of the dashboards from the answers of a Prometheus, without Grafana.

Needs matplotlib (Debian: python3-matplotlib). The pictures in deploy/docs were made by
tests/ops/prometheus/draw_pictures.py, which starts a daemon under load and calls this.
"""

import argparse
import json
import math
import pathlib
import re
import time
import urllib.parse
import urllib.request

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch, Rectangle

BACKGROUND, PANEL, TEXT, FAINT, GRID = "#111217", "#181b1f", "#d5d7de", "#8e929c", "#2c3036"
COLORS = {"green": "#73bf69", "yellow": "#fade2a", "red": "#f2495c", "blue": "#5794f2",
          "text": TEXT}
PALETTE = ("#73bf69", "#fade2a", "#5794f2", "#ff9830", "#f2495c", "#8ab8ff", "#b877d9", "#ffa6b0",
           "#56a64b", "#e0b400", "#3274d9", "#e02f44")
WIDTH_PX, ROW_PX, COLUMNS, DPI = 1400, 25, 24, 100
LEGEND_ENTRIES = 9


def format_value(value, unit):
    """A value as Grafana writes it: "1.5 MiB", "35 %", "2.1 ms"."""
    if value is None or math.isnan(value):
        return "-"
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit in ("bytes", "Bps"):
        suffix = "/s" if unit == "Bps" else ""
        for name in ("B", "KiB", "MiB", "GiB", "TiB"):
            if abs(value) < 1024 or name == "TiB":
                return f"{value:.3g} {name}{suffix}"
            value /= 1024
    if unit == "dtdurations":
        for name, size in (("d", 86400), ("h", 3600), ("min", 60)):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:.3g} s"
    if unit == "s":
        for name, size in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
            if abs(value) >= size or name == "µs":
                return "0 s" if value == 0 else f"{value / size:.3g} {name}"
    text = (f"{value / 1e6:.3g} M" if abs(value) >= 1e6 else
            f"{value / 1e3:.3g} K" if abs(value) >= 1e4 else f"{value:.4g}")
    return text + (" /s" if unit == "ops" else "")


def threshold_color(value, defaults):
    """The color of a value; steps are in ascending order."""
    color = "green"
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            color = step["color"]
    return COLORS[color]


class Answers:
    """Answers to queries of dashboards, with their variables filled in."""

    def __init__(self, url, job, start, end, step):
        self.url, self.job = url, job
        self.start, self.end, self.step = start, end, step

    def call(self, path, **parameters):
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?"
                                    + urllib.parse.urlencode(parameters), timeout=30) as answer:
            return json.load(answer)["data"]["result"]

    def query(self, expr, instant):
        """[(labels, [(time, value)])]"""
        if instant:
            rows = self.call("query", query=expr, time=self.end)
            return [(row["metric"], [sample(row["value"])]) for row in rows]
        rows = self.call("query_range", query=expr, start=self.start, end=self.end,
                         step=self.step)
        return [(row["metric"], [sample(one) for one in row["values"]]) for row in rows]

    def fill(self, expr):
        return (expr.replace("$__rate_interval", f"{max(4 * self.step, 4)}s")
                .replace("$job", self.job)
                .replace("$node", ".*").replace("$instance", ".*").replace("$tenant", ".*"))

    def series(self, panel):
        """[(target, legend, labels, [(time, value)])] of a panel."""
        rows = []
        for target in panel["targets"]:
            for labels, values in self.query(self.fill(target["expr"]), target["instant"]):
                rows.append((target, legend(target, labels), labels, values))
        return rows


def sample(pair):
    return float(pair[0]), float(pair[1])


def legend(target, labels):
    pattern = target["legendFormat"]
    if pattern == "__auto":
        return labels.get("__name__", "") or ", ".join(labels.values())
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), pattern).strip()


class Picture:
    """One dashboard on one figure."""

    def __init__(self, dashboard, answers):
        self.dashboard, self.answers = dashboard, answers
        rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
        self.height_px = rows * ROW_PX + 40
        self.figure = pyplot.figure(figsize=(WIDTH_PX / DPI, self.height_px / DPI), dpi=DPI,
                                    facecolor=BACKGROUND)
        self.figure.text(12 / WIDTH_PX, 1 - 24 / self.height_px, dashboard["title"], color=TEXT,
                         size=13, weight="bold")

    def box(self, place):
        """A panel's place in pixels from the top left: (x, y, width, height)."""
        unit = WIDTH_PX / COLUMNS
        return (place["x"] * unit, place["y"] * ROW_PX + 40, place["w"] * unit,
                place["h"] * ROW_PX)

    def axes(self, x, y, width, height):
        return self.figure.add_axes((x / WIDTH_PX, 1 - (y + height) / self.height_px,
                                     width / WIDTH_PX, height / self.height_px))

    def draw(self):
        kinds = {"timeseries": draw_graph, "stat": draw_stat, "bargauge": draw_bars,
                 "state-timeline": draw_states, "heatmap": draw_heatmap, "table": draw_table}
        for panel in self.dashboard["panels"]:
            x, y, width, height = self.box(panel["gridPos"])
            if panel["type"] == "row":
                self.figure.text((x + 12) / WIDTH_PX, 1 - (y + 18) / self.height_px,
                                 "▾ " + panel["title"], color=TEXT, size=10)
                continue
            frame = self.axes(x + 3, y + 3, width - 6, height - 6)
            frame.set_axis_off()
            frame.add_patch(FancyBboxPatch((0, 0), 1, 1, boxstyle="square,pad=0",
                                           facecolor=PANEL, edgecolor=GRID, linewidth=1,
                                           transform=frame.transAxes, clip_on=False))
            frame.text(8 / (width - 6), 1 - 9 / (height - 6), panel["title"], color=TEXT,
                       size=8.5, va="top", transform=frame.transAxes)
            kinds[panel["type"]](self, panel, self.answers.series(panel), x, y, width, height)

    def save(self, file):
        self.figure.savefig(file, dpi=DPI, facecolor=BACKGROUND)
        pyplot.close(self.figure)
        shrink(file)

    def no_data(self, x, y, width, height):
        self.figure.text((x + width / 2) / WIDTH_PX, 1 - (y + height / 2) / self.height_px,
                         "No data", color=FAINT, size=9, ha="center")


def shrink(file):
    """256 colors are enough for a picture of lines."""
    from PIL import Image  # a dependency of matplotlib
    Image.open(file).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file,
                                                                                 optimize=True)


def binary_ticks(top):
    """About four marks at round multiples of a power of 1,024."""
    unit = 1024 ** max(0, int(math.log(max(top, 1), 1024)))
    ideal = top / unit / 4
    size = 10 ** math.floor(math.log10(ideal)) if ideal > 0 else 1
    step = unit * next(size * factor for factor in (1, 2, 5, 10) if size * factor >= ideal)
    return [step * i for i in range(int(top / step) + 1)]


def style(axes, start, end, unit):
    axes.set_facecolor(PANEL)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.grid(color=GRID, linewidth=0.6)
    axes.tick_params(colors=FAINT, labelsize=6.5, length=0)
    axes.set_xlim(0, end - start)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
    axes.yaxis.set_major_formatter(lambda value, _: format_value(value, unit))
    axes.locator_params(axis="y", nbins=5)
    axes.locator_params(axis="x", nbins=6)


def draw_graph(picture, panel, series, x, y, width, height):
    if not series:
        return picture.no_data(x, y, width, height)
    defaults = panel["fieldConfig"]["defaults"]
    start, end = picture.answers.start, picture.answers.end
    names = sorted({name for _, name, _, _ in series})[:LEGEND_ENTRIES]
    per_line = max(1, int(width // 150))
    lines = math.ceil(len(names) / per_line)
    axes = picture.axes(x + 58, y + 30, width - 72, height - 54 - 13 * lines)
    style(axes, start, end, defaults["unit"])
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    steps = [start + i * picture.answers.step
             for i in range(int((end - start) / picture.answers.step) + 1)]
    below = [0.0] * len(steps)
    top = 0.0
    colors = {}
    for _, name, _, values in series:
        color = colors.setdefault(name, PALETTE[len(colors) % len(PALETTE)])
        known = {round(moment, 3): value for moment, value in values}
        heights = [known.get(round(step, 3), math.nan) for step in steps]
        times = [step - start for step in steps]
        if stacked:
            heights = [low + (0 if math.isnan(high) else high)
                       for low, high in zip(below, heights)]
            axes.fill_between(times, below, heights, color=color, alpha=0.35, linewidth=0)
            below = heights
        else:
            axes.fill_between(times, heights, color=color, alpha=0.07, linewidth=0)
        axes.plot(times, heights, color=color, linewidth=1)
        alone = [i for i, value in enumerate(heights) if not math.isnan(value)]
        if len(alone) == 1:
            axes.plot([times[alone[0]]], [heights[alone[0]]], ".", color=color, markersize=3)
        top = max([top, *(value for value in heights if not math.isnan(value))])
    for step in defaults["thresholds"]["steps"][1:]:
        if step["value"] <= top * 4 or defaults.get("max"):
            axes.axhline(step["value"], color=COLORS[step["color"]], linewidth=0.9,
                         linestyle="--")
            top = max(top, step["value"])
    axes.set_ylim(defaults.get("min", None), defaults.get("max") or (top * 1.1 or 1))
    if defaults["unit"] in ("bytes", "Bps"):
        axes.set_yticks(binary_ticks(axes.get_ylim()[1]))
    if "min" not in defaults and defaults.get("max"):
        lowest = min(value for _, _, _, values in series for _, value in values)
        axes.set_ylim(min(lowest, defaults["max"] * 0.99), defaults["max"] * 1.001)
    for index, name in enumerate(names):
        left = x + 12 + (index % per_line) * (width - 20) / per_line
        base = y + height - 12 - 13 * (lines - 1 - index // per_line)
        picture.figure.text(left / WIDTH_PX, 1 - base / picture.height_px, "━", size=7,
                            color=colors[name])
        room = int((width / per_line - 26) / 4.6)
        picture.figure.text((left + 14) / WIDTH_PX, 1 - base / picture.height_px,
                            name if len(name) <= room else name[:room - 1] + "…",
                            size=6.5, color=TEXT)


def draw_stat(picture, panel, series, x, y, width, height):
    if not series:
        return picture.no_data(x, y, width, height)
    defaults = panel["fieldConfig"]["defaults"]
    _, name, _, values = series[0]
    named = panel["options"]["textMode"] == "name"
    color = threshold_color(values[-1][1], defaults)
    text = name if named else format_value(values[-1][1], defaults["unit"])
    if len(values) > 1 and not named:
        axes = picture.axes(x + 4, y + height * 0.66, width - 8, height * 0.34 - 6)
        axes.set_axis_off()
        axes.fill_between([moment for moment, _ in values], [value for _, value in values],
                          color=color, alpha=0.2, linewidth=0)
        axes.plot([moment for moment, _ in values], [value for _, value in values], color=color,
                  linewidth=0.8)
    picture.figure.text((x + width / 2) / WIDTH_PX, 1 - (y + height * 0.6) / picture.height_px,
                        text, color=color, ha="center", size=10 if named else 17)


def draw_bars(picture, panel, series, x, y, width, height):
    if not series:
        return picture.no_data(x, y, width, height)
    defaults = panel["fieldConfig"]["defaults"]
    rows = sorted(series, key=lambda row: -row[3][-1][1])
    axes = picture.axes(x + 10, y + 30, width - 20, height - 42)
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(len(rows), 0)
    most = defaults.get("max") or max(row[3][-1][1] for row in rows) or 1
    for index, (_, name, _, values) in enumerate(rows):
        value = values[-1][1]
        color = threshold_color(value, defaults)
        axes.text(0.36, index + 0.5, name[-30:], color=TEXT, size=7, va="center", ha="right")
        axes.add_patch(Rectangle((0.38, index + 0.15), 0.46, 0.7, color=GRID))
        axes.add_patch(Rectangle((0.38, index + 0.15), 0.46 * max(0, min(1, value / most)), 0.7,
                                 color=color))
        axes.text(0.86, index + 0.5, format_value(value, defaults["unit"]), color=color, size=8,
                  va="center")


def draw_states(picture, panel, series, x, y, width, height):
    if not series:
        return picture.no_data(x, y, width, height)
    mapping = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    start, end = picture.answers.start, picture.answers.end
    axes = picture.axes(x + 150, y + 30, width - 165, height - 80)
    style(axes, start, end, "short")
    axes.grid(False)
    for index, (_, _, _, values) in enumerate(series):
        for moment, value in values:
            color = COLORS[mapping.get(f"{value:.0f}", {"color": "text"})["color"]]
            axes.add_patch(Rectangle((moment - start, index + 0.1), picture.answers.step, 0.8,
                                     color=color, alpha=0.8, linewidth=0))
    axes.set_ylim(max(4, len(series)), 0)
    axes.set_yticks([index + 0.5 for index in range(len(series))],
                    [name for _, name, _, _ in series])
    for index, state in enumerate(mapping.values()):
        picture.figure.text((x + 20 + 90 * index) / WIDTH_PX,
                            1 - (y + height - 14) / picture.height_px, "■ " + state["text"],
                            color=COLORS[state["color"]], size=7)


def draw_heatmap(picture, panel, series, x, y, width, height):
    bounds = sorted((float(labels["le"]), values) for _, _, labels, values in series)
    if not bounds:
        return picture.no_data(x, y, width, height)
    start, end, step = picture.answers.start, picture.answers.end, picture.answers.step
    columns = int((end - start) / step) + 1
    grid, below = [], [0.0] * columns
    for _, values in bounds:
        row = [0.0] * columns
        for moment, value in values:
            row[int(round((moment - start) / step))] = value
        grid.append([max(0.0, high - low) for high, low in zip(row, below)])
        below = row
    axes = picture.axes(x + 58, y + 30, width - 72, height - 58)
    style(axes, start, end, "short")
    axes.grid(False)
    axes.imshow(grid, aspect="auto", origin="lower", cmap="inferno", interpolation="nearest",
                extent=(0, end - start, 0, len(grid)))
    axes.set_yticks([index + 1 for index in range(len(bounds))],
                    ["+Inf" if math.isinf(bound) else format_value(bound, "s")
                     for bound, _ in bounds])


def draw_table(picture, panel, series, x, y, width, height):
    organize = panel["transformations"][1]["options"]
    headings = organize["renameByName"]
    keys = [name for name in organize["indexByName"] if name not in headings]
    units = {one["matcher"]["options"]: one["properties"][0]["value"]
             for one in panel["fieldConfig"]["overrides"]}
    rows = {}
    for target, _, labels, values in series:
        row = rows.setdefault(tuple(labels.get(key, "") for key in keys), {})
        heading = headings[f"Value #{target['refId']}"]
        row[heading] = format_value(values[-1][1], units[heading])
    columns = [*keys, *headings.values()]
    axes = picture.axes(x + 12, y + 32, width - 24, height - 44)
    axes.set_axis_off()
    axes.set_xlim(0, len(columns))
    axes.set_ylim(8, 0)
    for column, name in enumerate(columns):
        axes.text(column, 0.5, name, color="#6e9fff", size=7.5, va="center")
    for index, (key, row) in enumerate(sorted(rows.items())):
        axes.axhline(index + 1, color=GRID, linewidth=0.6)
        for column, text in enumerate([*key, *(row.get(name, "") for name in headings.values())]):
            axes.text(column, index + 1.5, text, color=TEXT, size=7.5, va="center")


def main():
    parser = argparse.ArgumentParser(description="Draws the dashboards.")
    parser.add_argument("--prometheus", required=True, help="its URL")
    parser.add_argument("--job", default=".*tessera.*", help="the jobs to show, as an expression")
    parser.add_argument("--seconds", type=int, default=3600, help="the time to show, until now")
    parser.add_argument("--step", type=int, default=15, help="seconds between two points")
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="of the pictures")
    arguments = parser.parse_args()
    end = int(time.time())
    answers = Answers(arguments.prometheus, arguments.job, end - arguments.seconds, end,
                      arguments.step)
    arguments.folder.mkdir(exist_ok=True)
    for name in ("fleet", "node", "tenant"):
        file = pathlib.Path(__file__).parent / f"{name}.json"
        picture = Picture(json.loads(file.read_text(encoding="utf-8")), answers)
        picture.draw()
        picture.save(arguments.folder / f"dashboard-{name}.png")


if __name__ == "__main__":
    main()
