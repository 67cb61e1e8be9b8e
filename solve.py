"""The flow: planner -> executor -> tool -> verifier, in turns, through one memory (AgentFlow, Algorithm 1).

roll_out() runs a batch of questions:

    analysis -> [ planner -> executor -> tool -> verifier ] x turns -> generator

A Rollout is one question on its way through the flow. The rollouts of a batch move in lock-step: all of them
plan, then the executor writes all their calls, then the calls run, and so on. So a language model gets all
prompts of a stage in one batch. A rollout that the verifier has stopped waits for the generator, which
writes all answers at the end.

An *engine* is a language model: engine(prompts, temperature, max_new_tokens) -> [Completion], with the text,
and the token ids that training needs (models/completion.py).

Whatever goes wrong is one of two things:

    an error    The rollout goes on. A plan or call could not be parsed, or a tool did not find what it was
                asked for, or the web service behind it is down. This costs a turn, and memory says why: the
                planner reads it in its next prompt, even if another module made the mistake.
    a failure   The rollout breaks off (`failed` says why), counts as wrong, and is not trained on. A module
                or the judge got no completion from its language model: the server is down or refuses the
                prompt, or the prompt is too long even with a shortened memory. (But a base_generator query
                that is too long is an error.)

The last part of this file, from run_trial() on, is the command line:

    python solve.py                          a few questions of the toy: no download, key or GPU
    python solve.py --data toy/test.jsonl --max-turns 2 --limit 100 --quiet
    python solve.py --model Qwen/Qwen2.5-7B-Instruct "Which is longer, the Nile or the Danube?"
    python solve.py --model Qwen/Qwen2.5-7B-Instruct --benchmark bamboogle gameof24
    python solve.py --compare toy runs/toy-seed0/best --data toy/test.jsonl
    python solve.py --plain                  without fast/ (slower)
"""

from cli import early

# Before torch, which is slow to import: --help, --compare and mistakes in the command line end here
early.check(__name__, "solve.py")

import time
from dataclasses import dataclass, field
from functools import partial

import torch

import executor
import generator
import planner
import verifier
from cli import answering, command_line
from cli.watching import watching
from executor import Call
from memory import BUDGET, Memory, Step
from models.completion import TOO_LONG, Completion
from models.tokens import after_thinking
from planner import Plan, Unparsed
from rewards.grade import grade
from rewards.metrics import summary
from rewards.questions import Question
from tools import TOOLS, run_calls
from world.text import truncate

# Characters of memory: if a prompt with BUDGET is too long for the model, these are tried, one after the
# other.
SMALLER_BUDGETS = BUDGET // 4, BUDGET // 16
ANALYSIS_LIMIT = BUDGET // 4  # characters of the analysis, which is shown beside the memory
RECORD_LIMIT = 20_000  # characters: longer completions, calls and answers are truncated


def roll_out(questions, policy, fixed, tools, max_turns=3, temperature=0.7, max_new_tokens=None,
             watch=None):
    """Run every question through the flow, in lock-step (the paper's Algorithm 1): [Rollout], in their order.

    questions: [Question]; G copies of a question make a group.
    policy: the engine that plays the planner; it alone samples. fixed: the engine that plays all other
    modules, and base_generator; or a dict, such as {"executor": engine, "default": engine}, where "default"
    plays those that are not named.
    max_turns: 3 as in the paper's training; the commands have defaults of their own (cli/flags.py).
    max_new_tokens: of each completion; None: as many as the checkpoint says, or 1 024.
    watch: watch(rollouts, turn, module) is called before each stage, to show or save progress. It changes
    nothing in the rollouts.
    """
    # Why in lock-step? If fast rollouts ran ahead, batch sizes would depend on timing. Rounding depends on
    # batch sizes, so the same seed would not always give the same rollouts.
    start = time.perf_counter()
    rollouts = [Rollout(question, Memory(question.question)) for question in questions]
    # modules.run(module, turn, rollouts) asks a module for all of these rollouts in one batch, and gives
    # [(rollout, Completion)]. Rollouts that fail, or have failed before, are left out of the list.
    modules = Modules(rollouts, policy, fixed, tools, temperature, max_new_tokens, watch)

    for rollout, completion in modules.run("analysis", 0, rollouts):
        rollout.memory.analysis = truncate(after_thinking(completion.text) or "", ANALYSIS_LIMIT)

    for turn in range(1, max_turns + 1):
        running = [rollout for rollout in rollouts if not rollout.stopped and not rollout.failed]
        if not running:
            break

        planned = []  # those of `running` whose plan could be parsed
        for rollout, completion in modules.run("planner", turn, running):
            rollout.plans.append(completion)
            rollout.plan = planner.parse(completion.text, tools)
            if isinstance(rollout.plan, Plan):
                planned.append(rollout)
            else:
                rollout.add_parse_error(turn)  # it costs the turn; the next prompt shows it

        called = []  # those of `planned` whose executor wrote something: a Call, or an Unparsed (an error)
        for rollout, completion in modules.run("executor", turn, planned):
            name = rollout.plan.tool
            rollout.call = executor.parse(completion.text, name, tools[name])
            called.append(rollout)

        for rollout, result in modules.run_tools(turn, called):
            rollout.add_result(turn, result)  # a step of the memory, or `failed`

        for rollout, completion in modules.run("verifier", turn, called):
            rollout.memory.steps[-1].verdict = "STOP" if verifier.parse(completion.text) else "CONTINUE"

        # Now each rollout of `running` has one more Step, unless it failed: plans[k] led to memory.steps[k].
        for rollout in running:
            rollout.stopped = not rollout.failed and is_over(rollout)

    for rollout, completion in modules.run("generator", max_turns + 1, rollouts):
        rollout.answer = truncate(generator.parse(completion.text), RECORD_LIMIT)
    seconds = time.perf_counter() - start
    for rollout in rollouts:
        rollout.seconds = seconds / len(rollouts)
    return rollouts


