"""The flow, driven by scripts instead of models: who is called when, and what becomes of every mistake."""

import copy
import dataclasses
import json
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_models import tokenizer, write

import executor
import generator
import memory
import planner
import solve
import tools as toolset
import verifier
from cli import cast, command_line
from cli.flags import TOY_TOOLS, solve_parser
from cli.watching import trace
from fast import sampling
from logbook.records import Trial, finished_trials
from models import loading
from models.completion import TOO_LONG, Completion, outage
from models.loading import config_of
from models.local import HF
from rewards import rules
from rewards.metrics import accuracy_line, summary
from rewards.questions import Question
from scale import fit
from solve import SMALLER_BUDGETS
from tools import Tool

PROMPTS = {"analysis": planner.ANALYSIS_PROMPT, "planner": planner.PROMPT, "executor": executor.PROMPT,
           "verifier": verifier.PROMPT, "generator": generator.PROMPT}
TOOLS = {
    "base_generator": toolset.TOOLS["base_generator"],
    "double": Tool(lambda number: str(2 * int(number)), "Doubles.", {"number": "an integer"}, "Integers.",
                   'double(number="2")'),
}
NO_ROOM = Completion("", [1, 2], [], TOO_LONG)
PLAN = "Justification: j\nContext: c\nSub-goal: double it\nTool: double"
GENERATE = PLAN.replace("Tool: double", "Tool: base_generator")
CALL, ANSWER = 'double(number="21")', "<answer>42</answer>"
STOP, GO_ON = "Conclusion: STOP", "Conclusion: CONTINUE"


class Script:
    """An engine that gives its answers in order, and remembers prompts and (size, settings) of each call."""

    def __init__(self, *answers):
        self.answers, self.prompts, self.calls, self.given = list(answers), [], [], []

    def __call__(self, prompts, **settings):
        self.prompts += prompts
        self.calls.append((len(prompts), settings))
        completions = [self.answer(prompt) for prompt in prompts]
        self.given += completions
        return completions

    def answer(self, prompt):
        text = self.answers.pop(0)  # IndexError: there are more prompts than the script foresees
        if isinstance(text, Completion):
            return text
        return Completion(text, list(prompt.encode()), list(text.encode()) + [0])


class Cast(Script):
    """A script with a text, or a function of the prompt, for each module; "other": for no module's prompt."""

    def __init__(self, **parts):
        super().__init__()
        self.parts = dict(analysis="a", planner=PLAN, executor=CALL, verifier=STOP, generator=ANSWER) | parts

    def answer(self, prompt):
        part = self.parts[module_of(prompt)]
        self.answers = [part(prompt) if callable(part) else part]
        return super().answer(prompt)

    def prompts_of(self, module):
        return [prompt for prompt in self.prompts if module_of(prompt) == module]


def module_of(prompt):
    return next((name for name, text in PROMPTS.items() if prompt[:40] == text[:40]), "other")


def questions(*texts):
    return [Question(text, "42") for text in texts]


def rollout_of(policy, fixed=None, question="q?", tools=TOOLS, **settings):
    return solve.roll_out(questions(question), policy, fixed or Cast(), tools, **settings)[0]


def outputs_of(rollout):
    return [(output["turn"], output["module"], output["text"]) for output in rollout.outputs]


def doubling(run):
    """The tools, with this function behind the tool double."""
    return dict(TOOLS, double=dataclasses.replace(TOOLS["double"], run=run))


# ---- the order of things
def test_the_stages_come_in_the_papers_order():
    rollout = rollout_of(Script(PLAN, PLAN), Script("an analysis", CALL, GO_ON, CALL, STOP, ANSWER))
    assert outputs_of(rollout) == [
        (0, "analysis", "an analysis"),
        (1, "planner", PLAN), (1, "executor", CALL), (1, "double", "42"), (1, "verifier", GO_ON),
        (2, "planner", PLAN), (2, "executor", CALL), (2, "double", "42"), (2, "verifier", STOP),
        (4, "generator", ANSWER)]
    assert rollout.answer == "42" and rollout.stopped and not rollout.failed


def test_every_prompt_is_that_of_its_module_with_the_memory_so_far():
    calls = [f'double(number="{number}")' for number in (21, 4, 5, 6)]
    verdicts = [GO_ON, GO_ON, GO_ON, STOP]
    policy = Script(*[PLAN] * 4)
    fixed = Script("a", *(text for pair in zip(calls, verdicts) for text in pair), ANSWER)
    memory = rollout_of(policy, fixed, question="Q", max_turns=4).memory
    assert [step.result for step in memory.steps] == ["42", "8", "10", "12"]
    assert [step.verdict for step in memory.steps] == ["CONTINUE"] * 3 + ["STOP"]

    def shown(turns, verdict=True):
        steps = copy.deepcopy(memory.steps[:turns])
        if not verdict:
            steps[-1].verdict = ""
        return dataclasses.replace(memory, steps=steps).render()

    call = executor.prompt("Q", "c", "double it", "double", TOOLS["double"])
    checks = [verifier.prompt("Q", TOOLS, "a", shown(turns, verdict=False)) for turns in (1, 2, 3, 4)]
    assert policy.prompts == [planner.prompt("Q", TOOLS, "a", shown(turns)) for turns in (0, 1, 2, 3)]
    turns = [prompt for check in checks for prompt in (call, check)]
    assert fixed.prompts == [planner.analysis_prompt("Q", TOOLS), *turns,
                             generator.prompt("Q", "a", shown(4))]


