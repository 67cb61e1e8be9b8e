"""The toolset, and how the calls of a turn run: nothing that a model writes can break the flow."""

import sys
import threading

import pytest

import tools
from executor import Call
from models.completion import TOO_LONG, Completion
from planner import describe
from record.flags import TOY, remembered, solve_flags
from tools import TOOLS, Tool, choose, left_out, run_calls
from world import services


def tool(run, **settings):
    """A tool with the argument "query", and this function behind it."""
    return Tool(run, "Does it.", {"query": "what"}, "None.", 'it(query="x")', **settings)


def results(box, *calls, ask=None, states=None):
    """The results of calls, each given as (name, query)."""
    calls = [Call(name, {"query": query}) for name, query in calls]
    return run_calls(calls, states or [{} for _ in calls], box, ask)


# ------------------------------------------------------------------------------------ the toolset
def test_a_tool_without_its_key_is_refused_if_named_and_else_left_out(monkeypatch):
    for name, why in {"googel": "choose from base_gen", "google_search": "needs SERPER_"}.items():
        with pytest.raises(ValueError, match=f"{name}'?:? {why}"):
            choose([name])
    assert list(choose(["web_search", "base_generator"])) == ["base_generator", "web_search"]
    assert list(choose()) == [name for name in TOOLS if name != "google_search"]
    assert left_out(choose()) == "left out: google_search, which needs SERPER_API_KEY"
    monkeypatch.setenv("SERPER_API_KEY", "x")
    assert list(choose()) == list(TOOLS) and left_out(TOOLS) == ""


