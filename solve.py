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
                server is down, or the prompt is too long even with a shortened memory. (A rollout
                on which the judge gives no verdict, `undecided`, is treated in the same way.)

Below it: who plays what, and the command line.

    python solve.py                          a few questions of the toy: no download, key or GPU
    python solve.py --data toy/test.jsonl --max-turns 3 --limit 100 --quiet
    python solve.py --model Qwen/Qwen2.5-7B-Instruct "Which is longer, the Nile or the Danube?"
    python solve.py --model Qwen/Qwen2.5-7B-Instruct --benchmark bamboogle gameof24
    python solve.py --compare toy runs/toy-seed0/best --data toy/test.jsonl --max-turns 3

Slow imports (torch) are inside functions.
"""

import importlib.util
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

if not importlib.util.find_spec("fcntl"):
    raise SystemExit("nano-agentflow needs Linux or macOS; on Windows, run it in WSL")
from tqdm import tqdm

import executor
import generator
import planner
import verifier
from benchmarks.questions import Question, read_questions
from executor import Call
from memory import Memory, Step
from models.chat import after_thinking
from models.completion import TOO_LONG, Completion, is_server, servers_down
from planner import Plan, Unparsed
from record.flags import MODELS, solve_flags
from record.folder import append, kept_rollouts, open_answers
from record.metrics import accuracy_line, calls_line, summary
from record.rollouts import block, ending, record_of, trace
from rewards.grade import grade
from rewards.judge import cached
from tools import TOOLS, available, choose, left_out, run_calls, without_contact
from world.mistakes import Mistake, drop_output
from world.sandbox import protection
from world.services import Cache
from world.text import printable, truncate

MODULES = "analysis", "planner", "executor", "verifier", "generator"
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
    # for tools that keep something between calls; at first {"question": question}
    state: dict = field(default_factory=dict)

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

    def add_output(self, turn, module, text, tokens, seconds, cut=False, written=0):
        """Note what a module or a tool wrote. seconds: of the whole batch, if it is a module.

        tokens: of prompt and completion together, `written` of them in the completion (0: unknown,
        because a server gives only the sum)."""
        output = {"turn": turn, "module": module, "text": truncate(text, RECORD_LIMIT)}
        output |= {"tokens": tokens, "written": written, "seconds": round(seconds, 3), "cut": cut}
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
    policy: the engine that plays the `trained` modules, some of MODULES. Only these sample. fixed:
    the engine that plays all others, and base_generator; or a dict, as {"executor": engine,
    "default": engine}. judge: grades what the rules cannot. max_turns: 3 as in the paper's
    training. max_new_tokens: longest completion, in tokens; None: the checkpoint's limit, else
    1,024. live: print what modules and tools write, as soon as they have written it.
    """
    if unknown := {*trained} - {*MODULES}:
        raise Mistake(f"no module is called {min(unknown)!r}: train some of {', '.join(MODULES)}")
    start = time.perf_counter()
    engines = fixed if isinstance(fixed, dict) else {"default": fixed}
    rollouts = [Rollout(q, Memory(q.question), state={"question": q}) for q in questions]
    ask_model = engines.get("base_generator", engines["default"])
    ask_model = partial(ask_model, max_new_tokens=max_new_tokens)
    bar = tqdm(total=len(rollouts), unit="rollout", leave=False, delay=1, disable=live or None)

    def ask(module, turn, some, prompt):
        """Run a module on each of these rollouts that has not failed: [(rollout, Completion)].

        prompt(rollout) -> text. If the engine reports an error, the rollout fails."""
        some = [rollout for rollout in some if not rollout.failed]
        bar.set_postfix_str(f"turn {turn} {module}")
        started = time.perf_counter()
        samples = module in trained
        engine = policy if samples else engines.get(module, engines["default"])
        settings = dict(temperature=temperature if samples else 0.0, max_new_tokens=max_new_tokens)
        completions = complete(engine, some, prompt, settings)
        for rollout, c in zip(some, completions, strict=True):
            seconds = time.perf_counter() - started
            rollout.add_output(turn, module, c.text, c.tokens, seconds, c.cut, len(c.ids))
            if c.error:
                rollout.failed = f"{module}: {c.error}"
            elif samples:
                rollout.sampled.append(c)
            if live:
                print(block(rollout.outputs[-1]), flush=True)
        return [(rollout, c) for rollout, c in zip(some, completions, strict=True) if not c.error]

    prompt = lambda r: planner.analysis_prompt(r.memory.question, tools)
    written = ask("analysis", 0, rollouts, prompt)
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
            else:
                # An unreadable plan uses up the turn. With no result to check, the verifier is
                # skipped. The next prompt shows the parse error.
                step = Step(turn, "", "", "", f"Error: {plan}", error=True, verdict="CONTINUE")
                rollout.memory.steps.append(step)

        prompt = lambda r: executor.prompt(r.memory.question, r.plans[-1], tools[r.plans[-1].tool])
        written = ask("executor", turn, planned, prompt)
        for rollout, completion in written:
            name = rollout.plans[-1].tool
            rollout.call = executor.parse(completion.text, name, tools[name])
        called = [rollout for rollout, _ in written]  # each with a Call, or an Unparsed

        bar.set_postfix_str(f"turn {turn} tools")
        calls, states = [r.call for r in called], [r.state for r in called]  # not s^t: tools' own
        results = run_calls(calls, states, tools, ask_model)
        for rollout, result in zip(called, results, strict=True):
            plan, command = rollout.plans[-1], ""
            if result.failed:
                rollout.failed = f"{plan.tool}: {result.failed}"
                continue
            if isinstance(rollout.call, Call):
                command = truncate(str(rollout.call), RECORD_LIMIT)
            step = Step(turn, plan.tool, plan.sub_goal, command, result.text, result.error)
            step.seconds = round(result.seconds, 3)
            rollout.memory.steps.append(step)
            numbers = result.tokens, result.seconds, False, result.written
            rollout.add_output(turn, plan.tool, result.text, *numbers)
            if live:
                print(block(rollout.outputs[-1]), flush=True)

        written = ask("verifier", turn, called, lambda r: verifier.prompt(r.memory, tools))
        for rollout, completion in written:
            rollout.stopped = verifier.parse(completion.text, completion.cut)
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


