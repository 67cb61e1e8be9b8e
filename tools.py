"""The toolbox: plain functions from strings to a string, each with the text by which the planner chooses it.

    tools = toolbox(["python_coder", "wikipedia_search"], corpus="toy/corpus.jsonl")
    print(describe("python_coder", tools["python_coder"]))       # what the planner and the executor read
    result, error = call(tools, "python_coder", {"code": "2 + 2"})  # ("4", False)

A tool never raises at the flow. What goes wrong, by the model's mistake or the world's, is a result that starts with
"Error:" and says what to do instead; it enters memory like any other result and the planner can react to it.
Adding a tool is one function and one entry in TOOLS.
"""
import functools
import json
import os
import re
import select
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from memory import cut

RESULT_BUDGET = 2000     # characters of a result that reach memory
PASSAGE_BUDGET = 600     # characters of one passage, so that k = 3 of them fit into a result
OUTPUT_CAP = 65536       # bytes the code may print before it is stopped
NAMESPACES = True        # False: python_coder does without Linux namespaces (the tests try both ways)
STOP_WORDS = tuple("a an and are as at be by did do does for from how in is it of on or that the their this to was "
                   "were what when where which who whom whose why with".split())


@dataclass(frozen=True)
class Tool:
    run: Callable[..., str] | None  # None: answered by the fixed language model, which solve.py batches as a stage
    description: str                # what it does, for the planner
    arguments: dict[str, str]       # name -> meaning; all are strings, all are required
    limits: str                     # what to know before choosing it
    example: str                    # one call


def describe(name: str, tool: Tool) -> str:
    """The metadata of a tool as the planner and the executor read it: constant text, so prompts share it as a prefix."""
    arguments = "; ".join(f"{key} (string): {meaning}" for key, meaning in tool.arguments.items())
    return f"{name}: {tool.description}\n  Arguments: {arguments}\n  Limits: {tool.limits}\n  Example: {tool.example}\n"