def test_a_module_that_nothing_gives_a_prompt_is_one_sentence():
    rollout = solve.Rollout(Question("q?", "42"), memory.Memory("q?"))
    with pytest.raises(SystemExit, match="^solve.py: .*'critic', which has no prompt: add it to prompt_of"):
        solve.prompt_of("critic", TOOLS, rollout, 1000)


def test_only_the_planner_is_sampled():
    policy, fixed = Script(PLAN), Cast()
    rollout_of(policy, fixed, temperature=0.9, max_new_tokens=77)
    assert policy.calls == [(1, {"temperature": 0.9, "max_new_tokens": 77})]
    assert fixed.calls == [(1, {"temperature": 0.0, "max_new_tokens": 77})] * 4
    rollout_of(policy := Script(PLAN))
    assert policy.calls == [(1, {"temperature": 0.7, "max_new_tokens": None})]


def test_a_stop_ends_the_rollout_and_the_others_go_on_in_a_smaller_batch():
    policy, turns = Cast(), {"a?": 1, "b?": 3, "c?": 2}
    enough = lambda prompt: prompt.count("Step ") >= next(n for q, n in turns.items() if q in prompt)
    fixed = Cast(verifier=lambda prompt: STOP if enough(prompt) else GO_ON)
    rollouts = solve.roll_out(questions("a?", "b?", "c?"), policy, fixed, TOOLS, max_turns=5)
    assert [size for size, _ in policy.calls] == [3, 2, 1]
    assert [len(rollout.plans) for rollout in rollouts] == [1, 3, 2]
    assert all(rollout.stopped for rollout in rollouts)
    verdicts = [[step.verdict for step in rollout.memory.steps] for rollout in rollouts]
    assert verdicts == [["STOP"], ["CONTINUE"] * 2 + ["STOP"], ["CONTINUE", "STOP"]]
    assert fixed.calls[-1][0] == 3  # one batch of answers for all


@pytest.mark.parametrize("max_turns", [1, 2, 4])
def test_the_turns_are_bounded_and_a_rollout_that_has_spent_them_answers_all_the_same(max_turns):
    policy = Cast()
    rollout = rollout_of(policy, Cast(verifier=GO_ON), max_turns=max_turns)
    assert len(policy.prompts) == len(rollout.plans) == len(rollout.memory.steps) == max_turns
    assert rollout.answer == "42" and not rollout.stopped and not rollout.failed


def test_the_planners_completions_are_kept_as_they_were_sampled():
    policy = Script(PLAN, "no plan", PLAN)
    rollout = rollout_of(policy, Cast(verifier=GO_ON))
    assert len(rollout.plans) == 3 and all(map(lambda a, b: a is b, rollout.plans, policy.given))
    second = rollout.plans[1]
    assert second.ids == [*b"no plan", 0] and second.prompt_ids == [*policy.prompts[1].encode()]


def test_a_watcher_is_called_before_each_stage_and_sees_all_rollouts():
    seen, fixed = [], Cast(verifier=lambda prompt: STOP if "a?" in prompt else GO_ON)
    watch = lambda rollouts, turn, module: seen.append((turn, module, [len(one.outputs) for one in rollouts]))
    solve.roll_out(questions("a?", "b?"), Cast(), fixed, TOOLS, max_turns=2, watch=watch)
    modules = "planner", "executor", "tools", "verifier"
    first = [(1, module, [n, n]) for n, module in enumerate(modules, 1)]
    second = [(2, module, [5, n]) for n, module in enumerate(modules, 5)]
    assert seen == [(0, "analysis", [0, 0])] + first + second + [(3, "generator", [5, 9])]
    seen.clear()
    solve.roll_out(questions("q?"), Cast(planner="?"), Cast(), TOOLS, max_turns=1, watch=watch)
    assert [module for _, module, _ in seen] == ["analysis", "planner", "generator"]  # no stage without work


@pytest.mark.parametrize("parameters, device, size", [
    (1_230_000, "cpu", 64), (134_515_008, "cpu", 7), (494_032_768, "cpu", 2), (7_615_616_512, "cpu", 2),
    (7_615_616_512, "cuda", 64),
])
def test_a_large_model_on_a_cpu_gets_small_batches(parameters, device, size):
    model = SimpleNamespace(device=torch.device(device), num_parameters=lambda: parameters)
    server, large = Cast(), HF(model, None)
    assert fit.batch_size([server, large]) == fit.batch_size([large]) == size
    assert fit.batch_size([server]) == 64


# ---- memories
@pytest.mark.parametrize("texts", [("is it 111?", "is it 222?"), ("the same?", "the same?")])
def test_each_rollout_has_a_memory_of_its_own(texts):
    plans = [PLAN.replace("double it", f"double {name}") for name in ("ours", "theirs") * 2]
    policy = Script(*plans)
    calls = 'double(number="1")', 'double(number="2")'
    fixed = Script("a", "a", *calls, GO_ON, GO_ON, CALL, CALL, STOP, STOP, "1", "2")
    first, second = solve.roll_out(questions(*texts), policy, fixed, TOOLS)
    for prompt, own, result, other in ((2, "ours", 2, "theirs"), (3, "theirs", 4, "ours")):
        assert f"double {own}" in policy.prompts[prompt] and other not in policy.prompts[prompt]
        assert f"Result: {result}\n" in policy.prompts[prompt]
    assert (first.answer, second.answer) == ("1", "2") and "No steps yet." in policy.prompts[0]


