"""solve.py: ask the flow one question, a file of questions, or a benchmark.

    python solve.py                                        a few questions of the toy, with the toy model: no download, key or GPU
    python solve.py "What is the capital of France?"
    python solve.py --data toy/test.jsonl --limit 100 --quiet
    python solve.py --model Qwen/Qwen2.5-7B-Instruct "Which is longer, the Nile or the Danube?"
    python solve.py --model Qwen/Qwen2.5-7B-Instruct --benchmark bamboogle gameof24
    python solve.py --model Qwen/Qwen2.5-7B-Instruct --fixed http://localhost:8000/v1 --judge http://localhost:8000/v1 --data my.jsonl

What happens to a question stands in flow.py. Here its answer is marked (rules first, then the judge if there is one), the marks of
many become numbers, and the numbers a line that says how sure they are.
"""

import contextlib
import dataclasses
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import partial

import tools as toolset
from scale import command_line

if __name__ == "__main__":
    command_line.before_imports(command_line.solve_arguments, toolset.TOOLS)  # typos and --help do not wait for torch

import torch
from tqdm import tqdm

import executor
import generator
import memory
import planner
import verifier
from benchmarks import tables
from benchmarks.runs import answer_all, kept, markdown, open_folder, row_of
from memory import Memory, Step
from models.completion import TOO_LONG, Cached
from models.loading import config_of, fingerprint, pick_device, pick_dtype
from models.tokens import after_thinking
from rewards.grade import grade
from rewards.metrics import accuracy_line, calls_line, summary
from rewards.questions import Question, prose_warning, read_questions
from scale import adapters, advice, fit
from scale.command_line import TOY, is_toy
from scale.fit import batch_size
from scale.progress import Progress
from toy import pieces
from world import services
from world.sandbox import protection
from world.text import printable, truncate

