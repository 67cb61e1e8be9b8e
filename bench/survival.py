"""A training that is killed again and again ends like one that was not.

    python bench/survival.py               200 steps of the toy, SIGKILL 20 times at random moments: about 15 minutes

Two runs of the same command: one undisturbed; one killed (SIGKILL: nothing can be tidied up) after a random time, resumed, killed again.
Ends with exit code 1 unless log.csv, evals.csv, the words of every rollout and the last weights are the same, byte for byte.
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
    return [sys.executable, "train.py", "--steps", str(steps), "--questions", "4", "--group-size", "4", "--every", "10", "--keep", "2",
            "--valid", str(small), "--test", str(small), "--out", str(out)]


def killed(words, out, kills, seconds, seed=0):
    """Run to the end, with so many kills on the way: how many there were, and how many steps were done twice."""
    dice, done, again = random.Random(seed), 0, 0
    while True:
        run = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _, said = run.communicate(timeout=dice.uniform(4, 4 + 2 * seconds / kills) if done < kills else None)
            if run.returncode:
                raise SystemExit(f"the run ended by itself: {said[-500:]}")
            return done, again
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGKILL)
            run.wait()
            done += 1
        before = rows(out / "log.csv")
        saved = max((int(folder.name[5:]) for folder in out.glob("step-*") if folder.name[5:].isdigit()), default=0)
        again += max(0, len(before) - 1 - saved)
        words = [sys.executable, "train.py", "--resume", str(out)] if (out / "args.json").exists() else words
        print(f"kill {done}/{kills} at step {len(before) - 1}, goes on from {saved}", flush=True)


def rows(path):
    return path.read_text().splitlines() if path.exists() else ["step"]


def said(out):
    """Every word of every rollout, without the times."""
    flows = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    return [(flow["step"], flow["question"], flow["reward"], [(word["module"], word["text"]) for word in flow["words"]]) for flow in flows]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    small = folder / "small.jsonl"
    small.write_text("".join((ROOT / "toy" / "valid.jsonl").read_text().splitlines(keepends=True)[:8]))
    start = time.perf_counter()
    subprocess.run(command(folder / "undisturbed", args.steps, small), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    print(f"undisturbed: {args.steps} steps in {seconds:.0f} s", flush=True)
    done, again = killed(command(folder / "killed", args.steps, small), folder / "killed", args.kills, seconds)
    one, two = folder / "undisturbed", folder / "killed"
    same = {name: (one / name).read_bytes() == (two / name).read_bytes() for name in ("log.csv", "evals.csv", f"step-{args.steps}/model.safetensors")}
    same["rollouts"] = said(one) == said(two)
    print(f"killed {done} times, {again} steps done twice, {time.perf_counter() - start:.0f} s in all; the same: {same}")
    shutil.rmtree(folder)
    raise SystemExit(not all(same.values()))


if __name__ == "__main__":
    main()
