"""The flow: planner -> executor -> tool -> verifier, in turns, through one memory (AgentFlow, Algorithm 1).

    python solve.py                          a few questions of the toy: no download, key or GPU
    python solve.py "What is the capital of France?"
    python solve.py --data toy/test.jsonl --limit 100 --quiet
    python solve.py --model Qwen/Qwen2.5-7B-Instruct "Which is longer, the Nile or the Danube?"
    python solve.py --model Qwen/Qwen2.5-7B-Instruct --benchmark bamboogle gameof24
    python solve.py --model Qwen/Qwen2.5-7B-Instruct --fixed http://localhost:8000/v1 --data my.jsonl
    python solve.py --compare toy runs/toy-seed0/best --data toy/test.jsonl
    python solve.py --plain                  without fast/: slower, and the code to read first

rollout() runs a batch of questions through the modules:

    analysis -> [ planner -> executor -> tool -> verifier ] x turns -> generator

The rollouts of a batch go in lock-step: all of them plan, then the executor writes all their calls, then the
calls run, and so on. A rollout that has ended leaves the batch. So each stage is one batched call of a
language model, and a seed decides everything.

Three kinds of failure are kept apart:

    the model's   a plan or a call cannot be parsed: this costs a turn, and memory says why
    the world's   a tool returns "Error: ...": a result like any other, which the planner reads
    the system's  a prompt does not fit the model even with a shortened memory, or a model server stays down:
                  the rollout has failed; it is counted, but neither rewarded nor trained on

answer() is the loop over batches: roll out, grade, save, print. evaluate() rolls out and grades one batch,
for train.py. trace() shows a rollout as text. main() loads what the command line names, and calls answer().
"""

import dataclasses
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field

from logbook import endings

endings.without_traceback(__name__)

import tools as toolset
from cli import command_line, comparing

if __name__ == "__main__":
    # --help, mistakes and --compare need no torch, whose import takes seconds. main() parses again.
    with endings.errors_leave("solve.py"):
        args = command_line.solve_arguments(toolset.TOOLS)
        command_line.before_imports(args, toolset.toolbox(args.tools, args.corpus))
    comparing.leave_if_compared(args)

import torch
from tqdm import tqdm

import executor
import generator
import planner
import verifier
from cli import answering, toy_warning
from cli.command_line import TOY_TOOLS
from cli.progress import Progress
from logbook.records import Trial
from memory import BUDGET, Memory, Step
from models.completion import TOO_LONG
from models.tokens import after_thinking
from rewards.grade import grade
from rewards.metrics import summary
from rewards.questions import Question, prose_warning
from world import services
from world.text import printable, truncate

