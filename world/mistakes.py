"""Mistake: what a user did wrong, as one sentence that says what to do.

solve.py and train.py print it and exit with an error. Every other exception keeps its traceback: it
is a bug, in this code or in a fork's."""


class Mistake(ValueError):
    """One sentence for the user: what is wrong with a flag, a file or a folder, and what to do."""