def complete(engine, rollouts, prompt, settings):
    """[Completion] of prompt(rollout), for each of these rollouts.

    A prompt that is too long for the model is written again with less memory, SHORTER times."""
    completions = engine([prompt(rollout) for rollout in rollouts], **settings) if rollouts else []
    for _ in range(SHORTER):
        too_long = [i for i, c in enumerate(completions) if c.error == TOO_LONG]
        for i in too_long:
            rollouts[i].memory.budget //= 4
        again = engine([prompt(rollouts[i]) for i in too_long], **settings) if too_long else []
        for i, completion in zip(too_long, again, strict=True):
            completions[i] = completion
    return completions


# ---------------------------------------------------------------------------------- who plays what
def load_tools(args):
    """(the toolset, the cache). Mistake for tools that cannot be used, before a model is loaded."""
    cache = Cache(args.cache or ":memory:")
    tools = choose(args.tools, args.corpus, cache if args.cache else None)
    confined, protected = protection_of(tools)
    from_web = any(tool.from_web for tool in tools.values())
    if from_web and not confined and not args.allow_unconfined:
        # Text from the web could make the model run code that reads your files and sends them away.
        cure = "leave python_coder out of --tools, or every tool that reads the web"
        raise Mistake(f"{protected}: {cure}, or give --allow-unconfined")
    return tools, cache


def protection_of(tools):
    """(is python_coder confined, a sentence about it); (True, "") if it is not among the tools."""
    return protection() if "python_coder" in tools else (True, "")


def load_cast(args, loaded, tools, cache, say):
    """(the engines of the fixed modules, the judge or None).

    Prints the first lines of a run. loaded: {name: engine} of the models that are in memory
    already; those loaded here join them."""
    names = [("default", args.fixed), *((name, getattr(args, name)) for name in MODELS[1:-1])]
    fixed = {module: engine_of(name, args, loaded) for module, name in names if name}
    judge = None if args.judge == "none" else engine_of(args.judge, args, loaded)
    lines = [f"{module:<7} {engine}" for module, engine in fixed.items()]
    lines += [f"judge   {judge or 'none'}", f"tools   {', '.join(tools)}"]
    more = left_out(tools), without_contact(tools), protection_of(tools)[1]
    say(*lines, *filter(None, more))
    return fixed, judge and cached(judge, cache, args.max_new_tokens)


