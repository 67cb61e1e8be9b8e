"""solve.py --compare A B: which of two planners is better on the same questions.

    python solve.py --compare runs/before runs/after                          two folders that --out wrote
    python solve.py --compare toy runs/toy-seed0/best --data toy/test.jsonl   two models: each answers first

Two folders are compared at once, without torch. For two models, solve.py first runs once for each, with all
other flags. Their answers are kept in two folders below --out, so a comparison that was stopped goes on.

A question without an outcome (failed, undecided) counts as not right, as in every accuracy here. Only whole
trials count, and several trials of a question count as one, by the share that was right. What cannot be
compared (different questions, no answers, nothing graded) is an error of one sentence. rewards/compare.py has
the statistics.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

from logbook.endings import errors_leave
from logbook.folder import folder_name
from logbook.records import read_answers
from models.server import Server
from rewards.compare import lines, shares_right
from world.files import read_object, reading, replace_file
from world.services import is_server
from world.text import printable

SHOWN = 5  # how many questions of each kind are printed; --out keeps all of them
WIDTH = 50  # characters of a question or an answer that are printed
UNSHOWN = {"set of weights", "batch", "data", "limit"}  # of the settings; data and limit: check_questions()


def leave_if_compared(args):
    """With --compare: compare, and end the process."""
    if args.compare:
        with errors_leave("solve.py"):
            if args.data or args.benchmark:
                folders = answer_both(args)
            else:
                check_flags()
                folders = args.compare
            print(*map(printable, compare(folders, args)), sep="\n")
        raise SystemExit


def check_flags():
    """ValueError for a flag that has no effect on two folders: the user may have meant it for the runs."""
    flags = {word.split("=")[0] for word in sys.argv[1:] if word.startswith("--")}
    if wrong := sorted(flags - {"--compare", "--out", "--quiet"}):
        raise ValueError(f"--compare: leave out {wrong[0]}. Two folders of answers take only --out and "
                         "--quiet; two models need --data or --benchmark")


def answer_both(args):
    """The folders with the answers of two models, after both have answered all questions."""
    from models.loading import config_of  # imports torch, which two folders of answers do not need

    args.out = args.out or "runs/compare"
    folders = [Path(args.out, folder_name(model)) for model in args.compare]
    if folders[0] == folders[1]:
        raise ValueError("--compare needs two different models")
    for model in args.compare:  # both, before the first one answers for hours
        Server(model) if is_server(model) else config_of(model)
    at = sys.argv.index("--compare")
    flags = sys.argv[1:at] + sys.argv[at + 3 :]
    for model, folder in zip(args.compare, folders):
        print(f"{model} answers, kept in {folder}", flush=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which says how to go on
        run = [sys.executable, sys.argv[0], *flags, "--model", model, "--out", str(folder), "--quiet"]
        if failed := subprocess.run(run).returncode:
            raise SystemExit(failed)
        print()
    return folders


def compare(folders, args):
    """The lines to print: settings that differ, the comparison of each set, questions that differ."""
    names, sets = args.compare, [read_answers(folder) for folder in folders]
    common = [name for name in sets[0] if name in sets[1]]
    if not common:
        raise ValueError(f"nothing to compare: {names[0]} has answered {', '.join(sets[0])}, "
                         f"and {names[1]} {', '.join(sets[1])}")
    first, second = ({(name, *key): rollouts for name in common for key, rollouts in answers[name].items()}
                     for answers in sets)
    check_questions(first, second, names)
    yield from (f"{letter}  {name}" for letter, name in zip("AB", names))
    settings = [read_settings(folder) for folder in folders]
    yield f"settings that differ, A | B: {'; '.join(different_settings(*settings)) or 'none'}"
    for name in common if len(common) == 1 else [*common, "all"]:
        keys = [key for key in first if name in (key[0], "all")]
        yield f"\n{name}"
        yield from lines([first[key] for key in keys], [second[key] for key in keys])
    yield from show_questions(first, second, args)


# ------------------------------------------------------------------------------------- what can be compared
def check_questions(first, second, names):
    """ValueError if the two have not answered the same questions, or nothing was graded."""
    alone = [key for key in first if key not in second], [key for key in second if key not in first]
    if any(alone):
        raise ValueError(f"different questions cannot be compared: {names[0]} alone has answered "
                         f"{len(alone[0])}, {names[1]} alone {len(alone[1])}. Let both commands finish, with "
                         "the same --limit")
    if not any(gold for _, _, gold, _ in first):
        raise ValueError("nothing to compare: no question has a gold answer, so none was graded")


def read_settings(folder):
    file = Path(folder, "settings.json")
    with reading(file, "remove it, then the answers are compared without the settings"):
        return read_object(file) if file.exists() else {}


def different_settings(first, second):
    """'temperature 0.7 | 0.0' for each setting that differs: it may be the cause, and not the planner."""
    for name in [name for name in first if name in second and name not in UNSHOWN]:
        values = [str(Path(value).resolve()) if isinstance(value, str) and Path(value).exists() else value
                  for value in (first[name], second[name])]
        if values[0] != values[1]:
            yield f"{name} {first[name]} | {second[name]}"


# ---------------------------------------------------------------------------------- questions that differ
def show_questions(first, second, args):
    """Lines with the first questions on which the two differ. With --out, all of them become a file."""
    rows = []
    for key in first:
        pair = first[key], second[key]
        a, b = shares_right(pair)
        if a != b:
            answers = [rollouts[0].answer or rollouts[0].failed for rollouts in pair]  # of the first trial
            rows.append(dict(zip(("set", "question", "gold"), key)) | {"right": [a, b], "answers": answers})
    for name, sign in (("A", 1), ("B", -1)):
        better = [row for row in rows if sign * (row["right"][0] - row["right"][1]) > 0]
        if better and not args.quiet:
            yield f"\n{name} is better on:"
            yield from map(question_line, better[:SHOWN])
            if len(better) > SHOWN:
                hint = "" if args.out else "; --out FOLDER keeps all"
                yield f"    ... and {len(better) - SHOWN} more{hint}"
    if args.out:
        file = Path(args.out, "differences.jsonl")
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, "".join(json.dumps(row) + "\n" for row in rows))
        yield f"\nAll {len(rows)} questions that differ: {file}"


def question_line(row):
    """'    What is 2 + 2? | gold 4 | A 5 | B 4'"""
    parts = zip(("", "gold ", "A ", "B "), (row["question"], row["gold"], *row["answers"]))
    return "    " + " | ".join(f"{label}{clip(text)}" for label, text in parts)


def clip(text):
    """The beginning of a text, as one line that a terminal can show."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."
