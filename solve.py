"""solve.py: the flow (AgentFlow §3.1), for one question, a file of questions, or the batch of a training step.

    python solve.py                                        a few questions of the toy, with the toy model: no download, key or GPU
    python solve.py "What is the capital of France?"
    python solve.py --data toy/test.jsonl --limit 100 --quiet
    python solve.py --model Qwen/Qwen2.5-7B-Instruct "Which is longer, the Nile or the Danube?"

    analysis -> [ planner -> executor -> tool -> verifier ] x turns -> generator

All rollouts of a batch go in lock-step: they plan together, act together (tools in a thread pool), are verified together, and leave
when they are done. So every call of a language model is a full batch, and a seed decides everything: no async, no server, no race.

Three kinds of failure, kept apart. The *model's*: nobody can read its plan or its call; that costs a turn, and memory tells the
planner why. The *world's*: the tool says "Error: ..."; that is a result like any other. *Ours*: a prompt does not fit the model
even with its memory cut; that flow has failed, is counted, and is neither rewarded nor trained on.
"""

import argparse
import dataclasses
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import executor
import generator
import llm
import memory
import planner
import tasks
import tools as toolset
import verifier
from memory import Memory, Step

TOY = Path(__file__).parent / "toy"
BUDGETS = (memory.BUDGET, memory.BUDGET // 4, memory.BUDGET // 16)  # characters of memory, tried in turn until a prompt fits


@dataclass
class Flow:
    """One rollout o_i. `actions` is the record that Flow-GRPO trains on: per turn the ids of s^t and of a^t, as they were sampled."""

    question: tasks.Question
    memory: Memory
    actions: list = field(default_factory=list)  # the planner's llm.Completion of each turn
    words: list = field(default_factory=list)  # what each module said: {"turn", "module", "text", "tokens", "seconds"}
    plan: planner.Plan | str = ""  # of this turn, or why nobody can read it
    call: executor.Call | str = ""  # of this turn, or why there is none
    done: bool = False  # the verifier said STOP
    failed: str = ""  # why there is no outcome: never a reward, never a wrong answer
    answer: str = ""
    reward: float = 0.0  # R(o) in {0, 1}, one for the whole rollout

    def state(self, tools, budget):
        """s^t = (q, K, analysis, M^t), the arguments of planner.prompt() and verifier.prompt()."""
        return self.question.question, tools, self.memory.analysis, self.memory.render(budget)

    def say(self, turn, module, text, tokens, seconds):
        self.words.append({"turn": turn, "module": module, "text": text, "tokens": tokens, "seconds": round(seconds, 3)})

    def record(self):
        """The whole flow as JSON-able data, without token ids."""
        asked = self.question
        data = {"id": asked.id, "kind": asked.kind, "question": asked.question, "gold": asked.answer, "answer": self.answer}
        data |= {"reward": self.reward, "failed": self.failed, "turns": len(self.actions)}
        return data | {"memory": dataclasses.asdict(self.memory), "words": self.words}


def rollout(questions, policy, fixed, tools, max_turns=3, temperature=0.7, max_new_tokens=None, bar=None):
    """Run the flow for every question, in lock-step (the paper's Algorithm 1). A question asked G times gives its group.

    questions: [tasks.Question]; policy: the planner's engine, fixed: the engine of every other module (llm.py). Only the planner
    samples; the fixed modules are greedy. bar: a tqdm bar, advanced by a flow at a time. Returns [Flow] in the questions' order.
    """
    flows = [Flow(question, Memory(question.question)) for question in questions]
    sampled = partial(policy, temperature=temperature, max_new_tokens=max_new_tokens)
    greedy = partial(fixed, temperature=0.0, max_new_tokens=max_new_tokens)

    for flow, said in ask(greedy, flows, 0, "analysis", lambda f, budget: planner.analysis_prompt(f.question.question, tools)):
        flow.memory.analysis = memory.cut(said.text.strip(), memory.BUDGET // 4)

    for turn in range(1, max_turns + 1):
        live = [flow for flow in flows if not flow.done and not flow.failed]
        for flow, said in ask(sampled, live, turn, "planner", lambda f, budget: planner.prompt(*f.state(tools, budget))):
            flow.actions.append(said)
            flow.plan = planner.parse(said.text, tools)
            if isinstance(flow.plan, str):  # the mistake costs a turn, and the planner's next prompt says what it was
                flow.memory.steps.append(Step(turn, "", "", "", f"Error: {flow.plan}", error=True, verdict="CONTINUE"))

        acting = [flow for flow in live if not flow.failed and not isinstance(flow.plan, str)]
        act(acting, tools, turn, greedy)

        acted = [flow for flow in acting if not flow.failed]
        for flow, said in ask(greedy, acted, turn, "verifier", lambda f, budget: verifier.prompt(*f.state(tools, budget))):
            flow.done = verifier.parse(said.text)
            flow.memory.steps[-1].verdict = "STOP" if flow.done else "CONTINUE"
        if bar is not None:
            bar.update(sum(flow.done or flow.failed != "" or turn == max_turns for flow in live))

    def ending(flow, budget):
        return generator.prompt(flow.question.question, flow.memory.analysis, flow.memory.render(budget))

    for flow, said in ask(greedy, [flow for flow in flows if not flow.failed], max_turns + 1, "generator", ending):
        flow.answer = generator.parse(said.text)
    return flows


def act(flows, tools, turn, greedy):
    """The executor turns each plan into a call, the tools run, and each memory gets its step."""

    def command(flow, budget):
        name = flow.plan.tool
        return executor.prompt(flow.question.question, flow.plan.context, flow.plan.sub_goal, name, tools[name])

    called = []
    for flow, said in ask(greedy, flows, turn, "executor", command):
        flow.call = executor.parse(said.text, flow.plan.tool, tools[flow.plan.tool])
        called.append(flow)
    answer = lambda queries: [said.text or f"Error: {said.error or 'no answer'}" for said in greedy(queries)]
    for flow, (result, error, seconds) in zip(called, executor.run([flow.call for flow in called], tools, answer)):
        command = "" if isinstance(flow.call, str) else str(flow.call)
        flow.memory.steps.append(Step(turn, flow.plan.tool, flow.plan.sub_goal, command, result, error, "", round(seconds, 3)))
        flow.say(turn, flow.plan.tool, result, 0, seconds)


def ask(engine, flows, turn, module, prompt):
    """One batched call of an engine: [(flow, llm.Completion)].

    prompt(flow, budget) is made anew with less memory where it does not fit the model. A flow whose prompt never fits has failed,
    is counted, and is not in the list.
    """
    said, waiting = {}, list(range(len(flows)))
    start = time.perf_counter()
    for budget in BUDGETS:
        if waiting:
            said |= zip(waiting, engine([prompt(flows[i], budget) for i in waiting]))
            waiting = [i for i in waiting if said[i].error == llm.TOO_LONG]
    seconds = time.perf_counter() - start
    for i, flow in enumerate(flows):
        flow.say(turn, module, said[i].text, len(said[i].prompt_ids) + len(said[i].ids), seconds)
        flow.failed = said[i].error and f"{module}: {said[i].error}"
    return [(flow, said[i]) for i, flow in enumerate(flows) if not flow.failed]


def evaluate(questions, policy, fixed, tools, **settings):
    """Run and mark every question: ({metric: number}, [Flow]). Every question stays in the denominator, also one that failed."""
    with tqdm(total=len(questions), desc="flows", leave=False, disable=None) as bar:
        flows = rollout(questions, policy, fixed, tools, bar=bar, **settings)
    for flow in flows:
        flow.reward = float(not flow.failed and tasks.mark(flow.question, flow.answer))
    return summary(flows), flows


def summary(flows):
    """What a batch of marked flows amounts to. errors: the share of turns whose plan or call nobody could read, or whose tool said Error."""
    steps = [step for flow in flows for step in flow.memory.steps]
    tokens = sum(word["tokens"] for flow in flows for word in flow.words)
    return {
        "accuracy": sum(flow.reward for flow in flows) / len(flows),
        "turns": len(steps) / len(flows),
        "errors": sum(step.error for step in steps) / max(1, len(steps)),
        "failed": sum(flow.failed != "" for flow in flows),
        "tokens": tokens / len(flows),
        "calls": dict(sorted(Counter(step.tool or "unreadable" for step in steps).items())),
    }


def trace(flow):
    """The flow as text to read: every module's words, turn by turn."""
    lines = [f"Question: {flow.question.question}"]
    for word in flow.words:
        where = f"turn {word['turn']} {word['module']}" if word["module"] not in ("analysis", "generator") else word["module"]
        lines.append(f"[{where}]  {word['tokens']} tokens, {word['seconds']:.2f} s" if word["tokens"] else f"[{where}]  {word['seconds']:.2f} s")
        lines += ["    " + line for line in word["text"].strip().splitlines()]
    lines.append(f"Failed: {flow.failed}" if flow.failed else f"Answer: {flow.answer}")
    return "\n".join(lines)


def show(metrics, n):
    """One line: accuracy with its 95 % interval (Wilson's, which does not collapse at 0 and 1), and what it cost. n: flows."""
    p, z = metrics["accuracy"], 1.96
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + (z / (2 * n)) ** 2) ** 0.5
    low, high = ((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    line = f"accuracy {p:.3f} [{low:.2f}, {high:.2f}] of {n} | turns {metrics['turns']:.2f} | errors {metrics['errors']:.1%}"
    line += f" | {metrics['tokens']:.0f} tokens a flow"
    return line + (f" | failed {metrics['failed']}" if metrics["failed"] else "")


def new_folder(path):
    """Make a folder that does not exist yet; ValueError with a sentence if it does or can't be made."""
    try:
        Path(path).mkdir(parents=True)
    except FileExistsError as why:
        raise ValueError(f"{path} exists already and is not written over: give another --out, or remove it") from why
    except OSError as why:
        raise ValueError(f"{path} can't be made ({why.strerror}): give another --out") from why


EXAMPLES = 4  # toy questions that are shown when none is asked


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("question", nargs="?", help="one question; without one and without --data, a few of the toy's")
    add("--data", help="questions as JSONL, marked if they are answered right")
    add("--limit", type=int, default=None, help="only the first so many questions of --data")
    add("--model", default=str(TOY), help="folder or hub name of the planner")
    add("--fixed", default=None, help="folder or hub name of the model of all other modules; None: the one --model was trained with, or --model")
    add("--corpus", default=str(TOY / "corpus.jsonl"), help="passages for wikipedia_search, JSONL of title and text")
    add("--tools", nargs="+", default=None, help="tools the planner may choose from; None: all that can run")
    add("--max-turns", type=int, default=10, help="turns of a flow at most")
    add("--temperature", type=float, default=0.7, help="of the planner's sampling; 0 is greedy")
    add("--max-new-tokens", type=int, default=None, help="longest answer of a module; None: the checkpoint's, or 1024")
    add("--seed", type=int, default=0, help="decides what is sampled")
    add("--device", default=None, help="cuda, mps or cpu; None: the first there is")
    add("--dtype", default=None, help="float32, bfloat16, ...; None: bfloat16 on cuda, float32 elsewhere")
    add("--out", default=None, help="write every flow as a line of JSON to this new file")
    add("--quiet", action="store_true", help="no traces, only the summary")
    return parser


def open_new(path):
    """A file that does not exist yet; ValueError with a sentence if it does or can't be made."""
    try:
        return open(path, "x", encoding="utf-8")
    except FileExistsError as why:
        raise ValueError(f"{path} exists already and is not written over: give another --out, or remove it") from why
    except OSError as why:
        raise ValueError(f"{path} can't be written ({why.strerror}): give another --out") from why


def flow_settings(args):
    """What rollout() takes from a command line, here and in train.py."""
    return {"max_turns": args.max_turns, "temperature": args.temperature, "max_new_tokens": args.max_new_tokens}


def fixed_of(model):
    """The model that played the fixed modules when this planner was trained (train.json of a checkpoint), else the model itself."""
    trained = Path(model) / "train.json"
    return json.loads(trained.read_text())["fixed"] if trained.exists() else model


def main():
    parser = arguments()
    args = parser.parse_args()
    try:
        if args.max_turns < 1:
            raise ValueError(f"--max-turns {args.max_turns} leaves no turn: use 1 or more")
        if not 0 <= args.temperature < float("inf"):  # nan, too
            raise ValueError(f"--temperature {args.temperature} is no temperature: use 0 or more")
        if args.max_new_tokens is not None and args.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {args.max_new_tokens} leaves no room for an answer: use 1 or more")
        if args.question is not None and (args.data or not args.question.strip()):
            raise ValueError("give one question, or --data FILE.jsonl, not both and not an empty one")
        if args.limit is not None and args.limit < 1:
            raise ValueError(f"--limit {args.limit} leaves no question: use 1 or more")
        questions = [tasks.Question(args.question, "")] if args.question else tasks.load(args.data or TOY / "test.jsonl")
        questions = questions[: args.limit or (len(questions) if args.data else EXAMPLES)]
        tools = toolset.toolbox(args.tools, args.corpus)
        fixed_name = args.fixed or fixed_of(args.model)
        policy = llm.load(args.model, args.device, args.dtype)
        fixed = policy if fixed_name == args.model else llm.load(fixed_name, args.device, args.dtype)
        out = open_new(args.out) if args.out else None
    except ValueError as why:
        parser.exit(2, f"solve.py: {why}\n")

    print(f"planner {policy}\nfixed   {fixed}\ntools   {', '.join(tools)}\n")
    torch.manual_seed(args.seed)
    start = time.perf_counter()
    metrics, flows = evaluate(questions, policy, fixed, tools, **flow_settings(args))
    for flow in flows:
        if not args.quiet:
            marked = "" if args.question else f"  ({'right' if flow.reward else f'wrong: {flow.question.answer}'})"
            print(trace(flow) + marked + "\n")
        if out:
            out.write(json.dumps(flow.record(), ensure_ascii=False) + "\n")
    if out:
        out.close()
    tokens = sum(word["tokens"] for flow in flows for word in flow.words)
    print(f"{len(flows)} flows, {tokens} tokens, {time.perf_counter() - start:.1f} s | calls: {metrics['calls']}")
    if not args.question:
        print(show(metrics, len(flows)))
    if Path(args.model).resolve() == TOY.resolve():
        print("This planner has only learnt the formats and picks its tools blindly. Train it: python train.py; then: python solve.py --model runs/toy-seed0/best")


if __name__ == "__main__":
    main()
