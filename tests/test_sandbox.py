"""The sandbox: what python_coder answers, and that a program gets no further than its output."""

import contextlib
import os
import re
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from world import sandbox
from world.sandbox import protection, python_coder

REPOSITORY = Path(__file__).parents[1]
LATE = 60  # seconds: what is to happen in a moment may take this long on a busy machine
confined = pytest.mark.skipif(not protection()[0], reason=protection()[1])


@pytest.fixture
def limits(monkeypatch):
    """limits(SECONDS=1): other limits, for the workers that start from here on."""

    def change(**values):
        for name, value in values.items():
            monkeypatch.setattr(sandbox, name, value)
        sandbox.end_idle_workers()
        monkeypatch.setattr(sandbox, "SLOTS", sandbox.new_slots())

    yield change
    sandbox.end_idle_workers()


def worker():
    """The worker that runs the next program."""
    assert python_coder("2 + 2") == "4"
    idle = sandbox.SLOTS.get()
    sandbox.SLOTS.put(idle)
    return idle


def number(call):
    return int(call.split()[2 if os.uname().machine == "aarch64" else 1])


def soon(condition):
    end = time.monotonic() + LATE
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def in_another_process(script, **options):
    """A Python that runs the script, which finds python_coder there."""
    script = f"import os, signal, threading, time\nfrom world import sandbox\n{script}"
    command = [sys.executable, "-c", "from world.sandbox import *\n" + script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, **options)


# ------------------------------------------------------------ what it answers
SCOPE = """import math
def fact(n): return 1 if n < 2 else n * fact(n - 1)
def root(x): return math.sqrt(x)
k = 2
if __name__ == "__main__":
    print("once", fact(5), root(9), [k * i for i in range(3)])"""


@pytest.mark.parametrize(
    "code, result",
    [
        ("2 + 2", "4"),
        ("print(1); 'a'", "1\n'a'"),
        ("x = 3\nprint(x)\nNone", "3"),
        ("print('é ∑ 漢')\nexit()", "é ∑ 漢"),
        ("import sys; n = sys.stderr.write('seen\\n')\nprint(1)\nsys.exit(0)", "seen\n1"),
        ("print('a\ud800b')", "a?b"),
        ("", "Nothing was printed. Use print() to show a result."),
        ("x", "Error: NameError: name 'x' is not defined (line 1)"),
        (
            "print(7)\n\n1 / 0",
            "Error: ZeroDivisionError: division by zero (line 3)\nPrinted before: 7",
        ),
        ("def f():\n    return {}['k']\nf()", "Error: KeyError: 'k' (line 2)"),
        ("x = (1", "Error: SyntaxError: '(' was never closed (line 1)"),
        ("assert False", "Error: AssertionError (line 1)"),
        ("input()", "Error: EOFError: EOF when reading a line (line 1)"),
        ("import sys; sys.exit('bye')", "Error: SystemExit: bye (line 1)"),
        ("import os; os._exit(3)", "Error: the code ended with exit status 3"),
        ("import ctypes; ctypes.string_at(0)", "Error: killed by signal 11"),
        (
            "class E(Exception):\n  def __str__(self): 1 / 0\nraise E",
            "Error: an exception that cannot be shown",
        ),
        # once, in one scope, and with the end of a whole Python
        (SCOPE, "once 120 3.0 [0, 2, 4]"),
        ("import atexit\natexit.register(print, 'end')\nNone", "end"),
        ("import threading\nthreading.Timer(0.1, print, ['end']).start()", "end"),
        ("import io, sys\nprint('a', end='')\nsys.stdout = io.StringIO()\nprint('b')", "a"),
        ("import os, sys\nprint('seen')\nos.close(1)\nsys.modules = sys.stdout = None", "seen"),
    ],
    ids=ascii,
)
def test_the_answer_is_what_the_code_prints_and_its_last_expression_or_its_error(code, result):
    assert python_coder(code) == result