def test_the_time_that_tools_take_changes_nothing_but_the_seconds():
    def run(pause):
        policy, fixed = Cast(), Cast(verifier=GO_ON)
        tools = doubling(lambda number: time.sleep(pause) or "42")
        rollout = rollout_of(policy, fixed, tools=tools, max_turns=2)
        return policy.prompts + fixed.prompts, outputs_of(rollout), rollout.memory.steps[0].seconds
    *fast, _ = run(0)
    *slow, seconds = run(0.05)
    assert fast == slow and seconds >= 0.05


def test_the_seconds_of_a_batch_are_shared_by_its_rollouts_and_those_of_the_judge_by_whom_it_graded():
    def slow(prompt):
        time.sleep(0.01)
        return "Verdict: True" if "Reference answer" in prompt else STOP
    start = time.perf_counter()
    judge, unclear = Cast(other=slow), Question("who?", "Jane Austen")
    rollouts = solve.evaluate([unclear, *questions("q?")], Cast(), Cast(verifier=slow), TOOLS, judge=judge)[1]
    wall, (graded, plain) = time.perf_counter() - start, [rollout.seconds for rollout in rollouts]
    assert [rollout.outputs[-1]["module"] for rollout in rollouts] == ["judge", "generator"]
    assert plain >= 0.01 and graded >= plain + 0.01 and graded + plain <= wall
    assert all(output["seconds"] <= wall for rollout in rollouts for output in rollout.outputs)


def test_a_long_analysis_and_long_results_do_not_make_long_prompts():
    policy = Cast()
    fixed = Cast(analysis="so " * 10**5, verifier=GO_ON, generator="x" * 30_000)
    tools = doubling(lambda number: "x" * 10**6)
    rollout = rollout_of(policy, fixed, tools=tools, max_turns=10)
    assert len(rollout.memory.analysis) <= memory.BUDGET // 4 and "[cut]" in rollout.memory.analysis
    assert max(map(len, policy.prompts)) < len(policy.prompts[0]) + memory.BUDGET < 3 * memory.BUDGET
    assert len(rollout.answer) == solve.RECORD_LIMIT


# ---- the record of a run
def test_a_rollout_survives_its_record_but_for_its_token_ids(tmp_path):
    rollout = rollout_of(Script("?", PLAN, PLAN), Cast(verifier=GO_ON))
    rollout.answer = "half a pair: \ud800, and \u2028 is no new line"
    assert Trial("x", [rollout.question], 1, 0, tmp_path / "rollouts.jsonl").add([rollout])
    resumed = Trial("x", [rollout.question], 1, 0, tmp_path / "rollouts.jsonl")
    resumed.resume()
    (again,) = resumed.rollouts
    assert trace(again) == trace(rollout) and again.question == rollout.question
    assert again.memory.analysis == rollout.memory.analysis and len(again.memory.steps) == 3
    assert [memory.Step(**vars(step)) for step in again.memory.steps] == rollout.memory.steps
    names = "answer", "reward", "failed", "undecided", "outputs"
    assert all(getattr(again, name) == getattr(rollout, name) for name in names) and again.turns == 3
    trials = lambda number: finished_trials(tmp_path, "rollouts", number)
    assert trials(1) == []  # no trial is called rollouts-0
    (tmp_path / "rollouts.jsonl").rename(tmp_path / "rollouts-0.jsonl")
    assert [[again.answer for again in trial] for trial in trials(1)] == [[rollout.answer]]
    assert summary(trials(1)[0]) == summary([rollout])
    assert trials(2) == [], "a trial that was cut off is none"


def test_answers_to_other_questions_are_not_taken_for_ours(tmp_path):
    rollout, file = rollout_of(Script(PLAN)), tmp_path / "rollouts.jsonl"
    Trial("x", [rollout.question], 1, 0, file).add([rollout])
    with pytest.raises(ValueError, match="holds answers to other questions"):
        Trial("x", questions("another?"), 1, 0, file).resume()


def test_a_question_at_which_the_server_always_fails_counts_as_failed_and_ends_no_run(tmp_path):
    trial, seeds = Trial("x", questions("a?", "bad?", "c?", "d?"), 4, 7, tmp_path / "rollouts.jsonl"), []
    for seed, batch in trial.batches():
        seeds.append(seed)
        rollouts = [solve.Rollout(question, memory.Memory(question.question)) for question in batch]
        rollouts[1].failed = "planner: host answered 503 Service Unavailable"
        assert trial.add(rollouts) == (len(seeds) == 2)
    assert [rollout.failed != "" for rollout in trial.rollouts] == [False, True, False, False]
    assert seeds == [7 * 1_000_003] * 2, "the batch was run once more, with the same seed"
    trial.resume()
    assert trial.rollouts[1].failed and list(trial.batches()) == [], "and it is not run again"


def test_a_server_that_is_down_for_most_of_a_batch_twice_ends_the_run_and_nothing_of_it_is_saved(tmp_path):
    trial, batches = Trial("x", questions("a?", "b?", "c?"), 3, 0, tmp_path / "rollouts.jsonl"), 0
    with pytest.raises(ValueError, match=r"^2 of the 3 rollouts .*\(planner: host answered 503\): fix that"):
        for _, batch in trial.batches():
            batches += 1
            rollouts = [solve.Rollout(question, memory.Memory(question.question)) for question in batch]
            rollouts[0].failed = rollouts[2].failed = "planner: host answered 503"
            trial.add(rollouts)
    assert batches == 2 and trial.rollouts == [] and trial.resume() is None and trial.rollouts == []


