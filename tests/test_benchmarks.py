"""Ten formats, downloads that go wrong in every way against a real server on this machine, and training sets that stay the same."""
import http.server
import json
import os
import re
import threading
from collections import Counter
from urllib.parse import parse_qs, urlsplit

import pytest

from benchmarks import files, tables
from benchmarks.tables import BENCHMARKS, check, golds_of, load
from benchmarks.training import held_out, training
from rewards import rules
from rewards.questions import Question, read_questions
from rewards.rules import is_right
from world import services

TAIL = ("When ready, output the final answer enclosed in <answer> and </answer> tags. "
        "Do not generate any content after the </answer> tag.")
OPTIONS = ["A. Sugar", "B. Salt", "C. Flour"]
ITEMS = {                                                            # invented, in the habits of the real files
    "bamboogle": {"query": f"Who baked the first bun?{TAIL}", "question": f"Who baked the first bun?{TAIL}", "answer": ["Ann Li\n"], "pid": "0"},
    "2wiki": {"query": "When was the baker of the bun born?", "answer": "3 May 1801", "pid": 0, "image": None},
    "hotpotqa": {"query": f"Is a bun bread?{TAIL}", "answer": ["yes", "it is"], "idx": 0, "pid": "0"},
    "musique": {"query": "How many buns did she bake?", "answer": "1,335", "pid": 3},
    "gaia": {"Question": "Which words are on the bun?", "Final answer": "b, e", "task_id": "x", "Level": "2", "pid": "9"},
    "aime24": {"question": f"Find $m+n$.{TAIL}", "query": f"Find $m+n$.{TAIL}", "answer": 33, "pid": "0"},
    "amc23": {"query": "What is $x$? ", "question": "What is $x$? ", "answer": -1, "pid": "0"},
    "gameof24": {"question": [2, 3, 4, 1], "query": "Using the numbers [2, 3, 4, 1], create an expression that equals 24. "
                 "Example: for [1, 2, 3, 4], one solution is (1+2+3)×4.", "answer": ["2×3×4×1", "4×3×2/1"], "pid": "0"},
    "gpqa": {"query": "What is white?\nChoices:\n" + "\n".join(OPTIONS), "choices": str(OPTIONS), "answer_idx": 1, "answer": "B. Salt", "pid": "0"},
    "medqa": {"query": "What is sweet?", "options": OPTIONS, "answer": "Sugar", "pid": "0"},
}
READ = {                                                             # (question, answer, aliases, choices)
    "bamboogle": ("Who baked the first bun?", "Ann Li", (), ()),
    "2wiki": ("When was the baker of the bun born?", "3 May 1801", (), ()),
    "hotpotqa": ("Is a bun bread?", "yes", ("it is",), ()),
    "musique": ("How many buns did she bake?", "1,335", (), ()),
    "gaia": ("Which words are on the bun?", "b, e", (), ()),
    "aime24": ("Find $m+n$.", "33", (), ()),
    "amc23": ("What is $x$?", "-1", (), ()),
    "gameof24": (ITEMS["gameof24"]["query"], "2 3 4 1", ("2×3×4×1", "4×3×2/1"), ()),
    "gpqa": (ITEMS["gpqa"]["query"], "B. Salt", (), ("Sugar", "Salt", "Flour")),
    "medqa": ("What is sweet?\nA. Sugar\nB. Salt\nC. Flour", "A. Sugar", (), ("Sugar", "Salt", "Flour")),
}


def put(folder, name, *rows, place="{}.json"):
    path = folder / place.format(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows or [ITEMS[name]]), encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------------------------ formats
def test_there_are_ten_benchmarks_with_the_paper_s_numbers():
    assert sum(b.items for b in BENCHMARKS.values()) == 125 + 127 + 30 + 40 + 6 * 100 and len(BENCHMARKS) == len(ITEMS) == 10
    assert all(0 < b.alone < b.trained > b.frozen and len(b.sha256) == 64 for b in BENCHMARKS.values())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_format_is_read_as_a_plain_question_whose_gold_is_right(name, tmp_path):
    put(tmp_path, name)
    [question] = load(name, tmp_path)
    assert (question.question, question.answer, question.aliases, question.choices) == READ[name]
    assert question.kind == name and all(is_right(question, gold) for gold in golds_of(question))
    assert name != "gpqa" or golds_of(question) == ["B. Salt", "B", "Salt"]


