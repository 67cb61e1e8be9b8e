"""The study behind RESULTS.md: its edits fit the code, its runs are made once, its numbers are the CSV's."""

import csv
import re
import statistics
from collections import Counter

import pytest
import torch
from test_flow_grpo import gradient, learn, rollouts, tiny

import solve
from experiments import edits, figures, monolith, runs, sft, study
from flow_grpo import token_logps, token_weights
from models.completion import Completion
from models.loading import load_engine
from rewards.grade import grade
from scale.command_line import TOY, TOY_TOOLS
from tools import toolbox
from toy.questions import for_flow, questions
from toy.teacher import Teacher

RESULTS = (runs.ROOT / "experiments" / "RESULTS.md").read_text(encoding="utf-8")


def all_runs():
    """Every run of the study, with those that it needs."""
    found, waiting = {}, [run for analysis in study.ANALYSES.values() for run in next(analysis(5))]
    while waiting:
        run = waiting.pop()
        found[run.folder] = run
        waiting += run.after
    return list(found.values())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    return tmp_path


# ---- edits and runs ----------------------------------------------------------------------------------------

def test_every_edit_finds_its_line_and_leaves_python(folder):
    for changes in {run.edits for run in all_runs()}:
        code = runs.edited(folder, changes)
        for name, _, new in changes:
            assert new in (code / name).read_text() or any(old in new for _, old, _ in changes)
            compile((code / name).read_text(), name, "exec")
        assert (code / "toy" / "config.json").exists() and not (code / "tests").exists()


def test_an_edit_whose_line_is_gone_ends_the_study(folder):
    with pytest.raises(SystemExit, match="solve.py has the line to change 0 times"):
        runs.edited(folder, (("solve.py", "a line that is not in it", ""),))


def test_five_seeds_for_the_papers_analyses_and_three_for_the_rest_each_run_once():
    names = Counter(run.name for run in all_runs())
    seeds = dict.fromkeys(("flow-grpo", "sft-own", "sft-perfect", "monolith"), 5)
    seeds |= dict.fromkeys(("width-64", *edits.VARIANTS), 3)
    for name, number in seeds.items():
        assert [names[f"{name}-seed{seed}"] for seed in range(6)] == [1] * number + [0] * (6 - number)
    assert set(names.values()) == {1}


def test_a_run_is_made_once_after_those_it_needs_and_begun_anew_if_it_was_killed(folder):
    first = runs.Run("first", ("-c", "import os; os.mkdir(r'{out}'); open(r'{out}/x', 'w').write('1')"))
    copy = "import os; os.mkdir(r'{out}'); open(r'{out}/y', 'w').write(open(r'{0}/x').read() + '2')"
    second = runs.Run("second", ("-c", copy), after=(first,))
    second.folder.mkdir()
    (second.folder / "half").touch()
    runs.make_all([second], workers=1)
    assert (second.folder / "y").read_text() == "12" and not (second.folder / "half").exists()
    (second.folder / "y").write_text("not made again")
    runs.make_all([second], workers=1)
    assert (second.folder / "y").read_text() == "not made again"


def test_a_run_that_fails_ends_the_study_with_its_last_lines(folder):
    broken = runs.Run("broken", ("-c", "1 / 0"))
    other = runs.Run("other", ("-c", "import os; os.mkdir(r'{out}')"))
    with pytest.raises(SystemExit, match="(?s)broken failed.*ZeroDivisionError"):
        runs.make_all([broken, other], workers=2)


def test_another_command_edit_or_forerunner_is_another_folder():
    first = runs.Run("run", ("a",))
    others = [runs.Run("run", ("b",)), runs.Run("run", ("a",), edits=(("x", "y", "z"),))]
    others += [runs.Run("run", ("a",), after=(runs.Run("before", (word,)),)) for word in ("c", "d")]
    assert len({run.folder for run in (first, *others)}) == 5
    assert runs.Run("run", ("a",)).folder == first.folder


