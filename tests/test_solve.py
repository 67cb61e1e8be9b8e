"""solve.py: who is asked when, what becomes of every mistake, and a command that is stopped and
typed again. Scripts play the language models; a server on loopback plays them for the command."""

import copy
import dataclasses
import json
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import answer, spy, without_seconds
from test_local import write

import executor
import generator
import memory
import planner
import solve
import verifier
from benchmarks.questions import Question, read_questions
from models import local
from models.completion import TOO_LONG, Completion
from record import folder
from record.compare import refuse_two_flows
from record.flags import EXAMPLES, TOY
from record.folder import append
from record.metrics import summary
from record.rollouts import ending, record_of, rollout_of, tokens_of, trace
from tools import TOOLS as ALL_TOOLS
from tools import Tool, lacking
from world.mistakes import Mistake

PROMPTS = {module.__name__: module.PROMPT for module in (planner, executor, verifier, generator)}
PROMPTS["analysis"] = planner.ANALYSIS_PROMPT
DOUBLE = Tool(lambda n: str(2 * int(n)), "Doubles.", {"n": "a number"}, "None.", 'double(n="2")')
TOOLS = {"base_generator": ALL_TOOLS["base_generator"], "double": DOUBLE}
PLAN = "Justification: j\nContext: c\nSub-goal: double it\nTool: double"
ASK = PLAN.replace("Tool: double", "Tool: base_generator")
CALL, ANSWER = 'double(n="21")', "<answer>42</answer>"
STOP, GO_ON = "Conclusion: STOP", "Conclusion: CONTINUE"
LOCK = folder.lock
NO_ROOM, DOWN = (Completion("", [], [], error) for error in (TOO_LONG, "host answered 503"))


class Script:
    """An engine that answers in order, and remembers its prompts and the settings of each call."""

    fingerprint = ""

    def __init__(self, *answers):
        self.answers, self.prompts, self.calls, self.given = list(answers), [], [], []

    def __str__(self):
        return "a script"

    def __call__(self, prompts, **settings):
        self.calls.append((len(prompts), settings))
        completions = [self.answer(prompt) for prompt in prompts]
        self.prompts, self.given = self.prompts + prompts, self.given + completions
        return completions

    def answer(self, prompt):
        text = self.answers.pop(0)  # IndexError: there are more prompts than the script foresees
        if isinstance(text, Completion):
            return text
        return Completion(text, [*prompt.encode()], [*text.encode("utf-8", "replace"), 0])


class Cast(Script):
    """A text, or a function of the prompt, for each module; "other": for no module's prompt."""

    def __init__(self, **parts):
        super().__init__()
        self.parts = dict(
            analysis="a", planner=PLAN, executor=CALL, verifier=STOP, generator=ANSWER
        )
        self.parts |= parts

    def answer(self, prompt):
        part = self.parts[module_of(prompt)]
        self.answers = [part(prompt) if callable(part) else part]
        return super().answer(prompt)

    def prompts_of(self, module):
        return [prompt for prompt in self.prompts if module_of(prompt) == module]


def module_of(prompt):
    same = (name for name, text in PROMPTS.items() if prompt[:40] == text[:40])
    return next(same, "other")


def questions(*texts):
    return [Question(text, "42") for text in texts]


def rollout(policy, fixed=None, question="q?", tools=TOOLS, **settings):
    return solve.roll_out(questions(question), policy, fixed or Cast(), tools, **settings)[0]


def outputs(rollout):
    return [(output["turn"], output["module"], output["text"]) for output in rollout.outputs]


# ---------------------------------------------------------------------------- the order of things
def test_the_stages_come_in_the_papers_order():
    done = rollout(Script(PLAN, PLAN), Script("an analysis", CALL, GO_ON, CALL, STOP, ANSWER))
    stages = [("planner", PLAN), ("executor", CALL), ("double", "42")]
    assert outputs(done) == [
        (0, "analysis", "an analysis"),
        *((1, *stage) for stage in [*stages, ("verifier", GO_ON)]),
        *((2, *stage) for stage in [*stages, ("verifier", STOP)]),
        (4, "generator", ANSWER),
    ]
    assert done.answer == "42" and done.right and done.reward == 1 and done.stopped


def test_every_prompt_is_that_of_its_module_with_the_memory_so_far():
    calls = [f'double(n="{n}")' for n in (21, 4, 5)]
    policy = Script(*[PLAN] * 3)
    fixed = Script("a", calls[0], GO_ON, calls[1], GO_ON, calls[2], STOP, ANSWER)
    done = rollout(policy, fixed).memory
    assert [step.result for step in done.steps] == ["42", "8", "10"]
    assert [step.verdict for step in done.steps] == ["CONTINUE", "CONTINUE", "STOP"]

    def seen(turns, verdict=True):
        steps = copy.deepcopy(done.steps[:turns])
        if not verdict:
            steps[-1].verdict = ""
        return dataclasses.replace(done, steps=steps)

    assert policy.prompts == [planner.prompt(seen(turns), TOOLS) for turns in (0, 1, 2)]
    call = executor.prompt("q?", planner.parse(PLAN, TOOLS), TOOLS["double"])
    checks = [verifier.prompt(seen(turns, verdict=False), TOOLS) for turns in (1, 2, 3)]
    turns = [prompt for check in checks for prompt in (call, check)]
    first, last = planner.analysis_prompt("q?", TOOLS), generator.prompt(seen(3))
    assert fixed.prompts == [first, *turns, last]