def engine_of(name, args, loaded):
    """The engine of a model: the one in `loaded`, or a new one, which is put there."""
    if name not in loaded and is_server(name):
        from models.server import Server

        loaded[name] = Server(name, think=args.think)
    elif name not in loaded:
        from models.local import base_of
        from scale import adapters

        loaded[name] = load(name, args)
        if base := base_of(name):  # in memory, too, and mostly needed
            loaded.setdefault(base, adapters.without(loaded[name]))
    return loaded[name]


def load(name, args, trainable=False):
    """A local model, as the flags say. Its samples are drawn from flow_grpo.distribution()."""
    from fast.prefix import prefill
    from flow_grpo import distribution
    from models import local

    settings = dict(device=args.device, dtype=args.dtype, think=args.think, trainable=trainable)
    return local.load(name, distribution, prefill=None if args.plain else prefill, **settings)


# -------------------------------------------------------------------------------- the command line
def main(args):
    if args.compare:
        from record.compare import answer_both, compare

        folders = answer_both(args, flags) if args.data or args.benchmark else args.compare
        return print(*compare(*folders, args.out), sep="\n")
    sets = load_questions(args)
    tools, cache = load_tools(args)
    loaded = {}
    policy = engine_of(args.model, args, loaded)
    print(f"planner {policy}")
    fixed, judge = load_cast(args, loaded, tools, cache, lambda *lines: print(*lines, sep="\n"))
    cast = policy, fixed, tools, judge
    local = [engine for name, engine in loaded.items() if not is_server(name)]
    if local:  # what the device has chosen is kept with the answers, as if it had been given
        args.dtype = str(local[0].model.dtype).removeprefix("torch.")
    for engine in [engine for engine in local if engine.model.device.type == "cuda"]:
        from scale import fit

        free, _ = fit.free_memory(engine.model.device)  # once all models are loaded
        fit.give_room(engine, int(fit.CARD * free), args.plain)
    folder = open_answers(args, loaded, sets) if args.out else None
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
                found = summary(done)
                print(f"{name}: {accuracy_line(found, min(len(done), len(questions)))}")
                print(f"calls   {calls_line(found)}", flush=True)
                for why, times in Counter(r.failed for r in done if r.failed).most_common(3):
                    print(f"failed  {times} times: {printable(why)}")
    if args.benchmark:
        from benchmarks.tables import write_table

        print(printable(f"\n{write_table(folder)}\nKept in {folder}"))


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
    with the same seed, so the results are those of a command that was never stopped (on a GPU, if
    as much memory is free: it decides which rows are sampled together)."""
    import torch

    kept = kept_rollouts(path, questions, args.batch)
    for start in range(0, len(questions), args.batch):
        batch, rollouts = questions[start : start + args.batch], kept[start : start + args.batch]
        if not rollouts:
            seed = (args.seed * 1_009 + trial) * 1_000_003 + start
            torch.manual_seed(seed)
            random.seed(seed)  # for a fork whose prompts, say, depend on chance
            rollouts = roll_out(
                batch,
                *cast,
                max_turns=args.max_turns,
                temperature=args.temperature,
                max_new_tokens=args.max_new_tokens,
                live=bool(args.question) and not args.quiet,
            )
            if why := servers_down(rollouts, cast[2]):
                raise Mistake(f"{why}: fix that, then the same command goes on")
            if path:
                append(path, map(record_of, rollouts))
        for rollout, question in zip(rollouts, batch, strict=True):
            if args.question:
                print(ending(rollout))
            elif not args.quiet and not args.benchmark:
                verdict = "right" if rollout.right else f"wrong: {question.answer}"
                print(f"{trace(question, rollout)}  ({printable(verdict)})\n", flush=True)
        yield rollouts


def flags(words=None):
    args = solve_flags(words, tools=TOOLS, about=__doc__.split("\n")[0])
    args.tools = args.tools or available()
    return args


def interrupted(number, frame):
    """The first Ctrl-C waits for calls that are running; the second one does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print("\nsolve.py: stops after the calls that run; Ctrl-C stops them, too", file=sys.stderr)
    raise KeyboardInterrupt


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background
        signal.signal(signal.SIGINT, interrupted)
    try:
        main(flags())
        print(end="", flush=True)
    except BrokenPipeError:
        drop_output()
        raise SystemExit(1) from None
    except Mistake as why:
        raise SystemExit(f"solve.py: {why}") from None
    except KeyboardInterrupt:
        raise SystemExit("\nsolve.py: stopped; with --out, the same command goes on") from None
