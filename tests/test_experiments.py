"""The study behind RESULTS.md: its edits fit the code, its runs are made once, its numbers are the CSV's."""

import json
import math
import random
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
import tools as toolset
import toy.hops.make
import toy.make
from cli.flags import FOR_HOPS, HOPS, train_parser
from experiments import figures, hops, monolith, pages, planning, runs, sft, study
from flow_grpo import per_token, token_logps, token_weight
from models.completion import Completion
from models.loading import load_engine
from rewards.grade import grade
from toy.hops.questions import MAX_TURNS, World, for_flow, splits
from toy.hops.teacher import GOAL, TOOLS, Teacher
from world.toolbox import choose

RESULTS = (runs.ROOT / "experiments" / "RESULTS.md").read_text(encoding="utf-8")


def all_runs():
    """Every run of the study, with those that it needs."""
    found, waiting = {}, [run for analysis in study.ANALYSES.values() for run in next(analysis())]
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
    diffs = {(f"edits/{path.stem}",) for path in (runs.ROOT / "experiments" / "edits").glob("*.diff")}
    for edits in diffs | {run.edits for run in all_runs()}:
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
from world.toolbox import choose
runs.RUNS = Path(sys.argv[1])
runs.make_all([runs.Run(sys.argv[2], ("-c", sys.argv[3]))], workers=1)
"""


@pytest.mark.exhaustive
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


def test_five_seeds_of_flow_grpo_and_of_its_forks_and_three_of_other_methods_each_run_once():
    names = Counter(run.name for run in all_runs())
    forks = tuple(f"hops-{name}" for name in (*planning.FORKS, "token-mean"))
    others = ("hops-monolith", "hops-64", "toy", *(f"hops-sft-{traces}" for traces in planning.SFT))
    for name, number in (dict.fromkeys(("hops", *forks), 5) | dict.fromkeys(others, 3)).items():
        assert [names[f"{name}-seed{seed}"] for seed in range(6)] == [1] * number + [0] * (6 - number)
    assert set(names.values()) == {1}
    assert len({run.folder for run in next(planning.forks(9))}) == 9 * 6  # --seeds 9


def test_every_planner_is_trained_by_one_command_that_differs_in_its_models_and_its_change():
    found = [run for run in all_runs() if run.command[:1] == ("train.py",) and run.name.startswith("hops")]
    parsed = [vars(train_parser().parse_args(run.command[1:])) for run in found]
    for run, args in zip(found, parsed):
        assert {name: args[name] for name in ("lr", "steps", "questions", "minibatches", "max_turns")} == {
            name: FOR_HOPS[name] for name in ("lr", "steps", "questions", "minibatches", "max_turns")}
        assert (Path(args["data"]).name, args["judge"], args["group_size"]) == ("train.jsonl", "none", 8)
        changed = run.edits or args["token_mean"] or args["model"] != "toy/hops"
        assert bool(changed) is not re.fullmatch(r"hops-seed\d", run.name)
    varied = {name for name in parsed[0] if len({str(args[name]) for args in parsed}) > 1}
    assert varied == {"model", "fixed", "seed", "token_mean"}


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
def world(tmp_path_factory):
    """(tools, 60 test questions, a perfect teacher of them) of the second toy's world."""
    drawn, corpus = World(0), tmp_path_factory.mktemp("world") / "corpus.jsonl"
    toy.make.write_rows(corpus, drawn.rows)
    made = splits(drawn)["test"][:60]
    return choose(toolset.TOOLS, list(TOOLS), corpus), made, Teacher(made, drawn.renamed)


@pytest.mark.exhaustive
def test_a_monolith_that_writes_what_the_teacher_wrote_is_right_and_every_text_is_its_action(world):
    tools, made, teacher = world
    flow = solve.roll_out(for_flow(made), teacher, teacher, tools, MAX_TURNS)
    writer = monolith.Writer(teacher, tools)
    rollouts = monolith.roll_out(for_flow(made), writer, {"default": teacher}, tools, MAX_TURNS)
    grade(rollouts)
    assert [one.reward for one in rollouts] == [1.0] * 60
    assert [len(one.plans) for one in rollouts] == [len(one.memory.steps) + 1 for one in flow]
    results = [[(step.tool, step.command, step.result) for one in batch for step in one.memory.steps]
               for batch in (rollouts, flow)]
    assert results[0] == results[1]
    assert len(writer.examples) == sum(len(one.plans) for one in rollouts)


def test_a_monolith_learns_random_plans_with_their_calls_and_answers_from_what_it_found(monkeypatch):
    monkeypatch.setattr(toy.hops.make, "WORLDS", 1)
    found = monolith.examples(48, seed=0)
    plans = [text for _, text in found if monolith.CALL in text]
    answers = [text for _, text in found if monolith.CALL not in text]
    tools = Counter(text.rpartition("Command: ")[2].partition("(")[0] for text in plans)
    assert set(tools) == set(TOOLS) and min(tools.values()) > 0.08 * len(plans)
    assert len(answers) == 48 and all("<answer>" in text for text in answers)
    texts = {prompt: text for prompt, text in found}
    assert all(isinstance(monolith.parse(text, choose(toolset.TOOLS, list(TOOLS), HOPS / "corpus.jsonl"))[2],
                          monolith.executor.Call) for text in plans) and len(texts) == len(found)


