"""The edits of the study: each is a file, a line of it, and the line that takes its place.

An edit is what you would change in a fork. The study makes it in a copy of the code (runs.py), and RESULTS.md
shows it beside its result.
"""

# The world of all runs. The toy as it is saturates in a dozen steps. In this world one tool call in ten fails
# for no reason, and one verdict in ten is inverted. Both draw from torch's generator, so a seed decides all.
CALLS_FAIL = (
    ("tools.py", "import time\n", "import time\nimport torch\n"),
    ("tools.py", "        return [future.result() if", "        results = [future.result() if"),
    ("tools.py", "no further call begins\n", """\
no further call begins
    failed = {"text": "Error: NameError: name 'value' is not defined (line 1)", "error": True}
    return [replace(result, **failed) if torch.rand(()) < 0.1 else result for result in results]
"""),
)
VERDICT = "flow.stopped = verifier.parse(completion.text)"
WRONG_VERDICT = "flow.stopped = verifier.parse(completion.text) ^ bool(torch.rand(()) < 0.1)"
HARD = (*CALLS_FAIL, ("solve.py", VERDICT, WRONG_VERDICT))
FAST = (("tools.py", "from world.sandbox import python_coder\n", '''from world import sandbox

KEPT = services.Cache("../programs.sqlite")


def python_coder(code):
    if (known := KEPT.get(code)) is None:
        KEPT.put(known := sandbox.python_coder(code), code)
    return known
'''),)  # a program prints again, in all runs, what it printed once
WORLD = HARD + FAST

MONOLITH = (("solve.py", "        flows = rollout(questions, ",
             "        from experiments import monolith\n        flows = monolith.rollout(questions, "),)
RIGHT = (("solve.py", WRONG_VERDICT, VERDICT),)  # no inverted verdicts: a monolith has no verdicts either
SMALL = (  # a smaller toy, written into the folder that its last argument names, and not checked
    ("toy/make.py", "TOY = Path(__file__).parent", 'TOY = Path(__import__("sys").argv.pop())'),
    ("toy/make.py", "hidden_size=128, intermediate_size=384", "hidden_size=64, intermediate_size=192"),
    ("toy/make.py", "    engine.save(TOY)\n    check(engine, test)\n", "    engine.save(TOY)\n"),
)

ADVANTAGES = "            A, flat = advantages(rewards, groups)"
OVER_TURNS = """\
            turns = [i for i, rollout in enumerate(usable) for _ in rollout.actions]
            A, flat = advantages([rewards[i] for i in turns], [groups[i] for i in turns])
            A = A[[turns.index(i) for i in range(len(usable))]]"""
REWARDS = "            rewards = [rollout.reward for rollout in usable]"
WRONG_REWARDS = """\
            rewards = [abs(rollout.reward - (torch.rand(()).item() < 0.1)) for rollout in usable]"""

# Name -> (flags, edits). What each changes, and nothing else.
VARIANTS = {
    "turn-stats": ((), (("train.py", ADVANTAGES, OVER_TURNS),)),
    "token-mean": (("--token-mean",), ()),
    "beta-0": (("--beta", "0"), ()),
    "beta-0.1": (("--beta", "0.1"), ()),
    "clip-0.2-0.2": (("--clip-high", "0.2"), ()),
    "clip-none": (("--clip-low", "1", "--clip-high", "1000"), ()),
    "G-2": (("--group-size", "2", "--questions", "48"), ()),
    "G-4": (("--group-size", "4", "--questions", "24"), ()),
    "G-16": (("--group-size", "16", "--questions", "6"), ()),
    "one-step": (("--minibatches", "1"), ()),
    "wrong-reward": ((), (("train.py", REWARDS, WRONG_REWARDS),)),
    "always-stops": ((), (("solve.py", WRONG_VERDICT, "flow.stopped = True"),)),
    "never-stops": ((), (("solve.py", WRONG_VERDICT, "flow.stopped = False"),)),
}
