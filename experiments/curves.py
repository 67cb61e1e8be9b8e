"""Draw training runs: reward, tool-calling errors, turns, KL, clip, entropy and plan length, step by step.

    python experiments/curves.py runs/toy-seed0                  # writes runs/toy-seed0/curves.svg
    python experiments/curves.py runs/toy-seed0 runs/toy-seed1 --panels reward turns --out picture.svg

Runs whose settings differ only in their seed are drawn as one line: their mean, in a band from the lowest
seed to the highest. All other runs get lines of their own, and the legend says in what they differ, or what
--labels says. The number at the end of a line is its last value. The picture is plain SVG, written by hand:
no package is needed. It has no background, and its colours can be read on a white page and on a dark one.
"""

import argparse
import csv
import json
import math
import re
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from logbook import endings

endings.without_traceback(__name__)

from world.text import truncate

PANELS = {  # column of log.csv: title, with its unit
    "reward": "reward (mean of a step)", "errors": "tool-calling errors (share)",
    "turns": "turns a rollout", "kl": "KL to the reference (nats)", "clip": "clipped tokens (share)",
    "entropy": "entropy (nats a token)", "plan_tokens": "tokens a plan"}
# Settings that do not change what is learnt from a seed.
LEFT_OUT = "seed out resume profile keep threads every valid test code".split()
COLUMNS, WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 2, 232, 196, 44, 38, 30, 44  # panels in a row; of a panel
# One palette for all pictures, after Okabe and Ito: told apart by the colour-blind, and at least 3.6 : 1
# against white and against the dark page of GitHub. INK, for texts and axes, has at least 4.2 : 1 there.
COLOURS = "#1b7fc4", "#d55e00", "#00926a", "#b565a7"
INK = "#767b84"
DASHES = "", "6 3", "2 3", "8 3 2 3"  # of the first line, of the second ...: for print without colours
STYLE = f"""
  text {{ font: 13px Helvetica, Arial, sans-serif; fill: {INK}; }}
  .small {{ font-size: 12px; }}
  .value {{ font-size: 12px; font-weight: bold; }}
  .grid {{ stroke: {INK}; stroke-opacity: .3; }}
  .rule {{ stroke: {INK}; stroke-dasharray: 2 3; }}
  .mean {{ fill: none; stroke-width: 2; }}
  .band {{ opacity: .25; }}
"""


@dataclass
class Line:
    """The runs that are drawn as one line. settings: of args.json. rows: of each run, {step: row}."""

    settings: dict
    runs: list
    rows: list
    seeds: list
    label: str = ""

    def points(self, column):
        """[(step, lowest, mean, highest)] of the steps for which every run has a number."""
        points = []
        for step in sorted(set.intersection(*map(set, self.rows))):
            values = [float(rows[step].get(column) or "nan") for rows in self.rows]
            if all(map(math.isfinite, values)):
                points.append((step, min(values), sum(values) / len(values), max(values)))
        return points


def read(run):
    """(settings, seed, {step: row of log.csv}) of a run."""
    args, rows = Path(run) / "args.json", {}
    settings = json.loads(args.read_text()) if args.exists() else {"run": str(run)}
    with open(Path(run) / "log.csv", newline="") as file:
        for row in csv.DictReader(file):
            rows[int(row["step"])] = row
    seed = settings.get("seed")
    return {key: value for key, value in settings.items() if key not in LEFT_OUT}, seed, rows


def lines_of(runs):
    """The lines of these runs, with their labels.

    Two runs with the same settings and the same seed differ in something else, such as their code. Then the
    folder separates lines, too, without a number at its end: runs/old-0 and runs/old-1 are still one line."""
    folders = [(str(Path(run)), *read(run)) for run in runs]  # no "/" at its end
    lines = []
    for name, settings, seed, rows in folders:
        seeds = [other_seed for _, other, other_seed, _ in folders if other == settings]
        if len(set(seeds)) < len(seeds):
            settings = {"run": re.sub(r"\W*(seed)?\W*\d*$", "", name), **settings}
        line = next((line for line in lines if line.settings == settings), None)
        if line is None:
            lines.append(line := Line(settings, [], [], []))
        line.runs.append(name)
        line.rows.append(rows)
        line.seeds.append(seed)
    for line in lines:
        line.label = label(line, lines)
    return lines


def label(line, lines):
    """In what a line differs from the others: its settings, or else its folder; and its seeds."""
    differing = [key for key, value in line.settings.items()
                 if any(shown(other.settings.get(key)) != shown(value) for other in lines)]
    settings = ", ".join(f"{key} {shown(line.settings[key])}" for key in differing)
    name = line.settings.get("run") or settings
    if name:
        return f"{name} ({len(line.runs)} seeds)" if differing and len(line.runs) > 1 else name
    seeds = ", ".join(map(str, line.seeds))
    return f"mean of seeds {seeds}" if len(line.runs) > 1 else f"seed {seeds}"


def shown(value):
    """A setting in the legend: of a path its last part."""
    return " ".join(value) if isinstance(value, list) else str(value).rpartition("/")[2]


