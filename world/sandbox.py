"""The sandbox: python_coder, which runs the code that a model wrote.

    python_coder("print(2 + 2)")            # "4"
    python_coder("while True: pass")        # "Error: stopped after 10 seconds"

Such code may be hostile, if only by accident, so it never runs in our process:

    our process -> a worker for each core -> a child for each program

A worker is this file, run as a script, with none of our environment and files. It forks a child
for each program: that takes 3 ms of CPU, where a new Python takes 15. A calculator needs little, so
both give up the rest, for good, which takes no privilege:

    worker   opens nothing but Python and its packages, to read (Landlock); root loses its power
    child    makes only the system calls listed below (seccomp): it starts no process, writes no
             file, opens no socket

The worker reads what the child prints, and kills it at a limit. As a program is one process,
nothing outlives it.
"""

import ast
import atexit
import contextlib
import ctypes
import functools
import json
import os
import queue
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback

SECONDS = 10  # of the CPU
WALL_SECONDS = 60  # on the clock
MEMORY_MB = 512
OUTPUT_CAP = 65536  # bytes


# -------------------------------------------------------------------------------- our process
def new_slots():
    """One worker a core that we may use, None until it has started. No more programs than these run
    at once."""
    slots = queue.LifoQueue()
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    for _ in range(len(affinity(0)) if affinity else os.cpu_count() or 1):
        slots.put(None)
    return slots


SLOTS = new_slots()
os.register_at_fork(after_in_child=lambda: globals().update(SLOTS=new_slots()))


def start_worker():
    command = [sys.executable, "-P", __file__, *map(str, (SECONDS, WALL_SECONDS, MEMORY_MB))]
    # A set is printed in the same order every time. numpy starts no threads: they take memory.
    env = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    env["OPENBLAS_NUM_THREADS"] = "1"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "ascii"}
    # In a session of its own, so that Ctrl-C in our terminal does not end it.
    return subprocess.Popen(command, **pipes, env=env, cwd="/", start_new_session=True)


def end(worker):
    with contextlib.suppress(OSError), worker:  # this closes its pipes, and waits for it
        worker.kill()


@atexit.register
def end_idle_workers():
    for worker in [SLOTS.get() for _ in range(SLOTS.qsize())]:
        if worker:
            end(worker)
        SLOTS.put(None)


def python_coder(code: str) -> str:
    """What the code prints, and the value of a last bare expression.

    If something goes wrong, it is "Error: " and the reason, and then what was printed before.
    Covered:
      10 seconds of the CPU (all threads together), 60 on the clock, 512 MB (not on macOS), 64 open
        files, 64 KB of output. No more programs run at once than there are cores;
      it runs once, in one scope, in a new process, without our environment; stdin is empty;
      no object or frame that it can reach holds anything of the programs before it;
      that it was stopped or killed comes first in the answer, and the code cannot hide it;
      it ends with our process, however that ends.
    Covered on Linux with Landlock (5.13) and seccomp (x86_64 and aarch64), even if we are root:
      it reads Python and its packages, shared libraries and time zones, and nothing else: no home,
        no /etc, no /proc, no device, not this repository;
      it writes, makes, removes and renames no file, and changes no rights, owner or time of one;
      it starts no process and no other program; it may start threads;
      it opens no socket of any kind;
      it cannot signal, trace, slow down or limit another process, nor raise its own limits;
      it gets no memory that is not counted, or that outlives it.
    Not covered:
      whether a file exists outside, its size and dates, and where a link leads;
      lies in what it prints and raises; secrets among Python's packages; bugs of the kernel;
      what machine code (ctypes) finds of earlier programs in memory that was freed;
      machine code that starts threads without memory of their own: up to the system's limit;
      on other systems, anything that our user may do. protection() says which system this is.
    """
    slots, answer = SLOTS, ""
    worker = slots.get()
    try:
        worker = worker or start_worker()
        print(json.dumps(code), file=worker.stdin, flush=True)
        answer = worker.stdout.readline()
    except OSError:
        pass  # the worker has ended, or does not start
    finally:
        if worker and not answer:  # after Ctrl-C, the next call must not get this one's answer
            end(worker)
            worker = None
        slots.put(worker)
    return json.loads(answer or '"Error: Python was ended from outside or did not start."')


@functools.cache
def protection() -> tuple[bool, str]:
    """(Is the code confined on this machine? A sentence that says so.) Tried out, once."""
    probe = f"""import os, socket
def refused(act, *args):
    try: act(*args)
    except PermissionError: return 1
    return 0
print(refused(os.listdir, {os.path.dirname(__file__)!r}) + refused(socket.socket))"""
    answer = python_coder(probe)
    if answer == "2":
        return True, "python_coder is confined: its code reads Python and its packages alone"
    if answer in ("0", "1"):
        return False, "python_coder is NOT confined on this machine: its code may read your files"
    return False, f"python_coder does not run here. {answer}"