def test_every_solution_of_a_game_of_24_is_right_and_not_only_those_in_the_file(tmp_path):
    put(tmp_path, "gameof24")
    [question] = load("gameof24", tmp_path)
    assert is_right(question, "(3+1)×(4+2)") and is_right(question, "1*2*3*4 = 24")
    assert not is_right(question, "(1+2+3)×4×1") and not is_right(question, "24") and not is_right(question, "2 3 4 1")


def test_medqa_has_every_pid_twice_and_each_item_is_its_own(tmp_path):
    put(tmp_path, "medqa", *[{**ITEMS["medqa"], "answer": gold} for gold in ("Sugar", "Salt", "C")])
    assert [(q.id, q.answer) for q in load("medqa", tmp_path)] == [("0", "A. Sugar"), ("0", "B. Salt"), ("0", "C. Flour")]


def test_options_that_the_query_shows_are_not_shown_again_and_may_be_equal(tmp_path):
    query = "How much?\nA. 200 mL\nB.  200 mL\nC. 9 mL \nChoose."
    put(tmp_path, "gpqa", {"query": query, "choices": ["A. 200 mL", "B.  200 mL", "C. 9 mL \n"], "answer": "B. 200 mL"})
    [question] = load("gpqa", tmp_path)
    assert question.question == query and [is_right(question, text) for text in ("A", "B", "200 mL", "C", "9 mL")] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("place", ["{}.json", "{}/data/data.json", "test/{}/data/data.json"])
def test_a_folder_may_hold_the_files_in_three_places(place, tmp_path):
    put(tmp_path, "musique", place=place)
    assert len(load("musique", tmp_path)) == 1
    with pytest.raises(ValueError, match="has no 2wiki; put its file at one of .*2wiki/data/data.json"):
        load("2wiki", tmp_path)


def test_a_benchmark_is_its_first_items_as_in_the_paper_or_as_many_as_asked(tmp_path, capsys):
    put(tmp_path, "aime24", *[{"query": f"{i}?", "answer": i} for i in range(35)])
    assert [q.answer for q in load("aime24", tmp_path)] == [str(i) for i in range(30)]
    assert [len(load("aime24", tmp_path, limit)) for limit in (1, 32, 99)] == [1, 32, 35] and not capsys.readouterr().err
    put(tmp_path, "amc23")
    assert len(load("amc23", tmp_path)) == 1 and "the file has 1 items, the paper used 40" in capsys.readouterr().err


@pytest.mark.parametrize("name, change, sentence", [
    ("2wiki", {"query": " "}, 'item 0 has no "query"'), ("2wiki", {"answer": None}, 'no usable "answer": null'),
    ("2wiki", {"answer": []}, "no usable"), ("2wiki", {"answer": True}, "no usable"), ("2wiki", {"answer": "x" * 2001}, "no usable"),
    ("hotpotqa", {"answer": [["yes"]]}, "no usable"), ("gameof24", {"question": "2 3 4 1"}, "no list of numbers"),
    ("gpqa", {"choices": "__import__('os')"}, "options that are not a list"), ("gpqa", {"choices": ["A. one"]}, "options that are not a list"),
    ("gpqa", {"answer": "D. Pepper"}, "none of its options: 'D. Pepper'"), ("medqa", {"answer": "A. Salt"}, "none of its options")])
def test_an_item_of_another_form_is_named_with_its_place(name, change, sentence, tmp_path):
    path = put(tmp_path, name, {**ITEMS[name], **change})
    with pytest.raises(ValueError) as error:
        load(name, tmp_path)
    assert f"{path}, item 0" in str(error.value) and sentence in str(error.value) and str(error.value).endswith(".")


