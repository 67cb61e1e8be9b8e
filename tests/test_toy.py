"""The toy: do answers follow from its corpus, is planning needed, does the model play its parts?"""

import json
import random
import re
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch

import executor
import planner
import solve
from flow_grpo import distribution
from memory import Memory
from models.local import load
from record.metrics import share
from tools import choose, run_tool
from toy import routers
from toy.make import TOY, make_files, quick_python
from toy.pieces import edited, pieces_of
from toy.questions import SIGNS, World, facts, for_flow, operate, splits
from toy.teacher import GUESS, TOOLS, Known, Teacher
from world.sandbox import python_coder


@pytest.fixture(scope="module")
def engine():
    return load(str(TOY), distribution)


@pytest.fixture(scope="module")
def tools():
    chosen = choose(list(TOOLS), TOY / "corpus.jsonl")
    return chosen | {"python_coder": replace(chosen["python_coder"], run=quick_python)}


@pytest.fixture(scope="module")
def world():
    return World()


@pytest.fixture(scope="module")
def made(world):
    return splits(world)


def rows(name):
    return [json.loads(line) for line in (TOY / name).read_text().splitlines()]


# ---- its questions
# -----------------------------------------------------------------------------------------


def test_the_committed_corpus_and_questions_are_those_that_make_py_makes(tmp_path):
    make_files(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in TOY.glob("*.jsonl")}
    assert all(file.read_bytes() == (TOY / file.name).read_bytes() for file in tmp_path.iterdir())


def followed(what, name, corpus, known):
    """(the number that the sources give, how many calls it takes): another reading of them."""
    texts = [row["text"] for row in corpus if row["title"] == name and what in row["text"]]
    if not texts:
        return known[f"{what.split()[-1]} of {name}"], 2
    text, calls = texts[-1] if "https" in texts[-1] else texts[0], 1
    if address := re.search(r"https\S+", text):
        [text] = [row["text"] for row in corpus if row.get("url") == address[0]]
        calls += 1
    if filed := re.search(r"filed as (\w+)", text):
        number, more = followed(what, filed[1], corpus, known)
        return number, calls + more
    shown = re.search(r"is (\d+)(?: ([-+*]) (\d+))?\.", text)
    number = int(shown[1])
    if shown[2]:
        number, calls = operate(number, shown[2], int(shown[3])), calls + 1
    return number, calls


@pytest.mark.parametrize("split, most", [("test", 3), ("long", 5), ("valid", 3)])
def test_every_answer_follows_from_the_sources_in_at_most_so_many_calls_and_is_true(
    split, most, made, world
):
    true = {name: number for _, number, names in facts() for name in names}
    corpus, known = rows("corpus.jsonl"), world.known()
    for row in made[split]:
        number, calls = followed(row["what"], row["name"], corpus, known)
        assert number == true[row["name"]]
        assert row["name"] in row["question"] and row["what"] in row["question"]
        if row["op"]:
            number, calls = operate(number, SIGNS[row["op"]], row["n"]), calls + 1
        assert row["answer"] == str(number) and calls == len(row["kind"]) <= most


def test_no_name_of_the_test_and_nothing_that_leads_to_its_number_is_in_training(made, world):
    of = lambda what, *names: {row[what] for name in names for row in made[name]}
    assert not of("name", "test", "long") & of("name", "train", "valid")
    assert not of("question", "train") & of("question", "valid")
    pairs = {frozenset(names) for _, _, names in facts()}
    test = {thing.name for thing in world.things["test"]}
    # a page leads to the other name of a pair alone
    assert all(pair <= test or not pair & test for pair in pairs)
    addresses = [row["url"] for row in world.rows if "url" in row]
    assert len(addresses) == len(set(addresses))


def test_what_leads_to_a_number_does_not_depend_on_how_the_question_is_worded(made):
    """No opening, ending or kind of thing tells much: the most frequent path stays rare."""
    words = defaultdict(Counter)
    for row in made["train"]:
        for part in (
            row["question"].split(row["what"])[0],
            row["question"].split()[-1].strip(".?"),
            row["what"],
        ):
            words[part, bool(row["op"])][row["kind"]] += 1
    assert all(
        max(paths.values()) < 0.45 * paths.total() for paths in words.values() if paths.total() > 60
    )