def test_without_a_file_a_batch_in_which_a_server_was_down_is_kept():
    trial = Trial("x", questions("a?"), 1, 0)
    rollout = solve.Rollout(trial.questions[0], memory.Memory("a?"), failed="planner: host answered 503")
    assert trial.add([rollout]) and trial.rollouts == [rollout]
    assert list(trial.batches()) == []


@pytest.mark.parametrize("error, later", [
    ("", False), (f"planner: {TOO_LONG}", False), ("host answered 400 Bad Request", False),
    ("host answered 422 Unprocessable Entity: x", False), ("host answered 401 Unauthorized", True),
    ("host answered 404 Not Found", True), ("host answered 429 Too Many Requests", True),
    ("host answered 503", True), ("host cannot be reached", True),
])
def test_only_an_outage_is_worth_another_try_later(error, later):
    assert outage(error) is later


# ---- the model's mistakes
def test_a_plan_that_cannot_be_parsed_costs_a_turn_and_the_planner_reads_why():
    policy = Script("I would double it.", PLAN.replace("Tool: double", "Tool: googel"), PLAN)
    rollout = rollout_of(policy, Script("a", CALL, STOP, ANSWER), max_turns=3)  # both end turns 1 and 2
    why = "Tool: (none)\nSub-goal: (none)\nCommand: (none)\n" \
        "Result: Error: no line 'Sub-goal: ...'. Answer in the four lines asked for.\nVerdict: CONTINUE"
    assert why in policy.prompts[1]
    assert "Error: no tool called 'googel'. Use one of: base_generator, double." in policy.prompts[2]
    assert [(step.turn, step.error) for step in rollout.memory.steps] == [(1, True), (2, True), (3, False)]
    metrics = summary([rollout])
    assert metrics["errors"] == 2 / 3 and len(rollout.plans) == 3
    assert {name: n for name, (n, _, _) in metrics["calls"].items()} == {"double": 1, "unreadable": 2}


@pytest.mark.parametrize("call, why", [
    ("let me see", "Error: the call could not be read"),
    ('base_generator(query="?")', "Error: the plan was to call double, not 'base_generator'"),
    ('double(number="four")', "Error: double failed: ValueError: invalid literal"),
    ("double(number=4)", "must be a string"), ("double()", "Error: double needs the argument 'number'"),
    ('double(number="1", more="2")', "Error: double has no argument 'more'"),
])
def test_a_call_that_cannot_be_parsed_or_run_costs_a_turn_and_the_planner_reads_why(call, why):
    policy = Script(PLAN, PLAN)
    rollout = rollout_of(policy, Script("a", call, GO_ON, CALL, STOP, ANSWER))
    parsed = isinstance(executor.parse(call, "double", TOOLS["double"]), executor.Call)
    command = call.replace('"', "'") if parsed else "(none)"
    assert why in policy.prompts[1] and f"Command: {command}\n" in policy.prompts[1]
    assert [step.error for step in rollout.memory.steps] == [True, False] and not rollout.failed
    assert summary([rollout])["errors"] == 0.5


def test_the_mistake_of_a_rollout_is_not_anothers():
    policy = Script("what?", PLAN, PLAN, PLAN, PLAN)
    fixed = Script("a", "a", "a", "what?", CALL, GO_ON, STOP, CALL, CALL, GO_ON, GO_ON, "1", "2", "3")
    rollouts = solve.roll_out(questions("a?", "b?", "c?"), policy, fixed, TOOLS, max_turns=2)
    errors = [[step.error for step in rollout.memory.steps] for rollout in rollouts]
    assert errors == [[True, False], [True, False], [False]]
    results = [rollout.memory.steps[0].result[:24] for rollout in rollouts]
    assert results == ["Error: no line 'Sub-goal", "Error: the call could no", "42"]


# ---- tools in a batch
def test_the_queries_to_the_language_model_are_one_batch():
    """With doubles: an engine answers equal prompts once (test_models.py, test_server.py)."""
    queries = [f'base_generator(query="{name}")' for name in ("iron", "gold", "iron")]
    calls = [*queries, CALL, "base_generator()", "base_generator(query=1)"]
    fixed = Script(*"aaaaaa", *calls, "Fe", "Au", "Fe", *[STOP] * 6, *"123456")
    plans = Script(GENERATE, GENERATE, GENERATE, PLAN, GENERATE, GENERATE)
    rollouts = solve.roll_out(questions(*"abcdef"), plans, fixed, TOOLS)
    assert [rollout.memory.steps[0].result for rollout in rollouts[:4]] == ["Fe", "Au", "Fe", "42"]
    assert [rollout.memory.steps[0].error for rollout in rollouts] == [False] * 4 + [True] * 2
    assert fixed.calls[2] == (3, {"temperature": 0.0, "max_new_tokens": None})
    assert fixed.prompts[12:15] == ["iron", "gold", "iron"]


@pytest.mark.parametrize("completion, failed, result, tokens", [
    ("Fe", "", "Fe", [len(b"iron") + len(b"Fe") + 1, 0]), ("", "", "Error: no answer", [len(b"iron") + 1, 0]),
    (NO_ROOM, "", f"Error: {TOO_LONG}", [2, 0]),
    (Completion("", [1], [], "host is down"), "base_generator: host is down", None, [0])])
