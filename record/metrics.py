"""The metrics of a batch of graded rollouts, and the lines that print them."""


def summary(rollouts):
    """{name: number}. errors: the share of turns with a parse error or a tool error.

    calls: {tool: (calls, errors, seconds)}; "unreadable" has the turns whose plan did not parse.
    cut_plans, cut_answers: the shares of plans and answers that ended at the token limit.
    """
    steps = [step for rollout in rollouts for step in rollout.memory.steps]
    outputs = [output for rollout in rollouts for output in rollout.outputs]
    calls = {}
    for step in steps:
        name = step.tool or "unreadable"
        n, errors, seconds = calls.get(name, (0, 0, 0.0))
        calls[name] = n + 1, errors + step.error, seconds + step.seconds
    tokens = [output["tokens"] for output in outputs if output["module"] != "judge"]
    cut = lambda name: share(o.get("cut", False) for o in outputs if o["module"] == name)
    return {
        "accuracy": share(rollout.right for rollout in rollouts),
        "turns": len(steps) / len(rollouts),
        "errors": share(step.error for step in steps),
        "failed": sum(rollout.failed != "" for rollout in rollouts),
        "undecided": sum(rollout.undecided for rollout in rollouts),
        "tokens": sum(tokens) / len(rollouts),
        "calls": dict(sorted(calls.items())),
        "cut_plans": cut("planner"),
        "cut_answers": cut("generator"),
    }


def share(flags):
    """The share of flags that are true; 0 of none."""
    flags = list(flags)
    return sum(flags) / max(1, len(flags))


def interval(p, n, z=1.96):
    """Wilson's 95 % interval of a share p of n. It has a width even where p is 0 or 1."""
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + (z / (2 * n)) ** 2) ** 0.5
    return max(0.0, middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def accuracy_line(metrics, n):
    """Accuracy of n questions with its 95 % interval, and what it cost.

    'accuracy 0.500 [0.09, 0.91] of 2 | turns 1.50 | errors 33.3% | 60 tokens a rollout | failed 1'
    """
    low, high = interval(metrics["accuracy"], n)
    line = f"accuracy {metrics['accuracy']:.3f} [{low:.2f}, {high:.2f}] of {n}"
    line += f" | turns {metrics['turns']:.2f} | errors {metrics['errors']:.1%}"
    line += f" | {metrics['tokens']:.0f} tokens a rollout"
    lost = {name: metrics[name] for name in ("failed", "undecided") if metrics[name]}
    return line + "".join(f" | {name} {number}" for name, number in lost.items())


def calls_line(metrics):
    """'python_coder 4 (0 errors, 0.1 s) | wikipedia_search 2 (1 errors, 0.0 s)'"""
    calls = metrics["calls"].items()
    parts = [f"{name} {n} ({errors} errors, {s:.1f} s)" for name, (n, errors, s) in calls]
    return " | ".join(parts) or "none"


def markdown(lines):
    """An aligned Markdown table. lines: the texts of each line, the head first."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    row = f"| {' | '.join(f'{{:<{width}}}' for width in widths)} |"
    rule = ["-" * width for width in widths]
    return "\n".join(row.format(*line) for line in (lines[0], rule, *lines[1:]))
