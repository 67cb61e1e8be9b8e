"""experiments/pretrained.py and curriculum.py, with a tiny random model, not a pretrained one."""

import csv
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import planner
import solve
from benchmarks.questions import Question, read_questions
from experiments import curriculum, pretrained, study
from flow_grpo import distribution
from memory import Memory
from models import local
from record.flags import TOY
from record.rollouts import record_of, rollout_of
from scale.masters import Masters
from tools import choose
from toy import teacher
from world.mistakes import Mistake


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of the toy's kind, with random weights."""
    folder, toy = tmp_path_factory.mktemp("tiny"), local.load(TOY, distribution)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(
        TOY, hidden_size=32, num_hidden_layers=1, layer_types=["full_attention"]
    )
    local.save(AutoModelForCausalLM.from_config(config), toy.tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def plans():
    return pretrained.blind_plans(40, seed=0)


def test_the_warm_start_shows_each_plan_with_each_tool_and_half_of_them_with_a_context(plans):
    tools = choose(list(teacher.TOOLS), f"{TOY}/corpus.jsonl")
    some = pretrained.shown(plans, random.Random(0))
    assert len(some) == pretrained.PLANS
    for prompt, texts in some:
        parsed = [planner.parse(text, tools) for text in texts]
        assert {plan.tool for plan in parsed} == {*teacher.TOOLS}
        assert len({(plan.context, plan.sub_goal) for plan in parsed}) == 1
        assert prompt.endswith("Next step:\n")
    assert sum("\nContext: none\n" in texts[0] for _, texts in some) == pretrained.PLANS // 2


def test_imitating_makes_the_shown_plans_likelier(folder, plans):
    engine = local.load(str(folder), distribution)
    adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0, fused=True)
    optimizer = Masters(dict(engine.model.named_parameters()), adamw)
    some = pretrained.shown(plans, random.Random(0))[:2]
    losses = [pretrained.imitate(engine, some, optimizer) for _ in range(8)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]


def test_questions_need_two_calls_of_two_kinds_and_the_test_is_about_other_things(tmp_path):
    pretrained.write_questions(tmp_path)
    names = "train", "valid", "test"
    asked = {name: read_questions(tmp_path / f"{name}.jsonl") for name in names}
    for questions in asked.values():
        counts = Counter(question.kind for question in questions)
        assert {*counts} == {"wb", "wp"} and min(counts.values()) > 0.45 * len(questions)
    texts = [{question.question for question in asked[name]} for name in names]
    assert len(texts[1]) == pretrained.VALID and not texts[0] & texts[1]
    train, valid, test = (
        {re.search(r" of (\w+)", question)[1] for question in some} for some in texts
    )
    assert train and test and not (train | valid) & test


def test_every_step_has_as_many_questions_of_each_kind():
    questions = [Question(str(n), "", kind="wb" if n < 30 else "wp") for n in range(40)]
    for step in (1, 2, 7):
        some = pretrained.questions_of(step, questions, 4, seed=0)
        assert [question.kind for question in some] == ["wb", "wb", "wp", "wp"]
        assert some == pretrained.questions_of(step, questions, 4, seed=0)


def test_a_step_that_cannot_have_as_many_of_each_kind_is_refused():
    questions = [Question(str(n), "", kind=f"kind {n % 3}") for n in range(40)]
    with pytest.raises(Mistake, match="--questions 8: give a multiple of 3"):
        pretrained.questions_of(1, questions, 8, seed=0)


def test_two_models_of_one_name_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "RUNS", tmp_path / "runs")
    for name in ("a/best", "b/best"):
        (tmp_path / name).mkdir(parents=True)
    for model in (str(tmp_path / "a/best"), "smollm2", "a-team/model"):
        assert pretrained.folder_of(model) == pretrained.folder_of(model)
    for model in (str(tmp_path / "b/best"), "b-team/model"):
        with pytest.raises(Mistake, match="is of .*a/best: give|is of a-team/model: give"):
            pretrained.folder_of(model)


def test_training_goes_on_until_its_last_validation_is_done(tmp_path, monkeypatch):
    commands, out = [], tmp_path / "seed0"
    (out / "step-2").mkdir(parents=True)  # saved, and then killed
    monkeypatch.setattr(pretrained, "run", lambda *words: commands.append(words))
    for _ in range(2):
        pretrained.go_on(["train.py"], ["--seed", 0], 2, out)
    assert commands == [("train.py", "--resume", out, "--steps", 2)]


def test_rows_of_other_planners_stay_in_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    row = lambda model, seed, right: {"model": model, "seed": str(seed), "right": str(right)}
    study.put("table", ["model", "seed"], [row("a", 0, 1), row("a", 1, 2), row("b", 0, 3)])
    study.put("table", ["model", "seed"], [row("a", 0, 4), row("c", 0, 5)])
    kept = [row("a", 1, 2), row("b", 0, 3)]
    assert study.read("table") == [row("a", 0, 4), row("c", 0, 5), *kept]


