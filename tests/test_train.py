"""train.py: what a run leaves behind, whatever interrupts it; and that it learns from what was sampled.

A tiny random Qwen2 writes no plan that can be parsed, so all its groups would be flat. Here a rollout answers
"even" or "odd", as is the sum of the token ids that its planner sampled, and "even" is right: this can be
learnt, and the tokens alone decide it.
"""
import argparse
import csv
import errno
import itertools
import json
import os
import re
import resource
import shutil
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import NO_UPDATE
from safetensors.torch import load_file
from test_models import CHATML, tokenizer, write

import generator
import planner
import solve
import train
from bench import memory as sizes
from benchmarks import training
from cli import setup
from cli.flags import TOY
from flow_grpo import Action, advantages, token_logps
from logbook import advice, checkpoints, log
from logbook import run as run_module
from memory import Memory, Step
from models import loading, local
from models.completion import TOO_LONG
from models.loading import load_engine
from models.local import HF
from rewards import grade
from rewards.questions import Question
from scale import adapters, fit
from scale.masters import HostAdamW
from tools import TOOLS
from world import files, places

ROLLOUT, STEP_LINE, REPLACE_FOLDER = solve.roll_out, log.step_line, files.replace_folder
SIGINT, SIGTERM = signal.SIGINT, signal.SIGTERM
QWEN_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You "
    "are a helpful assistant.<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ "
    "m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
FLAGS = dict(
    model="model", data="data.jsonl", valid="valid.jsonl", test="valid.jsonl", tools="base_generator",
    judge="none", steps=4, questions=2, group_size=4, max_turns=1, max_new_tokens=6, lr=3e-3, minibatches=2,
    every=2, device="cpu", dtype="float32")
QUICK = dict(steps=1, valid="none", test="none")  # for a test that looks at one step alone


def even_is_right(*args, **settings):
    rollouts = ROLLOUT(*args, **settings)
    for rollout in rollouts:
        rollout.answer = "even" if sum(sum(action.ids) for action in rollout.plans) % 2 == 0 else "odd"
    return rollouts


def wordy(template):
    """The byte-level tokenizer with the words of our prompts, which makes them short and the tests fast."""
    texts = [planner.prompt("", TOOLS, "", ""), planner.analysis_prompt("", TOOLS), generator.PROMPT]
    tok = tokenizer().train_new_from_iterator(texts * 2, 1000)
    tok.chat_template = template
    return tok


def jsonl(path, *questions):
    path.write_text("".join(json.dumps({"question": q, "answer": "even"}) + "\n" for q in questions))
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A folder with a model, another one, and questions; tests run inside it."""
    folder = tmp_path_factory.mktemp("train")
    tok = wordy(CHATML)
    for seed, name in enumerate(["model", "other"]):
        stops = {"eos_token_id": [2, *range(20, 150)]}
        write(folder / name, tok, seed, generation=stops, num_hidden_layers=1, max_position_embeddings=4096)
    jsonl(folder / "data.jsonl", *"abcde")
    jsonl(folder / "valid.jsonl", *"vw")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "roll_out", even_is_right)
        patch.chdir(folder)
        yield folder


@pytest.fixture(autouse=True)
def signals_as_before():
    before = {number: signal.getsignal(number) for number in (SIGINT, SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def words(out, **changed):
    """The command line as a shell would pass it, without the flags that are None."""
    argv = ["train.py"]
    for name, value in {**FLAGS, "out": out, **changed}.items():
        if value is not None:
            argv += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return argv


def command(*argv):
    """train.py with this command line, in this process: its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(argv))
        try:
            train.main()
        except SystemExit as left:
            return left.code
    return 0


def run(out, code=0, **changed):
    assert command(*words(out, **changed)) == code
    return Path(out)


def resume(out, *more):
    assert command("train.py", "--resume", str(out), *more) == 0
    return Path(out)


def rows(folder, name="log.csv"):
    with open(folder / name, newline="") as file:
        return list(csv.DictReader(file))


def texts(folder):
    """The rollouts of rollouts.jsonl, without their seconds."""
    lines = (folder / "rollouts.jsonl").read_text().splitlines()
    return [re.sub(r'"seconds": [0-9.e-]+', "", line) for line in lines]


def everything(folder, step=4):
    """What a run leaves, byte for byte, but for the seconds of rollouts and the layout of trainer/."""
    names = "log.csv", "evals.csv", f"step-{step}/model.safetensors", "best/model.safetensors"
    tensors = {name: tensor.tolist() for name, tensor in in_trainer(folder / f"step-{step}").items()}
    return [(folder / name).read_bytes() for name in names], tensors, texts(folder)


def in_trainer(checkpoint):
    """{name: tensor} of what a run of one process resumes from."""
    (file,) = (checkpoint / "trainer").iterdir()
    return load_file(file)


def steps_of(folder):
    return [checkpoint.name for checkpoint in checkpoints.checkpoints(folder)]


@pytest.fixture(scope="module")
def whole(place):
    """A run that nothing interrupted."""
    return run("whole")


def at(step, do, monkeypatch):
    """do() in the middle of a run: a step's rows are in the logs, its checkpoint is not yet written."""
    def step_line(row, *rest):
        if row["step"] == step:
            do()
        return STEP_LINE(row, *rest)
    monkeypatch.setattr(log, "step_line", step_line)


def interrupt(number=SIGINT):
    os.kill(os.getpid(), number)


crash = Mock(side_effect=ZeroDivisionError("killed"))


def spy(monkeypatch, name, module=train):
    """A function that remembers its calls."""
    monkeypatch.setattr(module, name, Mock(wraps=getattr(module, name)))
    return getattr(module, name)


def rollouts_with(monkeypatch, which=slice(None), call=None, **changes):
    """Some rollouts of each step (or of one call, counted from 0) get other attributes, as when they fail."""
    batches = []

    def rollout(questions, *args, **settings):
        batches.append(even_is_right(questions, *args, **settings))
        if len(batches) == call + 1 if call is not None else len(questions) == 8:
            for rollout in batches[-1][which]:
                vars(rollout).update(changes)
        return batches[-1]
    monkeypatch.setattr(solve, "roll_out", rollout)
    return batches


# One seed, one run

def test_the_tiny_planner_does_learn(whole):
    lessons = [float(row["grad_norm"]) for row in rows(whole) if row["flat"] != "2"]
    assert lessons and all(lessons) and any(float(row["kl"]) > 0 for row in rows(whole))
    assert [row["step"] for row in rows(whole)] == list("1234")


