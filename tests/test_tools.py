"""The toolbox: what each tool promises, and that nothing a model writes can break the flow."""
import functools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import tools
from tools import TOOLS, call, check, cut, describe, python_coder, toolbox, wikipedia_search

NAMESPACES = python_coder("import os; print(os.getsid(0) < 10)") == "True"
needs_namespaces = pytest.mark.skipif(not NAMESPACES, reason="this system does not let us have namespaces")


@pytest.fixture(params=[True, False], ids=["namespaces", "no namespaces"])
def either_way(request, monkeypatch):
    monkeypatch.setattr(tools, "NAMESPACES", request.param)


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


def alive(mark):
    """Is a process with this word on its command line running, of ours or of a namespace below?"""
    def words(path):
        try:
            return path.read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            return []
    return any(mark.encode() in words(path) for path in Path("/proc").glob("[0-9]*/cmdline"))


# -------------------------------------------------------------------------------- python_coder: what it answers
@pytest.mark.parametrize("code, result", [
    ("print(2 + 2)", "4"), ("2 + 2", "4"), ("'a'", "'a'"), ("x = 3\nx", "3"), ("print(1)\nNone", "1"), ("print(1); 2", "1\n2"),
    ("for i in range(2): print(i)", "0\n1"), ("import sys; sys.stderr.write('seen\\n')\nprint(1)", "seen\n1"),
    ("print('é ∑ 漢')", "é ∑ 漢"), ("print(1)\nexit()", "1"), ("import sys\nprint(1)\nsys.exit(0)", "1"),
    ("print(__name__)", "__main__"), ("from __future__ import annotations\n1", "1")])
def test_the_code_answers_with_what_it_prints_and_its_last_expression(code, result):
    assert python_coder(code) == result


@pytest.mark.parametrize("code, result", [
    ("x", "Error: NameError: name 'x' is not defined (line 1)"),
    ("print(7)\n\n1 / 0", "Error: ZeroDivisionError: division by zero (line 3)\nPrinted before: 7"),
    ("def f():\n    return {}['k']\nf()", "Error: KeyError: 'k' (line 2)"),
    ("import json\njson.loads('?')", "Error: JSONDecodeError: Expecting value: line 1 column 1 (char 0) (line 2)"),
    ("x = (1", "Error: SyntaxError: '(' was never closed (line 1)"),
    ("assert False", "Error: AssertionError (line 1)"),
    ("import sys; sys.exit('bye')", "Error: SystemExit: bye (line 1)"),
    ("import os; os._exit(3)", "Error: the code ended with exit status 3"),
    ("import os; os.kill(os.getpid(), 11)", "Error: killed by signal 11")])
def test_an_error_names_the_exception_and_the_line_and_keeps_what_was_printed(code, result):
    assert python_coder(code) == result


def test_no_output_is_said_in_a_sentence():
    assert python_coder("x = 1") == python_coder("") == "Nothing was printed. Use print() to show a result."


def test_the_code_runs_once_in_one_scope():
    code = """import math
def fact(n): return 1 if n < 2 else n * fact(n - 1)
def root(x): return math.sqrt(x)
k = 2
if __name__ == "__main__":
    print("once", fact(5), root(9), [k * i for i in range(3)])"""
    assert python_coder(code) == "once 120 3.0 [0, 2, 4]"


def test_the_same_code_gives_the_same_text_every_time():
    assert len({python_coder("print({str(i) for i in range(50)})") for _ in range(3)}) == 1


def test_deep_recursion_is_an_error_and_not_a_crash():
    assert python_coder("def f(): f()\nf()").startswith("Error: RecursionError")
    hard = "import sys; sys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(self): return repr([self])\nrepr(A())"
    assert python_coder(hard).startswith("Error: ")


def test_bytes_that_are_not_utf8_are_shown_as_well_as_possible():
    assert python_coder("import os; os.write(1, b'a\\xff\\x00b')\nNone") == "a\ufffd\x00b"


def test_a_long_program_arrives_whole():
    assert python_coder("x = 1\n" * 20_000 + "x") == "1"


# -------------------------------------------------------------------------------- python_coder: what it prevents
def test_time_is_limited_and_what_was_printed_is_kept(either_way):
    start = time.monotonic()
    assert python_coder("print(1)\nwhile True: pass", seconds=0.5) == "Error: stopped after 0.5 seconds\nPrinted before: 1"
    assert time.monotonic() - start < 4