def test_a_monolith_that_never_answers_ends_after_its_turns_and_reads_its_parse_error(world):
    tools, made, _ = world
    prompts = []

    def policy(batch, **settings):
        prompts.extend(batch)
        return [Completion("Let me think.", [1], [2]) for _ in batch]

    (one,) = monolith.roll_out(for_flow(made[:1]), policy, {"default": policy}, tools, max_turns=2)
    assert len(one.plans) == 3 and one.answer == "Let me think."
    assert [step.error for step in one.memory.steps] == [True, True]
    assert "Result: Error: no line 'Command: ...'" in prompts[1]


def test_the_perfect_planners_ids_are_those_of_its_text(world):
    tools, made, teacher = world
    engine = load_engine(str(HOPS))
    (one,) = solve.evaluate(for_flow(made[:1]), sft.Perfect(teacher, engine), teacher, tools, max_turns=5)[1]
    text = next(word["text"] for word in one.outputs if word["module"] == "planner")
    assert one.right and engine.chat.decode(one.plans[0].ids) == text
    assert one.plans[0].ids[-1] == engine.tokenizer.eos_token_id


def test_the_foreign_teacher_says_nothing_in_the_words_of_the_toy_and_answers_every_question(world):
    tools, made, perfect = world
    teacher = sft.Foreigner(made, perfect.renamed)
    rollouts = solve.evaluate(for_flow(made), teacher, teacher, tools, max_turns=MAX_TURNS)[1]
    plans = [word["text"] for one in rollouts for word in one.outputs if word["module"] == "planner"]
    assert all(one.right for one in rollouts)
    assert all(f"Sub-goal: {sft.FOREIGN}" in text and GOAL not in text for text in plans)


def test_only_what_ended_well_is_imitated(world, monkeypatch):
    rollouts = [SimpleNamespace(right=True), SimpleNamespace(right=False)]
    metrics = {"accuracy": 0.5, "turns": 1, "errors": 0, "tokens": 1, "failed": 0, "undecided": 0}
    monkeypatch.setattr(sft.solve, "evaluate", lambda *given, **settings: (metrics, rollouts))
    assert sft.collect(None, None, None, for_flow(world[1][:20]), steps=2, seed=0) == [rollouts[0]] * 2


@pytest.mark.exhaustive
def test_a_smaller_toy_and_the_second_toy_made_from_it_are_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(toy.hops.make, "WORLDS", 1)
    small = ["--steps", "2", "--drilling", "1"]
    for main, *flags in ((toy.make.main, "--width", "16", "--rollouts", "8", "--out", "first"),
                         (toy.hops.make.main, "--base", "first", "--rollouts", "32", "--out", "second")):
        flags = [str(tmp_path / word) if word in ("first", "second") else word for word in flags]
        monkeypatch.setattr("sys.argv", ["make.py", *small, *flags])
        main()
    config = load_engine(str(tmp_path / "second")).model.config
    assert (config.hidden_size, config.intermediate_size) == (16, 48)
    assert {path.name for path in HOPS.glob("*.jsonl")} <= {path.name for path in tmp_path.glob("second/*")}


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
    assert planning.situation(results, n) == seen


def test_each_step_imitates_as_many_rollouts_as_a_mini_batch_of_flow_grpo_has(monkeypatch):
    steps = []
    monkeypatch.setattr(sft, "update", lambda passes, optimizer, actions, rollouts, **settings: (
        steps.append((len(actions), len(rollouts))) or {"entropy": 1.0, "grad_norm": 1.0}))
    monkeypatch.setattr(sft.logps, "scoring", lambda *models: (None, None))
    turn = SimpleNamespace(prompt_ids=[0], ids=[1])
    found = [SimpleNamespace(plans=[turn, turn]) for _ in range(100)]
    sft.imitate(SimpleNamespace(model=torch.nn.Linear(1, 1)), found, steps=2, seed=0)
    assert steps == [(64, 32)] * 2 * 4


# ---- the numbers -------------------------------------------------------------------------------------------

def test_an_interval_is_students_t():
    middle, half = figures.mean([1.0, 2.0, 3.0])
    assert middle == 2 and half == pytest.approx(4.30 / 3**0.5, rel=0.01)


# scipy.stats.ttest_1samp(values, 0).pvalue
@pytest.mark.parametrize("values, p", [
    ([0.1, -0.2, 0.05, 0.3], 0.5862251), ([-0.093, -0.105, -0.073], 0.0105073), ([1.0, 1.1], 0.0302923),
    ([0.02, -0.08, -0.03, -0.14, -0.05, -0.06, -0.07, 0.03, -0.27], 0.0431209),
    ([0.0, 0.0], 1), ([0.5, 0.5, 0.5], 0)])
