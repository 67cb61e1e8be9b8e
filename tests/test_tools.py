"""The toolbox: what each tool promises, and that nothing a model writes can break the flow."""
import ast
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

import tools
from executor import Call
from models.completion import Completion
from planner import describe
from tools import TOOLS, call, check, toolbox
from world import pages, search, services
from world.search import wikipedia_search


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for key in ("SERPER_API_KEY", "GOOGLE_API_KEY", "GOOGLE_CSE_ID"):
        monkeypatch.delenv(key, raising=False)


@pytest.fixture
def corpus(tmp_path):
    elements = [("Iron", "Fe", 26), ("Rubidium", "Rb", 37), ("Hydrogen", "H", 1), ("Gold", "Au", 79), ("Magnesium", "Mg", 12)]
    rows = [(name, f"{name} is a chemical element with the symbol {symbol} and atomic number {number}.")
            for name, symbol, number in elements]
    rows += [("Curaçao", "Curaçao is an island. Its capital is Willemstad."), ("Long", "word " * 1000),
             ("Foundry", "A foundry casts iron, and iron, and iron.")]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in rows))
    return str(path)


def test_many_threads_can_call_at_once(corpus):
    box, before = toolbox(None, corpus), threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        coded = [pool.submit(call, box, "python_coder", {"code": f"print({n})"}) for n in range(24)]
        found = [pool.submit(call, box, "wikipedia_search", {"query": "iron"}) for _ in range(24)]
    assert [f.result() for f in coded] == [(str(n), False) for n in range(24)]
    assert len({f.result() for f in found}) == 1 and threading.active_count() == before


# -------------------------------------------------------------------------------- wikipedia_search
def test_a_passage_with_all_words_is_found(corpus):
    text = "Iron is a chemical element with the symbol Fe and atomic number 26."
    assert wikipedia_search("atomic number of iron", corpus) == f"[1] Iron: {text}"
    assert wikipedia_search("What is the ATOMIC number of Iron?", corpus) == f"[1] Iron: {text}"


def test_a_shared_number_is_not_a_match(corpus):
    assert wikipedia_search("value of 37 * 12", corpus) == (
        "Error: no passage matches 'value of 37 * 12'. Try other or fewer words.")


def test_more_than_half_of_the_words_are_enough(corpus):
    assert wikipedia_search("capital city Curacao", corpus) == "[1] Curaçao: Curaçao is an island. Its capital is Willemstad."
    assert wikipedia_search("capital city", corpus).startswith("Error:")


def test_a_query_of_stop_words_alone_is_still_a_query(corpus):
    assert wikipedia_search("is an", corpus).startswith("[1] Curaçao")


def test_the_title_counts_more_than_the_text(corpus):
    assert wikipedia_search("iron", corpus).splitlines()[0].startswith("[1] Iron:")


def test_results_are_a_line_each_at_most_k_and_cut(corpus):
    assert [line[:3] for line in wikipedia_search("chemical element", corpus, k=2).splitlines()] == ["[1]", "[2]"]
    assert len(wikipedia_search("long word", corpus)) <= search.PASSAGE_BUDGET


@pytest.mark.parametrize("query", ['" OR 1', "*", "NEAR(", "title:iron*", "a AND NOT b", "", "   ", "the", "'; drop table passages; --",
                                   "\x00", "\ud800", "漢字 ½ ß ﬁ नमस्ते", "(" * 500, "x " * 2000, "{title} : ^iron", "_"])
def test_no_query_is_an_operator_or_raises(corpus, query):
    box = toolbox(["wikipedia_search"], corpus)
    result, error = call(box, "wikipedia_search", {"query": query})
    assert error == result.startswith("Error: no passage") and "failed" not in result
    assert call(box, "wikipedia_search", {"query": "atomic number of iron"})[1] is False


# -------------------------------------------------------------------------------- a large corpus
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
    assert wikipedia_search("atomic number of iron", large) == first and first.startswith("[1] Iron: ")
    assert sorted(path.name for path in Path(large).parent.iterdir()) == ["corpus.jsonl", "corpus.jsonl.fts5"]


