"""Change the code in one place at a time, and see which test notices: what passes all tests survives.

    python bench/mutate.py                                         flow_grpo and the parsers: no survivor
    python bench/mutate.py flow_grpo.loss flow_grpo.split          only these functions
    python bench/mutate.py train --limit 50 --seed 1 --jobs 2      50 of its mutants, drawn by chance
    python bench/mutate.py logbook/checkpoints                     a file of a room

The changes are made on the syntax tree, so no source line is quoted and neither layout nor new names break
anything: another comparison or operator, a dropped term, condition, argument, element, method, statement or
context, swapped arguments, numbers one more and one less, emptied strings. Not changed, by rule:

    texts for people     what is raised or warned, docstrings, the fixed parts of f-strings
    settings             NAME = number at the top of a file: tests check that it is obeyed, not what it is
    devices              .to(device), .cpu(), device=: tests run on a CPU; a GPU refuses what was not moved
    annotations, imports, the text of regular expressions (which is emptied, but not changed)

The working tree is never touched: each job has a copy in a temporary folder. What the tests import is
imported once; each mutant is then a fork of this process, which runs pytest in the copy, the most successful
tests first, until one fails or time is up. That kills the mutant, too.

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
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".pytest_cache")
PARSERS = ["planner", "executor", "verifier", "generator", "models/dressing"]

# file -> the functions to change (all of them if there is none) and the tests that should notice
MODULES = ["tests/test_modules.py", "tests/test_thinking.py"]
TRAIN = ["tests/test_train.py"]
UPDATE = ["tests/test_flow_grpo.py", "tests/test_trees.py", "-k", "not mutant"]
TARGETS = {
    "flow_grpo": ([], UPDATE),
    "scale/passes": ([], [*UPDATE, "tests/test_sharding.py"]),
    "scale/report": ([], UPDATE),
    "models/batches": ([], [*UPDATE, "tests/test_sharding.py"]),
    "planner": ([], MODULES),
    "executor": ([], MODULES),
    "verifier": ([], MODULES),
    "generator": ([], MODULES),
    "models/dressing": ([], MODULES),
    "tools": (["run_calls", "is_query", "answer_queries", "run_call", "run_tool"],
              ["tests/test_tools.py", "tests/test_solve.py"]),
    "solve": (["roll_out", "Team", "prompt_of", "call_engine"],
              ["tests/test_solve.py", "tests/test_server.py"]),
    "train": (["train", "questions_of", "graded_rollouts", "with_outcome", "can_learn",
               "evaluate_before"],
              TRAIN),
    "cli/command_line": (["settle_train", "resumed", "settle_engines"],
                         ["tests/test_command_line.py", *TRAIN]),
    "logbook/run": ([], TRAIN),
    "logbook/checkpoints": ([], TRAIN),
    "scale/adapters": ([], [*TRAIN, "-k", "adapter or lora"]),
}

# (file, function): {change: why no test can show it}
LAST, ONE = "of two dimensions the last is 1", "the first ratio is exactly 1"
NUMBER, SINGLE = "a tensor of one number counts as the number does", "the list has one element"
CACHE = "a cache that nobody reads costs memory alone"
IDENTIFIER, THREADS = "the name of a tool is an identifier", "another number of threads"
EQUIVALENT = {
    ("flow_grpo", "split"): {
        "=torch.Generator().manual_seed(seed))[.tolist() -> ]": NUMBER,
    },
    ("flow_grpo", "token_logps"): {
        "logits = model(x[, use_cache=False -> ]).logits": CACHE,
        "logits = model(x, use_cache=[False -> True]).logits": CACHE,
    },
    ("flow_grpo", "log_probs"): {
        ".float() / temperature).log_softmax([- -> ]1)": LAST,
        "return logps.gather([- -> ]1, y[:, ": LAST,
        " y[:, None]).squeeze([- -> ]1)": LAST,
    },
    ("flow_grpo", "update"): {
        "math.isfinite(loss_value) and norm <[ -> =] EXPLODED * max_grad_norm)":
            "a norm exactly at the limit",
        ".clip_grad_norm_(model.parameters(), max_grad_norm)[.item() -> ]": NUMBER,
    },
    ("scale/report", "measure"): {
        " (low, high) = (logp[.detach() -> ], clip)": "the same numbers; backward() is through already",
        ".stack([kl * weight, clipped[.float() -> ], -logp, torch.": "torch.stack makes it a float",
        "(), sums, ratio.min()[.item() -> ], ratio.max().": NUMBER,
        ").item(), ratio.max()[.item() -> ], gap.item())": NUMBER,
        "ratio.max().item(), gap[.item() -> ])": NUMBER,
    },
    ("scale/report", "Report.summary"): {
        ", nodes, unshared = self.sums[.tolist() -> ]": NUMBER,
    },
    ("scale/report", "Report.add_up"): {
        "[self.first = max(self.first, abs(low - 1), abs(high - 1)) -> pass]": ONE,
        "self.first = [max -> min](self.first, abs(": ONE,
        "self.first = [max(self.first, abs(low - 1), abs(high - 1)) -> self.first]": ONE,
        "self.first = [max(self.first, abs(low - 1), abs(high - 1) -> abs(low - 1])": ONE,
        "self.first = [max(self.first, abs(low - 1), abs(high - 1) -> abs(high - 1])": ONE,
        ".first = max(self.first, [abs(low - 1) -> low - 1], abs(high - ": ONE,
        "if [not self.losses -> False]: self.first = ": ONE,
        ", abs(low - 1), [abs(high - 1) -> high - 1])": ONE,
        "self.losses.append(total[.item() -> ])": NUMBER,
    },
    ("verifier", "parse"): {
        "text = after_thinking(text) or '[ -> x]'": "neither is a conclusion",
    },
    ("models/dressing", "plain_name"): {
        "return named[[0 -> -1]] if [first] ": SINGLE,
        "if re.search(f'\\\\b{[re.escape(name) -> name]}\\\\b', field": IDENTIFIER,
    },
    ("models/dressing", "labelled"): {
        "return [list(zip(parts[1::2], values) -> zip(parts[1::2], values])": "it is read once",
    },
    ("models/dressing", "unwrapped"): {
        "if re.search(SECOND_CALL.format(name=[re.escape(name) -> name]), outside, re.": IDENTIFIER,
    },
    ("executor", "parse"): {
        "called, arguments = read(source, [list(tool.arguments) -> tool.arguments])": "a dict does as well",
    },
    ("executor", "read_python"): {
        "call = body[[0 -> -1]].value": SINGLE,
        "= 1 or not isinstance(body[[0 -> -1]], ast.Expr) ": SINGLE,
        "Expr) or (not isinstance(body[[0 -> -1]].value, ast.Call": SINGLE,
    },
    ("tools", "run_calls"): {
        "pool = ThreadPoolExecutor(max_workers=[8 -> 9])": THREADS,
        "pool = ThreadPoolExecutor(max_workers=[8 -> 7])": THREADS,
        "pool = ThreadPoolExecutor([max_workers=8 -> ])": THREADS,
    },
}

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
}
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}
OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any"}
SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return, ast.Continue, ast.Break, ast.Raise,
          ast.Assert, ast.Delete)


def like(node, **changes):
    new = copy.copy(node)
    vars(new).update(changes)
    return new


def without(node, field):
    """The node without one element of the list in this field, for each of them."""
    elements = getattr(node, field)
    return [like(node, **{field: elements[:i] + elements[i + 1 :]}) for i in range(len(elements))]


def changes(node, field, modules):
    """What may replace this node, which is in this field of its parent."""
    if field in ("test", "ifs"):
        yield from (ast.Constant(False), ast.Constant(True))
    match node:
        case ast.Compare(_, ops):
            for i, old in enumerate(ops):
                for new in COMPARISONS[type(old)]:
                    yield like(node, ops=ops[:i] + [new()] + ops[i + 1 :])
        case ast.BinOp(left, op, right):
            yield from (left, right, like(node, op=OPERATORS[type(op)]()))
            if isinstance(left, ast.Call) and isinstance(left.func, ast.Attribute):
                # x.f() / y -> (x / y).f()
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
        case ast.Call(func, arguments, keywords):
            name, method = getattr(func, "attr", getattr(func, "id", "")), isinstance(func, ast.Attribute)
            yield from (new for new, old in zip(without(node, "keywords"), keywords) if old.arg != "device")
            if name in OPPOSITE:
                yield like(node, func=like(func, **{"attr" if method else "id": OPPOSITE[name]}))
                yield from arguments
            elif len(arguments) > 1:
                yield like(node, args=[arguments[1], arguments[0], *arguments[2:]])
            if method and getattr(func.value, "id", "") not in modules:
                if name not in ("to", "cpu") or arguments and "device" not in ast.unparse(arguments[0]):
                    yield func.value
            elif arguments and not isinstance(arguments[0], ast.Starred):
                yield arguments[0]
        case ast.List(ctx=ast.Load()) | ast.Tuple(ctx=ast.Load()) | ast.Set():
            yield from without(node, "elts")
        case ast.Dict(keys, values):
            for i in range(len(keys)):
                yield ast.Dict(keys[:i] + keys[i + 1 :], values[:i] + values[i + 1 :])
        case ast.With(items, body) if not any(item.optional_vars for item in items):
            yield from without(node, "items") if len(items) > 1 else [ast.If(ast.Constant(True), body, [])]
        case ast.Try(body, handlers, _, final):
            alone = len(handlers) == 1 and not final
            yield from [ast.If(ast.Constant(True), body, [])] if alone else without(node, "handlers")
        case ast.FunctionDef() | ast.ClassDef():
            yield from without(node, "decorator_list")
        case _ if isinstance(node, SIMPLE):
            yield ast.Pass()


def fixed(parent, node):
    """Is this an import, a docstring, a piece of an f-string, or a setting?"""
    if isinstance(parent, ast.Module) and isinstance(node, ast.Assign):
        return not re.search("[a-z'\"]", ast.unparse(node.value))
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant()):
            return True
        case ast.Constant():
            return isinstance(parent, ast.JoinedStr)
    return not isinstance(node, ast.AST)


def places(parent, function="", statement=None):
    """What may be changed: (parent, field, position if the field is a list, node, function, statement)."""
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "msg", "format_spec", "exc", "cause"):
            continue
        for i, node in enumerate(value if isinstance(value, list) else [value]):
            if fixed(parent, node):
                continue
            named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            inner = f"{function}.{node.name}".strip(".") if named else function
            around = node if isinstance(node, ast.stmt) else statement
            yield parent, field, i if isinstance(value, list) else None, node, inner, around
            if not ast.unparse(node).startswith("warnings.warn("):
                yield from places(node, inner, around)


def difference(old, new):
    """What changed between two texts, with a few words around it, in one line whatever the layout."""
    old, new = (re.findall(r"\d[\d.e-]*|\w+|\s+|.", text) for text in (old, new))
    head = len(os.path.commonprefix([old, new]))
    tail = len(os.path.commonprefix([old[head:][::-1], new[head:][::-1]]))
    before, after = (text[head : len(text) - tail] for text in (old, new))
    parts = [old[max(0, head - 12) : head], ["["], before, [" -> "], after, ["]"], old[len(old) - tail :][:8]]
    return re.sub(r"\s+", " ", "".join(sum(parts, [])))


def mutants(source, functions=()):
    """[(line, function, change, changed source)], each change once; functions: with those inside them."""
    tree, found, top = ast.parse(source), {}, 0
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    modules = {alias.asname or alias.name for node in imports for alias in node.names}
    texts = [ast.unparse(node) for node in tree.body]               # only the changed one is written anew
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
                    changed = "\n".join(texts[:top] + [text] + texts[top + 1 :])
                    line = getattr(node, "lineno", statement.lineno)
                    found.setdefault(changed, (line, function, difference(before, after), changed))
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
    """In a fork: put the source into the copy and run the tests. Never returns; the exit code is pytest's."""
    os.setsid()                                                     # its subprocesses end with it
    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30,) * 2)
    os.chdir(folder)
    sys.path[0] = str(folder)
    os.dup2(os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    sys.dont_write_bytecode = Path("modules").exists()              # the first run, without a mutation, does
    Path(file).write_text(source)
    import pytest
    import torch
    torch.set_num_threads(1)
    options = ["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp"]
    code = pytest.main([*options, *tests], [Notice(folder / "killed_by", killers)])
    files = {name: str(getattr(module, "__file__", None) or folder) for name, module in sys.modules.items()}
    (folder / "modules").write_text("\n".join(name for name in files if str(folder) not in files[name]))
    os._exit(code)


def run(todo, file, tests, folders, limit, killers):
    """Test the mutants, one at a time in each folder: yields (mutant, exit code or None, killer)."""
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
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended or time.monotonic() - start > limit:
                    end(pid, ended)
                    free.append(running.pop(pid)[1])
                    killer = (folder / "killed_by").read_text()
                    yield mutant, os.waitstatus_to_exitcode(status) if ended else None, killer
            time.sleep(0.02)
    finally:                                                        # Ctrl-C
        for pid in running:
            end(pid, False)


def end(pid, ended):
    """End whatever a fork has left running, itself included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)


def check(folder, file, tests):
    """The tests must pass in this copy without a mutation -> the seconds they take."""
    start, whole = time.monotonic(), [(ast.unparse(ast.parse((ROOT / file).read_text())),)]
    for _, code, killer in run(whole, file, tests, [folder], 900, collections.Counter()):
        if code != 0:
            output = (folder / "output").read_text()[-2000:]
            raise SystemExit(f"The tests fail without a mutation ({killer}):\n{output}")
    return time.monotonic() - start


def survivors(target, args):
    """Mutate one target, print what survives -> its row of the table."""
    name, _, function = target.partition(".")
    (functions, tests), file, start = TARGETS[name], f"{name}.py", time.monotonic()
    killers, table = collections.Counter(), collections.Counter()
    found = mutants((ROOT / file).read_text(), [function] if function else functions)
    equivalent = {(place, change) for (module, place), changes in EQUIVALENT.items() if module == name
                  for change in changes}
    for row in equivalent - {mutant[1:3] for mutant in found} if not function else ():
        print(f"EQUIVALENT has a row that no mutant has: {name} {row}")
    todo = [mutant for mutant in found if mutant[1:3] not in equivalent]
    table.update(mutants=len(found), equivalent=len(found) - len(todo))
    todo = random.Random(args.seed).sample(todo, min(args.limit or len(todo), len(todo)))
    with tempfile.TemporaryDirectory() as place, tqdm.tqdm(total=len(todo), desc=target) as bar:
        folders = [Path(place) / str(k) for k in range(args.jobs)]
        shutil.copytree(ROOT, folders[0], symlinks=True, ignore=LEFT_OUT)
        limit = 10 + 2 * check(folders[0], file, tests)
        for stale in (folders[0] / file).parent.glob(f"__pycache__/{Path(file).stem}.*"):
            stale.unlink()
        for folder in folders[1:]:
            shutil.copytree(folders[0], folder, symlinks=True)      # what is compiled, too
        for module in (folders[0] / "modules").read_text().split():
            with contextlib.suppress(ImportError, AttributeError):
                importlib.import_module(module)                     # once, for all forks
        gc.freeze()                                                 # or each fork searches all of it
        for mutant, code, killer in run(todo, file, tests, folders, limit, killers):
            killers[killer] += 1
            result = "timed out" if code is None else "killed" if code else "survived"
            table[result] += 1
            bar.update()
            if result == "survived" or args.verbose:
                bar.write(f"{file}:{mutant[0]} {mutant[1]}: {mutant[2]}  {result} {killer}")
        for folder in folders:
            check(folder, file, tests)                              # a mutant may have damaged its copy
    table["seconds"] = round(time.monotonic() - start)
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    default = ["flow_grpo", "scale/report", *PARSERS]
    add("targets", nargs="*", default=default, help=f"FILE[.FUNCTION]: {' '.join(TARGETS)}")
    add("--limit", type=int, help="mutants of each target, drawn by chance; default: all")
    add("--seed", type=int, default=0)
    add("--jobs", type=int, default=os.cpu_count())
    add("--verbose", action="store_true", help="print the killed ones, too, and by which test")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    rows = {target: survivors(target, args) for target in args.targets}
    columns = ("mutants", "killed", "timed out", "equivalent", "survived", "seconds")
    print(f"{'':20s}" + "".join(f"{column:>12s}" for column in columns))
    for target, table in rows.items():
        print(f"{target:20s}" + "".join(f"{table[column]:12d}" for column in columns))
    sys.exit(any(table["survived"] for table in rows.values()))


if __name__ == "__main__":
    main()
