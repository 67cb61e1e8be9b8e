"""Remake the paper's analyses at toy scale: the runs, tables and pictures of RESULTS.md, sections 1 to 8.

With --tables also those of README.md, and docs/speed.md's tables beside TRL and beside the plain way.

    pip install matplotlib
    python experiments/study.py --tables                    tables and pictures from results/*.csv, no runs
    python experiments/study.py --only hops-tests hops-ways     some analyses, with their runs
    python experiments/study.py --only hops-forks --seeds 9     with other than the usual number of seeds
    python experiments/study.py                             everything

An analysis is a generator. It first yields the runs that it needs: commands of this repository (train.py,
solve.py, toy/make.py, or a script beside this one), some in a copy of the code with a line or two changed
(edits/, forks/, runs.py). When they are finished, it yields its CSV files. The analyses are in planning.py,
but for README's, below; the tables and pictures that are made from the CSV files are in pages.py.
"""

import argparse
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from logbook import endings

endings.without_traceback(__name__)

from experiments import figures, pages, planning
from experiments.runs import ROOT, Run, make_all, rows_of


def toy(seeds=3):
    """README's table and curve: the default run, as it is."""
    command = lambda seed: ("train.py", "--seed", str(seed), "--out", "{out}")
    runs = {seed: Run(f"toy-seed{seed}", command(seed), rollouts=60 * 128) for seed in range(seeds)}
    yield runs.values()
    columns = ("step", "reward", "errors", "turns")
    yield "toy", [{"seed": seed} | {column: row[column] for column in columns}
                  for seed, run in runs.items() for row in rows_of(run.folder / "log.csv")]
    rows = []
    for seed, run in runs.items():
        tests = [row for row in rows_of(run.folder / "evals.csv") if row["questions"] == "test"]
        for when, row in (("before", tests[0]), ("after", tests[-1])):
            rows.append({"seed": seed, "when": when, "questions": row["n"]}
                        | {column: row[column] for column in ("accuracy", "errors", "turns")})
    yield "toy-tests", rows


ANALYSES = {"toy": toy} | planning.ANALYSES


def make_pages(names):
    """Fill RESULTS.md, README.md and the heads of the forks from results/*.csv, and draw the pictures."""
    for name in (name for name in names if not figures.path_of(name).exists()):
        print(f"{name}: not measured yet, so there is no table: study.py --only {name}")
    names = [name for name in names if figures.path_of(name).exists()]
    for name in names:
        if name == "toy":
            figures.fill("toy-seeds", pages.toy_table())
        else:
            figures.fill(name, pages.block(name))
    pages.write_results()
    if find_spec("matplotlib") is None:
        print("The tables are made. The pictures need matplotlib, which the project does not: "
              "pip install matplotlib")
        return
    import matplotlib.pyplot as plt

    for name in names:
        pages.toy_picture(plt) if name == "toy" else pages.draw(plt, name)
    pages.smollm_picture(plt)  # its rows are smollm.py's


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    add = parser.add_argument
    add("--only", nargs="+", choices=ANALYSES, metavar="NAME", help="some analyses")
    add("--seeds", type=int, help="seeds of each analysis; None: five, of some three (planning.py)")
    add("--workers", type=int, default=2, help="runs at a time, a thread each")
    add("--tables", action="store_true", help="no runs: only tables and pictures, from results/*.csv")
    args = parser.parse_args()
    if not 2 <= (args.seeds or 2) <= 20 or args.workers < 1:
        parser.exit(2, "study.py: --seeds from 2 (one seed has no interval) to 20, --workers from 1\n")
    if args.tables:
        make_pages(args.only or list(ANALYSES))
        if not args.only:
            figures.fill("two-cpus", pages.two_cpus_table())
            figures.fill("mixtures", pages.mixtures_table())
            for beside in ("TRL", "plain"):  # from speed.csv, which bench/speed.py writes
                figures.fill(f"speed-{beside}", pages.speed_table(beside), [ROOT / "docs" / "speed.md"])
        return
    only = args.only or list(ANALYSES)
    if find_spec("matplotlib") is None:  # before the runs, which take hours
        parser.exit(2, "study.py: needs matplotlib, which the project does not: pip install matplotlib\n")
    seeds = {"seeds": args.seeds} if args.seeds else {}
    analyses = [ANALYSES[name](**seeds) for name in only]
    make_all([run for analysis in analyses for run in next(analysis)], args.workers)
    for name, rows in chain.from_iterable(analyses):
        figures.write(figures.path_of(name), rows)
    make_pages(only)


if __name__ == "__main__":
    main()