def test_only_a_query_to_the_language_model_has_its_tokens_and_errors(completion, failed, result, tokens):
    find = dataclasses.replace(TOOLS["double"], run=lambda query: "found", arguments={"query": "a query"})
    calls = ['base_generator(query="iron")', 'find(query="iron")']
    fixed = Script("a", "a", *calls, completion, STOP, STOP, ANSWER, ANSWER)
    plans = Script(GENERATE, PLAN.replace("Tool: double", "Tool: find"))
    rollouts = solve.roll_out(questions("q", "r"), plans, fixed, TOOLS | {"find": find})
    assert [rollout.failed for rollout in rollouts] == [failed, ""]
    steps = [[(step.result, step.error) for step in rollout.memory.steps] for rollout in rollouts]
    assert steps == [[] if failed else [(result, result != "Fe")], [("found", False)]]
    outputs = [output for rollout in rollouts for output in rollout.outputs]
    assert [o["tokens"] for o in outputs if o["module"] in ("base_generator", "find")] == tokens


def test_tools_run_at_the_same_time_and_their_results_find_their_rollouts():
    meet = threading.Barrier(4, timeout=60)  # breaks, unless four are there at once

    def late_first(number):
        meet.wait()
        time.sleep(0.02 * (4 - int(number)))
        return number

    fixed = Cast(executor=lambda prompt: f'double(number="{prompt[prompt.index("Question: ") + 10]}")')
    rollouts = solve.roll_out(questions("0", "1", "2", "3"), Cast(), fixed, doubling(late_first))
    assert [rollout.memory.steps[0].result for rollout in rollouts] == ["0", "1", "2", "3"]


# ---- our failures
def wordy(prompt):
    return PLAN.replace("double it", "double " + "it " * 2000)


@pytest.mark.parametrize("tries, budget", list(enumerate(SMALLER_BUDGETS, 2)))
def test_a_prompt_that_is_too_long_is_made_again_with_less_memory(tries, budget):
    room = len(planner.prompt("long?", TOOLS, "a", "")) + budget
    plan = lambda prompt: NO_ROOM if len(prompt) > room else wordy(prompt) if "long?" in prompt else PLAN
    policy = Cast(planner=plan)
    texts = questions("long?", "short")
    long, short = solve.roll_out(texts, policy, Cast(verifier=GO_ON), TOOLS, max_turns=2)
    assert not long.failed and not short.failed and len(long.plans) == len(short.plans) == 2
    assert [size for size, _ in policy.calls] == [2, 2] + [1] * (tries - 1)  # only the long one
    sizes = [len(p) for p in policy.prompts[2:] if "long?" in p]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == tries and sizes[-1] <= room < sizes[-2]


@pytest.mark.parametrize("module, text", [("verifier", STOP), ("generator", ANSWER)])
def test_the_other_readers_of_memory_get_a_shorter_one_too(module, text):
    fixed = Cast(**{module: lambda prompt: NO_ROOM if prompt.count("it ") > 1000 else text})
    rollout = rollout_of(Cast(planner=wordy), fixed)
    assert rollout.answer == "42" and not rollout.failed and len(fixed.prompts_of(module)) == 2


def failing(module):
    """Casts in which every prompt of one module is too long for the question "bad?"."""
    text = Cast().parts[module]
    part = {module: lambda prompt: NO_ROOM if "bad?" in prompt else text}
    return Cast(**part), Cast(**part)


@pytest.mark.parametrize("module, actions, steps", [
    ("analysis", 0, 0), ("planner", 0, 0), ("executor", 1, 0), ("verifier", 1, 1), ("generator", 1, 1)])
def test_a_rollout_whose_prompt_never_fits_fails_and_leaves_and_the_others_go_on(module, actions, steps):
    policy, fixed = failing(module)
    metrics, (good, bad, last) = solve.evaluate(questions("good?", "bad?", "last?"), policy, fixed, TOOLS)
    stages = ["analysis", "planner", "executor", "double", "verifier", "generator"]
    assert [output["module"] for output in bad.outputs] == stages[: stages.index(module) + 1]
    assert bad.failed == f"{module}: {TOO_LONG}" and trace(bad).endswith(f"\nFailed: {bad.failed}")
    assert (len(bad.plans), len(bad.memory.steps), bad.answer, bad.right) == (actions, steps, "", False)
    for rollout in (good, last):
        assert (rollout.failed, rollout.answer, rollout.right) == ("", "42", True)
    assert metrics["failed"] == 1 and metrics["accuracy"] == pytest.approx(2 / 3)
    tries = sum("bad?" in prompt for prompt in policy.prompts_of(module) + fixed.prompts_of(module))
    assert tries == 1 + len(SMALLER_BUDGETS)


def test_a_rollout_that_fails_in_a_later_turn_does_not_act_on_its_old_plan():
    rollout = rollout_of(Script(PLAN, *[NO_ROOM] * (1 + len(SMALLER_BUDGETS))), Script("a", CALL, GO_ON))
    assert rollout.failed == f"planner: {TOO_LONG}" and len(rollout.memory.steps) == len(rollout.plans) == 1


def test_an_engine_that_fails_otherwise_is_not_called_again():
    policy = Script(Completion("", [], [], "the server is down"))
    assert rollout_of(policy).failed == "planner: the server is down" and len(policy.calls) == 1


# ---- numbers and text of a batch
def test_every_question_stays_in_the_denominator():
    right, wrong, bad = Question("right?", "42"), Question("wrong?", "43"), Question("bad?", "")
    metrics, rollouts = solve.evaluate([right, wrong, bad, right], *failing("generator"), TOOLS)
    assert [rollout.question for rollout in rollouts] == [right, wrong, bad, right]
    assert [rollout.right for rollout in rollouts] == [True, False, False, True]
    assert [rollout.failed != "" for rollout in rollouts] == [False, False, True, False]
    assert metrics["accuracy"] == 0.5 and metrics["failed"] == 1


