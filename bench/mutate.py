"""Change the code in one place at a time, and see which test notices: a mutant that every test lets pass survives.

    python bench/mutate.py flow_grpo planner executor verifier generator     what must have no survivor
    python bench/mutate.py flow_grpo.loss flow_grpo.split                    only these functions
    python bench/mutate.py train --limit 50 --seed 1 --jobs 2                50 of its mutants, drawn by chance

The changes are made on the syntax tree, so no source line is quoted and neither formatting nor renaming breaks anything: another
comparison or operator, a dropped term, condition, argument, element, method, statement or context, swapped arguments, numbers one
more and one less, emptied strings. Not changed, by rule:

    texts for people     what is raised or warned, docstrings, the fixed parts of f-strings
    settings             NAME = number at the top of a file: the tests check that it is obeyed, not what it is
    devices              .to(device), .cpu(), device=: the tests run on a CPU, and a GPU refuses at once what was not moved
    annotations, imports

The working tree is never touched: each job has a copy in a temporary folder. What the tests import is imported once; each mutant is
then a fork of this process that runs pytest in the copy, the tests that killed most mutants first, until one fails or time is up.

EQUIVALENT lists the mutants that no test can kill, each with the reason. Exit code 1 if any other survives.
"""
import argparse
import ast
import collections
import contextlib
import copy
import gc
import importlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import tqdm

ROOT = Path(__file__).resolve().parents[1]

# file -> the functions to change (None: all of them) and the tests that should notice, as arguments of pytest
TARGETS = {
    "flow_grpo": (None, ["tests/test_flow_grpo.py", "-k", "not mutant"]),
    "planner": (None, ["tests/test_modules.py"]),
    "executor": (None, ["tests/test_modules.py", "tests/test_solve.py"]),
    "verifier": (None, ["tests/test_modules.py"]),
    "generator": (None, ["tests/test_modules.py"]),
    "flow": (["rollout", "act", "ask"], ["tests/test_solve.py", "tests/test_server.py"]),
    "train": (["marked_rollouts", "train_step", "questions_of", "train", "settle", "resumed"], ["tests/test_train.py"]),
    "checkpoint": (None, ["tests/test_train.py"]),
    "lora": (None, ["tests/test_train.py", "-k", "adapter or lora or dither"]),
}

ONE = "the ratio of the first mini-batch is exactly 1"
WORK = "saves work only: "
# file, function, change, and why no test can show it
EQUIVALENT = [
    ("flow_grpo", "token_logps", "again = dict(use_reentrant=False[, preserve_rng_state=False -> ])", WORK + "nothing is random"),
    ("flow_grpo", "token_logps", " = dict(use_reentrant=False, preserve_rng_state=[False -> True])", WORK + "nothing is random"),
    ("flow_grpo", "token_logps", " CHUNK // out.logits.shape[[- -> ]1])", "of two dimensions the last is 1"),
    ("flow_grpo", "log_probs", ".float() / temperature).log_softmax([- -> ]1)", "of two dimensions the last is 1"),
    ("flow_grpo", "update", " A[a.flow]], *counts[.tolist() -> ]))", "tensors of one number count as the number does"),
    ("flow_grpo", "update", "]) and norms[-1] <[ -> =] EXPLODED * max_grad_norm):", "a norm exactly at the limit"),
    ("flow_grpo", "update", "(ratio - 1).abs().[max -> min]().item())", ONE),
    ("flow_grpo", "update", "first = first if k else [max(first, (ratio - 1).abs().max().item()) -> first]", ONE),
    ("flow_grpo", "update", "(first, (ratio - 1).[abs(). -> ]max().item())", ONE),
    ("planner", "named_tool", "return named[[0 -> -1]] if [first] ", "the list has one element"),
    ("planner", "named_tool", "if re.search(f'\\\\b{[re.escape(name) -> name]}\\\\b', field", "the name of a tool is an identifier"),
]

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
             ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift}
OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any"}
SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return, ast.Continue, ast.Break, ast.Raise, ast.Assert, ast.Delete)


def like(node, **changes):
    new = copy.copy(node)
    vars(new).update(changes)
    return new


def without(node, field):
    """The node with one element of the list in this field left out, for each of them."""
    elements = getattr(node, field)
    return [like(node, **{field: elements[:i] + elements[i + 1 :]}) for i in range(len(elements))]


def changes(node, field, modules):
    """What may stand in the place of this node, which is in this field of its parent."""
    if field in ("test", "ifs"):
        yield from (ast.Constant(False), ast.Constant(True))
    match node:
        case ast.Compare():
            for i, old in enumerate(node.ops):
                yield from (like(node, ops=node.ops[:i] + [new()] + node.ops[i + 1 :]) for new in COMPARISONS[type(old)])
        case ast.BinOp(left, op, right):
            yield from (left, right, like(node, op=OPERATORS[type(op)]()))
            if isinstance(left, ast.Call) and isinstance(left.func, ast.Attribute):  # x.float() / y -> (x / y).float()
                yield like(left, func=like(left.func, value=like(node, left=left.func.value)))
        case ast.BoolOp(op, values):
            yield like(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            yield from without(node, "values") if len(values) > 2 else values
        case ast.UnaryOp():
            yield node.operand
        case ast.IfExp():
            yield from (node.body, node.orelse)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(str() as value):
            yield ast.Constant("" if value else "x")
        case ast.Slice():
            yield from (like(node, **{end: None}) for end in ("lower", "upper", "step") if getattr(node, end))
        case ast.Call(func, arguments):
            yield from (new for new, old in zip(without(node, "keywords"), node.keywords) if old.arg != "device")
            if len(arguments) > 1 and getattr(func, "attr", getattr(func, "id", "")) not in OPPOSITE:
                yield like(node, args=[arguments[1], arguments[0], *arguments[2:]])
            match func:
                case ast.Name(name) if name in OPPOSITE:
                    yield from (like(node, func=ast.Name(OPPOSITE[name])), *arguments)
                case ast.Attribute(value, name) if name in OPPOSITE:
                    yield like(node, func=ast.Attribute(value, OPPOSITE[name]))
            if isinstance(func, ast.Attribute) and getattr(func.value, "id", "") not in modules:
                if not re.search(r"\.to\(.*device|\.cpu\(\)$", ast.unparse(node)[len(ast.unparse(func.value)) :]):
                    yield func.value
            elif arguments and not isinstance(arguments[0], ast.Starred):
                yield arguments[0]
        case ast.List(ctx=ast.Load()) | ast.Tuple(ctx=ast.Load()) | ast.Set():
            yield from without(node, "elts")
        case ast.Dict(keys, values):
            yield from (ast.Dict(keys[:i] + keys[i + 1 :], values[:i] + values[i + 1 :]) for i in range(len(keys)))
        case ast.With(items, body) if not any(item.optional_vars for item in items):
            yield from without(node, "items") if len(items) > 1 else [ast.If(ast.Constant(True), body, [])]
        case ast.Try(body, handlers, _, finalbody):
            yield from without(node, "handlers") if len(handlers) > 1 or finalbody else [ast.If(ast.Constant(True), body, [])]
        case ast.FunctionDef() | ast.ClassDef():
            yield from without(node, "decorator_list")
        case _ if isinstance(node, SIMPLE):
            yield ast.Pass()


def places(parent, function="", statement=None):
    """Every node that may be changed: (its parent, the field and, in a list, the position there, node, function, statement)."""
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "msg", "format_spec", "exc", "cause"):
            continue
        for i, node in enumerate(value if isinstance(value, list) else [value]):
            fixed_text = isinstance(parent, ast.JoinedStr) and isinstance(node, ast.Constant)
            setting = isinstance(parent, ast.Module) and isinstance(node, ast.Assign) and not re.search("[a-z'\"]", ast.unparse(node.value))
            match node:
                case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant()):
                    continue
                case ast.AST() if not fixed_text and not setting:
                    inner = f"{function}.{node.name}".strip(".") if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else function
                    shown = node if isinstance(node, ast.stmt) else statement
                    yield parent, field, i if isinstance(value, list) else None, node, inner, shown
                    if not ast.unparse(node).startswith("warnings.warn("):
                        yield from places(node, inner, shown)


