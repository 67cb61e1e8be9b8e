"""The folder of a run: which process may write into it, and what it is called."""
import errno
import fcntl
import os
import re
import sys

from world.files import check_own

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # of a file system without flock
LOCKS = []  # the file descriptors of this process's locks, open until it ends


def lock(folder, script):
    """Take a folder for this process, until it ends: the kernel releases the lock, also after a kill.

    ValueError if another process has it. Some network file systems have no locks; there a run must go on all
    the same, so the user is only warned. With several GPUs, rank 0 has the lock for all."""
    if os.environ.get("RANK", "0") != "0":
        return
    check_own(folder / "lock")
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    if any(os.path.samestat(os.fstat(file), os.fstat(other)) for other in LOCKS):
        os.close(file)
        return  # ours already
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as why:
        process = re.sub(r"\D", "", os.read(file, 20).decode("ascii", "replace")) or "?"
        os.close(file)
        raise ValueError(f"{folder} is in use by another process ({process}): wait until that has ended, "
                         "or stop it") from why
    except OSError as why:
        if why.errno not in NO_LOCKS:
            raise
        print(f"{script}: the file system of {folder} has no locks: see to it yourself that no other process "
              "uses this folder", file=sys.stderr)
    os.ftruncate(file, 0)
    os.write(file, str(os.getpid()).encode())
    LOCKS.append(file)


def folder_name(model):
    """A name for a folder of this model's answers: 'runs/toy-seed0/best' -> 'runs-toy-seed0-best'."""
    return re.sub(r"[^\w.]+", "-", model).strip("-")
