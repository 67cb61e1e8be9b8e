"""What a 7B costs for a night: hours and dollars of train.py on one H100, all computed.

    python bench/cost.py                         the table in docs/gpu.md
    python bench/cost.py --ms 30 --dollars 1.8   with ms_a_token as bench/card.py measured it

Measured, by card.py, are OPTIMIZER, SLOWER and the 80 ms. Other constants are guesses, if they are
not the run's settings or the card's data. The judge and saving are not counted.
"""

import argparse
import sys
from math import ceil
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from record.metrics import markdown

P = 7.6e9  # weights of Qwen2.5-7B
CACHE = 57e3  # bytes of a token's keys and values
OPERATIONS, BANDWIDTH = 0.4 * 989e12, 3.35e12  # a second: those reached, and bytes of memory
CARD = 64 * 2048  # tokens in the caches when card.py measures ms_a_token
SLOWER = 1.3  # an update with shared prompts takes this many times what its operations need
OPTIMIZER = 18.3  # seconds of a step with masters on the host: 20.7 measured, less the rest
VLLM = 0.012 / 64  # seconds a token, with 64 rollouts in flight
TOOLS = 0.25  # seconds a rollout, of all its calls: mostly searches of the live Wikipedia
G, TURNS, VALID = 8, 3, 64  # rollouts of a question, turns, questions of a validation

PROMPTS = 880, 1340, 1800  # tokens of the planner's prompts in the three turns
READ = 0.5  # the share of prompt tokens that neither rows share nor vLLM has cached
OWN = 0.4  # the share of an update's tokens that plans do not share

# How it is trained, and the tokens of a sampling batch that scale/fit.py leaves room for.
NIGHT = dict(steps=60, questions=16, limit=512, every=10)
RUNS = {
    "adapters, vLLM": NIGHT | dict(tokens=120e3, vllm=True),
    "adapters alone": NIGHT | dict(tokens=244e3),
    "all weights": NIGHT | dict(tokens=105e3, full=True),
    "defaults": dict(steps=32, questions=32, limit=2048, every=5, tokens=105e3, full=True),
}


def calls(questions, longest):
    """What the planner writes in a step, and what the frozen modules write.

    Each [(longest completion of a batch, tokens of a prompt, number of prompts)]."""
    n = questions * G
    planner = [(longest, prompt, n) for prompt in PROMPTS]
    executor, base_generator, verifier = (200, 500, n), (200, 300, n // 2), (150, 1400, n)
    analysis, generator = (200, 700, questions), (200, 1800, n)
    return planner, [analysis, *TURNS * [executor, base_generator, verifier], generator]


def rows(prompt, limit, tokens):
    return max(1, int(tokens / (prompt + limit)))


def reading(tokens):
    """Seconds to read the caches of so many tokens: three times, as fitted to card.py."""
    return 3 * tokens * CACHE / BANDWIDTH


def sampled(some, run, seconds):
    """Seconds of HF generate. seconds: those of a token of card.py's batch."""
    total = 0
    for longest, prompt, n in some:
        batch = rows(prompt, run["limit"], run["tokens"])
        cached = min(batch, n) * (prompt + longest / 2)
        each = seconds - reading(CARD) + reading(cached)
        total += ceil(n / batch) * longest * each
    return total


def read(some, distinct=0):
    """Seconds to read prompts. distinct: of prompts that rows share, the tokens, read once."""
    return 2 * P * (distinct + READ * sum(prompt * n for _, prompt, n in some)) / OPERATIONS


def cost(run, seconds, longest):
    """Seconds a step of the planner, the frozen modules, the tools, the update; of the whole run.

    longest: tokens of the longest plan of a batch; the mean is half of it."""
    planner, frozen = calls(run["questions"], longest)
    n = run["questions"] * G
    plan = sampled(planner, run, seconds)
    plan += read(planner[1:], distinct=run["questions"] * PROMPTS[0])
    if run.get("vllm"):
        others = VLLM * sum(written / 2 * number for written, _, number in frozen)
        others += read(frozen)
    else:
        others = sampled(frozen, run, seconds) + read(frozen)
    # P x tokens: 2 forward, 4 backward, 2 again (checkpointing), 2 π_ref, 1.5 π_θold
    update = SLOWER * 11.5 * P * OWN * n * (sum(PROMPTS) + TURNS * longest / 2) / OPERATIONS
    update += 4 * OPTIMIZER * run.get("full", False)
    called = TOOLS * n
    validations = (run["steps"] / run["every"] + 1) * VALID / n * (plan + others + called)
    step = plan, others, called, update
    return step, run["steps"] * sum(step) + validations


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--ms", type=float, default=80, help="for a token of a batch (default: 80)")
    add("--plan", type=int, default=300, help="tokens of the longest plan (default: 300)")
    add("--dollars", type=float, default=2.5, help="of an hour (default: 2.5)")
    args = parser.parse_args()
    table = [
        ["", "rows", "planner", "frozen", "tools", "update", "step, min", "in all, h", "dollars"]
    ]
    for name, run in RUNS.items():
        step, total = cost(run, args.ms / 1000, args.plan)
        batches = [str(rows(prompt, run["limit"], run["tokens"])) for prompt in PROMPTS]
        cells = [f"{seconds:.0f} s" for seconds in step]
        cells += [f"{sum(step) / 60:.1f}", f"{total / 3600:.1f}"]
        dollars = f"{args.dollars * total / 3600:.0f}"
        table.append([name, ", ".join(batches), *cells, dollars])
    print(markdown(table))


if __name__ == "__main__":
    main()