def test_threads_that_never_end_are_ended(either_way):
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\nprint('main is done')"
    assert python_coder(code, seconds=0.5) == "Error: stopped after 0.5 seconds\nPrinted before: main is done"


def test_memory_is_limited(either_way):
    assert python_coder("x = bytearray(1 << 30)") == "Error: MemoryError (line 1)"
    assert python_coder("x = []\nwhile True: x.append(' ' * 9999)", memory_mb=128) == "Error: MemoryError (line 2)"
    assert python_coder("x = []\nwhile True: x = [x]", memory_mb=128).startswith("Error: MemoryError")  # not a byte is left


def test_a_fork_bomb_is_stopped(either_way):
    result = python_coder("import os\nwhile True: os.fork()", seconds=5)
    assert "too many processes" in result or "BlockingIOError" in result


def test_the_size_of_a_file_is_limited(either_way):
    assert "File too large" in python_coder("open('f', 'wb').write(bytes(99 << 20))")


def test_endless_output_is_stopped_soon(either_way):
    start = time.monotonic()
    result = python_coder("while True: print('é')")
    assert result.startswith("Error: stopped after printing 65536 characters\nPrinted before: é\né")
    assert len(result) < 70_000 and time.monotonic() - start < 4


def test_our_environment_is_not_passed_on(either_way, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    code = "import os, subprocess\nprint(dict(os.environ))\nprint(subprocess.run('env', capture_output=True).stdout)"
    assert "hunter2" not in python_coder(code)


@needs_namespaces
def test_the_environment_of_our_process_cannot_be_read_through_proc():
    script = "import tools; print(tools.python_coder(%r))" % """
import glob
for name in glob.glob("/proc/[0-9]*/environ"):
    try: print(open(name).read())
    except OSError: pass"""
    ours = subprocess.run([sys.executable, "-c", script], env={**os.environ, "SECRET_KEY": "hunter2"}, capture_output=True, text=True)
    assert "PYTHONHASHSEED" in ours.stdout and "hunter2" not in ours.stdout


def test_the_folder_is_empty_before_and_gone_afterwards(either_way):
    code = "import os\nprint(os.listdir())\nos.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a/b', 0); os.chmod('a', 0)\nprint(os.getcwd())"
    before, folder = python_coder(code).splitlines()
    assert before == "[]" and not os.path.exists(folder)


def test_stdin_is_empty(either_way):
    assert python_coder("input()") == "Error: EOFError: EOF when reading a line (line 1)"


@pytest.mark.parametrize("escape", ["os.setsid()", "os.setsid(); os.fork() and os._exit(0)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_nothing_goes_on_afterwards(either_way, escape):
    mark = f"8{time.time_ns() % 10**9:09d}"
    code = f"""import os, signal, time
if os.fork() == 0:
    {escape}
    os.execvp("sleep", ["sleep", "{mark}"])
time.sleep(0.3); print("done")"""
    with ThreadPoolExecutor() as pool:
        result, seen = pool.submit(python_coder, code), False
        while not result.done():
            seen = seen or alive(mark)
    assert result.result() == "done" and seen and not alive(mark)


@needs_namespaces
def test_nobody_outside_can_be_killed():
    code = "import os\nfor pid in [os.getppid(), 1, -1]:\n    try: os.kill(pid, 9)\n    except OSError: pass\nprint('still here')"
    assert python_coder(code) == "still here"
    assert "Error" in python_coder(f"import os; os.kill({os.getpid()}, 9)")


def test_a_system_that_refuses_namespaces_half_way_still_runs_the_code(monkeypatch):
    monkeypatch.setattr(tools, "SUPERVISOR", tools.SUPERVISOR.replace("uid_map", "refused"))
    assert int(python_coder("import os; os.getpid()")) > 10


def test_killing_the_supervisor_is_an_error_and_does_not_hang(monkeypatch):
    monkeypatch.setattr(tools, "NAMESPACES", False)
    assert "ended from outside" in python_coder("import os; os.kill(os.getppid(), 9)")


@needs_namespaces
def test_there_is_no_network_and_files_outside_are_read_only(tmp_path):
    assert "Error: OSError" in python_coder("import socket; socket.create_connection(('127.0.0.1', 9), 1)")
    (tmp_path / "ours").write_text("kept")
    assert "Read-only" in python_coder(f"open({str(tmp_path / 'ours')!r}, 'w')")
    undo = "import ctypes; print(ctypes.CDLL(None).mount(b'', b'/', b'', 32, None), ctypes.CDLL(None).umount2(b'/proc', 2))"
    assert python_coder(undo) == "-1 -1"


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