# ---------------------------------------------------------------------------------------------- python_coder
# The first process of a call. It has no secrets and outlives the code, so it can kill whatever the code has started.
# stdin brings the code and stays open: when either side is gone, the other sees it hang up. stdout is what the code
# prints, on both its streams; stderr is the verdict, "Error: ...". Both are files: they cost no memory, however long.
# No signal, ast or traceback: importing each takes milliseconds, in every one of the thousands of calls of a training.
SUPERVISOR = r'''
import os, resource, select, sys, time
seconds, (size, memory, cap, namespaces) = float(sys.argv[1]), map(int, sys.argv[2:])
source = sys.stdin.buffer.read(size)
os.ftruncate(2, 0), os.lseek(2, 0, 0)                     # whatever Python said when it started
verdict = os.dup(2)                                       # closed on exec

def say(text):
    os.write(verdict, text.encode("utf-8", "replace")[:8192] + b"\n")

def isolate():
    "Own users, processes, network and mounts: all files read-only but a new 64 MB folder. False where not allowed."
    if sys.platform != "linux":
        return False
    import ctypes
    libc, uid, gid = ctypes.CDLL(None), os.getuid(), os.getgid()
    libc.prctl(38, 1, 0, 0, 0)                            # PR_SET_NO_NEW_PRIVS: sudo and the like give nothing
    if child := namespaces and os.fork():                 # a child tries: a refusal half-way leaves us as we were
        status = os.waitpid(child, 0)[1]
        if os.waitstatus_to_exitcode(status) != 99:
            os._exit(status != 0)
    if child or not namespaces:
        libc.prctl(36, 1, 0, 0, 0)                        # PR_SET_CHILD_SUBREAPER: orphans come to us, not to init
        return False
    try:
        if libc.unshare(0x10000000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x00020000):
            os._exit(99)
        for name, text in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        os._exit(99)
    if child := os.fork():                                # the child is process 1 of the namespace: all die with it
        os._exit(os.waitpid(child, 0)[1] != 0)
    cwd = os.getcwd()
    libc.syscall(442, -100, b"/", 0x8000, (ctypes.c_uint64 * 4)(1), 32)        # mount_setattr: read-only, recursively
    for folder in cwd, "/dev/shm":
        libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 6, b"size=64m,mode=700")  # gone with the namespace
    libc.mount(b"proc", b"/proc", b"proc", 14, None)      # where this is refused, the old /proc has no secrets for us
    os.chdir(cwd)
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # no capability: nothing can be undone
    return True

def numbers():
    "Of /proc/loadavg: [4] is the number of all tasks, [5] the last process id of our own namespace."
    try:
        with open("/proc/loadavg") as file:
            return [int(float(n)) for n in file.read().replace("/", " ").split()]
    except OSError:
        return [0] * 6

def family(pid):
    "The descendants of a process, where there is a /proc."
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(n) for n in file.read().split()]
    except OSError:
        return []
    return children + [n for child in children for n in family(child)]

def crowded():                                            # the system's own limit, NPROC, does not bind root
    return numbers()[5] > 256 if isolated else len(family(os.getpid())) > 64

def limit():
    for name, value in (("CPU", int(seconds) + 1), ("AS", memory << 20), ("FSIZE", 16 << 20), ("NOFILE", 128),
                        ("CORE", 0), ("NPROC", numbers()[4] + 64)):  # NPROC counts all of the user's, also elsewhere
        try:
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
        except (AttributeError, ValueError, OSError):
            pass                                          # unknown to this system, or a lower limit stands already

def run():
    "The code, once, in one scope; a last bare expression is shown as a REPL shows it."
    main = sys.modules["__main__"] = type(sys)("__main__")
    sys.argv, reserve = [""], bytearray(1 << 20)
    try:
        tree, show = compile(source, "<code>", "exec", 0x400), compile("0", "<code>", "single", 0x400)  # 0x400: trees
        show.body = [tree.body.pop()] if tree.body and type(tree.body[-1]).__name__ == "Expr" else []
        exec(compile(tree, "<code>", "exec"), main.__dict__)
        if show.body:
            exec(compile(show, "<code>", "single"), main.__dict__)
    except BaseException as e:
        del reserve                                       # room to tell that the memory is full
        if isinstance(e, SystemExit) and e.code in (None, 0):
            return
        text, line, at = str(e), None, e.__traceback__
        if isinstance(e, SyntaxError) and e.filename == "<code>":
            text, line = e.msg, e.lineno
        while at:
            line, at = (at.tb_lineno if at.tb_frame.f_code.co_filename == "<code>" else line), at.tb_next
        say(f"Error: {type(e).__name__}" + (f": {text}" if text else "") + (f" (line {line})" if line else ""))

kept, isolated = sys.modules["__main__"], isolate()       # kept: this module lives on when the code's takes its place
child = os.fork()
if child == 0:
    os.setsid()                                           # kill(0, 9) finds only the code's own
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(1, 2)
    sys.stdout.reconfigure(line_buffering=True)           # what was printed before a kill is not lost
    limit()
    run()
    sys.exit()                                            # waits for the code's threads, as Python does
end, pause, status = time.monotonic() + seconds, 0.001, None
while status is None:
    if select.select([0], [], [], pause)[0]:              # this is the pause, unless the flow hangs up
        say("Error: stopped by the flow")
        break
    pause = min(2 * pause, 0.02)
    pid, ended = os.waitpid(child, os.WNOHANG)
    if pid:
        status = os.waitstatus_to_exitcode(ended)
    elif time.monotonic() > end:
        say(f"Error: stopped after {seconds:g} seconds")
        break
    elif crowded():
        say("Error: stopped after starting too many processes")
        break
    elif os.fstat(1).st_size > cap:
        break
if status:
    say(f"Error: killed by signal {-status}" if status < 0 else f"Error: the code ended with exit status {status}")
if isolated:
    os._exit(0)                                           # process 1 ends: the system kills all others
try:
    os.killpg(child, 9)                                   # at one stroke, so that a fork bomb cannot outrun us
except (ProcessLookupError, PermissionError):
    pass                                                  # nobody is left in the group
while kin := family(os.getpid()):                         # those that have left the group
    for pid in kin:
        try:
            os.kill(pid, 9)
            os.waitpid(pid, os.WNOHANG)
        except (ProcessLookupError, ChildProcessError):
            pass                                          # gone, or a grandchild: ours when its parent is dead
'''