def is_over(rollout):
    """Is the rollout finished after this turn? Yes, if the verifier wrote STOP.

    A rule of your own goes here; memory.steps[-1] is this turn's step. If the plan could not be parsed, its
    tool, sub_goal and command are ""; if only the call could not, its command is "".
    """
    return rollout.memory.steps[-1].verdict == "STOP"


def prompt_of(module, tools, rollout, budget=BUDGET):
    """The prompt of a module. Each reads only some of question, toolset, plan and memory. budget: characters
    of memory."""
    question, analysis, plan = rollout.memory.question, rollout.memory.analysis, rollout.plan
    if module == "analysis":
        return planner.analysis_prompt(question, tools)
    if module == "executor":
        return executor.prompt(question, plan.context, plan.sub_goal, plan.tool, tools[plan.tool])
    memory = rollout.memory.render(budget)  # for those that read it
    if module == "planner":
        return planner.prompt(question, tools, analysis, memory)
    if module == "verifier":
        return verifier.prompt(question, tools, analysis, memory)
    if module == "generator":
        return generator.prompt(question, analysis, memory)
    raise SystemExit(f"solve.py: roll_out() runs a module {module!r}, which has no prompt: add it to "
                     "prompt_of(), see docs/fork.md.")


@dataclass
class Rollout:
    """One rollout, while it runs and afterwards."""

    question: Question  # with its text, also called `question`, and the gold answer
    memory: Memory

    # What the planner wrote, with the ids of s^t and a^t: Flow-GRPO trains on it, and train.py makes a
    # flow_grpo.Action of each. plans[k] led to memory.steps[k]. (A failed rollout may lack the last step.)
    plans: list[Completion] = field(default_factory=list)

    # of the current turn (`call`: of the last turn whose plan could be parsed)
    plan: Plan | Unparsed | None = None
    call: Call | Unparsed | None = None

    # how it ended
    stopped: bool = False  # is_over() has ended it; False if the turns ran out
    failed: str = ""  # why it broke off: training leaves it out, accuracy counts it as wrong
    answer: str = ""
    right: bool = False  # is the answer right?
    undecided: bool = False  # the judge was asked and gave no verdict: treated like a failure
    reward: float = 0.0  # R_i, one for the whole rollout, from rewards/grade.py: 1 if it is right, else 0

    # for the record
    outputs: list = field(default_factory=list)  # what each module and tool wrote, see add_output()
    seconds: float = 0.0  # its share of the batch's time, plus the judge's

    def add_output(self, turn, module, text, tokens, seconds):
        """Note what a module or a tool wrote. seconds: of the whole batch, if it is a module."""
        self.outputs.append({"turn": turn, "module": module, "text": truncate(text, RECORD_LIMIT),
                             "tokens": tokens, "seconds": round(seconds, 3)})

    def add_parse_error(self, turn):
        """The plan could not be parsed: the step has no tool and no call, and its result is the error.

        The verifier is not run in this turn: nothing was done that could complete the memory. A *call* that
        could not be parsed becomes an error result (tools.run_calls), which the verifier does read."""
        self.memory.steps.append(Step(turn, tool="", sub_goal="", command="", result=f"Error: {self.plan}",
                                      error=True, verdict="CONTINUE"))

    def add_result(self, turn, result):
        """Add this turn's step to the memory, still without a verdict; fail if base_generator did."""
        if result.failed:
            self.failed = f"{self.plan.tool}: {result.failed}"
            return
        tool, sub_goal, seconds = self.plan.tool, self.plan.sub_goal, round(result.seconds, 3)
        command = truncate(str(self.call), RECORD_LIMIT) if isinstance(self.call, Call) else ""
        step = Step(turn, tool, sub_goal, command, result.text, result.error, seconds=seconds)
        self.memory.steps.append(step)
        self.add_output(turn, tool, result.text, result.tokens, result.seconds)


