"""Ctrl-C or SIGTERM: the training ends after the present step, with a checkpoint."""
import signal

from scale import ranks
from scale.log import say


class Stopping:
    """The first signal asks the run to end. After it, Ctrl-C ends the process at once. SIGTERM does not,
    because a cluster's scheduler and torchrun both send one."""

    def __init__(self):
        self.signalled = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle)

    def handle(self, number, frame):
        if not self.signalled:
            say("\nStopping after this step, with a checkpoint. Ctrl-C again leaves at once.")
        self.signalled = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def requested(self):
        """Has any rank received a signal? All ranks must end after the same step."""
        return ranks.any_rank(self.signalled)
