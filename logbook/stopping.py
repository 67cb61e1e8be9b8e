"""Ctrl-C, SIGTERM or a closed terminal: the training ends after the present step, with a checkpoint."""
import signal

from logbook.log import say
from scale import ranks


class Stopping:
    """The first signal asks the run to end. After it, Ctrl-C ends the process at once. SIGTERM and SIGHUP do
    not, because a cluster's scheduler and torchrun both send one, and a closed terminal may send two."""

    def __init__(self):
        self.signalled = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                signal.signal(number, self.handle)

    def handle(self, number, frame):
        first, self.signalled = not self.signalled, True  # before say(), which may send SIGTERM
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if first:
            say("\nStopping after this step, with a checkpoint. Ctrl-C again leaves at once.")

    def requested(self):
        """Must the run end? All ranks must end after the same step."""
        return ranks.any_rank(self.signalled)
