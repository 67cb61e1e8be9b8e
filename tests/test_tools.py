"""The toolbox: what each tool promises, and that nothing a model writes can break the flow."""
import ast
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from test_search import corpus  # noqa: F401  (a fixture)

import tools
from planner import describe
from tools import TOOLS, call, check, toolbox
from world.text import truncate


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for key in ("SERPER_API_KEY", "GOOGLE_API_KEY", "GOOGLE_CSE_ID"):
        monkeypatch.delenv(key, raising=False)


def test_many_threads_can_call_at_once(corpus):
    box, before = toolbox(None, corpus), threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        coded = [pool.submit(call, box, "python_coder", {"code": f"print({n})"}) for n in range(24)]
        found = [pool.submit(call, box, "wikipedia_search", {"query": "iron"}) for _ in range(24)]
    assert [f.result() for f in coded] == [(str(n), False) for n in range(24)]
    assert len({f.result() for f in found}) == 1 and threading.active_count() == before


# -------------------------------------------------------------------------------- the toolbox
def test_a_tool_without_its_key_is_refused_if_named_and_left_out_if_not():
    with pytest.raises(ValueError, match="google_search needs SERPER_API_KEY, or GOOGLE_API_KEY and GOOGLE_CSE_ID in the environment: set it"):
        toolbox(["google_search"])
    assert "google_search" not in toolbox() and tools.missing("google_search") and not tools.missing("web_search")


def test_a_tool_is_added_as_the_readme_says():
    section = (Path(__file__).parent.parent / "README.md").read_text().split("## Adding a tool")[1]
    code = section.split("```python\n")[1].split("```")[0]
    space = dict(vars(tools), TOOLS=dict(TOOLS))
    exec(code, space)
    (name, tool), = [(name, tool) for name, tool in space["TOOLS"].items() if name not in TOOLS]
    assert len(code.strip().splitlines()) <= 10 and describe(name, tool)
    arguments = {key: value.value for key, value in ((word.arg, word.value) for word in ast.parse(tool.example).body[0].value.keywords)}
    assert call({name: tool}, name, arguments) == ("3", False)


def test_the_toolbox_keeps_its_order_and_binds_the_corpus(corpus):
    assert list(toolbox(["wikipedia_search", "base_generator"], corpus)) == ["base_generator", "wikipedia_search"]
    assert list(toolbox(None, corpus)) == [name for name in TOOLS if name != "google_search"]


@pytest.mark.parametrize("names, words", [(["googel"], "'googel'"), ([], "no tool"), (["python_coder"] * 2, "twice")])
def test_a_wrong_list_of_tools_is_refused_in_a_sentence_that_names_the_known_ones(names, words):
    with pytest.raises(ValueError, match=words) as refusal:
        toolbox(names)
    assert all(name in str(refusal.value) for name in TOOLS)


def test_the_metadata_is_constant_and_tells_everything():
    for name, tool in TOOLS.items():
        text = describe(name, tool)
        assert text == describe(name, replace(tool, run=functools.partial(print))) and text.endswith("\n")
        for part in (name, tool.description, tool.limits, tool.example, *tool.arguments, *tool.arguments.values()):
            assert part in text
        assert tool.example.startswith(f"{name}({next(iter(tool.arguments))}=")


# -------------------------------------------------------------------------------- call
@pytest.mark.parametrize("name, arguments, said", [
    ("googel", {}, "Error: no tool called 'googel'. Use one of: base_generator, python_coder, wikipedia_search, web_search."),
    ("python_coder", {}, "Error: python_coder needs the argument 'code'. Example: python_coder(code=\"print(2 + 2)\")"),
    ("python_coder", {"code": 3}, "Error: the argument 'code' of python_coder must be a string. Example: "),
    ("python_coder", {"code": "1", "seconds": "99"}, "Error: python_coder has no argument 'seconds'. Example: ")])
def test_a_call_that_cannot_be_is_told_what_to_do_instead(name, arguments, said):
    result, error = call(toolbox(), name, arguments)
    assert result.startswith(said) and error and check(toolbox(), name, arguments) == result


def test_a_good_call_has_nothing_wrong():
    assert check(toolbox(), "base_generator", {"query": "?"}) == ""
    assert call(toolbox(), "python_coder", {"code": "2 + 2"}) == ("4", False)


def test_an_exception_of_a_tool_is_told_and_counted_and_not_swallowed():
    def broken(query):
        raise ConnectionError("the host is down")
    box = {"broken": Tool_of(broken)}
    assert call(box, "broken", {"query": "x"}) == ("Error: broken failed: ConnectionError: the host is down", True)
    assert call(box, None, {})[1] and call(box, "broken", None)[1] and call(box, [], {})[1]


def test_error_is_true_only_if_the_tool_says_so():
    assert call({"echo": Tool_of(lambda query: query)}, "echo", {"query": "No Error: here"}) == ("No Error: here", False)


def test_a_result_is_cut_to_the_budget():
    box = {"echo": Tool_of(lambda query: query)}
    assert len(call(box, "echo", {"query": "x" * 10**6})[0]) <= tools.RESULT_BUDGET
    assert call(box, "echo", {"query": "Error: " + "x" * 999}, budget=100)[1]


def Tool_of(run):
    return replace(TOOLS["base_generator"], run=run)


def test_a_cut_keeps_head_and_tail_and_counts_what_is_gone():
    text = truncate("a" * 500 + "z" * 500, 100)
    head, _, tail = text.partition(" ... [")
    number, _, tail = tail.partition(" characters cut] ... ")
    assert set(head) == {"a"} and set(tail) == {"z"} and len(head) + int(number) + len(tail) == 1000
    assert truncate("short", 5) == "short"


def test_a_cut_never_exceeds_its_budget():
    for length in (0, 1, 9, 10, 99, 100, 101, 1000):
        for budget in range(130):
            assert len(truncate("x" * length, budget)) <= budget
