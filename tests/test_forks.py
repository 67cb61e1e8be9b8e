"""What a fork changes: five diffs (tests/forks), each of one place, each run in a copy of the code."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.runs import copy_code

FORKS = Path(__file__).parent / "forks"
PLACES = {"reward": "rewards/grade.py", "objective": "flow_grpo.py", "tool": "tools.py",
          "prompt": "planner.py", "dataset": "my_questions.jsonl"}
TRAIN = ["train.py", "--steps", "2", "--questions", "2", "--group-size", "4", "--max-turns", "1",
         "--valid", "none", "--test", "none", "--out", "run"]
COUNT = """
import executor, tools
chosen = tools.toolbox(["word_count"])
call = executor.parse('word_count(text="one two three")', "word_count", chosen["word_count"])
print(tools.run_calls([call], chosen, None))
"""


@pytest.fixture
def fork(tmp_path, request):
    """run(arguments) -> what Python prints in the copy with the diff that the test is named after."""
    folder, name = tmp_path / "fork", re.search(r"another_(\w+?)_", request.node.name)[1]
    copy_code(folder)
    subprocess.run(["git", "apply", FORKS / f"{name}.diff"], cwd=folder, check=True)

    def run(*arguments):
        settings = {"cwd": folder, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
        return subprocess.check_output([sys.executable, *arguments], text=True, **settings)

    def log(*arguments):
        run(*TRAIN, *arguments)
        return list(csv.DictReader(open(folder / "run" / "log.csv", newline="")))

    run.log, run.folder = log, folder
    return run


def test_each_fork_is_one_place_in_one_file():
    for name, file in PLACES.items():
        diff = (FORKS / f"{name}.diff").read_text()
        assert re.findall(r"(?m)^\+\+\+ b/(.*)", diff) == [file] and diff.count("@@ -") == 1
    assert {path.stem for path in FORKS.iterdir()} == set(PLACES)


def test_another_reward_is_what_training_sees(fork):
    fork.log()
    rollouts = [json.loads(line) for line in (fork.folder / "run" / "rollouts.jsonl").open()]
    assert {round(rollout["reward"] + 0.1 * rollout["turns"], 6) for rollout in rollouts} == {0, 1}


def test_another_objective_is_what_training_follows(fork):
    assert float(fork.log()[-1]["loss"]) > 0.01  # without the new term it is 0 but for rounding, clip and KL


def test_another_dataset_is_a_file(fork):
    assert {row["groups"] for row in fork.log("--data", "my_questions.jsonl")} == {"2"}


def test_another_tool_can_be_called_after_one_entry(fork):
    assert "text='3', error=False" in fork("-c", COUNT)


def test_another_prompt_works_but_for_the_toy_which_says_so(fork):
    assert "planner.PROMPT has changed" in fork("solve.py", "--max-turns", "1", "Compute 21 * 2.")