# -------------------------------------------------------------------------------- the worker
def work(seconds, wall_seconds, memory_mb):
    """Run one program after another, until our process closes stdin, if only because it ends."""
    null, worker, program = os.open(os.devnull, os.O_RDONLY), os.getpid(), seccomp_program()
    give_up_files()
    while line := sys.stdin.readline():
        source = json.loads(line).encode("utf-8", "replace")
        (out, out_end), (errors, errors_end) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:  # its stdin, stdout, stderr, and 3, to which it writes its exception
            for number, file in enumerate((null, out_end, out_end, errors_end)):
                os.dup2(file, number)
            os.closerange(4, 64)
            limit(seconds, memory_mb, program)
            give_up_calls(worker, program)
            run_and_exit(source, errors=3)
        os.close(out_end)
        os.close(errors_end)
        printed, failure = watch(child, out, errors, seconds, wall_seconds)
        os.close(out)
        os.close(errors)
        if failure:
            printed = f"Error: {failure}" + (f"\nPrinted before: {printed}" if printed else "")
        printed = printed or "Nothing was printed. Use print() to show a result."
        print(json.dumps(printed), flush=True)
        del printed, failure  # the next program can read this frame


def watch(child, out, errors, seconds, wall_seconds):
    """Read what the child prints until it ends, or kill it: (printed, what went wrong or "")."""
    os.set_blocking(out, False)
    os.set_blocking(errors, False)
    printed, failure, waiting, ended = b"", "", [out, 0], False
    deadline = time.monotonic() + wall_seconds
    while not ended:
        if 0 in select.select(waiting, [], [], 0.05 if out in waiting else 0.001)[0]:
            os.kill(child, signal.SIGKILL)
            raise SystemExit  # our process has ended
        ended, status, used = os.wait4(child, os.WNOHANG)
        with contextlib.suppress(BlockingIOError):  # there is no more yet
            while part := os.read(out, OUTPUT_CAP + 1 - len(printed)):
                printed += part
            waiting = [0]  # there will be no more
        if len(printed) > OUTPUT_CAP:
            failure = f"stopped after printing {OUTPUT_CAP} characters"
        elif time.monotonic() > deadline and not ended:
            failure = f"stopped after {wall_seconds} seconds"
        if failure and not ended:
            os.kill(child, signal.SIGKILL)
    failure = failure or how_it_ended(os.waitstatus_to_exitcode(status), used, seconds)
    with contextlib.suppress(BlockingIOError):
        failure = failure or os.read(errors, 8192).decode("utf-8", "replace")  # its exception
    return printed[:OUTPUT_CAP].decode("utf-8", "replace").rstrip("\n"), failure


def how_it_ended(status, used, seconds):
    """Why the child ended early, or ""."""
    # RLIMIT_CPU goes by the clock's ticks, and differs a little from the time that was used. (macOS
    # sends SIGXCPU.)
    if -status in (signal.SIGKILL, signal.SIGXCPU) and used.ru_utime + used.ru_stime > seconds / 2:
        return f"stopped after {seconds} seconds"
    if status < 0:
        return f"killed by signal {-status}"
    return f"the code ended with exit status {status}" if status else ""


# -------------------------------------------------------------------------------- confinement
LIBC = ctypes.CDLL(None)
NUMBERS = ctypes.c_uint64 * 2


def call(name, *args):
    """Call a function of libc. OSError if the kernel refuses it: no code runs half confined."""
    if (result := getattr(LIBC, name)(*args)) < 0:
        raise OSError(f"the kernel refuses {name}{args}")
    return result


