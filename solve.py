"""The flow: planner -> executor -> tool -> verifier, in turns, through one memory.

It is AgentFlow's Algorithm 1, arXiv 2510.05592.

roll_out() runs a batch of questions:

    analysis -> [ planner -> executor -> tool -> verifier ] x turns -> generator

A Rollout is one question on its way through the flow. The rollouts of a batch move in lock-step:
all of them plan, then the executor writes all their calls, then the calls run, and so on. So a
language model gets all prompts of a stage in one batch, and the same seed gives the same rollouts.

An *engine* is a language model: engine(prompts, temperature, max_new_tokens) -> [Completion], with
the text, and the token ids that training needs (models/completion.py). The *policy* is the engine
that is trained: it plays the planner. Others are *fixed*.

Whatever goes wrong is one of two things:

    an error    The rollout goes on. A plan or call could not be parsed, or a tool did not find what
                it was asked for, or the web service behind it is down. This costs a turn, and
                memory says why: the planner reads it in its next prompt.
    a failure   The rollout is aborted (`failed` says why), counts as wrong, and is not trained on.
                A module, base_generator or the judge got no completion from its language model: the
                server is down, or the prompt is too long even with a shortened memory.

The rest of this file, from flags() on, is the command line:

    python solve.py                          a few questions of the toy: no download, key or GPU
    python solve.py --data toy/test.jsonl --max-turns 3 --limit 100 --quiet
    python solve.py --model Qwen/Qwen2.5-7B-Instruct "Which is longer, the Nile or the Danube?"
    python solve.py --model Qwen/Qwen2.5-7B-Instruct --benchmark bamboogle gameof24
    python solve.py --compare toy runs/toy-seed0/best --data toy/test.jsonl --max-turns 3

Some functions import what only they need: torch and transformers take seconds to load.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

try:
    import fcntl
except ImportError:
    raise SystemExit("nano-agentflow needs Linux or macOS; on Windows, run it in WSL") from None
from tqdm import tqdm

import executor
import generator
import planner
import verifier
from executor import Call
from memory import Memory, Step
from models.chat import after_thinking
from models.completion import TOO_LONG, Completion, outage
from planner import Plan, Unparsed
from rewards import metrics
from rewards.grade import grade
from rewards.judge import cached
from rewards.questions import Question, read_questions
from tools import TOOLS, choose, left_out, run_calls
from world.sandbox import protection
from world.services import Cache, is_server
from world.text import printable, truncate

# how often a prompt that is too long is written again, each time with a quarter of memory
SHORTER = 2
ANALYSIS_LIMIT = 2_000  # characters of the analysis, which is shown beside the memory
RECORD_LIMIT = 20_000  # characters: longer completions, calls and answers are truncated


@dataclass
class Rollout:
    """One rollout, while it runs and afterwards."""

    question: Question  # with its text, also called `question`, and the gold answer
    memory: Memory
    # One of each turn: plans[k] led to memory.steps[k]. (A failed rollout may lack the last step.)
    plans: list[Plan | Unparsed] = field(default_factory=list)
    call: Call | Unparsed | None = None  # of the present turn
    # What the policy wrote, with the ids of s^t and a^t: Flow-GRPO trains on it, and train.py makes
    # a flow_grpo.Action of each. By default these are the completions of the planner, one a turn.
    sampled: list[Completion] = field(default_factory=list)
    state: dict = field(default_factory=dict)  # for tools that keep something between calls

    # how it ended
    stopped: bool = False  # the verifier said STOP; False if the turns ran out
    failed: str = ""  # why it was aborted: training leaves it out, accuracy counts it as wrong
    answer: str = ""
    right: bool = False  # is the answer right?
    judged: bool = False  # the rules could not decide, and the judge did
    undecided: bool = False  # the judge was asked and gave no verdict: treated like a failure
    reward: float = 0.0  # R_i, one for the whole rollout, from rewards/grade.py

    # for the record
    outputs: list = field(default_factory=list)  # what each module and tool wrote, see add_output()
    seconds: float = 0.0  # its share of the batch's time, plus the judge's

    def add_output(self, turn, module, text, tokens, seconds, cut=False):
        """Note what a module or a tool wrote. seconds: of the whole batch, if it is a module."""
        output = {"turn": turn, "module": module, "text": truncate(text, RECORD_LIMIT)}
        output |= {"tokens": tokens, "seconds": round(seconds, 3), "cut": cut}
        self.outputs.append(output)


def roll_out(
    questions,
    policy,
    fixed,
    tools,
    judge=None,
    *,
    max_turns=3,
    temperature=0.7,
    max_new_tokens=None,
    trained=("planner",),
    live=False,
):
    """Run every question through the flow, in lock-step (the paper's Algorithm 1), and grade the
    answers: [Rollout], in the order of the questions.

    questions: [Question]; G copies of a question make a group.
    policy: the engine that plays the `trained` modules, which alone sample. fixed: the engine that
    plays all others, and base_generator; or a dict, as {"executor": engine, "default": engine}.
    trained: of analysis, planner, executor, verifier, generator.
    judge: grades what the rules cannot. max_turns: 3 as in the paper's training. max_new_tokens: of
    each completion; None: as many as the checkpoint says, or 1 024. live: print what modules and
    tools write, as soon as they have written it.
    """
    start = time.perf_counter()
    engines = fixed if isinstance(fixed, dict) else {"default": fixed}
    rollouts = [Rollout(question, Memory(question.question)) for question in questions]
    bar = tqdm(total=len(rollouts), unit="rollout", leave=False, delay=1, disable=live or None)

    def ask(module, turn, some, prompt):
        """Run a module on each of these rollouts that has not failed: [(rollout, Completion)].

        prompt(rollout) -> text. Where that is too long for the model, it is written again with less
        memory, twice at most. A rollout fails, and is left out, if the engine reports an error."""
        some = [rollout for rollout in some if not rollout.failed]
        bar.set_postfix_str(f"turn {turn} {module}")
        started = time.perf_counter()
        sampled = module in trained
        engine = policy if sampled else engines.get(module, engines["default"])
        how = dict(temperature=temperature if sampled else 0.0, max_new_tokens=max_new_tokens)
        completions = engine([prompt(rollout) for rollout in some], **how) if some else []
        for _ in range(SHORTER):
            too_long = [i for i, c in enumerate(completions) if c.error == TOO_LONG]
            for i in too_long:
                some[i].memory.budget //= 4
            again = engine([prompt(some[i]) for i in too_long], **how) if too_long else []
            for i, completion in zip(too_long, again):
                completions[i] = completion
        for rollout, c in zip(some, completions):
            seconds = time.perf_counter() - started
            rollout.add_output(turn, module, c.text, c.tokens, seconds, c.cut)
            if c.error:
                rollout.failed = f"{module}: {c.error}"
            elif sampled:
                rollout.sampled.append(c)
            if live:
                print(block(rollout.outputs[-1]), flush=True)
        return [(rollout, c) for rollout, c in zip(some, completions) if not c.error]

    written = ask(
        "analysis", 0, rollouts, lambda r: planner.analysis_prompt(r.memory.question, tools)
    )
    for rollout, completion in written:
        analysis = after_thinking(completion.text) or ""
        rollout.memory.analysis = truncate(analysis, ANALYSIS_LIMIT)

    for turn in range(1, max_turns + 1):
        running = [rollout for rollout in rollouts if not rollout.stopped and not rollout.failed]
        bar.update(len(rollouts) - len(running) - bar.n)

        # The state s^t is the prompt: question, toolset and memory. The plan is the action a^t.
        written = ask("planner", turn, running, lambda r: planner.prompt(r.memory, tools))
        planned = []  # those of `running` whose plan could be parsed
        for rollout, completion in written:
            plan = planner.parse(completion.text, tools)
            rollout.plans.append(plan)
            if isinstance(plan, Plan):
                planned.append(rollout)
            else:  # It costs the turn, and the next prompt shows it. Nothing was done to verify.
                step = Step(turn, "", "", "", f"Error: {plan}", error=True, verdict="CONTINUE")
                rollout.memory.steps.append(step)

        written = ask(
            "executor",
            turn,
            planned,
            lambda r: executor.prompt(r.memory.question, r.plans[-1], tools[r.plans[-1].tool]),
        )
        called = []  # those of `planned` whose executor wrote something: a Call, or an Unparsed
        for rollout, completion in written:
            name = rollout.plans[-1].tool
            rollout.call = executor.parse(completion.text, name, tools[name])
            called.append(rollout)

        bar.set_postfix_str(f"turn {turn} tools")
        results = run_calls(
            [rollout.call for rollout in called],
            [rollout.state for rollout in called],
            tools,
            partial(
                engines.get("base_generator", engines["default"]), max_new_tokens=max_new_tokens
            ),
        )
        for rollout, result in zip(called, results):
            plan, command = rollout.plans[-1], ""
            if result.failed:
                rollout.failed = f"{plan.tool}: {result.failed}"
                continue
            if isinstance(rollout.call, Call):
                command = truncate(str(rollout.call), RECORD_LIMIT)
            step = Step(turn, plan.tool, plan.sub_goal, command, result.text, result.error)
            step.seconds = round(result.seconds, 3)
            rollout.memory.steps.append(step)
            rollout.add_output(turn, plan.tool, result.text, result.tokens, result.seconds)
            if live:
                print(block(rollout.outputs[-1]), flush=True)

        written = ask("verifier", turn, called, lambda r: verifier.prompt(r.memory, tools))
        for rollout, completion in written:
            rollout.stopped = verifier.parse(completion.text)
            rollout.memory.steps[-1].verdict = "STOP" if rollout.stopped else "CONTINUE"

    written = ask("generator", max_turns + 1, rollouts, lambda r: generator.prompt(r.memory))
    for rollout, completion in written:
        answer = generator.parse(completion.text, completion.cut)
        rollout.answer = truncate(answer, RECORD_LIMIT)
    bar.close()
    for rollout in rollouts:
        rollout.seconds = (time.perf_counter() - start) / len(rollouts)
    # sets right, judged, undecided and reward; and `failed` if the judge is down
    grade(rollouts, judge)
    return rollouts


def block(output):
    """What a module or tool wrote, for people: a title and indented lines."""
    once = output["module"] in ("analysis", "generator", "judge")
    title = output["module"] if once else f"turn {output['turn']} {output['module']}"
    tokens = f"{output['tokens']} tokens, " if output["tokens"] else ""
    lines = [f"[{title}]  {tokens}{output['seconds']:.2f} s"]
    lines += ["    " + line for line in output["text"].strip().splitlines()]
    return printable("\n".join(lines))


def trace(question, rollout):
    """A finished rollout as text: what every module and tool wrote, turn by turn."""
    lines = [f"Question: {question.question}", *map(block, rollout.outputs)]
    lines.append(f"Failed: {rollout.failed}" if rollout.failed else f"Answer: {rollout.answer}")
    return printable("\n".join(lines))


def record_of(rollout):
    """A rollout as data for JSON, without its token ids."""
    q = rollout.question
    record = {"id": q.id, "kind": q.kind, "question": q.question, "gold": q.answer}
    names = "answer right reward judged failed undecided".split()
    record |= {name: getattr(rollout, name) for name in names}
    record |= {"turns": len(rollout.plans), "seconds": round(rollout.seconds, 3)}
    return record | {"memory": dataclasses.asdict(rollout.memory), "outputs": rollout.outputs}


# --------------------------------------------------------------------------------- the command line
TOY = os.path.relpath(Path(__file__).with_name("toy"))
# the flags that name a model, beside --model
MODELS = "fixed", "executor", "verifier", "generator", "base_generator", "judge"
ROLLOUT_SETTINGS = "max_turns", "temperature", "max_new_tokens"  # of roll_out(), also flags
EXAMPLES = 8  # how many of the toy's questions are answered if the command line names none


def flags(words=None):
    """The command line of solve.py, with all defaults."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument_group("the questions").add_argument
    add("question", nargs="*", help="one question, in quotes; else --data or --benchmark")
    add("--data", help="questions as JSONL, which are graded (default: a few of the toy's)")
    add("--benchmark", nargs="+", metavar="NAME", help="one of the paper's ten, or all")
    add("--benchmark-dir", help="folder with the benchmarks' files, for a machine without network")
    add("--limit", type=int, help="only the first so many questions")
    help = "the better of two: folders of --out, or models and --data"
    add("--compare", nargs=2, metavar=("A", "B"), help=help)
    add = parser.add_argument_group("the planner").add_argument
    add("--model", default=TOY, help="folder, hub name or http://host:8000/v1#model")
    help = "of the planner's sampling (default: 0, greedy, for one question; else 0.7)"
    add("--temperature", type=float, help=help)
    add_shared(parser)
    add = parser.add_argument_group("the run").add_argument
    add("--max-turns", type=int, help="turns of a rollout at most (default: 10; the toy's demo 3)")
    add("--batch", type=int, default=64, help="questions in lock-step (default: 64)")
    add("--trials", type=int, default=1, help="how often all questions are answered; the paper: 3")
    add("--out", help="folder for the rollouts; the same command goes on in it")
    add("--quiet", action="store_true", help="no traces, only the summary")
    parser.set_defaults(**remembered(parser.parse_args(words)))  # these depend on --model
    args = parser.parse_args(words)
    if len(args.question) > 1:
        parser.error(f'put the question in quotes: "{" ".join(args.question)}"')
    args.question = args.question[0] if args.question else None
    if sum(value is not None for value in (args.question, args.data, args.benchmark)) > 1:
        parser.error("give one question, --data or --benchmark, not two of them")
    demo = not (args.question or args.data or args.benchmark or args.compare)
    args.data = args.data or (f"{TOY}/test.jsonl" if demo else None)
    args.limit = args.limit or (EXAMPLES if demo else None)
    args.max_turns = args.max_turns or (3 if demo else 10)
    if args.temperature is None:  # who types one question wants the likeliest plans
        args.temperature = 0.0 if args.question else 0.7
    if args.benchmark and not args.out:
        args.out = f"runs/{Path(args.model).name}-benchmarks"
    return args


def add_shared(parser):
    """The flags that solve.py and train.py share."""
    add = parser.add_argument_group("the modules that are not trained, and the tools").add_argument
    add("--fixed", help="the model of all modules but the planner (default: --model)")
    for module in MODELS[1:-1]:
        add(f"--{module.replace('_', '-')}", help=f"another model for the {module} alone")
    help = "model that grades what the rules cannot, or none (default: --fixed; for the toy none)"
    add("--judge", help=help)
    add("--tools", nargs="+", choices=TOOLS, help="tools to choose from (default: all)")
    help = "what wikipedia_search reads: JSONL of title and text, or wikipedia:LANGUAGE; if lines "
    help += "have a url, web_search reads these pages alone (default: wikipedia:en)"
    add("--corpus", help=help)
    help = "web_search and python_coder together where nothing protects your files"
    add("--allow-unconfined", action="store_true", help=help)
    add("--cache", help="SQLite file that keeps answers of the web and verdicts of the judge")
    add("--think", action="store_true", help="let models think, if their template can switch it")
    add("--device", choices=["cuda", "mps", "cpu"], help="default: the first there is")
    dtypes = ["float32", "bfloat16", "float16", "float64"]
    add("--dtype", choices=dtypes, help="default: bfloat16 on cuda, float32 elsewhere")
    help = "longest completion (default: the checkpoint's, or 1024; to train a real model 2048)"
    add("--max-new-tokens", type=int, help=help)
    add("--seed", type=int, default=0, help="decides everything random")
    add("--plain", action="store_true", help="without fast/: slower, the same distributions")


def remembered(args):
    """What the checkpoint --model was trained with, for defaults: models, tools, corpus, length."""
    model = args.model
    file = Path(model, "train.json")
    if not file.exists():
        return {}
    found = json.loads(file.read_text())
    for name in MODELS:
        if is_server(found.get(name) or "") and not getattr(args, name):
            # A folder that somebody else made must not choose which server gets the key.
            flag = f"--{name.replace('_', '-')}"
            raise SystemExit(f"{model} was trained with {flag} {found[name]}: give that or another")
    if found.get("corpus") and Path(model, found["corpus"]).exists():
        found["corpus"] = str(Path(model, found["corpus"]))
    names = [*MODELS, "tools", "corpus", "think", "max_new_tokens"]
    return {name: found[name] for name in names if found.get(name)}


def is_toy(model):
    return Path(model).resolve() == Path(TOY).resolve()


def load_cast(args, loaded, say):
    """(the engines of the fixed modules, the toolset, the judge or None).

    Fills in args.tools, args.fixed and args.judge, and prints the first lines of a run. loaded:
    {name: engine} of the models that are in memory already; those loaded here join them."""
    cache = Cache(args.cache or ":memory:")
    tools = choose(args.tools, args.corpus, cache if args.cache else None)
    confined, how = protection() if "python_coder" in tools else (True, "")
    reads_web = "web_search" in tools and tools["web_search"].from_web
    if reads_web and not confined and not args.allow_unconfined:
        # A page could make the model read your files by the one and send them away by the other.
        raise ValueError(
            f"{how}: leave python_coder or web_search out of --tools, or give --allow-unconfined"
        )
    args.tools, args.fixed = list(tools), args.fixed or args.model
    args.judge = args.judge or args.fixed
    names = [("default", args.fixed), *((name, getattr(args, name)) for name in MODELS[1:-1])]
    fixed = {module: engine_of(name, args, loaded) for module, name in names if name}
    judge = None if args.judge == "none" else engine_of(args.judge, args, loaded)
    say(
        *(f"{module:<7} {engine}" for module, engine in fixed.items()), f"judge   {judge or 'none'}"
    )
    say(f"tools   {', '.join(tools)}", *filter(None, [left_out(), how]))
    return fixed, tools, judge and cached(judge, cache, args.max_new_tokens)


def engine_of(name, args, loaded):
    """The engine of a model: the one in `loaded`, or a new one, which is put there."""
    if name not in loaded and is_server(name):
        from models.server import Server

        loaded[name] = Server(name, think=args.think)
    elif name not in loaded:
        from flow_grpo import distribution
        from scale import adapters

        how = args.device, args.dtype, args.think, args.plain
        loaded[name] = adapters.load(name, distribution, *how)
        if base := adapters.base_of(name):  # in memory, too, and mostly needed
            loaded.setdefault(base, adapters.without(loaded[name]))
    return loaded[name]


def main(args):
    if args.compare:
        from rewards.compare import compare

        folders = answer_both(args) if args.data or args.benchmark else args.compare
        return print(*compare(*folders, args.out), sep="\n")
    sets = load_questions(args)
    loaded = {}
    policy = engine_of(args.model, args, loaded)
    print(f"planner {policy}")
    cast = policy, *load_cast(args, loaded, say=lambda *lines: print(*lines, sep="\n"))
    for name, engine in loaded.items():
        if not is_server(name) and engine.model.device.type == "cuda":
            from scale import fit

            engine.token_budget = fit.sampling_tokens(name, engine.model.device)
    folder = open_folder(args, loaded) if args.out else None
    print(flush=True)
    for name, questions in sets.items():  # one set, or one for each benchmark
        done = []
        try:
            for trial in range(args.trials):
                path = folder / f"{name}-{trial}.jsonl" if folder else None
                for rollouts in answer(args, cast, questions, trial, path):
                    done += rollouts
        finally:  # also after Ctrl-C, or if a server is down
            if done and not args.question:
                found = metrics.summary(done)
                print(f"{name}: {metrics.accuracy_line(found, min(len(done), len(questions)))}")
                print(f"calls   {metrics.calls_line(found)}", flush=True)
    if args.benchmark:
        print_table(args, folder)


def load_questions(args):
    """{name: [Question]} of each benchmark; or {"questions": [Question]}."""
    if args.benchmark:
        from benchmarks import tables

        names = tables.BENCHMARKS if "all" in args.benchmark else args.benchmark
        return {name: tables.load(name, args.benchmark_dir, args.limit) for name in names}
    if args.question:
        return {"questions": [Question(args.question, "")]}
    return {"questions": read_questions(args.data)[: args.limit]}


def answer(args, cast, questions, trial, path):
    """One trial of a set of questions: yields the rollouts of each batch, printed and kept in
    `path`.

    Batches that a stopped command has kept are read from there. One that was cut off is run again
    with the same seed, so the results are those of a command that was never stopped."""
    import torch

    settings = {name: getattr(args, name) for name in ROLLOUT_SETTINGS}
    kept = kept_rollouts(path, questions, args.batch)
    for start in range(0, len(questions), args.batch):
        batch, rollouts = questions[start : start + args.batch], kept[start : start + args.batch]
        if not rollouts:
            torch.manual_seed((args.seed * 1_009 + trial) * 1_000_003 + start)
            live = bool(args.question) and not args.quiet
            rollouts = roll_out(batch, *cast, **settings, live=live)
            if why := servers_down(rollouts):
                raise ValueError(f"{why}: fix that, then the same command goes on")
            if path:
                append(path, map(record_of, rollouts))
        for rollout, question in zip(rollouts, batch):
            if args.question:
                print(
                    f"Failed: {rollout.failed}" if rollout.failed else f"Answer: {rollout.answer}"
                )
            elif not args.quiet and not args.benchmark:
                verdict = "right" if rollout.right else f"wrong: {question.answer}"
                print(f"{trace(question, rollout)}  ({printable(verdict)})\n", flush=True)
        yield rollouts


def servers_down(rollouts):
    """Why a run must stop: a server was down for more than half of the rollouts. "" if not."""
    down = [rollout.failed for rollout in rollouts if outage(rollout.failed)]
    if 2 * len(down) <= len(rollouts):
        return ""
    return printable(f"{len(down)} of {len(rollouts)} rollouts were aborted ({down[0]})")


# --------------------------------------------------------------------------------------- folders
def lock(folder):
    """Take a folder for this process until it ends. ValueError if another one has it."""
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends, however
    except BlockingIOError:
        raise ValueError(f"{folder} is in use by another process") from None


def commit():
    """The commit of this code, with "-dirty" if files were changed since, and a digest of it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    here, found = Path(__file__).parent, ""
    try:
        found = subprocess.run(command, cwd=here, capture_output=True, text=True).stdout.strip()
    except OSError:  # there is no git
        pass
    files = sorted([*here.glob("*.py"), *here.glob("*/*.py")])
    files = [file for file in files if file.parent.name not in ("tests", "docs", "bench")]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return f"{found}-{digest.hexdigest()[:12]}"


def identity(args, loaded):
    """What decides the results besides the flags: the script, the code, the weights (or the name of
    a server's model), and the contents of files. loaded: {name: engine}."""
    found = {"script": Path(sys.argv[0]).name, "code": commit()}
    found["weights"] = sorted(f"{e.name} {e.fingerprint}".strip() for e in loaded.values())
    for name in ("data", "valid", "test", "corpus"):
        file = Path(getattr(args, name, None) or "none")
        if file.is_file():
            with open(file, "rb") as data:
                found[f"{name}_digest"] = hashlib.file_digest(data, "sha256").hexdigest()[:12]
    return found


def open_folder(args, loaded):
    """The folder of --out, new or with the same settings: the command then goes on in it."""
    free = {"out", "quiet", "device", "cache", "benchmark", "benchmark_dir", "trials", "compare"}
    settings = {name: value for name, value in vars(args).items() if name not in free}
    settings |= identity(args, loaded)
    folder, file = Path(args.out), Path(args.out, "settings.json")
    folder.mkdir(parents=True, exist_ok=True)
    lock(folder)
    if not file.exists():
        file.write_text(json.dumps(settings, indent=1))
    before = json.loads(file.read_text())
    if different := [name for name in settings if settings[name] != before.get(name)]:
        name = different[0]
        raise ValueError(
            f"{folder} has rollouts with another {name} ({before.get(name)}): give another --out"
        )
    return folder


def kept_rollouts(path, questions, batch):
    """The rollouts of the whole batches in a file; the rest, which a kill may leave, is cut off."""
    from rewards.compare import rollout_of

    if not path or not path.exists():
        return []
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    if len(lines) < len(questions):
        lines = lines[: len(lines) // batch * batch]
    rollouts = [rollout_of(json.loads(line)) for line in lines]
    asked = [(question.question, question.answer) for question in questions[: len(lines)]]
    if [(rollout.question, rollout.gold) for rollout in rollouts] != asked:
        raise ValueError(f"{path} holds answers to other questions: give another --out")
    os.truncate(path, sum(map(len, lines)))
    return rollouts


def append(path, records):
    """Add records to a JSONL file; they are on the disk when this returns."""
    with open(path, "a", encoding="utf-8", errors="replace") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------------- --compare and --benchmark
def answer_both(args):
    """The folders with the answers of two models: this command runs once for each."""
    folders = [
        Path(args.out or "runs/compare", re.sub(r"\W+", "-", model)) for model in args.compare
    ]
    at = sys.argv.index("--compare")
    words = sys.argv[1:at] + sys.argv[at + 3 :]
    for model, folder in zip(args.compare, folders):
        print(f"{model} answers, kept in {folder}", flush=True)
        run = [
            sys.executable,
            sys.argv[0],
            *words,
            "--model",
            model,
            "--out",
            str(folder),
            "--quiet",
        ]
        if failed := subprocess.run(run).returncode:
            raise SystemExit(failed)
    return folders


def print_table(args, folder):
    """Print table.md and write it: a row for each benchmark that has whole trials in the folder."""
    from benchmarks import tables
    from rewards.compare import read_answers

    rows = []
    for name, trials in read_answers(folder).items():
        rollouts = [rollout for question in trials for rollout in question]
        found, n = metrics.summary(rollouts), len(trials)
        low, high = metrics.interval(found["accuracy"], n)
        each = [100 * statistics.fmean(r.right for r in trial) for trial in zip(*trials)]
        spread = f" ({statistics.stdev(each):.1f})" if len(each) > 1 else ""
        paper = tables.BENCHMARKS[name]
        shares = "".join(f", {tool} {calls[0]}" for tool, calls in found["calls"].items())
        items = n if n == paper.items else f"{n} of {paper.items}"  # --limit, or unfinished
        row = {"benchmark": name, "items": items, "accuracy %": f"{100 * found['accuracy']:.1f}"}
        row |= {"95 %": f"{100 * low:.1f}-{100 * high:.1f}", "trials (sd)": f"{len(each)}{spread}"}
        row |= {f"paper: {way}": getattr(paper, way) for way in ("alone", "frozen", "trained")}
        row |= {"turns": f"{found['turns']:.2f}", "errors %": f"{100 * found['errors']:.1f}"}
        row |= {"failed": found["failed"], "undecided": found["undecided"], "calls": shares[2:]}
        rows.append({column: str(value) for column, value in row.items()})
    table = metrics.markdown([list(rows[0]), *(list(row.values()) for row in rows)])
    (folder / "table.md").write_text(table + "\n")
    print(printable(f"\n{table}\nKept in {folder}"))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this process quietly
    try:
        main(flags())
    except ValueError as why:  # a mistake in the command line or in a file: one sentence
        raise SystemExit(f"solve.py: {why}") from None
    except KeyboardInterrupt:
        raise SystemExit("\nsolve.py: stopped; with --out, the same command goes on") from None