def test_a_failed_rollout_is_not_right_by_chance(monkeypatch):
    monkeypatch.setattr(rules, "decide", lambda question, answer: True)
    _, rollouts = solve.evaluate(questions("good?", "bad?"), *failing("planner"), TOOLS)
    assert [rollout.right for rollout in rollouts] == [True, False]


def test_the_numbers_of_a_batch_are_means_over_rollouts():
    policy = Script(PLAN, PLAN, PLAN)
    calls = CALL, 'double(number="x")', STOP, GO_ON, CALL
    fixed = Script("a", "b", *calls, STOP, ANSWER, "<answer>7</answer>")
    metrics, rollouts = solve.evaluate(questions("one?", "two?"), policy, fixed, TOOLS)
    tokens = sum(len(c.prompt_ids) + len(c.ids) for c in policy.given + fixed.given) / 2
    assert metrics.pop("calls")["double"][:2] == (3, 1)
    means = {"accuracy": 0.5, "turns": 1.5, "errors": 1 / 3, "failed": 0, "undecided": 0, "tokens": tokens}
    assert metrics == means
    line = f"accuracy 0.500 [0.09, 0.91] of 2 | turns 1.50 | errors 33.3% | {tokens:.0f} tokens a rollout"
    assert accuracy_line(means, 2) == line and accuracy_line(means | {"failed": 1}, 2) == line + " | failed 1"


def test_the_trace_shows_what_every_module_wrote_turn_by_turn():
    rollout = rollout_of(Script("what?", PLAN), Script("think\ntwice", CALL, STOP, ANSWER))
    lines = trace(rollout).splitlines()
    titles = ["analysis", "turn 1 planner", "turn 2 planner", "turn 2 executor", "turn 2 double",
              "turn 2 verifier", "generator"]
    assert [line.split("]")[0] for line in lines if line.startswith("[")] == ["[" + title for title in titles]
    assert lines[0] == "Question: q?" and lines[-1] == "Answer: 42"
    assert lines[2:4] == ["    think", "    twice"]
    assert "tokens" in lines[1] and "tokens" not in lines[lines.index("    42") - 1]  # a tool reads none


def test_the_trace_is_text_that_any_terminal_can_show_and_none_obeys():
    rollout = rollout_of(Cast(), Cast())
    rollout.answer = "half \ud800, \x1b[2J, \u202eback, \x07, \U000e0041 and Dvořák 北京 ☺"
    shown = "half \\ud800, \\x1b[2J, \\u202eback, \\x07, \\U000e0041 and Dvořák 北京 ☺"
    assert trace(rollout).endswith(f"Answer: {shown}") and trace(rollout).encode()


