"""The study behind RESULTS.md: its edits fit the code, its runs are made once, its numbers are the CSV's."""

import csv
import json
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_flow_grpo import gradient, learn, rollouts, tiny

import solve
from cli.command_line import HOPS, TOY, TOY_TOOLS
from experiments import curves, figures, monolith, paired, planning, power, runs, sft, study, wordings
from flow_grpo import per_token, token_logps, token_weight
from models.completion import Completion
from models.loading import load_engine
from rewards.grade import grade
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

def test_every_edit_fits_the_code_and_leaves_python(folder):
    for edits in {run.edits for run in all_runs()}:
        code = runs.edited(folder, edits)
        for edit in edits:
            for name in re.findall(r"(?m)^\+\+\+ b/(.*\.py)$", runs.head_and_changes(edit)[1]):
                compile((code / name).read_text(), name, "exec")
        assert (code / "toy" / "config.json").exists() and not (code / "tests").exists()


def test_an_edit_that_does_not_fit_ends_the_study(folder, monkeypatch):
    gone = "--- a/solve.py\n+++ b/solve.py\n@@ -1 +1 @@\n-a line that is not in it\n+another\n"
    (folder / "gone.diff").write_text(f"What it is.\n{gone}")
    monkeypatch.setattr(runs, "path_of", lambda edit: folder / f"{edit}.diff")
    with pytest.raises(SystemExit, match="gone.diff does not fit the code: .*solve.py"):
        runs.edited(folder, ("gone",))


def test_a_copy_inside_an_ignored_folder_of_the_repository_is_edited_too(folder):
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    (folder / ".gitignore").write_text("*\n")
    assert (runs.edited(folder, ("forks/tracker",)) / "logbook" / "tracker.py").exists()


AT_WORK = """
import sys
from pathlib import Path
from experiments import runs
runs.RUNS = Path(sys.argv[1])
runs.make_all([runs.Run(sys.argv[2], ("-c", sys.argv[3]))], workers=1)
"""


def test_two_processes_share_a_copy_of_the_code_and_neither_removes_that_of_the_other(folder):
    makes = "import os, time; os.mkdir(r'{out}'); "
    waits = f"while not os.path.exists(r'{folder}/go'): time.sleep(0.02)\n"
    uses = "import memory; open(r'{out}/code', 'w').write(memory.__file__)"  # the copy is where it works
    program = [sys.executable, "-c", AT_WORK, folder]
    start = lambda name, code: subprocess.Popen([*program, name, code], cwd=runs.ROOT)
    slow = start("slow", f"{makes}\n{waits}{uses}")
    while slow.poll() is None and not list(folder.glob("slow-*/")):
        time.sleep(0.02)
    together = [start(f"quick{n}", makes + uses) for n in range(2)]
    assert [process.wait() for process in together] == [0, 0]
    (folder / "go").touch()
    assert slow.wait() == 0
    copies = {path.read_text() for path in folder.glob("*/code")}
    assert len(list(folder.glob("*/code"))) == 3 and copies == {str(*folder.glob("code-*/memory.py"))}


def test_changed_code_is_another_copy(folder, monkeypatch):
    first = runs.edited(folder, ())
    assert runs.edited(folder, ("forks/rloo",)) != first
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text("changed = True\n")
    monkeypatch.setattr(runs, "ROOT", folder / "code")
    runs.edited.cache_clear()
    assert (runs.edited(folder, ()) / "train.py").read_text() == "changed = True\n"
    assert runs.edited(folder, ()) != first and (first / "memory.py").exists()


