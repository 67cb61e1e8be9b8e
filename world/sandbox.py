"""The sandbox: python_coder, which runs the code that a model wrote.

    python_coder("print(2 + 2)")            # "4"
    python_coder("while True: pass")        # "Error: stopped after 10 seconds"

Such code may be hostile, if only by accident. It never runs in our process. The first call starts the fork
server (forkserver.py), a Python without our environment, which forks a supervisor (supervisor.py) in a new
folder for each call. The supervisor forks a process for the code, confines it, and stops it at a limit; what
the code has started is gone before the answer returns.
confinement.py lists the system calls that the code may not use. The docstring of python_coder says what is
covered and what is not; tests/test_sandbox.py has a test for each promise.
"""
import atexit
import contextlib
import fcntl
import functools
import marshal
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from world import confinement

OUTPUT_CAP = 65536       # bytes the code may print before it is stopped
NAMESPACES = True        # False: use no Linux namespaces (the tests run both ways)
ISOLATED = False         # True once a call has ended well in namespaces: this system has them
GRACE = 5                # seconds beyond the time limit, after which a silent supervisor is killed
REPOSITORY = Path(__file__).resolve().parents[1]  # the code does not read it
SUPERVISOR = Path(__file__).with_name("supervisor.py").read_text(encoding="utf-8")
FORKSERVER = Path(__file__).with_name("forkserver.py").read_text(encoding="utf-8")
LOCK, SERVER = threading.Lock(), None  # the fork server: its process, and our socket to it


@functools.cache
def compiled(program):
    return marshal.dumps(compile(program, "<supervisor>", "exec"))  # takes milliseconds, so only once


def remove(folder):
    """Remove a folder of any depth and rights, without following links. (shutil fails at some of these.)"""
    try:
        os.rmdir(folder)  # enough with namespaces, where the code wrote to a disk in memory
    except OSError:
        steps = r'find "$0" -type d ! -perm -700 -exec chmod 700 {} \; ; rm -rf "$0"'
        subprocess.run(["sh", "-c", steps, folder], stderr=subprocess.DEVNULL)


@atexit.register
def end_server():
    """End the fork server. Calls that have begun do not need it."""
    global SERVER
    if SERVER:
        (process, line), SERVER = SERVER, None
        process.kill(), process.wait(), line.close()


def forget_server():
    """Called in a fork of our process, whose calls then start a fork server of their own."""
    global LOCK, SERVER
    if SERVER:
        SERVER[1].close()
    LOCK, SERVER = threading.Lock(), None


os.register_at_fork(after_in_child=forget_server)


def start_server(folder, errors):
    """A new fork server: its process, and our socket to it. If Python does not start, errors says why."""
    line, other_end = socket.socketpair()
    env = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # numpy's threads take memory
    # not -I: it ignores PYTHONHASHSEED, and then a printed set differs from run to run
    command = [sys.executable, "-c", FORKSERVER, str(REPOSITORY), os.path.expanduser("~")]
    with other_end:  # a session of its own: Ctrl-C in our terminal does not end it
        return subprocess.Popen(command, stdin=other_end, stdout=subprocess.DEVNULL, stderr=errors,
                                cwd=folder, env=env, start_new_session=True), line


def begin(size, files, folder):
    """Tell the fork server to fork a supervisor whose stdin, stdout and stderr are these files.

    size: how many bytes the supervisor reads first. Returns the fork server's process.
    """
    global SERVER
    with LOCK:
        for _ in range(2):
            SERVER = SERVER or start_server(folder, files[2])
            with contextlib.suppress(ConnectionError):
                socket.send_fds(SERVER[1], [size.to_bytes(8, "little")], files)
                break
            end_server()  # it ended by itself: the next is new
        return SERVER and SERVER[0]


def supervise(request, source, output, errors, folder, seconds):
    """Send a supervisor its work, and wait until it has ended.

    It sends its process id first. Returns what it sent after that (its verdict, if any, and "!": all went
    well; or "refused": no namespaces here), and whether it exceeded its time.
    """
    for _ in range(2):  # again, if the fork server ended before it forked, or did not answer
        line, other_end = socket.socketpair()
        supervisor, answer = b"", b""
        with line:
            with other_end:
                server = begin(len(request), [f.fileno() for f in (other_end, output, errors)], folder)
            line.settimeout(seconds + GRACE)  # the supervisor keeps the time limit
            try:
                with contextlib.suppress(ConnectionError):  # it has ended
                    line.sendall(request + source)
                with contextlib.suppress(ConnectionError):
                    supervisor = line.recv(8)
                    while part := line.recv(8192):
                        answer += part
            except TimeoutError:
                if supervisor:
                    kill(int.from_bytes(supervisor, "little"))
                    return answer, True
                server.kill(), server.wait()  # the code has not started
        if supervisor:
            break
    return answer, False


def kill(supervisor, seconds=20):
    """Kill a supervisor that does not answer, and the code, and wait until all their processes are gone."""
    # with namespaces all end with the supervisor; without them the code has its own process group
    groups = [supervisor]
    with contextlib.suppress(OSError):
        groups += map(int, Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split())
    end = time.monotonic() + seconds
    while (groups := [group for group in groups if kill_group(group)]) and time.monotonic() < end:
        time.sleep(0.01)


