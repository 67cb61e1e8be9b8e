"""The sandbox: what python_coder answers, and that no program escapes, outlives it or takes too much."""
import json
import os
import platform
import re
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

import tools
from cli import command_line
from world import confinement, sandbox
from world.sandbox import python_coder
from world.toolbox import choose

NAMESPACES = python_coder("import os; print(os.getsid(0) < 10)") == "True"
UNPRIVILEGED = confinement.LANDLOCK and confinement.seccomp(confinement.ALWAYS)
LATE = 30  # seconds: what is to end in a moment may take this long on a machine that is slow or busy
EXHAUSTIVE = pytest.mark.exhaustive
needs_namespaces = pytest.mark.skipif(not NAMESPACES, reason="this system does not let us have namespaces")
WHY_NOT = f"the version of this kernel's Landlock is {confinement.LANDLOCK}, its machine {platform.machine()}"


@pytest.fixture(params=[True, pytest.param(False, marks=EXHAUSTIVE)], ids=["namespaces", "no namespaces"])
def either_way(request, monkeypatch):
    monkeypatch.setattr(sandbox, "NAMESPACES", request.param)


@pytest.fixture(params=[(True, 0), (False, confinement.LANDLOCK), pytest.param((False, 1), marks=EXHAUSTIVE)],
                ids=["namespaces", "Landlock", "Landlock 1"])
def confined(request, monkeypatch):
    """By namespaces without Landlock; without them by what this kernel has, and by what Linux 5.13 had."""
    namespaces, version = request.param
    if namespaces and not NAMESPACES:
        pytest.skip("this system does not let us have namespaces")
    if not namespaces and not UNPRIVILEGED:
        pytest.skip(WHY_NOT)
    monkeypatch.setattr(sandbox, "NAMESPACES", namespaces)
    monkeypatch.setattr(confinement, "LANDLOCK", version)


def alive(mark):
    """Is a process with this word on its command line running, of ours or of a namespace below?"""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                return True
        except OSError:  # it has ended meanwhile
            pass
    return False


# ------------------------------------------------------------ python_coder: what it answers
@pytest.mark.parametrize("code, result", [
    ("2 + 2", "4"), ("'a'", "'a'"), ("x = 3\nx", "3"), ("print(1); 2", "1\n2"), ("print(1)\nNone", "1"),
    ("for i in range(2): print(i)", "0\n1"), ("print('é ∑ 漢')", "é ∑ 漢"), ("print(1)\nexit()", "1"),
    ("import sys; sys.stderr.write('seen\\n')\nprint(1)", "seen\n1"), ("import os; os.listdir()", "[]"),
    ("import sys\nprint(1)\nsys.exit(0)", "1"), ("from __future__ import annotations\n1", "1"),
    ("x = 1", "Nothing was printed. Use print() to show a result."), ("x = 1\n" * 20_000 + "x", "1"),
    ("", "Nothing was printed. Use print() to show a result."),
    ("import os; os.write(1, b'a\\xff\\x00b')\nNone", "a\ufffd\x00b"),
    # an error names the exception and the line, and what was printed before is kept
    ("x", "Error: NameError: name 'x' is not defined (line 1)"),
    ("print(7)\n\n1 / 0", "Error: ZeroDivisionError: division by zero (line 3)\nPrinted before: 7"),
    ("def f():\n    return {}['k']\nf()", "Error: KeyError: 'k' (line 2)"),
    ("import json\njson.loads('?')",
     "Error: JSONDecodeError: Expecting value: line 1 column 1 (char 0) (line 2)"),
    ("x = (1", "Error: SyntaxError: '(' was never closed (line 1)"),
    ("assert False", "Error: AssertionError (line 1)"),
    ("import sys; sys.exit('bye')", "Error: SystemExit: bye (line 1)"),
    ("import os; os._exit(3)", "Error: the code ended with exit status 3"),
    ("import os; os.kill(os.getpid(), 11)", "Error: killed by signal 11")], ids=lambda text: ascii(text)[:40])
def test_the_answer_is_what_the_code_prints_and_its_last_expression_or_its_error(code, result):
    assert python_coder(code) == result


@pytest.mark.parametrize("code, result", [
    ("class A:\n  def __del__(self): print('end', n)\nn = 3\na = A()\na.me = a", "end 3"),
    ("import atexit\natexit.register(print, 'end')\nNone", "end"),
    ("import threading\nthreading.Timer(0.1, print, ['end']).start()", "end"),
    ("import os\nf = os.fdopen(os.dup(1), 'w')\nn = f.write('end')", "end"),
    ("import io, sys\nprint('seen', end='')\nsys.stdout = io.StringIO()\nprint('not seen')", "seen"),
    ("import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint('seen')", "seen"),
    ("import os, sys\nprint('seen')\nos.close(1)\nsys.modules = None", "seen")])
def test_the_code_ends_as_python_ends(code, result):
    assert python_coder(code) == result


def test_the_code_runs_once_in_one_scope():
    code = """import math
def fact(n): return 1 if n < 2 else n * fact(n - 1)
def root(x): return math.sqrt(x)
k = 2
if __name__ == "__main__":
    print("once", fact(5), root(9), [k * i for i in range(3)])"""
    assert python_coder(code) == "once 120 3.0 [0, 2, 4]"


@pytest.mark.parametrize("package, code, result", [
    ("numpy", "import numpy as np\nx = np.random.rand(500, 500)\n(x @ x).shape", "(500, 500)"),
    pytest.param("sympy", "from sympy import *\nx = symbols('x')\nintegrate(exp(-x**2), (x, -oo, oo))",
                 "sqrt(pi)", marks=EXHAUSTIVE)])
def test_the_packages_that_the_user_has_can_be_used(either_way, package, code, result):
    pytest.importorskip(package)
    assert python_coder(code) == result


def test_what_runs_one_after_another_is_not_too_many(either_way):
    code = "from threading import Thread\nfor i in range(400): t = Thread(); t.start(); t.join()\n'end'"
    assert python_coder(code) == "'end'"


def test_the_same_code_gives_the_same_text_every_time():
    assert len({python_coder("print({str(i) for i in range(50)})") for _ in range(3)}) == 1


# ------------------------------------------------------------ python_coder: what it prevents
@pytest.mark.parametrize("code", ["print(1)\nwhile True: pass", "import threading, time\nprint(1)\n"
                                  "threading.Thread(target=time.sleep, args=(99,)).start()"])
def test_time_is_limited_and_what_was_printed_is_kept(either_way, code):
    start = time.monotonic()
    assert python_coder(code, seconds=0.3) == "Error: stopped after 0.3 seconds\nPrinted before: 1"
    assert time.monotonic() - start < LATE


def test_memory_is_limited(either_way):
    assert python_coder("x = bytearray(1 << 30)") == "Error: MemoryError (line 1)"
    growing = "x = []\nwhile True: x.append(' ' * 9999)"
    assert python_coder(growing, memory_mb=64) == "Error: MemoryError (line 2)"
    nothing_left = python_coder("x = []\nwhile True: x = [x]", memory_mb=64)
    if sys.version_info >= (3, 13):  # which may then die of a signal, while it frees the nested lists
        nothing_left = nothing_left.removeprefix("Error: killed by signal 11\n")
    assert nothing_left.startswith("Error: MemoryError")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such order")
def test_if_memory_runs_out_the_code_ends_before_our_process(either_way):
    mark = f"8{time.time_ns() % 10**9:09d}"
    code = f"import os\nos.fork() or os.execvp('sleep', ['sleep', '{mark}'])\nos.wait()[1]"

    def sleepers():
        return [path.parent for path in Path("/proc").glob("[0-9]*/cmdline")
                if mark.encode() in command(path.parent.name).split(b"\0")]

    with ThreadPoolExecutor() as pool:
        result = pool.submit(python_coder, code, LATE)
        assert soon(sleepers)
        (sleeper,) = sleepers()
        assert (sleeper / "oom_score_adj").read_text() == "1000\n"
        os.kill(int(sleeper.name), signal.SIGKILL)
        assert result.result() == "9"
    assert int(Path("/proc/self/oom_score_adj").read_text()) < 1000