def test_a_corpus_that_has_changed_is_indexed_again(large):
    assert wikipedia_search("unobtainium", large).startswith("Error:")
    with open(large, "a") as file:
        file.write('{"title": "Unobtainium", "text": "It is hard to get."}\n')
    search.index.cache_clear()
    assert wikipedia_search("unobtainium", large) == "[1] Unobtainium: It is hard to get."


@pytest.mark.parametrize("junk", [b"", b"SQLite format 3\0 half of one", b"\0" * 9999])
def test_half_an_index_is_not_trusted(large, junk):
    Path(large + ".fts5").write_bytes(junk)
    assert wikipedia_search("atomic number of iron", large).startswith("[1] Iron: ")


def test_where_nothing_can_be_written_the_index_is_in_memory(large, monkeypatch):
    Path(large + ".fts5").mkdir()
    assert wikipedia_search("atomic number of iron", large).startswith("[1] Iron: ")


def test_a_file_and_memory_answer_alike(corpus, monkeypatch):
    queries = ["iron", "capital city Curacao", "chemical symbol number gold nowhere", "a foundry", "nothing at all"]
    answers = [wikipedia_search(query, corpus) for query in queries]
    monkeypatch.setattr(search, "IN_MEMORY", 0)
    search.index.cache_clear()
    assert [wikipedia_search(query, corpus) for query in queries] == answers


