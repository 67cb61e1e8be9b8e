"""Ten formats, downloads that go wrong in every way on a server of this machine, and two training sets."""

import json
import os
import re
from collections import Counter
from urllib.parse import parse_qs, urlsplit

import pytest
from test_rewards import is_right

from benchmarks import files, tables
from benchmarks import training as training_sets
from benchmarks.tables import BENCHMARKS, load
from benchmarks.training import held_out, training, words_of
from rewards.questions import Question, read_questions

TAIL = ("When ready, output the final answer enclosed in <answer> and </answer> tags. "
        "Do not generate any content after the </answer> tag.")
OPTIONS, PLAIN = ["A. Sugar", "B. Salt", "C. Flour"], ("Sugar", "Salt", "Flour")
GAME = "Using the numbers [2, 3, 4, 1], create an expression that equals 24. For [1, 2, 3, 4]: (1+2+3)×4."
WHITE = "What is white?\nChoices:\n" + "\n".join(OPTIONS)
ITEMS = {  # invented, in the form of the real files -> (question, answer, aliases, choices)
    "bamboogle": ({"query": f"Who baked buns?{TAIL}", "question": "-", "answer": ["Ann Li\n"], "pid": "0"},
                  ("Who baked buns?", "Ann Li", (), ())),
    "2wiki": ({"query": "When was the baker born?", "answer": "3 May 1801", "pid": 0, "image": None},
              ("When was the baker born?", "3 May 1801", (), ())),
    "hotpotqa": ({"query": f"Is a bun bread?{TAIL}", "answer": ["yes", "it is"], "idx": 0, "pid": "0"},
                 ("Is a bun bread?", "yes", ("it is",), ())),
    "musique": ({"query": "How many buns did she bake?", "answer": "1,335", "pid": 3},
                ("How many buns did she bake?", "1,335", (), ())),
    "gaia": ({"Question": "Which words?", "Final answer": "b, e", "task_id": "x", "Level": "2", "pid": "9"},
             ("Which words?", "b, e", (), ())),
    "aime24": ({"question": f"Find $m+n$.{TAIL}", "answer": 33, "pid": "0"}, ("Find $m+n$.", "33", (), ())),
    "amc23": ({"query": "What is $x$? ", "question": "What is $x$? ", "answer": -1, "pid": "0"},
              ("What is $x$?", "-1", (), ())),
    "gameof24": ({"question": [2, 3, 4, 1], "query": GAME, "answer": ["2×3×4×1", "4×3×2/1"], "pid": "0"},
                 (GAME, "2 3 4 1", ("2×3×4×1", "4×3×2/1"), ())),
    "gpqa": ({"query": WHITE, "choices": str(OPTIONS), "answer_idx": 1, "answer": "B. Salt", "pid": "0"},
             (WHITE, "B. Salt", (), PLAIN)),
    "medqa": ({"query": "What is sweet?", "options": OPTIONS, "answer": "Sugar", "pid": "0"},
              ("What is sweet?\nA. Sugar\nB. Salt\nC. Flour", "A. Sugar", (), PLAIN)),
}


def put(folder, name, *rows, place="{}.json"):
    path = folder / place.format(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows or [ITEMS[name][0]]), encoding="utf-8")
    return path


# -------------------------------------------------------------------------------------------------- formats
def test_there_are_ten_benchmarks_with_the_paper_s_numbers():
    assert sum(b.items for b in BENCHMARKS.values()) == 125 + 127 + 30 + 40 + 6 * 100
    assert len(BENCHMARKS) == len(ITEMS) == 10
    assert all(0 < b.alone < b.trained > b.frozen and len(b.sha256) == 40 for b in BENCHMARKS.values())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_format_is_read_as_a_plain_question_whose_gold_is_right(name, tmp_path):
    put(tmp_path, name)
    [question] = load(name, tmp_path)
    assert (question.question, question.answer, question.aliases, question.choices) == ITEMS[name][1]
    golds = question.aliases if name == "gameof24" else (question.answer, *question.aliases)
    assert question.kind == name and all(is_right(question, gold) for gold in golds)
    assert name != "gpqa" or is_right(question, "B") and is_right(question, "Salt")


