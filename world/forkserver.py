"""The fork server: a Python that waits, so that a call of python_coder need not start one.

This file is a program, never imported: world/sandbox.py starts it once, at the first call.

    our process -> fork server -> a supervisor for each call -> the code, and whatever it starts

Starting a Python and importing what a supervisor needs takes ten times as long as forking this one.
The fork server has imported nothing from this repository, and has none of our environment or open files.
 Its stdin is a socket to our process. Each message there is a call: the length of what the supervisor
reads first, and the files that become its stdin, stdout and stderr. The fork server ends with our process,
which closes the socket. Calls in progress do not need it.

It also lists, once, what programs may read: they run in its own Python. The supervisor, which is
forked from it, finds the list in the variable `readable`, and in `links`, `folders` and `above` (the folders
above them) what it needs to know of each.
"""

import _signal
import _socket
import ctypes
import gc
import marshal
import os
import resource  # noqa: F401  (the supervisor imports it)
import select  # noqa: F401  (the supervisor imports it)
import struct
import sys
import time  # noqa: F401  (the supervisor imports it)

if __name__ != "__main__":
    raise ImportError("world/forkserver.py is a program that world/sandbox.py starts")


def reap(*_):
    """Remove the supervisors that have ended, and count their time as ours (os.times)."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # there are no others


def contains(folder, path):
    return os.path.commonpath([folder, path]) == folder


def readable_paths(private):
    """What a program may read: Python and its packages, the system's programs and shared libraries, locales
    and time zones. Nothing else: no home folder, no /etc, and nothing that contains one of the private
    folders, such as our repository, installed in editable mode or copied to /usr/local/lib.
    """
    names = ["/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/nix/store", "/gnu/store"]
    names += ["/proc/cpuinfo"]  # torch prints an error without it
    # mimetypes and Debian's matplotlib end with an error without theirs
    names += ["/etc/mime.types", "/etc/matplotlibrc", "/usr/share/matplotlib"]
    names += ["/" + name for name in "bin sbin lib lib32 lib64".split()]
    names += ["/usr/" + name for name in "bin sbin lib lib32 lib64 local/lib".split()]
    names += ["/usr/share/" + name for name in ("zoneinfo", "locale")]
    for prefix in {sys.prefix, sys.base_prefix}:  # they differ in a virtual environment
        names += [f"{prefix}/{name}" for name in ("bin", "lib", "lib64", "pyvenv.cfg")]
    names += [os.path.abspath(name) for name in sys.path]
    try:
        with open(
            "/etc/ld.so.cache", "rb"
        ) as cache:  # the paths of all shared libraries, among other data
            libraries = [
                word for word in cache.read().split(b"\0") if word[:1] == b"/" and b".so" in word
            ]
        names += {os.path.dirname(os.fsdecode(path)) for path in libraries}
    except OSError:
        pass  # not a glibc: its libraries are in the folders above
    names = [
        name
        for name in names
        if not any(contains(os.path.realpath(name), os.path.realpath(place)) for place in private)
    ]
    paths = {
        path for name in names for path in (name, os.path.realpath(name)) if os.path.exists(path)
    }
    covered = {path for path in paths for other in paths if path != other and contains(other, path)}
    return sorted(map(os.fsencode, paths - covered))


def dumpable(yes):
    """Whether processes of the same user may read our memory and open our files, in /proc."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, yes, 0, 0, 0)  # PR_SET_DUMPABLE


os.dup2(1, 2), os.chdir("/")  # keeps no file and no folder of the first call
dumpable(0)
readable = readable_paths(sys.argv[1:])  # and what each of them is, looked up once for all calls
links = {path: os.path.realpath(path) for path in readable if os.path.islink(path)}
folders = set(filter(os.path.isdir, readable))
above = {
    path[:end] for path in readable for end in range(1, len(path)) if path[end : end + 1] == b"/"
}
_signal.pthread_sigmask(_signal.SIG_SETMASK, ())  # a thread that blocks signals may have started us
_signal.signal(_signal.SIGCHLD, reap)
compile("0", "", "exec", 0x400)  # makes the classes of syntax trees
gc.freeze()  # then no collection touches, and so copies, what is there
server = _socket.socket(fileno=0)
while True:
    message, attached, *_ = server.recvmsg(8, _socket.CMSG_LEN(12))
    if not message:
        os._exit(0)  # our process has ended
    files = struct.unpack("3i", attached[0][2])
    try:
        if os.fork() == 0:
            break
    except OSError:
        pass  # too many processes: sandbox.py sees that the files close
    for file in files:
        os.close(file)

# A new process, which becomes the supervisor. First it gives up what it has of the fork server.
_signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
dumpable(1)
os.setsid()
for number, file in enumerate(files):
    os.dup2(file, number), os.close(file)  # the first replaces the socket of the fork server
os.write(0, os.getpid().to_bytes(8, "little"))  # from here on, the call has begun
folder, sys.argv, program = marshal.loads(sys.stdin.buffer.read(int.from_bytes(message, "little")))
os.chdir(folder)
exec(marshal.loads(program))