# -------------------------------------------------------------------------------- what asks the network, on loopback
class Handler(BaseHTTPRequestHandler):
    """Gives the answers of self.server.answers in order, the last one again and again; remembers the requests."""
    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.server.asked.append((urlsplit(self.path), dict(self.headers), body))
        answers = self.server.answers
        status, headers, data = answers.pop(0) if len(answers) > 1 else answers[0]
        text = data if isinstance(data, str) else json.dumps(data)
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(text.encode())), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())
    do_POST = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def net(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.asked, server.answers = True, [], [(200, {}, {})]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(services, "PAUSE", 0.01)
    monkeypatch.setattr(search, "WIKIPEDIA", f"http://127.0.0.1:{server.server_port}/{{}}/w/api.php")
    for name in ("SERPER", "GOOGLE"):
        monkeypatch.setattr(tools, name, f"http://127.0.0.1:{server.server_port}/{name.lower()}")
    yield server
    server.shutdown()
    server.server_close()


def good(data):
    return 200, {}, data


def page(title, text):
    return good({"query": {"pages": [{"pageid": 1, "title": title, "fullurl": f"https://de.wikipedia.org/wiki/{title}", "extract": text}]}})


FOUND = good({"query": {"search": [{"pageid": 1, "title": "Eisen"}, {"pageid": 2, "title": "Rost"}]}})
NONE = good({"query": {"search": []}})


def live(language="de", cache=None):
    box = toolbox(["wikipedia_search"], f"wikipedia:{language}", cache)
    return lambda query: call(box, "wikipedia_search", {"query": query})


def test_the_live_wikipedia_is_searched_and_its_best_passages_come_with_their_pages(net):
    net.answers = [FOUND, page("Eisen", "Eisen ist ein Metall. " * 100 + "Schmelzpunkt 1538 Grad."), page("Rost", "Rost ist Oxid.")]
    result, error = live()("Schmelzpunkt")
    assert not error and result.startswith("[1] Eisen (https://de.wikipedia.org/wiki/Eisen): ") and "1538" in result and "Rost" not in result
    assert {parts.path for parts, _, _ in net.asked} == {"/de/w/api.php"} and all("maxlag=5" in parts.query for parts, _, _ in net.asked)
    assert all("nano-agentflow" in headers["User-Agent"] for _, headers, _ in net.asked)


def test_a_query_without_a_page_is_told(net):
    net.answers = [NONE]
    assert live()("xyzzy") == ("Error: no page matches 'xyzzy'. Try other or fewer words.", True)


def test_wikipedia_is_left_alone_while_its_databases_lag(net, monkeypatch):
    waited = []
    monkeypatch.setattr(tools.time, "sleep", waited.append)
    lag = 200, {"Retry-After": "7"}, {"error": {"code": "maxlag", "info": "Waiting for a database"}}
    net.answers = [lag, lag, NONE]
    assert "no page matches" in live()("x")[0] and waited == [7, 7]
    net.answers = [lag]
    assert live()("x") == ("Error: Wikipedia answered: Waiting for a database", True)
    net.answers, waited[:] = [(200, {"Retry-After": "999"}, lag[2])], []
    assert live()("x")[1] and waited == [], "who asks to wait for a quarter of an hour has failed"


def test_what_wikipedia_calls_an_error_is_one(net):
    net.answers = [good({"error": {"code": "badvalue", "info": "Unrecognized value"}})]
    assert live()("x") == ("Error: Wikipedia answered: Unrecognized value", True)


@pytest.mark.parametrize("language", ["", "d/e", "en.evil.com#", "DE", "127.0.0.1:8000/", "en@evil"])
def test_a_language_is_a_language(language):
    with pytest.raises(ValueError, match="names no Wikipedia"):
        toolbox(["wikipedia_search"], f"wikipedia:{language}")


RESULTS = [{"title": "Iron", "link": "https://iron.org/", "snippet": "A metal."}, {"title": "Rust", "link": "https://rust.org/"}]
SHOWN = "[1] Iron (https://iron.org/): A metal.\n[2] Rust (https://rust.org/):"


def test_google_gives_a_list_of_results_through_serper(net, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "hunter2")
    net.answers = [good({"organic": RESULTS, "answerBox": {"answer": "never shown"}})]
    assert call(toolbox(["google_search"]), "google_search", {"query": "iron"}) == (SHOWN, False)
    (parts, headers, body), = net.asked
    assert headers["X-API-KEY"] == "hunter2" and json.loads(body) == {"q": "iron", "num": 5} and "hunter2" not in parts.query


def test_google_gives_the_same_list_through_its_own_api(net, monkeypatch):
    monkeypatch.setenv("GOOGLE_API_KEY", "hunter2"), monkeypatch.setenv("GOOGLE_CSE_ID", "engine")
    net.answers = [good({"items": RESULTS})]
    assert call(toolbox(["google_search"]), "google_search", {"query": "iron"}) == (SHOWN, False)
    (parts, headers, _), = net.asked
    assert headers["X-Goog-Api-Key"] == "hunter2" and "cx=engine" in parts.query and "hunter2" not in parts.query


@pytest.mark.parametrize("answer", [(403, {}, {"message": "key hunter2 is wrong"}), (500, {}, "hunter2"), (429, {"Retry-After": "3600"}, "hunter2"), good("hunter2"),
                                    good({"organic": [{"nothing": "hunter2"}]}), (302, {"Location": "http://127.0.0.1/?key=hunter2"}, ""), good([])])
def test_no_failure_shows_or_keeps_a_key(net, monkeypatch, tmp_path, answer):
    monkeypatch.setenv("SERPER_API_KEY", "hunter2")
    net.answers = [answer]
    box = toolbox(["google_search"], cache=services.Cache(tmp_path / "cache"))
    result, error = call(box, "google_search", {"query": "iron"})
    assert error and "hunter2" not in result and b"hunter2" not in (tmp_path / "cache").read_bytes()


def test_a_tool_without_its_key_is_refused_if_named_and_left_out_if_not():
    with pytest.raises(ValueError, match="google_search needs SERPER_API_KEY, or GOOGLE_API_KEY and GOOGLE_CSE_ID in the environment: set it"):
        toolbox(["google_search"])
    assert "google_search" not in toolbox() and tools.missing("google_search") and not tools.missing("web_search")


def test_the_passages_of_a_page_nearest_the_query_are_read(monkeypatch):
    text = " ".join(f"word{n}" for n in range(1000)).replace("word777", "needle")
    monkeypatch.setattr(pages, "fetch", lambda url: pages.Page(url, text))
    result, error = call(toolbox(["web_search"]), "web_search", {"url": " https://a.org/ ", "query": "the needle"})
    assert not error and result.startswith("[1] passage 4 of 5 (https://a.org/): word600 ") and "needle" in result
    first, _ = call(toolbox(["web_search"]), "web_search", {"url": "https://a.org/", "query": "nowhere"})
    assert [line[:22] for line in first.splitlines()] == [f"[{n}] passage {n} of 5 (ht" for n in (1, 2, 3)] and len(first) <= tools.RESULT_BUDGET


def test_an_address_inside_is_refused_by_web_search():
    result, error = call(toolbox(["web_search"]), "web_search", {"url": "http://127.0.0.1:8000/admin", "query": "key"})
    assert error and "not at a public address" in result


def test_what_the_web_has_answered_is_not_asked_again(net, tmp_path):
    net.answers = [FOUND, page("Eisen", "Eisen ist ein Metall."), page("Rost", "Rost ist Oxid."), NONE]
    first = live(cache=services.Cache(tmp_path / "cache"))("Metall")
    assert live(cache=services.Cache(tmp_path / "cache"))("Metall") == first and len(net.asked) == 3
    assert live("fr", services.Cache(tmp_path / "cache"))("Metall")[1] and len(net.asked) == 4      # another Wikipedia, another answer
    assert live("fr", services.Cache(tmp_path / "cache"))("Metall")[1] and len(net.asked) == 4      # there is nothing, and that is known
    net.answers = [good({"error": {"code": "badvalue", "info": "no"}})]
    assert all(live("it", services.Cache(tmp_path / "cache"))("Metall")[1] for _ in range(2)) and len(net.asked) == 6      # what failed is tried again


# -------------------------------------------------------------------------------- the toolbox
def test_a_tool_is_added_as_the_readme_says():
    section = (Path(__file__).parent.parent / "README.md").read_text().split("## Adding a tool")[1]
    code = section.split("```python\n")[1].split("```")[0]
    space = dict(vars(tools), TOOLS=dict(TOOLS))
    exec(code, space)
    (name, tool), = [(name, tool) for name, tool in space["TOOLS"].items() if name not in TOOLS]
    assert len(code.strip().splitlines()) <= 10 and describe(name, tool)
    example = {word.arg: word.value.value for word in ast.parse(tool.example).body[0].value.keywords}
    assert call({name: tool}, name, example) == ("3", False)


def test_the_toolbox_keeps_its_order_and_binds_the_corpus(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "Iron", "text": "It is a metal."}\n')
    box = toolbox(["wikipedia_search", "base_generator"], corpus)
    assert list(box) == ["base_generator", "wikipedia_search"]
    assert call(box, "wikipedia_search", {"query": "iron"}) == ("[1] Iron: It is a metal.", False)
    assert list(toolbox(None, corpus)) == [name for name in TOOLS if name != "google_search"]


@pytest.mark.parametrize("names, why", [
    (["googel"], "'googel'"), ([], "no tool"), (["python_coder", "python_coder"], "twice")])
def test_a_wrong_list_of_tools_is_refused_in_a_sentence_that_names_the_known_ones(names, why):
    with pytest.raises(ValueError, match=why) as refusal:
        toolbox(names)
    assert all(name in str(refusal.value) for name in TOOLS)


@pytest.mark.parametrize("text, where", [
    (b'{"title": "a", "text": "b"}\n\nnot json\n', "bad.jsonl:3: "), (b'{"title": "a"}\n', "bad.jsonl:1: "),
    (b'[1]\n', "bad.jsonl:1: "), (b'{"title": "a", "text": "\xff"}', "bad.jsonl:1: "), (b"\n", "bad.jsonl: "),
    (b'{"title": "a", "text": "\\ud800"}', "bad.jsonl:1: "), (None, "bad.jsonl: cannot read"),
])
def test_a_bad_corpus_is_refused_with_file_and_line(tmp_path, text, where):
    if text is not None:
        (tmp_path / "bad.jsonl").write_bytes(text)
    with pytest.raises(ValueError, match=where):
        toolbox(None, tmp_path / "bad.jsonl")


def test_the_metadata_is_constant_and_tells_everything():
    for name, tool in TOOLS.items():
        text = describe(name, tool)
        assert text == describe(name, replace(tool, run=None)) and text.endswith("\n")
        for part in (name, tool.description, tool.limits, tool.example, *sum(tool.arguments.items(), ())):
            assert part in text
        assert tool.example.startswith(f"{name}({next(iter(tool.arguments))}=")


# -------------------------------------------------------------------------------- calls
def tool_of(run):
    """A tool with the argument "query", and this function behind it."""
    return replace(TOOLS["base_generator"], run=run)


@pytest.mark.parametrize("name, arguments, error", [
    ("googel", {}, "no tool called 'googel'. Use one of: base_generator, python_coder, wikipedia_search"),
    ("python_coder", {}, "python_coder needs the argument 'code'. Example: python_coder(code=\"print("),
    ("python_coder", {"code": 3}, "the argument 'code' of python_coder must be a string. Example: "),
    ("python_coder", {"code": "1", "seconds": "9"}, "python_coder has no argument 'seconds'. Example: "),
])
def test_a_call_that_cannot_work_gets_a_sentence_about_what_to_do_instead(name, arguments, error):
    text, is_error = call(toolbox(), name, arguments)
    assert text.startswith("Error: " + error) and is_error and check(toolbox(), name, arguments) == text


def test_a_good_call_has_nothing_wrong():
    assert check(toolbox(), "base_generator", {"query": "?"}) == ""
    assert call(toolbox(), "python_coder", {"code": "2 + 2"}) == ("4", False)


def test_an_exception_of_a_tool_is_shown_and_counted_and_not_swallowed():
    def broken(query):
        raise ConnectionError("the host is down")
    box, text = {"broken": tool_of(broken)}, "Error: broken failed: ConnectionError: the host is down"
    assert call(box, "broken", {"query": "x"}) == (text, True)
    assert call(box, None, {})[1] and call(box, "broken", None)[1] and call(box, [], {})[1]


def test_a_result_is_cut_to_the_budget_and_is_an_error_only_if_the_tool_says_so():
    echo = {"echo": tool_of(lambda query: query)}
    assert call(echo, "echo", {"query": "No Error: here"}) == ("No Error: here", False)
    assert len(call(echo, "echo", {"query": "x" * 10**6})[0]) <= tools.RESULT_BUDGET
    assert call(echo, "echo", {"query": "Error: " + "x" * 999}, budget=100)[1]


def test_a_batch_gives_results_in_order_and_generates_only_the_queries_of_base_generator(monkeypatch):
    clock, batches = [100], []
    monkeypatch.setattr(tools, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def engine(queries):
        batches.append(queries)
        clock[0] += 5
        return [Completion(f"<think>?</think>{query}!", [1], [2]) for query in queries]

    box = {"base_generator": TOOLS["base_generator"], "double": tool_of(lambda query: str(2 * int(query)))}
    queries = [("double", "4"), ("base_generator", "q"), ("double", "four"), ("base_generator", "q")]
    calls = [Call(name, {"query": query}) for name, query in queries]
    results = tools.run_calls([*calls, "no call"], box, engine)
    assert batches == [["q"]] and [result.text for result in results[:2]] == ["8", "q!"]
    assert results[2].text.startswith("Error: double failed: ") and results[4].text == "Error: no call"
    numbers = [(result.error, result.seconds, result.tokens) for result in results]
    assert numbers == [(False, 0, 0), (False, 5, 2), (True, 0, 0), (False, 5, 2), (True, 0, 0)]
