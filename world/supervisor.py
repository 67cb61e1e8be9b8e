"""The supervisor: the first process of each call of python_coder. It runs the code in a child, and stops it.

This file is a program, never imported: world/sandbox.py sends it, compiled, to a new process of the fork
server (forkserver.py).

    fork server -> supervisor [-> process 1 of new namespaces] -> the code, and whatever it starts

The supervisor has no secrets and outlives the code, so it can kill whatever the code has started.
stdin is a socket that brings the code and stays open, so that each side notices when the other has ended.
There the supervisor writes the verdict, "Error: ...", if there is one, and a last "!": all went well. (A file
would not do: the code may have filled the disk.) Only the supervisor has this socket: the code's process
sends its exception to it through a pipe. stdout is a file with what the code prints, on both its streams;
stderr is a file for the supervisor's own traceback.
The fork server has imported what is imported here. Its variable `readable` lists what the code may read, and
`links`, `folders` and `above` say what each of that is.
signal, ast and traceback are not imported: each takes milliseconds in every call, and a training run has
thousands of calls.
"""

import _signal
import atexit
import gc
import os
import resource
import select
import sys
import time

if __name__ != "__main__":
    raise ImportError("world/supervisor.py is a program that world/sandbox.py starts")
if linux := sys.platform == "linux":
    import ctypes

    libc, numbers64 = ctypes.CDLL(None), ctypes.c_uint64 * 4
seconds, (size, memory, cap, namespaces, landlock) = float(sys.argv[1]), map(int, sys.argv[2:7])
filters = sys.argv[7:]
source = sys.stdin.buffer.read(size)
_signal.signal(2, 0)  # SIG_DFL: then SIGINT cannot end process 1 of a namespace
verdict = 0  # where say() writes: the socket; in the code's process a pipe
DEVICES = [
    path
    for name in "null zero full random urandom".split()  # the harmless ones
    if os.path.exists(path := b"/dev/" + name.encode())
]


def say(text):
    os.write(verdict, text.encode("utf-8", "replace")[:8192] + b"\n")


# ------------------------------------------------------------ namespaces
def isolate():
    """Enter new namespaces, if they are wanted. Returns True if that was done."""
    if not linux:
        return False
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: no rights through sudo and the like
    if namespaces:
        try:
            separate()
            return True
        except (
            OSError
        ):  # perhaps half-way: sandbox.py starts another supervisor, which does not try
            os.write(0, b"refused"), os._exit(0)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become our children
    return False


def separate():
    uid, gid, folder = os.getuid(), os.getgid(), os.getcwdb()
    end_first()  # here, for the new root has no /proc
    call("unshare", 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x00020000)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if child := os.fork():  # the child is process 1 of the namespace: all others end with it
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    limit_process_ids()
    change_root(folder)


def change_root(folder):
    """Enter a new root: what the code may read, read-only, its folder of 64 MB, and no other file.

    It is built in the folder itself, on a disk in memory, which is gone with the namespace. All paths are
    what they were before. There is no /sys, and of /proc only cpuinfo.
    """
    call("mount", b"tmpfs", folder, b"tmpfs", 6, b"size=1m,mode=755")
    for path in sorted(above | {b"/dev"}):
        os.mkdir(folder + path)
    for path in (*readable, *DEVICES):
        place = folder + path
        if path in links:
            os.symlink(links[path], place)  # where it leads to is readable, too
            continue
        os.mkdir(place) if path in folders else os.close(os.open(place, os.O_CREAT))
        libc.mount(
            path, place, None, 0x5000, None
        )  # MS_BIND | MS_REC. Refused: the code cannot read it
    for path in folder, b"/dev/shm":
        os.makedirs(folder + path, exist_ok=True)
    # mount_setattr, recursively: read-only, and no devices (a disk can be written to even if it is mounted
    # read-only) except the harmless ones
    call("syscall", 442, -100, folder, 0x8000, numbers64(1 | 4), 32)
    for path in DEVICES:
        call("syscall", 442, -100, folder + path, 0, numbers64(0, 4), 32)
    for path in b"/dev/shm", folder:  # the folder may be in /dev/shm
        os.makedirs(folder + path, exist_ok=True)
        call("mount", b"tmpfs", folder + path, b"tmpfs", 6, b"size=64m,nr_inodes=16k,mode=700")
    os.chdir(folder)
    call("pivot_root", b".", b"."), call("umount2", b".", 2)  # MNT_DETACH: the old root
    os.chdir(folder)


def call(name, *args):
    if getattr(libc, name)(*args):
        raise OSError(f"{name} is refused")


def limit_process_ids():
    """At most 1100 processes at a time, also for root. Before Linux 6.14 this limit is the whole system's."""
    if tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2]) >= (6, 14):
        try:
            with open("/proc/sys/kernel/pid_max", "w") as file:
                file.write("1100")
        except OSError:
            pass  # this /proc is read-only


