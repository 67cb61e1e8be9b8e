"""Confinement: the system calls that the code of python_coder may not use, as a program for seccomp.

Two features of Linux confine the code, and neither needs a privilege. Landlock protects files and other
processes; seccomp refuses the system calls that Landlock does not cover. This file makes the program for
seccomp, and world/supervisor.py applies both in the code's process.
"""

import ctypes
import functools
import platform
import struct
import sys

# The version of Landlock in this kernel; 0: none.
LANDLOCK = max(0, ctypes.CDLL(None).syscall(444, None, 0, 1)) if sys.platform == "linux" else 0

# The processor, in 64 bits, of a kernel that has seccomp; "" elsewhere. (21 is PR_GET_SECCOMP.)
HAS_SECCOMP = sys.platform == "linux" and ctypes.CDLL(None).prctl(21, 0, 0, 0, 0) >= 0
MACHINE = platform.machine() if HAS_SECCOMP and sys.maxsize > 2**32 else ""

# A rule is (calls, argument, mask, values, error). Each call is "name, number on x86_64, number on aarch64"
# (-1: it does not exist there). The kernel skips the call and returns the error, unless the argument of this
# index, & mask, is one of the values. The supervisor replaces CODE_PID by the code's process id.
EPERM, ENOSYS, EOPNOTSUPP, ALL_BITS, CODE_PID = 1, 38, 95, 0xFFFFFFFF, 0xDEADBEEF
ALWAYS = (
    # sockets; other processes; namespaces; shared memory, queues and keys, which outlive the code; what goes
    # on in folders that cannot be read, files by number, the kernel's log; calls in which bugs of the kernel
    # are often found
    (
        "socket 41 198, connect 42 203, bind 49 200, ptrace 101 117, process_vm_readv 310 270, "
        "process_vm_writev 311 271, unshare 272 97, setns 308 268, shmget 29 194, shmat 30 196, shmctl 31 195, "
        "semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192, msgget 68 186, msgsnd 69 189, "
        "msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181, add_key 248 217, "
        "request_key 249 218, keyctl 250 219, inotify_init 253 -1, inotify_init1 294 26, "
        "inotify_add_watch 254 27, fanotify_init 300 262, "
        "name_to_handle_at 303 264, open_by_handle_at 304 265, syslog 103 116, bpf 321 280, "
        "perf_event_open 298 241, userfaultfd 323 282",
        0,
        0,
        (),
        EPERM,
    ),
    # the limits and the priority of other processes, the supervisor included
    (
        "prlimit64 302 261, sched_setparam 142 118, sched_setscheduler 144 119, sched_setaffinity 203 122, "
        "sched_setattr 314 274",
        0,
        ALL_BITS,
        (0, CODE_PID),
        EPERM,
    ),
    ("setpriority 141 140, ioprio_set 251 30", 0, 0, (), EPERM),
    # with FALLOC_FL_KEEP_SIZE a file takes disk space that RLIMIT_FSIZE does not limit
    ("fallocate 285 47", 1, ALL_BITS, (0,), EOPNOTSUPP),
    ("clone 56 220", 0, 0x7E020000, (0,), EPERM),  # no flag of a new namespace
    ("socketpair 53 199", 0, ALL_BITS, (1,), EPERM),  # AF_UNIX
    ("socketpair 53 199", 1, 15, (1,), EPERM),  # SOCK_STREAM: a datagram can be sent to any address
    # of ioctl only isatty and flags; of fcntl all but F_SETOWN, which can signal any process, and F_SETLEASE
    ("ioctl 16 29", 1, ALL_BITS, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451), EPERM),
    ("fcntl 72 25", 1, ALL_BITS, (*range(8), *range(36, 39), *range(1030, 1035)), EPERM),
)
WITHOUT_NAMESPACES = (
    # No process can leave its process group, so one kill reaches all: no list of processes keeps up with
    # sessions that fork. Nor can it change the rights, owner or times of a file, which Landlock allows. All
    # return 0, as if they had worked.
    (
        "setsid 112 157, setpgid 109 154, chmod 90 -1, fchmod 91 52, fchmodat 268 53, chown 92 -1, "
        "fchown 93 55, lchown 94 -1, fchownat 260 54, utime 132 -1, utimes 235 -1, futimesat 261 -1, "
        "utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, "
        "lremovexattr 198 15, fremovexattr 199 16",
        0,
        0,
        (),
        0,
    ),
    # gigabytes in a moment, faster than the supervisor looks at the folder; writing them takes longer
    ("fallocate 285 47", 0, 0, (), EOPNOTSUPP),
    # Landlock lets it read the attributes of files that it cannot open, such as the address of a download.
    ("getxattr 191 8, lgetxattr 192 9, listxattr 194 11, llistxattr 195 12", 0, 0, (), EOPNOTSUPP),
)
WITHOUT_LANDLOCK_6 = (  # version 6 covers signals
    ("kill 62 129, tkill 200 130, tgkill 234 131", 0, ALL_BITS, (0, CODE_PID), EPERM),
    ("rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240", 0, 0, (), EPERM),
)
WITHOUT_LANDLOCK_3 = (  # version 3 covers truncating a file, also with O_TRUNC but not O_WRONLY
    ("truncate 76 45", 0, 0, (), EPERM),
    ("open 2 -1", 1, 0x203, (0, 1, 2, 0x201, 0x202), EPERM),
    ("openat 257 56", 2, 0x203, (0, 1, 2, 0x201, 0x202), EPERM),
)


@functools.cache
def seccomp(rules, machine=MACHINE):
    """The rules as a BPF program in hex; "" for a processor other than x86_64 and aarch64."""
    if machine not in ("x86_64", "aarch64"):
        return ""
    arch, column = (0xC000003E, 1) if machine == "x86_64" else (0xC00000B7, 2)
    load, mask_with, equal, at_least, answer, allow = 0x20, 0x54, 0x15, 0x35, 0x06, 0x7FFF0000
    # 32-bit calls (int 0x80) are refused; x32's and those newer than 2018 (io_uring) do not exist, except
    # close_range, with which subprocess closes files from Python 3.13 on.
    steps = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, 0x50000 + EPERM)]
    steps += [
        (load, 0, 0, 0),
        (equal, 2, 0, 436),
        (at_least, 0, 1, 424),
        (answer, 0, 0, 0x50000 + ENOSYS),
    ]
    for calls, argument, mask, values, error in rules:
        for call in (int(names.split()[column]) for names in calls.split(", ")):
            steps += [
                (equal, 0, len(values) + 4, call & ALL_BITS)
            ]  # if not equal: on to the next call
            steps += [(load, 0, 0, 16 + 8 * argument), (mask_with, 0, 0, mask)]
            steps += [(equal, len(values) - i, 0, value) for i, value in enumerate(values)]
            steps += [(answer, 0, 0, 0x50000 + error), (load, 0, 0, 0)]
    return b"".join(struct.pack("<HBBI", *step) for step in [*steps, (answer, 0, 0, allow)]).hex()


def filters():
    """Two programs for seccomp: one for every machine, and one to add where there are no namespaces."""
    rules = (
        WITHOUT_NAMESPACES
        + WITHOUT_LANDLOCK_6 * (LANDLOCK < 6)
        + WITHOUT_LANDLOCK_3 * (LANDLOCK < 3)
    )
    return seccomp(ALWAYS), seccomp(rules)
