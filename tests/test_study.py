"""The study behind RESULTS.md: its edits still fit the code, its runs are made once, its numbers are those of the CSV files."""

import csv
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "plots"))

import figures
import monolith
import sft
import study

import solve
from flow_grpo import Action, token_logps, token_weights, update
from models.completion import Completion
from models.loading import load_engine
from rewards.grade import grade
from scale import command_line
from toy import make as toy


def all_runs():
    """Every run of the study, those that others need included."""
    found = {}
    for analysis in study.ANALYSES.values():
        for run in next(analysis(5)):
            found |= {one.folder: one for one in (run, *run.after, *(first for before in run.after for first in before.after))}
    return list(found.values())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "RUNS", tmp_path)
    return tmp_path


def test_every_edit_of_the_study_finds_its_line_and_leaves_python(folder):
    for edits in {run.edits for run in all_runs()}:
        code = study.edited(edits)
        for name, _, new in edits:
            assert new in (code / name).read_text() or any(old in new for _, old, _ in edits)
            compile((code / name).read_text(), name, "exec")
        assert (code / "toy" / "config.json").exists()


def test_an_edit_whose_line_is_gone_is_told(folder):
    with pytest.raises(SystemExit, match="stands 0 times in flow.py"):
        study.edited((("flow.py", "a line that is not there", ""),))


def test_five_seeds_for_the_papers_analyses_and_three_for_the_rest_each_run_once():
    names = [run.name for run in all_runs()]
    assert len(set(names)) == len(names)
    for name, seeds in [("flow-grpo", 5), ("sft-own", 5), ("sft-perfect", 5), ("monolith", 5), ("width-64", 3), *((name, 3) for name in study.VARIANTS)]:
        assert sorted(n for n in names if re.fullmatch(rf"{re.escape(name)}-seed\d", n)) == [f"{name}-seed{seed}" for seed in range(seeds)]


def test_a_run_is_made_once_after_those_it_needs_and_begun_anew_if_it_was_cut_off(folder):
    first = study.Run("first", ("-c", "import os; os.mkdir(r'{out}'); open(r'{out}/x', 'w').write('1')"))
    second = study.Run("second", ("-c", "import os; os.mkdir(r'{out}'); open(r'{out}/y', 'w').write(open(r'{0}/x').read() + '2')"), after=(first,))
    second.folder.mkdir()
    (second.folder / "half").touch()
    study.make_all([second], workers=1)
    assert (second.folder / "y").read_text() == "12" and not (second.folder / "half").exists()
    (second.folder / "y").write_text("kept")
    study.make_all([second], workers=1)
    assert (second.folder / "y").read_text() == "kept"


def test_a_run_that_fails_ends_the_study_with_its_last_words(folder):
    with pytest.raises(SystemExit, match="(?s)broken failed.*ZeroDivisionError"):
        study.make_all([study.Run("broken", ("-c", "1 / 0")), study.Run("other", ("-c", "import os; os.mkdir(r'{out}')"))], workers=2)


def test_another_command_edit_or_forerunner_is_another_folder():
    run = lambda *words, edits=(), after=(): study.Run("run", words, edits, after).folder
    folders = [run("a"), run("b"), run("a", edits=(("x", "y", "z"),)), run("a", after=(study.Run("c", ("c",)),)), run("a", after=(study.Run("c", ("d",)),))]
    assert len(set(folders)) == 5 and run("a") == folders[0]


# --------------------------------------------------------------------------------------------------- SFT and the monolith
def test_the_gradient_at_advantage_one_is_that_of_the_log_likelihood():
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2))
    actions = [Action([1, 2, 3], [4, 5], 0), Action([1, 2, 3, 4, 5], [6], 0), Action([7], [8, 9, 10], 1)]
    weight = token_weights(actions, {0: 2, 1: 1}, 2)
    (-(token_logps(model, actions, 1.0) * weight).sum()).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    seen = []

    class Looks:
        def step(self):
            seen.extend(p.grad.clone() for p in model.parameters())

    update(model, None, Looks(), actions, torch.ones(2), temperature=1.0, beta=0, max_grad_norm=1e6)
    for mine, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.fixture(scope="module")