def test_five_seeds_for_the_papers_analyses_and_three_for_the_rest_each_run_once():
    names = Counter(run.name for run in all_runs())
    forks = (f"fork-{name}" for name in study.FORKS)
    seeds = dict.fromkeys(("flow-grpo", "sft-own", "sft-perfect", "monolith", "fork-token-mean", *forks), 5)
    seeds |= dict.fromkeys(("sft-foreign", "rare-sft-own", "rare-sft-perfect", "rare-Flow-GRPO-G-32"), 5)
    seeds |= dict.fromkeys(("width-64", *study.VARIANTS), 3) | {"sft-lazy": 1}
    seeds |= {"hops": 5} | dict.fromkeys(("hops-sft-own", "hops-sft-perfect"), planning.SFT_SEEDS)
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
    others = [runs.Run("run", ("b",)), runs.Run("run", ("a",), edits=("forks/rloo",))]
    others += [runs.Run("run", ("a",), after=(runs.Run("before", (word,)),)) for word in ("c", "d")]
    assert len({run.folder for run in (first, *others)}) == 5
    assert runs.Run("run", ("a",)).folder == first.folder


# ---- SFT and the monolith ----------------------------------------------------------------------------------

def test_the_gradient_at_advantage_one_is_that_of_the_log_likelihood():
    model, (actions, *_) = tiny(), rollouts()
    turns = Counter(a.rollout for a in actions)
    weight = per_token(actions, [token_weight(a, turns[a.rollout], 7) for a in actions])
    (-(token_logps(model, actions, 1.0) * weight).sum()).backward()
    _, taught = learn(tiny(), actions, [1.0] * 7, temperature=1.0, beta=0)
    torch.testing.assert_close(taught.gradients, [gradient(model)], rtol=1e-5, atol=1e-6)  # logps are float32


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
    again = monolith.roll_out([one.question for one in rollouts], policy, {"base_generator": policy}, tools)
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

    (one,) = monolith.roll_out([rollouts[0].question], policy, {"base_generator": policy}, tools, max_turns=2)
    assert len(one.actions) == 3 and one.answer == "Let me think."
    assert [step.error for step in one.memory.steps] == [True, True]
    assert "Result: Error: no line 'Command: ...'" in prompts[1]


def test_the_perfect_planners_ids_are_those_of_its_text(taught):
    made, engine = questions(4, False, seed=5), load_engine(str(TOY))
    (one,) = solve.evaluate(for_flow(made)[:1], sft.Perfect(made, engine), engine, taught[0])[1]
    text = next(word["text"] for word in one.outputs if word["module"] == "planner")
    assert engine.decode(one.actions[0].ids) == text
    assert one.actions[0].ids[-1] == engine.tokenizer.eos_token_id


def test_the_foreign_teacher_says_nothing_in_the_words_of_the_toy(taught):
    made, engine = questions(40, False, seed=5), load_engine(str(TOY))
    planner = sft.Perfect(made, engine, wordings.Foreigner)
    rollouts = solve.evaluate(for_flow(made), planner, planner.teacher, taught[0])[1]
    sub_goals = [step.sub_goal for rollout in rollouts for step in rollout.memory.steps]
    assert all(rollout.reward == 1 for rollout in rollouts) and len(sub_goals) > 40
    assert not any(re.match("Find the", text) for text in sub_goals)


def test_the_lazy_planner_names_base_generator_in_three_plans_of_five_in_any_words():
    rng = sft.Lazy(0)
    drawn = Counter(rng.choice(sorted(TOY_TOOLS)) for _ in range(10_000))
    assert [drawn[tool] / 10_000 for tool in sorted(TOY_TOOLS)] == pytest.approx([0.6, 0.2, 0.2], abs=0.015)
    assert Counter(rng.choice(["a", "b"]) for _ in range(1000))["a"] == pytest.approx(500, abs=60)


@pytest.mark.parametrize("traces, kept", [("own", 1), ("lazy", 2)])
def test_only_the_lazy_planner_imitates_what_ended_badly(monkeypatch, traces, kept):
    rollouts = [SimpleNamespace(right=True), SimpleNamespace(right=False)]
    metrics = {"accuracy": 0.5, "turns": 1, "errors": 0, "tokens": 1, "failed": 0, "undecided": 0}
    monkeypatch.setattr(sft.solve, "evaluate", lambda *given, **settings: (metrics, rollouts))
    monkeypatch.setattr(sft, "rollout_settings", lambda args: {})
    args = SimpleNamespace(steps=1, seed=0, questions=1, group_size=2, traces=traces)
    (batch,) = sft.collect(None, None, None, for_flow(questions(2, False, seed=5)), args)
    assert len(batch) == kept


