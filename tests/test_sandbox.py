"""The sandbox: what python_coder answers, and that no program gets out of it, goes on after it, or takes more than its share."""
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import sandbox
from sandbox import python_coder

NAMESPACES = python_coder("import os; print(os.getsid(0) < 10)") == "True"
needs_namespaces = pytest.mark.skipif(not NAMESPACES, reason="this system does not let us have namespaces")


@pytest.fixture(params=[True, False], ids=["namespaces", "no namespaces"])
def either_way(request, monkeypatch):
    monkeypatch.setattr(sandbox, "NAMESPACES", request.param)


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
    script = "import sandbox; print(sandbox.python_coder(%r))" % """
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
    monkeypatch.setattr(sandbox, "SUPERVISOR", sandbox.SUPERVISOR.replace("uid_map", "refused"))
    assert int(python_coder("import os; os.getpid()")) > 10


def test_killing_the_supervisor_is_an_error_and_does_not_hang(monkeypatch):
    monkeypatch.setattr(sandbox, "NAMESPACES", False)
    assert "ended from outside" in python_coder("import os; os.kill(os.getppid(), 9)")


@needs_namespaces
def test_there_is_no_network_and_files_outside_are_read_only(tmp_path):
    assert "Error: OSError" in python_coder("import socket; socket.create_connection(('127.0.0.1', 9), 1)")
    (tmp_path / "ours").write_text("kept")
    assert "Read-only" in python_coder(f"open({str(tmp_path / 'ours')!r}, 'w')")
    undo = "import ctypes; print(ctypes.CDLL(None).mount(b'', b'/', b'', 32, None), ctypes.CDLL(None).umount2(b'/proc', 2))"
    assert python_coder(undo) == "-1 -1"