PACKAGES = {
    "numpy": ("x = numpy.random.rand(300, 300)\n(x @ x).shape", "(300, 300)"),
    "sympy": ("x = sympy.symbols('x')\nsympy.integrate(x * sympy.exp(x), (x, 0, 1))", "1"),
    "concurrent.futures": ("sum(concurrent.futures.ThreadPoolExecutor(4).map(abs, [1, 2]))", "3"),
    "zoneinfo": ("zoneinfo.ZoneInfo('Europe/Paris').key", "'Europe/Paris'"),
    "decimal": ("decimal.Decimal(2).sqrt() > 1, len(str(7**5000))", "(True, 4226)"),
}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_packages_that_the_user_has_can_be_used(package):
    pytest.importorskip(package)
    code, result = PACKAGES[package]
    assert python_coder(f"import {package}\n{code}") == result


def test_the_same_code_gives_the_same_text_every_time_but_other_random_numbers():
    assert len({python_coder("print({str(i) for i in range(50)})") for _ in range(3)}) == 1
    assert len({python_coder("import random; random.random()") for _ in range(3)}) == 3


def test_no_program_finds_what_another_one_changed():
    python_coder("import builtins, os\nbuiltins.len = os.environ['NEW'] = '1'")
    assert python_coder("import os\nlen('ab'), 'NEW' in os.environ") == "(2, False)"


# Its frames, their callers' frames, and what these and all objects of Python hold.
WALK = """import gc, sys
frame, texts = sys._getframe(), []
found = gc.get_objects()
while frame := frame.f_back:
    found.append(frame.f_locals)
for held in found:
    texts += [part for part in gc.get_referents(held) if type(part) in (str, bytes)]
secret = ["n3", "dle"]
sorted({str(text)[:60] for text in texts if "".join(secret) in str(text)})"""


@pytest.mark.parametrize("end", ["", "\nraise ValueError('n3' + 'dle')"])
def test_no_program_finds_what_another_one_was_or_printed(end):
    assert "n3dle" in python_coder("print('n3' + 'dle')  # n3dle" + end)
    assert python_coder(WALK) == "[]"  # the same worker: the last that was used


def test_calls_from_many_threads_get_their_own_answers():
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: python_coder(f"x = {n}\nx * x"), range(40)))
    assert answers == [str(n * n) for n in range(40)]


# ------------------------------------------------------------ limits, on every system
@pytest.mark.parametrize(
    "limit, code",
    [
        ("SECONDS", "while True: pass"),
        ("WALL_SECONDS", "import time; time.sleep(99)"),
        ("WALL_SECONDS", "import os, time; os.closerange(0, 64); time.sleep(99)"),
        ("WALL_SECONDS", "import threading; threading.Timer(99, print).start()"),
    ],
)
def test_the_time_of_the_cpu_and_on_the_clock_is_limited(limits, limit, code):
    limits(**{limit: 1})
    assert python_coder(f"print(1)\n{code}") == "Error: stopped after 1 seconds\nPrinted before: 1"


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no such limit")
def test_memory_is_limited():
    assert python_coder("x = bytearray(1 << 30)") == "Error: MemoryError (line 1)"
    assert python_coder("x = []\nwhile True: x.append(' ' * 9999)") == "Error: MemoryError (line 2)"


@pytest.mark.parametrize(
    "code", ["while True: print('x' * 99)", "import os; os.write(1, b'x' * 10**8)"]
)
def test_output_is_limited(code):
    answer = python_coder(code)
    assert answer.startswith("Error: stopped after printing 65536 characters\nPrinted before: x")
    assert len(answer) < 66000
    raised = python_coder("raise ValueError('x' * 10**7)")
    assert raised.startswith("Error: ValueError: xxx") and len(raised) < 9000