# ---- SFT and the monolith ----------------------------------------------------------------------------------

def test_the_gradient_at_advantage_one_is_that_of_the_log_likelihood():
    model, (actions, *_) = tiny(), rollouts()
    weight = token_weights(actions, Counter(a.flow for a in actions), 7)
    (-(token_logps(model, actions, 1.0) * weight).sum()).backward()
    _, taught = learn(tiny(), actions, [1.0] * 7, temperature=1.0, beta=0)
    torch.testing.assert_close(taught.gradients, [gradient(model)])


@pytest.fixture(scope="module")
def taught():
    """(tools, the perfect teacher's rollouts of 12 questions, what a monolith would have written in them)."""
    tools, made = toolbox(TOY_TOOLS, TOY / "corpus.jsonl"), questions(12, False, seed=5)
    teacher = Teacher(made)
    rollouts = solve.evaluate(for_flow(made), teacher, teacher, tools)[1]
    return tools, rollouts, dict(monolith.examples(rollouts, tools))


def test_a_monolith_that_writes_what_the_teacher_wrote_is_right_and_every_text_is_its_action(taught):
    tools, rollouts, texts = taught
    policy = lambda prompts, **settings: [Completion(texts[prompt], [1], [2]) for prompt in prompts]
    again = monolith.rollout([one.question for one in rollouts], policy, {"base_generator": policy}, tools)
    grade(again)
    assert [one.reward for one in again] == [1.0] * 12
    assert [len(one.actions) for one in again] == [len(one.memory.steps) + 1 for one in rollouts]
    results = [[step.result for one in batch for step in one.memory.steps] for batch in (again, rollouts)]
    assert results[0] == results[1]


def test_a_monolith_that_never_answers_ends_after_its_turns_and_reads_its_parse_error(taught):
    tools, rollouts, _ = taught
    prompts = []

    def policy(batch, **settings):
        prompts.extend(batch)
        return [Completion("Let me think.", [1], [2]) for _ in batch]

    (one,) = monolith.rollout([rollouts[0].question], policy, {"base_generator": policy}, tools, max_turns=2)
    assert len(one.actions) == 3 and one.answer == "Let me think."
    assert [step.error for step in one.memory.steps] == [True, True]
    assert "Result: Error: no line 'Command: ...'" in prompts[1]


def test_the_perfect_planners_ids_are_those_of_its_text(taught):
    made, engine = questions(4, False, seed=5), load_engine(str(TOY))
    (one,) = solve.evaluate(for_flow(made)[:1], sft.Perfect(made, engine), engine, taught[0])[1]
    text = next(word["text"] for word in one.outputs if word["module"] == "planner")
    assert engine.decode(one.actions[0].ids) == text
    assert one.actions[0].ids[-1] == engine.tokenizer.eos_token_id


# ---- the numbers -------------------------------------------------------------------------------------------

def table(name):
    with open(study.RESULTS / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_an_interval_is_students_t():
    middle, half = figures.mean([1.0, 2.0, 3.0])
    assert middle == 2 and half == pytest.approx(4.30 / 3**0.5, rel=0.01)


@pytest.mark.parametrize("name, key", [("ways", "planner"), ("budget", "max_turns")])
def test_the_tables_show_what_is_in_the_csv_files(name, key):
    rows = table(name)
    shown = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", RESULTS, re.DOTALL)[1]
    for value in dict.fromkeys(row[key] for row in rows):
        seeds = [float(row["accuracy"]) for row in rows if row[key] == value]
        assert len(seeds) == 5
        assert re.search(rf"\| {re.escape(value)} +\| {statistics.fmean(seeds):.3f} ±", shown)


def test_every_change_is_shown_beside_its_result():
    shown = re.sub("(?m)^[-+]", "", RESULTS)
    for flags, changes in [((), edits.HARD[1:]), *edits.VARIANTS.values()]:
        assert " ".join(flags) in shown
        for _, old, new in changes:
            assert old.strip() in shown and new.strip() in shown