BUDGETS = (memory.BUDGET, memory.BUDGET // 4, memory.BUDGET // 16)  # characters; tried until a prompt fits
RECORD_LIMIT = 20_000  # characters of a completion that the record holds; longer ones are cut
FIXED = ("analysis", "executor", "base_generator", "verifier", "generator")  # everything but the planner


@dataclass
class Flow:
    """One rollout o_i. Flow-GRPO trains on `actions`: per turn the ids of s^t and a^t, as sampled."""

    question: Question
    memory: Memory
    actions: list = field(default_factory=list)  # the planner's llm.Completion of each turn
    words: list = field(default_factory=list)  # per module: {"turn", "module", "text", "tokens", "seconds"}
    plan: planner.Plan | str = ""  # of this turn, or the parse error
    call: executor.Call | str = ""  # of this turn, or the parse error
    done: bool = False  # the verifier said STOP
    failed: str = ""  # why there is no outcome: never a reward, never a wrong answer
    undecided: bool = False  # rules and judge could not tell whether the answer is right: no outcome either
    answer: str = ""
    reward: float = 0.0  # R(o) in {0, 1}, one for the whole rollout
    seconds: float = 0.0  # its share of the time of its batch

    def state(self, tools, budget):
        """s^t = (q, K, analysis, M^t), the arguments of planner.prompt() and verifier.prompt()."""
        return self.question.question, tools, self.memory.analysis, self.memory.render(budget)

    def say(self, turn, module, text, tokens, seconds):
        text = truncate(text, RECORD_LIMIT)
        word = {"turn": turn, "module": module, "text": text, "tokens": tokens, "seconds": round(seconds, 3)}
        self.words.append(word)

    def record(self):
        """The whole flow as JSON-able data, without token ids."""
        q = self.question
        data = {"id": q.id, "kind": q.kind, "question": q.question, "gold": q.answer, "answer": self.answer}
        data |= {"reward": self.reward, "failed": self.failed, "undecided": self.undecided}
        data |= {"turns": len(self.actions), "seconds": round(self.seconds, 3)}
        return data | {"memory": dataclasses.asdict(self.memory), "words": self.words}

    @classmethod
    def from_record(cls, question, data):
        """The flow again, but for its token ids."""
        steps = [Step(**step) for step in data["memory"]["steps"]]
        names = "answer", "reward", "failed", "undecided", "seconds", "words"
        filled = Memory(data["memory"]["question"], data["memory"]["analysis"], steps)
        return cls(question, filled, **{name: data[name] for name in names})


def rollout(questions, policy, fixed, tools, max_turns=3, temperature=0.7, max_new_tokens=None, watch=None):
    """Run the flow for every question, in lock-step (the paper's Algorithm 1): [Flow], in their order.

    questions: [tasks.Question]; one that is in it G times gives its group. policy: the planner's engine
    (llm.py), the only one that samples. fixed: the engine of the other modules, or a dict with one for each
    of FIXED. watch(flows, turn, module) is called before each batched call, to show or keep what there is.
    """
    flows = [Flow(question, Memory(question.question)) for question in questions]
    engines = fixed if isinstance(fixed, dict) else dict.fromkeys(FIXED, fixed)
    settings = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
    engines = {name: partial(engine, **settings) for name, engine in engines.items()}
    engines["planner"] = partial(policy, **settings | {"temperature": temperature})
    prompts = prompts_of(tools)

    def call(module, some, turn):
        if some and watch:
            watch(flows, turn, module)
        return ask(engines[module], some, turn, module, prompts[module])

    for flow, completion in call("analysis", flows, 0):
        flow.memory.analysis = truncate(after_thinking(completion.text) or "", memory.BUDGET // 4)

    for turn in range(1, max_turns + 1):
        live = [flow for flow in flows if not flow.done and not flow.failed]
        for flow, completion in call("planner", live, turn):
            flow.actions.append(completion)
            flow.plan = planner.parse(completion.text, tools)
            if isinstance(flow.plan, str):  # this costs a turn; the planner's next prompt names the error
                step = Step(turn, "", "", "", f"Error: {flow.plan}", error=True, verdict="CONTINUE")
                flow.memory.steps.append(step)

        planned = [flow for flow in live if not flow.failed and not isinstance(flow.plan, str)]
        for flow, completion in call("executor", planned, turn):
            flow.call = executor.parse(completion.text, flow.plan.tool, tools[flow.plan.tool])

        called = [flow for flow in planned if not flow.failed]
        if called and watch:
            watch(flows, turn, "tools")
        run_tools(called, turn, tools, engines["base_generator"])

        acted = [flow for flow in called if not flow.failed]
        for flow, said in call("verifier", acted, turn):
            flow.done = verifier.parse(said.text)
            flow.memory.steps[-1].verdict = "STOP" if flow.done else "CONTINUE"

    for flow, completion in call("generator", [flow for flow in flows if not flow.failed], max_turns + 1):
        flow.answer = truncate(generator.parse(completion.text), RECORD_LIMIT)
    return flows


def prompts_of(tools):
    """{module: prompt(flow, budget)}; budget: characters of memory."""

    def executor_prompt(flow, budget):
        plan, tool = flow.plan, tools[flow.plan.tool]
        return executor.prompt(flow.question.question, plan.context, plan.sub_goal, plan.tool, tool)

    def generator_prompt(flow, budget):
        return generator.prompt(flow.question.question, flow.memory.analysis, flow.memory.render(budget))

    return {
        "analysis": lambda flow, budget: planner.analysis_prompt(flow.question.question, tools),
        "planner": lambda flow, budget: planner.prompt(*flow.state(tools, budget)),
        "executor": executor_prompt,
        "verifier": lambda flow, budget: verifier.prompt(*flow.state(tools, budget)),
        "generator": generator_prompt,
    }


def run_tools(flows, turn, tools, base_generator):
    """Run the flows' calls as one batch; each memory gets its step."""
    completions = {}  # query -> the completion of base_generator's engine

    def answer(queries):
        completions.update(zip(queries, base_generator(queries)))
        found = [completions[query] for query in queries]
        return [after_thinking(c.text) or f"Error: {c.error or 'no answer'}" for c in found]

    results = toolset.run([flow.call for flow in flows], tools, answer)
    for flow, (result, error, seconds) in zip(flows, results):
        command, completion = "", None
        if not isinstance(flow.call, str):
            command = truncate(str(flow.call), RECORD_LIMIT)
            if tools[flow.call.tool].run is None:
                completion = completions.get(str(flow.call.arguments.get("query")))
        if completion and completion.error not in ("", TOO_LONG):  # an engine that is down is our failure
            flow.failed = f"{flow.call.tool}: {completion.error}"
            continue
        step = Step(turn, flow.plan.tool, flow.plan.sub_goal, command, result, error, "", round(seconds, 3))
        flow.memory.steps.append(step)
        flow.say(turn, flow.plan.tool, result, completion.tokens if completion else 0, seconds)


def ask(engine, flows, turn, module, prompt):
    """One batched call of an engine: [(flow, llm.Completion)].

    Where prompt(flow, budget) does not fit the model, it is made anew with less memory. A flow whose prompt
    never fits has failed, is counted, and is not in the list.
    """
    completions, waiting = {}, list(range(len(flows)))
    start = time.perf_counter()
    for budget in BUDGETS:
        if waiting:
            completions |= zip(waiting, engine([prompt(flows[i], budget) for i in waiting]))
            waiting = [i for i in waiting if completions[i].error == TOO_LONG]
    seconds = time.perf_counter() - start
    for i, flow in enumerate(flows):
        flow.say(turn, module, completions[i].text, completions[i].tokens, seconds)
        flow.failed = completions[i].error and f"{module}: {completions[i].error}"
    return [(flow, completions[i]) for i, flow in enumerate(flows) if not flow.failed]

EXAMPLES = 4  # toy questions that are shown when none is asked


# ------------------------------------------------------------------------------------------------------- marks and numbers
def evaluate(questions, policy, fixed, tools, judge=None, watch=None, **settings):
    """Run and mark every question: ({metric: number}, [Flow]). Every question stays in the denominator, also
    one that failed. watch: as rollout() takes it; None: the progress is shown."""
    start = time.perf_counter()
    with contextlib.nullcontext(watch) if watch else Progress(len(questions)) as watch:
        flows = rollout(questions, policy, fixed, tools, watch=watch, **settings)
        if judge:
            watch(flows, 0, "judge")
        grade(flows, judge)
    for flow in flows:
        flow.seconds = (time.perf_counter() - start) / len(flows)
    return summary(flows), flows


def trace(flow):
    """The flow as text to read: every module's words, turn by turn. What a terminal would obey and not show is escaped."""
    lines = [f"Question: {flow.question.question}"]
    for word in flow.words:
        where = f"turn {word['turn']} {word['module']}" if word["module"] not in ("analysis", "generator", "judge") else word["module"]
        lines.append(f"[{where}]  {word['tokens']} tokens, {word['seconds']:.2f} s" if word["tokens"] else f"[{where}]  {word['seconds']:.2f} s")
        lines += ["    " + line for line in word["text"].strip().splitlines()]
    lines.append(f"Failed: {flow.failed}" if flow.failed else f"Answer: {flow.answer}")
    return printable("\n".join(lines))


# ------------------------------------------------------------------------------------------- engines and tools
def load_tools(args):
    """The toolbox, and the cache for what may be asked once. Before any model is loaded, which may take minutes."""
    cache = services.Cache(args.cache or ":memory:")
    return toolset.toolbox(args.tools, args.corpus, cache if args.cache else None), cache


def load_engines(args, loaded, cache):
    """({module: engine} for rollout(), the judge or None). loaded: {name: engine} that are there already; a model is loaded once."""

    def engine(name):
        if name not in loaded:
            loaded[name] = adapters.load(name, args.device, args.dtype, args.think)
        return loaded[name]

    fixed = {module: engine(getattr(args, module, None) or args.fixed) for module in FIXED}
    return fixed, Cached(engine(args.judge), cache) if args.judge else None


def show_engines(policy, fixed, judge, tools, named):
    """The first lines of a run: who plays what, with which tools. named: were the tools named on the command line?"""
    lines = [f"planner {policy}", f"fixed   {fixed['analysis']}"]
    lines += [f"{module} {engine}" for module, engine in fixed.items() if engine is not fixed["analysis"]]
    lines += [f"judge   {judge}"] * bool(judge) + [f"tools   {', '.join(tools)}"]
    lines += [f"sandbox {protection()}"] if "python_coder" in tools else []
    lines += [] if named else [f"without {why}" for why in map(toolset.missing, toolset.TOOLS) if why]
    lines += filter(None, [pieces.warning([policy, *fixed.values()])])
    return "\n".join(lines)


def flow_settings(args):
    """What rollout() takes from a command line, here and in train.py."""
    return {"max_turns": args.max_turns, "temperature": args.temperature, "max_new_tokens": args.max_new_tokens}


# ----------------------------------------------------------------------------------------------------------- the command line
def load_questions(args):
    """What is to be answered: {name: [Question]}."""
    if args.benchmark:
        args.out = args.out or "runs/" + ("toy" if is_toy(args.model) else re.sub(r"[^\w.]+", "-", args.model).strip("-")) + "-benchmarks"
        names = list(tables.BENCHMARKS) if "all" in args.benchmark else args.benchmark
        return {name: tables.load(name, args.benchmark_dir, args.limit) for name in names}
    questions = [Question(args.question, "")] if args.question else read_questions(args.data or TOY / "test.jsonl")
    return {"questions": questions[: args.limit or (len(questions) if args.data else EXAMPLES)]}


def plan_memory(args):
    """The "memory" line for the weights of all local models; ValueError, before they are downloaded, if they do
    not fit. Without a GPU, models that do not fit in float32 are loaded in bfloat16, unless --dtype is given."""
    names = {args.model, args.judge, *(getattr(args, name) for name in command_line.MODULES)} - {None}
    configs = [config_of(name) for name in sorted(names) if not services.is_server(name)]
    for config in configs:
        fit.context(config, args.max_new_tokens)
    device = pick_device(args.device)
    weights = sum(fit.shapes(config)["parameters"] for config in configs)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else fit.host_memory()
    if args.dtype is None and device.type == "cpu" and 4 * weights > 0.9 * free:
        args.dtype = "bfloat16"
    dtype = pick_dtype(args.dtype, device)
    name = str(dtype).removeprefix("torch.")
    needed = f"{dtype.itemsize * weights / 1e9:.1f} of {free / 1e9:.0f} GB for the weights, in {name}"
    if dtype.itemsize * weights > 0.9 * free:
        raise ValueError(f"this needs {needed}: use smaller models, or a server for --model or --fixed")
    return f"memory  {needed}"


def main():
    args = command_line.solve_arguments(toolset.TOOLS)
    try:
        memory = plan_memory(args)
        asked = load_questions(args)
        tools, cache = load_tools(args)
        if pick_device(args.device).type != "cuda":
            fit.bound_host_memory()
        policy = adapters.load(args.model, args.device, args.dtype, args.think)
        fixed, judge = load_engines(args, {args.model: policy}, cache)
        args.batch = args.batch or batch_size([policy, *fixed.values()])
        named, args.tools = args.tools is not None, list(tools)
        same = {name: value for name, value in vars(args).items() if name not in ("out", "quiet", "device", "cache", "benchmark", "benchmark_dir", "trials")}
        same |= {"dtype": str(pick_dtype(args.dtype, pick_device(args.device))), "set of weights": [fingerprint(model) for model in (args.model, args.fixed, args.executor, args.verifier, args.generator, args.judge) if model]}
        folder = open_folder(args.out, same) if args.out else None
    except (ValueError, OSError) as why:
        command_line.leave(2, f"solve.py: {why}")
    warning = prose_warning(asked["questions"]) if args.data and not judge else ""
    engines = show_engines(policy, fixed, judge, tools, named)
    print(memory, engines, warning and warning + "\n", sep="\n", flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def run(trial, start, questions, bar):
        torch.manual_seed((args.seed * 1_009 + trial) * 1_000_003 + start)
        return evaluate(questions, policy, fixed, tools, judge, bar, **flow_settings(args))[1]

    for name, questions in asked.items():
        begun, flows = time.perf_counter(), []

        def finished(batch):
            flows.extend(batch)
            for flow in batch if not (args.quiet or args.benchmark) else []:
                grade = "right" if flow.reward else f"wrong: {flow.question.answer}"
                tqdm.write(trace(flow) + ("" if args.question else f"  ({grade})") + "\n")  # above the bar
            sys.stdout.flush()

        try:
            for trial in range(args.trials):
                file = folder and folder / f"{name}-{trial}.jsonl"
                answer_all(name, questions, file, args.batch, partial(run, trial), Flow.from_record, finished)
        except (ValueError, OSError, MemoryError, KeyboardInterrupt) as why:
            if flows and not args.question:
                numbers = accuracy_line(summary(flows), min(len(flows), len(questions)))
                total = args.trials * len(questions)
                print(f"\npartial, {len(flows)} of {total} rollouts: {numbers}", flush=True)
            if isinstance(why, KeyboardInterrupt):
                command_line.leave(130, f"\nsolve.py: stopped{'; the same command goes on' if folder else ''}")
            command_line.leave(1, f"solve.py: {why}")
        metrics = summary(flows)
        tokens = sum(word["tokens"] for flow in flows for word in flow.words)
        print(f"{f'{name}: ' if args.benchmark else ''}{len(flows)} flows, {tokens} tokens, {time.perf_counter() - begun:.1f} s | calls: {calls_line(metrics)}")
        if metrics["failed"]:
            print(advice.failures(flows))
        if not args.question:
            print(accuracy_line(metrics, len(questions)), flush=True)
        if metrics["failed"] == len(flows):
            command_line.leave(1, "solve.py: no flow came to an end")
    if args.benchmark:
        there = {name: len(tables.load(name, args.benchmark_dir, args.limit)) for name in tables.BENCHMARKS if [*folder.glob(f"{name}-*.jsonl")]}
        text = markdown([row_of(name, runs) for name, number in there.items() if (runs := kept(folder, name, number, Flow.from_record))])
        (folder / "table.md").write_text(text + "\n")
        print(f"\n{text}\nKept in {folder}")
    if is_toy(args.model):
        print("This planner has only learnt the formats and picks its tools blindly. Train it: python train.py; then: python solve.py --model runs/toy-seed0/best")


if __name__ == "__main__":
    main()