def test_only_trained_modules_sample_and_their_completions_are_kept_as_they_were_sampled():
    policy, fixed = Script(PLAN, "no plan", ANSWER), Cast(verifier=GO_ON)
    how = dict(max_turns=2, temperature=0.9, max_new_tokens=77)
    done = rollout(policy, fixed, trained=("planner", "generator"), **how)
    assert policy.calls == [(1, {"temperature": 0.9, "max_new_tokens": 77})] * 3
    assert fixed.calls == [(1, {"temperature": 0, "max_new_tokens": 77})] * 3
    assert all(map(lambda a, b: a is b, done.sampled, policy.given)) and len(done.sampled) == 3
    assert done.sampled[1].ids == [*b"no plan", 0] and done.answer == "42"
    assert len(rollout(Script(PLAN)).sampled) == 1  # by default the planner's alone


def test_every_module_may_have_an_engine_of_its_own():
    ask, check, others = (
        Script("Fe"),
        Script(STOP),
        Script("a", 'base_generator(query="iron")', "x"),
    )
    fixed = {"base_generator": ask, "verifier": check, "default": others}
    done = rollout(Script(ASK), fixed, max_new_tokens=9)
    assert ask.prompts == ["iron"] and ask.calls == [(1, {"max_new_tokens": 9})]
    assert done.memory.steps[0].result == "Fe" and not others.answers and not check.answers


def test_a_stop_ends_a_rollout_and_the_others_go_on_in_a_smaller_batch():
    turns = {"a?": 1, "b?": 3, "c?": 2, "d?": 9}
    over = lambda prompt: prompt.count("Step ") >= next(n for q, n in turns.items() if q in prompt)
    policy, fixed = Cast(), Cast(verifier=lambda prompt: STOP if over(prompt) else GO_ON)
    rollouts = solve.roll_out(questions(*turns), policy, fixed, TOOLS, max_turns=4)
    assert [size for size, _ in policy.calls] == [4, 3, 2, 1]
    assert [len(done.plans) for done in rollouts] == [1, 3, 2, 4]
    assert [done.stopped for done in rollouts] == [True, True, True, False]
    assert fixed.calls[-1][0] == 4 and all(done.answer == "42" for done in rollouts)


@pytest.mark.parametrize("texts", [("is it 111?", "is it 222?"), ("the same?", "the same?")])
def test_each_rollout_has_a_memory_and_a_state_of_its_own(texts):
    def count(n, state):
        state["sum"] = state.get("sum", 0) + int(n)
        return str(state["sum"])

    plans = [PLAN.replace("double it", f"double {name}") for name in ("ours", "theirs") * 2]
    policy, calls = Script(*plans), ('double(n="1")', 'double(n="10")')
    fixed = Script("a", "a", *calls, GO_ON, GO_ON, *calls, STOP, STOP, "1", "2")
    tools = {"double": dataclasses.replace(DOUBLE, run=count, stateful=True)}
    rollouts = solve.roll_out(questions(*texts), policy, fixed, tools)
    for prompt, own, result, other in ((2, "ours", 1, "theirs"), (3, "theirs", 10, "ours")):
        assert f"double {own}" in policy.prompts[prompt] and other not in policy.prompts[prompt]
        assert f"Result: {result}\n" in policy.prompts[prompt]
    assert [done.memory.steps[1].result for done in rollouts] == ["2", "20"]
    assert [done.answer for done in rollouts] == ["1", "2"]


def test_long_texts_do_not_make_long_prompts_nor_long_records():
    policy, long = Cast(), "x" * 10**6
    tools = {"double": dataclasses.replace(DOUBLE, run=lambda n: long)}
    fixed = Cast(analysis=long, verifier=GO_ON, generator=long)
    done = rollout(policy, fixed, tools=tools, max_turns=10)
    assert len(done.memory.analysis) == solve.ANALYSIS_LIMIT
    assert max(map(len, policy.prompts)) <= len(policy.prompts[0]) + memory.BUDGET
    assert max(len(output["text"]) for output in done.outputs) == solve.RECORD_LIMIT


# ---------------------------------------------------------------------------- the model's mistakes
def test_a_plan_that_cannot_be_parsed_costs_a_turn_and_is_told_to_the_planner():
    policy = Script("I would double it.", PLAN.replace("Tool: double", "Tool: googel"), PLAN)
    done = rollout(policy, Script("a", CALL, STOP, ANSWER))
    assert (
        "Tool: (none)\nSub-goal: (none)\nCommand: (none)\n"
        "Result: Error: no line 'Sub-goal: ...'. Answer in the four lines asked for.\n"
        "Verdict: CONTINUE" in policy.prompts[1]
    )
    assert (
        "Error: no tool called 'googel'. Use one of: base_generator, double." in policy.prompts[2]
    )
    steps = done.memory.steps
    assert [(step.turn, step.error) for step in steps] == [(1, True), (2, True), (3, False)]
    assert len(done.plans) == len(done.sampled) == 3 and summary([done])["errors"] == 2 / 3


@pytest.mark.parametrize(
    "call, why",
    [
        ("let me see", "Error: the call could not be read"),
        ('base_generator(query="?")', "Error: the plan was to call double, not 'base_generator'"),
        ('double(n="four")', "Error: double failed: ValueError: invalid literal"),
        ("double()", "Error: double needs the argument 'n'"),
    ],
)
def test_a_call_that_cannot_be_parsed_or_run_costs_a_turn_and_is_told_to_the_planner(call, why):
    policy = Script(PLAN, PLAN)
    done = rollout(policy, Script("a", call, GO_ON, CALL, STOP, ANSWER))
    assert why in policy.prompts[1]
    assert [step.error for step in done.memory.steps] == [True, False] and not done.failed