def difference(old, new):
    """What changed between two texts, with a few words around it: one line that says the same however the file is laid out."""
    old, new = (re.findall(r"\d[\d.e-]*|\w+|\s+|.", text) for text in (old, new))
    head = len(os.path.commonprefix([old, new]))
    tail = len(os.path.commonprefix([old[head:][::-1], new[head:][::-1]]))
    word = lambda tokens: re.sub(r"\s+", " ", "".join(tokens))
    middle = [word(text[head : len(text) - tail]) for text in (old, new)]
    return f"{word(old[max(0, head - 12) : head])}[{middle[0]} -> {middle[1]}]{word(old[len(old) - tail :][:8])}"


def mutants(source, functions=()):
    """[(line, function, what was changed, the changed source)], each change once; functions: names, inner functions included."""
    tree, found = ast.parse(source), {}
    modules = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    texts = [ast.unparse(node) for node in tree.body]                       # only the one that is changed is written anew
    for parent, field, i, node, function, statement in list(places(tree)):
        top = i if parent is tree else top
        if functions and not any(f"{function}.".startswith(f"{name}.") for name in functions):
            continue
        siblings, before = getattr(parent, field), ast.unparse(statement)
        for new in changes(node, field, modules):
            setattr(parent, field, new if i is None else siblings[:i] + [new] + siblings[i + 1 :])
            text, after = ast.unparse(tree.body[top]), ast.unparse(new if node is statement else statement)
            setattr(parent, field, siblings)
            with contextlib.suppress(SyntaxError, ValueError):
                compile(text, "mutant", "exec")
                if text != texts[top]:
                    source = "\n".join(texts[:top] + [text] + texts[top + 1 :])
                    found.setdefault(source, (getattr(node, "lineno", statement.lineno), function, difference(before, after), source))
    return list(found.values())


class Notice:
    """A pytest plugin: the tests that have killed most come first; the first that fails is written down."""

    def __init__(self, note, killers):
        self.note, self.killers = note, killers

    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: -self.killers[item.nodeid])

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.note.write_text(report.nodeid)


