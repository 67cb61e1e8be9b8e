"""The flow: planner -> executor -> tool -> verifier, turn by turn, through one memory (AgentFlow §3.1, Algorithm 1).

    flows = rollout(questions, policy, fixed, tools)     # [Flow], one a question, each with its memory, its actions and its answer

    analysis -> [ planner -> executor -> tool -> verifier ] x turns -> generator

All rollouts of a batch go in lock-step: they plan together, act together (tools in a thread pool), are verified together, and leave
when they are done. So every call of a language model is a full batch, and a seed decides everything: no async, no race.

Three kinds of failure, kept apart. The *model's*: nobody can read its plan or its call; that costs a turn, and memory tells the
planner why. The *world's*: the tool says "Error: ..."; that is a result like any other. *Ours*: a prompt does not fit the model
even with its memory cut, or a model server stays down; that flow has failed, is counted, and is neither rewarded nor trained on.
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

BUDGETS = (memory.BUDGET, memory.BUDGET // 4, memory.BUDGET // 16)  # characters of memory, tried in turn until a prompt fits
LONGEST = 20_000  # characters of a module's words that are kept to be read: what a model may say without end is not kept without end
FIXED = ("analysis", "executor", "base_generator", "verifier", "generator")  # everything but the planner


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
    undecided: bool = False  # rules and judge could not tell whether the answer is right: no outcome either
    answer: str = ""
    reward: float = 0.0  # R(o) in {0, 1}, one for the whole rollout
    seconds: float = 0.0  # its share of the time of its batch

    def state(self, tools, budget):
        """s^t = (q, K, analysis, M^t), the arguments of planner.prompt() and verifier.prompt()."""
        return self.question.question, tools, self.memory.analysis, self.memory.render(budget)

    def say(self, turn, module, text, tokens, seconds):
        text = memory.cut(text, LONGEST)
        self.words.append({"turn": turn, "module": module, "text": text, "tokens": tokens, "seconds": round(seconds, 3)})

    def record(self):
        """The whole flow as JSON-able data, without token ids."""
        asked = self.question
        data = {"id": asked.id, "kind": asked.kind, "question": asked.question, "gold": asked.answer, "answer": self.answer}
        data |= {"reward": self.reward, "failed": self.failed, "undecided": self.undecided, "turns": len(self.actions)}
        return data | {"seconds": round(self.seconds, 3), "memory": dataclasses.asdict(self.memory), "words": self.words}

    @classmethod
    def from_record(cls, question, data):
        """The flow again, but for its token ids."""
        steps = [Step(**step) for step in data["memory"]["steps"]]
        kept = {name: data[name] for name in ("answer", "reward", "failed", "undecided", "seconds", "words")}
        return cls(question, Memory(data["memory"]["question"], data["memory"]["analysis"], steps), **kept)


def rollout(questions, policy, fixed, tools, max_turns=3, temperature=0.7, max_new_tokens=None, bar=None):
    """Run the flow for every question, in lock-step (the paper's Algorithm 1). A question asked G times gives its group.

    questions: [tasks.Question]; policy: the planner's engine (llm.py); fixed: the engine of every other module, or a dict with one for
    each of FIXED. Only the planner samples; the fixed modules are greedy. bar: a tqdm bar, advanced by a flow at a time. Returns
    [Flow] in the questions' order.
    """
    flows = [Flow(question, Memory(question.question)) for question in questions]
    sampled = partial(policy, temperature=temperature, max_new_tokens=max_new_tokens)
    engines = fixed if isinstance(fixed, dict) else dict.fromkeys(FIXED, fixed)
    greedy = {name: partial(engine, temperature=0.0, max_new_tokens=max_new_tokens) for name, engine in engines.items()}

    for flow, said in ask(greedy["analysis"], flows, 0, "analysis", lambda f, budget: planner.analysis_prompt(f.question.question, tools)):
        flow.memory.analysis = memory.cut(memory.after_thinking(said.text) or "", memory.BUDGET // 4)
    if bar is not None:
        bar.update(sum(flow.failed != "" for flow in flows))

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
        for flow, said in ask(greedy["verifier"], acted, turn, "verifier", lambda f, budget: verifier.prompt(*f.state(tools, budget))):
            flow.done = verifier.parse(said.text)
            flow.memory.steps[-1].verdict = "STOP" if flow.done else "CONTINUE"
        if bar is not None:
            bar.update(sum(flow.done or flow.failed != "" or turn == max_turns for flow in live))

    def ending(flow, budget):
        return generator.prompt(flow.question.question, flow.memory.analysis, flow.memory.render(budget))

    for flow, said in ask(greedy["generator"], [flow for flow in flows if not flow.failed], max_turns + 1, "generator", ending):
        flow.answer = memory.cut(generator.parse(said.text), LONGEST)
    return flows


def act(flows, tools, turn, greedy):
    """The executor turns each plan into a call, the tools run, and each memory gets its step."""

    def call_prompt(flow, budget):
        name = flow.plan.tool
        return executor.prompt(flow.question.question, flow.plan.context, flow.plan.sub_goal, name, tools[name])

    asked = {}  # query -> what base_generator's engine said

    def answer(queries):
        asked.update(zip(queries, greedy["base_generator"](queries)))
        texts = [memory.after_thinking(asked[query].text) for query in queries]
        return [text or f"Error: {asked[query].error or 'no answer'}" for text, query in zip(texts, queries)]

    called = []
    for flow, said in ask(greedy["executor"], flows, turn, "executor", call_prompt):
        flow.call = executor.parse(said.text, flow.plan.tool, tools[flow.plan.tool])
        called.append(flow)
    for flow, (result, error, seconds) in zip(called, executor.run([flow.call for flow in called], tools, answer)):
        command, said = "", None
        if not isinstance(flow.call, str):
            command = memory.cut(str(flow.call), LONGEST)
            said = asked.get(str(flow.call.arguments.get("query"))) if tools[flow.call.tool].run is None else None
        if said and said.error not in ("", llm.TOO_LONG):  # an engine that is down is our failure, and no result of a tool
            flow.failed = f"{flow.call.tool}: {said.error}"
            continue
        flow.memory.steps.append(Step(turn, flow.plan.tool, flow.plan.sub_goal, command, result, error, "", round(seconds, 3)))
        flow.say(turn, flow.plan.tool, result, said.tokens if said else 0, seconds)


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
        flow.say(turn, module, said[i].text, said[i].tokens, seconds)
        flow.failed = said[i].error and f"{module}: {said[i].error}"
    return [(flow, said[i]) for i, flow in enumerate(flows) if not flow.failed]
