"""How many seeds does it take? And what the forks of section 8 did, seed by seed.

    python experiments/power.py

Each seed trains the planner as it is and the fork: the same questions in the same order, and the accuracies
of the two are a pair. How much the differences of such pairs vary decides how many pairs a test needs. That
is measured on the runs there are: Flow-GRPO beside each other planner that was trained and tested with it.
"""

import math
import re
import statistics
import sys
from pathlib import Path
from statistics import NormalDist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from logbook import endings

endings.without_traceback(__name__)

from experiments import figures, runs
from rewards.metrics import markdown

POINTS, POWER, ALPHA = 0.05, 0.8, 0.05
TRAINED = ("SFT, perfect planner's traces", "SFT, its own successes", "monolith", "right verdicts",
           "width 64")


def seeds_needed(sd, difference=POINTS, power=POWER, alpha=ALPHA):
    """Pairs with which a two-sided t-test finds this mean difference so often; sd: of the differences.

    The formula of the normal distribution, and Guenther's correction for the sd being estimated, too."""
    z = NormalDist().inv_cdf(1 - alpha / 2)
    both = z + NormalDist().inv_cdf(power)
    return math.ceil((both * sd / difference) ** 2 + z**2 / 2)


def differences(rows, name, base, column, key="run"):
    """name's value minus base's, for each seed that both have."""
    values = {(row[key], row["seed"]): float(row[column]) for row in rows}
    seeds = [seed for run, seed in values if run == base and (name, seed) in values]
    return [values[name, seed] - values[base, seed] for seed in seeds]


def past_pairs():
    """(planner, [its accuracy minus Flow-GRPO's, ...]) of the runs of sections 1, 6 and 7."""
    tables = [("ways", "planner", "accuracy", "Flow-GRPO"), ("monolith", "run", "test_after", "Flow-GRPO"),
              ("sizes", "run", "test_after", "width 128")]
    for table, key, column, base in tables:
        rows = figures.read(table)
        for name in dict.fromkeys(row[key] for row in rows):
            if name in TRAINED:
                yield name, differences(rows, name, base, column, key)


def fork_pairs(rows):
    """(fork, [its accuracy minus that of the planner as it is, ...]), in the rows' order."""
    for name in dict.fromkeys(row["run"] for row in rows if row["run"] != "as it is"):
        yield name, differences(rows, name, "as it is", "accuracy")


def pooled(samples):
    """The standard deviation that these samples share, whatever the mean of each."""
    squares = sum(statistics.variance(sample) * (len(sample) - 1) for sample in samples)
    return math.sqrt(squares / sum(len(sample) - 1 for sample in samples))


def forks_table():
    """Section 8's table of the forks."""
    rows = figures.read("forks")
    changes = dict(fork_pairs(rows))
    ps = [figures.student_p(change) for change in changes.values()]
    tests = {name: (p, adjusted) for name, p, adjusted in zip(changes, ps, figures.holm(ps))}
    base = statistics.fmean(figures.gather(rows, "run", "accuracy")["as it is"])
    lines = [["fork", f"accuracy, minus {base:.3f}", "p", "p, Holm"]]
    for name, change in changes.items():
        lines.append([name, figures.pm(change), *map(figures.shown_p, tests[name])])
    return markdown(lines)


def forks_picture(plt):
    changes = dict(fork_pairs(figures.read("forks")))
    label = "accuracy on the test questions,\nminus that of the planner as it is"
    figures.differences_picture(plt, "forks", changes, label)


def write_results():
    """The line `result:` in the head of each fork's diff."""
    for name, change in fork_pairs(figures.read("forks")):
        write_result(name, result_of(change))


def result_of(change):
    return f"{figures.pm(change)} in accuracy, {len(change)} seeds (experiments/RESULTS.md, section 8)"


def write_result(name, result):
    """Put it into the head of the diff; --token-mean is a flag and has none."""
    path = runs.path_of(f"forks/{name}")
    if path.exists():
        before = path.read_text(encoding="utf-8")
        after = re.sub("(?m)^result: .*$", lambda _: f"result: {result}", before, count=1)
        path.write_text(after, encoding="utf-8")


def show(pairs):
    """Print how much these samples of differences vary, and how many pairs they ask for."""
    for name, change in pairs:
        mean = statistics.fmean(change)
        print(f"{name:30} {mean:+.3f}, sd {statistics.stdev(change):.3f}, {len(change)} seeds")
    sd = pooled([change for _, change in pairs])
    needed, strict = seeds_needed(sd), seeds_needed(sd, alpha=ALPHA / 11)
    print(f"sd of a paired difference: {sd:.3f}. To tell {100 * POINTS:.0f} points apart with a power of "
          f"{POWER}: {needed} seeds at alpha {ALPHA}; {strict} at {ALPHA} / 11, for eleven forks at once\n")


def main():
    show(list(past_pairs()))
    if (figures.RESULTS / "forks.csv").exists():
        show(list(fork_pairs(figures.read("forks"))))


if __name__ == "__main__":
    main()
