"""The first line of solve.py and train.py: what is answered before torch is imported, which takes seconds.

    early.check(__name__, "solve.py")

--help, a mistake in the command line, a missing package, two folders to --compare: the process ends here,
with its answer or one sentence. If the command line can work, the script goes on, and its main() parses it
again. Where the script is imported, and not run, this does nothing.
"""
from importlib import import_module

from logbook import endings


def check(name, script):
    """name: the script's __name__. script: "solve.py" or "train.py"."""
    endings.without_traceback(name)  # first: the imports below need packages that may be missing
    if name != "__main__":
        return
    from cli import command_line, comparing
    from world.toolbox import choose
    parse = {"solve.py": command_line.solve_arguments, "train.py": command_line.train_arguments}[script]
    tools = import_module("tools")  # by its name: the script owns it, and this room only passes it on
    with endings.errors_leave(script):
        args = parse(tools.TOOLS)
        command_line.before_imports(args, choose(tools.TOOLS, args.tools, args.corpus))
    if script == "solve.py":
        comparing.leave_if_compared(args)
