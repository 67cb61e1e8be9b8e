"""The sandbox: python_coder, which runs the code that a model wrote.

    python_coder("print(2 + 2)")            # "4"
    python_coder("while True: pass")        # "Error: stopped after 10 seconds"

Model code is hostile code, if only by accident. It is never run in our process: a new Python runs it, without our environment, in
a folder of its own, under limits that a second new process keeps, and everything it has started is gone when the answer comes.
What is covered, and what is not, stands in the docstring of python_coder; tests/test_sandbox.py has a test for each promise.
"""
import ctypes
import functools
import marshal
import os
import platform
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time

OUTPUT_CAP = 65536       # bytes the code may print before it is stopped
NAMESPACES = True        # False: python_coder does without Linux namespaces (the tests try both ways)
# The version of Landlock's rules that this kernel knows; 0: it has no Landlock.
LANDLOCK = max(0, ctypes.CDLL(None).syscall(444, None, 0, 1)) if sys.platform == "linux" else 0

# Landlock keeps the code from files, signals and others' memory; seccomp from what Landlock does not know.
# A rule of seccomp: the system calls, as "name x86_64 aarch64" (-1: has no such call), do nothing and return
# the error, unless argument & mask is one of the values. OWN stands for the process id of the code.
EPERM, ENOSYS, ALL_BITS, OWN = 1, 38, 0xFFFFFFFF, 0xDEADBEEF
ALWAYS = (
    # all sockets; other processes; namespaces; shared memory, queues, keys, which outlive us; attack surface
    ("socket 41 198, connect 42 203, bind 49 200, ptrace 101 117, process_vm_readv 310 270, "
     "process_vm_writev 311 271, unshare 272 97, setns 308 268, shmget 29 194, shmat 30 196, shmctl 31 195, "
     "semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192, msgget 68 186, msgsnd 69 189, "
     "msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181, add_key 248 217, "
     "request_key 249 218, keyctl 250 219, bpf 321 280, perf_event_open 298 241, "
     "userfaultfd 323 282", 0, 0, (), EPERM),
    ("clone 56 220", 0, 0x7E020000, (0,), EPERM),     # no flag of a new namespace
    ("socketpair 53 199", 0, ALL_BITS, (1,), EPERM),  # AF_UNIX
    ("socketpair 53 199", 1, 15, (1,), EPERM),        # SOCK_STREAM: a datagram can be sent to any address
    # isatty and flags, no more; all of fcntl but F_SETOWN, which sends any signal to anybody, and F_SETLEASE
    ("ioctl 16 29", 1, ALL_BITS, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451), EPERM),
    ("fcntl 72 25", 1, ALL_BITS, (*range(8), *range(36, 39), *range(1030, 1035)), EPERM))
WITHOUT_NAMESPACES = (
    # Nobody leaves the process group, so one kill reaches all: sessions that fork outran every list of them.
    # And Landlock does not know what changes a file without writing to it. Both return 0, as if it was done.
    ("setsid 112 157, setpgid 109 154, chmod 90 -1, fchmod 91 52, fchmodat 268 53, chown 92 -1, "
     "fchown 93 55, lchown 94 -1, fchownat 260 54, utime 132 -1, utimes 235 -1, futimesat 261 -1, "
     "utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, "
     "lremovexattr 198 15, fremovexattr 199 16", 0, 0, (), 0),
    ("prlimit64 302 261, sched_setparam 142 118, sched_setscheduler 144 119, sched_setaffinity 203 122, "
     "sched_setattr 314 274", 0, ALL_BITS, (0, OWN), EPERM),
    ("setpriority 141 140, ioprio_set 251 30", 0, 0, (), EPERM))
WITHOUT_LANDLOCK_6 = (  # which knows signals
    ("kill 62 129, tkill 200 130, tgkill 234 131", 0, ALL_BITS, (0, OWN), EPERM),
    ("rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240", 0, 0, (), EPERM))
WITHOUT_LANDLOCK_3 = (  # which knows that to truncate is to write, also where O_TRUNC comes without O_WRONLY
    ("truncate 76 45", 0, 0, (), EPERM),
    ("open 2 -1", 1, 0x203, (0, 1, 2, 0x201, 0x202), EPERM),
    ("openat 257 56", 2, 0x203, (0, 1, 2, 0x201, 0x202), EPERM))


