"""The edits of the study: each is a file, a line of it, and the line that takes its place.

An edit is what you would change in a fork. The study makes it in a copy of the code (runs.py), and RESULTS.md
shows it beside its result.
"""

# The world of all runs. The toy as it is saturates in a dozen steps. In this world one tool call in ten fails
# for no reason, and one verdict in ten is inverted. Both draw from torch's generator, so a seed decides all.
CALLS_FAIL = (
    ("tools.py", "import time\n", "import time\nimport torch\n"),
    ("tools.py", "        return list(pool.map(one, calls))", """\
        failed = "Error: NameError: name 'value' is not defined (line 1)", True
        return [(*failed, seconds) if torch.rand(()) < 0.1 else (result, error, seconds)
                for result, error, seconds in pool.map(one, calls)]"""),
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

MONOLITH = (("solve.py", "flows = rollout(questions, ",
             "from experiments import monolith\n        flows = monolith.rollout(questions, "),)
RIGHT = (("solve.py", WRONG_VERDICT, VERDICT),)  # no inverted verdicts: a monolith has no verdicts either
SMALL = (  # a smaller toy, written into the folder that its last argument names, and not checked
    ("toy/make.py", "TOY = Path(__file__).parent", 'TOY = Path(__import__("sys").argv.pop())'),
    ("toy/make.py", "hidden_size=128, intermediate_size=384", "hidden_size=64, intermediate_size=192"),
    ("toy/make.py", "    engine.save(TOY)\n    check(engine, test)\n", "    engine.save(TOY)\n"),
)

GROUPS = "    A, flat = advantages([flow.reward for _, flow in kept], [group for group, _ in kept])"
OVER_TURNS = """\
    turns = [k for k, (_, flow) in enumerate(kept) for _ in flow.actions]
    A, flat = advantages([kept[k][1].reward for k in turns], [kept[k][0] for k in turns])
    A = A[[turns.index(k) for k in range(len(kept))]]"""
WRONG_REWARD = """\
    rewards = [abs(flow.reward - (torch.rand(()).item() < 0.1)) for _, flow in kept]
    A, flat = advantages(rewards, [group for group, _ in kept])"""

# Name -> (flags, edits). What each changes, and nothing else.
VARIANTS = {
    "turn-stats": ((), (("train.py", GROUPS, OVER_TURNS),)),
    "token-mean": (("--token-mean",), ()),
    "beta-0": (("--beta", "0"), ()),
    "beta-0.1": (("--beta", "0.1"), ()),
    "clip-0.2-0.2": (("--clip-high", "0.2"), ()),
    "clip-none": (("--clip-low", "1", "--clip-high", "1000"), ()),
    "G-2": (("--group-size", "2", "--questions", "48"), ()),
    "G-4": (("--group-size", "4", "--questions", "24"), ()),
    "G-16": (("--group-size", "16", "--questions", "6"), ()),
    "one-step": (("--minibatches", "1"), ()),
    "wrong-reward": ((), (("train.py", GROUPS, WRONG_REWARD),)),
    "always-stops": ((), (("solve.py", WRONG_VERDICT, "flow.stopped = True"),)),
    "never-stops": ((), (("solve.py", WRONG_VERDICT, "flow.stopped = False"),)),
}
