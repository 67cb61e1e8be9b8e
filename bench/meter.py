"""What a piece of work costs: wall seconds, CPU seconds, bytes at its peak.

    meter = Meter()
    work()
    meter.cost()        # {"wall": 1.9, "cpu": 1.8, "peak": 130_000_000}

CPU seconds count every process that the work has started, those that still live (a server of processes) and
those that have ended. They are the fairer measure on a machine that has other work to do.
"""
import ctypes
import os
import resource
import time
from pathlib import Path

# malloc gives freed memory back at once, so the peak is what the work really needs; it costs some time
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_TOP_PAD_": "0"}


class Meter:
    """Of this process, from now on. The peak counts what it needs beyond the bytes that it holds now."""

    def __init__(self):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        self.bytes = status("VmRSS")
        self.cpu, self.wall = cpu_seconds(), time.perf_counter()

    def cost(self):
        wall, cpu = time.perf_counter() - self.wall, cpu_seconds() - self.cpu
        return {"wall": wall, "cpu": cpu, "peak": status("VmHWM") - self.bytes}


def adopt_orphans():
    """Become the parent of what a command leaves behind, so that cpu_seconds() counts it."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def status(key):
    """Bytes of a line of /proc/self/status: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def cpu_seconds():
    """Of this process, its ended children, and its living descendants with their ended children."""
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))

    def descends(pid):
        return pid in parents and (parents[pid] == os.getpid() or descends(parents[pid]))

    living = sum(ticks[pid] for pid in ticks if descends(pid)) / os.sysconf("SC_CLK_TCK")
    return living + sum(usage.ru_utime + usage.ru_stime for usage in ended)