def python_coder(code: str, seconds: float = 10, memory_mb: int = 512) -> str:
    """What the code prints, and the value of a last bare expression; or "Error: NameError: ... (line 2)", then the prints.

    A new Python runs the code once, in one scope, with the packages of this one, in a folder of its own.
    Covered: time on the clock; memory of each process; size of a file; open files; number of processes; endless output;
      our environment is not passed on; stdin is empty; the folder is empty before and gone afterwards;
      nothing goes on afterwards: threads, children, and grandchildren that left the session or lost their parent.
    Covered where Linux lets users have namespaces (most systems, not Docker's default):
      no network; no file outside the folder can be changed, and it holds 64 MB;
      other processes, ours above all, cannot be seen or killed, nor their environment read.
    Not covered: files that we can read (keys, too); sockets that are files (Docker's); the sum of the memory of many
      processes; bugs of the kernel. Without namespaces, code that means harm has all our rights: it may kill us or the
      supervisor, and change our files. Off Linux, a process that leaves the group is not found, and macOS ignores some
      limits. Windows is not supported.
    """
    source = code.encode("utf-8", "replace")
    # Not -I: it ignores PYTHONHASHSEED, without which a printed set differs from run to run. numpy's threads take memory.
    env = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    settings = [str(n) for n in (seconds, len(source), memory_mb, OUTPUT_CAP, int(NAMESPACES))]
    file = tempfile.TemporaryFile
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, file() as output, file() as verdict:
        # No preexec_fn, which is not safe in threads: the supervisor sets the limits itself, before it runs the code.
        process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, *settings], stdin=subprocess.PIPE, stdout=output,
                                   stderr=verdict, cwd=folder, env=env, start_new_session=True)
        try:
            with process.stdin as pipe:
                pipe.write(source)
                pipe.flush()
                hung_up = select.poll()
                hung_up.register(pipe, 0)
                hung_up.poll(1000 * (seconds + 5))  # the supervisor keeps the time; 5 more seconds in case it cannot
        except BrokenPipeError:
            pass  # it is dead: its return code tells
        try:
            process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed, problem = (os.pread(f.fileno(), OUTPUT_CAP + 1, 0) for f in (output, verdict))
    endless = len(printed) > OUTPUT_CAP
    printed, problem = (text.decode("utf-8", "replace").rstrip("\n") for text in (printed, problem))
    if endless:
        problem = f"Error: stopped after printing {OUTPUT_CAP} characters"
    elif process.returncode or (problem and not problem.startswith("Error:")):
        problem = f"Error: Python was ended from outside or did not start. {''.join(problem.splitlines()[-1:])}".strip()
    if problem:
        return f"{problem}\nPrinted before: {printed}" if printed else problem
    return printed or "Nothing was printed. Use print() to show a result."


# ---------------------------------------------------------------------------------------------- wikipedia_search
LOCK = threading.Lock()  # one index, many threads


def words(text: str) -> list[str]:
    """'Curaçao, 1954' -> ['curacao', '1954']: as FTS5's unicode61 splits it, without accents."""
    bare = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if not unicodedata.combining(c))
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFC", bare))


def passages(corpus: str) -> Iterator[tuple[str, str]]:
    """The (title, text) of each line; ValueError "corpus.jsonl:3: ..." where it is not one."""
    number = 0
    try:
        with open(corpus, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("title", "text")):
                        raise ValueError('each line must be {"title": "...", "text": "..."}')
                    (row["title"] + row["text"]).encode()  # half of a surrogate pair is valid JSON but no text
                    yield row["title"], row["text"]
    except OSError as e:
        raise ValueError(f"{corpus}: cannot read this corpus of wikipedia_search ({e.strerror})") from e
    except ValueError as e:
        raise ValueError(f"{corpus}:{number}: {e}") from e


@functools.lru_cache(maxsize=8)
def index(corpus: str) -> sqlite3.Connection:
    """The corpus as a full-text index in memory, built once per process."""
    table = sqlite3.connect(":memory:", check_same_thread=False)  # LOCK sees to one thread at a time
    table.execute("create virtual table passages using fts5(title, text, tokenize = 'unicode61 remove_diacritics 2')")
    if not table.executemany("insert into passages values (?, ?)", passages(corpus)).rowcount > 0:
        raise ValueError(f"{corpus}: this corpus of wikipedia_search has no passages")
    return table


