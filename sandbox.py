"""The sandbox: python_coder, which runs the code that a model wrote.

    python_coder("print(2 + 2)")            # "4"
    python_coder("while True: pass")        # "Error: stopped after 10 seconds"

Model code is hostile code, if only by accident. It is never run in our process: a new Python runs it, without our environment, in
a folder of its own, under limits that a second new process keeps, and everything it has started is gone when the answer comes.
What is covered, and what is not, stands in the docstring of python_coder; tests/test_sandbox.py has a test for each promise.
"""
import os
import select
import signal
import subprocess
import sys
import tempfile

OUTPUT_CAP = 65536       # bytes the code may print before it is stopped
NAMESPACES = True        # False: python_coder does without Linux namespaces (the tests try both ways)

# The first process of a call. It has no secrets and outlives the code, so it can kill whatever the code has started.
# stdin brings the code and stays open: when either side is gone, the other sees it hang up. stdout is what the code
# prints, on both its streams; stderr is the verdict, "Error: ...". Both are files: they cost no memory, however long.
# Only the supervisor has the verdict: the code's process tells its exception through a pipe, and cannot unsay ours.
# No signal, ast or traceback: importing each takes milliseconds, in every one of the thousands of calls of a training.
SUPERVISOR = r'''
import os, resource, select, sys, time
if linux := sys.platform == "linux":
    import ctypes
    libc, numbers64 = ctypes.CDLL(None), ctypes.c_uint64 * 4
seconds, (size, memory, cap, namespaces) = float(sys.argv[1]), map(int, sys.argv[2:])
source = sys.stdin.buffer.read(size)
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
    for name in "user/max_user_namespaces", "kernel/shmall":  # neither a namespace in this one, with a root of its own,
        try:                                              # nor System V memory, which counts for no process
            with open(f"/proc/sys/{name}", "w") as file:
                file.write("0")
        except OSError:
            pass                                          # a container's read-only /proc/sys, or an old Linux
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
    call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # no capability: nothing can be undone

def numbers():
    "Of /proc/loadavg: [4] is the number of all tasks, [5] the last process id of our own namespace."
    try:
        with open("/proc/loadavg") as file:
            return [int(float(n)) for n in file.read().replace("/", " ").split()]
    except OSError:
        return [0] * 6

def family(pid):
    "The descendants of a process, where there is a /proc."
    found = [pid]
    for pid in found:                                     # which grows meanwhile
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
        except OSError:
            pass                                          # it has ended
    return found[1:]

def crowded():                                            # the system's own limit, NPROC, does not bind root
    return numbers()[5] > 1000 if isolated else len(family(os.getpid())) > 64

def stay():
    "setsid and setpgid do nothing and return 0: nobody leaves the group, one stroke at the end reaches all."
    # Without a process 1, whose end ends all. Sessions that fork outran every list of processes: 11,000 in three seconds.
    if known := {"x86_64": (0xC000003E, 112, 109), "aarch64": (0xC00000B7, 157, 154)}.get(os.uname().machine):
        arch, setsid, setpgid = known
        steps = ((0x20, 0, 0, 4), (0x15, 0, 4, arch), (0x20, 0, 0, 0), (0x15, 1, 0, setsid), (0x15, 0, 1, setpgid),
                 (6, 0, 0, 0x50000), (6, 0, 0, 0x7FFF0000))   # seccomp: load arch, if equal, load call, if, if, error 0, allow
        filter = (ctypes.c_uint64 * 7)(*(code | yes << 16 | no << 24 | value << 32 for code, yes, no, value in steps))
        libc.prctl(22, 2, (ctypes.c_uint64 * 2)(7, ctypes.addressof(filter)))

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
    os.dup2(tell, verdict, False), os.close(tell), os.close(told)
    if linux:
        libc.prctl(4, 1, 0, 0, 0), libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: it does not survive us
        isolated or stay()
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


def remove(folder):
    """Removes a folder, however deep and whatever its rights; shutil gives up. No link is followed, not even in its place."""
    try:
        os.rmdir(folder)  # with namespaces, nothing has ever been written here
    except OSError:
        steps = r'find "$0" -type d ! -perm -700 -exec chmod 700 {} \; ; rm -rf "$0"'
        subprocess.run(["sh", "-c", steps, folder], stderr=subprocess.DEVNULL)


def python_coder(code: str, seconds: float = 10, memory_mb: int = 512) -> str:
    """What the code prints, and the value of a last bare expression; or "Error: NameError: ... (line 2)", then the prints.

    A new Python runs the code once, in one scope, with the packages of this one, in a folder of its own.
    Covered: time on the clock, and of the CPU; memory of each process; size of a file; 128 open files; processes (1000 in
      all, threads too; without namespaces 64 at a time); endless output; the answer's length; our environment is not passed
      on; stdin is empty; the folder is empty before and gone afterwards, whatever is in it; nothing goes on afterwards:
      threads, children, and grandchildren that left the session or lost their parent; what we say of a program (stopped,
      killed) stands first, and it cannot unsay it.
    Covered where Linux (5.12 or newer) lets users have namespaces (most systems, not Docker's default):
      no network; no file, device or setting outside the folder can be changed, even by root, and it holds 64 MB;
      other processes, ours and the supervisor above all, cannot be seen, killed, stopped or traced, nor their memory or
      environment read; no limit can be raised.
    Not covered: files that we can read (keys, too); sockets and pipes that are files (Docker's); the sum of the memory of
      many processes, and memory that no process owns (memfd, pipes); a program that lies in its own prints and exceptions;
      bugs of the kernel. Without namespaces, code that means harm has all our rights: it may kill or stop us or the
      supervisor, read their environment, change our files, fill the disk, use the network. Off Linux, a process that leaves
      the group is not found, and macOS ignores some limits. Windows is not supported.
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
