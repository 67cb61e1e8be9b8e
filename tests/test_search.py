"""Searches: what a query finds in a corpus, on a page, on Wikipedia and with Google."""

import json
import math
import os
import sqlite3
import subprocess
import sys
import threading
from collections import deque
from contextlib import closing
from pathlib import Path

import pytest
from test_house import ROOT
from test_services import quick, reply, serve  # noqa: F401  (fixtures)

import tools
from executor import Call
from record.flags import TOY
from tools import choose
from world import pages, search, services
from world.mistakes import Mistake
from world.search import passages, ranked, wikipedia_search, words_of


def run_tool(box, name, arguments):
    """(text, is it an error) of one call."""
    (result,) = tools.run_calls([Call(name, arguments)], [{}], box, None)
    return result.text, result.error


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    search.index.cache_clear()  # the path may be that of an earlier corpus
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    text = "{0} is a chemical element with the symbol {1} and atomic number {2}."
    elements = "Iron Fe 26, Rubidium Rb 37, Hydrogen H 1, Gold Au 79, Magnesium Mg 12"
    rows = [(row.split()[0], text.format(*row.split())) for row in elements.split(", ")]
    rows += [("Curaçao", "Curaçao is an island. Its capital is Willemstad.")]
    rows += [("Long", "word " * 1000), ("Foundry", "A foundry casts iron, and iron, and iron.")]
    return write(tmp_path / "corpus.jsonl", [{"title": row[0], "text": row[1]} for row in rows])


# -------------------------------------------------------------------------------- words, passages
def test_words_are_found_alike_in_texts_and_queries():
    assert words_of("Curaçao_1954!") == words_of("CURAC\u0327AO 19\u00ad54") == ["curacao", "1954"]
    assert words_of("Fe鉄の１") == ["fe", "鉄の", "鉄", "の", "1"]
    assert words_of("融点は 鉄", query=True) == ["融点", "点は", "鉄"]


@pytest.mark.parametrize("text", ["a word. " * 900, "x" * 10_000 + " y", "融点は" * 2000])
def test_passages_follow_each_other_and_none_is_long(text):
    found = passages(text)
    assert max(map(len, found)) <= search.PASSAGE
    assert "".join(found).replace(" ", "") == text.replace(" ", "")
    assert passages(" \n") == []


HOSTILE = """ " ' * NEAR( title:iron* {title}:^iron (iron -iron % \\ \ud800 iron\0metal
    _ 漢字½ßﬁ नमस्ते 🧲 ก็ """.split()
HOSTILE += ["", '" OR 1', "NOT iron", "iron AND", "'; drop table passages; --", "iron " * 5000]
HOSTILE += ["x" * 100_000, " ".join(f"w{n}" for n in range(3000)), "iron\u0300", "(" * 500]


def test_no_query_is_an_operator_or_an_error(corpus):
    box = choose(["wikipedia_search"], corpus)
    for query in HOSTILE:
        ranked(["iron", ""], query, 1)
        result, error = run_tool(box, "wikipedia_search", {"query": query})
        assert error == result.startswith("Error: no passage") and "failed" not in result, query
    assert not run_tool(box, "wikipedia_search", {"query": "atomic number of iron"})[1]


# --------------------------------------------------------------------------------------- a corpus
IRON = "[1] Iron: Iron is a chemical element with the symbol Fe and atomic number 26."
CURACAO = "[1] Curaçao: Curaçao is an island. Its capital is Willemstad."


@pytest.mark.parametrize(
    "query, answer",
    [
        ("What is the ATOMIC number of Iron?", IRON),
        ("capital city", "Error: no passage matches 'capital city'. Try other or fewer words."),
        ("capital city Curacao", CURACAO),  # more than half of the words
        ("is an", CURACAO),  # stop words alone
        ("value of 37 * 12", "Error: no passage matches 'value of 37 * 12'. Try other or fewer"),
    ],
)
def test_a_passage_is_found_by_all_or_by_more_than_half_of_the_words(corpus, query, answer):
    assert wikipedia_search(query, corpus).startswith(answer)


def test_results_are_a_line_each_and_the_title_counts(corpus):
    assert wikipedia_search("iron", corpus).splitlines()[0].startswith("[1] Iron:")
    two = wikipedia_search("chemical element", corpus, k=2)
    assert [line[:3] for line in two.splitlines()] == ["[1]", "[2]"]