@functools.cache
def seccomp(rules, machine=platform.machine() if sys.platform == "linux" and sys.maxsize > 2**32 else ""):
    """The rules as a BPF program in hex; "" for a machine whose system calls we do not know."""
    arch, column = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}.get(machine, (0, 0))
    if not arch:
        return ""
    load, mask_with, equal, at_least, answer, allow = 0x20, 0x54, 0x15, 0x35, 0x06, 0x7FFF0000
    # 32-bit calls (int 0x80) are refused; x32 and what came after 2018 (io_uring) look unknown.
    steps = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, 0x50000 + EPERM)]
    steps += [(load, 0, 0, 0), (at_least, 0, 1, 424), (answer, 0, 0, 0x50000 + ENOSYS)]
    for calls, argument, mask, values, error in rules:
        for call in (int(one.split()[1 + column]) for one in calls.split(", ")):
            steps += [(equal, 0, len(values) + 4, call & ALL_BITS)]  # else on to the next call
            steps += [(load, 0, 0, 16 + 8 * argument), (mask_with, 0, 0, mask)]
            steps += [(equal, len(values) - i, 0, value) for i, value in enumerate(values)]
            steps += [(answer, 0, 0, 0x50000 + error), (load, 0, 0, 0)]
    return b"".join(struct.pack("<HBBI", *step) for step in [*steps, (answer, 0, 0, allow)]).hex()


