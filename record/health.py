"""A training run in numbers: a row and a line for each step, and what keeps it from learning.

A run that learns nothing prints the same lines as any other. Flow-GRPO learns from differences
between the rollouts of a question. There are none if no plan can be parsed, if a tool is down, or
if every question is too easy or too hard."""

from collections import Counter

from record.metrics import summary
from world.text import truncate


def log_row(step, rollouts, usable, groups, flat, tools):
    """The row of log.csv, without the metrics of the update. usable: the rollouts with an outcome;
    groups: the group of each."""
    found = summary(rollouts)
    plans = [len(completion.ids) for rollout in usable for completion in rollout.sampled]
    row = {
        "step": step,
        "reward": sum(rollout.reward for rollout in usable) / max(1, len(usable)),
        "right": sum(rollout.right for rollout in usable) / max(1, len(usable)),
        # granted by the judge alone: the rules could not decide
        "judged": sum(rollout.judged and rollout.right for rollout in usable) / max(1, len(usable)),
    }
    plan_tokens = sum(plans) / max(1, len(plans))
    found |= {"flat": flat, "groups": len(set(groups)), "plan_tokens": plan_tokens}
    names = "turns errors flat groups failed undecided plan_tokens cut_plans cut_answers".split()
    row |= {name: found[name] for name in names}
    for name in [*tools, "unreadable"]:
        row[name], row[f"{name}_errors"], _ = found["calls"].get(name, (0, 0, 0.0))
    return row


def line_of(row, steps, rollout_seconds, update_seconds):
    """The aligned line of a step: the reward first, then what can go wrong, then the seconds."""
    line = f"step {row['step']:3d}/{steps} | reward {row['reward']:.2f}"
    if row["right"] != row["reward"]:  # a reward of your own
        line += f" | right {row['right']:4.0%}"
    line += f" | turns {row['turns']:.2f} | errors {row['errors']:4.0%}"
    line += f" | flat groups {row['flat']:2d}/{row['groups']}"
    line += f" | kl {row['kl']:.3g} | clip {100 * row['clip']:.3g}%"
    line += f" | {rollout_seconds:.1f}s + {update_seconds:.1f}s"
    for name in ("failed", "undecided", "skipped"):
        line += f" | {name} {row[name]}" * (row[name] > 0)
    return line


def advice(row, rollouts):
    """Lines about what keeps a run from learning, before its update is paid for."""
    whys = Counter(rollout.failed for rollout in rollouts if rollout.failed)
    for why, times in whys.most_common(3):
        yield f"        failed {times} times: {why}"
    steps = [step for rollout in rollouts for step in rollout.memory.steps]
    if row["unreadable"] > 0.2 * len(steps):
        example = next(step.result for step in steps if not step.tool)
        unread = f"{row['unreadable']} of {len(steps)} plans"
        yield f"        {unread} could not be parsed, such as: {example}"
    for name in [name for name in row if f"{name}_errors" in row and name != "unreadable"]:
        if row[name] >= 5 and row[f"{name}_errors"] == row[name]:
            result = next(step.result for step in steps if step.tool == name)
            why = truncate(result, 200)
            yield f"        none of the {row[name]} calls of {name} worked, as: {why}"
    if row["flat"] == row["groups"]:
        yield "        all groups are flat: all rollouts of a question have the same reward"


def check_lines(row):
    """Numbers to look at before the first update is paid for, each with its bounds; and where the
    cure is, if one is outside. A run on a rented card should then be stopped."""
    turns = {name: row[name] for name in row if f"{name}_errors" in row and row[name]}
    unread = turns.pop("unreadable", 0) / max(1, sum(turns.values()) + row["unreadable"])
    errors = {name: row[f"{name}_errors"] / calls for name, calls in turns.items()}
    shown = ", ".join(f"{name} {part:.0%}" for name, part in errors.items())
    yield (
        f"check   reward {row['reward']:.2f} (0.1 to 0.8), of which only the judge granted "
        f"{row['judged']:.2f} | unreadable plans {unread:.0%} (at most 20%) | flat groups "
        f"{row['flat']}/{row['groups']} (at most 75%) | cut plans {row['cut_plans']:.0%} | errors: "
        f"{shown} (at most 50%)"
    )
    bounds = {
        "reward": 0.1 <= row["reward"] <= 0.8,
        "unreadable plans": unread <= 0.2,
        "flat groups": row["flat"] <= 0.75 * row["groups"],
        "errors": all(part <= 0.5 for part in errors.values()),
    }
    if outside := [name for name, fine in bounds.items() if not fine]:
        cure = 'docs/log.md, "If the reward does not rise", has causes and cures'
        yield f"        outside its bounds: {', '.join(outside)}; {cure}"


def cost_line(rollouts, seconds, steps, tools):
    """How long the run will take, and which modules take it. steps: that are left, of so many
    seconds each."""
    spent = {}  # {(module, turn): the seconds of its batch}; the judge has one batch
    for output in (output for rollout in rollouts for output in rollout.outputs):
        if output["module"] not in tools:  # whose calls are timed one by one
            turn = 0 if output["module"] == "judge" else output["turn"]
            spent[output["module"], turn] = output["seconds"]
    modules = Counter()
    for (module, _), batch_seconds in spent.items():
        modules[module] += batch_seconds
    shares = ", ".join(f"{name} {part / seconds:.0%}" for name, part in modules.most_common(4))
    left = steps * seconds
    time = f"{left / 3600:.1f} hours" if left > 3600 else f"{left / 60:.1f} minutes"
    return f"        {time} are left, at {seconds:.3g} seconds a step ({shares})"