# ---- the command line
@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny random model, which writes nonsense, questions, and a corpus."""
    folder = tmp_path_factory.mktemp("solve")
    write(folder / "model", tokenizer(), max_position_embeddings=16_384)
    files = {"corpus.jsonl": '{"title": "Iron", "text": "Iron is a metal."}\n', "empty.jsonl": "\n",
             "file": "kept", "data.jsonl": '{"question": "2 + 2?", "answer": 4}\n' * 3,
             "words.jsonl": '{"question": "?", "answer": "4"}\n2 + 2?\n'}
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def arguments(place, text):
    given = text.split("|")
    for name, value in {"--model": "@model", "--corpus": "@corpus.jsonl", "--max-new-tokens": "3",
                        "--max-turns": "2", "--device": "cpu"}.items():
        given += [] if name in given else [name, value]
    return ["solve.py", *(word.replace("@", f"{place}/") for word in given)]


@pytest.fixture
def run(monkeypatch, capsys, place):
    """solve.py with this command line, in this process: what it printed."""
    def run(text):
        monkeypatch.setattr(sys, "argv", arguments(place, text))
        solve.main()
        return capsys.readouterr().out
    return run


def rows_of(folder):
    return [json.loads(line) for line in (folder / "questions-0.jsonl").read_text().splitlines()]


WRONG = ["q?|--max-turns|0", "q?|--max-turns|-1", "q?|--temperature|-1", "q?|--temperature|nan",
         "q?|--temperature|inf", "q?|--max-new-tokens|0", "q?|--max-new-tokens|-5",
         "--data|@data.jsonl|--limit|0", "--data|@data.jsonl|--limit|-1", "--data|@data.jsonl|--batch|0"]


@pytest.mark.parametrize("text, why", [(text, " ".join(text.split("|")[-2:])) for text in WRONG] + [
    ("", "question is empty"), ("q?|--data|@data.jsonl", "not two"),
    ("q?|--benchmark|bamboogle", "not two"), ("q?|--tools|python_coder|python_coder", "twice"),
    ("q?|--tools|googel", "'googel': choose from base_generator, python_coder, google_search, wikipedia"),
    ("--data|@none.jsonl", "none.jsonl: no such file"), ("--data|@model", "cannot be read"),
    ("--data|@words.jsonl", "words.jsonl, line 2: not JSON"), ("q?|--corpus|@empty.jsonl", "no passages"),
    ("q?|--corpus|@none.jsonl", "none.jsonl: cannot read"),
    ("q?|--corpus|wikipedia:../x", "names no Wikipedia"),
    ("q?|--model|@none", "none"), ("q?|--model|@file", "no folder"),
    ("q?|--model|no-such/model", "no-such/model"), ("q?|--fixed|@none", "none"), ("q?|--judge|@none", "none"),
    ("q?|--device|toaster", "toaster"), ("q?|--dtype|float3", "float3"),
    ("q?|--verifier|http://127.0.0.1:1/v1", "127.0.0.1:1"), ("q?|--out|@file/below", "can't be used"),
    ("q?|--out|@file", "is not a folder that solve.py --out wrote"),
    ("q?|--out|@model", "is not a folder that solve.py --out wrote"),
])
def test_a_bad_command_line_ends_with_one_sentence(run, capsys, place, text, why):
    before = sorted(place.iterdir())
    with pytest.raises(SystemExit) as stop:
        run(text)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith(("Loading", "Writing"))]
    assert stop.value.code == 2 and out == "" and len(lines) == 1
    assert lines[0].startswith("solve.py: ") and why in lines[0]
    assert (place / "file").read_text() == "kept" and sorted(place.iterdir()) == before


def test_a_model_that_writes_nonsense_comes_to_a_normal_end(run):
    out = run("What is the capital of France?")
    assert "[turn 2 planner]" in out and "[turn 1 executor]" not in out and "Answer: " in out
    assert "1 rollouts" in out and "calls: unreadable 2 (2 errors, 0.0 s)" in out and "accuracy" not in out


def test_a_plain_run_takes_nothing_from_fast_and_writes_what_the_fast_one_writes(run, monkeypatch, tmp_path):
    outputs, out = [], tmp_path / "run"
    for flags in ("", "|--plain"):
        run(f"q?|--quiet|--max-new-tokens|9|--out|{out}{len(outputs)}{flags}")
        outputs.append([output["text"] for output in rows_of(Path(f"{out}{len(outputs)}"))[0]["words"]])
        monkeypatch.setattr(sampling, "sample", None)
        monkeypatch.setattr(loading, "upcast", None)
    assert outputs[0] == outputs[1]
    with pytest.raises(SystemExit):
        run(f"q?|--quiet|--max-new-tokens|9|--plain|--out|{out}0")  # another run: it may sample other tokens


def test_a_file_of_questions_is_answered_graded_and_written_out(run, tmp_path):
    out = run(f"--data|@data.jsonl|--limit|2|--quiet|--tools|base_generator|--out|{tmp_path}/run")
    assert "Question:" not in out and "tools   base_generator\n" in out
    assert "accuracy 0.000 [0.00, 0.66] of 2 | turns 2.00 | errors 100.0%" in out
    rows = rows_of(tmp_path / "run")
    assert [(row["gold"], row["right"], row["turns"]) for row in rows] == [("4", False, 2)] * 2
    assert all(step["error"] for row in rows for step in row["memory"]["steps"])
    assert run("--data|@data.jsonl|--quiet").count("3 rollouts") == 1  # without --limit, all of them


def test_a_local_model_may_be_the_judge_and_what_it_writes_is_recorded(run, tmp_path):
    data = "--data|@data.jsonl|--limit|2|--tools|base_generator"
    out = run(f"{data}|--judge|@model|--out|{tmp_path}/run|--max-turns|1")
    assert "judge   " in out and "[judge]" in out and "| undecided 2" in out  # its verdict is nonsense, too
    rows = [(row["undecided"], row["words"][-1]["module"]) for row in rows_of(tmp_path / "run")]
    assert rows == [(True, "judge")] * 2


def test_a_tool_whose_key_is_missing_is_left_out_and_a_line_says_so(run, monkeypatch):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    out = run("q?|--max-turns|1|--quiet")
    assert "\nwithout google_search needs SERPER_API_KEY in the environment\n" in out
    assert f"tools   {', '.join(name for name in toolset.TOOLS if name != 'google_search')}\n" in out


def test_each_batch_is_shown_before_the_next_begins(run, monkeypatch, capsys):
    shown, rollout = [], solve.roll_out

    def listening(*args, **settings):
        shown.append(capsys.readouterr().out)
        return rollout(*args, **settings)

    monkeypatch.setattr(solve, "roll_out", listening)
    assert "3 rollouts" in run("--data|@data.jsonl|--batch|1")
    assert [out.count("Question: 2 + 2?") for out in shown] == [0, 1, 1]


def test_a_typed_question_is_traced_while_it_is_answered(run, monkeypatch, capsys):
    before, complete = [], solve.Modules.ask

    def listening(modules, module, prompts):
        if prompts:
            before.append((module, capsys.readouterr().out))
        return complete(modules, module, prompts)

    monkeypatch.setattr(solve.Modules, "ask", listening)
    after = run("q?")
    assert [module for module, _ in before] == ["analysis", "planner", "planner", "generator"]
    shown = dict(reversed(before))  # of each module its first turn
    assert "[analysis]" in shown["planner"] and "[turn 2 planner]" in shown["generator"]
    whole = "".join(text for _, text in before) + after
    assert whole.count("Question: q?") == 1 and whole.count("[turn 1 planner]") == 1
    assert re.search(r"\[generator\].*\nAnswer: .*\n\n1 rollouts", after, re.S) and "[analysis]" not in after


def test_max_new_tokens_bounds_the_judge_too(run, tmp_path):
    run(f"--data|@data.jsonl|--limit|1|--judge|@model|--max-new-tokens|5|--quiet|--out|{tmp_path}/run")
    judged = [output for output in rows_of(tmp_path / "run")[0]["words"] if output["module"] == "judge"]
    assert judged and all(len(output["text"].split()) <= 5 for output in judged)


def test_the_batch_is_part_of_what_a_run_is(run, capsys, tmp_path):
    run(f"--data|@data.jsonl|--quiet|--out|{tmp_path}/run")
    assert json.loads((tmp_path / "run/settings.json").read_text())["batch"] == 64
    with pytest.raises(SystemExit):
        run(f"--data|@data.jsonl|--quiet|--batch|2|--out|{tmp_path}/run")
    assert "holds a run with another --batch (64)" in capsys.readouterr().err


def test_a_seed_decides_what_is_sampled(run, tmp_path):
    outputs = []
    for i, seed in enumerate((1, 1, 2)):
        run(f"q?|--seed|{seed}|--temperature|1|--quiet|--max-new-tokens|9|--out|{tmp_path}/{i}")
        outputs.append([output["text"] for output in rows_of(tmp_path / str(i))[0]["words"]])
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("text, temperature", [
    ("q?", 0), ("q?|--temperature|0.7", 0.7), ("--tools|base_generator|q?", 0), ("--quiet", 0.7),
    ("--data|@data.jsonl", 0.7), ("--data|@data.jsonl|--temperature|0", 0), ("--benchmark|gameof24", 0.7)])
def test_only_one_typed_question_is_answered_greedily_unless_the_temperature_is_given(
        monkeypatch, place, text, temperature):
    monkeypatch.setattr(sys, "argv", arguments(place, text))
    assert command_line.solve_arguments(toolset.TOOLS).temperature == temperature


@pytest.mark.exhaustive
def test_a_typed_question_has_the_same_answer_with_every_seed_and_a_file_has_not(run, tmp_path):
    def outputs(i, question):
        run(f"{question}|--seed|{i % 2}|--quiet|--max-new-tokens|9|--max-turns|1|--out|{tmp_path}/{i}")
        return [output["text"] for output in rows_of(tmp_path / str(i))[0]["words"]]
    assert outputs(0, "q?") == outputs(1, "q?")
    data = "--data|@data.jsonl|--limit|1|--judge|none"
    assert outputs(2, data) != outputs(3, data)


def test_a_question_longer_than_the_models_context_fails_and_says_so(run, capsys):
    with pytest.raises(SystemExit) as stop:
        run("why? " * 5000)
    assert f"Failed: analysis: {TOO_LONG}" in capsys.readouterr().out and stop.value.code == 1


def settled(text):
    args = solve_parser().parse_args(text.split("|"))
    command_line.settle_engines(args, toolset.TOOLS)
    return args


def test_a_checkpoint_brings_the_modules_and_the_tools_it_was_trained_with(tmp_path):
    assert settled(f"q|--model|{tmp_path}").fixed == str(tmp_path)
    assert settled("q|--model|Qwen/Qwen2.5-7B-Instruct").tools is None
    trained = {"fixed": "frozen", "verifier": "another", "tools": ["python_coder"], "corpus": "c.jsonl"}
    (tmp_path / "train.json").write_text(json.dumps(trained))
    args = settled(f"q|--model|{tmp_path}|--corpus|mine.jsonl")
    assert (args.fixed, args.verifier, args.executor) == ("frozen", "another", None)
    assert args.tools == ["python_coder"] and args.corpus == "mine.jsonl"


def test_a_checkpoint_does_not_choose_the_server_that_reads_our_questions_and_our_key(tmp_path):
    address = "https://elsewhere.example/v1"
    (tmp_path / "train.json").write_text(json.dumps({"fixed": address}))
    with pytest.raises(ValueError, match=f"was trained with --fixed {address}: give that, or another"):
        settled(f"q|--model|{tmp_path}")
    assert settled(f"q|--model|{tmp_path}|--fixed|{address}").fixed == address


@pytest.mark.parametrize("name, value", [
    ("fixed", 5), ("executor", {"a": 1}), ("corpus", ["a"]), ("tools", [1]), ("tools", [["a"]])])
def test_a_checkpoint_with_names_that_are_no_texts_is_refused_in_a_sentence(tmp_path, name, value):
    (tmp_path / "train.json").write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=r"train.json cannot be used \(.*\): take another checkpoint"):
        settled(f"q|--model|{tmp_path}")


def test_the_toy_has_the_tools_it_has_read_about():
    assert settled("q").tools == TOY_TOOLS and settled("q").corpus.endswith("toy/corpus.jsonl")
    assert settled("q|--tools|python_coder").tools == ["python_coder"]


@pytest.mark.parametrize("bytes_a_weight, dtype, why", [
    (9, None, ""), (3, "bfloat16", ", because float32 does not fit")])
def test_weights_that_do_not_fit_in_float32_are_in_half_of_it(monkeypatch, place, bytes_a_weight, dtype, why):
    args = settled(f"q|--model|{place}/model|--device|cpu")
    weights = fit.shapes(config_of(args.model))["parameters"]
    monkeypatch.setattr(fit, "host_memory", lambda: bytes_a_weight * weights)
    assert cast.plan_memory(args).endswith(f"in {dtype or 'float32'}{why}") and args.dtype == dtype


def test_weights_that_do_not_fit_at_all_are_a_sentence_before_they_are_loaded(monkeypatch, capsys, run):
    monkeypatch.setattr(fit, "host_memory", lambda: 1000)
    with pytest.raises(SystemExit) as stop:
        run("q?")
    why = "use smaller models, or a server for --model or --fixed"
    assert stop.value.code == 2 and why in capsys.readouterr().err