@pytest.mark.exhaustive
def test_the_same_seed_gives_the_same_files_byte_for_byte_and_another_seed_another_run(whole):
    assert everything(run("again", seed=0)) == everything(whole)
    other = run("other-seed", seed=1, steps=2)
    assert rows(other) != rows(whole)[:2] and texts(other) != texts(whole)[:16]


@pytest.mark.parametrize("edited", [
    lambda *given: 0.5 * token_logps(*given), lambda model, actions, t: token_logps(model, actions, 1.0),
    lambda *given: (logps := token_logps(*given)) * torch.linspace(0.5, 1, len(logps))])
def test_an_edited_token_logps_is_not_ignored_without_plain(tmp_path, monkeypatch, edited):
    monkeypatch.setattr(train, "token_logps", edited)
    assert "give --plain, or edit log_probs()" in command(*words(tmp_path / "run", **QUICK))
    run(tmp_path / "plain", **QUICK, plain=True)


def test_a_plain_run_learns_the_same_from_the_same_rollouts(tmp_path, monkeypatch):
    never = property(lambda engine: False, lambda engine, value: None)
    monkeypatch.setattr(local.HF, "plain", never, raising=False)  # plain sampling draws other random numbers
    fast, plain = (run(tmp_path / str(way), **QUICK, beta=0.1, plain=way) for way in (None, True))
    assert texts(fast) == texts(plain)
    numbers = [{name: float(x) for name, x in rows(folder)[0].items()} for folder in (fast, plain)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-4) and numbers[0]["grad_norm"] > 0.01


def test_log_and_line_say_the_reward_first_and_never_times_or_the_loss(whole):
    row = rows(whole)[0]
    assert list(row)[:5] == ["step", "reward", "right", "turns", "errors"]
    assert not any("second" in name or "time" in name for name in row)
    numbers = {name: float(value) for name, value in row.items()} | {"step": 1, "flat": 1, "groups": 2}
    line = log.step_line(numbers, 4, 1.0, 2.0)
    assert line.startswith(f"step   1/4 | reward {numbers['reward']:.2f} | turns") and "loss" not in line
    fork = log.step_line(numbers | {"reward": -0.25, "right": 0.5}, 4, 1.0, 2.0)
    assert fork.startswith("step   1/4 | reward -0.25 | right  50% | turns")


def test_evaluations_are_made_before_the_first_step_when_saving_and_at_the_end(whole, tmp_path, capsys):
    def evaluated(folder):
        return [(row["step"], row["questions"]) for row in rows(folder, "evals.csv")]
    assert evaluated(whole) == [("0", "test"), ("2", "valid"), ("4", "valid"), ("4", "test")]
    assert list(rows(whole, "evals.csv")[0]) == ["step", "questions", "accuracy", "turns", "errors", "failed",
                                                 "undecided", "n"]
    untested = run(tmp_path / "run", steps=2, test=None)
    calls = re.findall(r"^calls   (.*), \d\.\d s\)$", capsys.readouterr().out, re.M)
    assert calls == ["unreadable 2 (2 errors"]  # of the first evaluation alone
    assert evaluated(untested) == [("0", "valid"), ("2", "valid")] == evaluated(resume(untested))


def test_every_step_and_evaluation_draws_from_a_seed_of_its_own(tmp_path, monkeypatch):
    seeds = []
    rollout = lambda *args, **settings: seeds.append(torch.initial_seed()) or even_is_right(*args, **settings)
    monkeypatch.setattr(solve, "roll_out", rollout)
    run(tmp_path / "run", steps=1, seed=3)
    assert seeds == [3, 3 * 1_000_003 + 1, 3, 3]  # test, the step, valid, test


def test_each_question_comes_once_an_epoch_in_an_order_of_step_and_seed_alone():
    epochs = [train.questions_of(step, range(10), 5, seed) for seed in (0, 1) for step in range(1, 7)]
    for first, second in zip(epochs[::2], epochs[1::2]):
        assert sorted(first + second) == list(range(10))
    assert epochs[:2] != epochs[2:4] and epochs[:6] != epochs[6:]
    across = [question for step in range(1, 8) for question in train.questions_of(step, "abcde", 3, 0)]
    assert all(sorted(across[i : i + 5]) == list("abcde") for i in range(0, 20, 5))
    assert train.questions_of(7, "abcde", 3, 0) == across[18:]
    assert train.questions_of(1, "ab", 5, 0).count("a") in (2, 3)


@pytest.mark.parametrize("number, held", [(2, 1), (5, 2), (200, 64)])
def test_without_valid_questions_some_are_held_out_and_never_trained_on(tmp_path, monkeypatch, number, held):
    monkeypatch.setattr(train, "train", Mock())
    run(tmp_path / "run", data=jsonl(tmp_path / "d.jsonl", *map(str, range(number))), valid=None, test=None)
    data = train.train.call_args.args[4]
    assert [len(questions) for questions in data] == [number - held, held, 0]
    assert not set(data.train) & set(data.valid)


def test_a_run_says_how_many_questions_are_too_near_to_those_held_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "train", lambda *args: None)
    sums = jsonl(tmp_path / "sums.jsonl", *(f"What is {a} + {b}?" for a in range(20) for b in range(20)))
    run(tmp_path / "run", data=sums, valid=None)
    notice = r"^data    \d+ of 400 questions are left out, .* --valid FILE.jsonl keeps"
    assert re.search(notice, capsys.readouterr().out, re.M)