@pytest.mark.parametrize("text", ["", "[1", "{}", "[]", "[1]", "\xff", "[" * 9999])
def test_a_file_that_is_no_list_of_items_is_refused(text, tmp_path):
    (tmp_path / "gaia.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="gaia.json is not (JSON|a JSON list of items)"):
        load("gaia", tmp_path)


@pytest.mark.parametrize("call, sentence", [
    (lambda: load("bambogle"), "no benchmark is called 'bambogle'; use one of bamboogle"), (lambda: load("gaia", limit=0), "use 1 or more"),
    (lambda: training("nq+squad"), "no training set is called 'squad'; use nq"), (lambda: training("nq+deepmath", 1), "use 2 or more")])
def test_a_wrong_name_or_number_is_told_what_is_right(call, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()


# ---------------------------------------------------------------------------------------------------------------- downloads
class Server(http.server.ThreadingHTTPServer):
    """Answers each path with answers[path]: a body, or a function that writes to the handler; remembers what it was asked."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.asked = {}, []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        answer = self.server.answers.get(urlsplit(self.path).path, lambda handler: handler.reply(b"nothing here", 404))
        answer(self) if callable(answer) else self.reply(answer)

    def reply(self, body, status=200, **headers):
        self.send_response(status)
        for key, value in {"Content_Length": len(body), **headers}.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(tables, "FILES", server.url)
        monkeypatch.setattr(training, "ROWS", f"{server.url}/rows")
        monkeypatch.setattr(services, "PAUSE", 0.01)
        yield server
        server.shutdown()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANO_AGENTFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


BUN = json.dumps([ITEMS["2wiki"]]).encode()


def test_a_benchmark_is_downloaded_once_and_its_checksum_recorded(server, cache, capsys):
    server.answers["/2wiki/data/data.json"] = BUN
    assert load("2wiki", limit=5) == load("2wiki", limit=5) == load("2wiki", limit=5, cache=cache)
    assert server.asked == ["/2wiki/data/data.json"] and sorted(os.listdir(cache)) == ["2wiki.json", "2wiki.sha256.json"]
    assert json.loads((cache / "2wiki.sha256.json").read_text())["bytes"] == len(BUN)
    assert capsys.readouterr().err.count("is not the file that benchmarks.py was checked with") == 1


def test_a_file_that_changed_since_its_download_is_refused_until_it_is_deleted(server, cache):
    server.answers["/2wiki/data/data.json"] = BUN
    load("2wiki", limit=5)
    for change in (lambda path: path.write_bytes(BUN + b" "), lambda path: path.unlink()):
        change(cache / "2wiki.json")
        server.answers["/2wiki/data/data.json"] = BUN + b"\n"       # upstream has changed too
        with pytest.raises(ValueError, match="2wiki.json has changed since its first download; delete it"):
            load("2wiki", limit=5)
    for file in cache.iterdir():
        file.unlink()
    assert len(load("2wiki", limit=5)) == 1


def test_a_file_put_into_the_cache_by_hand_is_as_good(server, cache):
    put(cache, "gaia")
    assert load("gaia", limit=1)[0].answer == "b, e" and (cache / "gaia.sha256.json").exists() and not server.asked


@pytest.mark.parametrize("answer, cause", [
    (lambda h: h.reply(BUN, 404), "404 Not Found"), (lambda h: h.reply(BUN, 503), "503 Service Unavailable"),
    (lambda h: h.reply(BUN, Content_Length=len(BUN) + 9), "the connection was dropped"),
    (lambda h: h.reply(BUN[:-9]), "not JSON"), (lambda h: h.reply(b"<html>Sign in</html>"), "not JSON"), (lambda h: h.reply(b""), "not JSON"),
    (lambda h: h.reply(b'{"message": "moved"}'), "not a JSON list"), (lambda h: h.reply(b'[{"a": 1}]'), 'no "query"'),
    (lambda h: h.reply(b" " * 300_000 + BUN), "more than 200000 bytes")])
def test_a_download_that_is_not_the_whole_file_leaves_nothing_and_says_what_to_do(answer, cause, server, cache, monkeypatch):
    monkeypatch.setattr(files, "CAP", 200_000)
    server.answers["/2wiki/data/data.json"] = answer
    with pytest.raises(ValueError, match=cause) as error:
        load("2wiki")
    assert f"download it by hand to {cache}/2wiki.json, or give --benchmark-dir FOLDER." in str(error.value)
    assert not list(cache.iterdir()) and "\n" not in str(error.value)
    server.answers["/2wiki/data/data.json"] = BUN
    assert len(load("2wiki")) == 1, "the next attempt is not spoilt"


def test_a_download_that_drips_without_end_is_given_up(server, cache, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0)
    server.answers["/2wiki/data/data.json"] = BUN
    with pytest.raises(ValueError, match="more than 50000000 bytes or 0 seconds"):
        load("2wiki")


def test_without_a_network_the_error_says_what_to_do(server, cache, monkeypatch):
    server.shutdown()
    server.server_close()
    with pytest.raises(ValueError, match="nobody listens there.*; download it by hand to"):
        load("2wiki")
    with pytest.raises(ValueError, match="cannot be downloaded: .*try later, or use --data FILE"):
        training("nq")


def test_a_cache_that_cannot_be_written_is_named(server, tmp_path):
    server.answers["/2wiki/data/data.json"] = BUN
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="set NANO_AGENTFLOW_CACHE to another folder"):
        load("2wiki", cache=tmp_path / "file")


# ------------------------------------------------------------------------------------------------------------ training sets
def serve_rows(server, numbers, **special):
    """The rows API over two sets of so many rows; special: row index -> what is odd about it."""
    def answer(handler):
        asked = {key: value[0] for key, value in parse_qs(urlsplit(handler.path).query).items()}
        start, length = int(asked["offset"]), int(asked["length"])
        assert asked["split"] == "train" and 1 <= length <= 100
        nq = asked["dataset"] == "RUC-NLPIR/FlashRAG_datasets" and asked["config"] == "nq"
        assert nq or (asked["dataset"], asked["config"]) == ("zwhe99/DeepMath-103K", "default")
        rows = [{"row_idx": i, "truncated_cells": special.get(f"cut{i}", []), "row":
                 {"id": f"train_{i}", "question": f"who baked bun {i}", "golden_answers": [f"Baker {i}", f"B{i}"]} if nq else
                 {"question": special.get(f"text{i}", f"Find {i} + 1. "), "final_answer": special.get(f"gold{i}", str(i + 1)), "difficulty": 5.0, "r1_solution_1": "..."}}
                for i in range(start, min(start + length, numbers))]
        handler.reply(json.dumps({"features": [], "rows": rows, "num_rows_total": numbers, "partial": False}).encode())
    server.answers["/rows"] = answer


def test_training_rows_become_questions_with_their_aliases(server, cache):
    serve_rows(server, 30)
    nq, math = (sorted(training(name, 30), key=lambda q: len(q.id))[0] for name in ("nq", "deepmath"))
    i, k = int(nq.id.removeprefix("nq-")), int(math.id.removeprefix("deepmath-"))
    assert nq == Question(f"who baked bun {i}?", f"Baker {i}", aliases=(f"B{i}",), id=f"nq-{i}", kind="nq")
    assert math == Question(f"Find {k} + 1.", str(k + 1), id=f"deepmath-{k}", kind="deepmath")


def test_a_sample_is_spread_over_the_set_and_the_same_for_the_same_seed(server, cache, tmp_path):
    serve_rows(server, 5000)
    first = training("nq+deepmath", 101, seed=1)
    assert first == training("nq+deepmath", 101, seed=1, cache=tmp_path / "elsewhere")
    assert {q.id for q in first} != {q.id for q in training("nq+deepmath", 101, seed=2)}
    assert Counter(q.kind for q in first) == {"nq": 51, "deepmath": 50}
    assert sum(a.kind != b.kind for a, b in zip(first, first[1:])) > 10, "mixed"
    assert len({int(q.id.split("-")[1]) // 1000 for q in first}) >= 3 and len({q.question for q in first}) == 101


def test_the_rows_are_kept_so_that_a_second_run_asks_nothing(server, cache):
    serve_rows(server, 500)
    first = training("nq", 50)
    asked = len(server.asked)
    assert training("nq", 50) == first and len(server.asked) == asked == 1 + 3
    assert read_questions(cache / "nq-seed0-50.jsonl")[0].kind == "nq"


def test_rows_that_are_cut_short_or_have_no_gold_are_not_used(server, cache):
    odd = {"cut3": ["question"], "cut4": ["r1_solution_1"], "gold5": "", "gold6": None, "gold7": "9" * 3000, "cut8": ["final_answer"],
           "text9": "Find 10 + 1"}
    serve_rows(server, 20, **odd)
    assert {int(q.id.split("-")[1]) for q in training("deepmath", 20)} == set(range(20)) - {3, 5, 6, 7, 8, 10}, "10 asks what 9 asks"


def test_a_busy_server_is_waited_for(server, cache):
    serve_rows(server, 40)
    good, refusals = server.answers["/rows"], [429, 503, 429]
    server.answers["/rows"] = lambda h: h.reply(b"{}", refusals.pop(), Retry_After=0) if refusals else good(h)
    assert len(training("nq", 20)) == 20 and not refusals


@pytest.mark.parametrize("answer, sentence", [
    (lambda h: h.reply(b'{"error": "no such dataset"}', 404), "404 Not Found"), (lambda h: h.reply(b"<html>"), "not JSON"),
    (lambda h: h.reply(b'{"rows": []}'), "answered in another form"),
    (lambda h: h.reply(b'{"rows": [{"row": 1}], "num_rows_total": 9}'), "answered in another form"), (lambda h: h.reply(b"[]"), "answered in another form"),
    (lambda h: h.reply(b'{"rows": [], "num_rows_total": 0}'), "no usable row of nq"),
    (lambda h: h.reply(b"{}", 429, Retry_After=3600), "asks to wait 3600 seconds")])
def test_a_rows_server_of_no_use_leaves_nothing_and_says_what_to_do(answer, sentence, server, cache):
    server.answers["/rows"] = answer
    with pytest.raises(ValueError, match=sentence) as error:
        training("nq", 10)
    assert "use --data FILE" in str(error.value) and not cache.exists()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_no_benchmark_is_ever_trained_or_validated_on(name):
    with pytest.raises(ValueError, match=f"{name} is a test benchmark: trained or chosen on it"):
        training(f"nq+{name}")


# ----------------------------------------------------------------------------------------------------------------- held out
def test_held_out_questions_are_never_nearly_trained_on():
    texts = [f"who was the author of the book number {i} of the long series" for i in range(40)]
    same = ["Who was the author of book number 7 of the long series?", "who was author of the book number 7 of the very long series"]
    questions = [Question(text, str(i)) for i, text in enumerate(texts + same)]
    train, valid, _ = first = held_out(questions, 3, seed=0)
    assert len(valid) == 3 and first == held_out(questions, 3, seed=0) != held_out(questions, 3, seed=1)
    words = [set(rules.normalise(q.question).split()) for q in valid]
    assert all(len(w & set(rules.normalise(q.question).split())) < 0.8 * len(w | set(rules.normalise(q.question).split()))
               for w in words for q in train)


def test_held_out_keeps_the_order_and_everything_else():
    questions = [Question(f"{word} is what?", word) for word in "iron gold lead zinc iron".split()]
    train, valid, _ = held_out(questions, 2, seed=3)
    names = [q.answer for q in valid]
    assert len(set(names)) == 2 and [q.answer for q in train] == [q.answer for q in questions if q.answer not in names]
    assert all(len({q.answer for q in held_out(questions, 3, seed)[1]}) == 3 for seed in range(10)), "two of one text are one"
    assert held_out(questions, 0, seed=3) == (questions, [], "")
    for number in (4, 5):
        with pytest.raises(ValueError, match="no question is left to train on: 1 of 5 .* --valid FILE.jsonl"):
            held_out(questions, number, seed=3)


def test_how_many_questions_are_left_out_because_they_are_near_a_held_out_one_is_said_with_the_reason():
    sums = [Question(f"What is {a} + {b}?", str(a + b)) for a in range(20) for b in range(20)]
    train, valid, note = held_out(sums, 64, seed=0)
    assert note.startswith(f"{400 - 64 - len(train)} of 400 questions are left out, because they share four ")
    assert len(train) < 200 and "one of the 64 held out" in note and "--valid FILE.jsonl keeps them" in note
    longer = [Question(f"Please tell me the sum of {q.question}", q.answer) for q in sums]
    with pytest.raises(ValueError, match="no question is left to train on: 336 of 400 questions are left"):
        held_out(longer, 64, seed=0)


# ---------------------------------------------------------------------------------------------------------------- the check
def test_the_check_counts_golds_and_answers_of_others_and_names_what_is_odd(tmp_path):
    rows = [{"query": "a?", "answer": "10"}, {"query": "b?", "answer": "10.0"}, {"query": "c?", "answer": ["!!", "x"]}]
    put(tmp_path, "musique", *rows)
    total, right, wrong, odd = check("musique", tmp_path)
    assert (total, right, wrong) == (3, 3, 1) and odd == ["item 0: '10.0' of another item is marked right for '10'"]


def test_the_command_prints_a_row_for_each_benchmark(tmp_path, capsys):
    for name in BENCHMARKS:
        put(tmp_path, name)
    assert tables.main(["--check", "--benchmark-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[1:11]] == list(BENCHMARKS) and all("100.0%" in line for line in printed[1:11])
    assert printed[11:] == ["no exceptions"]
    put(tmp_path, "musique", {"query": "a?", "answer": "10"}, {"query": "b?", "answer": "10.0"})
    assert tables.main(["--check", "--benchmark-dir", str(tmp_path)]) == 1
    assert "musique item 1: '10' of another item is marked right for '10.0'" in capsys.readouterr().out


@pytest.mark.skipif("NANO_AGENTFLOW_BENCHMARKS" not in os.environ,
                    reason="NANO_AGENTFLOW_BENCHMARKS does not name a folder with the ten real files")
@pytest.mark.parametrize("name", BENCHMARKS)
def test_in_the_real_files_golds_are_right_and_other_items_answers_wrong(name):
    total, right, wrong, odd = check(name, os.environ["NANO_AGENTFLOW_BENCHMARKS"])
    assert total >= BENCHMARKS[name].items and right >= 0.995 * total and wrong <= 0.02 * total, odd
