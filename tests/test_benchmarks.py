"""Ten formats, downloads, two training sets, and the questions that are held out."""

import json
import os
from collections import Counter
from urllib.parse import parse_qs, urlsplit

import pytest

from benchmarks import tables
from benchmarks import training as training_sets
from benchmarks.questions import Question
from benchmarks.tables import BENCHMARKS, load
from benchmarks.training import held_out, training
from rewards.rules import decide

TAIL = (
    "When ready, output the final answer enclosed in <answer> and </answer> tags. "
    "Do not generate any content after the </answer> tag."
)
OPTIONS, PLAIN = ["A. Sugar", "B. Salt", "C. Flour"], ("Sugar", "Salt", "Flour")
GAME = "Using the numbers [2, 3, 4, 1], make 24. For [1, 2, 3, 4]: (1+2+3)×4."
WHITE = "What is white?\nChoices:\n" + "\n".join(OPTIONS)
ITEMS = {  # invented, in the form of the real files -> (question, answer, aliases, choices)
    "bamboogle": (
        {"query": f"Who baked buns?{TAIL}", "question": "-", "answer": ["Ann Li\n"], "pid": "0"},
        ("Who baked buns?", "Ann Li", (), ()),
    ),
    "2wiki": (
        {"query": "When was the baker born?", "answer": "3 May 1801", "pid": 0, "image": None},
        ("When was the baker born?", "3 May 1801", (), ()),
    ),
    "hotpotqa": (
        {"query": f"Is a bun bread?{TAIL}", "answer": ["yes", "it is"], "idx": 0, "pid": "0"},
        ("Is a bun bread?", "yes", ("it is",), ()),
    ),
    "musique": (
        {"query": "How many buns did she bake?", "answer": "1,335", "pid": 3},
        ("How many buns did she bake?", "1,335", (), ()),
    ),
    "gaia": (
        {"Question": "Which words?", "Final answer": "b, e", "Level": "2", "pid": "9"},
        ("Which words?", "b, e", (), ()),
    ),
    "aime24": (
        {"question": f"Find $m+n$.{TAIL}", "answer": 33, "pid": "0"},
        ("Find $m+n$.", "33", (), ()),
    ),
    "amc23": (
        {"query": "What is $x$? ", "question": "What is $x$? ", "answer": -1.0, "pid": "0"},
        ("What is $x$?", "-1.0", (), ()),
    ),
    "gameof24": (
        {"question": [2, 3, 4, 1], "query": GAME, "answer": ["2×3×4×1", "4×3×2/1"], "pid": "0"},
        (GAME, "2 3 4 1", ("2×3×4×1", "4×3×2/1"), ()),
    ),
    "gpqa": (
        {"query": WHITE, "choices": str(OPTIONS), "answer_idx": 1, "answer": "B. Salt", "pid": "0"},
        (WHITE, "B. Salt", (), PLAIN),
    ),
    "medqa": (
        {"query": "What is sweet?", "options": OPTIONS, "answer": "Sugar", "pid": "0"},
        ("What is sweet?\nA. Sugar\nB. Salt\nC. Flour", "A. Sugar", (), PLAIN),
    ),
}


def put(folder, name, *rows, place="{}.json"):
    path = folder / place.format(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows or [ITEMS[name][0]]), encoding="utf-8")
    return path


# --------------------------------------------------------------------------------------- formats
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_format_is_read_as_a_plain_question_whose_gold_is_right(name, tmp_path):
    put(tmp_path, name)
    [question] = load(name, tmp_path)
    assert (question.question, question.answer, question.aliases, question.choices) == ITEMS[name][
        1
    ]
    golds = question.aliases if name == "gameof24" else (question.answer, *question.aliases)
    assert question.kind == name and all(decide(question, gold) for gold in golds)
    assert name != "gpqa" or decide(question, "B") and decide(question, "Salt")
    assert name != "gameof24" or decide(question, "(3+1)×(4+2)") and not decide(question, "24")


