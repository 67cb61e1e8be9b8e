"""What a 7B costs for a night: hours and dollars of train.py on one H100, all computed.

    python bench/cost.py                         the table in docs/gpu.md
    python bench/cost.py --ms 30 --dollars 1.8   with ms_a_token as bench/card.py measured it

Each constant has its origin beside it: *measured* by bench/card.py (docs/gpu.md), *computed* from
the model's shape and by scale/fit.py, *data sheet*, *setting*, or *GUESS*. Not counted: the judge,
saving, loading, and a final comparison. The table has the seconds of a step.
"""

import argparse
import sys
from math import ceil
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from record.metrics import markdown

P = 7.616e9  # computed: weights of Qwen2.5-7B
CACHE = 57_344  # computed: bytes of a token's keys and values
BANDWIDTH = 3.35e12  # data sheet: bytes of memory a second
OPERATIONS = 0.4 * 989e12  # data sheet: 989e12 a second; GUESS: 0.4 of them are reached
MS = 80  # measured: a token of a batch took 64 to 102 ms, on a host that was busy
CARD = 64 * 2048  # setting: tokens in the caches when card.py measured that
SLOWER = 1.3  # measured: an update with shared prompts, times what its operations need
OPTIMIZER = 18.3  # measured: seconds of a step with masters on the host, 20.7 less the rest
VLLM = 0.012 / 64  # GUESS: seconds a token, with 64 rollouts in flight
# GUESS: seconds a rollout, of all its calls: half a search of the live Wikipedia (others are equal,
# or in the cache), of 4 requests; 190 a minute are sent
TOOLS = 0.5 * 4 * 60 / 190
LONGEST = 300  # GUESS: tokens of the longest plan of a batch; the mean is half of it
G, TURNS, VALID = 8, 3, 64  # setting: rollouts of a question, turns, questions of a validation
PROMPTS = 880, 1340, 1800  # GUESS: tokens of the planner's prompts in the three turns
READ = 0.5  # GUESS: the share of prompt tokens that neither rows share nor vLLM has cached
OWN = 0.4  # GUESS: the share of an update's tokens that plans do not share

ROW = 916  # computed: tokens for which a row of a sampling batch takes memory beside its own
# How it is trained. tokens: what a sampling batch has room for, by scale/fit.py for 79 GiB, less
# the 28 of vLLM.
PAPER = dict(steps=32, questions=32, limit=2048, every=5, full=True)
NIGHT = dict(steps=40, questions=16, limit=512, every=10)
RUNS = {
    "defaults": NIGHT | dict(tokens=877_814),
    "defaults, vLLM": NIGHT | dict(tokens=458_384, vllm=True),
    "`--paper`": PAPER | dict(tokens=369_119),
}


def calls(n, questions, longest):
    """What the planner writes in n rollouts, and what the frozen modules write.

    Each [(longest completion of a batch, tokens of a prompt, number of prompts)]."""
    planner = [(longest, prompt, n) for prompt in PROMPTS]
    executor, base_generator, verifier = (200, 500, n), (200, 300, n // 2), (150, 1400, n)  # GUESS
    analysis, generator = (200, 700, questions), (200, 1800, n)  # GUESS
    return planner, [analysis, *TURNS * [executor, base_generator, verifier], generator]


def rows(prompt, run):
    return max(1, int(run["tokens"] / (prompt + run["limit"] + ROW)))


def reading(tokens):
    """Seconds to read the caches of so many tokens: three times, as fitted to card.py."""
    return 3 * tokens * CACHE / BANDWIDTH


def sampled(some, run, seconds):
    """Seconds of HF generate. seconds: those of a token of card.py's batch."""
    total = 0
    for longest, prompt, n in some:
        batch = rows(prompt, run)
        cached = min(batch, n) * (prompt + longest / 2)
        each = seconds - reading(CARD) + reading(cached)
        total += ceil(n / batch) * longest * each
    return total


def read(some, distinct=0):
    """Seconds to read prompts. distinct: of prompts that rows share, the tokens, read once."""
    return 2 * P * (distinct + READ * sum(prompt * n for _, prompt, n in some)) / OPERATIONS


def rollouts(n, questions, run, seconds, longest):
    """Seconds of n rollouts: of the planner, the frozen modules, the tools."""
    planner, frozen = calls(n, questions, longest)
    plan = sampled(planner, run, seconds)
    plan += read(planner[1:], distinct=questions * PROMPTS[0])
    if run.get("vllm"):
        others = VLLM * sum(written / 2 * number for written, _, number in frozen)
    else:
        others = sampled(frozen, run, seconds)
    return plan, others + read(frozen), TOOLS * n


def cost(run, seconds, longest):
    """Seconds a step of the planner, the frozen modules, the tools, the update; of the whole run.

    longest: tokens of the longest plan of a batch."""
    n = run["questions"] * G
    # P x tokens: 2 forward, 4 backward, 2 again (checkpointing), 2 π_ref, 1.5 π_θold
    update = SLOWER * 11.5 * P * OWN * n * (sum(PROMPTS) + TURNS * longest / 2) / OPERATIONS
    update += 4 * OPTIMIZER * run.get("full", False)
    step = *rollouts(n, run["questions"], run, seconds, longest), update
    validation = sum(rollouts(VALID, VALID, run, seconds, longest))
    validations = ceil(run["steps"] / run["every"]) + 1
    return step, run["steps"] * sum(step) + validations * validation


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--ms", type=float, default=MS, help=f"for a token of a batch (default: {MS})")
    help = f"tokens of the longest plan of a batch (default: {LONGEST})"
    add("--plan", type=int, default=LONGEST, help=help)
    add("--dollars", type=float, default=2.5, help="of an hour (default: 2.5)")
    args = parser.parse_args()
    table = [["", "planner+frozen+tools+update, s", "steps", "hours", "dollars"]]
    for name, run in RUNS.items():
        step, total = cost(run, args.ms / 1000, args.plan)
        parts = "+".join(f"{seconds:.0f}" for seconds in step)
        hours = total / 3600
        numbers = str(run["steps"]), f"{hours:.1f}", f"{args.dollars * hours:.1f}"
        table.append([name, parts, *numbers])
    print(markdown(table))


if __name__ == "__main__":
    main()