class Modules:
    """Which engine plays each module. run() runs one module on many rollouts at once.

    rollouts: all of the batch, for watch(). The other arguments are those of roll_out().
    """

    def __init__(self, rollouts, policy, fixed, tools, temperature, max_new_tokens, watch):
        self.rollouts, self.tools, self.watch = rollouts, tools, watch
        engines = fixed if isinstance(fixed, dict) else {"default": fixed}
        self.engines = engines | {"planner": policy}
        self.temperature, self.max_new_tokens = temperature, max_new_tokens

    def run(self, module, turn, rollouts):
        """Run a module on each of these rollouts that has not failed: [(rollout, Completion)].

        A rollout fails, and is left out, if its prompt does not fit the model even with the smallest memory,
        or the engine reports another error. turn: only a label for watch() and the record; 0 is before the
        first turn, max_turns + 1 after the last.
        """
        live = [rollout for rollout in rollouts if not rollout.failed]
        self.announce(module, turn, live)
        start = time.perf_counter()
        completions = self.ask_each(module, live)
        seconds = time.perf_counter() - start
        for rollout, completion in zip(live, completions):
            rollout.add_output(turn, module, completion.text, completion.tokens, seconds)
            if completion.error:
                rollout.failed = f"{module}: {completion.error}"
        return [(rollout, completion) for rollout, completion in zip(live, completions) if not rollout.failed]

    def ask_each(self, module, rollouts):
        """What the module writes for each of these rollouts: [Completion]. Where a prompt is too long for the
        model, the module is asked again with a smaller memory budget. (Analysis and executor read no memory:
        their prompts stay too long.)"""
        completions = self.ask(module, [prompt_of(module, self.tools, rollout) for rollout in rollouts])
        for budget in SMALLER_BUDGETS:
            too_long = [i for i, completion in enumerate(completions) if completion.error == TOO_LONG]
            prompts = [prompt_of(module, self.tools, rollouts[i], budget) for i in too_long]
            for i, completion in zip(too_long, self.ask(module, prompts)):
                completions[i] = completion
        return completions

    def run_tools(self, turn, rollouts):
        """Run the call of each of these rollouts: [(rollout, tools.Result)]."""
        self.announce("tools", turn, rollouts)
        ask_base_generator = partial(self.ask, "base_generator")  # the tool that is a language model
        calls = [rollout.call for rollout in rollouts]
        return list(zip(rollouts, run_calls(calls, self.tools, ask_base_generator)))

    def announce(self, module, turn, rollouts):
        """Tell watch() that a stage begins, unless no rollout takes part in it."""
        if self.watch and rollouts:
            self.watch(self.rollouts, turn, module)

    def ask(self, module, prompts):
        """One call of the engine that plays a module: [Completion]. Only the planner may sample."""
        if not prompts:
            return []
        engine = self.engines[module if module in self.engines else "default"]
        temperature = self.temperature if module == "planner" else 0.0
        return engine(prompts, temperature=temperature, max_new_tokens=self.max_new_tokens)


def roll_out_and_grade(questions, policy, fixed, tools, judge=None, watch=None, **settings):
    """Roll out one batch, and grade the answers: [Rollout]. watch, settings: are passed to roll_out()."""
    rollouts = roll_out(questions, policy, fixed, tools, watch=watch, **settings)
    if watch:
        watch(rollouts, 0, "grade")  # no turn
    # sets `right` and `reward`; `undecided` if the judge answers without a verdict, `failed` if not at all
    grade(rollouts, judge)
    return rollouts


def evaluate(questions, policy, fixed, tools, judge=None, **settings):
    """({metric: value}, [Rollout]) of one batch, for scripts. In the accuracy, rollouts that have failed or
    are undecided count as wrong."""
    rollouts = roll_out_and_grade(questions, policy, fixed, tools, judge, **settings)
    return summary(rollouts), rollouts


# ------------------------------------------------------------------------------------------- the command line
def run_trial(trial, args, cast):
    """Answer a set of questions once, batch by batch: roll out, grade, save, print.

    trial: a logbook.records.Trial, which has the questions and keeps the rollouts. It skips the batches that
    an earlier, stopped run has saved. cast: who plays what, a named tuple (policy, fixed, tools, judge).
    """
    policy, fixed, tools, judge = cast
    settings = command_line.rollout_settings(args)  # max_turns, temperature, max_new_tokens
    with watching(trial, args) as watch:  # progress bar, live trace, unfinished rollouts on disk
        for seed, questions in trial.batches():
            torch.manual_seed(seed)  # the planner samples with torch's random numbers
            rollouts = roll_out_and_grade(questions, policy, fixed, tools, judge, watch=watch, **settings)
            if trial.add(rollouts):  # saves them. False: a server was down; batches() gives this batch again
                watch.finished(rollouts)  # prints them


def main():
    args = command_line.solve_arguments(TOOLS)
    # sets: {name: [Question]}, what to answer. folder: where the rollouts are saved, or None
    sets, cast, folder = answering.begin(args, TOOLS)
    for name, questions in sets.items():  # one set, or one for each benchmark
        # with: at the end, even after Ctrl-C, the accuracy of this set is printed
        with answering.trials(args, name, questions, folder) as trials:
            for trial in trials:  # --trials of them
                run_trial(trial, args, cast)
    answering.print_end(args)


if __name__ == "__main__":
    main()