@pytest.mark.parametrize(
    "before, fact, query",
    [
        ("The old town. " * 300, "Its depth is 197 metres.", "depth Zug"),
        ("Donaudampfschifffahrt " * 150, "Die Spannweite ist 197 Meter.", "Spannweite Zug"),
        ("山水天地人。" * 600, "黄河全长197公里。", "黄河 全长"),
    ],
)
def test_the_matching_passage_of_a_long_article_is_shown(tmp_path, before, fact, query):
    row = {"title": "Zug", "text": before + fact + before, "url": "https://zug.org/"}
    path = write(tmp_path / "long.jsonl", [row, {"title": "Depth", "text": "A length."}])
    assert "197" in wikipedia_search(query, path).splitlines()[0]
    assert "197" in search.web_search("https://zug.org/", query, corpus=path).splitlines()[0]


WORLD = {
    "铁": "铁是一种化学元素，熔点为1538摄氏度。",
    "东京": "东京是日本的首都，人口约1400万。",
    "富士山": "富士山は日本で最も高い山で、標高は3776メートルである。",
    "เหล็ก": "เหล็กมีจุดหลอมเหลวที่ 1538 องศาเซลเซียส",
    "서울": "서울의 인구는 약 940만 명이다.",
    "Zinc": "Zi\u00adnc melts\u200b at 420 de\u00adgrees.",
}


@pytest.mark.parametrize(
    "query, title",
    [
        ("铁的熔点是多少？", "铁"),
        ("東京 人口 东京", "东京"),
        ("富士山の標高は何メートルですか", "富士山"),
        ("จุดหลอมเหลวของเหล็ก", "เหล็ก"),
        ("서울 인구", "서울"),
        ("zin\u200bc mel\u00adts at 420 degrees", "Zinc"),
        ("37乘以12等于多少", None),
        ("太阳系最大的行星", None),
    ],
)
def test_texts_without_spaces_and_with_invisible_marks_are_found(tmp_path, query, title):
    rows = [{"title": title, "text": text} for title, text in WORLD.items()]
    found = wikipedia_search(query, write(tmp_path / "world.jsonl", rows)).splitlines()[0]
    wanted = f"[1] {title}: {WORLD[title]}" if title else "Error: no passage matches"
    assert found.startswith(wanted.replace("\u00ad", "").replace("\u200b", ""))


@pytest.mark.parametrize(
    "text, where",
    [
        (b'{"title": "a", "text": "b"}\n\nnot json\n', ":3: "),
        (b'{"title": "a"}\n', ":1: "),
        (b'{"title": 1, "text": 2}\n', ":1: "),
        (b'{"title": "a", "text": "\xff"}', ":1: "),
        (b'{"title": "a", "text": "\\ud800"}', ":1: "),
        (b'{"title": "a", "text": "b", "url": "file:///etc/passwd"}\n', ":1: "),
        (b"\n", ": this corpus of wikipedia_search has no passages"),
        (None, ": there is no such corpus"),
    ],
)
def test_a_bad_corpus_is_refused_with_file_and_line(tmp_path, text, where):
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ValueError, match=f"bad.jsonl{where}"):
        choose(None, path)


# ------------------------------------------------------------------------------- a large corpus
@pytest.fixture
def large(corpus, monkeypatch):
    monkeypatch.setattr(search, "IN_MEMORY", 0)
    return corpus


def test_the_index_of_a_large_corpus_is_built_once_beside_it(large, monkeypatch):
    assert wikipedia_search("atomic number of iron", large).splitlines() == [IRON]
    search.index.cache_clear()
    monkeypatch.setattr(search, "fill", None)  # a second build would raise
    assert wikipedia_search("atomic number of iron", large).splitlines() == [IRON]
    names = sorted(path.name for path in Path(large).parent.iterdir())
    assert names == ["corpus.jsonl", "corpus.jsonl.fts5"]


@pytest.mark.parametrize("end", ["", "-journal", "-wal"])
@pytest.mark.parametrize("how", ["symlink_to", "hardlink_to"])
def test_no_index_is_written_through_a_link(how, end, large, tmp_path):
    """A checkpoint names its corpus: whoever made it would choose what is overwritten."""
    ours = tmp_path / "ours"
    with closing(sqlite3.connect(ours, isolation_level=None)) as table:
        table.execute("create table words (word)")
    before = ours.read_bytes()
    getattr(Path(f"{large}.fts5{end}"), how)(ours)
    with pytest.raises(Mistake, match=rf"corpus\.jsonl\.fts5{end} is a link, .*: delete it"):
        search.index(large)
    assert ours.read_bytes() == before