def test_the_mistake_of_a_rollout_is_not_anothers():
    policy = Script("what?", PLAN, PLAN, PLAN, PLAN)
    fixed = [*"aaa", "what?", CALL, GO_ON, STOP, CALL, CALL, GO_ON, GO_ON, *"123"]
    rollouts = solve.roll_out(questions(*"abc"), policy, Script(*fixed), TOOLS, max_turns=2)
    errors = [[step.error for step in done.memory.steps] for done in rollouts]
    assert errors == [[True, False], [True, False], [False]]
    results = [done.memory.steps[0].result[:24] for done in rollouts]
    assert results == ["Error: no line 'Sub-goal", "Error: the call could no", "42"]


def test_equal_calls_of_a_turn_run_once_and_all_queries_are_one_batch():
    ran = []
    tools = TOOLS | {"double": dataclasses.replace(DOUBLE, run=lambda n: ran.append(n) or n)}
    asked = 'base_generator(query="iron")'
    fixed = Script(*"aaaa", asked, CALL, asked, CALL, "Fe", "Fe", *[STOP] * 4, *"1234")
    plans = Script(ASK, PLAN, ASK, PLAN)
    rollouts = solve.roll_out(questions(*"abcd"), plans, fixed, tools)
    assert [done.memory.steps[0].result for done in rollouts] == ["Fe", "21", "Fe", "21"]
    assert ran == ["21"] and fixed.prompts[8:10] == ["iron", "iron"] and fixed.calls[2][0] == 2


# ------------------------------------------------------------------------------------ our failures
def wordy(prompt):
    return PLAN.replace("double it", "double " + "it " * 2000)