def test_base_generator_alone_knows_the_numbers_that_no_source_has(world, tools):
    corpus = json.dumps(world.rows)
    for query in world.known():
        assert query.split(" of ")[1] not in re.findall(r"\w+", corpus)
        assert run_tool(tools["wikipedia_search"].run, "", {"query": query}).text.startswith(
            "Error: no passage"
        )


def test_other_worlds_have_other_numbers_pairs_and_paths_so_that_a_warm_start_teaches_none(world):
    other = World(1)
    path = {thing.name: thing.path for things in world.things.values() for thing in things}
    things = [thing for things in other.things.values() for thing in things]
    assert {thing.name for thing in things} == set(path)
    assert sum(path[thing.name] == thing.path for thing in things) < 0.3 * len(things)
    true = {name: number for _, number, names in facts() for name in names}
    assert sum(true[thing.name] == thing.number for thing in things) < 10


# ---- planning is needed
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("split, turns", [("test", 3), ("long", 5)])
def test_a_perfect_planner_answers_everything_by_the_path_of_each_question(
    split, turns, tools, world, made
):
    teacher = Teacher(made[split], world.known())
    rollouts = solve.roll_out(for_flow(made[split]), teacher, teacher, tools, max_turns=turns)
    assert all(rollout.right for rollout in rollouts)
    letters = {name: letter for letter, name in routers.LETTERS.items()}
    used = ["".join(letters[step.tool] for step in rollout.memory.steps) for rollout in rollouts]
    assert used == [row["kind"].replace("+", "p") for row in made[split]]


def test_no_sequence_and_no_table_of_tools_answers_more_than_060_even_with_perfect_sub_goals(made):
    right = Counter()
    for kind in {routers.kind_of(row["question"]) for row in made["test"]}:
        paths = Counter(
            row["kind"] for row in made["test"] if routers.kind_of(row["question"]) == kind
        )
        # fitted to these very questions
        sequence, table = (
            routers.best(paths, places) for places in (routers.TURNS, routers.PLACES)
        )
        rules = {
            "sequence": lambda turn, goal: sequence[turn],
            "table": lambda *place: table[place],
        }
        for name, tool_at in rules.items():
            right[name] += sum(n for path, n in paths.items() if routers.finishes(path, tool_at))
    assert max(right.values()) <= 0.60 * len(made["test"])


@pytest.mark.parametrize(
    "path, tools_of_turns, right",
    [
        ("wbp", "wbp", True),
        ("wbp", "wwb", False),
        ("wbw", "wbw", True),
        ("wb", "wpb", True),
        ("wb", "wgb", False),
        ("wg", "gww", True),
        ("wg+", "gpw", True),
        ("w+", "wwp", True),
    ],
)
def test_the_rule_that_routers_are_chosen_by_is_what_their_rollouts_do(
    path, tools_of_turns, right, tools, world, made
):
    assert routers.finishes(path, lambda turn, goal: tools_of_turns[turn - 1]) == right
    questions = [row for row in made["test"] if row["kind"] == path][:5]
    teacher = Teacher(questions, world.known())
    rule = lambda prompt, plan: routers.LETTERS[tools_of_turns[prompt.count("\nVerdict: ")]]
    rollouts = solve.roll_out(
        for_flow(questions), routers.Routed(teacher, tools, rule), teacher, tools
    )
    assert [rollout.right for rollout in rollouts] == [right] * len(questions)


def test_the_nearest_router_picks_the_tool_whose_description_is_nearest_to_the_sub_goal(tools):
    nearest = routers.rules([], tools, {"frequent": {(): None}})["bm25"]
    for name, tool in tools.items():
        assert nearest("", planner.Plan("", tool.description, "another")) == name


def test_two_sources_that_contradict_each_other_are_settled_by_the_page_that_they_name():
    text, page = "Oslo: The calling code of Oslo is", "https://facts.org/117"
    step = "\nMemory:\nStep 1\nSub-goal: Find the code of Oslo\nCommand: ...\nResult: "
    for first, second in (("30.", f"47, but see {page}"), (f"47, but see {page}", "30.")):
        known = Known(f"{step}[1] {text} {first}\n  [2] {text} {second}")
        assert known.goals["code of Oslo"] == ("address", page) == (known.last, known.pointer)


# ---- its prompts and tools
# ---------------------------------------------------------------------------------