def test_a_corpus_that_has_changed_is_indexed_again(large):
    assert wikipedia_search("unobtainium", large).startswith("Error:")
    with open(large, "a") as file:
        file.write('{"title": "Unobtainium", "text": "It is hard to get."}\n')
    search.index.cache_clear()
    assert wikipedia_search("unobtainium", large) == "[1] Unobtainium: It is hard to get."


def test_an_index_that_came_with_another_text_is_not_used(large):
    """Whoever sends both can choose size and mtime, and keep them."""
    before = Path(large).stat()
    assert wikipedia_search("atomic number of iron", large).splitlines() == [IRON]
    text = Path(large).read_text("utf-8").replace("26", "99")
    Path(large).write_text(text, "utf-8")
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Path(large).stat().st_size == before.st_size
    search.index.cache_clear()
    assert "99" in wikipedia_search("atomic number of iron", large)


def test_half_an_index_is_not_used(large, monkeypatch):
    rows = search.rows_of

    def stopped(corpus):
        yield next(rows(corpus))
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "rows_of", stopped)
    with pytest.raises(KeyboardInterrupt):
        search.index(large)
    monkeypatch.setattr(search, "rows_of", rows)
    assert wikipedia_search("foundry", large).startswith("[1] Foundry")


def test_a_second_process_waits_until_the_index_is_built(large, monkeypatch):
    built = []
    with closing(sqlite3.connect(f"{large}.fts5", isolation_level=None)) as other:
        other.execute("begin immediate")  # as another process that builds it
        thread = threading.Thread(target=lambda: built.append(wikipedia_search("foundry", large)))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        other.execute("rollback")
        thread.join()
    assert built[0].startswith("[1] Foundry")


# ----------------------------------------------------------------------------- pages of a corpus
PAGES = [
    {"title": "Iron", "text": "Iron is a metal. Its melting point is on https://iron.org/melting."},
    {"title": "Melting", "text": "First the ore is heated.", "url": "HTTPS://Iron.org/melting#top"},
    {"title": "Melting", "text": "At 1538 degrees, iron melts.", "url": "https://iron.org/melting"},
    {"title": "Empty", "text": "", "url": "https://iron.org/empty"},
    {"title": "Rust", "text": "Rust is an oxide of iron.", "url": None},
]


@pytest.fixture
def with_pages(tmp_path, monkeypatch):
    """A corpus with pages, on a machine where no page can be fetched."""
    monkeypatch.setattr(pages, "fetch", None)  # calling it would be "web_search failed: TypeError"
    return write(tmp_path / "pages.jsonl", PAGES)


def read_page(corpus, url, query="degrees"):
    return run_tool(choose(["web_search"], corpus), "web_search", {"url": url, "query": query})


@pytest.mark.parametrize("url", ["https://iron.org/melting", " https://IRON.org:443/melting#end "])
def test_web_search_reads_a_page_of_the_corpus_under_any_spelling_of_its_address(with_pages, url):
    read = "[1] passage 2 of 2 (https://iron.org/melting): At 1538 degrees, iron melts."
    assert read_page(with_pages, url) == (read, False)
    first, _ = read_page(with_pages, url, "zinc")
    assert first.startswith("[1] passage 1 of 2 (https://iron.org/melting): First the ore is")


@pytest.mark.parametrize(
    "url, why",
    [
        (
            "https://iron.org/other",
            "this address is not a page of the corpus: take one that",
        ),
        (
            "file:///etc/passwd",
            "this is not a URL that can be read: it must be http or https",
        ),
        ("' or '1' = '1", "this URL is too long, or has characters that no URL has"),
        ("http://127.0.0.1/", "this address is not a page of the corpus"),
        ("https://iron.org/empty", "https://iron.org/empty has no text."),
    ],
)
def test_no_page_outside_the_corpus_is_read(with_pages, url, why):
    result, error = read_page(with_pages, url)
    assert error and result.startswith(f"Error: {why}")


