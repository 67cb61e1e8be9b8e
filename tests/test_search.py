"""Searches: what a query finds in a corpus, on a page, on Wikipedia and with Google."""
import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from test_services import quick, reply, serve  # noqa: F401  (fixtures)

import tools
from executor import Call
from world import pages, search, services
from world.ranking import passages, ranked
from world.search import wikipedia_search
from world.toolbox import choose


def run_tool(box, name, arguments):
    """(text, is it an error) of one call."""
    result, = tools.run_calls([Call(name, arguments)], box, None)
    return result.text, result.error


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)


@pytest.fixture
def corpus(tmp_path):
    elements = "Iron Fe 26, Rubidium Rb 37, Hydrogen H 1, Gold Au 79, Magnesium Mg 12".split(", ")
    rows = [(name, f"{name} is a chemical element with the symbol {symbol} and atomic number {number}.")
            for name, symbol, number in map(str.split, elements)]
    rows += [("Curaçao", "Curaçao is an island. Its capital is Willemstad."), ("Long", "word " * 1000),
             ("Foundry", "A foundry casts iron, and iron, and iron.")]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in rows))
    return str(path)


# ------------------------------------------------------------ ranking
def test_passages_follow_each_other_and_none_is_long():
    assert passages("a b\n c  d e", 2) == ["a b", "c d", "e"] and passages(" \n") == []
    pieces = passages("x" * 10_000 + " y", 20)
    assert max(map(len, pieces)) <= 2020 and "".join(pieces).replace(" ", "") == "x" * 10_000 + "y"


ROWS = [("Iron", "Iron is a metal with atomic number 26."), ("Curaçao", "An island."),
        ("Copper", "A metal, soft and red."), ("", "")]


@pytest.mark.parametrize("query, k, best", [
    ("atomic number of iron", 1, [0]), ("curacao island", 3, [1]), ("metal", 3, [2, 0]),
    ("red METAL", 5, [2, 0]), ("zinc", 3, []), ("", 3, []), ("...", 3, []), ("— ½", 3, []), ("metal", 0, []),
    ("metal", -1, []), ("cura\u0327c\u0327ao", 3, [1]), ("metal!red", 1, [2])])
def test_the_best_rows_come_first(query, k, best):
    assert ranked(ROWS, query, k) == best


def test_rows_may_be_anything():
    assert ranked([], "iron", 3) == [] and ranked([("iron \ud800\0 x",), ('"',)], "x", 3) == [0]


@pytest.mark.parametrize("query", [
    '"', "'", '" OR 1', "*", "iron AND", "NOT iron", "zinc OR NOT b", "iron*", "NEAR(iron, 2)", "NEAR(",
    "title:iron*", "{title} : ^iron", "c0: iron", "(iron", "iron)", "(" * 500, "-iron", "+", "iron\0metal",
    "\0", "iron \ud800", "\ud800", "'; drop table passages; --", "%", "\\", "iron " * 5000, "x" * 100_000,
    "", "\n", "_", "the", "漢字 ½ ß ﬁ नमस्ते", " ".join(f"w{n}" for n in range(3000)), "iron\u0300", "🧲"],
                         ids=lambda query: ascii(query)[:20])
def test_no_query_is_an_operator_or_an_error(corpus, query):
    assert ranked(ROWS, query, 1) == ([0] if "iron" in query.lower() else [])
    box = choose(tools.TOOLS, ["wikipedia_search"], corpus)
    result, error = run_tool(box, "wikipedia_search", {"query": query})
    assert error == result.startswith("Error: no passage") and "failed" not in result
    assert run_tool(box, "wikipedia_search", {"query": "atomic number of iron"})[1] is False


# ------------------------------------------------------------ a corpus
IRON = "[1] Iron: Iron is a chemical element with the symbol Fe and atomic number 26."
CURACAO = "[1] Curaçao: Curaçao is an island. Its capital is Willemstad."


@pytest.mark.parametrize("query, answer", [
    ("atomic number of iron", IRON), ("What is the ATOMIC number of Iron?", IRON),
    ("capital city", "Error: no passage matches 'capital city'. Try other or fewer words."),
    ("capital city Curacao", CURACAO), ("is an", CURACAO),               # more than half; stop words alone
    ("value of 37 * 12", "Error: no passage matches 'value of 37 * 12'. Try other or fewer words.")])
