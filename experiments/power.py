"""How many seeds does it take? And what the forks of RESULTS.md's section 8 did, seed by seed.

    python experiments/power.py

Two ways to train a planner see the same questions in the same order if their seed is the same, so the
accuracies of the two are a pair. How much the differences of such pairs vary decides how many pairs a test
needs. That is measured on the runs there are: each other way of training minus Flow-GRPO.
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
from experiments.figures import differences, read

POINTS, POWER, ALPHA = 0.05, 0.8, 0.05
MEASURED = {  # {CSV: (the column that names the planner, that of its accuracy, what is subtracted)}
    "hops-ways": ("planner", "accuracy", "Flow-GRPO"), "hops-monolith": ("run", "test_after", "flow"),
    "hops-sizes": ("run", "test_after", "width 128"), "hops-forks": ("run", "accuracy", "as it is"),
}


def seeds_needed(sd, difference=POINTS, power=POWER, alpha=ALPHA):
    """Pairs with which a two-sided t-test finds this mean difference so often; sd: of the differences.

    The formula of the normal distribution, and Guenther's correction for the sd being estimated, too."""
    z = NormalDist().inv_cdf(1 - alpha / 2)
    both = z + NormalDist().inv_cdf(power)
    return math.ceil((both * sd / difference) ** 2 + z**2 / 2)


def pairs_of(table):
    """{planner: [its accuracy minus that of Flow-GRPO, ...]} of a CSV file; {} if it is not there yet."""
    if not figures.path_of(table).exists():
        return {}
    key, column, base = MEASURED[table]
    rows = read(table)
    names = dict.fromkeys(row[key] for row in rows if row[key] != base)
    return {name: differences(rows, name, base, column, key) for name in names}


def fork_pairs():
    return pairs_of("hops-forks")


def trained_pairs():
    """The pairs of all planners that were trained, with at least two seeds."""
    found = {name: change for table in MEASURED for name, change in pairs_of(table).items()}
    return {name: change for name, change in found.items() if len(change) > 1 and name != "frozen"}


def pooled(samples):
    """The standard deviation that these samples share, whatever the mean of each."""
    squares = sum(statistics.variance(sample) * (len(sample) - 1) for sample in samples)
    return math.sqrt(squares / sum(len(sample) - 1 for sample in samples))


def result_of(change):
    return f"{figures.pm(change)} in accuracy, {len(change)} seeds (experiments/RESULTS.md, section 8)"


def write_results():
    """The line `result:` in the head of each fork that was measured; --token-mean is a flag and has none."""
    for name, change in fork_pairs().items():
        path = runs.path_of(f"forks/{name}")
        if path.exists():
            line, text = f"result: {result_of(change)}", path.read_text(encoding="utf-8")
            path.write_text(re.sub("(?m)^result: .*$", lambda _: line, text, count=1), encoding="utf-8")


def main():
    pairs = trained_pairs()
    if not pairs:
        raise SystemExit("power.py: no CSV file has pairs yet: python experiments/study.py --only hops-forks")
    for name, change in pairs.items():
        mean = statistics.fmean(change)
        print(f"{name:30} {mean:+.3f}, sd {statistics.stdev(change):.3f}, {len(change)} seeds")
    sd, forks = pooled(pairs.values()), max(1, len(fork_pairs()))
    needed, strict = seeds_needed(sd), seeds_needed(sd, alpha=ALPHA / forks)
    print(f"sd of a paired difference: {sd:.3f}. To tell {100 * POINTS:.0f} points apart with a power of "
          f"{POWER}: {needed} seeds at alpha {ALPHA}; {strict} at {ALPHA} / {forks}, for all forks at once")


if __name__ == "__main__":
    main()