def test_the_p_of_a_t_is_that_of_students(values, p):
    error = statistics.stdev(values) / len(values) ** 0.5
    assert figures.two_sided_p(statistics.fmean(values), error, len(values) - 1) == pytest.approx(p, abs=1e-6)


def test_t_is_that_of_the_table():
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469, 7: 2.3646, 8: 2.3060,
             9: 2.2622, 10: 2.2281, 11: 2.2010, 12: 2.1788, 13: 2.1604, 14: 2.1448, 15: 2.1314, 16: 2.1199,
             17: 2.1098, 18: 2.1009, 19: 2.0930}
    for nu, t in table.items():
        assert figures.t_of(nu) == pytest.approx(t, abs=1e-4)


def test_welchs_p_is_students_of_equal_variances_and_that_of_tables():
    some, others = [1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0]  # t = -2.191, with 6 degrees of freedom
    mean, half, p = figures.difference(some, others)
    assert (mean, half) == (-2, pytest.approx(2.4469 * (5 / 6) ** 0.5, abs=1e-3))
    assert p == pytest.approx(0.0710, abs=1e-4)
    assert figures.difference(others, some) == (2, half, p)
    assert str(figures.difference(some, some[::-1])) == "0.000 ± 2.234"
    assert figures.difference([0.5, 0.5], [0.5, 0.5]) == (0, 0, 1)  # no scatter


def test_welchs_p_weighs_unequal_variances():
    # A set without scatter leaves Student's test of the other; with 2 degrees of freedom p has a closed form.
    values = [1.0, 2.0, 4.0]
    t = statistics.fmean(values) / (statistics.stdev(values) / 3**0.5)
    assert figures.difference(values, [0.0, 0.0]).p == pytest.approx(1 - t / (t * t + 2) ** 0.5, abs=1e-6)
    # n = 3 and 4, s² = 1 and 80/3: t = -8 / √7 = -3.0237, and ν = 7² / (1/9/2 + (20/3)²/3) = 3.2952
    nu, t = 49 / (1 / 18 + 400 / 27), 8 / 7**0.5
    scale = math.gamma((nu + 1) / 2) / (math.gamma(nu / 2) * (nu * math.pi) ** 0.5)
    width = t / 100_000  # midpoints of Student's density
    inside = sum((1 + ((k + 0.5) * width) ** 2 / nu) ** (-(nu + 1) / 2) for k in range(100_000)) * width
    assert figures.difference([1.0, 2.0, 3.0], [4.0, 8.0, 12.0, 16.0]).p == pytest.approx(
        1 - 2 * scale * inside, abs=1e-6)


def test_holm_multiplies_the_smallest_p_by_the_number_of_tests_and_keeps_the_order():
    assert figures.holm([0.02, 0.01, 0.9, 0.03]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert figures.holm([0.6, 0.5]) == [1.0, 1.0]


def between_comments(name, page=RESULTS):
    return re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", page, re.DOTALL)[1]


@pytest.mark.parametrize("name", pages.PAGES)
def test_pictures_captions_and_tables_of_results_are_what_the_script_makes(name):
    if not figures.path_of(name).exists():
        assert between_comments(name) == "Not measured yet.\n"
        assert not (figures.RESULTS / f"{name}.svg").exists()
        return
    made = pages.block(name)
    assert between_comments(name) == made + "\n"
    assert re.search(r"^\*.*(95 % |seeds together).*`python experiments/study\.py .*`\*$", made, re.M)
    assert (figures.RESULTS / f"{name}.svg").exists() and "n = " in made


def test_without_matplotlib_the_tables_are_made_and_the_pictures_are_a_sentence(monkeypatch, capsys):
    filled = {}
    monkeypatch.setattr(figures, "fill", filled.__setitem__)
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["study.py", "--tables", "--only", "hops-ways", "hops-new"])
    study.main()
    assert filled == {name: pages.block(name) for name in ("hops-ways", "hops-new")}
    assert "The pictures need matplotlib" in capsys.readouterr().out


def test_an_analysis_without_its_csv_file_is_one_line_and_stops_nothing(monkeypatch, capsys):
    filled, there = {}, figures.path_of
    monkeypatch.setattr(figures, "fill", filled.__setitem__)
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    monkeypatch.setattr(figures, "path_of", lambda name: there("missing" if name == "hops-forks" else name))
    study.make_pages(["hops-forks", "hops-ways"])
    assert list(filled) == ["hops-ways"]
    assert capsys.readouterr().out.startswith("hops-forks: not measured yet")


