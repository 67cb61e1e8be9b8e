"""advice.py: what to tell the user of a run that cannot learn, or whose rollouts fail.

A run that learns nothing looks like any other: aligned lines, a reward, "Done". Flow-GRPO learns from the
difference between the rollouts of a question, so it learns nothing where all of them fail alike: where no
plan can be parsed (a model too small, cut off, or still thinking), or every question is too easy or too hard.
"""

from collections import Counter

from world.text import printable, truncate

FEW = 0.1   # of the plans: if fewer can be parsed, the model does not know the format


def failures(flows):
    """'failed 3 times: the prompt is too long', a line for each of the three commonest reasons."""
    counts = Counter(flow.failed for flow in flows if flow.failed)
    return "\n".join(f"failed {times} times: {truncate(why, 400)}" for why, times in counts.most_common(3))


def unparsed(flows):
    """Where hardly a plan could be parsed: how many, why, one of them, what helps. Else ""."""
    steps = [step for flow in flows for step in flow.memory.steps]
    errors = [step.result.removeprefix("Error: ") for step in steps if not step.tool]
    if not errors or len(errors) < (1 - FEW) * len(steps):
        return ""
    example = next((output["text"] for flow in flows for output in flow.outputs if output["module"] == "planner"), "")
    shown = "\n".join("    " + line for line in printable(truncate(example, 600)).splitlines()) or "    (empty)"
    reasons = "\n".join(f"  {times} x {why}" for why, times in Counter(errors).most_common(3))
    return (
        f"{len(steps) - len(errors)} of {len(steps)} plans could be parsed. The commonest reasons:\n{reasons}"
        f"\nThe first plan:\n{shown}\n"
        "Hardly anything can be learnt from such rollouts. What helps: a larger or better instruct model;\n"
        "supervised training on the format first; a larger --max-new-tokens if plans are cut off;\n"
        "a tenth of this --lr if plans could be parsed before.")


def flat_steps(rows, flows, temperature):
    """What to say after the third step in a row whose groups were all flat, else ""."""
    streak = 0
    for row in reversed(rows):
        if row["flat"] < row["groups"]:
            break
        streak += 1
    if streak != 3:
        return ""
    right = sum(row["reward"] for row in rows[-streak:]) / streak
    easy = "The questions are too easy for this planner: give harder ones in --data, or stop."
    hard = ("Hardly an answer is right: give easier questions in --data, a larger --group-size, a larger "
            "model, or a --judge if right answers are worded freely.")
    equal = f"At --temperature {temperature} the rollouts of a group hardly differ: give e.g. 0.7."
    why = unparsed(flows) or (equal if temperature < 0.2 else easy if right > 0.5 else hard)
    drift = max(row["kl"] for row in rows[-streak:])
    if drift > 1:
        why += f" The KL to the untrained planner is {drift:.3g}: a --lr that is too high does that."
    return f"3 steps in a row had flat groups only, which teach nothing (mean reward {right:.2f}). {why}"


def poisoned(row, args):
    """Why the last steps taught nothing although their rollouts differ, and what to change."""
    if row["failed"] and not row["skipped"]:
        return "no rollout of the last steps came to an end. Begin anew with a smaller --max-new-tokens."
    colder = args.temperature < 0.2
    change = f"a higher --temperature than {args.temperature}" if colder else f"a lower --lr than {args.lr:g}"
    return ("the last steps taught nothing: their gradients were not finite or far too large. "
            f"Begin anew with {change}.")