def test_the_environment_of_our_process_cannot_be_read_through_proc(confined):
    script = f"""from world import confinement, sandbox
sandbox.NAMESPACES, confinement.LANDLOCK = {sandbox.NAMESPACES}, {confinement.LANDLOCK}
print(sandbox.python_coder('''
import glob, os
print(os.environ)
for name in glob.glob("/proc/[0-9]*/environ"):
    try: print(open(name).read())
    except OSError: pass'''))"""
    env, root = {**os.environ, "SECRET_KEY": "hunter2"}, Path(__file__).parents[1]
    ours = subprocess.run([sys.executable, "-c", script], env=env, cwd=root, capture_output=True, text=True)
    assert "PYTHONHASHSEED" in ours.stdout and "hunter2" not in ours.stdout


@pytest.mark.parametrize("escape", ["os.setsid()", "os.setsid(); os.fork() and os._exit(0)",
                                    "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
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
            time.sleep(0.01)
    assert result.result() == "done" and seen and not alive(mark)


@pytest.mark.parametrize("before, landlock, seccomp, runs", [
    (False, 0, 0, True), (False, 7, 1, True), (True, 7, 1, True), (True, 0, 1, False), (True, 7, 0, False)])
def test_a_system_that_refuses_namespaces_half_way_still_runs_the_code(monkeypatch, before, landlock, seccomp,
                                                                       runs):
    """But not where they are the only protection, and were there before."""
    monkeypatch.setattr(sandbox, "ISOLATED", before)
    monkeypatch.setattr(confinement, "LANDLOCK", min(landlock, confinement.LANDLOCK))
    monkeypatch.setattr(sandbox, "SUPERVISOR", sandbox.SUPERVISOR.replace("uid_map", "refused"))
    if not seccomp:
        monkeypatch.setattr(confinement, "seccomp", lambda rules: "")
    if landlock and seccomp and not UNPRIVILEGED:
        pytest.skip(WHY_NOT)
    answer = python_coder("import os; os.getpid()")
    assert int(answer) > 10 if runs else answer.startswith("Error: Python was ended from outside")


@needs_namespaces
def test_a_call_in_namespaces_is_remembered(monkeypatch):
    monkeypatch.setattr(sandbox, "ISOLATED", False)
    monkeypatch.setattr(sandbox, "NAMESPACES", False)
    assert python_coder("1") == "1" and not sandbox.ISOLATED
    monkeypatch.setattr(sandbox, "NAMESPACES", True)
    assert python_coder("1") == "1" and sandbox.ISOLATED


@pytest.mark.parametrize("call", ["syscall(444,", '"syscall", 446,', '"prctl", 22,', '"capset",'])
def test_no_code_runs_if_the_kernel_refuses_a_protection_that_it_has(either_way, monkeypatch, call):
    if not UNPRIVILEGED:
        pytest.skip(WHY_NOT)
    assert call in sandbox.SUPERVISOR
    refused = call.replace("4", "94").replace("22", "99").replace("capset", "chroot")
    monkeypatch.setattr(sandbox, "SUPERVISOR", sandbox.SUPERVISOR.replace(call, refused))
    assert python_coder("'it runs'") == "Error: the code ended with exit status 1"


def test_a_supervisor_that_is_killed_is_an_error_and_does_not_hang(monkeypatch):
    monkeypatch.setattr(sandbox, "SUPERVISOR", "import os; os.kill(os.getpid(), 9)")
    assert "ended from outside" in python_coder("")


@pytest.mark.parametrize("verdict, answer", [
    ("", "Error: stopped after 0.1 seconds"),
    pytest.param("Error: stopped after starting too many processes", None, marks=EXHAUSTIVE)])
def test_a_late_supervisor_is_ended_with_all_its_children(monkeypatch, verdict, answer):
    mark = f"8{time.time_ns() % 10**9:09d}"
    monkeypatch.setattr(sandbox, "GRACE", 0)
    monkeypatch.setattr(sandbox, "SUPERVISOR", f"""import os, time
os.write(0, {verdict.encode()})
if os.fork() == 0:
    os.setsid(), os.fork()
    os.execvp("sleep", ["sleep", "{mark}"])
time.sleep(99)""")
    assert python_coder("", seconds=0.1) == (answer or verdict) and not alive(mark)
    assert soon(lambda: not supervisors())


def test_the_supervisor_and_the_fork_server_are_programs_that_nobody_imports():
    with pytest.raises(ImportError):
        import world.supervisor  # noqa: F401
    with pytest.raises(ImportError):
        import world.forkserver  # noqa: F401


@needs_namespaces
def test_mounts_are_read_only_and_cannot_be_undone(tmp_path, monkeypatch):
    monkeypatch.setattr(confinement, "LANDLOCK", 0)  # by the namespaces alone
    monkeypatch.setattr(confinement, "filters", lambda: ("", ""))
    assert "Error: OSError" in python_coder("import socket; socket.create_connection(('127.0.0.1', 9), 1)")
    (tmp_path / "ours").write_text("kept")
    assert "No such file" in python_coder(f"open({str(tmp_path / 'ours')!r}, 'w')")
    assert "Read-only" in python_coder("import os; open(os.__file__, 'a')")
    undo = ("import ctypes; C = ctypes.CDLL(None)\n"
            "print(C.mount(b'', b'/', b'', 32, None), C.umount2(b'/usr/lib', 2))")
    assert python_coder(undo) == "-1 -1"


X86, ARM, I386, PID = 0xC000003E, 0xC00000B7, 0x40000003, 4711
OK, NOTHING, REFUSED, UNKNOWN, UNSUPPORTED = 0x7FFF0000, 0x50000, 0x50001, 0x50026, 0x5005F
RULES = (confinement.ALWAYS + confinement.WITHOUT_NAMESPACES + confinement.WITHOUT_LANDLOCK_6
         + confinement.WITHOUT_LANDLOCK_3)


@pytest.mark.parametrize("machine, arch, call, args, answer", [
    *(("x86_64", X86, *row) for row in (
        (0, (), OK), (41, (), REFUSED), (112, (), NOTHING), (109, (), NOTHING), (42, (), REFUSED),
        (49, (), REFUSED), (425, (), UNKNOWN), (435, (), UNKNOWN), (436, (3, 9), OK), (437, (), UNKNOWN),
        (0x40000000, (), UNKNOWN), (0xFFFFFFFF, (), UNKNOWN),
        (53, (1, 0x80001), OK), (53, (1, 2), REFUSED), (53, (30, 1), REFUSED), (56, (0x3D0F00,), OK),
        (56, (0x10000011,), REFUSED), (62, (0,), OK), (62, (PID,), OK), (62, (1,), REFUSED),
        (62, (2**32 - 1,), REFUSED), (257, (0, 0, 0x241), OK), (257, (0, 0, 0x200), REFUSED),
        (72, (0, 8), REFUSED), (302, (0,), OK), (302, (PID,), OK), (302, (1,), REFUSED),
        (285, (1, 0), UNSUPPORTED), (285, (1, 1), UNSUPPORTED), (254, (), REFUSED))),
    *(("aarch64", ARM, *row) for row in (
        (63, (), OK), (198, (), REFUSED), (157, (), NOTHING), (425, (), UNKNOWN), (436, (3, 9), OK),
        (220, (0x11,), OK),
        (220, (0x7E000000,), REFUSED))),
    ("x86_64", I386, 0, (), REFUSED), ("x86_64", ARM, 0, (), REFUSED), ("aarch64", X86, 63, (), REFUSED)])
def test_the_filter_answers_a_system_call_of_either_machine(machine, arch, call, args, answer):
    steps = list(struct.iter_unpack("<HBBI", bytes.fromhex(confinement.seccomp(RULES, machine))))
    memory, at, a = struct.pack("<IIQ6Q", call, arch, 0, *args, *[0] * (6 - len(args))), 0, 0
    while steps[at][0] != 6:  # the kernel's machine, as far as we use it
        code, yes, no, value = steps[at]
        value = PID if value == confinement.CODE_PID else value
        if code in (0x20, 0x54):
            a = struct.unpack_from("<I", memory, value)[0] if code == 0x20 else a & value
        at += 1 + (0 if code in (0x20, 0x54) else yes if (a == value if code == 0x15 else a >= value) else no)
    assert steps[at][3] == answer


def test_a_machine_whose_calls_are_not_known_does_without_the_filter(monkeypatch):
    assert confinement.seccomp(confinement.ALWAYS, "riscv64") == ""
    monkeypatch.setattr(confinement, "seccomp", lambda rules: "")
    assert python_coder("2 + 2") == "4"


@pytest.mark.parametrize("namespaces, landlock, seccomp, sentence", [
    (True, True, True, f"by (namespaces, )?Landlock {confinement.LANDLOCK}, seccomp: its code reads Python"),
    (False, True, True, f"by Landlock {confinement.LANDLOCK}, seccomp: .* no file of yours$"),
    (False, False, True, r"NOT confined .*\(it has seccomp\): its code can read your files, change them$"),
    (False, False, False, r"NOT confined .*\(it has limits of time and memory alone\): "
     "its code can read your files, change them, use the network, signal your processes$")])
def test_a_run_can_say_which_protection_holds(monkeypatch, namespaces, landlock, seccomp, sentence):
    if not UNPRIVILEGED:
        pytest.skip(WHY_NOT)
    monkeypatch.setattr(sandbox, "NAMESPACES", namespaces)
    monkeypatch.setattr(confinement, "LANDLOCK", confinement.LANDLOCK * landlock)
    if not seccomp:
        monkeypatch.setattr(confinement, "seccomp", lambda rules: "")
    assert re.search(sentence, sandbox.protection.__wrapped__())


def test_a_run_can_say_that_the_sandbox_does_not_work(monkeypatch):
    monkeypatch.setattr(sandbox, "SUPERVISOR", "nonsense")
    assert "does not run here. Error: " in sandbox.protection.__wrapped__()


# ------------------------------------------------------------ what it reads and writes, and its ways out
# Each program does one thing that it must not, and prints "escaped" if the value is true. What refuses it:
#   "both"     namespaces as well as Landlock; where there is neither, the program gets what it wants
#   "seccomp"  seccomp as well, so it is refused where a machine has neither (but for macOS, say)
#   "always"   nothing of Linux's is needed
# OUTSIDE is a folder of ours, FLOW our process, PORT where we listen, TERMINAL one that we hold open.
TOUCHES = [
    # reads
    ("the list of users", "both", "open('/etc/passwd').read()"),
    ("the key in a folder of ours", "both", "open('OUTSIDE/key').read()"),
    ("the names in a folder of ours", "both", "os.listdir('OUTSIDE')"),
    ("our source", "both", "open('REPOSITORY/world/sandbox.py').read()"),
    ("the answers of the test questions", "both", "open('REPOSITORY/toy/test.jsonl').read()"),
    ("a key by a path with ..", "both", "open(os.path.relpath('OUTSIDE/key')).read()"),
    ("a key by a symbolic link", "both", "os.symlink('OUTSIDE/key', 'link') or open('link').read()"),
    ("a key by a hard link", "both", "os.link('OUTSIDE/key', 'hard') or open('hard').read()"),
    ("a key from its folder", "both", "os.chdir('OUTSIDE') or open('key').read()"),
    ("a key by its folder's descriptor", "both",
     "os.read(os.open('key', 0, dir_fd=os.open('OUTSIDE', os.O_PATH)), 9)"),
    ("a key by another program", "both",
     "subprocess.run(['cat', 'OUTSIDE/key'], capture_output=True, stdin=-3).stdout"),
    ("the folders of other programs", "both", "'neighbour' in os.listdir('..')"),
    ("our command line", "both", "open('/proc/FLOW/cmdline').read()"),
    ("who runs what", "both", "[name for name in os.listdir('/proc') if name.isdigit()]"),
    ("the machine's connections", "both", "open('/proc/net/tcp').read()"),
    ("the machine's disks", "both", "open('/proc/self/mountinfo').read()"),
    ("the machine's devices", "both", "os.listdir('/sys/class')"),
    ("what we type", "both", "os.open('TERMINAL', os.O_RDONLY | os.O_NOCTTY)"),
    ("what we send through a fifo", "both", "os.open('OUTSIDE/fifo', os.O_RDONLY | os.O_NONBLOCK)"),
    ("which files we open", "seccomp", "C.inotify_add_watch(C.inotify_init(), b'OUTSIDE', 0xFFF) > 0"),
    ("where a file comes from", "seccomp", "os.listxattr('OUTSIDE/key') is not None"),
    ("files that it inherits", "always", "[fd for fd in range(3, 128) if kind(fd) not in (0, stat.S_IFIFO)]"),
    # writes
    ("a file of ours", "both", "open('OUTSIDE/key', 'a')"),
    ("a new file of ours", "both", "open('OUTSIDE/new', 'x')"),
    ("a file of ours deleted", "both", "os.remove('OUTSIDE/old1') is None"),
    ("a file of ours moved", "both", "os.rename('OUTSIDE/old2', 'mine') is None"),
    ("a new folder of ours", "both", "os.mkdir('OUTSIDE/folder') is None"),
    ("a lock on a file of ours", "both", "fcntl.flock(open('OUTSIDE/key'), fcntl.LOCK_SH) is None"),
    ("a line on our terminal", "both", "os.write(os.open('TERMINAL', os.O_WRONLY | os.O_NOCTTY), b'x')"),
    ("a file of ours emptied", "seccomp", "os.truncate('OUTSIDE/old3', 0) is None"),
    ("the rights of a file of ours", "seccomp",
     "os.chmod('OUTSIDE/old3', 0o604) or os.stat('OUTSIDE/old3').st_mode & 0o777 == 0o604"),
    ("our disk, by its output", "seccomp", "C.fallocate(1, 1, L(0), L(4 << 20)) == 0"),
    ("a signal to us", "seccomp", "os.kill(FLOW, 0) is None"),
    ("the supervisor's limits", "seccomp", "resource.prlimit(SUPERVISOR, resource.RLIMIT_CORE, (0, 0))"),
    ("its own limits", "always", "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)) is None"),
    # ways out
    ("a connection", "seccomp", "socket.create_connection(('127.0.0.1', PORT), 1)"),
    ("a packet", "seccomp", "socket.socket(2, 2).sendto(b'x', ('127.0.0.1', PORT))"),
    ("a socket that is a file", "seccomp", "socket.socket(1, 1).connect('OUTSIDE/socket') is None"),
    ("a socket without a file", "seccomp", "socket.socket(1, 1).connect('\\0OUTSIDE') is None"),
    ("a datagram of a pair", "seccomp", "socket.socketpair(1, 2)[0].sendto(b'x', '\\0OUTSIDE/datagrams')"),
    ("a server", "seccomp", "socket.create_server(('127.0.0.1', 0))"),
    ("the kernel's own socket", "seccomp", "socket.socket(16, 3, 0)"),
]
# One program does them all, each in a process of its own: SUPERVISOR is the parent of the program.
TOUCH = """import ctypes, fcntl, os, resource, socket, stat, subprocess
C, L, SUPERVISOR = ctypes.CDLL(None), ctypes.c_long, os.getppid()
def kind(fd):
    try: return stat.S_IFMT(os.fstat(fd).st_mode)
    except OSError: return 0
for name, attempt in {}:
    if os.fork() == 0:
        try: print(name, "escaped" if eval(attempt) else "refused", sep=": ", flush=True)
        except (OSError, ValueError): print(name, "refused", sep=": ", flush=True)
        finally: os._exit(0)
    os.wait()"""

# What a mode takes away from this machine, before the first call, in a process of its own.
STEP = "struct.pack('<HBBI', 0x35, 0, 1, {}).hex()"  # a step of the filter: calls from this number on
MODES = {
    "namespaces": "confinement.LANDLOCK = 0",
    "as in Docker: Landlock, but no unshare and no mount": f"""
calls = "unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41"
rules = (calls, 0, 0, (), 1), ("clone 56 220", 0, 0x7E020000, (0,), 1)
newer = {STEP.format(424)}, {STEP.format(1 << 30)}  # Docker allows the calls of Landlock
steps = ctypes.create_string_buffer(bytes.fromhex(confinement.seccomp(rules).replace(*newer)))
assert C.prctl(38, 1, 0, 0, 0) == 0
assert C.prctl(22, 2, (ctypes.c_uint64 * 2)(len(steps) // 8, ctypes.addressof(steps))) == 0
assert C.unshare(0x10000000) == -1""",
    "max_user_namespaces = 0": """
ids = os.getuid(), os.getgid()
if C.unshare(0x10000000) == 0:  # else there are none on this machine
    for name, text in zip(("setgroups", "uid_map", "gid_map"), ("deny", *(f"{n} {n} 1" for n in ids))):
        Path(f"/proc/self/{name}").write_text(text)
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
assert C.unshare(0x10000000) == -1""",
    "neither": "sandbox.NAMESPACES, confinement.LANDLOCK = False, 0",
    "neither, nor seccomp": "sandbox.NAMESPACES, confinement.LANDLOCK = False, 0\n"
                            "confinement.seccomp = lambda rules: ''",
}
EXPECTED = {"neither": {"both"}, "neither, nor seccomp": {"both", "seccomp"}}  # what is not refused there
MODE = """import ctypes, json, os, socket, struct, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from world import confinement, sandbox
C, outside = ctypes.CDLL(None), sys.argv[1]
{}
os.chdir(outside)
Path("key").write_text("hunter2")
for n in (1, 2, 3): Path(f"old{{n}}").write_text("kept")
os.mkfifo("fifo")
terminal = os.ttyname(os.openpty()[1])
stream, packets, *local = [socket.socket(*kind) for kind in ((2, 1), (2, 2), (1, 1), (1, 1), (1, 2))]
stream.bind(("127.0.0.1", 0)), packets.bind(stream.getsockname())
for one, address in zip(local, ("socket", "\\0" + outside, "\\0" + outside + "/datagrams")): one.bind(address)
for one in (stream, *local[:2]): one.listen()
words = {{"OUTSIDE": outside, "REPOSITORY": str(sandbox.REPOSITORY), "TERMINAL": terminal,
         "FLOW": str(os.getpid()), "PORT": str(stream.getsockname()[1])}}
def answer(code):
    for word, value in words.items(): code = code.replace(word, value)
    return sandbox.python_coder(code)
with ThreadPoolExecutor(2) as pool:
    print(json.dumps([sandbox.protection(), *pool.map(answer, json.load(sys.stdin))]))"""


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_its_own_is_refused_or_known_not_to_be(tmp_path, mode):
    if not UNPRIVILEGED or mode == "namespaces" and not NAMESPACES:
        pytest.skip(WHY_NOT)
    for name in "outside", "folders", "folders/neighbour":
        (tmp_path / name).mkdir()
    attempts = [(name, attempt) for name, _, attempt in TOUCHES]
    alone = [attempt for attempt in attempts if attempt[0] == "our disk, by its output"]  # it may be stopped
    others = [attempt for attempt in attempts if attempt not in alone]
    codes = json.dumps([TOUCH.format(part) for part in (others, alone)])
    ran = subprocess.run([sys.executable, "-c", MODE.format(MODES[mode]), str(tmp_path / "outside")],
                         input=codes, text=True, stdout=-1, cwd=sandbox.REPOSITORY, check=True,
                         env={**os.environ, "TMPDIR": str(tmp_path / "folders")})
    protection, *answers = json.loads(ran.stdout)
    results = {True: "escaped", False: "refused"}
    wanted = [f"{name}: {results[by in EXPECTED.get(mode, ())]}" for name, by, _ in TOUCHES]
    assert sorted("\n".join(answers).splitlines()) == sorted(wanted)
    assert ("NOT confined" in protection and "read your files" in protection) == (mode in EXPECTED)


@pytest.mark.exhaustive
def test_a_package_elsewhere_can_be_imported_but_our_repository_cannot(either_way, monkeypatch, tmp_path):
    """An editable install puts a repository on sys.path: any but ours, and nothing that contains the home."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "elsewhere.py").write_text("x = 7")
    (tmp_path / "private").write_text("hunter2")
    more = [str(tmp_path / "package"), str(sandbox.REPOSITORY), os.path.expanduser("~"), "/"]
    monkeypatch.setattr(sandbox, "FORKSERVER", f"import sys; sys.path += {more}\n{sandbox.FORKSERVER}")
    sandbox.end_server()
    assert python_coder("import elsewhere; elsewhere.x") == "7"
    if UNPRIVILEGED:
        assert re.match("Error: ModuleNotFound|Error: Permission", python_coder("import tests.test_sandbox"))
        for path in tmp_path / "private", sandbox.REPOSITORY / "README.md":
            assert re.match("Error: (FileNotFound|Permission)Error", python_coder(f"open({str(path)!r})"))
    sandbox.end_server()


@pytest.fixture
def new_server():
    """For tests that change what the fork server does: it is started anew, before and after."""
    sandbox.end_server()
    yield
    sandbox.end_server()


def test_our_repository_is_not_read_even_below_a_folder_of_the_system(either_way, monkeypatch, new_server):
    if not UNPRIVILEGED:
        pytest.skip(WHY_NOT)
    monkeypatch.setattr(sandbox, "REPOSITORY", Path("/usr/share/zoneinfo/nano"))
    look = "import os; print(len(os.listdir('/usr/lib')) > 0, os.listdir('/usr/share/zoneinfo'))"
    assert re.match("Error: (FileNotFound|Permission)Error", python_coder(look))


def test_a_sandbox_that_reads_our_files_says_so_in_namespaces_too(either_way, monkeypatch, new_server):
    unfiltered = sandbox.FORKSERVER.replace("for place in private", "for place in private[1:]")
    more = f"import sys; sys.path += [{str(sandbox.REPOSITORY)!r}]\n"
    monkeypatch.setattr(sandbox, "FORKSERVER", more + unfiltered)
    assert re.search("NOT confined .*read your files", sandbox.protection.__wrapped__())


def test_a_folder_of_packages_that_is_gone_is_not_missed(either_way, monkeypatch, new_server, tmp_path):
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setattr(sandbox, "FORKSERVER", f"import sys; sys.path += [{str(folder)!r}]\n"
                        + sandbox.FORKSERVER)
    python_coder("1")
    folder.rmdir()
    assert python_coder("import os; os.getsid(0) < 10") == str(sandbox.NAMESPACES and NAMESPACES)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads the folders of other users")
def test_packages_that_root_alone_can_reach_are_not_missed(either_way, monkeypatch, new_server, tmp_path):
    """As with sudo, and the virtual environment of a user whose home is closed."""
    (tmp_path / "home" / "packages").mkdir(parents=True)
    (tmp_path / "home").chmod(0o700), os.chown(tmp_path / "home", 4711, 4711)
    monkeypatch.setattr(sandbox, "FORKSERVER", f"import sys; sys.path += [{str(tmp_path)!r} + "
                        "'/home/packages']\n" + sandbox.FORKSERVER)
    assert python_coder("import os; os.getsid(0) < 10") == str(sandbox.NAMESPACES and NAMESPACES)


def test_the_types_of_files_can_be_asked_for(either_way):
    assert python_coder("import mimetypes; mimetypes.guess_type('a.html')[0]") == "'text/html'"


@pytest.mark.parametrize("chosen, flags, sentence, refused", [
    ("python_coder web_search", [], "NOT confined here: its code can read your files", True),
    ("python_coder web_search", ["--allow-unconfined"], "NOT confined here: can read your files", False),
    ("python_coder web_search", [], "confined: no file of yours", False),
    ("python_coder web_search", [], "python_coder does not run here. Error: no more processes", True),
    ("base_generator python_coder wikipedia_search", [], "NOT confined: can read your files", False)])
def test_code_that_reads_our_files_and_a_way_out_come_together_only_if_allowed(monkeypatch, chosen, flags,
                                                                               sentence, refused):
    monkeypatch.setattr(command_line, "protection", lambda: sentence)
    monkeypatch.setattr(sys, "argv", ["solve.py", "What is it?", *flags, "--tools", *chosen.split()])
    args = command_line.solve_arguments(tools.TOOLS)
    with pytest.raises(ValueError, match="--allow-unconfined") if refused else nullcontext():
        command_line.check_confinement(args, choose(tools.TOOLS, args.tools))


def test_a_web_search_that_reads_pages_of_the_corpus_alone_is_no_way_out(monkeypatch, tmp_path):
    corpus = tmp_path / "pages.jsonl"
    corpus.write_text('{"title": "a", "text": "b", "url": "https://a.org/"}\n')
    monkeypatch.setattr(command_line, "protection", lambda: "NOT confined here: its code can read your files")
    flags = ["--tools", "python_coder", "web_search", "--corpus", str(corpus)]
    monkeypatch.setattr(sys, "argv", ["solve.py", "What is it?", *flags])
    args = command_line.solve_arguments(tools.TOOLS)
    command_line.check_confinement(args, choose(tools.TOOLS, args.tools, args.corpus))


def test_a_folder_of_a_run_does_not_allow_it(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tmp_path / "new")])
    settings = vars(command_line.train_arguments(tools.TOOLS)) | {"allow_unconfined": True}
    (tmp_path / "args.json").write_text(json.dumps(settings))
    for flags in [], ["--allow-unconfined"]:
        monkeypatch.setattr(sys, "argv", ["train.py", "--resume", str(tmp_path), *flags])
        assert command_line.train_arguments(tools.TOOLS).allow_unconfined == bool(flags)


def test_a_machine_that_confines_nothing_refuses_both_tools_in_one_sentence():
    script = """import runpy, sys
from world import confinement, sandbox
sandbox.NAMESPACES, confinement.LANDLOCK, confinement.seccomp = False, 0, lambda rules: ""
sys.argv = ["solve.py", "--tools", "python_coder", "web_search"]
runpy.run_path("solve.py", run_name="__main__")"""
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, cwd=sandbox.REPOSITORY, capture_output=True, text=True)
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1 and "--allow-unconfined" in ran.stderr


# ------------------------------------------------------------ when the machine has nothing left
@needs_namespaces
@pytest.mark.parametrize("landlock", [confinement.LANDLOCK, 0])
def test_a_program_that_fills_the_disk_is_ended_and_the_next_one_runs(tmp_path, landlock):
    mark = f"8{time.time_ns() % 10**9:09d}"
    code = f"""import os, time
if os.fork() == 0: os.execvp('sleep', ['sleep', '{mark}'])
try:
    with open('file', 'wb', 0) as file:
        while True: file.write(bytes(4096))
except OSError: time.sleep(99)"""
    script = f"""import ctypes, os, tempfile
from world import confinement, sandbox
C, ids = ctypes.CDLL(None), (os.getuid(), os.getgid())
assert C.unshare(0x10020000) == 0  # a small disk, in namespaces of user and mounts
for name, text in zip(("setgroups", "uid_map", "gid_map"), ("deny", *(f"{{n}} {{n}} 1" for n in ids))):
    with open(f"/proc/self/{{name}}", "w") as file: file.write(text)
assert C.mount(b"tmpfs", {os.fsencode(tmp_path)}, b"tmpfs", 0, b"size=1m") == 0
tempfile.tempdir, sandbox.NAMESPACES, confinement.LANDLOCK = {str(tmp_path)!r}, False, {landlock}
print(sandbox.python_coder({code!r}, seconds=0.5), sandbox.python_coder("2 + 2"), sep="\\n")"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=sandbox.REPOSITORY, stdout=-1, text=True)
    assert ran.stdout == "Error: stopped after 0.5 seconds\n4\n" and not alive(mark)


def test_a_supervisor_without_files_still_ends_what_the_code_started():
    mark = f"8{time.time_ns() % 10**9:09d}"
    code = f"""import os, time
if os.fork() == 0: os.execvp('sleep', ['sleep', '{mark}'])
for i in range(300): os.mkdir('d'), os.chdir('d')
time.sleep(99)"""
    with ours(f"""import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
sandbox.NAMESPACES = False
print(sandbox.python_coder({code!r}, seconds=1))""") as process:
        answer = process.stdout.read()
    assert answer.startswith("Error: stopped after") and not alive(mark)


def test_a_supervisor_that_fails_still_ends_what_the_code_started(either_way, monkeypatch):
    mark, failing = f"8{time.time_ns() % 10**9:09d}", "if crowded() or os.path.exists('fail') and 1 / 0:"
    monkeypatch.setattr(sandbox, "SUPERVISOR", sandbox.SUPERVISOR.replace("if crowded():", failing))
    code = f"""import os, time
if os.fork() == 0: os.execvp('sleep', ['sleep', '{mark}'])
time.sleep(0.2), os.mkdir('fail'), time.sleep(99)"""
    assert "ended from outside" in python_coder(code) and soon(lambda: not alive(mark))


def test_a_system_without_the_list_of_processes_runs_the_code(either_way, monkeypatch):
    monkeypatch.setattr(sandbox, "SUPERVISOR", sandbox.SUPERVISOR.replace("/proc/loadavg", "/proc/none"))
    assert python_coder("2 + 2") == "4"


def test_disk_space_is_taken_in_a_moment_only_where_the_disk_is_small(either_way):
    if not UNPRIVILEGED:
        pytest.skip(WHY_NOT)
    code = """import ctypes, os
n, file = ctypes.c_long, os.open('file', os.O_CREAT | os.O_RDWR)
print(ctypes.CDLL(None).fallocate(file, 0, n(0), n(1 << 20)), os.posix_fallocate(file, 0, 9999),
      os.fstat(file).st_size)"""
    isolated = sandbox.NAMESPACES and NAMESPACES
    assert python_coder(code) == ("0 None 1048576" if isolated else "-1 None 9999")


def test_space_that_the_output_takes_beyond_its_end_counts(either_way, monkeypatch):
    monkeypatch.setattr(confinement, "seccomp", lambda rules: "")  # which would refuse it
    code = """import ctypes, time
n = ctypes.c_long
print(ctypes.CDLL(None).fallocate(1, 1, n(0), n(64 << 20)), flush=True)
time.sleep(2)"""
    assert re.match("Error: stopped after printing 65536 characters|-1$", python_coder(code))


def test_output_that_is_made_long_and_short_again_is_stopped_with_a_reason(either_way):
    code = """import os, time
while True: os.ftruncate(1, 1 << 20), time.sleep(0.001), os.ftruncate(1, 0), time.sleep(0.001)"""
    for _ in range(8):  # it is as likely as not short when it is stopped
        assert python_coder(code, seconds=5).startswith("Error: stopped after printing 65536 characters")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no such names")
def test_the_folder_for_temporary_files_may_have_a_name_that_is_no_text(either_way, monkeypatch, tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.mkdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    look = "import os; print(os.listdir(), os.getsid(0) < 10)"
    assert python_coder(look) == f"[] {sandbox.NAMESPACES and NAMESPACES}" and os.listdir(folder) == []


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="macOS does not have it")
def test_output_that_the_code_has_made_hard_to_read_is_read_and_its_folder_is_removed(either_way, monkeypatch,
                                                                                      tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = """import fcntl, os
print('seen', flush=True)
for i in range(45): os.mkdir('d' * 99), os.chdir('d' * 99)  # a path may have 4096 characters
fcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT)
os._exit(3)"""
    answer = "Error: the code ended with exit status 3\nPrinted before: seen"
    assert [python_coder(code) for _ in range(3)] == [answer] * 3 and os.listdir(tmp_path) == []


@needs_namespaces
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="this system does not have it")
def test_the_folder_for_temporary_files_may_be_in_memory(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for place in "/dev/shm", folder:
            monkeypatch.setattr(tempfile, "tempdir", place)
            look = "import os; open('f', 'w'); print(os.listdir(), os.getsid(0) < 10)"
            assert python_coder(look) == "['f'] True"
        assert os.listdir(folder) == []


# ------------------------------------------------------------ the fork server
def server_pid():
    """The fork server's process id; it is started if none runs."""
    assert python_coder("2 + 2") == "4"
    return sandbox.SERVER[0].pid


def supervisors():
    """The process ids of all supervisors, also of those that are zombies."""
    pid = sandbox.SERVER[0].pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def command(pid):
    """The command line of a process; none when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def soon(condition):
    """Is it true, within LATE seconds?"""
    end = time.monotonic() + LATE
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_one_fork_server_serves_calls_from_many_threads_each_with_its_own_answer():
    pid = server_pid()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: python_coder(f"x = {n}\nx * x"), range(40)))
    assert answers == [str(n * n) for n in range(40)] and sandbox.SERVER[0].pid == pid
    assert soon(lambda: not supervisors())


def test_no_call_finds_what_another_call_changed_nor_draws_its_random_numbers(either_way):
    look = "import os, time\nprint(len('ab'), 'NEW' in os.environ, os.umask(0), time.process_time() < 1)"
    before = python_coder(look)
    python_coder("import builtins, os, sys\n"
                 "builtins.len = os.environ['NEW'] = 'x'\nsys.modules['time'] = None\nos.umask(0)")
    assert before == python_coder(look) and re.fullmatch(r"2 False \d+ True", before)
    assert len({python_coder("import random; print(random.random())") for _ in range(3)}) == 3


def test_the_code_holds_no_file_of_ours_or_of_another_call(either_way, tmp_path):
    sandbox.end_server()
    with open(tmp_path / "secret", "w") as file, ThreadPoolExecutor(4) as pool:
        os.set_inheritable(file.fileno(), True)
        code = """import os, stat
for fd in range(256):
    try: print(fd, oct(stat.S_IFMT(os.fstat(fd).st_mode)))
    except OSError: pass"""
        seen = set(pool.map(python_coder, [code] * 4))
    kinds = {fd: oct(getattr(stat, "S_IF" + kind)) for fd, kind in enumerate(("CHR", "REG", "REG"))}
    answer, = seen
    *files, pipe = answer.splitlines()  # the last is the way to the supervisor
    assert files == [f"{fd} {kind}" for fd, kind in kinds.items()], answer
    assert pipe.endswith(oct(stat.S_IFIFO)), answer


def test_a_thread_that_blocks_signals_may_be_the_first_to_call():
    sandbox.end_server()

    def call():
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        answers.append(python_coder("import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"))

    answers = []
    thread = threading.Thread(target=call)
    thread.start(), thread.join()
    assert answers == ["set()"] and soon(lambda: not supervisors())  # no zombies
    sandbox.end_server()


def test_the_fork_server_keeps_no_file_and_nobody_reads_its_memory_even_without_both_layers(monkeypatch):
    sandbox.end_server()
    pid = server_pid()
    files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()] if os.geteuid() == 0 else []
    assert all(re.match("socket:|/dev/null$", file) for file in files)
    monkeypatch.setattr(sandbox, "NAMESPACES", False)
    monkeypatch.setattr(confinement, "LANDLOCK", 0)
    for name in "mem", "environ", "fd/0", "cwd":
        answer = python_coder(f"import os\nos.stat('/proc/{pid}/{name}')\nopen('/proc/{pid}/{name}').read(1)")
        assert re.match("Error: PermissionError", answer), answer


def test_a_fork_server_that_was_killed_is_started_anew_and_no_call_is_lost():
    first = server_pid()
    os.kill(first, 9)
    second = server_pid()
    with ThreadPoolExecutor(2) as pool:
        begun = pool.submit(python_coder, "import time; time.sleep(0.3); print('begun')")
        time.sleep(0.1)
        os.kill(second, 19)  # SIGSTOP
        waiting = pool.submit(python_coder, "print('waited')")
        time.sleep(0.1)
        os.kill(second, 9)
    assert (begun.result(), waiting.result()) == ("begun", "waited")
    third = server_pid()
    assert len({first, second, third}) == 3


def test_a_fork_server_that_does_not_answer_is_replaced_and_costs_no_call(monkeypatch):
    stopped, start_server = server_pid(), sandbox.start_server
    os.kill(stopped, 19)

    def start(*files):  # the new one may take its time
        monkeypatch.setattr(sandbox, "GRACE", LATE)
        return start_server(*files)

    monkeypatch.setattr(sandbox, "start_server", start)
    monkeypatch.setattr(sandbox, "GRACE", 0.1 - LATE)  # the stopped one is given up after 0.1 seconds
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: python_coder(f"print({n})", seconds=LATE), range(4)))
    assert answers == ["0", "1", "2", "3"] and server_pid() != stopped


def test_a_program_is_not_said_to_take_too_long_if_no_fork_server_answers(monkeypatch):
    def start(*files):
        server, line = start_server(*files)
        os.kill(server.pid, 19)
        return server, line

    start_server = sandbox.start_server
    sandbox.end_server()
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "start_server", start)
        patch.setattr(sandbox, "GRACE", 0)
        answer = python_coder("1", seconds=0.1)
    assert answer == "Error: Python was ended from outside or did not start."
    assert server_pid()


def test_a_python_that_does_not_start_is_an_error_that_says_why(monkeypatch, tmp_path):
    sandbox.end_server()
    (tmp_path / "python").write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert python_coder("1") == "Error: Python was ended from outside or did not start. broken"


def test_a_fork_of_our_process_gets_its_own_fork_server():
    pid = server_pid()
    with sandbox.LOCK:  # as another thread may hold it
        child = os.fork()
        if child == 0:
            signal.alarm(LATE)
            os._exit(sandbox.SERVER is not None or server_pid() == pid or sandbox.end_server() or 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and server_pid() == pid


def ours(script):
    """A process of its own session that runs this script with python_coder."""
    script = f"import os, sys, threading, time\nfrom world import sandbox\n{script}"
    folder, pipe = Path(__file__).parents[1], subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", script], cwd=folder, stdin=pipe, stdout=pipe, text=True,
                            start_new_session=True)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise SystemExit"])
def test_the_fork_server_and_all_calls_end_with_our_process(either_way, end):
    mark = f"8{time.time_ns() % 10**9:09d}"
    code = f"import os; os.execvp('sleep', ['sleep', '{mark}'])"
    with ours(f"""sandbox.NAMESPACES = {sandbox.NAMESPACES}
threading.Thread(target=sandbox.python_coder, args=({code!r},), daemon=True).start()
while not sandbox.SERVER: time.sleep(0.01)
print(sandbox.SERVER[0].pid, flush=True)
sys.stdin.read(1)
{end}""") as process:
        server = int(process.stdout.readline())
        assert soon(lambda: alive(mark))
        process.stdin.close()
    assert soon(lambda: not command(server) and not alive(mark))


def test_ctrl_c_does_not_end_the_fork_server():
    with ours("""sandbox.python_coder("1")
pid = sandbox.SERVER[0].pid
try: os.killpg(0, 2), time.sleep(9)
except KeyboardInterrupt: print(sandbox.python_coder("2"), sandbox.SERVER[0].pid == pid)""") as process:
        assert process.stdout.read() == "2 True\n"


# ------------------------------------------------------------ hostile programs
# A program that gets what it wants prints "escaped". MARK is a word that no other process has on its command
# line, OUTSIDE a folder of ours with the file "ours", FLOW our process, SERVER the fork server, PORT where we
# listen.
TIME = "^Error: stopped after 0.2"
CHATTY = "^Error: stopped after printing 65536 characters\nPrinted before: [1x]"
TRAP = "^Error: an exception that cannot be shown$"
CROWD = "too many processes|Resource temporarily unavailable|can't start new thread|MemoryError"

ON_EACH_FILE = "for fd in range(3, 99):\n  try: {}\n  except OSError: pass\n"
HOSTILE = [  # name, program, what the answer looks like: with namespaces and without
    # it never ends
    ("a loop", "while True: pass", TIME), ("sleeping for ever", "time.sleep(10**6)", TIME),
    ("an exit handler for ever", "import atexit\n@atexit.register\ndef f():\n  while True: pass", TIME),
    ("a destructor for ever", "class A:\n  def __del__(self):\n    while True: pass\na = A()", TIME),
    ("a repr for ever", "class A:\n  def __repr__(self):\n    while True: pass\nA()", TIME),
    ("a message for ever", "class E(Exception):\n  def __str__(self):\n    while True: pass\nraise E", TIME),
    ("a catastrophic regex", "import re\nre.match('(a+)+b', 'a' * 40)", TIME),
    ("a tower of powers", "9**9**9", TIME + "|MemoryError"),
    ("every signal ignored", "import signal\nfor n in signal.valid_signals() - {9, 19}: signal.signal(n, 1)\n"
     "while True: pass", TIME),
    ("it stops itself", "os.kill(os.getpid(), 19)", TIME),
    # it takes too much
    ("a huge mapping", "import mmap\nmmap.mmap(-1, 1 << 42)\nprint('escaped')", "Cannot allocate memory"),
    ("the digits of a huge integer", "print(10**10**7)", "^Error: ValueError|" + TIME),
    ("deep recursion", "def f(): f()\nf()", "^Error: RecursionError"),
    ("deep recursion in C", "x = ()\nfor i in range(10**6): x = (x,)\nhash(x)",
     "^Error: (killed by signal|RecursionError|MemoryError)"),
    ("a recursion without a limit", "sys.setrecursionlimit(10**9)\nclass A:\n"
     "  def __repr__(self): return repr([self])\nrepr(A())", "^Error: "),
    ("a fork bomb", "while True: os.fork()", CROWD),
    ("a fork bomb of sessions", "while True:\n  if os.fork() == 0: os.setsid()", CROWD),
    ("ten thousand threads", "for i in range(10**4):\n"
     "  threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\nprint('escaped')", CROWD),
    ("a hundred thousand files", "x = [open('/dev/null') for i in range(10**5)]", "Too many open files"),
    ("a huge file", "open('f', 'wb').write(bytes(99 << 20))", "File too large"),
    ("a folder deeper than any path", "for i in range(600): os.mkdir('d' * 9); os.chdir('d' * 9)\n"
     "os.chmod('.', 0)", "^Nothing|^Error: stopped after"),
    # its source is the weapon
    ("ten megabytes of source", "x = 1\n" * 1_700_000, TIME + "|MemoryError"),
    ("a hundred thousand brackets", "(" * 10**5, "^Error: (SyntaxError|MemoryError|RecursionError)"),
    ("a hundred thousand signs", "-" * 10**5 + "1",
     "^Error: (SyntaxError|MemoryError|RecursionError|killed by signal 11)"),
    ("a source with NUL", "print('escaped')\0", "^Error: .*null bytes"),
    ("a source that is not Unicode", "print('a\ud800b')", r"^a\?b$"),
    # it prints what should not be printed
    ("output for ever on one line", "while True: sys.stdout.write('x')", CHATTY),
    ("output by many", "for i in range(3): os.fork()\nwhile True: print(1)", CHATTY),
    ("a hundred megabytes at once", "print('x' * 10**8)", CHATTY),
    ("output that is not UTF-8", "os.write(1, bytes(range(256)))", "\ufffd"),
    ("output that is not Unicode", "print('\\ud800')", "^Error: UnicodeEncodeError"),
    ("terminal codes", "print('\\x1b[2J\\r\\0\\x07', end='')", "^\x1b\\[2J\r\0\x07$"),
    # its exceptions are traps
    ("a message that raises", "class E(Exception):\n  def __str__(self): 1 / 0\nraise E", TRAP),
    ("a class whose name raises", "class M(type):\n  __name__ = property(lambda c: 1 / 0)\n"
     "class E(Exception, metaclass=M): pass\nraise E", TRAP),
    ("one whose class raises", "class E(Exception):\n  __class__ = property(lambda e: 1 / 0)\nraise E", TRAP),
    ("an exit code that raises", "class C:\n  def __eq__(self, other): 1 / 0\nraise SystemExit(C())", TRAP),
    ("an exception of nobody", "class B(BaseException): pass\nraise B('b')", r"^Error: B: b \(line 3\)$"),
    ("a message of ten megabytes", "raise ValueError('x' * 10**7)", "^Error: ValueError: xxx"),
    ("errors in many children", "for i in range(30):\n"
     "  if os.fork() == 0: raise ValueError('x' * 9000)\n\ntime.sleep(0.3)", "^Error: ValueError: xxx"),
    # it breaks what we stand on
    ("sys.exit replaced", "sys.exit = lambda *code: None\nprint('done')", "^done$"),
    ("excepthook replaced", "sys.excepthook = lambda *e: print('escaped')\nx",
     "^Error: NameError: .* not defined"),
    ("builtins replaced", "import builtins as b\nb.str = b.type = b.isinstance = None\nx", TRAP),
    ("no __main__", "del sys.modules['__main__']\nprint('done')", "^done$"),
    ("stdout replaced", "sys.stdout = None\nprint('escaped')", "^Nothing was printed"),
    ("every file closed", "os.closerange(0, 256)\nx", "^Error: "),
    ("another program in its place", "os.execvp('echo', ['echo', 'done'])", "^done$"),
    ("its group killed", "os.killpg(0, 9)", "^Error: killed by signal 9$"),
    # it forges or unsays the verdict
    ("the verdict erased", ON_EACH_FILE.format("os.ftruncate(fd, 0)") + "while True: pass", TIME),
    ("the verdict forged", ON_EACH_FILE.format("os.write(fd, b'KeyError')") + "while True: pass", TIME),
    ("the pipe filled", ON_EACH_FILE.format("os.set_blocking(fd, False), os.write(fd, bytes(10**6))")
     + "os._exit(3)", "^Error: the code ended with exit status 3"),
    # it leaves something behind
    ("a child of a thread", "def f():\n"
     "  if os.fork() == 0: os.execvp('sleep', ['sleep', '99', 'MARK'])\nthreading.Thread(target=f).start()",
     "^Nothing" if sys.version_info < (3, 12) else "DeprecationWarning: This process .* is multi-threaded"),
    ("a link out of the folder", "os.symlink('OUTSIDE', 'link')\n"
     "os.mkfifo('pipe'); os.mkdir('d'); os.chmod('d', 0)\nos.chmod('.', 0)", "^Nothing"),
    ("its folder deleted", "os.rmdir(os.getcwd())", "^Nothing|Read-only|denied"),
    ("its folder a link", "folder = os.getcwd()\nos.rmdir(folder); os.symlink('OUTSIDE', folder)",
     "^Nothing|Read-only|denied"),
    # it looks for what is ours
    ("our environment", "os.system('env')\nprint(os.environ, open('/proc/self/environ').read())",
     "PYTHONHASHSEED"),
    ("our stdin", "input()", "^Error: EOFError"),
]

def attempts(name, act, those, before=""):
    """A program that tries each x of those, which act must refuse: by OSError, or by -1."""
    return name, f"""{before}
act = lambda x: {act}
for x in {those}:
    try: act(x) == -1 or print("escaped")
    except OSError: pass
print("done")"""


SOCKETS = """import mmap
code = mmap.mmap(-1, 4096, prot=7)  # socket(AF_INET, SOCK_STREAM, 0) by int 0x80, as a 32-bit program
code.write(bytes.fromhex('53b866010000bb02000000b90100000031d231f631ffcd805bc3'))
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
compat = lambda: call() if X86 else -1"""
BY_PIPE = """import fcntl
def act_by_pipe(pid):
    a, b = os.pipe()
    fcntl.fcntl(a, 10, 9), fcntl.fcntl(a, fcntl.F_SETOWN, pid)  # F_SETSIG: what to send
    fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC), os.write(b, b'x')
    return -1"""
ORPHANS = """
C.prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG
for i in range(9):
    if os.fork() == 0:
        C.setsid(), C.setpgid(0, 0), C.setpgid(0, os.getppid())
        if C.syscall(56, 0x8000 | 17, 0, 0, 0, 0) == 0:  # clone, CLONE_PARENT
            os.execvp('sleep', ['sleep', '99', 'MARK'])
        os._exit(0)
print('done')"""
TRACED = "C.prctl(1, 0, 0, 0, 0)\nif os.fork() == 0: os.execvp('sleep', ['sleep', '99', 'MARK'])"
DATAGRAM = "pair = lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"
UMOUNT = "import ctypes; print('done' if ctypes.CDLL(None).umount2(b'/proc', 2) else 'escaped')"
HARMLESS = {"null", "zero", "full", "random", "urandom", "fd", "stdin", "stdout", "stderr", "shm"}
FILL = "def fill(x, n, size):\n  for i in range(n): open(f'{x}/{i}', 'wb').write(bytes(size))"
RAISE = "def change(x):\n  try: resource.setrlimit(x, (-1, -1))\n  except ValueError: return -1"
KERNEL = "[(29, 0, 99, 0o1600), (68, 0, 0o1600), (64, 0, 1, 0o1600), (250, 0, -4)] * X86"  # and a key
SIGNALS = "[(62, -FLOW, 9), (200, FLOW, 9), (234, FLOW, FLOW, 9), (424, C.syscall(434, FLOW, 0), 9)] * X86"
CLONES = "[(272, 0x10020000), (56, 0x10000011, 0, 0, 0, 0), (435, (ctypes.c_uint64 * 8)(1 << 28), 64)] * X86"
SETTINGS = "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_adj", "/sys/power/state"
MOUNTS = (b"", b"/", b"", 32, None), (b"", b"/proc", b"", 32, None), (b"x", b"/tmp", b"tmpfs", 0, None)
HOSTILE_TO_OTHERS = [
    # other processes
    attempts("everybody killed", "os.kill(-1, x) or -1", "(9, 19)"),  # -1 is also "everybody I may"
    attempts("the supervisor killed or stopped", "os.kill(os.getppid(), x) or -1", "(2, 9, 11, 15, 19, 20)"),
    attempts("the flow killed", "os.kill(FLOW, x)", "(9, 19)"),
    attempts("the flow killed by other calls", "C.syscall(*x)", SIGNALS),
    attempts("the flow killed by its pipe", "act_by_pipe(x)", "(FLOW, os.getppid())", BY_PIPE),
    attempts("the flow's limits lowered", "resource.prlimit(FLOW, x, (0, 1 << 20)) and 1",
             "(resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK)"),
    attempts("the flow slowed down", "x(FLOW) or 1", "(lambda pid: os.setpriority(0, pid, 19), "
             "lambda pid: os.sched_setaffinity(pid, {0}))"),
    attempts("the supervisor traced", "C.ptrace(x, os.getppid(), 0, 0)", "(16, 0x4206)"),
    attempts("traced by the supervisor", "C.ptrace(x, 0, 0, 0)", "[0]", TRACED),
    attempts("the supervisor's memory and files", "open(f'/proc/{os.getppid()}/' + x, 'rb', 0).read(1) or 1",
             "('mem', 'environ', 'fd/0', 'fd/1', 'fd/2')"),
    attempts("the flow's memory and files", "open('/proc/FLOW/' + x, 'rb', 0).read(1) or 1",
             "('mem', 'environ', 'fd/0', 'maps', 'cwd/ours')"),
    ("it outlives us", ORPHANS),
    # files and devices
    attempts("files outside", "open(x, 'a')", "('OUTSIDE/ours', 'OUTSIDE/new', '/tmp/new', '/dev/new')"),
    attempts("files outside deleted", "x('OUTSIDE/ours') or 1", "(os.remove, lambda f: os.rename(f, 'f'), "
             "lambda f: os.link(f, 'f'), lambda f: os.truncate(f, 0))"),
    attempts("files outside made", "x('OUTSIDE/new') or 1",
             "(os.mkdir, os.mkfifo, lambda f: os.symlink('.', f), lambda f: os.rename('.', f))"),
    attempts("files outside emptied by reading", "os.open('OUTSIDE/ours', x)",
             "(os.O_TRUNC, os.O_TRUNC | 3)"),
    attempts("the rights of files outside", "x('OUTSIDE/ours') or -1",
             "(lambda f: os.chmod(f, 0), lambda f: os.fchmod(os.open(f, 0), 0), "
             "lambda f: os.utime(f, (0, 0)), lambda f: os.chown(f, -1, os.getgid()), "
             "lambda f: os.setxattr(f, 'user.x', b'x'))"),
    attempts("the system's settings", "open(x, 'r+')", SETTINGS),
    attempts("disks", "os.open('/dev/' + x, os.O_RDWR)", f"{sorted(set(os.listdir('/dev')) - HARMLESS)}"),
    attempts("mounts undone", "C.mount(*x)", MOUNTS),
    ("mounts undone by a new program",
     f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {UMOUNT!r}])\nNone"),
    attempts("namespaces in the namespace", "C.syscall(*x)", CLONES),
    attempts("limits raised", "change(x)", "(resource.RLIMIT_AS, resource.RLIMIT_FSIZE)", RAISE),
    attempts("the memory disks filled", "fill(x, 99, 15 << 20)", "('/dev/shm', '.')", FILL),
    attempts("the disk filled with a million files", "fill(x, 10**6, 0)", "'.'", FILL),
    attempts("memory of nobody", "C.syscall(*x)", KERNEL),
    # the network
    attempts("the server on our port", "socket.create_connection((x, PORT), 1)",
             "('127.0.0.1', 'localhost', '0.0.0.0')"),
    attempts("our sockets without and with a file", "socket.socket(socket.AF_UNIX).connect(x) or 1",
             "['\\0MARK', 'OUTSIDE/socket']"),
    attempts("a datagram from one of a pair", "pair()[0].sendto(b'x', x)", "('\\0MARK2', 'OUTSIDE/socket2')",
             DATAGRAM),
    attempts("sockets of every family", "socket.socket(*x)",
             "[(family, kind) for family in range(1, 46) for kind in (1, 2, 3, 5)]"),
    attempts("sockets by io_uring, 32-bit calls and x32", "-1 if x() < 0 else 1",
             "(lambda: C.syscall(425, 8, bytes(120)), compat, lambda: C.syscall(0x40000029, 2, 1, 0))",
             SOCKETS),
    attempts("the web and DNS", "x()", "(lambda: urllib.request.urlopen('http://127.0.0.1:PORT', timeout=1), "
             "lambda: socket.getaddrinfo('example.com', 80))", "import urllib.request"),
]
HOSTILE_TO_OTHERS += [(name.replace("flow", "fork server"), code.replace("FLOW", "SERVER"))
                      for name, code in HOSTILE_TO_OTHERS if "FLOW" in code]


@pytest.fixture
def attack(tmp_path, monkeypatch):
    """Runs a hostile program, which must leave an answer of bounded length, in time, and nothing else."""
    for folder in ("outside", "folders"):
        (tmp_path / folder).mkdir()
    (tmp_path / "outside" / "ours").write_text("kept")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "folders"))
    monkeypatch.setenv("SECRET_KEY", "escaped")
    monkeypatch.chdir(tmp_path / "outside")  # the path of a socket must be short

    def state():
        info = os.stat("ours")
        limits = [resource.getrlimit(limit) for limit in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK)]
        return (sorted(os.listdir()), Path("ours").read_text(), info.st_mode, info.st_uid, info.st_ctime_ns,
                os.listxattr("ours"), limits, os.getpriority(0, 0), os.sched_getaffinity(0))

    def run(code, seconds):
        start = time.monotonic()
        mark = str(seconds + time.time_ns() % 10**6 / 10**10)  # as an argument of the supervisor
        with ExitStack() as stack:
            server, *sockets = [stack.enter_context(socket.socket(*kind)) for kind in
                                [(socket.AF_INET,)] + [(socket.AF_UNIX, kind) for kind in (1, 1, 2, 2)]]
            addresses = ("127.0.0.1", 0), "\0" + mark, "socket", "\0" + mark + "2", "socket2"
            for one, address in zip((server, *sockets), addresses):
                one.bind(address), one.setblocking(False)
                one.type == 1 and one.listen()
            before = state()
            code = code.replace("MARK", mark).replace("OUTSIDE", str(tmp_path / "outside"))
            code = code.replace("SERVER", str(server_pid())) if "SERVER" in code else code
            code = code.replace("FLOW", str(os.getpid())).replace("PORT", str(server.getsockname()[1]))
            answer = python_coder(code, float(mark))
            for one in (server, *sockets):
                with pytest.raises(BlockingIOError):  # nobody has called
                    one.accept() if one.type == 1 else one.recv(1)
        assert time.monotonic() - start < seconds + LATE and len(answer) < sandbox.OUTPUT_CAP + 9000
        assert "escaped" not in answer
        assert not alive(mark) and not os.listdir(tmp_path / "folders") and state() == before
        Path("socket").unlink(), Path("socket2").unlink()
        return answer
    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("code, expected", [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_a_hostile_program_gets_an_answer_and_leaves_nothing(attack, either_way, code, expected):
    answer = attack("import os, sys, threading, time\n" + code, 0.2 if TIME in expected else 5)
    assert re.search(expected, answer), answer[:300]


# Never where nothing holds, whatever happens: as root, these would end the machine that tests.
GUARD = """import ctypes, os, resource, socket
C, X86 = ctypes.CDLL(None), os.uname().machine == "x86_64"
try: os.getppid() == 1 or os.kill(os.getppid(), 0) or exit("unprotected")
except PermissionError: pass
"""


@pytest.mark.parametrize("name, code", HOSTILE_TO_OTHERS, ids=[row[0] for row in HOSTILE_TO_OTHERS])
def test_a_hostile_program_harms_and_reaches_nobody_else(attack, confined, name, code):
    answer = attack(GUARD + code, 1 if "filled" in name else 5)
    assert answer == "done" or answer.startswith("Error: stopped after") and "filled" in name