@pytest.mark.parametrize("results, n, seen", [
    ([], 0, "nothing yet"), (["[1] Mutas: The number of Mutas is 30."], 1, "a number"),
    (["[1] Mutas: The number of Mutas is 7 * 4."], 1, "a product"),
    (["[1] Mutas: The number of Mutas is at https://hops.org/217"], 1, "an address"),
    (["[1] passage 1 of 1 (https://hops.org/217): It is filed as Tivor."], 1, "another name"),
    (["[1] passage 1 of 1 (https://hops.org/217): The number is 7 * 4."], 1, "a product"),
    (["[1] passage 1 of 1 (https://hops.org/217): The number is 31."], 1, "a number"),
    (["Error: no passage matches 'number of Mutas'. Try other or fewer words."], 1, "a name not found"),
    (["30", "Error: SyntaxError: invalid syntax (line 1)"], 2, "another error"),
    (["30", "Error: SyntaxError: invalid syntax (line 1)"], 1, "a number")])
def test_what_memory_shows_last_is_told_from_the_result(results, n, seen):
    assert planning.situation([{"result": text} for text in results], n) == seen


def test_sft_in_the_second_toys_world_imitates_its_own_teacher():
    tools, made, tested = sft.world_of(SimpleNamespace(world="hops", roles=None))
    engine = load_engine(str(HOPS))
    planner = sft.Perfect(made[:6], engine, sft.hops_teacher.Teacher)
    rollouts = solve.evaluate(for_flow(made[:6]), planner, planner.teacher, tools, max_turns=5)[1]
    assert [one.reward for one in rollouts] == [1.0] * 6 and not {row["question"] for row in made} & {
        row["question"] for row in tested}
    text = next(word["text"] for word in rollouts[0].outputs if word["module"] == "planner")
    assert engine.decode(rollouts[0].actions[0].ids) == text


@pytest.mark.parametrize("in_order", [True, False])
def test_in_order_each_step_imitates_the_batch_that_was_collected_for_it(monkeypatch, in_order):
    steps = []
    monkeypatch.setattr(sft, "update", lambda passes, optimizer, actions, *given, **settings: (
        steps.append([action.ids for action in actions]) or {"entropy": 1.0, "grad_norm": 1.0}))
    monkeypatch.setattr(sft.logps, "scoring", lambda *models: {"token_logps": None})
    turn = lambda n: SimpleNamespace(prompt_ids=[0], ids=[n])
    batches = [[SimpleNamespace(actions=[turn(10 * b + n)]) for n in range(8)] for b in range(4)]
    args = SimpleNamespace(in_order=in_order, steps=4, minibatches=1, questions=2, group_size=4, seed=0,
                           lr=0.1, token_budget=100)
    sft.imitate(SimpleNamespace(model=torch.nn.Linear(1, 1)), batches, args)
    assert [len(step) for step in steps] == [8] * 4
    whole = [[rollout.actions[0].ids for rollout in batch] for batch in batches]
    assert (steps == whole) is in_order


# ---- the numbers -------------------------------------------------------------------------------------------

