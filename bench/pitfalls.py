"""Put known faults of public implementations into a copy of this code, one at a time: which test notices?

    python bench/pitfalls.py              all of them, a few minutes
    python bench/pitfalls.py 7 17         only these

These faults replace or drop an idea. tests/test_flow_grpo.py also changes the formula in every single place
(in .ci/run).

Each row is a fault: its number and name, the code as it is and as it would be with the fault, and words of
the name of the test that must fail. Code and test are looked for in all files. A fault whose code or test is
not found, or that no test notices, makes the exit code 1.
"""

import argparse
import functools
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "__pycache__")
NO_SOURCES = {"tests", "bench", "experiments", "runs", ".venv"}

FAULTS = [
    (1, "groups by the text of a question",
     "A, flat = advantages(rewards, groups)",
     "A, flat = advantages(rewards, [hash(rollout.question.question) for rollout in usable])",
     "two_equal_questions_in_a_batch"),
    (2, "one memory for all questions",
     "rollouts = [Rollout(question, Memory(question.question)) for question in questions]",
     "one = Memory(questions[0].question); rollouts = [Rollout(question, one) for question in questions]",
     "memory_of_its_own"),
    (3, "scored without the sampling temperature",
     "logps = (logits.float() / temperature).log_softmax(-1)", "logps = logits.float().log_softmax(-1)",
     "divided_by_the_temperature"),
    (4, "text instead of ids",
     "c.ids, c.text, c.logps = ids, self.chat.decode",
     "c.ids, c.text, c.logps = self.tokenizer.encode(self.chat.decode(ids)), self.chat.decode",
     "what_was_sampled"),
    (5, "the stop token is no action",
     "c.ids, c.text, c.logps = ids, self.chat.decode", "c.ids, c.text, c.logps = ids[:-1], self.chat.decode",
     "each_stop_token_is_an_action"),
    (6, "in-place writes into what is shared",
     "return torch.tensor(values).repeat_interleave(torch.tensor([len(a.ids) for a in actions]))",
     "[a.ids.append(0) for a in actions]; "
     "return torch.tensor(values).repeat_interleave(torch.tensor([len(a.ids) for a in actions]))",
     "changes_none_of_its_inputs"),
    (7, "micro-batch means averaged",
     "weight   = per_token(micro, [a.weight for a in micro])",
     "weight   = per_token(micro, [1 / sum(len(b.ids) for b in micro) for a in micro])",
     "micro_batches_does_not_change"),
    (10, "a flat group is not counted",
     "flat += 1", "flat += 0",
     "flat_group_and_a_lonely_rollout"),
    (11, "a failure counts as a wrong answer",
     "if not rollout.failed and not rollout.undecided]", "]",
     "without_an_outcome"),
    (12, "the reward is lost on its way",
     "sum(rollout.reward for rollout in usable) / max(1, len(usable))", "0.0",
     "two_equal_questions_in_a_batch"),
    (13, "the loss as the headline",
     "| reward {row['reward']:.2f}", "| loss {row['loss']:.2f}",
     "never_times_or_the_loss"),
    (14, "the model's text is evaluated",
     "literals = [(name, ast.literal_eval(value)) for name, value in pairs]",
     "literals = [(name, eval(ast.unparse(value))) for name, value in pairs]",
     "never_evaluated"),
    (15, "the code runs twice",
     'exec(compile(tree, "<code>", "exec"), main.__dict__)',
     'for _ in "12": exec(compile(tree, "<code>", "exec"), main.__dict__)',
     "runs_once"),
    (16, "a tool's exception is swallowed",
     'text = f"Error: {name} failed: {type(why).__name__}: {why}"', 'text = "Nothing was found."',
     "not_swallowed"),
    (17, '"we should not stop" reads as STOP',
     'return text.strip(MARKS).upper() == "STOP"',
     'return "STOP" in text.upper()',
     "only_a_plain_stop"),
    (17, "a list number leaks into the field before",
     r'START = r"^(?:[ \t*#>_`-]|\d+[.)])*"', r'START = r"[*_`]*"',
     "a_plan_is_read_in_the_dressing"),
    (18, "results of any length in the prompts",
     'return Result(truncate(text, RESULT_BUDGET), text', "return Result(text, text",
     "a_result_is_cut_to_the_budget"),
    (23, "crashed items leave the denominator",
     "sum(rollout.right for rollout in rollouts) / len(rollouts)",
     "sum(rollout.right for rollout in rollouts) / max(1, sum(not rollout.failed for rollout in rollouts))",
     "denominator"),
    (24, "items keyed by a doubled id",
     "return questions[:number]",
     "return list({question.id: question for question in questions}.values())[:number]",
     "every_pid_twice"),
    (25, "a fallback option",
     "return named.pop() if len(named) == 1 else None", "return named.pop() if len(named) == 1 else 0",
     "none_is_a_fallback"),
    (26, "the model's expression is evaluated",
     "value_of(expression) == 24", "eval(text) == 24",
     "game_of_24_takes_one_expression"),
    (28, "turns dropped to make a batch even",
     "return [rollouts[n] for n in numbers], [n // group_size for n in numbers]",
     "numbers = numbers[: len(numbers) // 2 * 2]; "
     "return [rollouts[n] for n in numbers], [n // group_size for n in numbers]",
     "without_an_outcome"),
    (29, "groups by an id of each rollout",
     "[n // group_size for n in numbers]", "list(numbers)",
     "two_equal_questions_in_a_batch"),
]


@functools.cache
def sources():
    """{file: its text} of all code that a fault may be put into."""
    paths = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in NO_SOURCES]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}


def files_with(code):
    """The files that have this code once, to the letter."""
    return [path for path, text in sources().items() if text.count(code) == 1]


def try_fault(name, old, new, test):
    """Run the test on a copy with the fault in it: "caught by ..." if it fails, as it must."""
    defined, found = re.compile(rf"def test_\w*{test}"), files_with(old)
    files = [path for path in (ROOT / "tests").glob("test_*.py") if defined.search(path.read_text())]
    if len(found) != 1 or not files:
        return f"NOT TRIED: the code is in {len(found)} files, the test in {len(files)}"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        (copy / found[0]).write_text(sources()[found[0]].replace(old, new), encoding="utf-8")
        options = ["-q", "-p", "no:cacheprovider", "-k", test, *(path.relative_to(ROOT) for path in files)]
        try:
            command = [sys.executable, "-m", "pytest", *options]
            result = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:  # with eval put in, "9**9**9" is computed
            return f"caught: -k {test} does not end"
    failed = re.findall(r"(?m)^FAILED (\S+)", result.stdout)
    if result.returncode == 1 and failed:
        return f"caught by {len(failed)}, such as {failed[0]}"
    return f"NOT CAUGHT (pytest: {result.returncode})"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="only these faults; default: all")
    args, missed = parser.parse_args(), 0
    for number, *fault in FAULTS:
        if not args.numbers or number in args.numbers:
            outcome = try_fault(*fault)
            missed += not outcome.startswith("caught")
            print(f"{number:2d}  {fault[0]:48s} {outcome}", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
