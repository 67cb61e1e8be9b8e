"""The sandbox: python_coder, which runs the code that a model wrote.

    python_coder("print(2 + 2)")            # "4"
    python_coder("while True: pass")        # "Error: stopped after 10 seconds"

Such code is hostile, if only by accident. It never runs in our process: a new Python runs it, without our
environment, in a folder of its own, under limits that a second new process, the supervisor, enforces; and
everything that it has started is gone when the answer comes. Three files, from the outside to the inside:
sandbox.py starts the supervisor and reads its verdict; supervisor.py confines, runs and stops the code;
confinement.py lists the system calls that the code may not use. The docstring of python_coder says what is
covered and what is not; tests/test_sandbox.py has a test for each promise.
"""
import functools
import marshal
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from world import confinement

OUTPUT_CAP = 65536       # bytes the code may print before it is stopped
NAMESPACES = True        # False: python_coder does without Linux namespaces (the tests try both ways)
GRACE = 5                # seconds after the time limit; a supervisor that has not answered by then is killed
SUPERVISOR = Path(__file__).with_name("supervisor.py").read_text(encoding="utf-8")


@functools.cache
def compiled(program):
    return marshal.dumps(compile(program, "<supervisor>", "exec"))  # once: it takes milliseconds


def remove(folder):
    """Removes a folder, however deep and whatever its rights, and follows no link. (shutil gives up.)"""
    try:
        os.rmdir(folder)  # with namespaces, nothing has ever been written here
    except OSError:
        steps = r'find "$0" -type d ! -perm -700 -exec chmod 700 {} \; ; rm -rf "$0"'
        subprocess.run(["sh", "-c", steps, folder], stderr=subprocess.DEVNULL)


def kill(supervisor, seconds=20):
    """Kills a supervisor that does not answer, and the code, and waits until all are gone."""
    # with namespaces all end with it; without them the code has a process group of its own
    groups = [supervisor.pid]
    try:
        groups += map(int, Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split())
    except OSError:
        pass
    end = time.monotonic() + seconds
    while groups and time.monotonic() < end:
        groups = [group for group in groups if kill_group(group)]
        supervisor.poll()
        time.sleep(0.01)
    supervisor.wait()


def kill_group(group):
    """False where nobody is left in this process group."""
    try:
        os.killpg(group, signal.SIGKILL)
        return True
    except (ProcessLookupError, PermissionError):
        return False


def python_coder(code: str, seconds: float = 10, memory_mb: int = 512) -> str:
    """What the code prints, and the value of a last bare expression; or "Error: ..." and the prints.

    A new Python runs the code once, in one scope, with the packages of this one, in a folder of its own.
    Covered: time on the clock, and of the CPU; memory of each process; size of a file; 128 open files;
      processes (1000 in all, threads too; without namespaces 64 at a time); endless output; the answer's
      length; our environment is not passed on; stdin is empty; the folder is empty before, holds 64 MB, and
      is gone afterwards, whatever is in it; nothing goes on afterwards: threads, children, and grandchildren
      that left the session or lost their parent; what we say of a program (stopped, killed) stands first, and
      it cannot unsay it.
    Covered on Linux by namespaces (5.12, not in Docker's default), and again by Landlock (5.13) with seccomp
      (x86_64 and aarch64), which need no privilege; either is enough:
      no network; no file, device or setting outside the folder can be changed, even by root, which has no
      capability; other processes, ours and the supervisor above all, cannot be killed, stopped, traced or
      slowed down, nor their memory or environment read; no limit can be raised.
    Covered by seccomp alone: sockets that are files (Docker's), the kernel's keys.
    Covered by namespaces alone: the command lines of others.
    Without namespaces a program has no locks of multiprocessing, changes rights, owners and times of no file
      (it is not an error), and before Landlock 6 (Linux 6.12) can signal itself, but not its children.
    Not covered: files that we can read (keys, too), and locks on them; the sum of the memory of many
      processes, and memory that no process owns (memfd, pipes); a program that lies in its own prints and
      exceptions; bugs of the kernel.
      Without namespaces: the disk that deleted files take until they are closed.
      Without namespaces and Landlock (Docker on Linux before 5.13): changes of our files, our memory and
      environment.
      With none of the three (macOS): code that means harm has all our rights. Off Linux, a process that
      leaves the group is not found, and macOS ignores some limits. Windows is not supported.
    """
    source, program = code.encode("utf-8", "replace"), compiled(SUPERVISOR)
    settings = (len(program), seconds, len(source), memory_mb, OUTPUT_CAP, int(NAMESPACES),
                confinement.LANDLOCK, *confinement.filters())
    start = "import marshal, sys; exec(marshal.loads(sys.stdin.buffer.read(int(sys.argv[1]))))"
    # Not -I: it ignores PYTHONHASHSEED, without which a printed set differs from run to run. numpy's threads
    # take memory.
    command = [sys.executable, "-c", start, *map(str, settings)]
    env = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    file, late = tempfile.TemporaryFile, False
    new_folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with new_folder as folder, file() as output, file() as verdict:
        # No preexec_fn, which is not safe in threads: the supervisor sets the limits itself, before it runs
        # the code.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=verdict,
                                   cwd=folder, env=env, start_new_session=True)
        try:
            with process.stdin as pipe:
                pipe.write(program + source)
                pipe.flush()
                hung_up = select.poll()
                hung_up.register(pipe, 0)
                # the supervisor keeps the time, if the machine lets it
                hung_up.poll(1000 * (seconds + GRACE))
        except BrokenPipeError:
            pass  # it is dead: its return code tells
        try:
            process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            late = True
            kill(process)
        printed, problem = (os.pread(f.fileno(), OUTPUT_CAP + 1, 0) for f in (output, verdict))
        remove(folder)
    endless = len(printed) > OUTPUT_CAP
    printed, problem = (text.decode("utf-8", "replace").rstrip("\n") for text in (printed, problem))
    is_verdict = problem.startswith("Error:")
    if endless:
        problem = f"Error: stopped after printing {OUTPUT_CAP} characters"
    elif late:
        problem = problem if is_verdict else f"Error: stopped after {seconds:g} seconds"
    elif process.returncode or (problem and not is_verdict):
        last_line = "".join(problem.splitlines()[-1:])
        problem = f"Error: Python was ended from outside or did not start. {last_line}".strip()
    if problem:
        return f"{problem}\nPrinted before: {printed}" if printed else problem
    return printed or "Nothing was printed. Use print() to show a result."


PROBE = """import os, socket
def refused(act, *args):
    try: act(*args)
    except OSError: return 1
    return 0
files, sockets = refused(os.open, "/proc/self/comm", os.O_WRONLY), refused(socket.socket)
print(int(os.getppid() == 1), files, sockets, refused(os.kill, os.getppid(), 0))"""


@functools.cache
def protection() -> str:
    """One sentence for the first lines of a run: what confines the code on this machine, found by trying."""
    answer = python_coder(PROBE)
    if not answer.replace(" ", "").isdigit():
        return f"python_coder does not run here. {answer}"
    isolated, files, sockets, signals = map(int, answer.split())
    version = confinement.LANDLOCK
    layers = [name for name, holds in (("namespaces", isolated), (f"Landlock {version}", version and files),
                                       ("seccomp", sockets)) if holds]
    dangers = ["read your files"] + [danger for danger, refused in (
        ("change them", files and sockets), ("use the network", sockets), ("signal your processes", signals))
        if not (refused or isolated)]
    return (f"python_coder is confined by {', '.join(layers) or 'limits of time and memory alone'}; "
            f"its code can still {', '.join(dangers)}")