def test_every_solution_of_a_game_of_24_is_right_and_not_only_those_in_the_file(tmp_path):
    put(tmp_path, "gameof24")
    [question] = load("gameof24", tmp_path)
    texts = ["(3+1)×(4+2)", "1*2*3*4 = 24", "(1+2+3)×4×1", "24", "2 3 4 1"]
    assert [is_right(question, text) for text in texts] == [True, True, False, False, False]


@pytest.mark.parametrize("written", ["1e999", "1e22", "12345678901234567890.0", "-0.0", "7"])
def test_a_gold_that_is_a_number_keeps_its_digits(written):
    question, = tables.questions_of(b'[{"query": "?", "answer": %s}]' % written.encode(), "gaia", "gaia.json")
    assert question.answer == written and is_right(question, written)


def test_a_gold_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="not JSON"):
        tables.questions_of(b'[{"query": "?", "answer": NaN}]', "gaia", "gaia.json")


def test_medqa_has_every_pid_twice_and_each_item_is_its_own(tmp_path):
    put(tmp_path, "medqa", *[ITEMS["medqa"][0] | {"answer": gold} for gold in ("Sugar", "Salt", "C")])
    items = [(question.id, question.answer) for question in load("medqa", tmp_path)]
    assert items == [("0", "A. Sugar"), ("0", "B. Salt"), ("0", "C. Flour")]


def test_options_that_the_query_shows_are_not_shown_again_and_may_be_equal(tmp_path):
    query = "How much?\nA. 200 mL\nB.  200 mL\nC. 9 mL \nChoose."
    choices = ["A. 200 mL", "B.  200 mL", "C. 9 mL \n"]
    put(tmp_path, "gpqa", {"query": query, "choices": choices, "answer": "B. 200 mL"})
    [question] = load("gpqa", tmp_path)
    right = [text for text in ("A", "B", "200 mL", "C", "9 mL") if is_right(question, text)]
    assert question.question == query and right == ["A", "B", "200 mL"]


@pytest.mark.parametrize("place", ["{}.json", "{}/data/data.json", "test/{}/data/data.json"])
def test_a_folder_may_hold_the_files_in_three_places(place, tmp_path):
    put(tmp_path, "musique", place=place)
    assert len(load("musique", tmp_path)) == 1
    with pytest.raises(ValueError, match="has no 2wiki; put its file at one of .*2wiki/data/data.json"):
        load("2wiki", tmp_path)


def test_a_benchmark_is_its_first_items_as_in_the_paper_or_up_to_a_limit(tmp_path, capsys):
    put(tmp_path, "aime24", *[{"query": f"{i}?", "answer": i} for i in range(35)])
    assert [q.answer for q in load("aime24", tmp_path)] == [str(i) for i in range(30)]
    assert [len(load("aime24", tmp_path, limit)) for limit in (1, 32, 99)] == [1, 32, 35]
    assert not capsys.readouterr().err
    put(tmp_path, "amc23")
    assert len(load("amc23", tmp_path)) == 1
    assert "the file has 1 items, the paper used 40" in capsys.readouterr().err


@pytest.mark.parametrize("name, change, sentence", [
    ("2wiki", {"query": " "}, 'has no "query"'), ("2wiki", {"answer": None}, 'no usable "answer": null'),
    *(("2wiki", {"answer": answer}, "no usable") for answer in ([], True, "x" * 2001, [["yes"]])),
    ("gameof24", {"question": "2 3 4 1"}, "no list of numbers"),
    ("gpqa", {"choices": "__import__('os')"}, "options that are not a list"),
    ("gpqa", {"choices": ["A. one"]}, "options that are not a list"),
    ("gpqa", {"answer": "D. Pepper"}, "none of its options: 'D. Pepper'"),
    ("medqa", {"answer": "A. Salt"}, "none of its options")])
def test_an_item_of_another_form_is_named_with_its_place(name, change, sentence, tmp_path):
    path = put(tmp_path, name, ITEMS[name][0] | change)
    with pytest.raises(ValueError) as error:
        load(name, tmp_path)
    text = str(error.value)
    assert text.startswith(f"{path}, item 0 has ") and sentence in text and text.endswith(".")