BUDGETS = (BUDGET, BUDGET // 4, BUDGET // 16)  # characters of memory in a prompt, tried in this order
RECORD_LIMIT = 20_000  # characters: longer completions, calls and answers are truncated in the record


@dataclass
class Rollout:
    """One rollout o_i, while it runs and afterwards. Flow-GRPO trains on its `actions`."""

    question: Question
    memory: Memory
    actions: list = field(default_factory=list)  # the planner's Completion of each turn: ids of s^t and a^t
    outputs: list = field(default_factory=list)  # what each module and tool wrote, see add_output()
    plan: planner.Plan | str = ""  # of this turn; a str is the parse error
    call: executor.Call | str = ""  # of this turn; a str is the parse error
    stopped: bool = False  # the verifier wrote STOP
    failed: str = ""  # why there is no outcome: training leaves it out, accuracy counts it as not right
    undecided: bool = False  # no outcome either: neither rules nor judge could tell if the answer is right
    answer: str = ""
    reward: float = 0.0  # R(o), 1 or 0, one for the whole rollout
    seconds: float = 0.0  # its share of the batch's time, plus the judge's
    printed: int = 0  # lines of its trace that have been printed, see print_traces()

    def add_output(self, turn, module, text, tokens, seconds):
        """Add what a module or a tool wrote. seconds: of the batched call, the same for all its rollouts."""
        output = {"turn": turn, "module": module, "text": truncate(text, RECORD_LIMIT)}
        self.outputs.append(output | {"tokens": tokens, "seconds": round(seconds, 3)})

    def add_result(self, turn, result):
        """Add the step of this turn, still without a verdict. If the engine of a tool is down, fail."""
        if result.failed:
            self.failed = f"{self.plan.tool}: {result.failed}"
            return
        tool, sub_goal, seconds = self.plan.tool, self.plan.sub_goal, round(result.seconds, 3)
        command = "" if isinstance(self.call, str) else truncate(str(self.call), RECORD_LIMIT)
        step = Step(turn, tool, sub_goal, command, result.text, result.error, seconds=seconds)
        self.memory.steps.append(step)
        self.add_output(turn, tool, result.text, result.tokens, result.seconds)

    def record(self):
        """The rollout as data for JSON, without its token ids."""
        q = self.question
        data = {"id": q.id, "kind": q.kind, "question": q.question, "gold": q.answer, "answer": self.answer}
        data |= {"reward": self.reward, "failed": self.failed, "undecided": self.undecided}
        data |= {"turns": len(self.actions), "seconds": round(self.seconds, 3)}
        return data | {"memory": dataclasses.asdict(self.memory), "words": self.outputs}

    @classmethod
    def from_record(cls, question, data):
        """The rollout that record() wrote, without its actions."""
        steps = [Step(**step) for step in data["memory"]["steps"]]
        filled = Memory(data["memory"]["question"], data["memory"]["analysis"], steps)
        names = "answer", "reward", "failed", "undecided", "seconds"
        return cls(question, filled, outputs=data["words"], **{name: data[name] for name in names})


def rollout(questions, policy, fixed, tools, max_turns=3, temperature=0.7, max_new_tokens=None, watch=None):
    """Run every question through the flow, in lock-step (the paper's Algorithm 1): [Rollout], in their order.

    questions: [Question]; G copies of a question make a group. policy: the planner's engine, the only one
    that samples. fixed: the engine of all other modules, or {module: engine} (a module that is not in it gets
    the engine of the analysis).
    watch(rollouts, turn, module), if given, is called before each stage: it may show the progress.
    """
    start = time.perf_counter()
    rollouts = [Rollout(question, Memory(question.question)) for question in questions]
    engines = {**(fixed if isinstance(fixed, dict) else {"analysis": fixed}), "planner": policy}
    greedy = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
    sampled = {"temperature": temperature, "max_new_tokens": max_new_tokens}

    def stage(module, turn, live):
        """One module writes for each of these rollouts that has not failed: [(rollout, Completion)]."""
        live = [rollout for rollout in live if not rollout.failed]
        if live and watch:
            watch(rollouts, turn, module)
        engine = engines.get(module, engines["analysis"])
        settings = sampled if module == "planner" else greedy
        prompt = lambda rollout, budget: prompt_of(module, tools, rollout, budget)
        return call_engine(engine, live, turn, module, prompt, **settings)

    def base_generator(queries):
        """The engine behind the one tool that needs one."""
        return engines.get("base_generator", engines["analysis"])(queries, **greedy)

    for rollout, completion in stage("analysis", 0, rollouts):
        rollout.memory.analysis = truncate(after_thinking(completion.text) or "", BUDGET // 4)

    for turn in range(1, max_turns + 1):
        live = [rollout for rollout in rollouts if not rollout.stopped and not rollout.failed]
        for rollout, completion in stage("planner", turn, live):
            rollout.actions.append(completion)
            rollout.plan = planner.parse(completion.text, tools)
            if isinstance(rollout.plan, str):  # a parse error costs the turn; the planner's next prompt shows it
                step = Step(turn, "", "", "", f"Error: {rollout.plan}", error=True, verdict="CONTINUE")
                rollout.memory.steps.append(step)

        planned = [rollout for rollout in live if not rollout.failed and not isinstance(rollout.plan, str)]
        for rollout, completion in stage("executor", turn, planned):
            rollout.call = executor.parse(completion.text, rollout.plan.tool, tools[rollout.plan.tool])

        called = [rollout for rollout in planned if not rollout.failed]  # a call's parse error becomes its result
        if called and watch:
            watch(rollouts, turn, "tools")
        results = toolset.run_calls([rollout.call for rollout in called], tools, base_generator)
        for rollout, result in zip(called, results):
            rollout.add_result(turn, result)

        for rollout, completion in stage("verifier", turn, called):
            rollout.stopped = verifier.parse(completion.text)
            rollout.memory.steps[-1].verdict = "STOP" if rollout.stopped else "CONTINUE"

    for rollout, completion in stage("generator", max_turns + 1, rollouts):
        rollout.answer = truncate(generator.parse(completion.text), RECORD_LIMIT)
    seconds = time.perf_counter() - start
    for rollout in rollouts:
        rollout.seconds = seconds / len(rollouts)
    return rollouts


# The modules whose prompt() reads the whole state: question, tools, analysis, memory. Add your module here.
STATE_READERS = {"planner": planner, "verifier": verifier}


def prompt_of(module, tools, rollout, budget):
    """The prompt of a module, made from its part of s^t = (q, K, M^t). budget: characters of memory."""
    question, analysis, plan = rollout.question.question, rollout.memory.analysis, rollout.plan
    if module == "analysis":
        return planner.analysis_prompt(question, tools)
    if module == "executor":
        return executor.prompt(question, plan.context, plan.sub_goal, plan.tool, tools[plan.tool])
    if module == "generator":
        return generator.prompt(question, analysis, rollout.memory.render(budget))
    if module not in STATE_READERS:
        raise SystemExit(f"solve.py: rollout() runs a module {module!r} that has no prompt: import {module} "
                         "and add it to STATE_READERS, see docs/use.md.")
    return STATE_READERS[module].prompt(question, tools, analysis, rollout.memory.render(budget))


def call_engine(engine, rollouts, turn, module, prompt, **settings):
    """One batched call of an engine: [(rollout, Completion)], without the rollouts that fail.

    prompt(rollout, budget) -> text. One that does not fit the model is made again with less memory. It fails
    if its prompt never fits, or if the engine gives another error. settings: temperature, max_new_tokens.
    """
    completions, waiting = {}, range(len(rollouts))
    start = time.perf_counter()
    for budget in BUDGETS:
        if waiting:
            prompts = [prompt(rollouts[i], budget) for i in waiting]
            completions |= zip(waiting, engine(prompts, **settings))
            waiting = [i for i in waiting if completions[i].error == TOO_LONG]
    seconds = time.perf_counter() - start
    for i, rollout in enumerate(rollouts):
        rollout.add_output(turn, module, completions[i].text, completions[i].tokens, seconds)
        rollout.failed = f"{module}: {completions[i].error}" if completions[i].error else ""
    return [(rollout, completions[i]) for i, rollout in enumerate(rollouts) if not rollout.failed]


def answer(trial, args, policy, fixed, tools, judge):
    """Answer the questions of a trial, batch by batch: roll out, grade, save, print.

    trial: a logbook.records.Trial. Batches that a stopped run has saved are only printed.
    """
    trial.rollouts = [Rollout.from_record(*pair) for pair in zip(trial.questions, trial.saved())]
    print_traces(trial.rollouts, args)
    with Progress(len(trial.questions), trial.name, len(trial.rollouts)) as progress:

        def watch(rollouts, turn, module):  # before each stage
            progress(rollouts, turn, module)
            trial.save_unfinished(rollouts)
            if args.question:
                print_traces(rollouts, args, ended=False)

        for seed, questions in trial.batches():
            torch.manual_seed(seed)
            rollouts = rollout(questions, policy, fixed, tools, watch=watch, **rollout_settings(args))
            watch(rollouts, 0, "grade")
            grade(rollouts, judge)
            if trial.add(rollouts):  # False: a server was down, and batches() repeats these questions
                print_traces(rollouts, args)
                progress.next_batch(trial.rollouts)


def evaluate(questions, policy, fixed, tools, judge=None, watch=None, **settings):
    """Run and grade all questions in one batch: ({metric: number}, [Rollout]). Accuracy counts a failed
    rollout as not right.

    watch, settings: of rollout(). Without watch there is a progress bar.
    """
    with nullcontext(watch) if watch else Progress(len(questions)) as shown:
        rollouts = rollout(questions, policy, fixed, tools, watch=shown, **settings)
        shown(rollouts, 0, "grade")
        grade(rollouts, judge)
    return summary(rollouts), rollouts


def trace(rollout, ended=True):
    """A rollout as text: what every module and tool wrote, turn by turn. Control characters are escaped.

    ended: whether there is an answer to show. While a rollout runs, its trace only grows at the end.
    """
    lines = [f"Question: {rollout.question.question}"]
    for output in rollout.outputs:
        once_a_rollout = output["module"] in ("analysis", "generator", "judge")
        title = output["module"] if once_a_rollout else f"turn {output['turn']} {output['module']}"
        tokens = f"{output['tokens']} tokens, " if output["tokens"] else ""
        lines.append(f"[{title}]  {tokens}{output['seconds']:.2f} s")
        lines += ["    " + line for line in output["text"].strip().splitlines()]
    if ended:
        lines.append(f"Failed: {rollout.failed}" if rollout.failed else f"Answer: {rollout.answer}")
    return printable("\n".join(lines))


def print_traces(rollouts, args, ended=True):
    """Print the lines of each rollout's trace that are not printed yet. ended: as in trace()."""
    if args.quiet or args.benchmark:
        return
    for rollout in rollouts:
        lines = trace(rollout, ended).split("\n")
        new, rollout.printed = lines[rollout.printed :], len(lines)
        if ended and not args.question:
            verdict = "right" if rollout.reward > 0 else f"wrong: {rollout.question.answer}"
            new[-1] += printable(f"  ({verdict})")
        if new:
            tqdm.write("\n".join(new) + "\n" * ended)  # above the progress bar
    sys.stdout.flush()


# ------------------------------------------------------------------------------------------- the command line
def example_prompts():
    """{module: its prompt in one state}. They tell if a prompt was edited after the toy had been made."""
    question, tools = "What is 2 + 2?", {name: toolset.TOOLS[name] for name in TOY_TOOLS}
    step = Step(1, "python_coder", "Add.", 'python_coder(code="print(2 + 2)")', "4", verdict="CONTINUE")
    rollout = Rollout(Question(question, ""), Memory(question, "A sum.", [step]))
    rollout.plan = planner.Plan(question, "Add.", "python_coder")
    return {module: prompt_of(module, tools, rollout, BUDGET)
            for module in ("analysis", "planner", "executor", "verifier", "generator")}


def load_tools(args):
    """The toolbox, and the cache of the judge's verdicts. With --cache it also holds results from the web."""
    cache = services.Cache(args.cache or ":memory:")
    return toolset.toolbox(args.tools, args.corpus, cache if args.cache else None), cache


def rollout_settings(args):
    """The settings of rollout() that a command line of solve.py or train.py has."""
    return {name: getattr(args, name) for name in ("max_turns", "temperature", "max_new_tokens")}


def main():
    args = command_line.solve_arguments(toolset.TOOLS)
    with endings.errors_leave("solve.py"):  # a run that cannot begin ends here, with one sentence
        sets = answering.load_questions(args)
        tools, cache = load_tools(args)
        left_out, args.tools = toolset.left_out(args.tools), list(tools)
        policy, fixed, judge, lines = answering.load_models(args, cache, tools, left_out)
        folder = answering.open_run(args)
    lines.append(toy_warning.warning([policy, *fixed.values()], example_prompts(), tools, args.question))
    lines.append(prose_warning(sets["questions"]) if args.data and not judge else "")
    for line in filter(None, lines):
        print(printable(line))
    print(flush=True)

    for name, questions in sets.items():
        start, trials = time.perf_counter(), []
        with answering.partial_results(args, trials):
            for number in range(args.trials):
                file = folder and folder / f"{name}-{number}.jsonl"
                trials.append(Trial(name, questions, args.batch, args.seed * 1_009 + number, file))
                answer(trials[-1], args, policy, fixed, tools, judge)
        answering.print_summary(args, name, trials, time.perf_counter() - start)
    answering.print_end(args)


if __name__ == "__main__":
    main()
