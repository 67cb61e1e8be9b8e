"""Ctrl-C, SIGTERM or a closed terminal: the training ends after the present step, with a checkpoint.

The exit code is then that of a process that the signal killed, so a script sees that the run was stopped."""
import signal

from logbook.log import say
from scale import ranks


class Stopping:
    """The first signal asks the run to end. After it, Ctrl-C ends the process at once. SIGTERM and SIGHUP do
    not, because a cluster's scheduler and torchrun both send one, and a closed terminal may send two."""

    def __init__(self):
        self.signal = 0  # the first one
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                signal.signal(number, self.handle)

    def handle(self, number, frame):
        first, self.signal = not self.signal, self.signal or number  # before say(), which may send SIGTERM
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if first:
            say("\nStopping after this step or evaluation; --resume goes on from there. Ctrl-C again leaves "
                "at once.")

    def requested(self):
        """Must the run end? All ranks must end after the same step."""
        return ranks.any_rank(self.signal)

    def exit_code(self):
        """As a shell gives it: 130 after Ctrl-C, 143 after SIGTERM, or if only another rank was signalled."""
        return 128 + (self.signal or signal.SIGTERM)