def table(name):
    with open(study.RESULTS / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_an_interval_is_students_t():
    middle, half = figures.mean([1.0, 2.0, 3.0])
    assert middle == 2 and half == pytest.approx(4.30 / 3**0.5, rel=0.01)


# scipy.stats.ttest_1samp(values, 0).pvalue, and Holm's p by hand
@pytest.mark.parametrize("values, p", [
    ([0.1, -0.2, 0.05, 0.3], 0.5862251), ([-0.093, -0.105, -0.073], 0.0105073), ([1.0, 1.1], 0.0302923),
    ([0.02, -0.08, -0.03, -0.14, -0.05, -0.06, -0.07, 0.03, -0.27], 0.0431209),
    ([0.0, 0.0], 1), ([0.5, 0.5, 0.5], 0)])
def test_the_p_of_a_paired_test_is_that_of_students_t(values, p):
    assert figures.student_p(values) == pytest.approx(p, abs=1e-6)


def test_holm_multiplies_the_smallest_p_by_the_number_of_tests_and_keeps_the_order():
    assert figures.holm([0.02, 0.01, 0.9, 0.03]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert figures.holm([0.6, 0.5]) == [1.0, 1.0]


def between_comments(name, page=RESULTS):
    return re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", page, re.DOTALL)[1]


@pytest.mark.parametrize("name", study.BLOCKS)
def test_pictures_captions_and_tables_of_results_are_what_the_script_makes(name):
    made = study.block(name)
    assert between_comments(name) == made + "\n"
    assert re.search(r"^\*.*95 % .*`python experiments/\w+\.py .*`\*$", made, re.M)
    assert (study.RESULTS / f"{name}.svg").exists() and "n = " in made or "over n" in made


def test_without_matplotlib_the_tables_are_made_and_the_pictures_are_a_sentence(monkeypatch, capsys):
    filled = {}
    monkeypatch.setattr(figures, "fill", filled.__setitem__)
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["study.py", "--tables", "--only", "ways", "smollm-toy"])
    study.main()
    assert filled == {name: study.block(name) for name in ("ways", "smollm-toy")}
    assert "The pictures need matplotlib" in capsys.readouterr().out


def test_runs_that_smollm_py_makes_are_refused_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["study.py", "--only", "smollm-toy"])
    with pytest.raises(SystemExit):
        study.main()
    assert "smollm.py: add --tables" in capsys.readouterr().err


def sentences():
    """What RESULTS.md says between its tables, and the numbers that it must say by the CSV files."""
    def points(name, first, second, digits):
        accuracy = figures.gather(table(name), "planner", "accuracy")
        change = [100 * (a - b) for a, b in zip(accuracy[first], accuracy[second])]
        return figures.pm(change, digits), figures.shown_p(figures.student_p(change))

    perfect, own, foreign = (f"SFT, {words}" for words in (
        "perfect planner's traces", "its own successes", "foreign teacher's traces"))
    yield from points("ways", perfect, "Flow-GRPO", 1)
    yield points("ways", own, "Flow-GRPO", 1)[0]
    yield points("foreign", "Flow-GRPO", foreign, 0)[0]
    yield points("foreign", foreign, "frozen", 0)[0]
    yield points("rarely", own, "Flow-GRPO", 0)[0]
    yield from points("rarely", perfect, "Flow-GRPO", 0)
    yield from sentences_on_planning()
    monolith = table("monolith")
    tests = [figures.over(monolith, run, 1, 1, "test_after") for run in ("right verdicts", "monolith")]
    lower = [a - b for a, b in zip(*tests)]
    yield f"{figures.pm(lower)} (p = {figures.student_p(lower):.3f})"
    for run, test in zip(("right verdicts", "monolith"), tests):
        yield figures.pm([a - b for a, b in zip(figures.over(monolith, run, 14, 16, "reward"), test)])
    rows = paired.read("smollm-paired")
    ps = sorted(row["p"] for row in rows if (row["roles"], row["set"], row["before"], row["after"])
                == ("planner", "toy", "Flow-GRPO", "perfect planner"))
    assert [p < 0.05 for p in ps] == [True] * 3 + [False] * 2
    yield "p = " + ", ".join(f"{p:.0e}".replace("e-0", "e-") for p in ps[:3])
    needed = power.pooled([change for _, change in power.past_pairs()])
    assert (power.seeds_needed(needed), power.seeds_needed(power.pooled(
        [change for _, change in power.fork_pairs(table("forks"))]), alpha=0.05 / 11)) == (9, 18)


