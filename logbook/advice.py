"""Advice for a run that cannot learn, or whose rollouts fail. Each function returns text; "" means no advice.

A run that learns nothing prints the same lines as any other. Flow-GRPO learns from differences between the
rollouts of a question. There are none if no plan parses (the model is too small, is cut off, or is still
thinking), or if every question is too easy or too hard.
"""
from collections import Counter
from itertools import takewhile

from rewards.metrics import summary
from world.text import printable, truncate

FEW = 0.1  # if a smaller fraction of the plans parses, the model does not know the format
MANY = 5  # calls of a tool that must all have failed before there is advice
FLAT_STEPS = 3  # steps in a row with flat groups only, after which there is advice
MEMORY = "give --gradient-checkpointing, --optimizer-device cpu, --lora 32 or a smaller --max-new-tokens"


def failures(rollouts):
    """The three most frequent reasons, a line each: 'failed 3 times: the prompt is too long'."""
    counts = Counter(rollout.failed for rollout in rollouts if rollout.failed)
    return "\n".join(f"failed {times} times: {printable(truncate(why, 400))}"
                     for why, times in counts.most_common(3))


def unparsed(rollouts):
    """If less than a tenth of the plans could be parsed: the reasons, an example and what helps."""
    steps = [step for rollout in rollouts for step in rollout.memory.steps]
    errors = [step.result.removeprefix("Error: ") for step in steps if not step.tool]
    if not errors or len(errors) < (1 - FEW) * len(steps):
        return ""
    lines = printable(truncate(unread_plan(rollouts), 600)).splitlines() or ["(empty)"]
    example = "\n".join(f"    {line}" for line in lines)
    reasons = "\n".join(f"  {times} x {printable(why)}" for why, times in Counter(errors).most_common(3))
    return (
        f"{len(steps) - len(errors)} of {len(steps)} plans could be parsed. The commonest reasons:\n{reasons}"
        f"\nThe first of the others:\n{example}\n"
        "Hardly anything can be learnt from such rollouts. What helps: a larger or better instruct model;\n"
        "supervised training on the format first (python experiments/smollm.py warm --model MODEL, see\n"
        "docs/smollm.md); a larger --max-new-tokens if plans are cut off, and no --think if thoughts are;\n"
        "a tenth of this --lr if plans could be parsed before.")


def unread_plan(rollouts):
    """The text of the first plan that could not be parsed."""
    rollout, turn = next((rollout, step.turn) for rollout in rollouts for step in rollout.memory.steps
                         if not step.tool)
    return next(output["text"] for output in rollout.outputs
                if (output["module"], output["turn"]) == ("planner", turn))


def dead_tools(rollouts):
    """A line for each tool whose calls all failed, as if it were down: training would teach to avoid it."""
    steps_of = {}
    for step in (step for rollout in rollouts for step in rollout.memory.steps if step.tool):
        steps_of.setdefault(step.tool, []).append(step)
    return "\n".join(
        f"None of the {len(steps)} calls of {tool} worked ({printable(commonest(steps))}). If the tool is at "
        "fault, repair it or leave it out of --tools: training would teach the planner to avoid it."
        for tool, steps in steps_of.items() if len(steps) >= MANY and all(step.error for step in steps))


def commonest(steps):
    """The most frequent result, cut."""
    return truncate(Counter(step.result for step in steps).most_common(1)[0][0], 200)


def flat_steps(rows, rollouts, temperature):
    """After the third step in a row with only flat groups: the likely cause, and what to change."""
    streak = list(takewhile(lambda row: 0 < row["groups"] == row["flat"], reversed(rows)))
    if len(streak) != FLAT_STEPS:
        return ""
    reward, drift = sum(row["reward"] for row in streak) / len(streak), max(row["kl"] for row in streak)
    right = summary(rollouts)["accuracy"]
    if not (why := unparsed(rollouts)):
        if temperature < 0.2:
            why = f"At --temperature {temperature} the rollouts of a group hardly differ: give e.g. 0.7."
        elif right > 0.75:
            why = "The questions are too easy for this planner: give harder ones in --data, or stop."
        elif right < 0.25:
            why = ("Few answers are right: give easier questions in --data, a larger --group-size, "
                   "a larger model, or a --judge if right answers are worded freely.")
        else:
            why = ("Each question is answered always or never: give others in --data, a larger --group-size, "
                   "or a higher --temperature.")
    if drift > 1:
        why += f" The KL to the untrained planner is {drift:.3g}: a --lr that is too high does that."
    return f"3 steps in a row had flat groups only, which teach nothing (mean reward {reward:.2f}). {why}"


def poisoned(row, args):
    """Why the last steps had no usable gradient, and what to change. row: of the last step."""
    if row["failed"] and not row["skipped"]:
        return "no rollout of the last steps came to an end. Start a new run with a smaller --max-new-tokens."
    change = f"a lower --lr than {args.lr:g}"
    if args.temperature < 0.2:
        change = f"a higher --temperature than {args.temperature}"
    return ("the last steps taught nothing: their gradients were not finite or far too large. "
            f"Start a new run with {change}.")


def smaller_budget(before, after):
    """If the update had to halve its micro-batches: the budget that was enough."""
    return f"memory was short: next time --token-budget {after}" if after < before else ""