def test_the_tables_of_docs_speed_are_those_of_its_csv_file():
    text = (runs.ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert all(pages.speed_table(beside) in text for beside in ("TRL", "plain"))


def sentences():
    """Numbers that RESULTS.md must say between its tables, from the CSV files."""
    for section in (of_another_cpu, of_planning, of_supervised_learning, of_base_generator,
                    of_sections_3_to_5, of_other_designs, of_forks, of_smollm):
        yield from section()


def of_another_cpu():
    steps = [{(row["seed"], row["step"]): (row["reward"], row["errors"], row["turns"])
              for row in figures.read("hops-curve", folder)} for folder in (figures.RESULTS, pages.INTEL)]
    parted = {}  # {seed: the steps before the first that differs}
    for (seed, step), row in steps[0].items():
        if steps[1][seed, step] != row:
            parted.setdefault(seed, int(step) - 1)
    yield f"the first {min(parted.values())} to {max(parted.values())} steps of Flow-GRPO are the same"
    accuracy = figures.gather(figures.read("hops-tests", pages.INTEL), "planner", "accuracy")["Flow-GRPO"]
    assert min(accuracy) >= 0.85 and len(accuracy) == 5  # "all five reach it"
    seconds = [float(row["cpu_seconds"]) for row in figures.read("cost", pages.INTEL) if row["run"] == "hops"]
    assert {round(s / 60) for s in seconds} == {13}  # "in 13 minutes of CPU time each"


def of_planning():
    """Section 1: what does Flow-GRPO learn?"""
    tests = figures.gather(figures.read("hops-tests"), "planner", "accuracy")
    gain = figures.difference(tests["Flow-GRPO"], tests["untrained"])
    yield f"gains {100 * gain.mean:.0f} ± {100 * gain.half:.0f} points"
    fresh = figures.gather(figures.read("hops-fresh", pages.INTEL), "planner", "accuracy")["Flow-GRPO"]
    assert len(fresh) == 5
    yield f"get {statistics.fmean(fresh):.2f} on average)"
    routed = {row["route"]: float(row["accuracy"]) for row in figures.read("hops-routers")
              if row["planner"] == "perfect"}
    assert [route for route in hops.ROUTERS if not routed[route]] == list(hops.ROUTERS[:4]) != hops.ROUTERS
    assert len(hops.ROUTERS) == 6 and routed["plan"] == max(routed[route] for route in hops.ROUTERS)
    yield f"each kind of question, gets {routed['sequence']:.2f}."
    yield f"turn and sub-goal, gets {routed['plan']:.2f}"
    yield f"what the last result said: {routed['context']:.2f}."
    yield f"whether the sub-goal is a sum: {routed['result']:.2f}."
    ruled = {column: figures.gather([row for row in figures.read("hops-routers") if row["route"] == "result"],
                                    "planner", column) for column in ("accuracy", "one", "plus", "sum")}
    yield f"untrained* planner's plans, it gets {figures.pm(ruled['accuracy']['untrained'])}"
    kinds = [statistics.fmean(ruled[kind]["untrained"]) for kind in ("one", "plus", "sum")]
    yield "{:.2f}, {:.2f} and {:.2f} of the three kinds".format(*kinds)
    trained = [statistics.fmean(float(row[kind]) for row in figures.read("hops-tests")
                                if row["planner"] == "Flow-GRPO") for kind in ("one", "plus", "sum")]
    yield (f"{kinds[2]:.2f} of them are right with the rule and the untrained plans, "
           f"{trained[2]:.2f} after Flow-GRPO")
    lowest = min(float(row["accuracy"]) for row in figures.read("hops-tests")
                 if (row["planner"], row["seed"]) == ("Flow-GRPO", "3"))
    assert lowest == min(tests["Flow-GRPO"]) and round(300 * (0.85 - lowest)) == 2  # "by two questions"
    assert {row["at_once"] for row in figures.read("hops-tests")} == {"0"}  # "It never guesses a new name"


def of_supervised_learning():
    """Section 1: SFT on traces, and online."""
    ways = figures.gather(figures.read("hops-ways"), "planner", "accuracy")
    ten = pages.ten_seeds()
    assert len(ten) == 10
    perfect, foreign = (figures.difference(ways[f"SFT, {whose} traces"], ten)
                        for whose in ("perfect planner's", "foreign teacher's"))
    yield f"by {perfect} with the perfect planner's (p = {perfect.p:.2f})"
    yield f"by {foreign} with the foreign teacher's (p = {foreign.p:.2f})"
    beside = [figures.difference(ways[f"SFT, {whose} traces"], ways["Flow-GRPO"]).p
              for whose in ("perfect planner's", "foreign teacher's")]
    yield "(Against the five seeds of the same CPU: p = {:.2f} and {:.2f}.)".format(*beside)
    own, more = (statistics.fmean(ways[planning.SFT[name]]) for name in ("own", f"own-{planning.STEPS}"))
    yield f"One round gets {own:.2f}. With as many rollouts and updates as Flow-GRPO, it gets {more:.2f}"
    online = ways[planning.ONLINE]
    yield f"It gets {listed(online)}, and four of these are below the worst of ten"
    assert sum(value < min(ten) for value in online) == 4
    less = figures.difference(online, ten)
    yield f"The interval, {less}, p = {less.p:.2f}, is wide"
    yield f"against online SFT, p = {less.p:.2f}"
    intel = figures.gather(figures.read("hops-tests", pages.INTEL), "planner", "accuracy")["Flow-GRPO"]
    curves = [figures.over(figures.read(name, pages.INTEL), run, *steps, "reward")
              for steps in ((1, 150), (141, 150))
              for name, run in (("hops-online", planning.ONLINE), ("hops-curve", "Flow-GRPO"))]
    yield f"(reward over all steps: {figures.difference(*curves[:2])} more)"
    gaps = [[a - b for a, b in zip(last, tested)] for last, tested in zip(curves[2:], (online, intel))]
    yield "by {}, Flow-GRPO's by {}".format(*map(figures.pm, gaps))
    yield f"p = {figures.difference(*gaps).p:.4f};"


def of_sections_3_to_5():
    """Errors, turns, and new solutions."""
    curve = figures.read("hops-curve")
    end = max(int(row["step"]) for row in curve)
    for column, scale, digits in (("reward", 1, 2), ("errors", 100, 0), ("plan_tokens", 1, 2)):
        for first in (1, end - 9):
            yield figures.pm(figures.over(curve, "Flow-GRPO", first, first + 9, column), digits, scale)
    lengths = {first: figures.over(curve, "Flow-GRPO", first, first + 9, "plan_tokens")
               for first in range(1, end, 10)}
    longest = max(lengths, key=lambda first: statistics.fmean(lengths[first]))
    *others, one = sorted(lengths[longest])
    yield f"in steps {longest}-{longest + 9}, with {statistics.fmean(lengths[longest]):.2f} on average"
    yield f"one seed ({one:.2f}; the others have {max(others):.2f} at most)"
    yield f"they change by {figures.pm([b - a for a, b in zip(lengths[longest], lengths[end - 9])], 2)}"
    accuracy = figures.gather(figures.read("hops-budget"), "max_turns", "accuracy")
    yield figures.pm([100 * (a - b) for a, b in zip(accuracy["8"], accuracy["5"])], 1)
    yield f"{pages.bins()[0][1]} of the {planning.TRIED}"
    never = [row for row in figures.read("hops-new") if row["solved"] == "0"]
    by_kind = {kind: [int(row[f"seed {n}"]) for row in never if row["kind"] == kind for n in range(5)]
               for kind in ("sum", "plus", "one")}
    yield "They are {} sums, {} plus and {} one".format(*(len(tries) // 5 for tries in by_kind.values()))
    yield "{:.2f}, {:.2f} and {:.2f} of them are right, much".format(*map(statistics.fmean, by_kind.values()))


def listed(values):
    """[0.971, 0.9, 0.88] -> "0.97, 0.90 and 0.88" """
    *others, last = (f"{value:.2f}" for value in values)
    return f"{', '.join(others)} and {last}"


def of_base_generator():
    """Section 1: with which mixture of questions is it unlearnt?"""
    mixtures = [row | {"share": int(row["base_generator"]) / int(row["plans_after_not_found"]),
                       "end": int(row["steps"].split("-")[1])} for row in figures.read("hops-mixtures")]
    last = {name: [row for row in mixtures if row["end"] == 150 and row["training"] == name]
            for name in ("38 %", "48 %", "48 % and fewer sums")}
    assert [row["seed"] for row in last["48 % and fewer sums"]] == ["2", "3"]  # "with fewer sums"
    after = [float(row["test_accuracy"]) < 0.6 for row in last["38 %"]]
    assert after == [False, False, True, True]  # "two of four seeds ... ended below 0.6"
    fewer = [row for row in mixtures if row["training"] == "38 %"]
    alike = {row["seed"]: 100 * row["share"] for row in fewer if row["end"] == 30}
    yield f"seed 1, which recovered, has {alike['1']:.1f} %, and seed 2, which did not, {alike['2']:.1f} %"
    late = max(row["share"] for row in fewer if int(row["seed"]) >= 2 and row["end"] > 30)
    yield f"at most {100 * late:.1f} % of their plans from step 31 on"
    assert all(row["share"] > 0.9 for row in last["48 %"])  # "none of five seeds did"
    fresh = [row for row in figures.read("hops-fresh", pages.INTEL) if row["planner"] == "Flow-GRPO"]
    shares = [int(row["base_generator"]) / int(row["plans_after_not_found"]) for row in fresh]
    assert len(shares) == 5 and min(shares) > 0.9  # "nor did the five fresh seeds"
    yield f"Fisher's exact p = {math.comb(4, 2) / math.comb(14, 2):.2f}"  # both failures among the four


def of_forks():
    """Section 8."""
    (forks, as_it_is), (rewards, base) = pages.forked("accuracy"), pages.forked("reward")
    turns = figures.gather(figures.read("hops-forks"), "run", "turns")["turn-cost"]
    left = 1 - statistics.fmean(as_it_is)
    five, nine = (figures.findable(forks["gigpo"], as_it_is, n) for n in (5, 9))
    yield f"no more than {left:.2f} is left to gain"
    yield f"only {left:.2f} is left to gain. Five seeds would find a true gain of {five:.2f} by GiGPO"
    yield f"(nine seeds: {nine:.2f})"
    yield f"takes {min(turns):.2f} to {max(turns):.2f} turns"
    assert max(forks["turn-cost"]) < 1.5 / 300  # "right in at most 1 of 300 questions"
    yield f"fewer of its rollouts are right, by {figures.difference(base, rewards['dr-grpo'])}"
    tested, training = (pages.with_holm(*pages.forked(column)) for column in ("accuracy", "reward"))
    below = lambda changes: {name for name, (_, p) in changes.items() if float(p) < 0.05}
    assert below(tested) == {"last-turn", "turn-cost"} == below(training) - {"dr-grpo"}


def of_other_designs():
    """Sections 6 and 7."""
    curve = figures.read("hops-monolith")
    one, flow = (figures.over(curve, run, 1, 1, "test_after") for run in ("monolith", "flow"))
    yield f"It gets {listed(one)} of the test questions, the flow {listed(flow)}"
    more = figures.difference(one, flow)
    yield f"({more} more, p = {more.p:.2f})"
    slower = figures.difference(*(figures.over(curve, run, 1, 150, "reward") for run in ("flow", "monolith")))
    yield f"(over all steps, by {slower})"
    rewards = [figures.over(figures.read(name, pages.INTEL), run, 1, 150, "reward")
               for name, run in (("hops-monolith", "monolith"), ("hops-curve", "Flow-GRPO"))]
    yield f"faster on the Intel (by {figures.difference(*rewards)})"
    sizes = figures.read("hops-sizes")
    small, large = (figures.over(sizes, run, 1, 1, "test_after") for run in ("width 64", "width 128"))
    yield "The small one gets {:.2f}, {:.2f} and {:.2f} of the test questions".format(*small)
    less = figures.difference(large, small)
    yield f"(by {less}, p = {less.p:.2f})"
    flow = figures.over(figures.read("hops-curve", pages.INTEL), "Flow-GRPO", 1, 1, "test_after")
    assert len(flow) == 5  # "the flow's five seeds"
    one, small = (figures.over(figures.read(name, pages.INTEL), run, 1, 1, "test_after")
                  for name, run in (("hops-monolith", "monolith"), ("hops-sizes", "width 64")))
    yield (f"it gets {listed(one)}, the difference from the flow's five seeds is "
           f"{figures.difference(one, flow)}.")
    yield f"on the Intel it gets {listed(small)}, less by only {figures.difference(flow, small)}"


def of_smollm():
    """Section 9."""
    ps = sorted(float(row["p"]) for row in figures.read("smollm-paired")
                if (row["roles"], row["set"], row["before"], row["after"])
                == ("planner", "toy", "Flow-GRPO", "perfect planner"))
    assert [p < 0.05 for p in ps] == [True] * 3 + [False] * 2
    yield "p = " + ", ".join(f"{p:.0e}".replace("e-0", "e-") for p in ps[:3])
    warm, *seeds = map(statistics.fmean, figures.gather(figures.read("smollm-hops"), "planner",
                                                        "right").values())
    assert len(seeds) == 3
    yield (f"goes from {warm:.2f} to {statistics.fmean(seeds):.2f} (three seeds, {min(seeds):.2f} to "
           f"{max(seeds):.2f}; 120 test questions about 20 other things)")
    alone = figures.gather(figures.read("smollm-hops-all"), "planner", "right")
    yield "one seed goes from {:.2f} to {:.2f} in 25 steps".format(*map(statistics.fmean, alone.values()))


@pytest.mark.parametrize("number", list(sentences()))
def test_the_sentences_of_results_say_what_the_csv_files_say(number):
    prose = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", RESULTS, flags=re.DOTALL)
    assert number in " ".join(prose.split())


def test_every_table_of_todays_measurements_is_made_by_the_script():
    rest = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", RESULTS, flags=re.DOTALL)
    assert rest.split("\n## 9.")[0].count("\n|---|") == 1  # that of the claims
    assert sorted(re.findall("<!-- ([a-z-]+) -->", RESULTS)) == sorted([*pages.PAGES, "mixtures", "two-cpus"])


def test_the_table_of_mixtures_is_what_the_script_makes():
    assert between_comments("mixtures") == pages.mixtures_table() + "\n"


def test_the_intervals_of_two_cpus_overlap():
    assert between_comments("two-cpus") == pages.two_cpus_table() + "\n"
    epyc, intel = pages.measures(figures.RESULTS), pages.measures(pages.INTEL)
    for what in epyc:
        (one, half), (other, other_half) = figures.mean(epyc[what]), figures.mean(intel[what])
        assert abs(one - other) <= half + other_half, what


def test_readmes_table_of_seeds_is_what_the_script_makes():
    readme = (runs.ROOT / "README.md").read_text(encoding="utf-8")
    assert between_comments("toy-seeds", readme) == pages.toy_table() + "\n"


def test_readmes_sentences_on_the_second_toy_are_those_of_the_csv_files():
    readme = " ".join((runs.ROOT / "README.md").read_text(encoding="utf-8").split())
    tests = figures.gather(figures.read("hops-tests"), "planner", "accuracy")
    before, after = (statistics.fmean(tests[who]) for who in ("untrained", "Flow-GRPO"))
    low, high = min(tests["Flow-GRPO"]), max(tests["Flow-GRPO"])
    assert len(tests["Flow-GRPO"]) == 5
    assert "Five seeds of `python train.py --model toy/hops --seed N`" in readme
    assert f"go from {before:.2f} to {after:.2f} on average ({low:.2f} to {high:.2f}), in 20 to 27" in readme
    best = float(pages.best_router()[""]["accuracy"])
    assert ("Of six rules that choose the tool without reading results (*routers*), the best gets "
            f"{best:.2f}") in readme
    smollm = figures.gather(figures.read("smollm-hops"), "planner", "right")
    warm, *seeds = map(statistics.fmean, smollm.values())
    assert f"from {warm:.2f} to {statistics.fmean(seeds):.2f} (three seeds)" in readme
    alone = figures.gather(figures.read("smollm-hops-all"), "planner", "right")
    assert "from {:.2f} to {:.2f} (one seed)".format(*map(statistics.fmean, alone.values())) in readme


@pytest.mark.parametrize("name, key", [("hops-ways", "planner"), ("hops-budget", "max_turns")])
def test_the_tables_show_the_means_of_the_csv_files(name, key):
    rows, shown = figures.read(name), between_comments(name)
    for value in dict.fromkeys(row[key] for row in rows):
        seeds = [float(row["accuracy"]) for row in rows if row[key] == value]
        interval = " ±" if len(seeds) > 1 else " +|"
        cells = rf"^\| {re.escape(value)} +\| (?:[a-z 0-9]*\| +)*{statistics.fmean(seeds):.3f}{interval}"
        assert re.search(cells, shown, re.MULTILINE)


@pytest.mark.parametrize("picture", [*figures.RESULTS.glob("*.svg"), figures.FOLDER / "curve.svg",
                                     runs.ROOT / "docs" / "flow.svg"], ids=lambda path: path.name)
def test_no_picture_has_a_background_and_all_use_one_palette(picture):
    text = picture.read_text(encoding="utf-8")
    colours = set(re.findall(r"#[0-9a-f]{6}\b", text))
    assert colours <= {*figures.COLOURS, figures.INK, "#ffffff"}  # white: numbers on bars
    assert "#ffffff" not in colours or picture.name == "hops-tools.svg"


def luminance(colour):
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
def test_the_palette_can_be_read_on_a_white_and_on_a_dark_page(page):
    for colour, least in [*((colour, 3.5) for colour in figures.COLOURS), (figures.INK, 4.2)]:
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


def curve(run, seed, reward):
    """150 rows of a curve whose reward rises from 0.1 to `reward`."""
    return [{"run": run, "seed": seed, "step": step, "reward": 0.1 + (reward - 0.1) * step / 150,
             "errors": 0.1, "test_before": 0.1, "test_after": reward - 0.05} for step in range(1, 151)]


@pytest.fixture
def measured(folder, monkeypatch):
    """CSV files as the analyses write them, of three seeds."""
    monkeypatch.setattr(figures, "RESULTS", folder)
    for name, (first, second) in {"hops-monolith": ("monolith", "flow"),
                                  "hops-sizes": ("width 128", "width 64")}.items():
        rows = [row for run, reward in ((first, 0.6), (second, 0.7)) for seed in range(3)
                for row in curve(run, seed, reward + 0.01 * seed)]
        figures.write(figures.path_of(name), rows)
    figures.write(figures.path_of("hops-forks"), [
        {"run": run, "seed": seed, "accuracy": accuracy + 0.01 * seed,
         "reward": (accuracy + 0.01 * seed) / 2}
        for seed in range(3) for run, accuracy in (
            ("gigpo", 0.6 + 0.01 * seed), ("token-mean", 0.8), ("as it is", 0.7))])
    return folder


def test_four_studies_of_five_find_what_is_findable():
    rng, values, studies = random.Random(0), [-1.0, -0.5, 0.0, 0.5, 1.0], 4000
    mean, sigma = figures.findable(values, values), statistics.stdev(values)
    limit = figures.t_of(8)  # Student's test, of two sets with equal scatter
    found = 0
    for _ in range(studies):
        some, others = ([rng.gauss(middle, sigma) for _ in values] for middle in (mean, 0))
        error = ((statistics.variance(some) + statistics.variance(others)) / 5) ** 0.5
        found += abs(statistics.fmean(some) - statistics.fmean(others)) > limit * error
    assert abs(found / studies - 0.8) < 4 * math.sqrt(0.8 * 0.2 / studies)
    assert figures.findable(values, values, 9) < 0.75 * mean


def test_a_curves_table_has_both_ends_of_the_reward_both_tests_and_their_gap(measured):
    table = pages.compared_table("hops-monolith")
    assert "| reward, steps 141-150 |" in table and "| last steps minus test |" in table
    row = next(line for line in table.splitlines() if line.startswith("| flow "))
    assert [cell.split()[0] for cell in row.split("|")[2:-1]] == ["0.122", "0.692", "0.100", "0.660", "0.032"]


def test_a_fork_is_compared_with_the_planner_as_it_is(measured):
    values, as_it_is = pages.forked("accuracy")
    assert list(values) == ["gigpo", "token-mean"] and as_it_is == pytest.approx([0.7, 0.71, 0.72])
    assert figures.difference(values["gigpo"], as_it_is).mean == pytest.approx(-0.09)


@pytest.mark.extras("matplotlib")
@pytest.mark.parametrize("name", ["hops-monolith", "hops-sizes", "hops-forks"])
def test_new_csv_files_become_tables_and_pictures(measured, name):
    import matplotlib.pyplot as plt
    assert "n = 3 seeds" in pages.block(name)
    pages.draw(plt, name)
    assert (measured / f"{name}.svg").exists()


def test_the_trace_of_a_new_solution_is_the_longest_of_those_that_no_try_solved(folder, monkeypatch):
    monkeypatch.setattr(planning, "TRIES", 2)
    analysis = planning.new(2)
    many, *tests = next(analysis)
    step = {"turn": 1, "sub_goal": "Find", "tool": "web_search", "result": "a\nb"}

    def write(run, name, right, turns):
        run.folder.mkdir(exist_ok=True)
        rows = [{"id": n, "kind": "one", "question": f"{n}?", "answer": "7", "right": one,
                 "memory": {"steps": [step] * turns[n]}} for n, one in enumerate(right)]
        (run.folder / f"questions-{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    for trial, right in enumerate(([1, 0, 0, 0], [1, 0, 0, 0])):
        write(many, trial, right, [1] * 4)
    write(tests[0], 0, [1, 1, 1, 0], [5, 2, 3, 4])  # solved before; new; new and longer; not solved
    write(tests[1], 0, [1, 1, 0, 0], [1] * 4)
    (_, counts), (name, turns) = analysis
    assert [(row["solved"], row["seed 0"], row["seed 1"]) for row in counts] == [
        (2, 1, 1), (0, 1, 1), (0, 1, 0), (0, 0, 0)]
    assert name == "hops-trace" and [row["question"] for row in turns] == ["2?"] * 3


def test_an_old_name_counts_as_known_if_the_first_sub_goal_on_it_has_the_new_one():
    (one, new), (other, newer), *_ = World(0).renamed.items()
    steps = [{"sub_goal": f"{GOAL}{name}"} for name in ("Bavok", new, one, other)]
    rollout = {"question": f"The sum of {one} and {other}?", "memory": {"steps": steps}}
    assert planning.looked_up([rollout]) == (2, 1)
    assert planning.looked_up([{"question": f"{one}?", "memory": {"steps": []}}]) == (0, 0)


def test_the_forks_numbers_reach_the_table_and_the_heads(measured, monkeypatch):
    monkeypatch.setattr(runs, "path_of", lambda edit: measured / f"{Path(edit).name}.diff")
    (measured / "gigpo.diff").write_text("GiGPO\nresult: another, before\n--- a/x\n")
    pages.write_results()
    assert (measured / "gigpo.diff").read_text() == (
        "GiGPO\nresult: -0.090 ± 0.042 in accuracy, 3 seeds (experiments/RESULTS.md, section 8)\n--- a/x\n")
    # an error of √(0.0004 / 3 + 0.0001 / 3) = 0.0129, with 2.94 degrees of freedom: t(0.975) is 3.22
    cells = ["gigpo", "0.60 0.62 0.64", "-0.090 ± 0.042", "0.006", "0.06", "-0.045 ± 0.021", "0.006"]
    assert re.search(" +[|] ".join(map(re.escape, cells)), pages.forks_table())


def test_hops_forks_csv_grades_by_right_or_wrong_whatever_the_reward_was(folder, monkeypatch):
    monkeypatch.setattr(planning, "FORKS", ("turn-cost",))
    analysis = planning.forks(2)
    step = {"error": False}
    for test in next(analysis):
        (run,) = test.after
        for made, name, right in ((test, "questions-0", [1]), (run, "rollouts", [1, 0, 0, 0])):
            made.folder.mkdir()
            records = [{"right": one, "reward": one - 0.3, "memory": {"steps": [step]}} for one in right]
            (made.folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    (name, rows), = analysis
    assert name == "hops-forks" and len(rows) == 6
    assert {(row["run"], row["accuracy"], row["reward"]) for row in rows} == {
        (run, 1, 0.25) for run in ("turn-cost", "token-mean", "as it is")}


EARLIER = r"-?0.\d{3} ± 0.\d{3} in accuracy, 9 seeds, in an easier world " \
          r"\(git show 80a4902:experiments/RESULTS.md\)|none: .+|not measured yet"


@pytest.mark.parametrize("fork", sorted(path.stem for path in (figures.FOLDER / "forks").glob("*.diff")))
def test_the_result_in_the_head_of_a_fork_is_measured_here_or_earlier_or_not(fork):
    result, measured = runs.note(f"forks/{fork}", "result"), pages.fork_results()
    assert result == measured[fork] if fork in measured else re.fullmatch(EARLIER, result)