def test_a_gold_that_is_a_number_keeps_its_digits_and_one_that_is_none_is_refused(tmp_path):
    path = tmp_path / "gaia.json"
    path.write_text('[{"query": "?", "answer": 12345678901234567890.0}]')
    assert load("gaia", tmp_path)[0].answer == "12345678901234567890.0"
    path.write_text('[{"query": "?", "answer": NaN}]')
    with pytest.raises(ValueError, match="gaia.json is not JSON"):
        load("gaia", tmp_path)


def test_a_fraction_that_has_lost_its_backslash_is_whole_again(tmp_path):
    put(
        tmp_path,
        "aime24",
        {"query": "$s+\frac{1}{2}$, $\\\frac{p}{q}$ or $\tfrac mn$", "answer": 1},
    )
    [question] = load("aime24", tmp_path)
    assert question.question == r"$s+\frac{1}{2}$, $\frac{p}{q}$ or $\tfrac mn$"


def test_medqa_has_every_pid_twice_and_each_item_is_its_own(tmp_path):
    put(tmp_path, "medqa", *[ITEMS["medqa"][0] | {"answer": gold} for gold in ("Sugar", "C")])
    items = [(question.id, question.answer) for question in load("medqa", tmp_path)]
    assert items == [("0", "A. Sugar"), ("0", "C. Flour")]


def test_options_that_the_query_shows_are_not_shown_again_and_may_be_equal(tmp_path):
    query = "How much?\nA. 200 mL\nB.  200 mL\nC. 9 mL \nChoose."
    choices = ["A. 200 mL", "B.  200 mL", "C. 9 mL \n"]
    put(tmp_path, "gpqa", {"query": query, "choices": choices, "answer": "B. 200 mL"})
    [question] = load("gpqa", tmp_path)
    right = [text for text in ("A", "B", "200 mL", "C", "9 mL") if decide(question, text)]
    assert question.question == query and right == ["A", "B", "200 mL"]


def test_a_benchmark_is_its_first_items_as_in_the_paper_or_up_to_a_limit(tmp_path, capsys):
    put(tmp_path, "aime24", *[{"query": f"{i}?", "answer": i} for i in range(35)])
    assert [q.answer for q in load("aime24", tmp_path)] == [str(i) for i in range(30)]
    assert [len(load("aime24", tmp_path, limit)) for limit in (1, 32, 99)] == [1, 32, 35]
    note = f"{tmp_path}/aime24.json is not the file that benchmarks/tables.py was checked with"
    assert [line[: len(note)] for line in capsys.readouterr().err.splitlines()] == [note] * 4
    put(tmp_path, "amc23", place="test/{}/data/data.json")
    assert len(load("amc23", tmp_path)) == 1
    assert "the file has 1 items, the paper used 40" in capsys.readouterr().err
    with pytest.raises(
        ValueError, match="has no 2wiki; put its file at one of .*2wiki/data/data.json"
    ):
        load("2wiki", tmp_path)


@pytest.mark.parametrize(
    "name, change, sentence",
    [
        ("2wiki", {"query": " "}, 'it has no "query"'),
        ("2wiki", {"answer": None}, 'it has no usable "answer": null'),
        ("2wiki", {"answer": []}, 'it has no usable "answer"'),
        ("gpqa", {"answer": "D. Pepper"}, "'D. Pepper' is none of the options"),
        ("medqa", {"options": ["1", "2"], "answer": 2}, "can be the index or the value"),
        ("medqa", {"options": {"A": "Sugar", "B": "Salt"}}, "its options are not a list"),
        ("medqa", {"options": "{'A': 'Sugar', 'B': 'Salt'}"}, "its options are not a list"),
    ],
)
def test_an_item_of_another_form_is_named_with_its_place(name, change, sentence, tmp_path):
    path = put(tmp_path, name, ITEMS[name][0] | change)
    with pytest.raises(ValueError) as error:
        load(name, tmp_path)
    assert str(error.value).startswith(f"{path}, item 0: ") and sentence in str(error.value)


