"""The toolbox: what each tool promises, and that nothing a model writes can break the flow."""
import functools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import tools
from tools import TOOLS, call, check, cut, describe, toolbox, wikipedia_search

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
    assert len(wikipedia_search("long word", corpus)) <= tools.PASSAGE_BUDGET


@pytest.mark.parametrize("query", ['" OR 1', "*", "NEAR(", "title:iron*", "a AND NOT b", "", "   ", "the", "'; drop table passages; --",
                                   "\x00", "\ud800", "漢字 ½ ß ﬁ नमस्ते", "(" * 500, "x " * 2000, "{title} : ^iron", "_"])
def test_no_query_is_an_operator_or_raises(corpus, query):
    box = toolbox(["wikipedia_search"], corpus)
    result, error = call(box, "wikipedia_search", {"query": query})
    assert error == result.startswith("Error: no passage") and "failed" not in result
    assert call(box, "wikipedia_search", {"query": "atomic number of iron"})[1] is False


# -------------------------------------------------------------------------------- the toolbox
def test_the_toolbox_keeps_its_order_and_binds_the_corpus(corpus):
    assert list(toolbox(["wikipedia_search", "base_generator"], corpus)) == ["base_generator", "wikipedia_search"]
    assert list(toolbox()) == ["base_generator", "python_coder"] and list(toolbox(None, corpus)) == list(TOOLS)


@pytest.mark.parametrize("names, words", [(["googel"], "'googel'"), ([], "no tool"), (["python_coder"] * 2, "twice"),
                                          (["wikipedia_search"], "needs a corpus")])
def test_a_wrong_list_of_tools_is_refused_in_a_sentence_that_names_the_known_ones(names, words):
    with pytest.raises(ValueError, match=words) as refusal:
        toolbox(names)
    assert all(name in str(refusal.value) for name in TOOLS)


@pytest.mark.parametrize("text, where", [(b'{"title": "a", "text": "b"}\n\nnot json\n', ":3: "), (b'{"title": "a"}\n', ":1: "),
                                         (b'[1]\n', ":1: "), (b'{"title": "a", "text": "\xff"}', ":1: "), (b"\n", ": "),
                                         (b'{"title": "a", "text": "\\ud800"}', ":1: ")])
def test_a_bad_corpus_is_refused_with_file_and_line(tmp_path, text, where):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=f"bad.jsonl{where}"):
        toolbox(None, path)


def test_a_missing_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="none.jsonl: cannot read"):
        toolbox(None, tmp_path / "none.jsonl")


def test_the_metadata_is_constant_and_tells_everything():
    for name, tool in TOOLS.items():
        text = describe(name, tool)
        assert text == describe(name, replace(tool, run=functools.partial(print))) and text.endswith("\n")
        for part in (name, tool.description, tool.limits, tool.example, *tool.arguments, *tool.arguments.values()):
            assert part in text
        assert tool.example.startswith(f"{name}({next(iter(tool.arguments))}=")


# -------------------------------------------------------------------------------- call
@pytest.mark.parametrize("name, arguments, said", [
    ("googel", {}, "Error: no tool called 'googel'. Use one of: base_generator, python_coder."),
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
    text = cut("a" * 500 + "z" * 500, 100)
    head, _, tail = text.partition(" ... [")
    number, _, tail = tail.partition(" characters cut] ... ")
    assert set(head) == {"a"} and set(tail) == {"z"} and len(head) + int(number) + len(tail) == 1000
    assert cut("short", 5) == "short"


def test_a_cut_never_exceeds_its_budget():
    for length in (0, 1, 9, 10, 99, 100, 101, 1000):
        for budget in range(130):
            assert len(cut("x" * length, budget)) <= budget