def sentences_on_planning():
    """The same for sections 1 to 5."""
    tests = figures.gather(table("hops-tests"), "planner", "accuracy")
    yield figures.pm([100 * (a - b) for a, b in zip(tests["Flow-GRPO"], tests["untrained"])], 0)
    curve = [row | {"run": "Flow-GRPO"} for row in table("hops-curve")]
    for column, scale, digits in (("reward", 1, 2), ("errors", 100, 0), ("plan_tokens", 1, 1)):
        for first in (1, planning.STEPS - 9):
            yield figures.pm(figures.over(curve, "Flow-GRPO", first, first + 9, column), digits, scale)
    accuracy = figures.gather(table("hops-budget"), "max_turns", "accuracy")
    yield figures.pm([100 * (a - b) for a, b in zip(accuracy["8"], accuracy["5"])], 1)
    untrained = planning.bins()[0]
    yield f"{untrained[1]} of the {planning.TRIED}"


@pytest.mark.parametrize("number", list(sentences()))
def test_the_sentences_of_results_say_what_the_csv_files_say(number):
    prose = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", RESULTS, flags=re.DOTALL)
    assert number in " ".join(prose.split())


def test_every_table_of_results_that_holds_measurements_is_made_by_the_script():
    rest = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", RESULTS, flags=re.DOTALL)
    assert rest.count("\n|---|") == 1  # that of the claims
    assert sorted(re.findall("<!-- ([a-z-]+) -->", RESULTS)) == sorted(study.BLOCKS)


def test_readmes_table_of_seeds_is_what_the_script_makes():
    readme = (runs.ROOT / "README.md").read_text(encoding="utf-8")
    assert between_comments("toy-seeds", readme) == figures.toy_table() + "\n"


@pytest.mark.parametrize("name, key", [("ways", "planner"), ("hops-budget", "max_turns")])
def test_the_tables_show_the_means_of_the_csv_files(name, key):
    rows, shown = table(name), between_comments(name)
    for value in dict.fromkeys(row[key] for row in rows):
        seeds = [float(row["accuracy"]) for row in rows if row[key] == value]
        assert len(seeds) == 5
        assert re.search(rf"\| {re.escape(value)} +\| {statistics.fmean(seeds):.3f} ±", shown)


def test_every_flag_and_every_edit_of_a_variant_is_named_in_results():
    for flags, edits in [((), study.WORLD), *study.VARIANTS.values()]:
        assert all(flag in RESULTS for flag in flags if flag.startswith("--"))
        assert all(Path(edit).name in RESULTS for edit in {*edits} - {"edits/programs-kept"})
    assert list(figures.VARIANTS) == list(study.VARIANTS)


@pytest.mark.parametrize("picture", [*study.RESULTS.glob("*.svg"), figures.FOLDER / "curve.svg",
                                     runs.ROOT / "docs" / "flow.svg"], ids=lambda path: path.name)
def test_no_picture_has_a_background_and_all_use_one_palette(picture):
    text = picture.read_text(encoding="utf-8")
    colours = set(re.findall(r"#[0-9a-f]{6}\b", text))
    assert colours <= {*curves.COLOURS, curves.INK, "#ffffff"}  # white: numbers on bars
    assert "#ffffff" not in colours or picture.name == "hops-tools.svg"


def luminance(colour):
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
def test_the_palette_can_be_read_on_a_white_and_on_a_dark_page(page):
    for colour, least in [*((colour, 3.5) for colour in curves.COLOURS), (curves.INK, 4.2)]:
        low, high = sorted(map(luminance, (colour, page)))
        assert (high + 0.05) / (low + 0.05) >= least


# ---- forks -------------------------------------------------------------------------------------------------

def test_a_forks_result_does_not_change_its_run_but_its_diff_does(folder, monkeypatch):
    (folder / "one.diff").write_text("result: not measured yet\n--- a/x\n")
    monkeypatch.setattr(runs, "path_of", lambda edit: folder / f"{edit}.diff")
    name = lambda: runs.Run("run", ("a",), edits=("one",)).folder.name
    first = name()
    (folder / "one.diff").write_text("result: better\n--- a/x\n")
    assert name() == first and runs.note("one", "result") == "better"
    (folder / "one.diff").write_text("result: better\n--- a/y\n")
    assert name() != first


