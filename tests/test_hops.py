"""The second toy: the right tool depends on what the memory holds, and no router finds it."""

import json
from collections import Counter

import pytest
import torch

import planner
import solve
import tools as toolset
from cli import command_line
from cli.cast import toy_warning
from experiments import figures, hops
from models.completion import Completion
from toy.hops import pieces, questions, teacher
from toy.hops.make import BASE_GENERATOR, HOPS, load_modules, make_files, quick_python
from toy.hops.questions import KINDS, MAX_TURNS, World, for_flow
from world.sandbox import python_coder
from world.toolbox import choose


@pytest.fixture(scope="module")
def modules():
    return load_modules()


@pytest.fixture(scope="module")
def engine(modules):
    return modules["default"]


@pytest.fixture(scope="module")
def tools():
    return choose(toolset.TOOLS, list(teacher.TOOLS), HOPS / "corpus.jsonl")


@pytest.fixture(scope="module")
def world():
    return World(0)


@pytest.fixture(scope="module")
def made(world):
    return questions.splits(world)


# ---- its files ---------------------------------------------------------------------------------------------


def test_the_committed_corpus_and_questions_are_those_that_make_py_makes(tmp_path):
    make_files(tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {*(file.name for file in HOPS.glob("*.jsonl")), "train.json"}
    assert all((tmp_path / name).read_bytes() == (HOPS / name).read_bytes() for name in names)


def test_the_model_is_small_and_each_piece_of_its_prompts_is_one_token(engine):
    """If this fails, a prompt has changed since the toy was made: run python toy/hops/make.py."""
    assert sum(p.numel() for p in engine.model.parameters()) <= 2_400_000
    assert sum(file.stat().st_size for file in HOPS.iterdir() if file.is_file()) <= 8_000_000
    encode = lambda piece: engine.tokenizer.encode(piece, add_special_tokens=False)
    assert [piece for piece in pieces.prompt_pieces() if len(encode(piece)) != 1] == []


def test_train_py_knows_its_settings(engine, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "sys.argv", ["train.py", "--model", str(HOPS), "--out", str(tmp_path / "run")]
    )
    args = command_line.train_arguments(toolset.TOOLS)
    assert (
        args.data == str(HOPS / "train.jsonl")
        and args.max_turns == MAX_TURNS
        and args.judge is None
    )
    assert args.base_generator == str(BASE_GENERATOR) and args.fixed == str(HOPS.resolve())
    assert args.tools == list(teacher.TOOLS) and args.corpus == str(
        (HOPS / "corpus.jsonl").resolve()
    )
    assert toy_warning(engine, {}, args.tools) == ""


# ---- its questions -----------------------------------------------------------------------------------------


def test_nothing_that_leads_to_a_number_of_a_test_question_is_in_a_training_question(world, made):
    names = {split: {name for row in made[split] for name in row["names"]} for split in made}
    assert names["test"] and not names["test"] & (names["train"] | names["valid"])
    texts = [row["question"] for split in made.values() for row in split]
    assert len(texts) == len(set(texts))
    openings = questions.OPENINGS
    assert not set(openings[0]) & set(openings[1])


def test_questions_need_two_to_five_calls(made):
    calls = Counter(len("".join(hops.needed(row))) for row in made["test"])
    assert set(calls) == {2, 3, 4, 5} and min(calls.values()) > 0.1 * len(made["test"])


def test_every_answer_is_what_perfect_plans_and_perfect_modules_find(tools, world, made):
    rows = made["test"][:60]
    perfect = teacher.Teacher(rows, world.renamed)
    metrics, rollouts = solve.evaluate(for_flow(rows), perfect, perfect, tools, max_turns=MAX_TURNS)
    assert metrics["accuracy"] == 1
    letters = {name: letter for letter, name in hops.LETTERS.items()}
    used = ["".join(letters[step.tool] for step in rollout.memory.steps) for rollout in rollouts]
    assert used == ["".join(hops.needed(row)) for row in rows]


def finishes(paths, sequence):
    return hops.finishes(paths, lambda turn, goal: sequence[turn])


def test_no_sequence_of_tools_answers_more_than_055_even_with_perfect_sub_goals(made):
    right = 0
    for kind in KINDS:
        test = [row for row in made["test"] if row["kind"] == kind]
        sequence = hops.best_sequence(
            test
        )  # of these very questions: no router can choose a better one
        right += sum(finishes(hops.needed(row), sequence) for row in test)
        assert hops.kind_of(test[0]["question"]) == kind
    assert right <= 0.55 * len(made["test"])


def test_the_rule_that_routers_are_chosen_by_predicts_their_rollouts(made):
    shown = {
        row["route"]: row for row in figures.read("hops-routers") if row["planner"] == "perfect"
    }
    for kind in KINDS:
        train, test = (
            [row for row in made[split] if row["kind"] == kind] for split in ("train", "test")
        )
        sequence, table = hops.best_sequence(train), hops.best_table(train)
        rules = {"sequence": lambda turn, goal: sequence[turn], "plan": lambda *place: table[place]}
        for route, tool_at in rules.items():
            right = sum(hops.finishes(hops.needed(row), tool_at) for row in test)
            assert float(shown[route][kind]) == pytest.approx(right / len(test), abs=1e-4)


@pytest.mark.parametrize(
    "question, name, goal",
    [
        ("Give me the sum of the numbers of Regar and Ralir?", "Regar", "first"),
        ("Give me the sum of the numbers of Regar and Ralir?", "Ralir", "second"),
        ("What is the number of Regar plus the number of Ralir", "Ralir", "second"),
        ("What is 7 plus the number of Regar?", "Regar", "first"),
        ("What is the number of Regar?", "Tirun", "new"),
        ("What is the number of Regar plus 7?", "Regar plus 7", "sum"),
    ],
)
def test_what_a_sub_goal_asks_for(question, name, goal):
    plan = planner.Plan("none", f"{teacher.GOAL}{name}", "web_search")
    assert hops.goal_in(plan, question) == goal


def test_the_simulated_sub_goals_are_those_of_the_perfect_planner(tools, world, made):
    rows = made["test"][::3]
    perfect, seen = teacher.Teacher(rows, world.renamed), []

    def choose(prompt, plan):
        seen.append((*hops.state(prompt), hops.goal_in(plan, hops.state(prompt)[0])))
        return plan.tool

    solve.evaluate(
        for_flow(rows), hops.Routed(perfect, tools, choose), perfect, tools, max_turns=MAX_TURNS
    )
    expected = set()
    for row in rows:
        letters = iter("".join(hops.needed(row)))

        def tool_at(turn, goal, text=row["question"], letters=letters):
            expected.add((text, turn + 1, goal))
            return next(letters)

        assert hops.finishes(hops.needed(row), tool_at)
    assert set(seen) == expected


@pytest.mark.parametrize(
    "paths, sequence, finished",
    [
        (("wbp",), "wbpgg", True),
        (("wbp",), "wbgpp", False),
        (("wbp",), "wbbpp", True),
        (("wbp",), "wbwbp", True),
        (("wbp",), "wbwpg", False),  # a search shows the address again
        (("wbw",), "wbwgg", True),
        (("w", "wp", "p"), "wwpwp", True),
        (("wp", "w", "p"), "wwpwp", True),
    ],
)
def test_what_a_sequence_of_tools_finds(paths, sequence, finished):
    assert finishes(paths, sequence) == finished


def test_bm25_finds_the_tool_whose_description_shares_the_rare_words(tools):
    assert hops.nearest("exact calculation of a value", tools) == "python_coder"
    assert hops.nearest("passages of Wikipedia", tools) == "wikipedia_search"
    assert hops.nearest("???", tools) in tools


def test_a_router_replaces_the_tool_of_a_plan_and_leaves_what_does_not_parse(tools):
    texts = "Context: none\nSub-goal: Find it\nTool: python_coder", "I would search."
    engine = lambda prompts, **settings: [Completion(text, [1], [2]) for text in texts]
    routed = hops.Routed(engine, tools, lambda prompt, plan: "web_search")(
        ["a", "b"], temperature=0.7
    )
    assert [done.text for done in routed] == [
        "Context: none\nSub-goal: Find it\nTool: web_search",
        texts[1],
    ]
    assert routed[0].ids == [2]


def test_the_sub_goals_of_a_perfect_planner_do_not_say_which_tool_is_right(world, made):
    """All begin with the same three words, whatever the tool: a router by them has one tool for all."""
    rows = made["test"][:60]
    perfect = teacher.Teacher(rows, world.renamed)
    tools = choose(toolset.TOOLS, list(teacher.TOOLS), HOPS / "corpus.jsonl")
    rollouts = solve.roll_out(for_flow(rows), perfect, perfect, tools, MAX_TURNS)
    steps = [step for rollout in rollouts for step in rollout.memory.steps]
    assert {hops.opening(step.sub_goal) for step in steps} == {("find", "the", "number")}
    assert max(Counter(step.tool for step in steps).values()) < 0.55 * len(steps)


# ---- its parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["7 * 4", "30 + 26", "none", "https://hops.org/117"])
def test_the_teachers_programs_print_in_the_sandbox_what_make_py_takes_them_to_print(context):
    code = f"number = {context}; print(number)"
    assert python_coder(code) == quick_python(code)


def test_the_tools_results_are_those_that_the_toy_has_read(tools):
    calls = [
        ("web_search", {"url": "none", "query": "x"}),
        ("web_search", {"url": "7 * 4", "query": "x"}),
        ("web_search", {"url": "https://hops.org/999", "query": "x"}),
    ]
    for tool, arguments in calls:
        assert (
            toolset.run_tool(tools, tool, arguments).text.removeprefix("Error:")
            in pieces.prompt_pieces()
        )
    page = next(row for row in World(0).rows if "url" in row)
    result = toolset.run_tool(
        tools, "web_search", {"url": page["url"], "query": "number of Bavok"}
    ).text
    assert result == f"[1] passage 1 of 1 ({page['url']}): {page['text']}"


def test_with_perfect_plans_the_toys_fixed_modules_answer_right(modules, tools, world, made):
    """make.py demands 0.97 of 300. Of these the toy had all; a format that it cannot read loses most."""
    rows = made["test"][:20]
    perfect = teacher.Teacher(rows, world.renamed)
    metrics, _ = solve.evaluate(for_flow(rows), perfect, modules, tools, max_turns=MAX_TURNS)
    assert metrics["accuracy"] >= 0.94


def test_the_toys_own_planner_is_readable_but_blind(engine, tools, world, made):
    """One plan for each of the 94 states of perfect rollouts. By chance 27 of the tools are right, give or
    take 4.4, and base_generator, which is drawn least, is in 17."""
    rows, prompts, right = made["test"][:25], [], []
    rules = teacher.Teacher(rows, world.renamed)

    def perfect(batch, **settings):
        completions = rules(batch)
        prompts.extend(batch)
        right.extend(planner.parse(completion.text, tools).tool for completion in completions)
        return completions

    solve.roll_out(for_flow(rows), perfect, rules, tools, MAX_TURNS)
    torch.manual_seed(0)
    drawn = [
        planner.parse(completion.text, tools).tool
        for completion in engine(prompts, temperature=0.7)
    ]
    assert len(drawn) > 80 and sum(map(str.__eq__, drawn, right)) < 0.45 * len(drawn)
    counts = Counter(drawn)
    assert len(counts) == 4 and min(counts.values()) > 0.05 * len(drawn)


@pytest.mark.exhaustive
def test_with_its_own_planner_the_toy_answers_few_questions(modules, tools, made):
    torch.manual_seed(0)
    questions = for_flow(made["test"][:100])
    metrics, _ = solve.evaluate(questions, modules["default"], modules, tools, max_turns=MAX_TURNS)
    assert metrics["accuracy"] <= 0.15 and metrics["calls"].get("unreadable", 0) == 0
    calls = [n for n, _, _ in metrics["calls"].values()]
    assert len(calls) == 4 and min(calls) > 0.05 * sum(calls)


@pytest.mark.parametrize(
    "first, second",
    [("30.", "47, but see https://hops.org/117"), ("47, but see https://hops.org/117", "30.")],
)
def test_two_sources_that_contradict_each_other_are_settled_by_the_page_that_they_name(
    first, second
):
    memory = (
        f"\nMemory:\nStep 1\nTool: wikipedia_search\nSub-goal: {teacher.GOAL}Bavok\nCommand: ...\n"
        f"Result: [1] Bavok: The number of Bavok is {first}\n"
        f"  [2] Bavok: The number of Bavok is {second}"
    )
    read = teacher.Memory(memory)
    assert read.known["Bavok"] == ("url", "https://hops.org/117") == (read.last, read.pointer)


def test_of_names_that_lead_back_to_themselves_nothing_is_known():
    memory = "\nMemory:\n" + "\n\n".join(
        f"Step 1\nTool: base_generator\nSub-goal: {teacher.GOAL}{name}\nCommand: ...\nResult: "
        f"{teacher.RENAMED.format(other)}"
        for name, other in (("Bavok", "Tivor"), ("Tivor", "Bavok"))
    )
    assert teacher.Memory(memory).resolve("Bavok") == ("Bavok", None)


def test_old_names_are_known_to_base_generator_alone(modules, world):
    prompts = [f"number of {old}" for old in world.renamed]
    known = [teacher.RENAMED.format(new) for new in world.renamed.values()]
    assert [completion.text for completion in modules["base_generator"](prompts)] == known
    assert not set(known) & {completion.text for completion in modules["default"](prompts)}
    rows = json.dumps(world.rows)
    assert not any(old in rows for old in world.renamed)


def test_which_name_is_new_differs_between_worlds_so_that_a_warm_start_teaches_none(world):
    other = World(1).renamed
    assert other.keys() == world.renamed.keys() and {*other.values()} == {*world.renamed.values()}
    assert sum(other[old] == new for old, new in world.renamed.items()) < 10  # by chance about one