# ------------------------------------------------------------------------------------- downloads
@pytest.fixture
def site(server, tmp_path, monkeypatch):
    """A server on loopback. answers[path]: a body, or a function of the query that returns one."""

    def get(address):
        parts = urlsplit(address.removeprefix("/v1"))
        server.paths.append(parts.path)
        answer = server.answers.get(parts.path)
        body = answer(parse_qs(parts.query)) if callable(answer) else answer
        return (404, {}) if body is None else (200, body)

    server.get, server.answers, server.paths = get, {BUN_PATH: BUN}, []
    server.cache = tmp_path / "cache"
    monkeypatch.setenv("NANO_AGENTFLOW_CACHE", str(server.cache))
    monkeypatch.setattr(tables, "FILES", server.url)
    monkeypatch.setattr(training_sets, "ROWS", f"{server.url}/rows")
    return server


BUN, BUN_PATH = json.dumps([ITEMS["2wiki"][0]]).encode(), "/2wiki/data/data.json"


def test_a_benchmark_is_downloaded_once_and_another_file_than_the_tested_one_is_named(site, capsys):
    assert load("2wiki", limit=5) == load("2wiki", limit=5, cache=site.cache)
    assert site.paths == [BUN_PATH] and os.listdir(site.cache) == ["2wiki.json"]
    note = "is not the file that benchmarks/tables.py was checked with"
    assert capsys.readouterr().err.count(note) == 2


@pytest.mark.parametrize("body", [None, BUN[:-9], b"<html>Sign in</html>"])
def test_a_download_that_is_not_the_whole_file_leaves_nothing_and_says_what_to_do(site, body):
    site.answers[BUN_PATH] = body
    why = "download it by hand to .*2wiki.json, or give --benchmark-dir"
    with pytest.raises(ValueError, match=why):
        load("2wiki")
    assert not list(site.cache.glob("*.json"))
    site.answers[BUN_PATH] = BUN
    assert len(load("2wiki")) == 1, "the next attempt is not spoilt"


# --------------------------------------------------------------------------------- training sets
def serve_rows(site, number, **special):
    """The rows API, two sets of so many rows. special: what is odd about a row, as in gold5=""."""

    def row(i, nq):
        if nq:
            golds = [f"Baker {i}", f"B{i}"]
            return {"id": i, "question": f"who baked bun {i}", "golden_answers": golds}
        text, gold = special.get(f"text{i}", f"Find {i} + 1. "), special.get(f"gold{i}", str(i + 1))
        return {"question": text, "final_answer": gold, "difficulty": 5.0, "r1_solution_1": "..."}

    def answer(query):
        query = {key: value[0] for key, value in query.items()}
        start, length, set_name = int(query["offset"]), int(query["length"]), query["config"]
        assert (query["dataset"], set_name) in training_sets.TRAINING.values()
        assert query["split"] == "train" and 1 <= length <= 100
        rows = [
            {
                "row_idx": i,
                "row": row(i, set_name == "nq"),
                "truncated_cells": special.get(f"cut{i}", []),
            }
            for i in range(start, min(start + length, number))
        ]
        return json.dumps({"features": [], "rows": rows, "num_rows_total": number}).encode()

    site.answers["/rows"] = answer


def test_training_rows_become_questions_with_their_aliases(site):
    serve_rows(site, 30)
    nq, math = (
        sorted(training(name, 30), key=lambda q: len(q.id))[0] for name in ("nq", "deepmath")
    )
    i, k = int(nq.id.removeprefix("nq-")), int(math.id.removeprefix("deepmath-"))
    assert nq == Question(f"who baked bun {i}?", f"Baker {i}", (f"B{i}",), id=nq.id, kind="nq")
    assert math == Question(f"Find {k} + 1.", str(k + 1), id=f"deepmath-{k}", kind="deepmath")


