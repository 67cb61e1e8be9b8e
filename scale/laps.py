"""Where the seconds of a training step go: train.py --profile.

    lap("planner")        # from here on, the seconds count for the planner
    lap("executor")       # until another phase begins
    table("step 3")       # the step has ended: a line for each phase, and their sum; a new table begins

Every second belongs to exactly one phase, so the phases add up to the step. Without --profile, lap() returns
at once. With it, lap() first waits until CUDA has done the work of the phase before.
"""
import time
from collections import Counter

seconds = None  # {phase: seconds} since the last table, in the order in which they began; None: --profile off
phase, since = "rest", 0.0  # the phase that runs, and when it began
finish = None  # waits for the device; None: nothing to wait for


def start(wait=None):
    """Begin to time the laps. wait: torch.cuda.synchronize on CUDA."""
    global seconds, phase, since, finish
    seconds, phase, since, finish = Counter(), "rest", time.perf_counter(), wait


def lap(name):
    """From here on, the seconds count for this phase, until another one begins."""
    global phase, since
    if seconds is None:
        return
    if finish:
        finish()
    now = time.perf_counter()
    seconds[phase] += now - since
    phase, since = name, now


def table(title, report=None):
    """The phases since the last table, as lines of text, and their sum; "" without --profile.

    report: of update(), which knows how many slots held no token, and how many tokens were not computed."""
    lap("rest")
    if seconds is None:
        return ""
    whole, rest = sum(seconds.values()), seconds.pop("rest")
    parts = {**seconds, "rest": rest} if seconds else {}
    seconds.clear()
    lines = [f"profile {title}: {whole:.2f} s"]
    lines += [f"        {name:<12}{part:8.2f} s {part / whole:6.1%}" for name, part in parts.items()]
    if report and "padding" in report:
        lines += [f"        padding     {report['padding']:.1%} of the update's slots",
                  f"        shared      {report['shared']:.1%} of its tokens, computed once"]
    return "\n".join(lines)