def wikipedia_search(query: str, corpus: str, k: int = 3) -> str:
    """The best k passages, one a line, "[1] Iron: Iron is a ..."; those with all words of the query, or else those with
    more than half of them. A passage that shares only a number or a common word with the query is no answer."""
    asked = list(dict.fromkeys(words(query)))
    asked = [word for word in asked if word not in STOP_WORDS] or asked
    best = "select title, text from passages where passages match ? order by bm25(passages, 5, 1), rowid limit ?"
    all_of, any_of = (joint.join(f'"{word}"' for word in asked) for joint in (" ", " OR "))  # quoted: never an operator
    with LOCK:
        search = index(str(corpus)).execute
        found = search(best, (all_of, k)).fetchall() if asked else []
        some = search(best, (any_of, 1000)).fetchall() if asked and not found else []
    found = found or [row for row in some if 2 * len(set(asked) & set(words(" ".join(row)))) > len(asked)][:k]
    if not found:
        return f"Error: no passage matches {cut(query, 200)!r}. Try other or fewer words."
    lines = (f"[{n}] {title}: {' '.join(text.split())}" for n, (title, text) in enumerate(found, 1))
    return "\n".join(cut(line, PASSAGE_BUDGET) for line in lines)


# ---------------------------------------------------------------------------------------------- the toolbox
TOOLS: dict[str, Tool] = {
    "base_generator": Tool(
        run=None,
        description="Asks a language model, which answers from its own knowledge and by reasoning.",
        arguments={"query": "the question or instruction, with everything needed to answer it"},
        limits="May hallucinate. Use it for reasoning and general knowledge, not for exact facts or arithmetic.",
        example='base_generator(query="Name three noble gases.")'),
    "python_coder": Tool(
        run=python_coder,
        description="Runs Python code and returns what it prints.",
        arguments={"code": "a complete Python program that prints its result"},
        limits="No network, no files, 10 seconds, 512 MB. Nothing is kept between calls. Use it for exact calculation.",
        example='python_coder(code="print(2 + 2)")'),
    "wikipedia_search": Tool(
        run=wikipedia_search,
        description="Searches Wikipedia and returns the best matching passages.",
        arguments={"query": "a few specific key words, such as a name and what to know about it"},
        limits="Wikipedia only. Use a specific query, one fact at a time. It cannot calculate.",
        example='wikipedia_search(query="atomic number of iron")'),
    # Tools that need the network (google_search, web_search, Wikipedia online) go here.
}


def toolbox(names: list[str] | None = None, corpus: str | Path | None = None) -> dict[str, Tool]:
    """The chosen tools (None: all), always in the order of TOOLS, with wikipedia_search bound to the corpus.

    ValueError for what would quietly leave the planner with other tools than the ones asked for."""
    if names is None:
        names = [name for name in TOOLS if corpus or name != "wikipedia_search"]
    wrong = ("no tool is named" if not names else
             next((f"no tool is called {name!r}" for name in names if name not in TOOLS), "") or
             next((f"{name} is named twice" for name in names if names.count(name) > 1), ""))
    if wrong:
        raise ValueError(f"{wrong}: choose from {', '.join(TOOLS)}")
    chosen = {name: tool for name, tool in TOOLS.items() if name in names}
    if "wikipedia_search" in chosen:
        if not corpus:
            raise ValueError("wikipedia_search needs a corpus, a JSONL file of title and text: name one or leave it out of "
                             f"{', '.join(TOOLS)}")
        with LOCK:
            index(str(corpus))  # a bad corpus is told now, not in the middle of a training run
        bound = functools.partial(wikipedia_search, corpus=str(corpus))
        chosen["wikipedia_search"] = replace(chosen["wikipedia_search"], run=bound)
    return chosen


def check(tools: dict[str, Tool], name: str, arguments: dict[str, str]) -> str:
    """What is wrong with a call, as a sentence to the model; "" if nothing is."""
    if name not in tools:
        return f"Error: no tool called {cut(str(name), 80)!r}. Use one of: {', '.join(tools)}."
    wanted, example = tools[name].arguments, f"Example: {tools[name].example}"
    for key in wanted:
        if key not in arguments:
            return f"Error: {name} needs the argument {key!r}. {example}"
        if not isinstance(arguments[key], str):
            return f"Error: the argument {key!r} of {name} must be a string. {example}"
    unknown = [key for key in arguments if key not in wanted]
    return f"Error: {name} has no argument {cut(str(unknown[0]), 80)!r}. {example}" if unknown else ""


def call(tools: dict[str, Tool], name: str, arguments: dict[str, str], budget: int = RESULT_BUDGET) -> tuple[str, bool]:
    """(result, error) of one tool call; error is true iff the result starts with "Error:". Never raises at the flow."""
    try:
        result = check(tools, name, arguments) or tools[name].run(**arguments)
    except Exception as e:  # whatever a tool meets is told to the planner and counted, never swallowed
        result = f"Error: {name} failed: {type(e).__name__}: {e}"
    return cut(result, budget), result.startswith("Error:")
