"""rewards.metrics"""




def summary(flows):
    """What a batch of marked flows amounts to. errors: the share of turns whose plan or call nobody could read, or whose tool said Error."""
    steps = [step for flow in flows for step in flow.memory.steps]
    used = {}
    for step in steps:
        calls, errors, seconds = used.get(step.tool or "unreadable", (0, 0, 0.0))
        used[step.tool or "unreadable"] = (calls + 1, errors + step.error, seconds + step.seconds)
    return {
        "accuracy": sum(flow.reward for flow in flows) / len(flows),
        "turns": len(steps) / len(flows),
        "errors": sum(step.error for step in steps) / max(1, len(steps)),
        "failed": sum(flow.failed != "" for flow in flows),
        "undecided": sum(flow.undecided for flow in flows),
        "tokens": sum(output["tokens"] for flow in flows for output in flow.outputs if output["module"] != "judge") / len(flows),
        "calls": {name: used[name] for name in sorted(used)},  # of each tool: (calls, errors, seconds)
    }


def accuracy_line(metrics, n):
    """One line: accuracy with its 95 % interval, and what it cost. n: flows."""
    low, high = interval(metrics["accuracy"], n)
    line = f"accuracy {metrics['accuracy']:.3f} [{low:.2f}, {high:.2f}] of {n} | turns {metrics['turns']:.2f} | errors {metrics['errors']:.1%}"
    line += f" | {metrics['tokens']:.0f} tokens a flow"
    return line + "".join(f" | {name} {metrics[name]}" for name in ("failed", "undecided") if metrics[name])


def interval(p, n, z=1.96):
    """Wilson's 95 % interval of a share p of n, which does not collapse at 0 and 1."""
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + (z / (2 * n)) ** 2) ** 0.5
    return tuple((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))


def calls_line(metrics):
    """'python_coder 4 (0 errors, 0.1 s) | wikipedia_search 2 (1 errors, 0.0 s)'"""
    return " | ".join(f"{name} {n} ({errors} errors, {seconds:.1f} s)" for name, (n, errors, seconds) in metrics["calls"].items()) or "none"
