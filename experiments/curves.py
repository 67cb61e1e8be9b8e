"""Draw training runs: reward, tool-calling errors, turns, KL, clip, entropy and plan length, step by step.

    python experiments/curves.py runs/toy-seed0                  # writes runs/toy-seed0/curves.svg
    python experiments/curves.py runs/toy-seed0 runs/toy-seed1 --panels reward turns --out picture.svg

Runs whose settings differ only in their seed are drawn as one line: their mean, in a band from the lowest
seed to the highest. All other runs get lines of their own, and the legend says in what they differ. The
picture is plain SVG, written by hand: no package is needed.
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

PANELS = {  # column of log.csv: title
    "reward": "reward", "errors": "tool-calling errors", "turns": "turns a rollout",
    "kl": "KL to the reference", "clip": "clipped tokens", "entropy": "entropy",
    "plan_tokens": "tokens a plan"}
# Settings that do not change what is learnt from a seed.
LEFT_OUT = "seed out resume profile keep threads every valid test code".split()
COLUMNS, WIDTH, HEIGHT, LEFT, TOP = 4, 228, 176, 44, 30  # panels in a row; of a panel; margins in it
COLOURS = "#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#7d6608"
STYLE = """
  text { font: 12px Helvetica, Arial, sans-serif; fill: #1f2328; }
  .small { font-size: 10.5px; fill: #59636e; }
  .page { fill: #fff; }
  .grid { stroke: #d1d9e0; }
  .mean { fill: none; stroke-width: 1.8; }
  .band { opacity: .22; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .small { fill: #9198a1; } .page { fill: #0d1117; } .grid { stroke: #3d444d; } }
"""


@dataclass
class Line:
    """The runs that are drawn as one line. settings: of args.json. rows: of each run, {step: row}."""

    settings: dict
    runs: list
    rows: list
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
            lines.append(line := Line(settings, [], []))
        line.runs.append(name)
        line.rows.append(rows)
    for line in lines:
        line.label = label(line, lines)
    return lines


def label(line, lines):
    """In what a line differs from the others: its folder, or else its settings; and its number of seeds."""
    differing = [key for key, value in line.settings.items()
                 if any(shown(other.settings.get(key)) != shown(value) for other in lines)]
    settings = ", ".join(f"{key} {shown(line.settings[key])}" for key in differing)
    name = line.settings.get("run") or settings or ", ".join(map(shown, line.runs))
    return f"{name} ({len(line.runs)} seeds)" if differing and len(line.runs) > 1 else name


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


def text(x, y, words, anchor="start", name="small"):
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def panel(lines, column, x, y):
    """One panel as SVG, its upper left corner at (x, y)."""
    curves = [line.points(column) for line in lines]
    points = [point for curve in curves for point in curve] or [(1, 0.0, 0.0, 0.0)]
    across = ticks(0, max(step for step, *_ in points))
    up = ticks(min(0, *(low for _, low, _, _ in points)), max(high for *_, high in points), most=4)
    left, right, top, bottom = x + LEFT, x + WIDTH - 14, y + TOP, y + HEIGHT - 26
    x_of = lambda step: left + (right - left) * step / across[-1]
    y_of = lambda value: bottom - (bottom - top) * (value - up[0]) / (up[-1] - up[0])
    path = lambda points: " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in points)

    parts = [text(left, top - 12, PANELS[column], name="title")]
    for value in up:
        parts.append(f'<path class="grid" d="M{path([(0, value), (across[-1], value)])}"/>')
        parts.append(text(left - 5, y_of(value) + 3.5, f"{value:.4g}", "end"))
    parts += [text(x_of(step), bottom + 14, f"{step:g}", "middle") for step in across]
    for number, (line, curve) in enumerate(zip(lines, curves)):
        if len(line.runs) > 1 and curve:
            lows, highs = [point[:2] for point in curve], [(step, high) for step, _, _, high in curve]
            colour = COLOURS[number % len(COLOURS)]
            parts.append(f'<path class="band" fill="{colour}" d="M{path(highs + lows[::-1])}Z"/>')
        means = path((step, mean) for step, _, mean, _ in curve)
        parts.append(f'<polyline {stroke(number)} points="{means}"/>')
    return "\n".join(parts)


def stroke(number):
    """How the mean of a line is drawn. After the last colour the colours begin again, with dashes."""
    dashes = ' stroke-dasharray="5 3"' * (number >= len(COLOURS))
    return f'class="mean" stroke="{COLOURS[number % len(COLOURS)]}"{dashes}'


def picture(lines, columns):
    """The whole SVG: a legend, below it the panels."""
    width, top = WIDTH * min(COLUMNS, len(columns)) + 10, 16 * len(lines) + 26
    height = top + HEIGHT * math.ceil(len(columns) / COLUMNS)
    parts = [f'<rect class="page" width="{width}" height="{height}"/>']
    for number, line in enumerate(lines):
        y = 18 + 16 * number
        parts.append(f'<path {stroke(number)} d="M12,{y - 4} 34,{y - 4}"/>')
        parts.append(text(40, y, truncate(line.label, 140), name="title"))
    if any(len(line.runs) > 1 for line in lines):
        parts.append(text(12, top - 8, "lines: means over seeds; bands: from the lowest seed to the highest"))
    for number, column in enumerate(columns):
        parts.append(panel(lines, column, WIDTH * (number % COLUMNS), top + HEIGHT * (number // COLUMNS)))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}">\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", help="folders of training runs")
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=list(PANELS), metavar="COLUMN",
                        help=f"what to draw: some of {', '.join(PANELS)} (default: all)")
    parser.add_argument("--out", help="picture to write (default: the first run's curves.svg)")
    args = parser.parse_args()
    if missing := [run for run in args.runs if not (Path(run) / "log.csv").is_file()]:
        parser.exit(2, f"curves.py: {missing[0]} holds no log.csv: give the folder of a training run\n")
    out = Path(args.out or f"{args.runs[0]}/curves.svg")
    if not args.out:
        out.unlink(missing_ok=True)  # a run that somebody else made may hold a link to another file
    try:
        drawn = picture(lines_of(args.runs), args.panels)
    except (ValueError, LookupError, TypeError, AttributeError) as why:
        parser.exit(2, f"curves.py: args.json or log.csv of a run is damaged ({why!r}): leave that run out\n")
    out.write_text(drawn, encoding="utf-8")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