def test_a_run_warns_if_it_is_tested_on_what_it_was_trained_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "train", Mock())
    sets = {"data": ["one", "two", "three"], "valid": ["four", "five"], "test": ["Two", "a five", "six"]}
    run(tmp_path / "run", **{name: jsonl(tmp_path / f"{name}.jsonl", *sets[name]) for name in sets})
    warnings = [line.strip() for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert warnings == ["warning: 1 of the 3 test questions are also training questions",
                        "warning: 1 of the 3 test questions are also validation questions"]


def test_without_validation_all_questions_are_trained_on_and_the_last_checkpoint_is_named(tmp_path, capsys):
    out = run(tmp_path / "run", **QUICK | {"steps": 2})
    text = capsys.readouterr().out
    assert "5 questions to train on, 0 to choose best/, 0 to test" in text and f"--model {out}/step-2" in text
    assert [folder.name for folder in out.glob("*/")] == ["step-2"]


def test_a_resumed_run_says_that_its_code_is_another(tmp_path, monkeypatch, capsys):
    folder, line = run(tmp_path / "run", steps=1, test=None), "\ncode    not that of the steps before: "
    resume(folder, "--steps", "2")
    assert line not in capsys.readouterr().out
    monkeypatch.setattr(checkpoints.code, "present", lambda: "another")
    resume(folder, "--steps", "3")
    assert line in capsys.readouterr().out


# Interrupted and resumed

@pytest.mark.parametrize("step, signals", [
    (1, [SIGINT]), *(pytest.param(*case, marks=pytest.mark.exhaustive)
                     for case in ((0, [SIGINT]), (2, [SIGTERM, SIGTERM])))])
def test_a_run_that_a_signal_ended_equals_another_once_resumed(whole, monkeypatch, capsys, step, signals):
    def end(*args):
        for number in signals:  # two SIGTERMs: from a scheduler and from torchrun
            interrupt(number)
        return ""
    with monkeypatch.context() as patch:
        at(step, end, patch)
        if step == 0:
            patch.setattr(run_module, "accuracy_line", end)
        stopped = run(f"stopped-{step}", 128 + signals[0])
    assert f"Go on with: python train.py --resume {stopped}" in capsys.readouterr().out
    assert steps_of(stopped) == [f"step-{step}"] * (step > 0)
    assert everything(resume(stopped)) == everything(whole)


def test_a_finished_run_is_not_cut_and_says_how_to_go_on(whole, capsys):
    before = (Path(whole) / "args.json").read_text()
    assert command("train.py", "--resume", str(whole), "--steps", "1") == 2
    assert "give --steps 4 or more, or leave it out" in capsys.readouterr().err
    assert (Path(whole) / "args.json").read_text() == before
    setup.check_steps(argparse.Namespace(resume="runs/one", steps=3), 2)
    assert capsys.readouterr().out == ""
    setup.check_steps(argparse.Namespace(resume="runs/one", steps=3), 3)
    assert capsys.readouterr().out == "steps   all 3 of runs/one are done: --steps N goes on to step N\n"
    with pytest.raises(ValueError, match="^runs/one has done 4 steps: give --steps 4 or more, or leave it"):
        setup.check_steps(argparse.Namespace(resume="runs/one", steps=3), 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("why", [errno.EPIPE, errno.ENOSPC])
def test_a_run_whose_output_nobody_can_read_any_more_ends_with_a_checkpoint(whole, monkeypatch, why):
    gone = Mock(write=Mock(side_effect=OSError(why, "gone")), fileno=Mock(side_effect=OSError))
    with monkeypatch.context() as patch:
        at(1, lambda: patch.setattr(sys, "stdout", gone), patch)
        shutil.rmtree("unread", ignore_errors=True)
        assert command(*words("unread")) == 128 + SIGTERM
    assert steps_of("unread") == ["step-1"] and everything(resume("unread")) == everything(whole)


@pytest.mark.exhaustive
def test_what_a_crash_left_after_the_last_checkpoint_is_dropped_and_made_again(whole, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        at(3, crash, patch)
        run("crashed")
    assert len(rows(Path("crashed"))) == 3  # one row more than the checkpoint of step 2
    for name, half in (("log.csv", "1"), ("evals.csv", "2,va"), ("rollouts.jsonl", '{"step": 3, "id')):
        with open(Path("crashed") / name, "a") as file:  # and a disk that took half a line
            file.write(half)
    assert everything(resume("crashed")) == everything(whole)


def test_a_run_that_was_moved_with_its_model_goes_on_and_answers_and_names_no_folder_above(
        tmp_path, monkeypatch, capsys):
    before, after = tmp_path / "before", tmp_path / "deep" / "after"
    shutil.copytree("model", before / "model")
    shutil.copy("data.jsonl", before)
    run(before / "runs" / "a", **QUICK, model=before / "model", data=before / "data.jsonl")
    for file in before.rglob("*.json"):
        assert str(tmp_path) not in file.read_text(), file
    after.parent.mkdir()
    before.rename(after)
    assert len(rows(resume(after / "runs" / "a", "--steps", "2"))) == 2
    assert f"fixed   {after / 'model'} |" in solved(monkeypatch, capsys, after / "runs" / "a" / "step-2").out
    shutil.rmtree(after / "model")
    assert command("train.py", "--resume", str(after / "runs" / "a")) == 2
    assert f"--model {after / 'model'} is not there: put it back, or write" in capsys.readouterr().err


def test_the_newest_checkpoints_are_kept_and_none_counts_on_a_best_that_is_not_on_the_disk(monkeypatch):
    def replace_folder(folder, write):
        REPLACE_FOLDER(folder, write)
        if folder.name != "best":  # if the machine stopped here, --resume would never make best/ again
            best = json.loads((folder.parent / "best" / "train.json").read_text())
            assert best["step"] <= json.loads((folder / "train.json").read_text())["step"]
    monkeypatch.setattr(checkpoints, "replace_folder", replace_folder)
    out = run("order", steps=3, every=1, keep=2, test="none")
    assert sorted(folder.name for folder in out.glob("*/")) == ["best", "step-2", "step-3"]


@pytest.mark.exhaustive
def test_a_finished_run_given_more_steps_equals_a_longer_run_but_for_its_first_test(whole):
    longer = everything(resume(run("short", steps=2), "--steps", "4"))
    assert everything(resume("short")) == longer  # without more steps, nothing changes
    evals = Path("short", "evals.csv")
    rest = [line for line in evals.read_bytes().splitlines(keepends=True) if not line.startswith(b"2,test,")]
    assert len(rest) == len(evals.read_bytes().splitlines()) - 1
    evals.write_bytes(b"".join(rest))
    assert everything(Path("short")) == everything(whole)


# Checkpoints

def limited(size):
    """Files may not grow beyond this: safetensors and torch.save then do what they do on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


no_space = Mock(side_effect=OSError(28, "No space left on device"))


@pytest.mark.parametrize("where", ["weights", pytest.param("state", marks=pytest.mark.exhaustive),
                                   pytest.param("first byte", marks=pytest.mark.exhaustive)])
def test_a_disk_that_fills_while_saving_leaves_the_last_checkpoint_and_says_so(whole, monkeypatch, where):
    weights, out = os.path.getsize("model/model.safetensors"), f"full-{where}"
    full = {"weights": lambda: limited(weights // 2), "state": lambda: limited(weights * 3 // 2),
            "first byte": lambda: monkeypatch.setattr(HF, "save", no_space)}[where]
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("step-4"))
    try:
        at(4, full, monkeypatch)
        code = command("train.py", "--resume", out)
    finally:
        limited(resource.RLIM_INFINITY)
        monkeypatch.undo()
    assert re.fullmatch(r"train.py: could not save [^\n]+ untouched. Free some disk, then --resume.", code)
    assert not list(Path(out).glob("*.writing")) and steps_of(out)[-1] == "step-2"
    assert load_engine(f"{out}/best") and everything(resume(out)) == everything(whole)


@pytest.mark.parametrize("before", ["replace", "rename"])
def test_a_run_killed_while_its_folder_is_made_leaves_none_and_can_begin_anew(tmp_path, monkeypatch, before):
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Path, before, crash)
        run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert len(rows(run(tmp_path / "run", **QUICK))) == 1 and not list(tmp_path.glob("*.writing"))


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600)])
def test_every_file_of_a_checkpoint_has_the_permissions_that_other_new_files_have(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        out = run(tmp_path / "run", **QUICK)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in out.rglob("*") if file.is_file()}
    (tensors,) = (out / "step-1" / "trainer").iterdir()
    assert {"model.safetensors", tensors.name, "args.json"} <= set(modes) and set(modes.values()) == {mode}


def test_only_whole_folders_are_taken_for_checkpoints(tmp_path):
    for name in ("step-2", "step-10", "step-12.writing", "step-14.old", "step-", "step-x", "best"):
        (tmp_path / name / "trainer").mkdir(parents=True)
    (tmp_path / "step-16").mkdir()
    assert steps_of(tmp_path) == ["step-2", "step-10"] and steps_of(tmp_path / "none") == []


def test_a_crash_between_the_two_renames_loses_nothing(tmp_path):
    names = lambda: [path.name for path in tmp_path.iterdir()]
    (tmp_path / "best.old").mkdir()  # the folder before; best itself was about to be renamed from .writing
    (tmp_path / "best.old" / "a").write_text("before")
    (tmp_path / "best.writing").mkdir()
    with pytest.raises(OSError):
        files.replace_folder(tmp_path / "best", no_space)
    assert names() == ["best"] and (tmp_path / "best" / "a").read_text() == "before"
    files.replace_folder(tmp_path / "best", lambda path: (path / "b").touch())
    assert names() == ["best"] and [path.name for path in (tmp_path / "best").iterdir()] == ["b"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(whole, capsys):
    shutil.copytree(whole, "damaged")
    (file,) = Path("damaged/step-4/trainer").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert command("train.py", "--resume", "damaged") == 2
    sentence = "step-4 is damaged: remove it, then --resume continues from the one before"
    assert sentence in capsys.readouterr().err
    shutil.rmtree("damaged/step-4")
    assert everything(resume("damaged")) == everything(whole)


# What cannot work is refused before anything is written (more of it: test_command_line.py)

REFUSED = [
    (dict(max_new_tokens=100_000), "--max-new-tokens 100000 leaves too little room"),
    (dict(data="empty.jsonl"), "empty.jsonl: the file is empty"),
    (dict(valid="keyless.jsonl"), 'keyless.jsonl, line 3: lacks "answer"'),
    (dict(data="one.jsonl", valid=None), "one.jsonl has too few questions"),
    (dict(data="bamboogle"), "bamboogle is a test benchmark"),
    (dict(tools="wikipedia_search", corpus="nowhere.jsonl"), "nowhere.jsonl: cannot read"),
    (dict(model="untold"), "has no chat template"), (dict(fixed="untold"), "has no chat template"),
    (dict(out="data.jsonl/run"), "data.jsonl/run can't be made")]


@pytest.mark.parametrize("changed, sentence", REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_what_cannot_work_is_refused_with_a_sentence_and_code_2(place, whole, capsys, changed, sentence):
    Path("empty.jsonl").touch()
    Path("keyless.jsonl").write_text('{"question": "q", "answer": "a"}\n\n{"question": "q"}\n')
    jsonl(Path("one.jsonl"), "q")
    if not Path("untold").exists():
        write(Path("untold"), tokenizer(template=None))
    before = {path: path.is_file() and path.read_bytes() for path in place.rglob("*")}
    assert command(*words(**{"out": "refused", **changed})) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("train.py: ") and error.count("\n") == 1
    assert {path: path.is_file() and path.read_bytes() for path in place.rglob("*")} == before


# What is learnt from

def test_two_equal_questions_in_a_batch_are_two_groups(tmp_path, monkeypatch):
    advantages = spy(monkeypatch, "advantages")
    row, = rows(run(tmp_path / "run", **QUICK, data=jsonl(tmp_path / "twins.jsonl", "same", "same")))
    rewards, groups = advantages.call_args.args
    assert groups == [0] * 4 + [1] * 4 and len(rewards) == 8 and row["groups"] == "2"
    assert float(row["reward"]) == sum(rewards) / 8


def test_what_is_learnt_from_is_the_very_ids_that_were_sampled_stop_token_included(tmp_path, monkeypatch):
    update, batches = spy(monkeypatch, "update"), rollouts_with(monkeypatch)
    run(tmp_path / "run", **QUICK | {"max_turns": 2})
    _, _, actions, groups = update.call_args.args
    completions = [(i, action) for i, rollout in enumerate(batches[0]) for action in rollout.plans]
    assert len(completions) == len(actions) == 16 and groups == [0] * 4 + [1] * 4
    for a, (i, completion) in zip(actions, completions):
        assert a.ids is completion.ids and a.prompt_ids is completion.prompt_ids and a.rollout == i
    stopped = [a.ids[-1] in load_engine("model").chat.stops for a in actions]
    assert all(stop or len(a.ids) == 6 for stop, a in zip(stopped, actions)) and any(stopped)
    assert not all(stopped)  # a plan cut at the limit gets no stop token


@pytest.mark.parametrize("name, value", [("failed", f"planner: {TOO_LONG}"), ("undecided", True)])
def test_rollouts_without_an_outcome_leave_their_groups(tmp_path, monkeypatch, capsys, name, value):
    number = itertools.count()  # rewards that differ in each group, whatever the tiny model answers
    monkeypatch.setattr("rewards.grade.reward", lambda rollout: next(number) % 2)
    rollouts_with(monkeypatch, slice(5, None), **{name: value})  # 5 of 8 remain: a step need not be even
    compared, update = spy(monkeypatch, "advantages"), spy(monkeypatch, "update")
    row, = rows(run(tmp_path / "run", **QUICK | {"max_turns": 3}, seed=1))
    (rewards, groups), (_, _, actions, learnt) = compared.call_args.args, update.call_args.args
    assert groups == learnt == [0] * 4 + [1]
    A, _ = advantages(rewards, groups)
    assert all(action.A == A[action.rollout] for action in actions) and A.any()
    assert sorted(action.rollout for action in actions) == [i for i in range(5) for _ in range(3)]
    assert row[name] == "3" and f"| {name} 3" in capsys.readouterr().out
    assert float(row["reward"]) == sum(rewards) / 5
    assert float(row["plan_tokens"]) == sum(len(action.ids) for action in actions) / 15
    assert (row["unreadable"], row["unreadable_errors"], row["base_generator"]) == ("24", "24", "0")


def test_the_questions_of_a_step_depend_on_the_seed_of_the_run(tmp_path, monkeypatch):
    chosen = spy(monkeypatch, "questions_of")
    run(tmp_path / "run", steps=2, seed=3)
    assert [(call.args[0], call.args[3]) for call in chosen.call_args_list] == [(1, 3), (2, 3)]


def test_every_flag_of_the_objective_reaches_it(tmp_path, monkeypatch):
    update, rollout = spy(monkeypatch, "update"), spy(monkeypatch, "roll_out", solve)
    monkeypatch.setattr(train, "advantages", lambda R, groups, **more: (torch.ones(len(R)), 0))
    flags = dict(temperature=0.9, clip_low=0.1, clip_high=0.4, beta=0.01, minibatches=3, token_budget=999,
                 token_mean=True)
    run(tmp_path / "run", **QUICK, lr=2e-4, seed=2, optimizer_device="cpu", **flags)
    settings, (passes, optimizer, *_) = update.call_args.kwargs, update.call_args.args
    settings["clip_low"], settings["clip_high"] = settings.pop("clip")
    settings["token_budget"] = passes.budget.tokens
    assert {name: settings[name] for name in flags} == flags and settings["seed"] == 2 * 1_000_003 + 1
    group, = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], type(optimizer)) == (2e-4, 0, HostAdamW)
    limits = {"temperature": 0.9, "max_turns": 1, "max_new_tokens": 6}
    assert all(limits.items() <= call.kwargs.items() for call in rollout.call_args_list)


def test_gradient_checkpointing_changes_nothing_of_a_step(whole, tmp_path, monkeypatch):
    update = spy(monkeypatch, "update")
    assert rows(run(tmp_path / "run", gradient_checkpointing=True)) == rows(whole)
    assert update.call_args.args[0].model.is_activation_checkpointing


def test_a_step_in_which_every_rollout_failed_is_survived_and_said(tmp_path, monkeypatch, capsys):
    rollouts_with(monkeypatch, failed=f"planner: {TOO_LONG}")
    code = command(*words(tmp_path / "run", **QUICK | {"steps": 2}))
    assert code == "train.py: every rollout failed, and nothing was learnt"
    assert [row["failed"] for row in rows(tmp_path / "run")] == ["8", "8"]
    assert f"| failed 8\nfailed 8 times: planner: {TOO_LONG}" in capsys.readouterr().out
    assert same(load_engine("model").model, load_engine(str(tmp_path / "run" / "step-2")).model)


# The calls of roll_out(): test, step 1, step 2, valid, step 3, step 4, valid, test.
@pytest.mark.parametrize("call, number, step", [
    (1, 8, 0), *(pytest.param(*case, marks=pytest.mark.exhaustive)
                 for case in ((0, 2, 0), (6, 2, 4), (3, 2, 2), (7, 2, 4)))])
def test_a_server_that_is_down_ends_the_run(whole, tmp_path, monkeypatch, call, number, step):
    down = "judge: host:8000 cannot be reached"
    with monkeypatch.context() as patch:
        rollouts_with(patch, call=call, failed=down)
        code = command(*words(tmp_path / "run"))
    sentence = f"{number} of {number} rollouts did not come to an end ({down}), after step {step}. Fix that"
    assert code.startswith(f"train.py: {sentence}, then go on with: ")
    assert everything(resume(tmp_path / "run")) == everything(whole)


# A run that cannot learn says so

def test_memory_that_does_not_suffice_ends_the_run_with_what_to_change(tmp_path, monkeypatch):
    why = MemoryError("One turn of 9 tokens does not fit into memory")
    monkeypatch.setattr(train, "update", Mock(side_effect=why))
    assert command(*words(tmp_path / "run", **QUICK)) == (
        "train.py: One turn of 9 tokens does not fit into memory: give --gradient-checkpointing, "
        "--optimizer-device cpu, --lora 32 or a smaller --max-new-tokens")


def update_gives(monkeypatch, **results):
    """The update, with these results instead of its own."""
    update = train.update
    monkeypatch.setattr(train, "update", Mock(side_effect=lambda *args, **kw: update(*args, **kw) | results))


@pytest.mark.exhaustive
def test_the_token_budget_that_was_enough_serves_the_next_step_and_is_named(tmp_path, monkeypatch, capsys):
    budgets, update = [], train.update

    def short_of_memory(passes, *args, **settings):
        budgets.append(passes.budget.tokens)
        passes.budget.tokens = 99
        return update(passes, *args, **settings)
    monkeypatch.setattr(train, "update", short_of_memory)
    run(tmp_path / "run", steps=2)
    assert budgets == [16384, 99]
    assert capsys.readouterr().out.count("memory was short: next time --token-budget 99\n") == 1


@pytest.mark.parametrize("temperature, change", [(0.7, "a lower --lr than 0.003."),
                                                 (0.01, "a higher --temperature than 0.01.")])
def test_gradients_that_stay_useless_end_the_run_with_advice(tmp_path, monkeypatch, temperature, change):
    monkeypatch.setattr(train, "update", lambda *a, **k: NO_UPDATE | {"skipped": 2.0, "token_budget": 9})
    monkeypatch.setattr(train, "advantages", lambda R, groups, **more: (torch.ones(len(R)), 0))
    code = command(*words(tmp_path / "run", **QUICK | {"steps": 9}, every=9, temperature=temperature))
    assert code.startswith("train.py: the last steps taught nothing: their gradients were not finite or far")
    assert f" too large. Start a new run with {change}" in code
    assert steps_of(tmp_path / "run") == ["step-3"]


def test_a_step_of_which_one_mini_batch_exploded_has_moved_the_policy(tmp_path, monkeypatch, capsys):
    update_gives(monkeypatch, grad_norm=float("nan"), skipped=1.0)
    run(tmp_path / "run", **QUICK)
    assert "nothing was learnt" not in capsys.readouterr().out


def test_best_is_not_recommended_if_no_answer_was_ever_right(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grade, "reward", lambda rollout: sum(sum(plan.ids) for plan in rollout.plans) % 7)
    monkeypatch.setattr(grade.rules, "decide", lambda question, answer: False)
    out = run(tmp_path / "run", steps=1, test="none")
    assert f"Try: python solve.py --model {out}/step-1\n" in capsys.readouterr().out
    assert (out / "best").exists()


@pytest.mark.parametrize("beta", [0, 0.1])
def test_a_model_that_writes_no_plan_is_called_so_and_never_changed(tmp_path, monkeypatch, capsys, beta):
    monkeypatch.setattr(solve, "roll_out", ROLLOUT)
    out = run(tmp_path / "run", steps=3, group_size=2, max_turns=2, beta=beta)
    text = capsys.readouterr().out
    assert "\n0 of 4 plans could be parsed. The commonest reasons:\n  4 x no line 'Sub-goal: ...'" in text
    assert text.count("plans could be parsed. The") == 2  # before the first step, after the third flat step
    assert "\n3 steps in a row had flat groups only" in text and "Done, but nothing was learnt" in text
    assert {(row["ratio_max"], row["grad_norm"], row["kl"]) for row in rows(out)} == {("1.0", "0.0", "0.0")}


def test_a_run_of_which_no_first_rollout_comes_to_an_end_stops_there(tmp_path, monkeypatch, capsys):
    rollouts_with(monkeypatch, call=0, failed=f"planner: {TOO_LONG}")
    assert command(*words(tmp_path / "run")).startswith("train.py: no rollout of test ended. Fix that")
    assert f"failed 2 times: planner: {TOO_LONG}" in capsys.readouterr().out


def rollout_of(*errors, failed="", plan="no plan at all"):
    """A rollout with a turn for each error; "" is a turn that went well."""
    steps = [Step(n, "" if why else "python_coder", "", "", f"Error: {why}" if why else "4", error=bool(why))
             for n, why in enumerate(errors, 1)]
    rollout = solve.Rollout(Question("q", "a"), Memory("q", "", steps), failed=failed)
    for step in steps:
        rollout.add_output(step.turn, "planner", plan if not step.tool else "a good plan", 3, 0.1)
    return rollout


def test_plans_that_cannot_be_parsed_are_counted_with_the_commonest_reasons_and_an_example():
    twice = rollout_of("no line 'Tool: ...'", "no line 'Tool: ...'")
    text = advice.unparsed([twice, rollout_of("two plans", plan="\x1b[31m")])
    assert text.startswith("0 of 3 plans could be parsed.") and "\x1b" not in text
    assert "  2 x no line 'Tool: ...'\n  1 x two plans" in text and "    no plan at all\n" in text
    assert advice.unparsed([rollout_of("", "", "two plans")]) == "" == advice.unparsed([rollout_of()])
    unread = rollout_of("", *["two plans"] * 9, plan="plan A, plan B")
    broken_off = rollout_of(failed="planner: the prompt is too long")  # its plan is no example
    broken_off.add_output(1, "planner", "", 0, 0.1)
    assert "The first of the others:\n    plan A, plan B\n" in advice.unparsed([broken_off, unread])


def test_a_tool_whose_calls_all_fail_is_named_with_its_commonest_result():
    failing = rollout_of("\x1b[31mno network", "no network", "no network", "timed out", "no network")
    for step in failing.memory.steps:
        step.tool = "wikipedia_search"
    text = advice.dead_tools([failing, rollout_of(*["no plan"] * 9)])  # those plans name no tool
    assert text.startswith("None of the 5 calls of wikipedia_search worked (Error: no network).")
    assert "\n" not in text and "\x1b" not in text
    failing.memory.steps[-1].error = False
    assert advice.dead_tools([failing]) == ""
    del failing.memory.steps[-1]
    assert advice.dead_tools([failing]) == ""  # too few to say so


def test_three_flat_steps_in_a_row_are_told_once_with_what_they_mean():
    flat, lesson = ({"flat": n, "groups": 4, "reward": 0.0, "kl": 0.0} for n in (4, 3))
    none = flat | {"flat": 0, "groups": 0}  # no rollout had an outcome
    steps = [[flat] * 2, [flat] * 3, [flat] * 4, [flat, lesson, flat, flat], [lesson] + [flat] * 3,
             [none] * 3]
    told = [advice.flat_steps(rows, [rollout_of("")], 0.7) != "" for rows in steps]
    assert told == [False, True, False, False, True, False]


@pytest.mark.parametrize("kl, right, error, temperature, sentence", [
    (0.0, 0, "", 0.7, "easier questions"), (0.0, 0, "why", 0.7, "0 of 4 plans could be parsed"),
    (0.0, 4, "", 0.7, "too easy"), (0.0, 2, "", 0.7, "answered always or never"),
    (0.0, 0, "", 0.01, "--temperature 0.01"), (4000.0, 0, "why", 0.7, "--lr that is too high")])
def test_the_advice_for_flat_steps_fits_the_run(kl, right, error, temperature, sentence):
    row = {"flat": 4, "groups": 4, "reward": 0.5, "kl": kl}  # whatever the reward is: a fork may change it
    rollouts = [rollout_of(error) for _ in range(4)]
    for rollout in rollouts[:right]:
        rollout.right = True
    assert sentence in advice.flat_steps([row] * 3, rollouts, temperature)


def test_a_group_without_an_outcome_is_not_counted():
    rollouts = [rollout_of("", failed="x"), rollout_of("")]
    row = log.step_row(1, rollouts, rollouts[1:], [1], 1, NO_UPDATE, [])
    assert (row["flat"], row["groups"]) == (1, 1)


def test_the_commonest_reasons_of_failed_rollouts_come_first():
    rollouts = [rollout_of(failed=why) for why in "abbcccd"] + [rollout_of()]
    lines = ["failed 3 times: c", "failed 2 times: b", "failed 1 times: a"]
    assert advice.failures(rollouts).splitlines() == lines


# The models and the memory plan

def same(one, two):
    tensors = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in tensors)


@pytest.mark.parametrize("other", [None, "other"])
def test_training_changes_the_policy_and_not_the_fixed_model_nor_the_reference(tmp_path, monkeypatch, other):
    spy(monkeypatch, "train")
    checkpoint = run(tmp_path / "run", **QUICK | {"steps": 2}, fixed=other) / "step-2"
    _, (policy, fixed, *_), reference, *_ = train.train.call_args.args
    played, = set(fixed.values())
    assert same(played.model, load_engine(other or "model").model)
    assert (played is reference) == (other is None)
    assert same(reference.model, load_engine("model").model) and not same(policy.model, reference.model)
    assert same(policy.model, load_engine(str(checkpoint)).model)
    how = json.loads((checkpoint / "train.json").read_text())
    folder = str(Path(other or "model").resolve())
    assert places.located(how["fixed"], checkpoint) == folder
    assert (how["step"], how["tools"]) == (2, ["base_generator"])


def choices(data="ten.jsonl", model="model"):
    return argparse.Namespace(data=data, judge=None, model=model, lora=None, lr=1.0, steps=2,
                              questions=16, group_size=8, max_turns=2)


@pytest.mark.parametrize("data, model, warned", [
    ("ten.jsonl", "model", False), ("ten.jsonl", str(TOY), True), ("nq", str(TOY / "hops"), True),
    (str(TOY / "train.jsonl"), str(TOY), False)])
def test_a_toy_that_gets_questions_from_elsewhere_is_said_to_know_only_its_own_world(
        capsys, data, model, warned):
    setup.show_choices(choices(data, model), setup.Data([None] * 16, [], []))
    assert ("the toy only knows calculations and the facts" in capsys.readouterr().out) is warned


def test_a_step_of_more_questions_than_there_are_says_so(capsys):
    args = choices()
    for number, words in ((16, "16 questions x 8"), (10, "16 questions (some again: there are no more) x 8")):
        setup.show_choices(args, setup.Data([None] * number, [], []))
        assert f"2 steps of {words} rollouts" in capsys.readouterr().out


def test_a_run_that_will_not_fit_is_refused_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(fit, "host_memory", lambda: 1e6)
    monkeypatch.setattr(loading, "load_engine", crash)
    assert command(*words("refused")) == 2
    assert "it needs 0 GB of memory even with --gradient-checkpointing --lora 32" in capsys.readouterr().err


@pytest.mark.parametrize("gigabytes, flags", [(24, "--lora 32 --token-budget 5120"), (48, "--lora 32"),
                                              (80, "--optimizer-device cpu")])
def test_a_7b_gets_a_plan_for_the_card_before_its_data(tmp_path, monkeypatch, capsys, gigabytes, flags):
    sizes.config("7b").save_pretrained(tmp_path / "7b")
    monkeypatch.setattr(adapters, "peft", lambda: None)
    monkeypatch.setattr(loading, "pick_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(loading, "pick_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(gigabytes * 1.0737e9), 0))
    monkeypatch.setattr(fit, "host_memory", lambda: 128e9)
    monkeypatch.setattr(training, "training", Mock(side_effect=ValueError("no network")))
    assert command("train.py", "--model", str(tmp_path / "7b")) == 2
    out, error = capsys.readouterr()
    assert f"with {flags} (without: 153 GB)\n" in out and error == "train.py: no network\n"


def test_a_hub_name_without_a_gpu_is_refused_before_anything_is_downloaded(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(loading, "config_of", crash)
    assert command("train.py", "--model", "Qwen/Qwen2.5-7B-Instruct") == 2
    assert "there is no folder Qwen/Qwen2.5-7B-Instruct here, and no GPU" in capsys.readouterr().err


def test_the_users_own_command_says_in_four_lines_what_it_chose(tmp_path, monkeypatch, capsys):
    questions = [Question(str(n), "even") for n in range(1000)]
    monkeypatch.setattr(training, "training", lambda names, limit, seed: questions[:limit])
    monkeypatch.setattr(train, "train", lambda *args: None)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "Qwen", wordy(QWEN_TEMPLATE), max_position_embeddings=32768)
    assert command("train.py", "--model", "Qwen", "--device", "cpu") == 0
    memory, *lines = capsys.readouterr().out.splitlines()[:4]
    assert re.fullmatch(r"memory  \d+\.\d of \d+ GB", memory) and lines == [
        "data    nq+deepmath: 936 questions to train on, 64 to choose best/, 0 to test",
        "judge   Qwen (the frozen copy), for answers that the rules cannot read",
        "learn   all weights, lr 1e-06, 32 steps of 32 questions x 8 rollouts, at most 3 turns"]


@pytest.mark.exhaustive
def test_a_bfloat16_run_resumed_equals_one_that_was_not(tmp_path, monkeypatch):
    settings = dict(dtype="bfloat16", steps=2, lr=1e-5)  # below most weights' last bit: masters carry it
    straight = run(tmp_path / "run", **settings)
    at(1, interrupt, monkeypatch)
    stopped = run(tmp_path / "stopped", 128 + SIGINT, **settings)
    assert everything(resume(stopped), 2) == everything(straight, 2)
    after, before = (load_engine(str(name), dtype="bfloat16") for name in (straight / "step-2", "model"))
    assert not same(after.model, before.model)


def test_two_steps_run_end_to_end_on_a_model_of_qwen2_5_7bs_configuration(tmp_path, monkeypatch, capsys):
    shipped = {"bos_token_id": 0, "pad_token_id": 0, "do_sample": True, "eos_token_id": [2, 0],
               "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    write(tmp_path / "qwen", wordy(QWEN_TEMPLATE), generation=shipped, hidden_size=112, intermediate_size=592,
          num_attention_heads=28, num_key_value_heads=4, rms_norm_eps=1e-6,
          rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False,
          initializer_range=0.02, max_position_embeddings=32768, sliding_window=131072, max_window_layers=28,
          bos_token_id=0, attention_dropout=0.0)
    out = run(tmp_path / "run", **QUICK | {"steps": 2}, model=tmp_path / "qwen", group_size=2)
    saved = json.loads((out / "step-2" / "generation_config.json").read_text())
    assert len(rows(out)) == 2 and {key: saved[key] for key in shipped} == shipped
    engine = load_engine(out / "step-2")
    config = engine.model.config
    assert engine.chat.stops == [2, 0] and engine.context() == 32768
    assert (config.num_key_value_heads, config.tie_word_embeddings) == (4, False)
    assert config.rope_parameters["rope_theta"] == 1e6
    text = solved(monkeypatch, capsys, out / "step-2").out
    assert f"planner {out / 'step-2'} |" in text and f"fixed   {tmp_path / 'qwen'} |" in text


def solved(monkeypatch, capsys, model):
    """What solve.py prints for one question."""
    flags = "--tools base_generator --max-turns 1 --max-new-tokens 4 --device cpu".split()
    monkeypatch.setattr(sys, "argv", ["solve.py", "Who?", "--model", str(model), *flags])
    solve.main()
    return capsys.readouterr()


# Adapters

@pytest.mark.extras("peft")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_checkpoint_with_adapters_is_exactly_the_policy(tmp_path, monkeypatch, capsys, dtype):
    spy(monkeypatch, "train")
    out = run(tmp_path / "run", lora=4, lr=1e-2, steps=2, dtype=dtype, gradient_checkpointing=True)
    _, (policy, fixed, *_), reference, *_ = train.train.call_args.args
    assert reference is policy and fixed["default"].model is policy.model  # one copy for all
    loaded = adapters.load(str(out / "step-2"), dtype=dtype)
    before, merged = (load_engine(str(name), dtype=dtype) for name in ("model", out / "step-2"))
    logps = lambda engine: token_logps(engine.model, [Action(before.chat.encode("hi"), [40, 41, 42], 0)], 1.0)
    assert torch.equal(logps(policy), logps(loaded))
    # in float32 the merged weights may round to the same log-probs
    assert dtype == "float32" or not torch.equal(logps(policy), logps(merged))
    assert (logps(policy) - logps(merged)).norm() < 0.5 * (logps(policy) - logps(before)).norm()
    assert dtype == "bfloat16" or torch.allclose(logps(policy), logps(merged), atol=1e-4)
    assert str(loaded).startswith(f"{out / 'step-2'} |") and "merged" not in capsys.readouterr().err
    with policy.model.disable_adapter():
        assert torch.equal(logps(policy), logps(before))  # nothing else has changed
    assert fixed["default"](["hi"])[0].ids == before(["hi"])[0].ids  # the adapters are off


def test_what_adapters_learn_below_the_last_bit_of_a_weight_is_right_in_the_mean_of_the_merged_model():
    weight = torch.full((400, 500), -0.02).bfloat16()
    learnt = weight.float() + 3e-6  # a fortieth of the gap between two bfloat16 numbers there
    assert torch.equal(learnt.bfloat16(), weight)  # the nearest: nothing was learnt
    merged = adapters.dithered(learnt, torch.bfloat16).float()
    assert (merged - weight.float()).mean().item() == pytest.approx(3e-6, rel=0.1)
    assert len(merged.unique()) == 2
    assert torch.equal(adapters.dithered(learnt, torch.float32), learnt)


@pytest.mark.extras("peft")
def test_without_its_base_model_a_checkpoint_with_adapters_is_the_merged_model_and_says_so(tmp_path, capsys):
    shutil.copytree("model", tmp_path / "base")
    best = str(run(tmp_path / "run", model=tmp_path / "base", lora=4, lr=1e-2, steps=1) / "best")
    shutil.copytree("other", tmp_path / "base", dirs_exist_ok=True)  # other weights under the same name
    assert same(adapters.load(best).model, load_engine(best).model)
    shutil.rmtree(tmp_path / "base")
    assert same(adapters.load(best).model, load_engine(best).model)
    lines = capsys.readouterr().err.splitlines()  # among them warnings of the packages
    changed, gone = [line for line in lines if "loaded without its adapters, as merged" in line]
    assert "has changed since" in changed and "There is no folder" in gone


@pytest.mark.extras("peft")
def test_adapters_that_were_moved_with_their_base_are_found_and_their_settings_import_nothing(
        tmp_path, capsys, monkeypatch):
    shutil.copytree("model", tmp_path / "before" / "base")
    run(tmp_path / "before" / "run", model=tmp_path / "before" / "base", lora=4, lr=1e-2, steps=1)
    shutil.move(tmp_path / "before", tmp_path / "after")
    best = tmp_path / "after" / "run" / "best"
    file = best / "adapters" / "adapter_config.json"
    settings = json.loads(file.read_text())
    assert settings["base_model_name_or_path"] == "../../base"
    assert not (best / "adapters" / "README.md").exists()
    file.write_text(json.dumps(settings | {"megatron_config": {}, "megatron_core": "antigravity"}))
    monkeypatch.setitem(sys.modules, "antigravity", None)  # an import would fail
    loaded = adapters.load(str(best))
    assert isinstance(loaded, adapters.Policy) and "without its adapters" not in capsys.readouterr().err


@pytest.mark.extras("peft")
def test_a_run_with_adapters_goes_on_and_damaged_adapters_are_named(tmp_path, monkeypatch, capsys):
    straight = run(tmp_path / "run", lora=4, steps=2)
    with monkeypatch.context() as patch:
        at(1, interrupt, patch)
        stopped = run(tmp_path / "stopped", 128 + SIGINT, lora=4, steps=2)
    assert everything(resume(stopped), 2) == everything(straight, 2)
    saved = [folder / "step-2" / "adapters" / "adapter_model.safetensors" for folder in (stopped, straight)]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    saved[0].write_bytes(b"half of one")
    assert command("train.py", "--resume", str(stopped), "--steps", "3") == 2
    assert "step-2 is damaged: remove it, then --resume" in capsys.readouterr().err


@pytest.mark.extras("peft")
def test_a_run_with_adapters_prints_no_warning_of_other_packages(tmp_path, recwarn):
    run(tmp_path / "run", lora=4, steps=1)
    assert not [str(warning.message) for warning in recwarn if warning.category is FutureWarning]


def test_without_peft_nothing_is_trained_and_the_merged_model_serves(tmp_path, monkeypatch, capsys):
    needs = "needs the package peft, which is not installed: pip install peft"
    monkeypatch.setitem(sys.modules, "peft", None)
    assert command(*words(tmp_path / "run", lora=4)) == 2 and f"--lora {needs}" in capsys.readouterr().err
    load_engine("model").save(tmp_path)
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text('{"base_model_name_or_path": "nowhere"}')
    out, err = solved(monkeypatch, capsys, tmp_path)
    assert f"planner {tmp_path} |" in out and "loaded without its adapters, as merged and rounded" in err
    assert needs in err