def test_a_search_shows_which_passages_are_on_a_page_and_finds_no_word_of_its_address(with_pages):
    found = wikipedia_search("1538 degrees", with_pages)
    assert found == "[1] Melting (https://iron.org/melting): At 1538 degrees, iron melts."
    assert wikipedia_search("org", with_pages).startswith("[1] Iron: ")
    assert wikipedia_search("oxide rust", with_pages) == "[1] Rust: Rust is an oxide of iron."


def test_a_corpus_without_pages_leaves_the_web_as_it_was(corpus, with_pages):
    assert choose(["web_search"], corpus)["web_search"].from_web
    box = choose(["web_search", "wikipedia_search"], with_pages)
    assert not box["web_search"].from_web and not box["wikipedia_search"].from_web


# -------------------------------------------------------------------- the network, on loopback
@pytest.fixture
def net(serve, monkeypatch):
    """A server in the place of Wikipedia and Serper; net(...) sets what it answers from now on."""
    server = serve(b"")
    monkeypatch.setattr(search, "WIKIPEDIA", server.url + "/{}/w/api.php")
    monkeypatch.setattr(search, "SERPER", server.url + "/serper")
    monkeypatch.setattr(search, "SENT", deque([-math.inf] * 190, maxlen=190))

    def answer(*answers, **more):
        server.answers = [reply(json.dumps(data), **more) for data in answers]
        server.requests = []
        return server

    return answer


def page(title, text):
    url = f"https://de.wikipedia.org/wiki/{title}"
    return {"query": {"pages": [{"pageid": 1, "title": title, "fullurl": url, "extract": text}]}}


FOUND = {"query": {"search": [{"pageid": 1, "title": "Eisen"}, {"pageid": 2, "title": "Rost"}]}}
NONE = {"query": {"search": []}}
WRONG = {"error": {"code": "badvalue", "info": "Unrecognized value"}}


def live(query, language="de", cache=None):
    box = choose(["wikipedia_search"], f"wikipedia:{language}", cache)
    return run_tool(box, "wikipedia_search", {"query": query})


def test_the_live_wikipedia_is_searched_and_its_best_passages_come_with_their_pages(net):
    iron = page("Eisen", "Eisen ist ein Metall. " * 100 + "Schmelzpunkt 1538 Grad.")
    server = net(FOUND, iron, page("Rost", "Rost ist Oxid."))
    result, error = live("Schmelzpunkt")
    assert not error and result.startswith("[1] Eisen (https://de.wikipedia.org/wiki/Eisen): ")
    assert "1538" in result and "Rost" not in result
    assert all(request.startswith("GET /de/w/api.php?") for request in server.requests)
    assert all(f"User-Agent: {search.WIKIMEDIA_AGENT}" in request for request in server.requests)


def test_wikimedia_learns_who_asks_and_gets_no_more_requests_a_minute_than_it_answers(
    net, monkeypatch
):
    command = [sys.executable, "-c", "from world.search import WIKIMEDIA_AGENT as it; print(it)"]
    env = os.environ | {"WIKIMEDIA_CONTACT": "me@example.org"}
    said = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.startswith("nano-agentflow/1.0 (me@example.org) python-requests/")
    monkeypatch.setattr(search, "CONTACT", "")
    assert "set WIKIMEDIA_CONTACT" in tools.without_contact(choose(["wikipedia_search"]))
    assert not tools.without_contact(choose(["wikipedia_search"], f"{TOY}/corpus.jsonl"))
    pauses = []
    monkeypatch.setattr(search, "SENT", deque([-math.inf] * 3, maxlen=3))
    monkeypatch.setattr(search.time, "sleep", pauses.append)
    net(*[NONE] * 4)
    for query in "abcd":
        live(query)
    assert pauses[:3] == [0, 0, 0] and 0 < pauses[3] <= 60


@pytest.mark.parametrize("language", ["", "d/e", "en.evil.com#", "DE", "127.0.0.1:80/", "en@evil"])
def test_a_language_is_a_language(language):
    with pytest.raises(ValueError, match="names no Wikipedia"):
        choose(["wikipedia_search"], f"wikipedia:{language}")


RESULTS = {  # what Serper says of a result -> what is shown of it
    "[1] Iron (https://iron.org/): A metal.": ("Iron", "https://iron.org/", "A metal."),
    "[2] https://a.org/ (https://a.org/): A.": (None, "https://a.org/", "A."),
    "[3] B: A letter.": ("B", None, "A letter."),
    "[4] 7 (https://d.org/):": (7, "https://d.org/", None),
}