# The first process of a call. It has no secrets and outlives the code, so it can kill whatever the code has started.
# stdin brings the code and stays open: when either side is gone, the other sees it hang up. stdout is what the code
# prints, on both its streams; stderr is the verdict, "Error: ...". Both are files: they cost no memory, however long.
# Only the supervisor has the verdict: the code's process tells its exception through a pipe, and cannot unsay ours.
# No signal, ast or traceback: importing each takes milliseconds, in every one of the thousands of calls of a training.
SUPERVISOR = r'''
import _signal, os, resource, select, sys, time
if linux := sys.platform == "linux":
    import ctypes
    libc, numbers64 = ctypes.CDLL(None), ctypes.c_uint64 * 4
seconds, (size, memory, cap, namespaces, landlock) = float(sys.argv[2]), map(int, sys.argv[3:8])
filters = sys.argv[8:]
source = sys.stdin.buffer.read(size)
_signal.signal(2, 0)                                      # SIG_DFL: process 1 is immune to it, Python is not
os.ftruncate(2, 0), os.lseek(2, 0, 0)                     # whatever Python said when it started
told, tell = os.pipe()                                    # all of these are closed on exec
verdict = os.dup(2)

def say(text):
    os.write(verdict, text.encode("utf-8", "replace")[:8192] + b"\n")

def call(name, *args):
    if getattr(libc, name)(*args):
        raise OSError(f"{name} is refused")

def isolate():
    "Own users, processes, network and mounts: all files read-only but a new 64 MB folder. False where not allowed."
    if not linux:
        return False
    libc.prctl(38, 1, 0, 0, 0)                            # PR_SET_NO_NEW_PRIVS: sudo and the like give nothing
    if child := namespaces and os.fork():                 # a child tries: a refusal half-way leaves us as we were
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 99:
            os._exit(status != 0)
    if child or not namespaces:
        libc.prctl(36, 1, 0, 0, 0)                        # PR_SET_CHILD_SUBREAPER: orphans come to us, not to init
        return False
    try:
        separate()
    except OSError:
        os._exit(99)
    return True

def separate():
    uid, gid, cwd = os.getuid(), os.getgid(), os.getcwd()
    call("unshare", 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x00020000)
    for name, text in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if child := os.fork():                                # the child is process 1 of the namespace: all die with it
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    call("syscall", 442, -100, b"/", 0x8000, numbers64(1 | 4), 32)  # mount_setattr, all below: read-only and no devices:
    for name in b"null", b"zero", b"full", b"random", b"urandom":   # disks do not mind a read-only folder. Harmless ones stay
        call("mount", b"/dev/" + name, b"/dev/" + name, None, 4096, None)
        call("syscall", 442, -100, b"/dev/" + name, 0, numbers64(0, 4), 32)
    memory_disk = b"tmpfs", 6, b"size=64m,nr_inodes=16k,mode=700"  # gone with the namespace
    call("mount", b"tmpfs", cwd.encode(), *memory_disk)
    libc.mount(b"tmpfs", b"/dev/shm", *memory_disk)       # where there is none, this does nothing
    libc.mount(b"proc", b"/proc", b"proc", 15, None)      # read-only; where refused, the old /proc has no secrets for us
    os.chdir(cwd)

def numbers():
    "Of /proc/loadavg: [4] is the number of all tasks, [5] the last process id of our own namespace."
    try:
        with open("/proc/loadavg") as file:
            return [int(float(n)) for n in file.read().replace("/", " ").split()]
    except OSError:
        return [0] * 6

def family(pid):
    "The descendants of a process, or 100 of them, where there is a /proc."
    found = [pid]
    for pid in found:                                     # which grows meanwhile
        if len(found) > 100:
            break                                         # a fork bomb is faster than we are
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
        except OSError:
            pass                                          # it has ended
    return found[1:]

def crowded():                                            # the system's own limit, NPROC, does not bind root
    return numbers()[5] > 1000 if isolated else len(family(os.getpid())) > 64

def full():
    "Does the folder hold more than 64 MB? A file, however small, counts as 4 KB."
    total, errors = 0, []
    try:
        for _, folders, files, fd in os.fwalk(onerror=errors.append):  # by fd: a new name hides nothing
            for name in folders + files:
                try:
                    total += 4096 + 512 * os.lstat(name, dir_fd=fd).st_blocks
                except FileNotFoundError:
                    pass                                  # deleted meanwhile
            if total > 64 << 20:
                return True
    except RecursionError:
        return True                                       # too deep for us to look at; or unreadable:
    return any(not isinstance(error, FileNotFoundError) for error in errors)

def confine():
    "Takes from the code, and all that it will start, what it could harm others with. Needs no privilege."
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # no capability, even for root
    if landlock:                                          # rights: all that it knows but to execute and read
        rights = (1 << (13, 14, 15, 15, 16)[min(landlock, 5) - 1]) - 1 & ~13
        rules = libc.syscall(444, numbers64(rights, 3 * (landlock > 3), 3 * (landlock > 5)), 24, 0)
        private = ["/dev/shm"] if isolated and os.path.exists("/dev/shm") else []
        for path, allowed in [(os.devnull, 2)] + [(path, rights) for path in [".", *private]]:  # 2: to write
            libc.syscall(445, rules, 1, numbers64(allowed, os.open(path, 0x200000)), 0)         # O_PATH
        libc.syscall(446, rules, 0)
    own = os.getpid().to_bytes(4, "little").hex()
    for text in filters[:1 if isolated else 2]:
        steps = ctypes.create_string_buffer(bytes.fromhex(text.replace("efbeadde", own)))
        libc.prctl(22, 2, numbers64(len(steps) // 8, ctypes.addressof(steps)))  # PR_SET_SECCOMP

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
        try:
            text = explain(e)
        except BaseException:                             # its class is the code's: str(e) can do anything
            text = "an exception that cannot be shown"
        if text:
            say(text)

def explain(e):
    "NameError: name 'x' is not defined (line 1)"
    if isinstance(e, SystemExit) and e.code in (None, 0):
        return ""
    text, line, at = str(e), None, e.__traceback__
    if isinstance(e, SyntaxError) and e.filename == "<code>":
        text, line = e.msg, e.lineno
    while at:
        line, at = (at.tb_lineno if at.tb_frame.f_code.co_filename == "<code>" else line), at.tb_next
    return type(e).__name__ + (f": {text}" if text else "") + (f" (line {line})" if line else "")

kept, isolated = sys.modules["__main__"], isolate()       # kept: this module lives on when the code's takes its place
linux and libc.prctl(4, 0, 0, 0, 0)                       # PR_SET_DUMPABLE: our memory and files, the verdict, are not
child = os.fork()                                         # the code's to open in /proc
if child == 0:
    os.setsid()                                           # kill(0, 9) finds only the code's own
    os.nice(5)                                            # a fork bomb must not starve whoever has to stop it
    os.dup2(tell, verdict, False), os.close(tell), os.close(told)
    if linux:
        libc.prctl(4, 1, 0, 0, 0), libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: it does not survive us
        confine()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0), os.dup2(1, 2), os.close(null)
    sys.stdout.reconfigure(line_buffering=True)           # what was printed before a kill is not lost
    limit()
    run()
    raise SystemExit                                      # waits for the code's threads; the code may replace sys.exit
end, pause, reason = time.monotonic() + seconds, 0.001, None
while reason is None:
    if select.select([0], [], [], pause)[0]:              # this is the pause, unless the flow hangs up
        reason = "stopped by the flow"
    elif (ended := os.waitpid(child, os.WNOHANG))[0]:
        status = os.waitstatus_to_exitcode(ended[1])
        reason = f"killed by signal {-status}" if status < 0 else f"the code ended with exit status {status}" if status else ""
    elif time.monotonic() > end:
        reason = f"stopped after {seconds:g} seconds"
    elif crowded():
        reason = "stopped after starting too many processes"
    elif not isolated and full():
        reason = "stopped after writing too much to its folder"
    elif os.fstat(1).st_size > cap:
        reason = ""                                       # python_coder sees it too
    pause = min(2 * pause, 0.02)
if reason:
    say("Error: " + reason)
if select.select([told], [], [], 0)[0]:
    os.write(verdict, b"Error: " + os.read(told, 8193))
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


@functools.cache
def compiled(program):
    return marshal.dumps(compile(program, "<supervisor>", "exec"))  # once: it takes milliseconds


def remove(folder):
    """Removes a folder, however deep and whatever its rights; shutil gives up. No link is followed, not even in its place."""
    try:
        os.rmdir(folder)  # with namespaces, nothing has ever been written here
    except OSError:
        steps = r'find "$0" -type d ! -perm -700 -exec chmod 700 {} \; ; rm -rf "$0"'
        subprocess.run(["sh", "-c", steps, folder], stderr=subprocess.DEVNULL)


def wait_for_group(leader, seconds=20):
    """Waits until a killed process group is gone: process 1 of a namespace ends after all others in it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)


def python_coder(code: str, seconds: float = 10, memory_mb: int = 512) -> str:
    """What the code prints, and the value of a last bare expression; or "Error: NameError: ... (line 2)", then the prints.

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
    source = code.encode("utf-8", "replace")
    # Not -I: it ignores PYTHONHASHSEED, without which a printed set differs from run to run. numpy's threads take memory.
    env = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    rules = WITHOUT_NAMESPACES + WITHOUT_LANDLOCK_6 * (LANDLOCK < 6) + WITHOUT_LANDLOCK_3 * (LANDLOCK < 3)
    program = compiled(SUPERVISOR)
    settings = (len(program), seconds, len(source), memory_mb, OUTPUT_CAP, int(NAMESPACES), LANDLOCK,
                seccomp(ALWAYS), seccomp(rules))
    start = "import marshal, sys; exec(marshal.loads(sys.stdin.buffer.read(int(sys.argv[1]))))"
    file = tempfile.TemporaryFile
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, file() as output, file() as verdict:
        # No preexec_fn, which is not safe in threads: the supervisor sets the limits itself, before it runs the code.
        process = subprocess.Popen([sys.executable, "-c", start, *map(str, settings)], stdin=subprocess.PIPE,
                                   stdout=output, stderr=verdict, cwd=folder, env=env, start_new_session=True)
        try:
            with process.stdin as pipe:
                pipe.write(program + source)
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
            wait_for_group(process.pid)
        printed, problem = (os.pread(f.fileno(), OUTPUT_CAP + 1, 0) for f in (output, verdict))
        remove(folder)
    endless = len(printed) > OUTPUT_CAP
    printed, problem = (text.decode("utf-8", "replace").rstrip("\n") for text in (printed, problem))
    if endless:
        problem = f"Error: stopped after printing {OUTPUT_CAP} characters"
    elif process.returncode or (problem and not problem.startswith("Error:")):
        problem = f"Error: Python was ended from outside or did not start. {''.join(problem.splitlines()[-1:])}".strip()
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
    layers = [name for name, holds in (("namespaces", isolated), (f"Landlock {LANDLOCK}", LANDLOCK and files),
                                       ("seccomp", sockets)) if holds]
    dangers = ["read your files"] + [danger for danger, refused in (
        ("change them", files and sockets), ("use the network", sockets), ("signal your processes", signals))
        if not (refused or isolated)]
    return (f"python_coder is confined by {', '.join(layers) or 'limits of time and memory alone'}; "
            f"its code can still {', '.join(dangers)}")