def test_a_table_has_the_rewards_of_the_first_and_of_the_last_steps():
    rollout = rollout_of(record_of(solve.Rollout(Question("q?", "a"), Memory("q?"))))
    row = pretrained.table_row("seed 0", [rollout], [0.0] * 3 + [0.5] + [1.0] * 5)
    assert (row["first_steps"], row["last_steps"]) == ("0.000", "1.000")


def test_a_second_warm_start_does_not_replace_what_runs_began_with(tmp_path):
    (tmp_path / "warm").mkdir()
    with pytest.raises(Mistake, match="runs may begin with it"):
        pretrained.warm(SimpleNamespace(folder=tmp_path, model="smollm2"))


def forked(*words):
    """In the place of pretrained.run(): as a copy of this process, which has imported torch."""
    sys.stdout.flush()
    if not (child := os.fork()):
        sys.argv, failed = list(map(str, words)), True
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            failed = False
        finally:
            if failed:
                traceback.print_exc()
            os._exit(failed)
    assert os.waitpid(child, 0)[1] == 0


FORKING = f"""
import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]
from pathlib import Path; import test_pretrained as tests; tests.pretrained.run = tests.forked
"""


@pytest.mark.extras("peft")
def test_a_whole_run_ends_in_a_table_and_is_not_repeated(folder, tmp_path):
    code = FORKING + "from experiments import pretrained, study; "
    code += f"pretrained.RUNS = study.RESULTS = Path({str(tmp_path)!r}); "
    code += "pretrained.SIZES |= {'train': 48, 'test': 24}; "
    code += "pretrained.VALID = pretrained.CHECKED = 8; pretrained.main()"
    words = ["all", "--warm-steps", "1", "--steps", "1", "--device", "cpu", "--model", folder]
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, *words], cwd=pretrained.ROOT, check=True)
    rows = list(csv.DictReader(open(tmp_path / "pretrained.csv", newline="")))
    assert [row["planner"] for row in rows] == ["warm-started", "seed 0", "perfect plans"]
    assert all(row["n"] == "24" and row["model"] == folder.name for row in rows)
    [step] = csv.DictReader(open(tmp_path / "pretrained-log.csv", newline=""))
    assert step["run"] == f"{folder.name}, seed 0" and step["step"] == "1"
    words[2] = "2"
    command = [sys.executable, "-c", code, *words]
    other = subprocess.run(command, cwd=pretrained.ROOT, capture_output=True, text=True)
    assert "begins with a warm start of 1 steps: delete it, or give --warm-steps 1" in other.stderr


def test_a_stage_that_begins_again_looks_at_the_steps_that_count(tmp_path):
    rewards = [0.1] * 20 + [0.9] * 4  # killed in step 25
    (tmp_path / "log.csv").write_text("reward\n" + "".join(f"{r}\n" for r in rewards))
    assert curriculum.reward(tmp_path, 20) == pytest.approx(0.1)


@pytest.mark.extras("peft")
def test_each_stage_begins_with_the_planner_of_the_one_before(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "tiny" / "warm")
    code = FORKING + "from experiments import curriculum, pretrained, study; "
    code += f"pretrained.RUNS = study.RESULTS = Path({str(tmp_path)!r}); curriculum.TESTED = 6; "
    code += "curriculum.BLOCK, stages, few = 1, curriculum.STAGES, {'four': (1, 2)}; "
    code += "stages.update({k: (*s[:3], few.get(k, (1, 1)), s[4]) for k, s in stages.items()}); "
    code += "curriculum.main()"
    words = [sys.executable, "-c", code, "--model", "tiny", "--device", "cpu"]
    subprocess.run(words, cwd=pretrained.ROOT, check=True)
    read = lambda name: list(csv.DictReader(open(tmp_path / f"{name}.csv", newline="")))
    stages = "two", "four", "four", "all"  # "four" goes on while its reward is low
    names = [f"tiny-{stage}, seed 0" for stage in stages]
    assert [row["run"] for row in read("pretrained-log")] == names
    begun = {}
    for path in tmp_path.glob("tiny/curriculum0/*/args.json"):
        begun[path.parent.name] = Path(json.loads(path.read_text())["model"])
    first = tmp_path / "tiny"
    assert begun == {
        "two": first / "warm",
        "four": first / "curriculum0" / "two" / "whole",
        "all": first / "curriculum0" / "four" / "whole",
    }
    asked = Counter()
    for row in read("curriculum"):
        asked[row["planner"]] += int(row["n"])
    after = [f"seed 0, after the stage {stage}" for stage in ("four", "all")]
    assert asked == dict.fromkeys(["warm-started", *after], 6)