def test_google_gives_a_list_of_results_through_serper_whatever_they_lack(net, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "hunter2")
    rows = [dict(zip(["title", "link", "snippet"], row)) for row in RESULTS.values()]
    rows[-1].pop("snippet")
    server = net({"organic": [{"position": 1}, None, *rows], "answerBox": {"answer": "not shown"}})
    found = run_tool(choose(["google_search"]), "google_search", {"query": "so\u2011called"})
    assert found == ("\n".join(RESULTS), False)
    (request,) = server.requests
    for part in ("POST /serper HTTP", "X-API-KEY: hunter2", '{"q": "so-called", "num": 5}'):
        assert part in request


@pytest.mark.parametrize(
    "answer, more",
    [
        ({"message": "key hunter2 is wrong"}, {"status": "403 No"}),
        ({"organic": [{"nothing": "hunter2"}]}, {}),
        ("", {"status": "302 Found", "Location": "http://127.0.0.1/?key=hunter2"}),
    ],
)
def test_no_failure_shows_or_keeps_a_key(net, monkeypatch, tmp_path, answer, more):
    monkeypatch.setenv("SERPER_API_KEY", "hunter2")
    net(answer, **more)
    box = choose(["google_search"], cache=services.Cache(tmp_path / "cache"))
    result, error = run_tool(box, "google_search", {"query": "iron"})
    assert error and "hunter2" not in result
    assert b"hunter2" not in (tmp_path / "cache").read_bytes()


def test_a_key_that_an_answer_quotes_is_hidden(net, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "0123456789abcdef")
    net({"organic": [{"title": "Your key", "link": "x", "snippet": "0123456789abcdef"}]})
    result, _ = run_tool(choose(["google_search"]), "google_search", {"query": "iron"})
    assert result == "[1] Your key (x): ***"


def test_the_passages_of_a_page_nearest_the_query_are_read(monkeypatch):
    text = " ".join(f"word{n}" for n in range(1000)).replace("word777", "needle")
    monkeypatch.setattr(pages, "fetch", lambda url: (url, text))
    box = choose(["web_search"])
    read = lambda url, query: run_tool(box, "web_search", {"url": url, "query": query})
    result, error = read(" https://a.org/ ", "the needle")
    assert not error and result.startswith("[1] passage 6 of 8 (https://a.org/): ")
    assert "needle" in result
    first, _ = read("https://a.org/", "nowhere")
    assert [line[:18] for line in first.splitlines()] == [
        f"[{n}] passage {n} of 8" for n in (1, 2, 3)
    ]
    assert len(first) <= tools.RESULT_BUDGET


def test_what_the_web_has_answered_is_not_asked_again(net, tmp_path):
    cached = lambda language: live("Metall", language, services.Cache(tmp_path / "cache"))
    iron, rust = page("Eisen", "Eisen ist ein Metall."), page("Rost", "Rost ist Oxid.")
    server = net(FOUND, iron, rust, NONE)
    first = cached("de")
    assert cached("de") == first and len(server.requests) == 3
    nothing = ("Error: no page matches 'Metall'. Try other or fewer words.", True)
    assert cached("fr") == nothing and len(server.requests) == 4  # another Wikipedia
    assert cached("fr") == nothing and len(server.requests) == 4  # that there is nothing is known
    server = net(WRONG)
    # failures are not kept
    assert cached("it")[1] and cached("it")[1] and len(server.requests) == 6


@pytest.mark.parametrize("second", [WRONG, page("Eisen", "")])
def test_pages_that_were_found_and_not_sent_are_a_failure_and_not_an_answer(net, tmp_path, second):
    cache = services.Cache(tmp_path / "cache")
    net(FOUND, second, second)
    result, error = live("Metall", cache=cache)
    assert error and "no page matches" not in result
    net(FOUND, page("Eisen", "Eisen ist ein Metall."), page("Rost", "Rost ist Oxid."))
    assert live("Metall", cache=cache)[0].startswith("[1] Eisen (")


def test_a_cache_leaves_a_result_that_is_no_text_to_run_tool():
    run = search.remembered(services.Cache(":memory:"), "five", lambda query: 5)
    assert [run(query="q"), run(query="q")] == [5, 5]
