"""A training that is killed again and again ends like one that was not.

    python bench/survival.py          200 steps of the toy, 20 kills at random moments: about 15 minutes

Two runs of the same command: one undisturbed; one killed after a random time (by SIGKILL, so nothing can be
tidied up), resumed, and killed again. Ends with exit code 1 unless log.csv, evals.csv, the texts of every
rollout and the last weights are the same, byte for byte.
"""
import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def command(out, steps, small):
    sizes = ["--steps", str(steps), "--questions", "4", "--group-size", "4", "--every", "10", "--keep", "2"]
    return [sys.executable, "train.py", *sizes, "--valid", small, "--test", small, "--out", out]


def killed(words, out, kills, seconds, seed=0):
    """Run to the end, with so many kills: (kills, steps that were done twice)."""
    dice, count, again = random.Random(seed), 0, 0
    while True:
        run = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            timeout = dice.uniform(4, 4 + 2 * seconds / kills) if count < kills else None
            _, errors = run.communicate(timeout=timeout)
            if run.returncode:
                raise SystemExit(f"the run ended by itself: {errors[-500:]}")
            return count, again
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGKILL)
            run.wait()
            count += 1
        before = rows(out / "log.csv")
        steps = [folder.name.removeprefix("step-") for folder in out.glob("step-*")]
        saved = max((int(step) for step in steps if step.isdigit()), default=0)
        again += max(0, len(before) - 1 - saved)
        words = [sys.executable, "train.py", "--resume", out] if (out / "args.json").exists() else words
        print(f"kill {count}/{kills} at step {len(before) - 1}, goes on from {saved}", flush=True)


def rows(path):
    return path.read_text().splitlines() if path.exists() else ["step"]


def texts(out):
    """What every module wrote in every rollout, without the times."""
    rollouts = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    return [(rollout["step"], rollout["question"], rollout["reward"],
             [(word["module"], word["text"]) for word in rollout["words"]]) for rollout in rollouts]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    small = folder / "small.jsonl"
    small.write_text("".join((ROOT / "toy" / "valid.jsonl").read_text().splitlines(keepends=True)[:8]))
    start = time.perf_counter()
    one, two = folder / "undisturbed", folder / "killed"
    subprocess.run(command(one, args.steps, small), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    print(f"undisturbed: {args.steps} steps in {seconds:.0f} s", flush=True)
    count, again = killed(command(two, args.steps, small), two, args.kills, seconds)
    files = ("log.csv", "evals.csv", f"step-{args.steps}/model.safetensors")
    same = {name: (one / name).read_bytes() == (two / name).read_bytes() for name in files}
    same["rollouts"] = texts(one) == texts(two)
    seconds = time.perf_counter() - start
    print(f"killed {count} times, {again} steps done twice, {seconds:.0f} s in all; the same: {same}")
    shutil.rmtree(folder)
    raise SystemExit(not all(same.values()))


if __name__ == "__main__":
    main()