def test_a_passage_is_found_by_all_or_by_more_than_half_of_the_words(corpus, query, answer):
    assert wikipedia_search(query, corpus).splitlines()[0] == answer


def test_results_are_a_line_each_the_title_counts_and_long_ones_are_cut(corpus):
    assert wikipedia_search("iron", corpus).splitlines()[0].startswith("[1] Iron:")
    two = wikipedia_search("chemical element", corpus, k=2)
    assert [line[:3] for line in two.splitlines()] == ["[1]", "[2]"]
    assert len(wikipedia_search("long word", corpus)) <= search.PASSAGE_BUDGET


@pytest.fixture
def large(corpus, monkeypatch):
    monkeypatch.setattr(search, "IN_MEMORY", 0)
    search.index.cache_clear()
    yield corpus
    search.index.cache_clear()


def test_the_index_of_a_large_corpus_is_built_once_beside_it(large, monkeypatch):
    first = wikipedia_search("atomic number of iron", large)
    search.index.cache_clear()
    monkeypatch.setattr(search, "build", None)                                  # a second build would raise
    assert wikipedia_search("atomic number of iron", large) == first == IRON
    assert sorted(path.name for path in Path(large).parent.iterdir()) == ["corpus.jsonl", "corpus.jsonl.fts5"]


def test_a_corpus_that_has_changed_is_indexed_again(large):
    assert wikipedia_search("unobtainium", large).startswith("Error:")
    with open(large, "a") as file:
        file.write('{"title": "Unobtainium", "text": "It is hard to get."}\n')
    search.index.cache_clear()
    assert wikipedia_search("unobtainium", large) == "[1] Unobtainium: It is hard to get."


@pytest.mark.parametrize("junk", [b"", b"SQLite format 3\0 half of one", b"\0" * 9999, None])
def test_half_an_index_is_not_trusted_and_where_none_can_be_written_it_is_in_memory(large, junk):
    beside = Path(large + ".fts5")
    beside.mkdir() if junk is None else beside.write_bytes(junk)
    assert wikipedia_search("atomic number of iron", large) == IRON


def test_a_file_and_memory_answer_alike(corpus, monkeypatch):
    queries = "iron", "capital city Curacao", "chemical symbol number gold nowhere", "a foundry", "nothing"
    answers = [wikipedia_search(query, corpus) for query in queries]
    monkeypatch.setattr(search, "IN_MEMORY", 0)
    search.index.cache_clear()
    assert [wikipedia_search(query, corpus) for query in queries] == answers


@pytest.mark.parametrize("text, where", [
    (b'{"title": "a", "text": "b"}\n\nnot json\n', ":3: "), (b'{"title": "a"}\n', ":1: "), (b'[1]\n', ":1: "),
    (b'{"title": "a", "text": "\xff"}', ":1: "), (b"\n", ": "),
    (b'{"title": "a", "text": "\\ud800"}', ":1: "), (None, ": cannot read")])
def test_a_bad_corpus_is_refused_with_file_and_line(tmp_path, text, where):
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ValueError, match=f"bad.jsonl{where}"):
        choose(tools.TOOLS, None, path)


# ------------------------------------------------------------ the pages of a corpus
PAGES = [{"title": "Iron", "text": "Iron is a metal. Its melting point is on https://iron.org/melting."},
         {"title": "Melting", "text": "First the ore is heated.", "url": "HTTPS://Iron.org/melting#top"},
         {"title": "Melting", "text": "At 1538 degrees, iron melts.", "url": "https://iron.org/melting"},
         {"title": "Empty", "text": "", "url": "https://iron.org/empty"},
         {"title": "Rust", "text": "Rust is an oxide of iron.", "url": None}]


@pytest.fixture
def with_pages(tmp_path, monkeypatch):
    """A corpus with pages, on a machine where no page can be fetched."""
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAGES))
    monkeypatch.setattr(pages, "fetch", None)  # calling it would be "web_search failed: TypeError"
    return str(path)


def read_page(corpus, url, query="degrees"):
    return run_tool(choose(tools.TOOLS, ["web_search"], corpus), "web_search", {"url": url, "query": query})


@pytest.mark.parametrize("url", ["https://iron.org/melting", " https://IRON.org:443/melting#bottom "])
def test_web_search_reads_a_page_of_the_corpus_under_any_spelling_of_its_address(with_pages, url):
    read = "[1] passage 2 of 2 (https://iron.org/melting): At 1538 degrees, iron melts."
    assert read_page(with_pages, url) == (read, False)