def ticks(low, high, most=5):
    """Round numbers from at most `low` to at least `high`, about `most` of them: 0, 0.2, 0.4, ..."""
    high = high if high > low else low + 1  # a column of zeros, such as the KL with --beta 0
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [n * step for n in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def text(x, y, words, anchor="start", name="small", fill=""):
    fill = f' style="fill: {fill}"' * bool(fill)
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{fill}>{escape(words)}</text>'


def panel(lines, column, x, y, levels=()):
    """One panel as SVG, its upper left corner at (x, y). levels: values at which it has a dotted line."""
    curves = [line.points(column) for line in lines]
    points = [point for curve in curves for point in curve] or [(1, 0.0, 0.0, 0.0)]
    across = ticks(0, max(step for step, *_ in points), most=4)
    highest = max([high for *_, high in points] + list(levels))
    up = ticks(min(0, *(low for _, low, _, _ in points)), highest, most=4)
    left, right, top, bottom = x + LEFT, x + WIDTH - RIGHT, y + TOP, y + HEIGHT - BOTTOM
    x_of = lambda step: left + (right - left) * step / across[-1]
    y_of = lambda value: bottom - (bottom - top) * (value - up[0]) / (up[-1] - up[0])
    path = lambda points: " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in points)

    parts = [text(left - 30, top - 12, PANELS[column], name="title")]
    for value in up:
        parts.append(f'<path class="grid" d="M{path([(0, value), (across[-1], value)])}"/>')
        parts.append(text(left - 5, y_of(value) + 4, f"{value:.4g}", "end"))
    parts += [text(x_of(step), bottom + 16, f"{step:g}", "middle") for step in across]
    parts.append(text((left + right) / 2, bottom + 32, "step", "middle"))
    for value in levels:
        parts.append(f'<path class="rule" d="M{path([(0, value), (across[-1], value)])}"/>')
    for number, (line, curve) in enumerate(zip(lines, curves)):
        colour = COLOURS[number % len(COLOURS)]
        if len(line.runs) > 1 and curve:
            lows, highs = [point[:2] for point in curve], [(step, high) for step, _, _, high in curve]
            parts.append(f'<path class="band" fill="{colour}" d="M{path(highs + lows[::-1])}Z"/>')
        means = path((step, mean) for step, _, mean, _ in curve)
        parts.append(f'<polyline {stroke(number)} points="{means}"/>')
    ends = sorted((y_of(curve[-1][2]), curve[-1], number) for number, curve in enumerate(curves) if curve)
    lowest, digits = -math.inf, max(0, 2 - math.floor(math.log10(max(-up[0], up[-1]))))
    for at, (step, _, mean, _), number in ends:  # from top to bottom, none on another
        lowest = max(at + 4, lowest + 12)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(text(x_of(step) + 4, lowest, f"{mean:.{digits}f}", name="value", fill=colour))
    return "\n".join(parts)


def stroke(number):
    """How the mean of a line is drawn. The first 16 lines differ in colour or dashes."""
    pattern = DASHES[(number + number // len(COLOURS)) % len(DASHES)]
    dashes = f' stroke-dasharray="{pattern}"' * bool(pattern)
    return f'class="mean" stroke="{COLOURS[number % len(COLOURS)]}"{dashes}'


def picture(lines, columns, rules=None):
    """The whole SVG: a legend, below it the panels. rules: {column: [(level to compare with, its words)]}."""
    rules = rules or {}
    named = [rule for column in columns for rule in rules.get(column, ())]
    width, top = WIDTH * min(COLUMNS, len(columns)) + 6, 18 * (len(lines) + len(named)) + 30
    height = top + HEIGHT * math.ceil(len(columns) / COLUMNS)
    parts = []
    for number, line in enumerate(lines):
        y = 18 + 18 * number
        parts.append(f'<path {stroke(number)} d="M12,{y - 4} 40,{y - 4}"/>')
        parts.append(text(46, y, truncate(line.label, 140), name="title"))
    for number, (value, words) in enumerate(named, len(lines)):
        y = 18 + 18 * number
        parts.append(f'<path class="rule" d="M12,{y - 4} 40,{y - 4}"/>')
        parts.append(text(46, y, f"{words}: {value:.2f}"))
    if any(len(line.runs) > 1 for line in lines):
        parts.append(text(12, top - 8, "lines: means over seeds; bands: lowest to highest seed"))
    for number, column in enumerate(columns):
        x, y = WIDTH * (number % COLUMNS), top + HEIGHT * (number // COLUMNS)
        parts.append(panel(lines, column, x, y, [value for value, _ in rules.get(column, ())]))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}">\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", help="folders of training runs")
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=list(PANELS), metavar="COLUMN",
                        help=f"what to draw: some of {', '.join(PANELS)} (default: all)")
    parser.add_argument("--labels", nargs="+", metavar="TEXT", help="words for the legend, one for each line")
    parser.add_argument("--out", help="picture to write (default: the first run's curves.svg)")
    args = parser.parse_args()
    if missing := [run for run in args.runs if not (Path(run) / "log.csv").is_file()]:
        parser.exit(2, f"curves.py: {missing[0]} holds no log.csv: give the folder of a training run\n")
    out = Path(args.out or f"{args.runs[0]}/curves.svg")
    if not args.out:
        out.unlink(missing_ok=True)  # a run that somebody else made may hold a link to another file
    try:
        lines = lines_of(args.runs)
        for line, words in zip(lines, args.labels or ()):
            line.label = words
        drawn = picture(lines, args.panels)
    except (ValueError, LookupError, TypeError, AttributeError) as why:
        parser.exit(2, f"curves.py: args.json or log.csv of a run is damaged ({why!r}): leave that run out\n")
    out.write_text(drawn, encoding="utf-8")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