@pytest.mark.parametrize("sd, alpha, found", [(0.046, 0.05, 9), (0.046, 0.005, 16), (0.05, 0.05, 10)])
def test_so_many_pairs_find_five_points_in_four_of_five_studies(sd, alpha, found):
    n = power.seeds_needed(sd, alpha=alpha)
    assert n == found
    changes = 0.05 + sd * torch.randn(20_000, n, generator=torch.Generator().manual_seed(0))
    nulls = torch.randn(200_000, n, generator=torch.Generator().manual_seed(1))
    t_of = lambda sample: (sample.mean(1) / (sample.std(1) / n**0.5)).abs()
    limit = t_of(nulls).sort()[0][int(len(nulls) * (1 - alpha))]
    assert 0.78 < (t_of(changes) > limit).float().mean() < 0.87


def test_forks_csv_holds_the_mean_over_the_trials_of_a_planner_and_over_its_steps(folder, monkeypatch):
    monkeypatch.setattr(study, "FORKS", ("rloo",))
    analysis = study.forks(2)
    for number, test in enumerate(next(analysis)):
        test.folder.mkdir()
        steps = [{"error": number % 3 == 1}, {"error": False}]
        record = {"reward": number % 3 == 0, "memory": {"steps": steps}}
        (test.folder / "questions-0.jsonl").write_text(json.dumps(record))
        (run,) = test.after
        run.folder.mkdir(exist_ok=True)
        (run.folder / "log.csv").write_text("step,flat,clip\n1,4,0.1\n2,2,0.3\n")
    name, rows = next(analysis)
    assert name == "forks.csv" and len(rows) == 6
    assert {row["run"] for row in rows} == {"as it is", "token-mean", "rloo"}
    for row in rows:
        assert [row[key] for key in ("accuracy", "turns", "errors", "flat", "clip")] == pytest.approx(
            [1 / 3, 2, 1 / 6, 3, 0.2])


def test_the_pairs_of_a_fork_are_those_of_the_same_seed():
    rows = [{"run": run, "seed": seed, "accuracy": value} for run, seed, value in
            (("as it is", "0", "0.5"), ("as it is", "1", "0.7"), ("rloo", "1", "0.8"), ("rloo", "0", "0.4"))]
    assert power.differences(rows, "rloo", "as it is", "accuracy") == pytest.approx([-0.1, 0.1])
    assert power.pooled([[0.0, 2.0], [5.0, 7.0, 9.0]]) == pytest.approx(((2 + 8) / 3) ** 0.5)


def test_the_result_in_the_head_of_a_fork_is_that_of_forks_csv():
    measured = (study.RESULTS / "forks.csv").exists() and table("forks")
    for name in study.FORKS:
        change = measured and power.differences(measured, name, "as it is", "accuracy")
        found = power.result_of(change) if change else "not measured yet"
        assert runs.note(f"forks/{name}", "result") == found


@pytest.mark.extras("matplotlib")
def test_the_forks_numbers_reach_the_figure_the_table_and_the_heads(folder, monkeypatch):
    import matplotlib.pyplot as plt
    (folder / "forks.csv").write_text("run,seed,accuracy,turns,errors\n" + "".join(
        f"{run},{seed},{accuracy + 0.01 * seed},2,0.1\n" for seed in range(3)
        for run, accuracy in (("as it is", 0.7), ("rloo", 0.6 + 0.01 * seed), ("token-mean", 0.8))))
    (folder / "rloo.diff").write_text("RLOO\nresult: not measured yet\n--- a/x\n")
    monkeypatch.setattr(figures, "RESULTS", folder)
    monkeypatch.setattr(runs, "path_of", lambda edit: folder / f"{Path(edit).name}.diff")
    power.forks_picture(plt)
    power.write_results()
    assert re.search(r"rloo +\| -0.090 ± 0.025 +\| 0.004 +\| 0.004", power.forks_table())
    assert (folder / "forks.svg").exists()
    assert (folder / "rloo.diff").read_text() == (
        "RLOO\nresult: -0.090 ± 0.025 in accuracy, 3 seeds (experiments/RESULTS.md, section 8)\n--- a/x\n")
