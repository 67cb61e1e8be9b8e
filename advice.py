"""advice.py: what to tell the user of a run that cannot learn, or whose rollouts fail.

A run without a lesson looks like any other: its lines are aligned, its reward is a number, it ends with "Done". Flow-GRPO
learns from the difference between the rollouts of a question, so there is no lesson where all of them fail alike: where no
plan can be parsed (a model too small, cut off, or still thinking), or where every question is too easy or too hard.
"""
from collections import Counter

from memory import cut

FEW = 0.1   # of the plans: if fewer can be parsed, the model does not know the format


def failures(flows):
    """'failed 3 times: the prompt is too long', a line for each of the three commonest reasons."""
    counts = Counter(flow.failed for flow in flows if flow.failed)
    return "".join(f"failed {times} times: {cut(why, 400)}\n" for why, times in counts.most_common(3)).rstrip("\n")


def unparsed(flows):
    """"" or, where hardly a plan could be parsed: how many, the three commonest reasons, one of the plans, what helps."""
    steps = [step for flow in flows for step in flow.memory.steps]
    errors = [step.result.removeprefix("Error: ") for step in steps if not step.tool]
    if not errors or len(errors) < (1 - FEW) * len(steps):
        return ""
    example = next((word["text"] for flow in flows for word in flow.words if word["module"] == "planner"), "")
    shown = "\n".join("    " + ascii(line)[1:-1] for line in cut(example, 600).splitlines()) or "    (empty)"
    reasons = "\n".join(f"  {times} x {why}" for why, times in Counter(errors).most_common(3))
    return (f"{len(steps) - len(errors)} of {len(steps)} plans could be parsed. The commonest reasons:\n{reasons}\n"
            f"The first plan:\n{shown}\n"
            "Nothing can be learnt from such rollouts. What helps: a larger or better instruct model; a first round of "
            "supervised training on the format;\na larger --max-new-tokens if plans are cut off; if plans could be parsed "
            "before, a run with a tenth of this --lr.")


def flat_steps(rows, flows):
    """"" or, after the third step in a row whose groups were all flat: why that is, and what helps."""
    streak = 0
    for row in reversed(rows):
        if row["flat"] < row["groups"]:
            break
        streak += 1
    if streak != 3:
        return ""
    right = sum(row["reward"] for row in rows[-streak:]) / streak
    why = unparsed(flows) or ("The questions are too easy for this planner: give harder ones in --data, or stop." if right > 0.5
                              else "Hardly an answer is right: give easier questions in --data, a larger --group-size, "
                                   "a larger model, or a --judge if right answers are worded freely.")
    drift = max(row["kl"] for row in rows[-streak:])
    why += f" The KL to the untrained planner is {drift:.3g}: a --lr that is too high does that." if drift > 1 else ""
    return f"{streak} steps in a row had flat groups only, which teach nothing (mean reward {right:.2f}). {why}"


def poisoned(row, args):
    """Why the last steps taught nothing although their rollouts differ, and what to change."""
    if row["failed"] and not row["skipped"]:
        return "the rollouts of the last steps did not come to an end. Begin anew with a smaller --max-new-tokens."
    change = f"a higher --temperature than {args.temperature}" if args.temperature < 0.2 else f"a lower --lr than {args.lr:g}"
    return f"the last steps taught nothing: their gradients were not finite or far too large. Begin anew with {change}."
