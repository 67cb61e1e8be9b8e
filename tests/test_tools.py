"""The toolbox: what each tool promises, and that nothing a model writes can break the flow."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_search import corpus, no_keys, run_tool  # noqa: F401  (fixtures)

import tools
from executor import Call
from models.completion import Completion
from planner import Unparsed, describe
from tools import TOOLS, choose, left_out, problem_with
from world import services


def test_many_threads_can_call_at_once(corpus):
    box, before = choose(None, corpus), threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        coded = [
            pool.submit(run_tool, box, "python_coder", {"code": f"print({n})"}) for n in range(24)
        ]
        found = [
            pool.submit(run_tool, box, "wikipedia_search", {"query": "iron"}) for _ in range(24)
        ]
    assert [f.result() for f in coded] == [(str(n), False) for n in range(24)]
    assert len({f.result() for f in found}) == 1 and threading.active_count() == before


# ------------------------------------------------------------------------------------ the toolset
def test_a_tool_without_its_key_is_refused_if_named_and_left_out_if_not(monkeypatch):
    with pytest.raises(ValueError, match="google_search needs SERPER_API_KEY in the environment"):
        choose(["google_search"])
    assert list(choose()) == [name for name in TOOLS if name != "google_search"]
    assert left_out() == "left out: google_search, which needs SERPER_API_KEY"
    monkeypatch.setenv("SERPER_API_KEY", "x")
    assert list(choose()) == list(TOOLS) and left_out() == ""


def test_the_toolset_keeps_its_order_and_reads_the_corpus(corpus):
    box = choose(["wikipedia_search", "base_generator"], corpus)
    assert list(box) == ["base_generator", "wikipedia_search"]
    assert run_tool(box, "wikipedia_search", {"query": "atomic number of iron"})[0].startswith(
        "[1] Iron:"
    )


def test_an_unknown_tool_is_refused_in_a_sentence_that_names_the_known_ones():
    with pytest.raises(ValueError, match="'googel': choose from base_generator, python_coder, "):
        choose(["googel"])


def test_a_cached_result_is_the_text_that_an_uncached_one_would_be(tmp_path, monkeypatch):
    results = iter(["7", "Error: down", "8"])
    tool = replace(TOOLS["python_coder"], run=lambda code: next(results), from_web=True)
    monkeypatch.setattr(tools, "TOOLS", {"count": tool})
    box = choose(cache=services.Cache(tmp_path / "cache.sqlite"))
    texts = [run_tool(box, "count", {"code": code})[0] for code in ("a", "a", "b", "b", "b")]
    assert texts == ["7", "7", "Error: down", "8", "8"]


def test_the_metadata_is_constant_and_tells_everything():
    for name, tool in TOOLS.items():
        text = describe(name, tool)
        assert text == describe(name, replace(tool, run=print)) and text.endswith("\n")
        for part in (
            name,
            tool.description,
            tool.limits,
            tool.example,
            *sum(tool.arguments.items(), ()),
        ):
            assert part in text
        assert tool.example.startswith(f"{name}({next(iter(tool.arguments))}=")


# -------------------------------------------------------------------------------- calls
def tool_of(run):
    """A tool with the argument "query", and this function behind it."""
    return replace(TOOLS["base_generator"], run=run)


@pytest.mark.parametrize(
    "name, arguments, error",
    [
        (
            "python_coder",
            {},
            "python_coder needs the argument 'code'. Example: python_coder(code=\"print(",
        ),
        (
            "python_coder",
            {"code": 3},
            "the argument 'code' of python_coder must be a string. Example: ",
        ),
        (
            "python_coder",
            {"code": "1", "seconds": "9"},
            "python_coder has no argument 'seconds'. Example: ",
        ),
    ],
)
def test_a_call_that_cannot_work_gets_a_sentence_about_what_to_do_instead(name, arguments, error):
    text, is_error = run_tool(choose(), name, arguments)
    assert text.startswith("Error: " + error) and is_error
    assert problem_with(Call(name, arguments), TOOLS) == text


def test_a_good_call_has_nothing_wrong():
    assert problem_with(Call("base_generator", {"query": "?"}), TOOLS) == ""
    assert run_tool(choose(), "python_coder", {"code": "2 + 2"}) == ("4", False)


def test_an_exception_of_a_tool_is_shown_and_counted_and_not_swallowed():
    def broken(query):
        raise ConnectionError("the host is down")

    box, text = (
        {"broken": tool_of(broken)},
        "Error: broken failed: ConnectionError: the host is down",
    )
    assert run_tool(box, "broken", {"query": "x"}) == (text, True)
    for name, arguments in ((None, {}), ("broken", None), ([], {})):  # what no parser lets through
        assert tools.run_tool(box, name, arguments).error


def test_a_tool_that_returns_nothing_or_ends_the_process_is_an_error_that_the_planner_reads():
    box = {
        "nothing": tool_of(lambda query: None),
        "ends": tool_of(lambda query: sys.exit("no licence")),
    }
    calls = [Call(name, {"query": "x"}) for name in box]
    results = tools.run_calls(calls, box, ask_model=None)
    assert [(result.text, result.error) for result in results] == [
        ("Error: no result", True),
        ("Error: ends failed: SystemExit: no licence", True),
    ]


def test_a_result_is_cut_to_the_budget_and_is_an_error_only_if_the_tool_says_so():
    echo = {"echo": tool_of(lambda query: query)}
    for text in ("No Error: here", "error: in small letters", "Errors: none"):
        assert run_tool(echo, "echo", {"query": text}) == (text, False)
    assert len(run_tool(echo, "echo", {"query": "x" * 10**6})[0]) <= tools.RESULT_BUDGET
    assert run_tool(echo, "echo", {"query": "Error: " + "x" * 10**6})[1]


def test_a_batch_gives_results_in_order_and_generates_only_the_queries_of_base_generator(
    monkeypatch,
):
    """The engine waits for the other tools, which end only if they run meanwhile, and adds 5 s afterwards."""
    clock, batches, doubled = [100], [], threading.Semaphore(0)
    monkeypatch.setattr(tools, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    Result = tools.Result

    def engine(queries):
        batches.append(queries)
        assert doubled.acquire(timeout=20) and doubled.acquire(timeout=20), (
            "the tools waited for the engine"
        )
        clock[0] += 5
        return [Completion(f"<think>?</think>{query}!", [1], [2]) for query in queries]

    def noticed(text, error, *rest):
        if text.startswith(("8", "Error: double")):
            doubled.release()
        return Result(text, error, *rest)

    monkeypatch.setattr(tools, "Result", noticed)
    box = {
        "base_generator": TOOLS["base_generator"],
        "double": tool_of(lambda query: str(2 * int(query))),
    }
    queries = [
        ("double", "4"),
        ("base_generator", "q"),
        ("double", "four"),
        ("base_generator", "q"),
    ]
    calls = [Call(name, {"query": query}) for name, query in queries]
    results = tools.run_calls([*calls, Unparsed("no call")], box, engine)
    assert batches == [["q", "q"]] and [result.text for result in results[:2]] == ["8", "q!"]
    assert (
        results[2].text.startswith("Error: double failed: ") and results[4].text == "Error: no call"
    )
    numbers = [(result.error, result.seconds, result.tokens) for result in results]
    assert numbers == [(False, 0, 0), (False, 2.5, 2), (True, 0, 0), (False, 2.5, 2), (True, 0, 0)]


def test_a_query_that_is_no_string_has_no_tokens_and_no_outage_of_another_rollouts_query():
    calls = [Call("base_generator", {"query": query}) for query in ("5", 5, ["5"])]
    box, down = (
        {"base_generator": TOOLS["base_generator"]},
        Completion("", [1], [2], "the server is down"),
    )
    results = tools.run_calls(calls, box, lambda queries: [down])
    assert [(result.failed, result.tokens) for result in results] == [
        ("the server is down", 0),
        ("", 0),
        ("", 0),
    ]
    assert [result.text for result in results[1:]] == [
        problem_with(call, box) for call in calls[1:]
    ]


def test_a_wrong_call_is_never_sent_to_the_language_model_and_an_empty_query_is_not_wrong():
    box, batches = {"base_generator": TOOLS["base_generator"]}, []
    wrong = [{}, {"query": "q", "more": "x"}, {"query": None}]
    calls = [Call("base_generator", arguments) for arguments in [*wrong, {"query": ""}]]
    engine = lambda queries: batches.append(queries) or [Completion("an answer", [1], [2])]
    results = tools.run_calls(calls, box, engine)
    assert batches == [[""]] and [result.error for result in results] == [True, True, True, False]
    assert [result.text for result in results] == [
        *(problem_with(call, box) for call in calls[:-1]),
        "an answer",
    ]


def test_what_the_language_model_writes_is_cut_to_the_budget_too():
    box, long = (
        {"base_generator": TOOLS["base_generator"]},
        Completion("Error: " + "x" * 10**6, [1], [2]),
    )
    [result] = tools.run_calls(
        [Call("base_generator", {"query": "q"})], box, lambda queries: [long]
    )
    assert len(result.text) <= tools.RESULT_BUDGET and "[cut]" in result.text and result.error


def test_if_the_engine_fails_the_calls_that_wait_are_not_begun(monkeypatch):
    begun, ending = threading.Semaphore(0), threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, **settings):
            super().shutdown(wait=False, **settings)
            ending.set()  # the calls that run end only now
            super().shutdown()

    def slow(query):
        begun.release()
        return str(ending.wait(20))

    def engine(queries):
        assert all(begun.acquire(timeout=20) for _ in range(8))  # as many as run at a time
        raise MemoryError

    monkeypatch.setattr(tools, "ThreadPoolExecutor", Pool)
    box = {"base_generator": TOOLS["base_generator"], "slow": tool_of(slow)}
    calls = [Call("slow", {"query": str(n)}) for n in range(99)] + [
        Call("base_generator", {"query": "q"})
    ]
    with pytest.raises(MemoryError):
        tools.run_calls(calls, box, engine)
    assert ending.is_set() and not begun.acquire(blocking=False)