def test_without_a_word_of_the_query_a_page_of_the_corpus_is_read_from_its_beginning(with_pages):
    result, error = read_page(with_pages, "https://iron.org/melting", "zinc")
    assert not error and [line[:22] for line in result.splitlines()] == [
        "[1] passage 1 of 2 (ht", "[2] passage 2 of 2 (ht"]


@pytest.mark.parametrize("url, why", [
    ("https://iron.org/other", "not a page of the corpus"), ("http://iron.org/melting", "not a page of the"),
    ("https://iron.org/melting?a=1", "not a page of the corpus"), ("none", "not a URL that can be read"),
    ("file:///etc/passwd", "not a URL that can be read"), ("http://127.0.0.1/", "not at a public address"),
    ("", "not a URL that can be read"), ("' or '1' = '1", "characters that no URL has"),
    ("https://iron.org/empty", "has no text")])
def test_no_page_outside_the_corpus_is_read(with_pages, url, why):
    result, error = read_page(with_pages, url)
    assert error and why in result and "failed" not in result


def test_a_search_shows_which_passages_are_on_a_page_and_finds_no_word_of_its_address(with_pages):
    assert wikipedia_search("1538 degrees", with_pages) == (
        "[1] Melting (https://iron.org/melting): At 1538 degrees, iron melts.")
    assert wikipedia_search("org", with_pages).startswith("[1] Iron: ")
    assert wikipedia_search("oxide rust", with_pages) == "[1] Rust: Rust is an oxide of iron."


def test_pages_are_read_from_a_large_corpus_too_and_an_index_without_them_is_built_again(
        with_pages, monkeypatch):
    monkeypatch.setattr(search, "IN_MEMORY", 0)
    for old in (False, True):
        if old:  # as an index was before corpora had pages
            with contextlib.closing(sqlite3.connect(with_pages + ".fts5")) as table:
                table.executescript("drop table pages; update version set of = substr(of, 1, 9)")
        for _ in range(2):  # built, then read from the file
            search.index.cache_clear()
            assert "1538" in read_page(with_pages, "https://iron.org/melting")[0]
    search.index.cache_clear()


def test_a_corpus_without_pages_leaves_the_web_as_it_was(corpus, with_pages):
    assert choose(tools.TOOLS, ["web_search"], corpus)["web_search"].from_web
    assert choose(tools.TOOLS, ["web_search"])["web_search"].from_web
    box = choose(tools.TOOLS, ["web_search", "wikipedia_search"], with_pages)
    assert not box["web_search"].from_web and not box["wikipedia_search"].from_web


@pytest.mark.parametrize("url", ["3", '"iron.org"', '"file:///etc/passwd"', '"http://10.0.0.1/"', '["a"]'])
def test_a_corpus_with_a_bad_address_is_refused_with_file_and_line(tmp_path, url):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"title": "a", "text": "b"}\n{"title": "a", "text": "b", "url": %s}\n' % url)
    with pytest.raises(ValueError, match="bad.jsonl:2: "):
        choose(tools.TOOLS, ["web_search"], path)


# ------------------------------------------------------------ the network, on loopback
@pytest.fixture
def net(serve, monkeypatch):
    """A server in the place of Wikipedia and Serper; net(...) sets what it answers from now on."""
    server = serve(b"")
    monkeypatch.setattr(search, "WIKIPEDIA", server.url + "/{}/w/api.php")
    monkeypatch.setattr(search, "SERPER", server.url + "/serper")

    def answer(*answers):
        server.answers = [reply(json.dumps(data), **more) for data, more in
                          (data if isinstance(data, tuple) else (data, {}) for data in answers)]
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
    box = choose(tools.TOOLS, ["wikipedia_search"], f"wikipedia:{language}", cache)
    return run_tool(box, "wikipedia_search", {"query": query})


def test_the_live_wikipedia_is_searched_and_its_best_passages_come_with_their_pages(net):
    iron = page("Eisen", "Eisen ist ein Metall. " * 100 + "Schmelzpunkt 1538 Grad.")
    server = net(FOUND, iron, page("Rost", "Rost ist Oxid."))
    result, error = live("Schmelzpunkt")
    assert not error and result.startswith("[1] Eisen (https://de.wikipedia.org/wiki/Eisen): ")
    assert "1538" in result and "Rost" not in result
    for request in server.requests:
        assert request.startswith("GET /de/w/api.php?")
        assert "nano-agentflow" in request