def test_a_tool_that_a_checkpoint_was_not_trained_with_is_left_out_and_named():
    trained_with = remembered(solve_flags(["--model", TOY], tools=TOOLS, about=""))["tools"]
    tools = TOOLS | {"word_count": TOOLS["base_generator"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.TOOLS", tools)
        said = left_out(choose(trained_with, f"{TOY}/corpus.jsonl"))
    assert "; word_count, which is not in --tools, nor in the toolset that the model was" in said


def test_a_cached_result_is_the_text_that_an_uncached_one_would_be(tmp_path, monkeypatch):
    answers = iter(["7", "Error: down", "8"])
    box = {"count": tool(lambda query: next(answers), from_web=True)}
    monkeypatch.setattr(tools, "TOOLS", box)
    box = choose(cache=services.Cache(tmp_path / "cache.sqlite"))
    texts = [results(box, ("count", query))[0].text for query in "aabbb"]
    assert texts == ["7", "7", "Error: down", "8", "8"]


def test_a_tool_with_a_state_runs_each_time_also_with_a_cache(tmp_path, monkeypatch):
    nth = lambda query, state: str(state.setdefault("seen", []).append(query) or state["seen"])
    monkeypatch.setattr(tools, "TOOLS", {"nth": tool(nth, from_web=True, stateful=True)})
    box = choose(cache=services.Cache(tmp_path / "cache.sqlite"))
    states = [{}, {}]
    for text in ("['a']", "['a', 'a']"):
        found = results(box, ("nth", "a"), ("nth", "a"), states=states)
        assert [result.text for result in found] == [text, text]


def test_the_description_of_a_tool_tells_everything():
    for name, tool in TOOLS.items():
        parts = tool.description, tool.limits, tool.example, *sum(tool.arguments.items(), ())
        assert all(part in describe(name, tool) for part in parts)
        assert tool.example.startswith(f"{name}({next(iter(tool.arguments))}=")


# ------------------------------------------------------------------------------------------ calls
@pytest.mark.parametrize(
    "arguments, error",
    [
        ({}, "it needs the argument 'query'. Example: it("),
        ({"query": 3}, "the argument 'query' of it must be a string. Example: "),
        ({"query": "1", "more": "9"}, "it has no argument 'more'. Example: "),
    ],
)
def test_a_call_that_cannot_run_says_what_to_do_and_reaches_no_function(arguments, error):
    for run in (None, sys.exit):  # a language model, or a function
        [result] = run_calls([Call("it", arguments)], [{}], {"it": tool(run)}, None)
        assert result.text.startswith("Error: " + error) and result.error


def test_what_a_function_does_wrong_is_an_error_that_the_planner_reads():
    def broken(query):
        if query == "nothing":
            return None
        if query == "a part":
            return (part for part in "it")
        raise {"down": services.ServiceError("no network"), "exit": SystemExit("no licence")}[query]

    async def later(query):
        return query

    texts = "nothing", "a part", "down", "exit", "?"
    found = results({"it": tool(broken)}, *(("it", text) for text in texts))
    with pytest.warns(RuntimeWarning, match="never awaited"):
        found += results({"it": tool(later)}, ("it", "x"))
    assert all(result.error and not result.failed for result in found)
    assert [result.text for result in found] == [
        "Error: no result",
        "Error: it failed: TypeError: it returned a generator, not a string",
        "Error: no network",
        "Error: it failed: SystemExit: no licence",
        "Error: it failed: KeyError: '?'",
        "Error: it failed: TypeError: it returned a coroutine, not a string",
    ]


@pytest.mark.parametrize("name, needs", [("MINE_KEY", ()), ("MINE_ID", ("MINE_ID",))])
def test_no_tool_of_yours_shows_a_key_to_a_model(name, needs, monkeypatch):
    monkeypatch.setattr(services, "KEYS", set())
    monkeypatch.setenv(name, "0123456789abcdef")

    def mine(query):
        if query == "down":
            raise OSError("cannot reach https://mine.org/?key=0123456789ab...")
        return "It got the key 0123456789abcdef."

    found = results({"it": tool(mine, needs=needs)}, ("it", "down"), ("it", "up"))
    texts = [
        "Error: it failed: OSError: cannot reach https://mine.org/?key=***",
        "It got the key ***.",
    ]
    assert [result.text for result in found] == texts


def test_a_result_is_truncated_and_is_an_error_only_if_the_tool_says_so():
    box = {"echo": tool(lambda query: query), "ask": tool(None)}
    texts = "No Error: here", "error: in small letters", "Error: " + "x" * 10**6, "x" * 10**6
    ask = lambda queries: [Completion(query, [], []) for query in queries]
    for name in box:
        found = results(box, *((name, text) for text in texts), ask=ask)
        assert [result.error for result in found] == [False, False, True, False]
        assert max(len(result.text) for result in found) == tools.RESULT_BUDGET


def test_functions_run_at_the_same_time_while_the_language_model_gets_one_batch():
    meet, batches = threading.Barrier(3, timeout=60), []  # breaks, unless three are there at once

    def ask(queries):
        meet.wait()
        batches.append(queries)
        texts = {"iron": "<think>?</think>Fe", "mute": "<think>?"}
        return [Completion(texts[query], [1], [2]) for query in queries]

    box = {"slow": tool(lambda query: meet.wait() and "" or query), "ask": tool(None)}
    calls = ("slow", "a"), ("ask", "iron"), ("slow", "b"), ("ask", "iron"), ("ask", "mute")
    found = results(box, *calls, ask=ask)
    assert batches == [["iron", "iron", "mute"]]
    assert [result.text for result in found] == ["a", "Fe", "b", "Fe", "Error: no answer"]
    assert [result.tokens for result in found] == [0, 2, 0, 2, 2]


def test_what_becomes_of_a_query_that_is_too_long_or_not_answered_or_cut():
    answers = [Completion("", [], [], error) for error in (TOO_LONG, "host is down")]
    answers += [Completion(text, [], [], cut=True) for text in ("It is 1", "<think>It")]
    found = results({"ask": tool(None)}, *[("ask", q) for q in "abcd"], ask=lambda queries: answers)
    texts = [f"Error: {TOO_LONG}", "", "It is 1 ... [cut] ... ", "Error: no answer"]
    assert [result.text for result in found] == texts
    assert [result.failed for result in found] == ["", "host is down", "", ""]


def test_equal_calls_of_a_turn_run_once_but_each_rollout_has_a_state_of_its_own():
    ran = []

    def count(query, state):
        state["n"] = state.get("n", 0) + 1
        return f"{query} {state['n']}"

    box = {
        "once": tool(lambda query: ran.append(query) or query),
        "count": tool(count, stateful=True),
    }
    states = [{}, {}, {}]
    for turn in (1, 2):
        found = results(box, ("count", "x"), ("count", "x"), ("once", "x"), states=states)
        assert [result.text for result in found] == [f"x {turn}", f"x {turn}", "x"]
    results(box, *[("once", "y")] * 9)
    assert ran == ["x", "x", "y"] and states == [{"n": 2}, {"n": 2}, {}]
