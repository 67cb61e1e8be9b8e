"""How a script ends without a traceback: Ctrl-C, a reader that has gone (`| head`), a missing package.

    endings.without_traceback(__name__)  # before the imports that take seconds, or a package

This file only needs the standard library, because it also reports packages that are not installed.
"""
import atexit
import errno
import os
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from world.text import printable

REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"
NO_READER = 128 + signal.SIGPIPE  # the exit code that a shell gives
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # a disk, a quota, a limit on a file's size
UNWRITABLE = *FULL, errno.EPIPE, errno.EIO  # EIO: the terminal has been closed


def without_traceback(name):
    """From here on, the endings below print nothing or one sentence; all other errors keep their traceback.
    Only for a script ("__main__"), not where it is imported."""
    if name == "__main__":
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import that catches it may end in another error
        for stream in ("stdout", "stderr"):
            if getattr(sys, stream) is None:  # closed by the shell (`>&-`): what is printed goes nowhere
                setattr(sys, stream, open(os.devnull, "w"))
        sys.excepthook = end
        atexit.register(flush)


def end(kind, error, traceback):
    """sys.excepthook: what is printed of an error that ends the process, and its exit code."""
    if kind is KeyboardInterrupt:  # of a script that handles Ctrl-C itself
        return  # and Python ends by SIGINT
    if isinstance(error, ModuleNotFoundError) and error.name in required():
        print(f"{Path(sys.argv[0]).name}: the package {error.name} is not installed for {sys.executable}: "
              "activate the project's environment (. .venv/bin/activate), or pip install -r requirements.txt",
              file=sys.stderr)
        raise SystemExit(1)
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        raise SystemExit(no_more_output(error))
    sys.__excepthook__(kind, error, traceback)


def required():
    """The packages of requirements.txt, which are imported under these names."""
    return {line.split("=")[0].split(">")[0].strip() for line in REQUIREMENTS.read_text().splitlines()}


def no_more_output(error):
    """Discard stdout from here on, because it cannot be written. Returns the exit code. An error that a user
    must know about, such as a full disk, is printed; the end of `| head` is not."""
    with suppress(OSError):  # or Python's own flush at the end would fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return NO_READER
    with suppress(OSError):  # stderr may be gone, too
        print(f"{Path(sys.argv[0]).name}: cannot write: {error.strerror}", file=sys.stderr)
    return 1


def flush():
    """At exit: what print() has buffered. An error there would be a traceback of Python's own."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os._exit(no_more_output(error))


def leave(code, text):
    """End the process with this sentence and exit code: 2 before a run, 1 during a run."""
    print(printable(text), file=sys.stderr)
    raise SystemExit(code)


@contextmanager
def errors_leave(script):
    """One sentence and exit code 2 for a run that cannot begin: a wrong flag, a bad file, ..."""
    try:
        yield
    except BrokenPipeError:  # `| head` has ended: no mistake
        raise
    except (ValueError, OSError) as why:
        leave(2, f"{script}: {why}")