@pytest.mark.parametrize("answer, result", [
    (NONE, "Error: no page matches 'xyzzy'. Try other or fewer words."),
    (WRONG, "Error: Wikipedia answered: Unrecognized value")])
def test_a_query_without_a_page_and_an_error_of_wikipedia_are_told(net, answer, result):
    net(answer)
    assert live("xyzzy") == (result, True)


@pytest.mark.parametrize("language", ["", "d/e", "en.evil.com#", "DE", "127.0.0.1:8000/", "en@evil"])
def test_a_language_is_a_language(language):
    with pytest.raises(ValueError, match="names no Wikipedia"):
        choose(tools.TOOLS, ["wikipedia_search"], f"wikipedia:{language}")


RESULTS = [{"title": "Iron", "link": "https://iron.org/", "snippet": "A metal."},
           {"title": "Rust", "link": "https://rust.org/"}]
SHOWN = "[1] Iron (https://iron.org/): A metal.\n[2] Rust (https://rust.org/):"


def test_google_gives_a_list_of_results_through_serper(net, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "hunter2")
    server = net({"organic": RESULTS, "answerBox": {"answer": "never shown"}})
    box = choose(tools.TOOLS, ["google_search"])
    assert run_tool(box, "google_search", {"query": "iron"}) == (SHOWN, False)
    request, = server.requests
    for part in ("POST /serper HTTP", "X-API-KEY: hunter2", '{"q": "iron", "num": 5}'):
        assert part in request


@pytest.mark.parametrize("answer", [
    ({"message": "key hunter2 is wrong"}, {"status": "403 No"}), ("hunter2", {"status": "500 Oops"}),
    "hunter2", [], ("hunter2", {"status": "429 Slow", "Retry_After": "3600"}),
    {"organic": [{"nothing": "hunter2"}]},
    ("", {"status": "302 Found", "Location": "http://127.0.0.1/?key=hunter2"})])
def test_no_failure_shows_or_keeps_a_key(net, monkeypatch, tmp_path, answer):
    monkeypatch.setenv("SERPER_API_KEY", "hunter2")
    net(answer)
    box = choose(tools.TOOLS, ["google_search"], cache=services.Cache(tmp_path / "cache"))
    result, error = run_tool(box, "google_search", {"query": "iron"})
    assert error and "hunter2" not in result and b"hunter2" not in (tmp_path / "cache").read_bytes()


def test_the_passages_of_a_page_nearest_the_query_are_read(monkeypatch):
    text = " ".join(f"word{n}" for n in range(1000)).replace("word777", "needle")
    monkeypatch.setattr(pages, "fetch", lambda url: pages.Page(url, text))
    box = choose(tools.TOOLS, ["web_search"])
    read = lambda url, query: run_tool(box, "web_search", {"url": url, "query": query})
    result, error = read(" https://a.org/ ", "the needle")
    assert not error and result.startswith("[1] passage 4 of 5 (https://a.org/): word600 ")
    assert "needle" in result
    first, _ = read("https://a.org/", "nowhere")
    assert [line[:22] for line in first.splitlines()] == [f"[{n}] passage {n} of 5 (ht" for n in (1, 2, 3)]
    assert len(first) <= tools.RESULT_BUDGET


def test_an_address_inside_is_refused_by_web_search():
    arguments = {"url": "http://127.0.0.1:8000/admin", "query": "key"}
    result, error = run_tool(choose(tools.TOOLS, ["web_search"]), "web_search", arguments)
    assert error and "not at a public address" in result


def test_what_the_web_has_answered_is_not_asked_again(net, tmp_path):
    cached = lambda language: live("Metall", language, services.Cache(tmp_path / "cache"))
    server = net(FOUND, page("Eisen", "Eisen ist ein Metall."), page("Rost", "Rost ist Oxid."), NONE)
    first = cached("de")
    assert cached("de") == first and len(server.requests) == 3
    assert cached("fr")[1] and len(server.requests) == 4      # another Wikipedia, another answer
    assert cached("fr")[1] and len(server.requests) == 4      # that there is nothing is known, too
    server = net(WRONG)
    assert all(cached("it")[1] for _ in range(2)) and len(server.requests) == 2  # what failed is tried again