def kill_group(group):
    """Kill a process group. Returns True if it still had a process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.killpg(group, signal.SIGKILL) is None


def python_coder(code: str, seconds: float = 10, memory_mb: int = 512) -> str:
    """What the code prints, and the value of a last bare expression; or "Error: ..." and what was printed.

    A new process with the same packages runs the code once, in one scope, in a new folder. Its user, priority
    and limits are those that our process had at the first call.
    Covered: time on the clock, and of the CPU; memory of each process; size of a file; 128 open files;
      processes (1000 in all, threads too; without namespaces 64 at a time); endless output; the answer's
      length; our environment is not passed on; stdin is empty; the folder is empty before, holds 64 MB, and
      is gone afterwards, whatever is in it; nothing goes on afterwards: threads, children, and grandchildren
      that left the session or lost their parent; the verdict on a program (stopped, killed) comes first in
      the answer, and the program cannot change it.
    Covered on Linux by namespaces (5.12, not in Docker's default), and again by Landlock (5.13) with seccomp
      (x86_64 and aarch64), which need no privilege. Either is enough:
      it reads Python and its packages, the system's programs, shared libraries, locales and time zones
      (forkserver.py lists them), its own folder, /dev/null, zero, full, random and urandom, and nothing else:
      no home, no /etc, no /proc (except cpuinfo), no terminal, not this repository, wherever it is;
      no network; no file, device or setting outside the folder can be changed, not even by root, which loses
      its capabilities; other processes, ours and the supervisor included, cannot be killed, stopped, traced
      or slowed down, nor their memory or environment read; no limit can be raised, nor another's lowered.
    Covered by seccomp alone: sockets that are files (Docker's), the kernel's keys; disk space that a file
      takes beyond its end, though the supervisor stops a program whose output does so.
    Covered by namespaces alone: whether a file exists outside, how large it is, when it was changed and
      where a link leads, if the program guesses its path.
    What a program cannot do without namespaces: use locks of multiprocessing; change the rights, owner and
      times of a file (it gets no error); signal its children, before Landlock 6 (Linux 6.12).
    Not covered: the memory of many processes together (though Linux, when it has none left, ends them
      first), and memory that no process owns (memfd, pipes); lies in its own prints and exceptions; secrets
      among Python's packages; bugs of the kernel.
      Without namespaces: the disk space of deleted files that are still open.
      Without namespaces and Landlock (Docker on Linux before 5.13): it reads and changes all our files, and
      reads our memory and environment, unless we are root.
      With none of the three (macOS): hostile code has all our rights. Outside Linux, a process that leaves
      the process group is not found, and macOS ignores some limits. Windows is not supported.
      protection() says which of these it is, and cli/command_line.py refuses to run this tool together with
      web_search, which could carry away what the code reads, unless --allow-unconfined is given.
    """
    global ISOLATED
    source = code.encode("utf-8", "replace")
    file = tempfile.TemporaryFile
    new_folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with new_folder as folder, file() as output, file() as errors:
        for namespaces in int(NAMESPACES), 0:
            settings = seconds, len(source), memory_mb, OUTPUT_CAP, namespaces, confinement.LANDLOCK
            arguments = ["", *map(str, settings), *confinement.filters()]
            request = marshal.dumps((os.fsencode(folder), arguments, compiled(SUPERVISOR)))
            answer, late = supervise(request, source, output, errors, folder, seconds)
            ISOLATED = ISOLATED or bool(namespaces and answer.endswith(b"!"))
            if answer != b"refused" or ISOLATED and not (confinement.LANDLOCK and confinement.filters()[0]):
                break  # else the system refuses namespaces: once more without them. But where they are the
                #        only protection, no code runs unprotected because one call did not get them
        fcntl.fcntl(output, fcntl.F_SETFL, 0)  # the code may have set O_DIRECT, which refuses to be read so
        written = [os.pread(f.fileno(), OUTPUT_CAP, 0) for f in (output, errors)]
        remove(folder)
    texts = (answer.removesuffix(b"!"), *written)
    verdict, printed, traceback = (text.decode("utf-8", "replace").rstrip("\n") for text in texts)
    if late:
        verdict = verdict or f"Error: stopped after {seconds:g} seconds"
    elif not answer.endswith(b"!"):
        last_line = "".join(traceback.splitlines()[-1:])
        verdict = f"Error: Python was ended from outside or did not start. {last_line}".strip()
    if verdict:
        return f"{verdict}\nPrinted before: {printed}" if printed else verdict
    return printed or "Nothing was printed. Use print() to show a result."


PROBE = """import os, socket
def refused(act, *args):
    try: act(*args)
    except OSError: return 1
    return 0
print(int(os.getppid() == 1), refused(os.open, OURS, os.O_RDONLY), refused(os.open, OURS, os.O_WRONLY),
      refused(socket.socket), refused(os.kill, os.getppid(), 0))"""


@functools.cache
def protection() -> str:
    """What confines the code on this machine, as one sentence. Found by trying it out, on this file."""
    answer = python_coder(PROBE.replace("OURS", repr(__file__)))
    if not answer.replace(" ", "").isdigit():
        return f"python_coder does not run here. {answer}"
    isolated, reading, writing, sockets, signals = map(int, answer.split())
    version = confinement.LANDLOCK
    holds = {"namespaces": isolated, f"Landlock {version}": version and reading, "seccomp": sockets}
    layers = ", ".join(name for name in holds if holds[name]) or "limits of time and memory alone"
    refused = {"read your files": reading, "change them": isolated or writing and sockets,
               "use the network": isolated or sockets, "signal your processes": isolated or signals}
    if dangers := ", ".join(act for act in refused if not refused[act]):
        return f"python_coder is NOT confined on this machine (it has {layers}): its code can {dangers}"
    return f"python_coder is confined by {layers}: its code reads Python and its packages, no file of yours"