@pytest.mark.parametrize("tries, budget", [(2, memory.BUDGET // 4), (3, memory.BUDGET // 16)])
def test_a_prompt_that_is_too_long_is_written_again_with_less_memory(tries, budget):
    room = len(planner.prompt(memory.Memory("long?", "a"), TOOLS)) + budget
    plan = lambda p: NO_ROOM if len(p) > room else wordy(p) if "long?" in p else PLAN
    policy, texts = Cast(planner=plan), questions("long?", "short")
    long, short = solve.roll_out(texts, policy, Cast(verifier=GO_ON), TOOLS, max_turns=2)
    assert not long.failed and not short.failed and len(long.plans) == len(short.plans) == 2
    assert [size for size, _ in policy.calls] == [2, 2] + [1] * (tries - 1)  # the long one alone
    sizes = [len(prompt) for prompt in policy.prompts[2:] if "long?" in prompt]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] <= room < sizes[-2]


@pytest.mark.parametrize("module", ["analysis", "planner", "executor", "verifier", "generator"])
def test_a_rollout_whose_prompt_never_fits_fails_and_the_others_go_on(module):
    part = {module: lambda prompt: NO_ROOM if "bad?" in prompt else Cast().parts[module]}
    policy, fixed = Cast(**part), Cast(**part)
    good, bad, last = solve.roll_out(questions("good?", "bad?", "last?"), policy, fixed, TOOLS)
    stages = ["analysis", "planner", "executor", "double", "verifier", "generator"]
    assert [name for _, name, _ in outputs(bad)] == stages[: stages.index(module) + 1]
    assert bad.failed == f"{module}: {TOO_LONG}" and not bad.right and not bad.answer
    assert all(done.right and not done.failed for done in (good, last))
    found = summary([good, bad, last])
    assert found["failed"] == 1 and found["accuracy"] == pytest.approx(2 / 3)
    tries = policy.prompts_of(module) + fixed.prompts_of(module)
    assert sum("bad?" in prompt for prompt in tries) == 1 + solve.SHORTER


def test_a_rollout_that_fails_in_a_later_turn_does_not_act_on_its_old_plan():
    done = rollout(Script(PLAN, *[NO_ROOM] * 3), Script("a", CALL, GO_ON))
    assert done.failed == f"planner: {TOO_LONG}"
    assert len(done.memory.steps) == len(done.plans) == len(done.sampled) == 1


def test_an_engine_that_fails_otherwise_is_not_asked_again():
    policy = Script(DOWN)
    assert rollout(policy).failed == "planner: host answered 503" and len(policy.calls) == 1
    fixed = Script("a", 'base_generator(query="iron")', DOWN)
    done = rollout(Script(ASK), fixed)
    assert done.failed == "base_generator: host answered 503" and not done.memory.steps


def test_what_is_cut_is_no_verdict_and_no_answer():
    cut = lambda text: Completion(text, [], [1], cut=True)
    texts = dict(planner=cut(PLAN), verifier=cut(STOP), generator=cut("42"))
    done = rollout(Cast(**texts), Cast(**texts), max_turns=2)
    assert not done.stopped and len(done.memory.steps) == 2 and done.answer == ""
    written = [output["cut"] for output in done.outputs if output["module"] in texts]
    assert written == [True] * 5


def test_what_a_model_thinks_is_in_no_memory():
    done = rollout(Cast(), Cast(analysis="<think>perhaps</think>Objective: o"))
    assert done.memory.analysis == "Objective: o"


def test_a_failed_judge_fails_the_rollout_and_a_failed_rollout_is_not_judged():
    unclear = [Question(text, "Jane Austen") for text in ("one?", "bad?")]
    fixed = Cast(generator=lambda prompt: DOWN if "bad?" in prompt else "her sister")
    judge = Script(DOWN)
    rollouts = solve.roll_out(unclear, Cast(), fixed, TOOLS, judge)
    whys = ["judge: host answered 503", "generator: host answered 503"]
    assert [done.failed for done in rollouts] == whys and len(judge.prompts) == 1


# ------------------------------------------------------------------------------ texts and records
def test_the_trace_shows_what_everyone_wrote_turn_by_turn_as_text_that_no_terminal_obeys(capsys):
    fixed = Script("think\ntwice\x1b[2J", CALL, STOP, "half \ud800 \u202eback")
    done = rollout(Script("what?", PLAN), fixed, live=True)
    text = trace(done.question, done)
    titles = ["analysis", "turn 1 planner", "turn 2 planner", "turn 2 executor", "turn 2 double"]
    titles += ["turn 2 verifier", "generator"]
    assert re.findall(r"(?m)^\[(.*?)\]", text) == titles
    assert text.startswith("Question: q?\n") and "\n    think\n    twice\\x1b[2J\n" in text
    assert text.endswith("\nAnswer: half \\ud800 \\u202eback") and text.encode()
    live = capsys.readouterr().out.strip()
    # what a question on the command line shows
    assert f"Question: q?\n{live}\n{ending(done)}" == text


def test_a_rollout_is_in_its_record_but_for_its_token_ids(tmp_path):
    done = rollout(Script("?", PLAN, PLAN), Cast(verifier=GO_ON))
    done.answer = "\u2028 is no new line"
    append(tmp_path / "a.jsonl", [record_of(done)])
    [line] = (tmp_path / "a.jsonl").read_bytes().splitlines()
    again = rollout_of(json.loads(line))
    assert trace(done.question, again) == trace(done.question, done)
    assert [memory.Step(**vars(step)) for step in again.memory.steps] == done.memory.steps
    assert summary([again]) == summary([done]) and again.turns == 3 and again.gold == "42"


# ---------------------------------------------------------------------------------- who plays what
def test_a_module_that_nobody_plays_cannot_be_trained():
    with pytest.raises(Mistake, match="no module is called 'planer': train some of analysis, pl"):
        rollout(Script(PLAN), trained=("planner", "planer"))


def test_a_cache_keeps_what_the_judge_has_said_for_the_next_command(tmp_path):
    words = ["q", "--tools", "base_generator", "--model", "m", "--cache", str(tmp_path / "cache")]
    args = solve.flags([*words, "--max-new-tokens", "9"])
    for answers in ["Verdict: True"], []:
        engine = Script(*answers)
        _, judge = solve.load_cast(args, {"m": engine}, *solve.load_tools(args), say=print)
        [completion] = judge(["Is it so?"])
        assert completion.text == "Verdict: True"
        settings = {"temperature": 0.0, "max_new_tokens": 9}
        assert engine.calls == [(1, settings)] * len(answers)


PAGES = '{"title": "Tin", "text": "a metal", "url": "https://metals.org/tin"}\n'


@pytest.mark.parametrize(
    "tools, flags, refused",
    [
        (["python_coder", "web_search"], {}, True),
        (["python_coder", "web_search"], {"allow_unconfined": True}, False),
        (["python_coder", "web_search"], {"corpus": "pages.jsonl"}, False),
        (["python_coder", "wikipedia_search"], {}, True),
        (["python_coder", "wikipedia_search"], {"corpus": "pages.jsonl"}, False),
        (["base_generator", "web_search"], {}, False),
    ],
)
def test_code_that_nothing_confines_does_not_run_beside_a_search_that_reads_the_web(
    tools, flags, refused, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    Path("pages.jsonl").write_text(PAGES)
    monkeypatch.setattr(solve, "protection", lambda: (False, "python_coder is NOT confined"))
    args = solve.flags(["q", "--tools", *tools, "--judge", "none", "--model", "m"])
    vars(args).update(flags)
    if refused:
        with pytest.raises(Mistake, match="NOT confined: leave python_coder out of --tools"):
            solve.load_tools(args)
    else:
        assert list(solve.load_tools(args)[0]) == tools


# -------------------------------------------------------------------------------- the command line
def model(body, turn):
    """The reply of a server that plays all modules; it answers one question in four wrong."""
    prompt = body["messages"][0]["content"]
    n = int(re.search(r"Double (\d+)", prompt)[1])
    call = f'base_generator(query="Double {n}")'
    texts = dict(analysis="a", planner=ASK, executor=call, verifier=STOP, other="so it is")
    texts["generator"] = f"<answer>{2 * n + (n % 4 == 3)}</answer>"
    return answer(texts[module_of(prompt)])


@pytest.fixture
def run(monkeypatch, capsys, tmp_path, server):
    """solve.py with these words, in this process and an empty folder: what it printed. `server`
    plays the models. SystemExit if it ends with an error."""
    server.reply = model
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder, "lock", lambda folder: None)  # this process would keep it for ever
    for name, numbers in (("data.jsonl", range(7)), ("other.jsonl", range(1, 8))):
        rows = [{"question": f"Double {n}", "answer": 2 * n} for n in numbers]
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*words):
        words = [word.replace("SERVER", server.url) for text in words for word in text.split("|")]
        given = [] if "--model" in words or "--compare" in words else ["--model", server.url]
        monkeypatch.setattr(sys, "argv", ["solve.py", *words, *given])
        capsys.readouterr()  # of a command before, if that ended with an error
        torch.seed()  # a new process has other random numbers
        try:
            solve.main(solve.flags())
        except Mistake as why:
            raise SystemExit(f"solve.py: {why}") from why
        return capsys.readouterr().out

    return run


DATA = "--data|data.jsonl|--tools|base_generator|--judge|none|--max-turns|2|--batch|3"


def test_the_trace_says_how_many_tokens_each_module_and_the_judge_wrote_and_read():
    judge = Script(Completion("Verdict: True", [1] * 9, [2] * 3))
    fixed = Cast(executor='base_generator(query="iron")', other="Fe", generator="about it")
    asked = [Question("q?", "26 things")]
    done = solve.roll_out(asked, Script(ASK), fixed, TOOLS, judge=judge)[0]
    read = {module_of(prompt): len(prompt.encode()) for prompt in fixed.prompts}
    text = trace(done.question, done)
    assert f"[analysis]  2 written, {read['analysis']} read, 0." in text
    assert f"[turn 1 planner]  {len(ASK) + 1} written, " in text
    assert "[turn 1 base_generator]  3 written, 4 read, 0." in text
    assert "[judge]  3 written, 9 read, 0." in text


def test_of_a_server_or_in_an_older_record_only_the_sum_of_the_tokens_is_known():
    outputs = {"tokens": 41, "written": 6}, {"tokens": 41, "written": 0}, {"tokens": 41}
    assert [*map(tokens_of, outputs)] == ["6 written, 35 read", "41 tokens", "41 tokens"]
    assert tokens_of({"tokens": 0, "written": 0}) == ""  # of a function


def test_a_file_of_questions_is_answered_graded_traced_and_kept(run):
    out = run(DATA, "--out|run")
    assert out.count("Question: Double") == 7 and out.count("  (right)\n") == 6
    assert "  (wrong: 6)\n" in out and "\nquestions: accuracy 0.857 [0.49, 0.97] of 7 |" in out
    assert "\njudge   none\ntools   base_generator\nleft out: python_coder, which is not in" in out
    rows = [json.loads(line) for line in Path("run/questions-0.jsonl").read_text().splitlines()]
    assert [(row["gold"], row["right"]) for row in rows[2:4]] == [("4", True), ("6", False)]
    assert "Question:" not in run(DATA, "--quiet|--limit|2")
    trials = run(DATA, "--quiet|--trials|2")  # more trials are no more questions
    assert "\nquestions: accuracy 0.857 [0.49, 0.97] of 7 |" in trials


def test_a_command_that_was_stopped_goes_on_where_it_was_and_ends_the_same(
    run, monkeypatch, server
):
    whole = run(DATA, "--out|whole", "--trials|2")
    seeds = lambda: sorted(body["seed"] for *_, body in server.asked if "seed" in body)
    straight = seeds()
    server.asked.clear()
    batches, roll_out = [], solve.roll_out

    def killed(*given, **settings):
        batches.append(given[0])
        if len(batches) == 5:  # in the middle of the second trial
            raise KeyboardInterrupt
        return roll_out(*given, **settings)

    monkeypatch.setattr(solve, "roll_out", killed)
    with pytest.raises(KeyboardInterrupt):
        run(DATA, "--out|run", "--trials|2")
    with open("run/questions-1.jsonl", "a") as file:  # half a batch and half a line
        file.write(Path("whole/questions-1.jsonl").read_text().splitlines(keepends=True)[3])
        file.write('{"id": "half a li')
    again = run(DATA, "--out|run", "--trials|2")
    strip = lambda text: re.sub(r"\d+\.\d+ s", "", text)
    assert strip(again) == strip(whole) and len(batches) == 3 + 2 + 2
    assert seeds() == straight and len(set(straight)) == 2 * 7  # each rollout samples on its own
    for trial in "01":
        name = f"questions-{trial}.jsonl"
        assert without_seconds(Path("run", name)) == without_seconds(Path("whole", name))
    run(DATA, "--out|run", "--trials|2")
    assert len(batches) == 7  # everything was kept


def test_every_version_of_the_code_has_its_own_name(tmp_path, monkeypatch):
    file, seen = tmp_path / "solve.py", set()
    monkeypatch.setattr(folder, "__file__", str(tmp_path / "record" / "folder.py"))
    file.write_text("1")
    seen.add(folder.version())  # without git
    who = "-c user.name=a -c user.email=a@b -c commit.gpgsign=false"
    for words in ("init -q", "add solve.py", f"{who} commit -qm 1"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    committed = folder.version()
    assert re.fullmatch("[0-9a-f]{40}-[0-9a-f]{12}", committed)
    (tmp_path / "untracked.py").write_text("4")
    seen |= {committed, folder.version()}
    for text in "23":
        file.write_text(text)
        assert folder.version().startswith(f"{committed[:40]}-dirty-")
        seen.add(folder.version())
    assert len(seen) == 5


@pytest.mark.parametrize(
    "words, why",
    [
        ("--data|other.jsonl", "with another data (data.jsonl): give another --out"),
        ("--seed|1", "with another seed (0): give another --out"),
        ("--batch|4", "with another batch (3): give another --out"),
        ("--fixed|SERVER#b", "with another fixed ("),
    ],
)
def test_a_folder_with_other_settings_is_refused_and_untouched(run, words, why):
    run(DATA, "--out|run", "--limit|4")
    before = [path.read_bytes() for path in sorted(Path("run").iterdir())]
    with pytest.raises(SystemExit, match=re.escape(why)):
        run(DATA, "--out|run", "--limit|4", words)
    assert [path.read_bytes() for path in sorted(Path("run").iterdir())] == before


def test_a_commit_that_changes_no_script_does_not_keep_a_folder_from_going_on(run, monkeypatch):
    for commit in ("a-0123", "b-dirty-0123"):
        monkeypatch.setattr(folder, "version", lambda commit=commit: commit)
        run(DATA, "--out|run", "--limit|1")
    monkeypatch.setattr(folder, "version", lambda: "b-dirty-4567")
    with pytest.raises(SystemExit, match="with another code .b-dirty-0123"):
        run(DATA, "--out|run", "--limit|1")


def test_what_keys_and_devices_choose_is_kept_with_the_answers(run, monkeypatch):
    words = "--data|data.jsonl|--judge|none|--limit|1|--max-turns|1|--out|run|--allow-unconfined"
    words += f"|--base-generator|{Path(solve.__file__).parent / TOY}|--device|cpu"
    run(words)
    kept = json.loads(Path("run/settings.json").read_text())
    assert kept["dtype"] == "float32" and "google_search" not in kept["tools"]
    monkeypatch.setenv("SERPER_API_KEY", "a-key")
    with pytest.raises(SystemExit, match=r"rollouts with another tools \(\['base_generator"):
        run(words)


def test_every_flag_reaches_what_it_steers(run, monkeypatch, server):
    server.models = [*"abcdefg"]
    roles = "model fixed judge executor verifier generator base-generator".split()
    models = [f"--{role}|SERVER#{name}" for role, name in zip(roles, server.models, strict=True)]
    rolled, judged = spy(monkeypatch, solve, "roll_out"), spy(monkeypatch, solve, "cached")
    words = "--data|data.jsonl|--limit|2|--tools|base_generator|--think"
    run(*models, words, "--max-turns|4|--max-new-tokens|33|--temperature|0.3")
    [((questions, policy, fixed, tools, _), how, _)] = rolled
    assert (len(questions), policy.name, policy.think) == (2, "a", True)
    assert [*tools] == ["base_generator"]
    names = dict(default="b", executor="d", verifier="e", generator="f", base_generator="g")
    assert {module: engine.name for module, engine in fixed.items()} == names
    assert (how["max_turns"], how["max_new_tokens"], how["temperature"]) == (4, 33, 0.3)
    [((judge, _, limit), _, _)] = judged
    assert (judge.name, limit) == ("c", 33)


def test_every_flag_of_a_local_model_reaches_it(run, monkeypatch):
    loaded = {}

    def load(name, distribution, **settings):
        loaded.update(settings)
        raise Mistake("enough")

    monkeypatch.setattr(local, "load", load)
    with pytest.raises(SystemExit, match="enough"):
        run(f"q?|--model|{TOY}|--device|cpu|--dtype|float64|--think|--plain")
    wanted = dict(device="cpu", dtype="float64", think=True, trainable=False, prefill=None)
    assert loaded == wanted


@pytest.mark.parametrize("left", ["", "{", None])
def test_answers_without_their_settings_are_not_taken_for_ours(run, left):
    run(DATA, "--out|run", "--limit|1")
    Path("run/settings.json").unlink()
    if left is not None:  # a disk that was full
        Path("run/settings.json").write_text(left)
    cure = "give" if left is None else "begin anew, with"
    with pytest.raises(SystemExit, match=f"settings.json.*: {cure} another --out"):
        run(DATA, "--out|run", "--limit|1")


@pytest.mark.parametrize("how", ["symlink_to", "hardlink_to"])
def test_no_answer_is_written_through_a_link(run, how, tmp_path):
    """A folder made by others could make us overwrite any file."""
    run(DATA, "--out|run", "--limit|1")
    ours, answers = tmp_path / "ours", Path("run/questions-0.jsonl")
    ours.write_text("ours")
    answers.unlink()
    getattr(answers, how)(ours)
    with pytest.raises(SystemExit, match="is a link, and a run writes only into its own folder"):
        run(DATA, "--out|run", "--limit|1")
    assert ours.read_text() == "ours"


def test_answers_to_other_questions_are_not_taken_for_ours_and_not_cut(run):
    run(DATA, "--out|run")
    kept = Path("run/questions-0.jsonl")
    lines = kept.read_bytes().splitlines(keepends=True)
    kept.write_bytes(b"".join(lines[:5]))
    questions = read_questions("data.jsonl")
    questions[2] = dataclasses.replace(questions[2], answer="5")  # a gold that was mended
    with pytest.raises(ValueError, match="holds answers to other questions: give another --out"):
        folder.kept_rollouts(kept, questions, batch=5)
    Path("other.jsonl").rename("data.jsonl")
    with pytest.raises(SystemExit, match="with another questions_digest"):
        run(DATA, "--out|run")
    assert kept.read_bytes() == b"".join(lines[:5])


def test_a_server_that_serves_another_model_is_another_planner(run, server):
    server.models = ["before"]
    run(DATA, "--out|run", "--limit|1")
    server.models = ["after"]
    with pytest.raises(SystemExit, match="with another weights .*before"):
        run(DATA, "--out|run", "--limit|1")


def test_a_checkpoint_that_was_trained_on_under_its_old_name_is_another_model(run):
    command = f"{DATA}|--batch|7|--quiet|--max-new-tokens|2|--device|cpu|--model|m"
    write(Path("m"), max_position_embeddings=4096)
    run(command, "--out|run", "--limit|1")
    write(Path("m"), max_position_embeddings=4096, initializer_range=0.2)
    with pytest.raises(SystemExit, match="with another weights"):
        run(command, "--out|run", "--limit|1")


def test_a_folder_that_another_process_uses_is_refused(run, monkeypatch):
    monkeypatch.setattr(folder, "lock", LOCK)
    run(DATA, "--out|run")  # this process has the folder from here on
    with pytest.raises(SystemExit, match="run is in use by another process"):
        run(DATA, "--out|run")


@pytest.mark.exhaustive
def test_a_server_that_is_down_ends_the_command_and_what_it_answered_is_kept(run, server):
    server.reply = lambda body, turn: model(body, turn) if turn < 30 else (500, {"error": "down"})
    with pytest.raises(
        SystemExit, match=r"^solve.py: 3 of 3 rollouts were aborted \(.*answered 500"
    ):
        run(DATA, "--out|run")
    assert len(without_seconds("run/questions-0.jsonl")) == 3
    server.reply = lambda body, turn: (400, {}) if "Double 5" in str(body) else model(body, turn)
    out = run(DATA, "--out|run")  # one question that the server refuses ends nothing
    assert "accuracy 0.714" in out and "| failed 1\n" in out and "\nFailed: analysis: " in out
    assert re.search(r"\nfailed  1 times: analysis: .* answered 400 Bad Request\n", out)


def test_one_question_is_traced_while_it_is_answered_and_greedily(run, server):
    out = run("Double 21", "--tools|base_generator")
    assert re.search(r"(?s)\[analysis\].*\[turn 1 base_generator\].*\nAnswer: 42\n\Z", out)
    assert {body["temperature"] for *_, body in server.asked} == {0} and "accuracy" not in out
    assert run("Double 21", "--quiet|--tools|base_generator").endswith("\n\nAnswer: 42\n")


@pytest.mark.exhaustive
def test_two_folders_and_two_models_are_compared(run, monkeypatch, server):
    def in_this_process(words):
        run(*words[2:])
        return type("Done", (), {"returncode": 0})

    server.models = ["a", "b"]
    double = lambda body: 2 * int(re.search(r"Double (\d+)", str(body))[1])

    def reply(body, turn):  # the plans of a lead to right answers
        if body["model"] == "a" and "planner" in str(body):
            return answer(ASK.replace("Sub-goal:", "Sub-goal: well,"))
        if "well," in str(body) and "You write the final answer" in str(body):
            return answer(f"{double(body)}")
        return model(body, turn)

    server.reply = reply
    monkeypatch.setattr(subprocess, "run", in_this_process)
    monkeypatch.setattr(folder, "version", lambda: "")
    both = f"--compare|SERVER#a|SERVER#b|{DATA}"
    with pytest.raises(SystemExit, match=r"fixed would .*#a: .*: give --fixed, or"):
        run(both)
    out = run(f"{both}|--fixed|SERVER#b")
    assert "A alone right 1, B alone right 0" in out and "gold 6 | A 6 | B 7" in out
    folders = sorted(str(path) for path in Path("runs/compare").iterdir())
    assert run("--compare", *folders, "--out|both") == out + (
        "\nall 1 questions that differ: both/differences.jsonl\n"
    )


def test_benchmarks_have_a_table_with_the_papers_numbers_and_every_item(run, server):
    rows = [{"question": f"Double {n}", "answer": 2 * n, "pid": n} for n in range(8)]
    for name in ("bamboogle", "aime24"):
        Path(f"{name}.json").write_text(json.dumps(rows))
    words = "--benchmark|bamboogle|aime24|--benchmark-dir|.|--tools|base_generator|--judge|none"
    asked = Counter()

    def second_trial_wrong(body, turn):  # of one question
        prompt = body["messages"][0]["content"]
        last = "Double 0" in prompt and module_of(prompt) == "generator"
        asked["generator"] += last
        wrong = last and asked["generator"] % 2 == 0
        return answer("<answer>1</answer>") if wrong else model(body, turn)

    server.reply = second_trial_wrong
    out = run(f"{words}|--trials|2|--out|table")
    table = Path("table/table.md").read_text()
    assert table in out and "Question:" not in out
    cells = {line.split("|")[1].strip(): line.split("|") for line in table.splitlines()[2:]}
    assert [cell.strip() for cell in cells["aime24"][2:9]] == [
        "8 of 30", "68.8", "35.6-89.8", "2 (8.8)", "6.7", "16.7", "40.0",
    ]  # fmt: skip
    assert [*cells] == ["aime24", "bamboogle"]


def test_a_benchmark_may_be_added_to_a_folder_and_none_changed(run):
    rows = [{"question": f"Double {n}", "answer": 2 * n, "pid": n} for n in range(3)]
    for name in ("bamboogle", "aime24"):
        Path(f"{name}.json").write_text(json.dumps(rows))
    words = "--benchmark-dir|.|--tools|base_generator|--judge|none|--out|table|--benchmark"
    for some in ("bamboogle", "bamboogle|aime24", "aime24"):
        run(f"{words}|{some}")
    Path("bamboogle.json").write_text(json.dumps(rows[:2]))
    run(f"{words}|aime24")
    with pytest.raises(SystemExit, match="rollouts with another bamboogle_digest"):
        run(f"{words}|aime24|bamboogle")


# ---------------------------------------------------------------------------------------- defaults
def flags(text):
    return solve.flags(text.split("|") if text else [])


def test_without_arguments_a_few_questions_of_the_toy_are_answered():
    args = flags("")
    assert (args.model, args.data) == (TOY, f"{TOY}/test.jsonl")
    assert (args.limit, args.max_turns, args.temperature) == (EXAMPLES, 3, 0.7)
    assert args.judge == "none" and args.corpus.endswith("toy/corpus.jsonl")
    args = flags("q|--model|Qwen/Qwen2.5-7B-Instruct")
    assert (args.temperature, args.max_turns, args.data) == (0, 10, None)
    assert args.tools == [name for name in ALL_TOOLS if not lacking(name)]
    assert flags("--data|x.jsonl").temperature == 0.7 and flags("--data|x.jsonl").limit is None
    assert flags("--benchmark|gaia").out == "runs/toy-benchmarks"
    args = flags("q|--model|a|--fixed|b")
    assert (args.model, args.fixed, args.judge) == ("a", "b", "b")  # no planner judges itself


def test_a_checkpoint_brings_the_modules_and_tools_that_it_was_trained_with(tmp_path):
    trained = {"fixed": "frozen", "verifier": "another", "tools": ["python_coder"], "corpus": "c"}
    trained |= {"executor": None, "think": True, "max_new_tokens": 77}
    (tmp_path / "train.json").write_text(json.dumps(trained))
    args = flags(f"q|--model|{tmp_path}|--corpus|mine.jsonl")
    assert (args.fixed, args.verifier, args.executor) == ("frozen", "another", None)
    assert (args.tools, args.corpus) == (["python_coder"], "mine.jsonl")
    assert (args.think, args.max_new_tokens) == (True, 77)
    base = flags("--data|x.jsonl|--model|frozen|--tools|python_coder|--corpus|mine.jsonl")
    with pytest.raises(Mistake, match=r"verifier would .* \(.*: another \| frozen: None\): give"):
        refuse_two_flows([args, base])


def test_a_checkpoint_plays_all_modules_that_it_was_trained_for(tmp_path):
    trained = {"fixed": "base", "trained": ["planner", "generator"], "max_new_tokens": 77}
    (tmp_path / "train.json").write_text(json.dumps(trained | {"tools": ["python_coder"]}))
    shared = "--data|x.jsonl|--tools|python_coder"
    trained, base = (flags(f"{shared}|--model|{model}") for model in (tmp_path, "base"))
    assert (trained.fixed, trained.generator, trained.verifier) == ("base", str(tmp_path), None)
    with pytest.raises(Mistake, match=r"max_new_tokens would .*: 77 \| base: None"):
        refuse_two_flows([trained, base])
    base.max_new_tokens = 77
    refuse_two_flows([trained, base])
    base.max_turns = 3
    with pytest.raises(Mistake, match=r"max_turns would .*: 10 \| base: 3"):
        refuse_two_flows([trained, base])


def test_a_checkpoint_does_not_choose_the_server_that_reads_our_questions_and_our_key(tmp_path):
    address = "https://elsewhere.example/v1"
    (tmp_path / "train.json").write_text(json.dumps({"base_generator": address}))
    with pytest.raises(Mistake, match=f"trained with --base-generator {address}: give that or"):
        flags(f"q|--model|{tmp_path}")
    assert flags(f"q|--model|{tmp_path}|--base-generator|mine").base_generator == "mine"
    (tmp_path / "train.json").write_text(json.dumps({"fixed": f"{address}\x1b[2J"}))
    with pytest.raises(Mistake, match=r"/v1\\x1b\[2J: give that or"):  # no order to a terminal
        flags(f"q|--model|{tmp_path}")


@pytest.mark.parametrize(
    "words, why",
    [
        ("What|is|6?", 'put the question in quotes: "What is 6?"'),
        ("q?|--data|data.jsonl", "not two of them"),
        ("q?|--tools|googel", "invalid choice: 'googel'"),
        ("--data|nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("--data|bad.jsonl", "bad.jsonl, line 2: not JSON"),
        ("q?|--model|no-such/model", "there is no model 'no-such/model'"),
        ("q?|--verifier|http://127.0.0.1:1/v1", "127.0.0.1:1 cannot be reached"),
        ("--compare|data.jsonl|nowhere", "data.jsonl holds no answers"),
        ("--compare|a|b|--limit|3", "leave out --limit, which does not act beside --compare"),
        ("--compare|a|b|q?", "leave out the question, which does not act"),
        ("--compare|a|b|--data|data.jsonl|--model|c", "leave out --model, which does not act"),
        ("--benchmark|gaia|--benchmark-dir|.", ". has no gaia; put its file at one of"),
    ],
)
def test_a_mistake_that_people_make_daily_is_one_sentence(run, capsys, words, why):
    Path("bad.jsonl").write_text('{"question": "2 + 2?", "answer": 4}\n2 + 2?\n')
    with pytest.raises(SystemExit) as stop:
        run(words)
    lines = f"{capsys.readouterr().err}{stop.value.code}".splitlines()
    [line] = [line for line in lines if why in line]
    assert line.startswith("solve.py: ") and stop.value.code not in (0, None)


def test_a_pipe_that_has_read_enough_ends_the_command_quietly():
    command = [sys.executable, solve.__file__, "--limit", "2"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, cwd=Path(solve.__file__).parent, **pipes) as process:
        assert process.stdout.readline().startswith("planner toy | ")
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 1)


def test_a_second_ctrl_c_does_not_wait_for_a_server_that_hangs(server):
    asked, go_on = threading.Event(), threading.Event()

    def hang(body, turn):
        asked.set()
        go_on.wait()
        return answer("too late")

    server.reply = hang
    code = "import runpy, signal, sys; del sys.argv[0]; "  # a shell's & has SIGINT ignored
    code += "signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, solve.__file__, "q?", "--model", server.url]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    how = pipes | {"cwd": Path(solve.__file__).parent}
    with subprocess.Popen([*command, "--tools", "base_generator"], **how) as process:
        try:
            assert asked.wait(60)
            process.send_signal(signal.SIGINT)
            lines = iter(process.stderr.readline, "")
            assert any("Ctrl-C stops them, too" in line for line in lines)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == -signal.SIGINT
        finally:
            go_on.set()
            process.kill()


def test_on_windows_it_says_what_to_do():
    code = "import sys; sys.modules['fcntl'] = None; import train"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stderr == "nano-agentflow needs Linux or macOS; on Windows, run it in WSL\n"
