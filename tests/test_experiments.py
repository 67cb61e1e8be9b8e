"""The scripts of experiments/ that RESULTS.md is made with: statistics, tables and commands."""

import csv
import shlex
import subprocess
from types import SimpleNamespace

import pytest
import torch
from test_forks import FORKS
from test_local import tiny

import executor
import generator
import planner
import solve
import train
import verifier
from benchmarks.questions import Question
from experiments import baselines, prompt_edits, study
from memory import Memory, Step
from models.completion import Completion
from record.compare import permutation
from record.flags import remembered
from tools import TOOLS, choose
from world.mistakes import Mistake
from world.search import nothing


# -------------------------------------------------------------------------------------- statistics
def test_an_interval_is_students_over_seeds():
    assert study.interval([0.5]) == "0.500"
    assert study.interval([0.4, 0.6]) == "0.500 ± 1.271"  # 12.71 * 0.1414 / sqrt(2)
    assert study.interval([0.4, 0.5, 0.6]) == "0.500 ± 0.248"


def test_a_permutation_test_counts_the_deals_that_differ_as_much():
    assert permutation([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert permutation([0.9, 0.8], [0.8, 0.9]) == 1
    assert permutation([1], [2, 3]) == pytest.approx(2 / 3)
    thirds = [round(count / 300, 4) for count in (1, 2, 4, 5)]  # 1 + 5 and 2 + 4 are a tie
    assert permutation(thirds[::3], thirds[1:3], 3e-4) == 1


def test_holm_multiplies_the_smallest_p_by_all_and_keeps_the_order():
    assert study.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert study.holm([0.9, 0.8]) == [1, 1]


def test_a_table_has_a_row_for_each_planner_and_the_seeds_of_each(tmp_path):
    lines = [
        dict(row=row, seed=seed, n="300", accuracy=accuracy, turns="2", errors="0.1")
        for row, accuracies in {"a": (0.1, 0.2), "b": (0.9, 0.8), "perfect": (1.0,)}.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    head, _, a, b, perfect = study.table(lines, "a").splitlines()
    assert "minus a" in head and a.split("|")[3].split() == ["0.10", "0.20"]
    # seed by seed 0.8 and 0.6
    assert [cell.strip() for cell in b.split("|")[-3:-1]] == ["0.700 ± 1.271", "0.33"]
    assert "p, Holm" not in study.table(lines, "a", same=True)
    assert perfect.split("|")[2].strip() == "1.000" and not perfect.split("|")[-2].strip()


def test_what_memory_shows_last_is_read_from_the_results():
    def step(result):
        goal = "Find the calling code of Norway"
        return SimpleNamespace(**vars(Step(1, "wikipedia_search", goal, "w()", result)))

    assert study.last_shown([]) == "nothing yet"
    assert study.last_shown([step("47")]) == "number"
    assert study.last_shown([step("Error: no server")]) == "another error"


# ---------------------------------------------------------------------------------------- commands
@pytest.fixture
def studied(tmp_path, monkeypatch):
    """A repository with a toy, a fork of one file, and nothing run yet."""
    for name, value in (("ROOT", tmp_path), ("STUDY", tmp_path / "runs/study")):
        monkeypatch.setattr(study, name, value)
    monkeypatch.setattr(study, "code_version", lambda: "commit-0123456789ab")
    for name, text in (("toy/model.safetensors", "w"), ("toy/test.jsonl", "q"), ("code", "old\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "experiments/forks").mkdir(parents=True)
    for command in ("git init -q", "git add code"):
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    study.version.cache_clear()
    yield tmp_path
    study.version.cache_clear()


DIFF = "--- a/code\n+++ b/code\n@@ -1 +1 @@\n-{}\n+new\n"


@pytest.mark.parametrize("head", ["", "diff --git a/code b/code\n"])
def test_a_fork_that_did_not_apply_is_not_taken_for_one_later(head, studied):
    diff = studied / "experiments/forks/mine.diff"
    diff.write_text(head + DIFF.format("stale"))
    with pytest.raises(subprocess.CalledProcessError):
        study.checkout("mine")
    diff.write_text(head + DIFF.format("old"))
    for _ in range(2):
        assert (study.checkout("mine") / "code").read_text() == "new\n"


@pytest.mark.parametrize(
    "file", ["toy/model.safetensors", "toy/test.jsonl", "experiments/forks/a.diff"]
)
def test_a_run_with_another_toy_or_fork_is_said_to_be_another(file, studied):
    (studied / "experiments/forks/a.diff").write_text("")
    before = study.version(), study.version("a")
    study.version.cache_clear()
    (studied / file).write_text("another")
    after = study.version(), study.version("a")
    assert after[1] != before[1] and (after[0] == before[0]) == ("forks" in file)


def test_code_that_is_edited_during_a_run_ends_the_study_and_the_run_is_made_again(studied):
    (studied / "runs/study").mkdir(parents=True)
    (studied / "edit.py").write_text("open('toy/test.jsonl', 'a').write('x')")
    with pytest.raises(SystemExit, match="the code was edited during mine: repeat the command"):
        study.run("mine", "edit.py")
    study.version.cache_clear()  # a new command
    (studied / "edit.py").write_text("")
    study.run("mine", "edit.py")
    assert (studied / "runs/study/mine.done").read_text() == study.now()


def test_a_study_of_fewer_seeds_does_not_replace_more():
    assert study.lost_seeds(study.all_rows(5)) is None
    assert study.lost_seeds(study.all_rows(7)) is None
    assert study.lost_seeds(study.all_rows(2))


def test_planners_of_another_machine_do_not_stay_beside_new_ones():
    planners = {row["planner"] for row in study.read("pretrained") if row["model"] == "smollm2"}
    study.refuse_mixed("pretrained", "smollm2", planners | {"seed 7"})
    study.refuse_mixed("pretrained", "mine", ["warm-started"])
    with pytest.raises(Mistake, match="has seed 1 of smollm2, too: give as many --seeds, or"):
        study.refuse_mixed("pretrained", "smollm2", planners - {"seed 1", "seed 2"})


def test_a_plan_behind_an_unreadable_one_saw_an_error():
    page = dict(turn=1, tool="wikipedia_search", sub_goal="Find the code of Oslo", command="c()")
    page |= dict(result="[1] Oslo: The calling code of Oslo is at https://facts.org/101")
    steps = [Step(**page), Step(2, "", "", "", "Error: no line 'Tool: ...'", error=True)]
    assert study.last_shown(steps[:1]) == "address"
    assert study.last_shown(steps) == "another error" and study.last_shown([]) == "nothing yet"


def test_the_plans_of_a_row_are_counted_by_what_memory_showed_before_them(monkeypatch):
    page = dict(turn=1, tool="wikipedia_search", sub_goal="Find the code of Oslo", command="c()")
    page |= dict(result="[1] Oslo: The calling code of Oslo is at https://facts.org/101")
    steps = [Step(**page), Step(2, "", "", "", "Error: no line 'Tool: ...'", error=True)]
    trials = [[SimpleNamespace(memory=SimpleNamespace(steps=steps))] * 2]
    monkeypatch.setattr(study, "answers", {"folder": trials}.get)
    rows = study.tools_of(SimpleNamespace(name="row", seed=0, tested=lambda: "folder"))
    assert [(row["last"], row["tool"], row["plans"]) for row in rows] == [
        ("address", "unreadable", 2),
        ("nothing yet", "wikipedia_search", 2),
    ]


def test_a_new_solution_is_counted_for_its_own_question(monkeypatch):
    tried = lambda name, *right: [SimpleNamespace(question=name, right=r) for r in right]
    answers = {"tries": [tried("a", 0, 0), tried("b", 1, 0)]}
    answers |= {"0": [tried("a", 1), tried("b", 0)], "1": [tried("a", 1), tried("b", 1)]}
    monkeypatch.setattr(study, "answers", answers.get)
    trained = [SimpleNamespace(tested=lambda seed=seed: seed) for seed in "01"]
    found = [[*row.values()] for row in study.new_solutions(trained)]
    assert found == [["a", 2, 0, 2, 2], ["b", 2, 1, 2, 1]]


def test_the_test_before_a_run_has_a_row_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "STUDY", tmp_path)
    lines = ["step,questions,n,accuracy,turns,errors"]
    lines += [f"{step},{name},9,0.{step}1,2,0" for step in (0, 5) for name in ("valid", "test")]
    (tmp_path / "evals.csv").write_text("\n".join(lines))
    row = SimpleNamespace(table="sizes", name="small", seed=0, train="", planner=None, folder="")
    found = [(line["row"], line["accuracy"]) for line in study.results_of(row)]
    assert found == [("small before", "0.0100"), ("small", "0.5100")]


def test_every_command_of_the_study_has_flags_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(study.ROOT)
    rows = list(study.all_rows(2))
    assert {row.table for row in rows} == {*study.VERSUS, "rates"}
    assert {row.fork for row in rows} - {""} <= {*FORKS}
    for row in rows:
        words = shlex.split(row.train.format(out=tmp_path / "new"))
        while words[:1] in (["experiments/baselines.py"], ["monolith"], ["last-turn"]):
            words = words[1:]
        if words and words[0] not in ("sft", "perfect"):
            args = train.settings(train.given([word for word in words if word != "train.py"]))
            assert args.steps == train.TOY["steps"]
            assert args.lr == train.TOY["lr"] or row.table == "rates"
            assert args.max_turns == train.TOY["max_turns"] and args.questions == 16
        if row.planner is not None:
            script, *words = shlex.split(row.test().format(out=tmp_path / "new"))
            assert script == "solve.py" and solve.flags(words).seed == row.seed
    folders = [(row.tested(), row.test(), row.planner) for row in rows]
    assert len({folder for folder, *_ in folders}) == len({*folders})  # none is shared by two tests


def test_tables_are_made_of_the_committed_rows_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    monkeypatch.setattr(study, "draw", lambda: None)
    (tmp_path / "experiments").mkdir()
    page = tmp_path / "experiments" / "RESULTS.md"
    page.write_text("before\n<!-- long -->\nold\n<!-- /long -->\nafter\n")
    names = "table row seed n accuracy turns errors train test".split()
    with open(tmp_path / "study.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerows([names, ["long", "frozen", 0, 200, 0.25, 3, 0.5, "", ""]])
    study.write_tables()
    text = page.read_text()
    assert text.startswith("before\n<!-- long -->\n| planner ") and "0.250" in text
    assert "old" not in text and text.endswith("<!-- /long -->\nafter\n")


def test_every_edited_text_is_in_a_prompt_of_today():
    prompts = [planner.PROMPT, planner.ANALYSIS_PROMPT, executor.PROMPT, verifier.PROMPT]
    prompts += [generator.PROMPT, planner.describe_all(TOOLS), nothing("iron", "passage")]
    prompts += [f"\n{Step(1, 'tool', 'goal', 'call()', 'result').render()}"]
    for name, (old, new) in prompt_edits.EDITS.items():
        assert any(old in prompt for prompt in prompts), name
        assert not old or not any(new in prompt for prompt in prompts), name


# ------------------------------------------------------------------------------------- supervised
def test_fine_tuning_makes_what_it_imitates_likelier():
    model, ids = tiny(), torch.tensor([[1, 2, 3, 4, 5]])
    score = lambda: model(ids).logits[0, 2:4].log_softmax(-1).gather(1, ids[0, 3:, None]).sum()
    before, rollout = score().item(), SimpleNamespace(sampled=[Completion("", [1, 2, 3], [4, 5])])
    baselines.imitate(model, [rollout], steps=1, lr=1e-3, seed=0)
    assert score().item() > before


def test_right_rollouts_alone_are_imitated(monkeypatch):
    rollouts = [solve.Rollout(Question("q?", "a"), Memory("q?")) for _ in range(3)]
    rollouts[1].right = True
    monkeypatch.setattr(solve, "roll_out", lambda *given, **settings: rollouts)
    questions = [Question("q?", "a")] * 16
    assert baselines.collect(None, None, TOOLS, questions, steps=2, seed=0) == [rollouts[1]] * 2


# ---------------------------------------------------------------------------------------- monolith
def test_a_monolith_reads_all_that_it_has_written_and_every_text_is_trained():
    texts = ['think\nCommand: python_coder(code="print(6 * 7)")', "no call", "<answer>42</answer>"]
    prompts, left = [], iter(texts)

    def policy(asked, **how):
        prompts.extend(asked)
        return [Completion(next(left), [1], [2]) for _ in asked]

    tools = choose(["python_coder"])
    [done] = baselines.roll_out([Question("q?", "42")], policy, policy, tools, max_turns=3)
    assert done.right and [step.error for step in done.memory.steps] == [False, True]
    assert len(done.sampled) == 3 and prompts[1] == prompts[0] + texts[0] + "\nResult: 42\n\n"
    assert "\nResult: Error: no line 'Command: ...'" in prompts[2]


def test_a_monolith_begins_with_a_warm_start_that_solve_can_load(monkeypatch, tmp_path):
    monkeypatch.setattr(baselines.make, "WORLDS", 1)
    monkeypatch.setattr(solve, "roll_out", solve.roll_out)  # warm() exchanges it
    args = SimpleNamespace(seed=0, rollouts=16, steps=1, out=tmp_path / "monolith")
    baselines.warm(args)
    assert remembered(solve.flags(["--model", str(args.out)]))["tools"]
    assert baselines.local.load(str(args.out), baselines.distribution, "cpu").model


def test_only_the_last_plan_of_a_rollout_gets_its_A_and_the_others_count_in_T():
    text = SimpleNamespace(prompt_ids=[1], ids=[2])
    rollouts = [SimpleNamespace(sampled=[text] * turns) for turns in (3, 1)]
    actions = baselines.last_actions(rollouts, train.advantages([1, 0], [0, 0])[0])
    assert [(a.rollout, round(a.A, 3)) for a in actions] == [
        (0, 0),
        (0, 0),
        (0, 0.707),
        (1, -0.707),
    ]