def teachers():
    """The perfect teacher's flows of 12 questions, and what a monolith would have said in them."""
    tools, made = solve.toolset.toolbox(command_line.TOY_TOOLS, command_line.TOY / "corpus.jsonl"), toy.questions(12, False, seed=5)
    teacher = toy.Teacher(made)
    flows = solve.evaluate(toy.ask(made), teacher, teacher, tools)[1]
    return tools, flows, dict(monolith.examples(flows, tools))


def test_a_monolith_that_says_what_the_teacher_said_is_right_and_every_word_is_its_action(teachers):
    tools, flows, words = teachers
    policy = lambda prompts, **settings: [Completion(words[prompt], [1], [2]) for prompt in prompts]
    again = monolith.rollout([flow.question for flow in flows], policy, {"base_generator": policy}, tools)
    grade(again)
    assert [flow.reward for flow in again] == [1.0] * 12
    assert [len(flow.actions) for flow in again] == [len(flow.memory.steps) + 1 for flow in flows]
    assert [step.result for flow in again for step in flow.memory.steps] == [step.result for flow in flows for step in flow.memory.steps]


def test_a_monolith_that_never_answers_ends_after_its_turns_and_is_told_why_nobody_can_read_it(teachers):
    tools, flows, _ = teachers
    read = []

    def policy(prompts, **settings):
        read.extend(prompts)
        return [Completion("Let me think.", [1], [2]) for _ in prompts]

    (flow,) = monolith.rollout([flows[0].question], policy, {"base_generator": policy}, tools, max_turns=2)
    assert len(flow.actions) == 3 and flow.answer == "Let me think." and [step.error for step in flow.memory.steps] == [True, True]
    assert "Result: Error: no line 'Command: ...'" in read[1]


def test_the_perfect_planners_ids_are_those_of_its_words():
    made, engine = toy.questions(4, False, seed=5), load_engine(str(command_line.TOY))
    flow = solve.evaluate(toy.ask(made)[:1], sft.Perfect(made, engine), engine, solve.toolset.toolbox(command_line.TOY_TOOLS, command_line.TOY / "corpus.jsonl"))[1][0]
    said = next(word["text"] for word in flow.outputs if word["module"] == "planner")
    assert engine.decode(flow.actions[0].ids) == said and flow.actions[0].ids[-1] == engine.tokenizer.eos_token_id


# ------------------------------------------------------------------------------------------------------------- the numbers
def test_an_interval_is_students_t():
    middle, half = figures.mean([1.0, 2.0, 3.0])
    assert middle == 2 and half == pytest.approx(4.30 / 3**0.5, rel=0.01)


@pytest.mark.parametrize("name, key", [("ways", "planner"), ("budget", "max_turns")])
def test_the_tables_say_what_the_csv_files_say(name, key):
    rows = list(csv.DictReader(open(ROOT / "results" / f"{name}.csv", newline="")))
    table = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", (ROOT / "RESULTS.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    for value in dict.fromkeys(row[key] for row in rows):
        seeds = [float(row["accuracy"]) for row in rows if row[key] == value]
        assert len(seeds) == 5
        assert re.search(rf"\| {re.escape(value)} +\| {statistics.fmean(seeds):.3f} ±", table)


@pytest.mark.parametrize("name, columns", [("training", ("base_generator", "tokens")), ("monolith", ("tokens",)), ("kinds", ("flows", "right")), ("unreadable", ("unreadable",))])
def test_what_the_text_tells_beyond_the_tables_can_be_recomputed_too(name, columns):
    rows = list(csv.DictReader(open(ROOT / "results" / f"{name}.csv", newline="")))
    assert rows and all(float(row[column]) >= 0 for row in rows for column in columns)


def test_every_change_is_shown_beside_its_result():
    text = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    for flags, edits in [((), study.HARD[1:]), *study.VARIANTS.values()]:
        assert " ".join(flags) in text
        for _, old, new in edits:
            assert old.strip() in text and new.strip() in text
