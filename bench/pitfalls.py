"""Put the known faults of public implementations into a copy of this code, one at a time, and see which test notices.

    python bench/pitfalls.py              all of them, a few minutes
    python bench/pitfalls.py 7 17         only these

Each row is a fault: its number and name, the file, the line as it stands and as it would be with the fault, and the tests that must fail
(as pytest's -k names them). A fault whose line is no longer found, or that no test notices, ends the script with exit code 1.
"""

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
    (3, "the checkpoint's top-k and penalties sample too", "llm.py",
     'quiet = {"training": False, "gradient_checkpointing": False, "generation_config": GenerationConfig()}',
     'quiet = {"training": False, "gradient_checkpointing": False}',
     "test_llm.py", "generation_config"),
    (3, "temperature forgotten when scoring", "flow_grpo.py",
     "every = (logits.float() / temperature).log_softmax(-1)", "every = logits.float().log_softmax(-1)",
     "test_flow_grpo.py", "scored_policy or full_logits"),
    (4, "text instead of ids", "llm.py",
     "fits[i].ids, fits[i].text, fits[i].logps = ids,",
     "fits[i].ids, fits[i].text, fits[i].logps = self.tokenizer.encode(self.decode(ids)),",
     "test_llm.py", "what_was_sampled"),
    (5, "the stop token is not an action", "llm.py",
     "end = next((j + 1 for j, i in enumerate(ids) if i in stops), len(ids))",
     "end = next((j for j, i in enumerate(ids) if i in stops), len(ids))",
     "test_llm.py", "stop_token_is_an_action"),
    (6, "in-place writes into what is shared", "flow_grpo.py",
     "return torch.tensor([value for a, value in zip(actions, values) for _ in a.ids])",
     "[a.ids.append(a.ids[-1]) for a in actions]; return torch.tensor([value for a, value in zip(actions, values) for _ in a.ids])",
     "test_flow_grpo.py", "changes_none_of_its_inputs"),
    (7, "micro-batch means averaged", "flow_grpo.py",
     "weight   = token_weights(batch, turns, N, tokens if token_mean else None).to(device)",
     "weight   = token_weights(batch, turns, len({a.flow for a in batch}), tokens if token_mean else None).to(device)",
     "test_flow_grpo.py", "micro_batches_does_not_change"),
    (8, "bfloat16 weights without float32 masters", "optimizer.py",
     "torch.promote_types(weight.dtype, torch.float32)", "weight.dtype",
     "test_optimizer.py", "bfloat16 or bf16 or half"),
    (9, "training mode left on while generating", "llm.py",
     "setattr(module, name, quiet[name])", "pass",
     "test_llm.py", "checkpointing_equals_one_in_eval"),
    (10, "a flat group divided by its std", "flow_grpo.py",
     "if R[mine].max() == R[mine].min():", "if False:",
     "test_flow_grpo.py", "flat_group"),
    (11, "a failure counted as a wrong answer", "train.py",
     "for i, flow in enumerate(flows) if not flow.failed and not flow.undecided]", "for i, flow in enumerate(flows)]",
     "test_train.py", "fail"),
    (12, "the reward is lost on its way", "train.py",
     '"reward": sum(flow.reward for _, flow in kept) / max(1, len(kept))', '"reward": 0.0',
     "test_train.py", "reward"),
    (13, "the loss as the headline", "train.py",
     "{steps} | reward {row['reward']:.2f}", "{steps} | loss {row['loss']:.2f}",
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
    (18, "results of any length in every later prompt", "memory.py",
     "return cut(join(steps), budget)", "return join(self.steps)",
     "test_modules.py", "exceeds_its_budget"),
    (19, "an unreadable plan passes silently", "flow.py",
     'verdict="CONTINUE")\n                flow.memory.steps.append(step)', 'verdict="CONTINUE")',
     "test_solve.py", "nobody_can_read"),
    (20, "unknown tools are dropped", "tools.py",
     "if wrong:\n        raise ValueError(", "if False:\n        raise ValueError(",
     "test_tools.py", "wrong_list_of_tools"),
    (21, "an engine's failure passed on as a result", "flow.py",
     'if completion and completion.error not in ("", llm.TOO_LONG):', "if False:",
     "test_server.py", "failed_tool_engine"),
    (22, "any address is fetched", "web.py",
     "if not found or not all(public(address[0]) for *_, address in found):", "if not found:",
     "test_web.py", "refused or public or private"),
    (23, "crashed items leave the denominator", "solve.py",
     '"accuracy": sum(flow.reward for flow in flows) / len(flows),',
     '"accuracy": sum(flow.reward for flow in flows) / max(1, sum(not flow.failed for flow in flows)),',
     "test_solve.py", "denominator"),
    (24, "items keyed by a doubled id", "benchmarks.py",
     "return questions[:number]", "return list({question.id: question for question in questions}.values())[:number]",
     "test_benchmarks.py", "pid or id or position"),
    (25, "a fallback option", "tasks.py",
     "return named.pop() if len(named) == 1 else None", "return named.pop() if len(named) == 1 else 0",
     "test_tasks.py", ""),
    (26, "the model's expression is evaluated", "tasks.py",
     'value = _value(ast.parse(text.strip(), mode="eval").body, used)', "value = eval(text)",
     "test_tasks.py", "24"),
    (27, "a test benchmark chooses the policy", "benchmarks.py",
     "if part in BENCHMARKS:", "if False:",
     "test_benchmarks.py", "refus or train"),
]


def try_fault(number, name, file, old, new, tests, expression):
    """Run the tests on a copy with the fault in it: a sentence that starts with "caught" if they fail, as they must."""
    source = (ROOT / file).read_text()
    if source.count(old) != 1:
        return f"NOT TRIED: the line stands {source.count(old)} times in {file}"
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