# ------------------------------------------------------------ what the code uses
def numbers():
    """The numbers of /proc/loadavg: [4] is that of all tasks, [5] the last process id of our namespace."""
    try:
        return [int(float(n)) for n in os.pread(load, 99, 0).replace(b"/", b" ").split()]
    except OSError:
        return [0] * 6  # no /proc, or not Linux


def family(pid):
    """The descendants of a process, at least 100 if there are more; none without a /proc."""
    found = [pid]
    for pid in found:  # the list grows in the loop
        if len(found) > 100:
            break  # a fork bomb grows faster than the list
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
        except OSError:
            pass  # it has ended
    return found[1:]


def crowded():
    """True if the code has started too many processes. (The system's limit, NPROC, does not bind root.)"""
    return numbers()[5] > 1000 if isolated else len(family(os.getpid())) > 64


def full():
    """True if the folder holds more than 64 MB. Each file counts as 4 KB more, even an empty one."""
    total, errors = 0, []
    try:
        for _, folders, files, fd in os.fwalk(
            onerror=errors.append
        ):  # by fd: renaming hides nothing
            for name in folders + files:
                try:
                    total += 4096 + 512 * os.lstat(name, dir_fd=fd).st_blocks
                except FileNotFoundError:
                    pass  # deleted meanwhile
            if total > 64 << 20:
                return True
    except (RecursionError, OSError):
        return True  # folders too deep to look at
    # a folder that cannot be read counts as full, too
    return any(not isinstance(error, FileNotFoundError) for error in errors)


def too_much_printed():
    """Why the output is too long, or "". Space beyond its end counts, too, which seccomp may not prevent."""
    info = os.fstat(1)
    too_much = info.st_size > cap or 512 * info.st_blocks > 16 << 20
    return f"stopped after printing {cap} characters" if too_much else ""


# ------------------------------------------------------------ the code's own process
def end_first():
    """If the machine's memory runs out, Linux ends this process and what it will start before all others."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # no /proc, or not Linux


def confine():
    """Take from this process, and all that it will start, the means to harm others. Needs no privilege.

    OSError if the kernel refuses what it has: then the code does not run.
    """
    # no capability, even for root
    call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    if landlock:
        execute, write, read, list_folder = 1, 2, 4, 8
        everything = (
            1 << (13, 14, 15, 15, 16)[min(landlock, 5) - 1]
        ) - 1  # all rights that it knows
        rules = libc.syscall(
            444, numbers64(everything, 3 * (landlock > 3), 3 * (landlock > 5)), 24, 0
        )
        allowed = [(path, execute | read | list_folder * (path in folders)) for path in readable]
        allowed += [(path, read | write) for path in DEVICES]
        allowed += [(path, everything) for path in (b".", *[b"/dev/shm"] * isolated)]
        for path, rights in allowed:
            try:
                place = os.open(path, 0x200000)  # O_PATH
            except OSError:
                continue  # gone, or in a folder that is closed to the code
            libc.syscall(445, rules, 1, numbers64(rights, place), 0), os.close(place)
        call("syscall", 446, rules, 0), os.close(rules)
    pid = os.getpid().to_bytes(4, "little").hex()
    for text in filters[: 1 if isolated else 2]:
        steps = ctypes.create_string_buffer(
            bytes.fromhex(text.replace("efbeadde", pid))
        )  # CODE_PID
        text and call(
            "prctl", 22, 2, numbers64(len(steps) // 8, ctypes.addressof(steps))
        )  # PR_SET_SECCOMP


def limit():
    limits = {"CPU": int(seconds) + 1, "AS": memory << 20, "FSIZE": 16 << 20, "NOFILE": 128}
    limits["CORE"] = (
        1  # byte: no core file. With 0, Linux still calls the system's program for crashes
    )
    limits["NPROC"] = numbers()[4] + 64  # it counts all processes of the user, not only the code's
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
        except (AttributeError, ValueError, OSError):
            pass  # this system does not have it, or already has a lower limit


def run():
    """Run the code once, in one scope, and show a last bare expression as a REPL shows it."""
    main = sys.modules["__main__"] = type(sys)("__main__")
    sys.argv, reserve = [""], bytes(1 << 20)
    try:  # 0x400: compile() returns a syntax tree
        tree, show = (
            compile(source, "<code>", "exec", 0x400),
            compile("0", "<code>", "single", 0x400),
        )
        show.body = (
            [tree.body.pop()] if tree.body and type(tree.body[-1]).__name__ == "Expr" else []
        )
        exec(compile(tree, "<code>", "exec"), main.__dict__)
        if show.body:
            exec(compile(show, "<code>", "single"), main.__dict__)
    except BaseException as e:
        del reserve  # memory for the message that memory is full
        try:
            text = explain(e)
        except BaseException:  # the code wrote its class: str(e) can do anything
            text = "an exception that cannot be shown"
        if text:
            say(text)


def explain(e):
    """NameError: name 'x' is not defined (line 1)"""
    if isinstance(e, SystemExit) and e.code in (None, 0):
        return ""
    text, line, at = str(e), None, e.__traceback__
    if isinstance(e, SyntaxError) and e.filename == "<code>":
        text, line = e.msg, e.lineno
    while at:
        line, at = (
            (at.tb_lineno if at.tb_frame.f_code.co_filename == "<code>" else line),
            at.tb_next,
        )
    return type(e).__name__ + (f": {text}" if text else "") + (f" (line {line})" if line else "")


def start():
    """The child: it confines itself and runs the code."""
    os.setsid()  # then kill(0, 9) reaches only the code's processes
    os.setpriority(os.PRIO_PROCESS, 0, priority + 5)  # a fork bomb must not starve the supervisor
    global verdict
    verdict = error_in
    os.close(error_out), limit(), load < 0 or os.close(load)
    if linux:
        (
            libc.prctl(4, 1, 0, 0, 0),
            libc.prctl(1, 9, 0, 0, 0),
        )  # PR_SET_PDEATHSIG: it ends with the supervisor
        isolated or end_first()
        confine()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0), os.dup2(1, 2), os.close(null)
    sys.stdout.reconfigure(line_buffering=True)  # keeps what was printed before a kill
    streams = sys.stdout, sys.stderr
    run()
    try:
        leave(*streams)
    except BaseException:  # the code has replaced what leave() uses
        pass
    raise SystemExit  # waits for the code's threads; the code may replace sys.exit


def leave(stdout, stderr):
    """End a plain program at once. Python would clear all modules first: a third of a call's time."""
    if (
        "threading" in sys.modules
        or atexit._ncallbacks()
        or (stdout, stderr) != (sys.stdout, sys.stderr)
    ):
        return  # Python's own end waits, calls and writes more
    sys.modules.pop("__main__", None)
    gc.collect()  # the code's objects are deleted: destructors run
    stdout.flush(), stderr.flush()
    os._exit(0)


