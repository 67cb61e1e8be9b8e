"""Put the known faults of public implementations into a copy of this code, one at a time, and see which test notices.

    python bench/pitfalls.py              all of them, a few minutes
    python bench/pitfalls.py 7 17         only these

Only the faults that replace an idea by another stand here; those that change or drop one thing (a temperature, a check, a step, the
stop token) are among the mutants that bench/mutate.py makes by itself.

Each row is a fault: its number and name, the file, the code as it is and as it would be with the fault, and the tests that must fail
(as pytest's -k names them). Layout, quotes and comments do not matter. A fault whose code is no longer found, or that no test
notices, ends the script with exit code 1.
"""

import ast
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

FAULTS = [
    (1, "group statistics over turns", "train.py",
     "A, flat = advantages([flow.reward for _, flow in kept], [group for group, _ in kept])",
     "A, flat = advantages([flow.reward for _, flow in kept], [flow.question.question for _, flow in kept])",
     "test_train.py", "groups"),
    (2, "one memory for all questions", "flow.py",
     "flows = [Flow(question, Memory(question.question)) for question in questions]",
     "one = Memory(questions[0].question); flows = [Flow(question, one) for question in questions]",
     "test_solve.py", "memory_of_its_own"),
    (4, "text instead of ids", "models/local.py",
     "c.ids, c.text, c.logps = ids,",
     "c.ids, c.text, c.logps = self.tokenizer.encode(self.decode(ids)),",
     "test_models.py", "what_was_sampled"),
    (6, "in-place writes into what is shared", "flow_grpo.py",
     "return torch.tensor([value for a, value in zip(actions, values) for _ in a.ids])",
     "[a.ids.append(a.ids[-1]) for a in actions]; return torch.tensor([value for a, value in zip(actions, values) for _ in a.ids])",
     "test_flow_grpo.py", "changes_none_of_its_inputs"),
    (7, "micro-batch means averaged", "flow_grpo.py",
     "weight   = token_weights(batch, turns, N, tokens if token_mean else None).to(device)",
     "weight   = token_weights(batch, turns, len({a.flow for a in batch}), tokens if token_mean else None).to(device)",
     "test_flow_grpo.py", "micro_batches_does_not_change"),
    (12, "the reward is lost on its way", "train.py",
     "sum(flow.reward for _, flow in kept) / max(1, len(kept))", "0.0",
     "test_train.py", "reward"),
    (13, "the loss as the headline", "train.py",
     "| reward {row['reward']:.2f}", "| loss {row['loss']:.2f}",
     "test_train.py", "never_the_loss"),
    (14, "the model's text is evaluated", "executor.py",
     "{key: ast.literal_eval(value) for key, value in arguments.items()}",
     "{key: eval(ast.unparse(value)) for key, value in arguments.items()}",
     "test_modules.py", "never_evaluated"),
    (15, "the code runs twice", "sandbox.py",
     'exec(compile(tree, "<code>", "exec"), main.__dict__)',
     'exec(compile(tree, "<code>", "exec"), main.__dict__); exec(compile(tree, "<code>", "exec"), main.__dict__)',
     "test_sandbox.py", "runs_once"),
    (16, "a tool's exception is swallowed", "tools.py",
     'result = f"Error: {name} failed: {type(e).__name__}: {e}"', 'result = "Nothing was found."',
     "test_tools.py", "not_swallowed"),
    (17, '"we should not stop" reads as STOP', "verifier.py",
     'return {verdict.strip(MARKS).upper() for verdict in verdicts} == {"STOP"}', 'return "STOP" in verdicts[-1].upper()',
     "test_modules.py", "plain_stop"),
    (17, "a list number leaks into the field before", "planner.py",
     r'DRESSING = r"^(?:[ \t*#>_`-]|\d+[.)])*"', r'DRESSING = r"[*_`]*"',
     "test_modules.py", "however_its_labels"),
    (23, "crashed items leave the denominator", "solve.py",
     "sum(flow.reward for flow in flows) / len(flows)",
     "sum(flow.reward for flow in flows) / max(1, sum(not flow.failed for flow in flows))",
     "test_solve.py", "denominator"),
    (24, "items keyed by a doubled id", "benchmarks/tables.py",
     "return questions[:number]", "return list({question.id: question for question in questions}.values())[:number]",
     "test_benchmarks.py", "pid or id or position"),
    (25, "a fallback option", "rewards/rules.py",
     "return named.pop() if len(named) == 1 else None", "return named.pop() if len(named) == 1 else 0",
     "test_rewards.py", "fallback"),
    (26, "the model's expression is evaluated", "rewards/rules.py",
     "value = value_of(expression)", "value = eval(text)",
     "test_rewards.py", "24"),
    (28, "turns dropped to make a batch even", "train.py",
     "for k, (group, _) in enumerate(kept) if group in own]",
     "for k, (group, _) in enumerate(kept) if group in own][: len(kept) // 2 * 2]",
     "test_train.py", "odd_number"),
    (29, "groups by an id of each rollout", "train.py",
     "(i // args.group_size, flow)", "(i, flow)",
     "test_train.py", "two_groups"),
]


def plain(code):
    """The code as ast.unparse() lays it out; a piece that is none by itself stays as it is."""
    try:
        return ast.unparse(ast.parse(code))
    except SyntaxError:
        return code


def try_fault(number, name, file, old, new, tests, expression):
    """Run the tests on a copy with the fault in it: a sentence that starts with "caught" if they fail, as they must."""
    source = (ROOT / file).read_text()
    if source.count(old) != 1:
        source, old = plain(source), plain(old)
    if source.count(old) != 1:
        return f"NOT TRIED: the code stands {source.count(old)} times in {file}"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".pytest_cache"))
        (copy / file).write_text(source.replace(old, new))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{tests}", "-k", expression]
        try:
            done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:  # with eval put in, "9**9**9" is computed
            return f"caught: {tests} -k {expression!r} does not end"
    failed = [line.split("::")[1].split(" ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return f"caught by {len(failed)}, such as {tests}::{failed[0]}" if done.returncode == 1 and failed else f"NOT CAUGHT (pytest: {done.returncode})"


def main():
    wanted = {int(word) for word in sys.argv[1:]}
    missed = 0
    for fault in FAULTS:
        if not wanted or fault[0] in wanted:
            said = try_fault(*fault)
            missed += not said.startswith("caught")
            print(f"{fault[0]:2d}  {fault[1]:48s} {said}", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