@pytest.mark.exhaustive
def test_no_more_programs_run_at_once_than_there_are_cores(limits, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)  # of which we may use two
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    limits(SECONDS=1)
    code = """import time
print(start := time.monotonic())
while time.process_time() < 0.6: pass
print(time.monotonic())"""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(python_coder, [code] * 8))
    times = [tuple(map(float, answer.split())) for answer in answers]
    assert max(sum(a <= start < b for a, b in times) for start, _ in times) <= 2


@pytest.mark.parametrize("end", ["while True: print(2)", "os._exit(4)"])
def test_the_code_cannot_hide_that_it_was_stopped(limits, end):
    limits(SECONDS=1)
    code = f"""import os
print('"forged"', flush=True)
for file in range(64):
    try: os.write(file, b'"forged"\\n')
    except OSError: pass
{end}"""
    assert re.match("Error: (stopped after|the code ended)", python_coder(code))


def test_our_environment_and_open_files_are_not_passed_on(limits, monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    limits()
    with open(tmp_path / "secret", "w") as file:
        os.set_inheritable(file.fileno(), True)
        code = """import os, stat
print(sorted(os.environ))
for file in range(64):
    try: print(file, stat.S_ISFIFO(os.fstat(file).st_mode))
    except OSError: pass"""
        names, *files = python_coder(code).splitlines()
    assert "PYTHONHASHSEED" in names and "SECRET_KEY" not in names
    # /dev/null, what it prints twice, and what it raises
    assert files == ["0 False", "1 True", "2 True", "3 True"]


# ------------------------------------------------------------ confinement, on Linux
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can confine it")
def test_a_kernel_that_can_confine_the_code_does():
    landlock = sandbox.LIBC.syscall(444, None, 0, 1) > 0
    assert protection()[0] == bool(landlock and sandbox.seccomp_program())
    assert protection()[0] or "NOT confined" in protection()[1]


# A program makes all attempts, and prints those that were not refused.
TRY = """import ctypes, fcntl, mmap, multiprocessing, os, resource, socket, subprocess
C = ctypes.CDLL(None)
def refused(attempt):
    try: return eval(attempt) == -1
    except OSError: return True
print([attempt for attempt in {!r} if not refused(attempt)])"""


def not_refused(attempts, **words):
    for word, value in words.items():
        attempts = attempts.replace(word, str(value))
    return python_coder(TRY.format(attempts.strip().splitlines()))


@confined
def test_it_reads_python_and_nothing_else(tmp_path):
    (tmp_path / "key").write_text("hunter2")
    attempts = """
open('/etc/passwd').read(1)
open('/usr/lib/../../etc/passwd').read(1)
open('OUTSIDE/key').read(1)
open('REPOSITORY/README.md').read(1)
open('/proc/self/environ').read(1)
open('/proc/OURS/environ').read(1)
open('/proc/WORKER/fd/0').read(1)
open('/dev/zero', 'rb').read(1)
open('/proc/self/fd/%d' % os.open('/etc/passwd', os.O_PATH)).read(1)
os.open('passwd', os.O_RDONLY, dir_fd=os.open('/etc', os.O_PATH))
os.readlink('/proc/OURS/cwd')
os.listdir('/')
os.listdir('/proc')
os.listdir('HOME')
os.listdir('REPOSITORY')"""
    words = {"OUTSIDE": tmp_path, "REPOSITORY": REPOSITORY, "HOME": os.path.expanduser("~")}
    assert not_refused(attempts, OURS=os.getpid(), WORKER=worker().pid, **words) == "[]"
    assert python_coder("import os; len(open(os.__file__).read()) > 99") == "True"


@confined
def test_it_writes_nothing(tmp_path):
    def state():
        files = [Path(os.__file__).stat(), (tmp_path / "ours").stat()]
        return os.listdir(tmp_path), [(file.st_size, file.st_ctime_ns) for file in files]

    (tmp_path / "ours").write_text("kept")
    before = state()
    attempts = """
open('OUTSIDE/ours', 'w')
open('OUTSIDE/ours', 'r+')
open('OUTSIDE/new', 'x')
os.open('OUTSIDE/ours', os.O_TRUNC)
os.open('OUTSIDE/new', os.O_CREAT)
os.open('OUTSIDE', os.O_TMPFILE | os.O_RDWR)
open(os.__file__, 'a')
open('/dev/shm/new', 'w')
open('/proc/sys/kernel/core_pattern', 'w')
os.mkdir('OUTSIDE/new')
os.link('OUTSIDE/ours', 'OUTSIDE/new')
os.rename('OUTSIDE/ours', 'OUTSIDE/new')
os.remove('OUTSIDE/ours')
os.truncate('OUTSIDE/ours', 0)
os.chmod('OUTSIDE/ours', 0)
os.utime('OUTSIDE/ours', (0, 0))
os.fchmod(os.open(os.__file__, 0), 0o644)
fcntl.ioctl(os.open(os.__file__, 0), 0x40086602, bytes(8))
mmap.mmap(os.open(os.__file__, 0), 9)
os.memfd_create('x')
C.shmget(0, 4096, 0o1600)
C.mount(b'x', b'OUTSIDE', b'tmpfs', 0, None)"""
    assert not_refused(attempts, OUTSIDE=tmp_path) == "[]" and state() == before


@confined
def test_it_starts_no_process_and_no_other_program():
    attempts = """
os.fork()
C.vfork()
C.syscall(CLONE, 0x8000 | 17, 0, 0, 0, 0)
C.syscall(435, bytes(88), 88)
-1 if os.system('echo') else 0
subprocess.run('echo', shell=True)
os.posix_spawn('/bin/echo', ['echo'], {})
os.execv('/bin/echo', ['echo', 'replaced'])
multiprocessing.get_context('fork').Process(target=print).start()
multiprocessing.get_context('spawn').Process(target=print).start()"""
    assert not_refused(attempts, CLONE=number("clone 56 220")) == "[]"


@confined
def test_it_reaches_no_other_process_and_raises_no_limit():
    attempts = """
os.kill(VICTIM, 0)
os.kill(os.getppid(), 0)
os.kill(-1, 0)
C.tgkill(VICTIM, VICTIM, 0)
fcntl.fcntl(1, fcntl.F_SETOWN, VICTIM)
C.ptrace(16, VICTIM, 0, 0)
C.process_vm_readv(VICTIM, 0, 0, 0, 0, 0)
resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1))
os.setpriority(os.PRIO_PROCESS, VICTIM, 19)
os.sched_setaffinity(VICTIM, {0})
C.prctl(1, 0, 0, 0, 0)
os.setuid(0)"""
    raised = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
    with subprocess.Popen(["sleep", "999"]) as victim:
        answers = not_refused(attempts, VICTIM=victim.pid), python_coder(raised), victim.poll()
        victim.kill()
    assert answers[::2] == ("[]", None) and answers[1].startswith("Error: ValueError")


@confined
def test_it_opens_no_socket_of_any_family():
    code = """import socket
for family in range(50):
    for kind in range(1, 6):
        for make in socket.socket, socket.socketpair:
            try: print(make(family, kind))
            except PermissionError: pass
socket.create_connection(('127.0.0.1', 9))"""
    assert python_coder(code).startswith(
        "Error: PermissionError"
    ) and "Printed" not in python_coder(code)


@confined
def test_every_system_call_that_is_not_listed_is_refused():
    allowed = {number(entry) for calls, *_ in sandbox.ALLOWED for entry in calls.split(",")}
    allowed |= {335, 336}  # uretprobe and uprobe, which seccomp lets through: they end the program
    code = f"""import ctypes
C, zero = ctypes.CDLL(None, use_errno=True), [ctypes.c_long(0)] * 6
refused = lambda n: C.syscall(ctypes.c_long(n), *zero) == -1 and ctypes.get_errno() in (1, 25, 38)
for n in {set(range(600)) - allowed}:
    refused(n) and refused(n | 0x40000000) or print(n)  # the second is x32's
'done'"""
    assert python_coder(code) == "'done'"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the filter")
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_allows_what_a_calculator_needs_on_either_machine(monkeypatch, machine):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    steps = list(struct.iter_unpack("<HBBI", sandbox.seccomp_program()))
    arch, other = (0xC000003E, 0x40000003) if machine == "x86_64" else (0xC00000B7, 0x40000028)

    def answer(call, *args, arch=arch):
        call = call[machine == "aarch64"] if isinstance(call, tuple) else call
        memory, at, a = struct.pack("<IIQ6Q", call, arch, 0, *args, *[0] * (6 - len(args))), 0, 0
        while steps[at][0] != 0x06:  # the kernel's machine, as far as it is used
            code, yes, no, value = steps[at]
            if code == 0x20:
                (a,) = struct.unpack_from("<I", memory, value)
            elif code == 0x54:
                a &= value
            else:
                at += yes if (a == value if code == 0x15 else a >= value) else no
            at += 1
        return "allowed" if steps[at][3] == 0x7FFF0000 else steps[at][3] & 0xFFFF

    read, openat, clone, fcntl, prlimit = (0, 63), (257, 56), (56, 220), (72, 25), (302, 261)
    socket_call, ioctl, clone3, close_range = (41, 198), (16, 29), 435, 436
    assert answer(read) == answer(openat, 0, 0, 0o2000000) == answer(clone, 0x3D0F00) == "allowed"
    assert answer(fcntl, 1, 1030) == answer(prlimit, 0) == "allowed"
    assert {answer(openat, 0, 0, flags) for flags in (1, 2, 3, 0o100, 0o1000, 1 << 32 | 1)} == {1}
    assert {answer(clone, flags) for flags in (17, 0x8011, 0x10010000, 0x10000 << 32)} == {1}
    assert answer(fcntl, 1, 8) == answer(prlimit, 99) == answer(socket_call) == 1
    assert answer(ioctl) == 25 and answer(clone3) == answer(close_range) == answer(0x40000000) == 38
    assert answer(read, arch=other) == 1


@confined
def test_the_worker_has_no_power_and_linux_ends_it_first_if_memory_runs_out():
    status = Path(f"/proc/{worker().pid}/status").read_text()
    assert re.search("CapPrm:\t0+\nCapEff:\t0+\n", status) and "NoNewPrivs:\t1" in status
    assert Path(f"/proc/{worker().pid}/oom_score_adj").read_text() == "1000\n"


# A filter of our process that refuses some calls, as an old kernel does: [(call, first argument)].
REFUSE = """import struct
steps = []
for call, argument in {}:
    steps += [(0x20, 0, 0, 0), (0x15, 0, 3, call), (0x20, 0, 0, 16), (0x15, 0, 1, argument)]
    steps += [(6, 0, 0, 0x50016)]
steps = b"".join(struct.pack("<HBBI", *step) for step in [*steps, (6, 0, 0, 0x7FFF0000)])
text = ctypes.create_string_buffer(steps)
sandbox.call("prctl", 38, 1, 0, 0, 0)
sandbox.call("prctl", 22, 2, sandbox.NUMBERS(len(steps) // 8, ctypes.addressof(text)))
"""
PRCTL = number("prctl 157 167")
NO_LANDLOCK, NO_SECCOMP = (444, 0), (PRCTL, 21)


@confined
@pytest.mark.parametrize("missing", [[NO_LANDLOCK], [NO_SECCOMP], [NO_LANDLOCK, NO_SECCOMP]])
def test_where_the_kernel_cannot_confine_it_the_code_runs_and_protection_says_so(missing, tmp_path):
    writes = f"open({str(tmp_path / 'new')!r}, 'w').write('x' * 10**6)"
    script = f"""
sandbox.SECONDS = 1
print(*protection(), python_coder("2 + 2"), python_coder("while True: pass"), sep="\\n")
print(python_coder({writes!r}))"""
    with in_another_process(REFUSE.format(missing) + script) as ours:
        *answers, written = ours.stdout.read().splitlines()
    sentence = "python_coder is NOT confined on this machine: its code may read your files"
    assert answers == ["False", sentence, "4", "Error: stopped after 1 seconds"]
    assert re.match("Error: (OSError: .* File too large|PermissionError)", written)


@confined
@pytest.mark.parametrize("refused", [(PRCTL, 22), (PRCTL, 4), (PRCTL, 1)])
def test_no_code_runs_if_the_kernel_refuses_a_protection_that_it_has(refused):
    script = REFUSE.format([refused]) + "print(*protection(), python_coder('print(7 * 191)'))"
    with in_another_process(script, stderr=subprocess.DEVNULL) as ours:
        answer = ours.stdout.read()
    assert (
        answer.startswith("False python_coder does not run here. Error: ") and "1337" not in answer
    )


# ------------------------------------------------------------ workers
def test_a_worker_that_has_ended_is_an_error_and_the_next_call_gets_a_new_one():
    first = worker()
    first.kill()
    first.wait()
    assert python_coder("1") == "Error: Python was ended from outside or did not start."
    assert worker().pid != first.pid


@pytest.mark.parametrize("script", ["solve.py", "train.py"])
def test_a_worker_that_has_ended_does_not_end_the_command(script):
    """pytest ignores SIGPIPE in its own process."""
    code = f"""
import runpy, sys
from record import flags
from world import sandbox

def use(*given):
    sandbox.python_coder("1")
    worker = sandbox.SLOTS.get()
    worker.kill()
    worker.wait()
    sandbox.SLOTS.put(worker)
    print(sandbox.python_coder("1"))
    raise SystemExit(0)

flags.fill_in, sys.argv = use, [{script!r}]
runpy.run_path({script!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    found = done.returncode, done.stdout, done.stderr
    assert found == (0, "Error: Python was ended from outside or did not start.\n", "")


def test_a_python_that_does_not_start_is_an_error(limits, monkeypatch):
    limits()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert python_coder("1") == "Error: Python was ended from outside or did not start."


def test_after_ctrl_c_the_next_call_gets_its_own_answer():
    script = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & has it ignored
threading.Timer(1, os.killpg, [0, signal.SIGINT]).start()
try: python_coder("import time; time.sleep(2); print('late')")
except KeyboardInterrupt: print("interrupted", python_coder("1"), flush=True)"""
    with in_another_process(script, start_new_session=True) as ours:
        assert ours.stdout.read() == "interrupted 1\n"


def test_a_fork_of_our_process_gets_its_own_workers():
    first = worker().pid
    child = os.fork()
    if child == 0:
        signal.alarm(LATE)
        os._exit(worker().pid == first)
    assert os.waitpid(child, 0)[1] == 0 and worker().pid == first


def descendants(pid):
    found = [pid]
    for parent in found:  # the list grows in the loop
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{thread}/children").read_text()
                found += map(int, children.split())
    return found[1:]


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for them in /proc")
@pytest.mark.parametrize("killed", ["our process", "the worker"])
def test_the_code_ends_with_our_process_and_with_the_worker(killed):
    script = "python_coder('import os; os.closerange(0, 64)\\nwhile True: pass')"
    with in_another_process(script, stderr=subprocess.DEVNULL) as ours:
        assert soon(lambda: len(descendants(ours.pid)) == 2)
        processes = descendants(ours.pid)
        os.kill(ours.pid if killed == "our process" else processes[0], signal.SIGKILL)
        assert soon(lambda: all(map(ended, processes)))