# ------------------------------------------------------------ the supervisor's process
def watch(child):
    """Wait until the code ends or must be stopped. Returns why, or "" if it ended well."""
    end, pause, waiting = time.monotonic() + seconds, 0.001, [0, error_out]
    while True:
        # until sandbox.py has gone, the code has ended or sent its exception, or `pause` is over
        ready = select.select(waiting, [], [], pause)[0]
        if error_out in ready:
            waiting, pause = [0], 0.0005
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            failure = (
                f"killed by signal {-code}"
                if code < 0
                else f"the code ended with exit status {code}"
            )
            return failure if code else ""
        if crowded():
            return "stopped after starting too many processes"
        if time.monotonic() > end:
            return f"stopped after {seconds:g} seconds"
        if 0 in ready:
            return "stopped by the flow"
        if not isolated and full():
            return "stopped after writing too much to its folder"
        if reason := too_much_printed():
            return reason
        pause = min(2 * pause, 0.02)


def kill_all(child):
    """Without namespaces: kill the code and all that it has started."""
    try:
        os.killpg(child, 9)  # all at once: a fork bomb cannot escape it
    except (ProcessLookupError, PermissionError):
        pass  # the group is empty
    while kin := family(os.getpid()):  # processes that have left the group
        for pid in kin:
            try:
                os.kill(pid, 9)
                os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                pass  # it has ended, or is a grandchild: it becomes a child when its parent ends


priority = os.nice(0)
try:
    load = os.open("/proc/loadavg", os.O_RDONLY)  # before isolate(): the new root has no /proc
except OSError:
    load = -1
try:
    os.nice(-10)  # only root may, and for root the limit of processes does not hold
except OSError:
    pass
# a reference to this module, for when the code's takes its place in sys.modules
supervisor, isolated = sys.modules["__main__"], isolate()
# PR_SET_DUMPABLE: the code cannot open our memory and files (the verdict) in /proc
linux and libc.prctl(4, 0, 0, 0, 0)
error_out, error_in = os.pipe()  # both are closed on exec
code_process = os.fork()
if code_process == 0:
    start()
os.close(error_in)
try:
    reason = watch(code_process)
    too_long = too_much_printed()
    if reason := too_long or reason:
        say("Error: " + reason)
    if (
        not too_long
        and select.select([error_out], [], [], 0)[0]
        and (text := os.read(error_out, 8193))
    ):
        os.write(verdict, b"Error: " + text)
finally:  # with namespaces all end with this process 1
    isolated or kill_all(code_process)
os.write(verdict, b"!")
os._exit(0)