@pytest.mark.parametrize("text", ["", "[1", "{}", "[]", "[1]", "\xff", "[" * 9999])
def test_a_file_that_is_no_list_of_items_is_refused(text, tmp_path):
    (tmp_path / "gaia.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="gaia.json is not (JSON|a JSON list of items)"):
        load("gaia", tmp_path)


@pytest.mark.parametrize("function, arguments, sentence", [
    (load, {"name": "bambogle"}, "no benchmark is called 'bambogle'; use one of bamboogle"),
    (load, {"name": "gaia", "limit": 0}, "use 1 or more"),
    (training, {"names": "nq+squad"}, "no training set is called 'squad'; use nq"),
    (training, {"names": "nq+deepmath", "limit": 1}, "use 2 or more")])
def test_the_error_for_a_wrong_name_or_number_says_what_is_right(function, arguments, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        function(**arguments)


# ------------------------------------------------------------------------------------------------ downloads
@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANO_AGENTFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def site(server, cache, monkeypatch):
    """conftest's server for GET: answers[path] is a body, or a function that writes to the handler."""
    server.answers, server.paths = {BUN_PATH: BUN}, []

    def get(handler):
        path = handler.path.removeprefix("/v1")
        server.paths.append(path)
        answer = server.answers.get(urlsplit(path).path, lambda handler: handler.send(b"nothing here", 404))
        handler.close_connection = True
        answer(handler) if callable(answer) else handler.send(answer)

    server.list = get
    monkeypatch.setattr(tables, "FILES", server.url)
    monkeypatch.setattr(training_sets, "ROWS", f"{server.url}/rows")
    return server


BUN, BUN_PATH = json.dumps([ITEMS["2wiki"][0]]).encode(), "/2wiki/data/data.json"


def test_a_benchmark_is_downloaded_once_and_a_file_that_is_not_the_tested_one_is_named(site, cache, capsys):
    assert load("2wiki", limit=5) == load("2wiki", limit=5, cache=cache)
    assert site.paths == [BUN_PATH] and os.listdir(cache) == ["2wiki.json"]
    assert capsys.readouterr().err.count("is not the file that benchmarks/tables.py was checked with") == 2


def test_a_file_put_into_the_cache_by_hand_is_as_good(site, cache):
    put(cache, "gaia")
    assert load("gaia", limit=1)[0].answer == "b, e"
    assert not site.paths


@pytest.mark.parametrize("body, settings, cause", [
    (BUN, {"status": 404}, "404 Not Found"), (BUN, {"status": 503}, "503 Service Unavailable"),
    (BUN, {"length": len(BUN) + 9}, "the connection was dropped"), (BUN[:-9], {}, "not JSON"),
    (b"<html>Sign in</html>", {}, "not JSON"), (b"", {}, "not JSON"),
    (b'{"message": "moved"}', {}, "not a JSON list"), (b'[{"a": 1}]', {}, 'no "query"'),
    (b" " * 300_000 + BUN, {}, "longer than 200000 bytes")])
def test_a_download_that_is_not_the_whole_file_leaves_nothing_and_says_what_to_do(
        body, settings, cause, site, cache, monkeypatch):
    monkeypatch.setattr(files, "CAP", 200_000)
    site.answers[BUN_PATH] = lambda handler: handler.send(body, **settings)
    with pytest.raises(ValueError, match=cause) as error:
        load("2wiki")
    assert f"download it by hand to {cache}/2wiki.json, or give --benchmark-dir FOLDER." in str(error.value)
    assert not list(cache.glob("*")) and "\n" not in str(error.value)
    site.answers[BUN_PATH] = BUN
    assert len(load("2wiki")) == 1, "the next attempt is not spoilt"


def test_a_download_that_drips_without_end_is_given_up(site, cache, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0)
    with pytest.raises(ValueError, match="too slow"):
        load("2wiki")


def test_without_a_network_the_error_says_what_to_do(cache, monkeypatch):
    monkeypatch.setattr(tables, "FILES", "http://127.0.0.1:1")
    monkeypatch.setattr(training_sets, "ROWS", "http://127.0.0.1:1/rows")
    monkeypatch.setattr(training_sets.services, "PAUSE", 0.01)
    with pytest.raises(ValueError, match="nobody listens there.*; download it by hand to"):
        load("2wiki")
    with pytest.raises(ValueError, match="cannot be downloaded: .*try later, or use --data FILE"):
        training("nq")


def test_a_cache_that_cannot_be_written_is_named(site, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="set NANO_AGENTFLOW_CACHE to another folder"):
        load("2wiki", cache=tmp_path / "file")


# -------------------------------------------------------------------------------------------- training sets
def serve_rows(site, number, **special):
    """The rows API over two sets of so many rows; special: what is odd about a row, as in gold5=""."""
    def row(i, nq):
        if nq:
            return {"id": i, "question": f"who baked bun {i}", "golden_answers": [f"Baker {i}", f"B{i}"]}
        text, gold = special.get(f"text{i}", f"Find {i} + 1. "), special.get(f"gold{i}", str(i + 1))
        return {"question": text, "final_answer": gold, "difficulty": 5.0, "r1_solution_1": "..."}

    def answer(handler):
        query = {key: value[0] for key, value in parse_qs(urlsplit(handler.path).query).items()}
        start, length = int(query["offset"]), int(query["length"])
        dataset = query["dataset"], query["config"]
        assert query["split"] == "train" and 1 <= length <= 100
        assert dataset in [("RUC-NLPIR/FlashRAG_datasets", "nq"), ("zwhe99/DeepMath-103K", "default")]
        numbers = range(start, min(start + length, number))
        rows = [{"row_idx": i, "row": row(i, dataset[1] == "nq")} for i in numbers]
        for i, entry in zip(numbers, rows):
            entry["truncated_cells"] = special.get(f"cut{i}", [])
        handler.send(json.dumps({"features": [], "rows": rows, "num_rows_total": number}).encode())

    site.answers["/rows"] = answer


def test_training_rows_become_questions_with_their_aliases(site, cache):
    serve_rows(site, 30)
    nq, math = (sorted(training(name, 30), key=lambda q: len(q.id))[0] for name in ("nq", "deepmath"))
    i, k = int(nq.id.removeprefix("nq-")), int(math.id.removeprefix("deepmath-"))
    assert nq == Question(f"who baked bun {i}?", f"Baker {i}", aliases=(f"B{i}",), id=f"nq-{i}", kind="nq")
    assert math == Question(f"Find {k} + 1.", str(k + 1), id=f"deepmath-{k}", kind="deepmath")


def test_a_sample_is_spread_over_the_set_and_the_same_for_the_same_seed(site, cache, tmp_path):
    serve_rows(site, 5000)
    first = training("nq+deepmath", 101, seed=1)
    assert first == training("nq+deepmath", 101, seed=1, cache=tmp_path / "elsewhere")
    assert {q.id for q in first} != {q.id for q in training("nq+deepmath", 101, seed=2)}
    assert Counter(q.kind for q in first) == {"nq": 51, "deepmath": 50}
    assert sum(a.kind != b.kind for a, b in zip(first, first[1:])) > 10, "mixed"
    assert len({int(q.id.split("-")[1]) // 1000 for q in first}) >= 3
    assert len({q.question for q in first}) == 101


def test_a_second_run_reads_the_cached_rows(site, cache):
    serve_rows(site, 500)
    first = training("nq", 50)
    requests = len(site.paths)
    assert training("nq", 50) == first and len(site.paths) == requests == 1 + 3
    assert read_questions(cache / "nq-seed0-50.jsonl")[0].kind == "nq"


def test_rows_that_are_truncated_or_have_no_gold_are_not_used(site, cache):
    serve_rows(site, 20, cut3=["question"], cut4=["r1_solution_1"], gold5="", gold6=None, gold7="9" * 3000,
               cut8=["final_answer"], text9="Find 10 + 1")
    used = {int(q.id.split("-")[1]) for q in training("deepmath", 20)}
    assert used == set(range(20)) - {3, 5, 6, 7, 8, 10}, "10 is the question of 9"


def test_a_busy_server_is_waited_for(site, cache):
    serve_rows(site, 40)
    good, refusals = site.answers["/rows"], [429, 503, 429]
    site.answers["/rows"] = lambda h: h.send(b"{}", refusals.pop(), Retry_After=0) if refusals else good(h)
    assert len(training("nq", 20)) == 20 and not refusals


@pytest.mark.parametrize("body, settings, sentence", [
    (b'{"error": "no such dataset"}', {"status": 404}, "404 Not Found"), (b"<html>", {}, "not JSON"),
    *((body, {}, "JSON of another shape") for body in (
        b'{"rows": []}', b"[]", b'{"rows": [{"row": 1}], "num_rows_total": 9}')),
    (b'{"rows": [], "num_rows_total": 0}', {}, "no usable row of nq"),
    (b"{}", {"status": 429, "Retry_After": 3600}, "asks to wait 3600 seconds")])
def test_a_rows_server_of_no_use_leaves_nothing_and_says_what_to_do(body, settings, sentence, site, cache):
    site.answers["/rows"] = lambda handler: handler.send(body, **settings)
    with pytest.raises(ValueError, match=sentence) as error:
        training("nq", 10)
    assert "use --data FILE" in str(error.value) and not cache.exists()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_no_benchmark_is_ever_trained_or_validated_on(name):
    with pytest.raises(ValueError, match=f"{name} is a test benchmark: trained or chosen on it"):
        training(f"nq+{name}")


# ------------------------------------------------------------------------------------------------- held out
def test_held_out_questions_are_never_nearly_trained_on():
    texts = [f"who was the author of book {i} in series {50 + i} on shelf {100 + i}" for i in range(40)]
    texts += [f"Who was author of the book {i} in series {50 + i} on shelf {100 + i}?" for i in range(20)]
    texts += [f"who was author of book {i} in the series {50 + i} on my shelf {100 + i}" for i in range(20)]
    questions = [Question(text, str(i)) for i, text in enumerate(texts)]
    train, valid, _ = first = held_out(questions, 3, seed=0)
    assert len(valid) == 3 and first == held_out(questions, 3, seed=0) != held_out(questions, 3, seed=1)
    a, b = ([set(words_of(q.question)) for q in part] for part in (valid, train))
    assert 70 < len(train) < 80 - 3
    assert all(len(x & y) < 0.8 * len(x | y) for x in a for y in b)


def test_held_out_keeps_the_order_and_everything_else():
    questions = [Question(f"{word} is what?", word) for word in "iron gold lead zinc iron".split()]
    for seed in range(10):
        train, valid, _ = held_out(questions, 3, seed)
        names = {q.answer for q in valid}
        assert len(names) == 3, "two of one text are one"
        assert train == [q for q in questions if q.answer not in names]
    assert held_out(questions, 0, seed=3) == (questions, [], "")
    for number in (4, 5):
        with pytest.raises(ValueError, match="no question is left to train on: 1 of 5 .* --valid FILE.jsonl"):
            held_out(questions, number, seed=3)


def test_the_note_says_how_many_questions_are_left_out_as_near_a_held_out_one_and_why():
    sums = [Question(f"What is {a} + {b}?", str(a + b)) for a in range(20) for b in range(20)]
    train, valid, note = held_out(sums, 64, seed=0)
    assert note.startswith(f"{400 - 64 - len(train)} of 400 questions are left out, because they share four ")
    assert len(train) < 200 and "one of the 64 held out" in note and "--valid FILE.jsonl keeps them" in note
    longer = [Question(f"Please tell me the sum of {q.question}", q.answer) for q in sums]
    train, valid, note = held_out(longer, 64, seed=0)  # of one template: only equal ones are left out
    words = [{frozenset(words_of(q.question)) for q in part} for part in (train, valid)]
    assert not words[0] & words[1] and len(train) > 168 and "because they share all words with" in note
    signs = [Question(sign, sign) for sign in "∑∫∂∇√∞"]  # no words
    assert len(held_out(signs, 2, seed=0)[0]) == 4