def test(folder, file, source, tests, killers):
    """In a fork: put the source into the copy and run the tests -> never returns; the exit code is pytest's."""
    os.setsid()                                                             # so that its subprocesses end with it
    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30,) * 2)
    os.chdir(folder)
    sys.path[0] = str(folder)
    os.dup2(os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    sys.dont_write_bytecode = (folder / "modules").exists()                 # only the first run, without a mutation, writes some
    Path(file).write_text(source)
    import pytest
    import torch
    torch.set_num_threads(1)
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp", *tests], [Notice(folder / "killed_by", killers)])
    if code == 0 and not (folder / "modules").exists():
        (folder / "modules").write_text("\n".join(name for name, module in sys.modules.items()
                                                  if str(folder) not in str(getattr(module, "__file__", None) or folder)))
    os._exit(code)


def run(todo, file, tests, folders, limit, killers):
    """Test the mutants, as many at a time as there are folders: yields (mutant, exit code or None for "time is up", who killed it)."""
    todo, free, running = list(todo)[::-1], list(folders), {}
    try:
        while todo or running:
            while todo and free:
                mutant, folder = todo.pop(), free.pop()
                (folder / "killed_by").write_text("")
                if not (pid := os.fork()):
                    test(folder, file, mutant[-1], tests, killers)
                running[pid] = mutant, folder, time.monotonic()
            for pid, (mutant, folder, start) in list(running.items()):
                late = time.monotonic() - start > limit
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended or late:
                    end(pid, ended)
                    free.append(running.pop(pid)[1])
                    yield mutant, None if not ended else os.waitstatus_to_exitcode(status), (folder / "killed_by").read_text()
            time.sleep(0.02)
    finally:                                                                # Ctrl-C
        for pid in running:
            end(pid, False)


def end(pid, ended):
    """Whatever a fork has left running, itself included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)


def survivors(target, args):
    """Mutate one target and print what came of it -> its row of the table, the mutants that survived."""
    name, _, function = target.partition(".")
    functions, tests = TARGETS[name]
    source, start, killers, table = (ROOT / f"{name}.py").read_text(), time.monotonic(), collections.Counter(), collections.Counter()
    found = mutants(source, [function] if function else functions or ())
    equivalent = {row[1:3]: row[3] for row in EQUIVALENT if row[0] == name}
    for why in [what for what in equivalent if what not in {mutant[1:3] for mutant in found}] if not function else []:
        print(f"EQUIVALENT has a row that no mutant has: {name}.{' '.join(why)}")
    todo = [mutant for mutant in found if mutant[1:3] not in equivalent]
    table.update(mutants=len(found), equivalent=len(found) - len(todo))
    todo = random.Random(args.seed).sample(todo, min(args.limit or len(todo), len(todo)))
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / str(k) for k in range(args.jobs)]
        whole = [(0, "", "nothing", ast.unparse(ast.parse(source)))]

        def check(folder):
            """The tests pass in this copy without a mutation -> how long they take."""
            begun = time.monotonic()
            for _, code, killer in run(whole, f"{name}.py", tests, [folder], 600, killers):
                if code != 0:
                    raise SystemExit(f"The tests fail without a mutation ({killer}):\n{(folder / 'output').read_text()[-2000:]}")
            return time.monotonic() - begun
        shutil.copytree(ROOT, folders[0], symlinks=True,
                        ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".pytest_cache"))
        limit = 10 + 2 * check(folders[0])
        for stale in folders[0].glob(f"__pycache__/{name}.*"):
            stale.unlink()
        for folder in folders[1:]:
            shutil.copytree(folders[0], folder, symlinks=True)              # the compiled files, too
        for module in (folders[0] / "modules").read_text().split():         # imported once, here, for all forks to come
            with contextlib.suppress(ImportError, AttributeError):
                importlib.import_module(module)
        gc.freeze()                                                         # or every fork collects what all of them share
        left = []
        with tqdm.tqdm(total=len(todo), desc=target) as bar:
            for mutant, code, killer in run(todo, f"{name}.py", tests, folders, limit, killers):
                killers[killer] += 1
                result = "timed out" if code is None else "killed" if code else "survived"
                table[result] += 1
                bar.update()
                if result == "survived":
                    left.append(mutant)
                if result == "survived" or args.verbose:
                    bar.write(f"{name}.py:{mutant[0]} {mutant[1]}: {mutant[2]}  {result} {killer}")
        for folder in folders:
            check(folder)                                                   # a mutant may have damaged its copy
    return table | {"seconds": round(time.monotonic() - start)}, left


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("targets", nargs="*", default=["flow_grpo", "planner", "executor", "verifier", "generator"],
                        help=f"FILE or FILE.FUNCTION: {', '.join(TARGETS)}")
    parser.add_argument("--limit", type=int, help="mutants of each target, drawn by chance; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--verbose", action="store_true", help="print the killed ones, too, and by which test")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    rows = {target: survivors(target, args) for target in args.targets}
    columns = ("mutants", "killed", "timed out", "equivalent", "survived", "seconds")
    print(f"{'':20s}" + "".join(f"{column:>12s}" for column in columns))
    for target, (table, _) in rows.items():
        print(f"{target:20s}" + "".join(f"{table[column]:12d}" for column in columns))
    sys.exit(any(left for _, left in rows.values()))


if __name__ == "__main__":
    main()
