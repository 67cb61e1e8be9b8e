"""Draw training runs: reward and tool-calling errors by step, one thin line a seed and their mean.

    pip install matplotlib
    python experiments/curve.py runs/toy-seed0                  # writes runs/toy-seed0/curve.svg
    python experiments/curve.py runs/toy-seed0 runs/toy-seed1 runs/toy-seed2 --out experiments/curve.svg
"""

import argparse
import csv
from pathlib import Path


def columns(run, *names):
    """log.csv of a run as lists of floats, one per name."""
    with open(Path(run) / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [[float(row[name]) for row in rows] for name in names]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", help="folders of runs with the same number of steps")
    parser.add_argument("--out", help="picture to write, .svg or .png (default: the first run's curve.svg)")
    args = parser.parse_args()
    args.out = args.out or f"{args.runs[0]}/curve.svg"
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        parser.exit(2, "curve.py: needs matplotlib, which the project does not: pip install matplotlib\n")

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"svg.hashsalt": "nano-agentflow"})
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.9), constrained_layout=True)
    panels = [("reward", "reward"), ("errors", "tool-calling errors"), ("turns", "turns per rollout")]
    for axis, (name, label) in zip(axes, panels):
        curves = [columns(run, "step", name) for run in args.runs]
        for steps, values in curves:
            axis.plot(steps, values, color="0.7", linewidth=0.8)
        mean = [sum(values) / len(values) for values in zip(*(values for _, values in curves))]
        axis.plot(curves[0][0], mean, color="black", linewidth=1.8)
        axis.set_xlabel("step")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0, top=1 if name == "reward" else None)
    figure.suptitle(f"The toy under Flow-GRPO: {len(args.runs)} seeds (grey) and their mean", fontsize=10)
    figure.savefig(args.out, metadata={"Date": None} if args.out.endswith(".svg") else None, dpi=150)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
