"""The flow: planner -> executor -> tool -> verifier, in turns, through one memory (AgentFlow, Algorithm 1).

    flows = rollout(questions, policy, fixed, tools)  # [Flow], one per question: memory, actions, answer

    analysis -> [ planner -> executor -> tool -> verifier ] x turns -> generator

All rollouts of a batch go in lock-step: they plan together, act together (tools in a thread pool), are
verified together, and leave when they end. So every call of a language model is a full batch, and a seed
decides everything: no async, no race.

Three kinds of failure, kept apart. The *model's*: its plan or its call cannot be parsed; that costs a turn,
and memory tells the planner why. The *world's*: the tool returns "Error: ..."; that is a result like any
other. *Ours*: a prompt does not fit the model even with its memory cut, or a model server stays down; that
flow has failed, is counted, and is neither rewarded nor trained on.
"""

import dataclasses
import time
from dataclasses import dataclass, field
from functools import partial

import executor
import generator
import llm
import memory
import planner
import tasks
import verifier
from memory import Memory, Step

BUDGETS = (memory.BUDGET, memory.BUDGET // 4, memory.BUDGET // 16)  # characters; tried until a prompt fits
LONGEST = 20_000  # characters of a completion that the record holds; longer ones are cut
FIXED = ("analysis", "executor", "base_generator", "verifier", "generator")  # everything but the planner


@dataclass
class Flow:
    """One rollout o_i. Flow-GRPO trains on `actions`: per turn the ids of s^t and a^t, as sampled."""

    question: tasks.Question
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
        text = memory.cut(text, LONGEST)
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
        flow.memory.analysis = memory.cut(memory.after_thinking(completion.text) or "", memory.BUDGET // 4)

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
        flow.answer = memory.cut(generator.parse(completion.text), LONGEST)
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
        return [memory.after_thinking(c.text) or f"Error: {c.error or 'no answer'}" for c in found]

    results = executor.run([flow.call for flow in flows], tools, answer)
    for flow, (result, error, seconds) in zip(flows, results):
        command, completion = "", None
        if not isinstance(flow.call, str):
            command = memory.cut(str(flow.call), LONGEST)
            if tools[flow.call.tool].run is None:
                completion = completions.get(str(flow.call.arguments.get("query")))
        if completion and completion.error not in ("", llm.TOO_LONG):  # an engine that is down is our failure
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
            waiting = [i for i in waiting if completions[i].error == llm.TOO_LONG]
    seconds = time.perf_counter() - start
    for i, flow in enumerate(flows):
        flow.say(turn, module, completions[i].text, completions[i].tokens, seconds)
        flow.failed = completions[i].error and f"{module}: {completions[i].error}"
    return [(flow, completions[i]) for i, flow in enumerate(flows) if not flow.failed]