def test_a_sample_is_spread_over_the_set_and_the_same_for_the_same_seed(site, tmp_path):
    serve_rows(site, 5000)
    first = training("nq+deepmath", 101, seed=1)
    assert first == training("nq+deepmath", 101, seed=1, cache=tmp_path / "elsewhere")
    assert {q.id for q in first} != {q.id for q in training("nq+deepmath", 101, seed=2)}
    assert Counter(q.kind for q in first) == {"nq": 51, "deepmath": 50}
    assert sum(a.kind != b.kind for a, b in zip(first, first[1:])) > 10, "mixed"
    assert len({int(q.id.split("-")[1]) // 1000 for q in first}) >= 3
    assert len({q.question for q in first}) == 101


def test_a_second_run_reads_the_cached_rows(site):
    serve_rows(site, 500)
    first = training("nq", 50)
    assert training("nq", 50) == first and len(site.paths) == 1 + 3


def test_rows_that_are_truncated_or_have_no_gold_are_not_used(site):
    odd = {"gold5": "", "gold6": None, "gold7": "9" * 3000, "text9": "Find 10 + 1"}
    serve_rows(site, 20, cut3=["question"], cut4=["r1_solution_1"], cut8=["final_answer"], **odd)
    used = {int(q.id.split("-")[1]) for q in training("deepmath", 20)}
    assert used == set(range(20)) - {3, 5, 6, 7, 8, 10}, "10 is the question of 9"


@pytest.mark.parametrize("rows", [None, b'{"rows": [], "num_rows_total": 0}'])
def test_a_rows_server_of_no_use_leaves_nothing_and_says_what_to_do(site, rows):
    site.answers["/rows"] = rows
    with pytest.raises(ValueError, match="use --data FILE"):
        training("nq", 10)
    assert not site.cache.exists()


@pytest.mark.parametrize("name", ["bamboogle", "gpqa"])
def test_no_benchmark_is_ever_trained_or_validated_on(name):
    with pytest.raises(ValueError, match=f"{name} is a test benchmark: trained or chosen on it"):
        training(f"nq+{name}", 9)
    with pytest.raises(ValueError, match="no training set is called 'squad'; use nq or deepmath"):
        training("nq+squad", 9)


# -------------------------------------------------------------------------------------- held out
def test_a_question_that_is_held_out_is_in_no_other_spelling_trained_on():
    texts = [f"who was the author of book {i}" for i in range(40)]
    texts += [f"Who was author of the b\u00adook {i}?" for i in range(20)]
    texts += [f"What is {i} - {i + 1}?" for i in range(20)] + [
        f"What is {i + 1} - {i}?" for i in range(20)
    ]
    questions = [Question(text, str(i)) for i, text in enumerate(texts)]
    for seed in range(5):
        train, valid = held_out(questions, 30, seed)
        assert (train, valid) == held_out(questions, 30, seed) != held_out(questions, 30, seed + 1)
        ids = {int(q.answer) for q in valid}
        twins = {i + 40 for i in ids if i < 20} | {i - 40 for i in ids if 40 <= i < 60}
        assert len(ids) == 30 and not ids & twins
        assert [int(q.answer) for q in train] == [i for i in range(100) if i not in ids | twins]


def test_held_out_takes_none_if_none_is_wanted_and_never_all():
    questions = [Question(f"{word} is what?", word) for word in "iron gold lead zinc iron".split()]
    assert held_out(questions, 0, seed=3) == (questions, [])
    with pytest.raises(ValueError, match="5 questions are too few to hold 4 out: give --valid"):
        held_out(questions, 4, seed=3)
    signs = [Question(sign, sign) for sign in "∑∫∂∇√∞"]  # no words
    assert len(held_out(signs, 2, seed=0)[0]) == 4