def give_up_files():
    """From here on, this process opens only files of Python, to read them, and is root no more."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine's memory runs out, Linux ends this process first
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    call("prctl", 4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no child opens its pipes, and it leaves no core
    call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    if LIBC.syscall(444, None, 0, 1) < 1:
        return  # there is no Landlock (Linux 5.13)
    read_file, read_folder, all_rights = 4, 8, (1 << 13) - 1
    rules = call("syscall", 444, NUMBERS(all_rights), 8, 0)
    paths = [f"{top}/{lib}" for top in ("", "/usr", sys.base_prefix) for lib in ("lib", "lib64")]
    paths += ["/nix/store", "/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache", *sys.path]
    for path in filter(os.path.exists, paths):
        place = os.open(path, os.O_PATH)
        rights = read_file | read_folder * os.path.isdir(path)
        call("syscall", 445, rules, 1, NUMBERS(rights, place), 0)
        os.close(place)
    call("syscall", 446, rules, 0)
    os.close(rules)


def limit(seconds, memory_mb, program):
    """Limits for the code and all its threads together, on every system (macOS: not of memory)."""
    limits = {"CPU": seconds, "AS": memory_mb << 20, "FSIZE": 0, "NOFILE": 64, "CORE": 0}
    if not program:
        limits["NPROC"] = 0  # not confined: it at least starts no process, unless it is root
    for name, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # macOS has none, or it is lower already
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def give_up_calls(worker, program):
    """From here on, this process makes only the system calls that are ALLOWED."""
    if sys.platform == "linux":
        call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with the worker
        if os.getppid() != worker:
            raise SystemExit("the worker has ended")
    if program:
        steps = ctypes.create_string_buffer(program)
        call("prctl", 22, 2, NUMBERS(len(program) // 8, ctypes.addressof(steps)))  # PR_SET_SECCOMP


# The system calls of a calculator, with their numbers on x86_64 and aarch64 (999: there is none).
CALLS = """read 0 63, write 1 64, close 3 57, stat 4 999, fstat 5 80, lstat 6 999, poll 7 999,
lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67, readv 19 65, writev 20 66, access 21 999,
select 23 999, sched_yield 24 124, mremap 25 216, madvise 28 233, dup 32 23, dup2 33 999,
nanosleep 35 101, alarm 37 999, setitimer 38 103, getpid 39 172, exit 60 93, uname 63 160,
getcwd 79 17, readlink 89 999, gettimeofday 96 169, getrusage 98 165, sysinfo 99 179, times 100 153,
getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173,
rt_sigtimedwait 128 137, sigaltstack 131 132, gettid 186 178, time 201 999, futex 202 98,
sched_getaffinity 204 123, getdents64 217 61, restart_syscall 219 128, clock_gettime 228 113,
clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94, newfstatat 262 79,
readlinkat 267 78, faccessat 269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99,
dup3 292 24, pipe2 293 59, getcpu 309 168, getrandom 318 278, statx 332 291, rseq 334 293"""

# (calls, number of an argument, mask, values): allowed if the argument & mask is one of the values.
ALLOWED = [
    (CALLS, 0, 0, [0]),
    ("open 2 999", 1, 0o1103, [0]),  # without O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
    ("openat 257 56", 2, 0o1103, [0]),
    ("clone 56 220", 0, 0x7E030000, [0x10000]),  # with CLONE_THREAD, without new namespaces
    ("fcntl 72 25", 1, 0xFFFFFFFF, [0, 1, 2, 3, 4, 1030]),  # not F_SETOWN: it signals any process
    ("prlimit64 302 261", 0, 0xFFFFFFFF, [0]),  # its own limits, which it cannot raise
]


def seccomp_program():
    """What the kernel runs at each system call of a child, to allow or to refuse it.

    b"" without seccomp, or on a processor whose numbers are not listed."""
    machines = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
    column, arch = machines.get(os.uname().machine, (0, 0))
    if sys.platform != "linux" or LIBC.prctl(21, 0, 0, 0, 0) < 0 or not column:  # PR_GET_SECCOMP
        return b""
    load, mask_with, equal, at_least, answer = 0x20, 0x54, 0x15, 0x35, 0x06
    allow, eperm, enotty, enosys = 0x7FFF0000, 0x50001, 0x50019, 0x50026
    # Each step is (what to do, how many steps to skip if so, how many if not, number).
    # Calls in 32 bits are refused. Those newer than 2018 do not exist: so glibc starts a thread by
    # clone, whose flags can be seen here, not by clone3. No file is a terminal (ioctl).
    steps = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, eperm), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 424), (answer, 0, 0, enosys)]
    steps += [(equal, 0, 1, [16, 29][column - 1]), (answer, 0, 0, enotty)]
    for calls, argument, mask, values in ALLOWED:
        for name_and_numbers in calls.split(","):
            number = int(name_and_numbers.split()[column])
            steps += [(equal, 0, len(values) + 4, number)]
            steps += [(load, 0, 0, 16 + 8 * argument), (mask_with, 0, 0, mask)]
            steps += [(equal, len(values) - i, 0, value) for i, value in enumerate(values)]
            steps += [(answer, 0, 0, eperm), (answer, 0, 0, allow)]
    steps += [(answer, 0, 0, eperm)]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


# -------------------------------------------------------------------------------- the child
def run_and_exit(source, errors):
    """Run the code once, in one scope, and show a last bare expression as a REPL shows it."""
    main = sys.modules["__main__"] = type(sys)("__main__")
    sys.argv = [""]
    sys.stdout.reconfigure(line_buffering=True)  # keeps what was printed before a kill
    reserve, status = bytes(1 << 20), 1
    try:
        try:
            tree = ast.parse(source, "<code>")
            last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
            exec(compile(tree, "<code>", "exec"), main.__dict__)
            exec(compile(ast.Interactive(last), "<code>", "single"), main.__dict__)
        except BaseException as error:
            del reserve  # memory for the message that memory is full
            os.write(errors, explain(error).encode("utf-8", "replace")[:8192])
        status = 0
        # End as Python ends, without clearing its modules, which takes longer than most programs.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.__stdout__.flush()
        sys.stdout.flush()
    finally:
        os._exit(status)


def explain(error):
    """NameError: name 'x' is not defined (line 1)"""
    try:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return ""
        name, text, line = type(error).__name__, str(error), None
        for frame, number in traceback.walk_tb(error.__traceback__):
            line = number if frame.f_code.co_filename == "<code>" else line
        if isinstance(error, SyntaxError) and error.filename == "<code>":
            text, line = error.msg, error.lineno
        return name + (f": {text}" if text else "") + (f" (line {line})" if line else "")
    except BaseException:  # the code wrote its class: str(error) can do anything
        return "an exception that cannot be shown"


if __name__ == "__main__":
    work(*map(int, sys.argv[1:]))