def test_every_piece_of_what_the_modules_read_and_write_is_one_token_of_the_toy(
    engine, tools, world, made
):
    """If this fails, a prompt has changed since the toy was made: run python toy/make.py."""
    teacher = Teacher(made["test"], world.known())
    solve.roll_out(for_flow(made["test"]), teacher, teacher, tools)
    encode = lambda piece: engine.tokenizer.encode(piece, add_special_tokens=False)
    assert [piece for piece in pieces_of(teacher.examples) if len(encode(piece)) != 1] == []


@pytest.mark.parametrize(
    "context", ["7 * 4", "30 + 26", "30 - 26", "none", "https://facts.org/117", "7"]
)
def test_the_teachers_programs_print_in_the_sandbox_what_make_py_takes_them_to_print(context):
    code = f"number = {context}; print(number)"
    assert python_coder(code) == quick_python(code)


def test_the_tools_errors_are_those_that_the_toy_has_read(engine, tools):
    pages = [{"url": url, "query": "x"} for url in ("none", "7 * 4")]
    errors = [run_tool(tools["web_search"].run, "", arguments).text for arguments in pages]
    errors += [
        quick_python(f"number = {context}; print(number)")
        for context in ("none", "https://facts.org/117")
    ]
    for error in errors:
        assert len(engine.tokenizer.encode(f"\nResult: {error}", add_special_tokens=False)) <= 3


def test_an_edit_leaves_the_question_as_it_is():
    rng, prompt = random.Random(0), planner.prompt(Memory("What is the calling code of Oslo?"), {})
    texts = {edited(prompt, rng) for _ in range(100)}
    assert len(texts) > 30 and all("What is the calling code of Oslo?" in text for text in texts)


# ---- its model
# ---------------------------------------------------------------------------------------------


def test_with_perfect_plans_the_toys_fixed_modules_answer_right(engine, tools, world, made):
    for questions, turns in ((made["test"][:15], 3), (made["long"][:8], 5)):
        teacher = Teacher(questions, world.known())
        rollouts = solve.roll_out(for_flow(questions), teacher, engine, tools, max_turns=turns)
        assert share(rollout.right for rollout in rollouts) >= 0.94


def test_as_base_generator_the_toy_knows_some_numbers_and_makes_the_others_up(engine, world):
    known = world.known()
    others = [thing.goal for thing in world.things["test"] if thing.path == "w"]
    texts = [completion.text for completion in engine([*known, *others])]
    right = sum(text == GUESS.format(number) for text, number in zip(texts, known.values()))
    assert right >= 0.97 * len(known)
    assert all(re.fullmatch(r"I think it is \d+\.", text) for text in texts)


def test_the_toys_own_planner_writes_plans_but_picks_its_tools_blindly(engine, tools, world, made):
    questions, prompts, right = made["test"][:40], [], []
    teacher = Teacher(questions, world.known())

    def perfect(batch, **settings):
        completions = teacher(batch)
        prompts.extend(batch)
        right.extend(planner.parse(completion.text, tools).tool for completion in completions)
        return completions

    solve.roll_out(for_flow(questions), perfect, teacher, tools)
    torch.manual_seed(0)
    drawn = [
        planner.parse(completion.text, tools).tool
        for completion in engine(prompts, temperature=0.7)
    ]
    assert sum(map(str.__eq__, drawn, right)) < 0.45 * len(drawn)
    counts = Counter(drawn)
    assert len(counts) == 4 and min(counts.values()) > 0.05 * len(drawn)


class Edited:
    """An engine whose prompts have been edited."""

    def __init__(self, engine, old, new):
        self.engine, self.old, self.new = engine, old, new

    def __call__(self, prompts, **settings):
        return self.engine([prompt.replace(self.old, self.new) for prompt in prompts], **settings)


@pytest.mark.parametrize(
    "old, new",
    [
        (
            executor.PROMPT.splitlines()[0],
            "Reply with the bare call, i.e. the tool and its arguments,",
        ),
        ("\nResult: ", "\nOutcome: "),
    ],
)
def test_after_an_edit_of_a_prompt_the_toys_modules_still_do_their_part(
    old, new, engine, tools, world, made
):
    teacher = Teacher(made["test"], world.known())
    perfect = lambda prompts, **settings: teacher([prompt.replace(new, old) for prompt in prompts])
    rollouts = solve.roll_out(for_flow(made["test"][:24]), perfect, Edited(engine, old, new), tools)
    assert share(rollout.right for rollout in rollouts) >= 0.8
