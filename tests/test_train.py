"""train.py: what a run leaves behind, whatever interrupts it, and that an edit of its parts acts.

A tiny random Qwen2 writes no plan that can be parsed, so all its groups would be flat. Here a
rollout is right if its plans end by themselves, and are not cut at the limit of tokens: this can be
learnt, and the sampled tokens alone decide it."""

import csv
import importlib
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import answer, spy, without_seconds
from test_forks import code_of
from test_house import ORDER, ROOMS, ROOT
from test_local import CHATML, tiny, tokenizer
from transformers import modeling_utils

import flow_grpo
import generator
import planner
import solve
import train
from memory import Memory, Step
from models.completion import TOO_LONG, Completion
from models.local import load
from record import checkpoints, folder, health
from record.flags import TOY
from scale import rehearsal
from tools import TOOLS
from world.mistakes import Mistake

INVOKED = Path.cwd()
FLAGS = (
    "--model model --data data.jsonl --valid valid.jsonl --test valid.jsonl --tools base_generator "
    "--judge none --steps 4 --questions 2 --group-size 4 --max-turns 2 --max-new-tokens 6 "
    "--lr 6e-3 --minibatches 2 --every 2 --keep 2 --seed 1 --device cpu"
)
QUICK = dict(steps=1, valid="none", test="none")  # for a test that looks at one step alone
ACCURACIES = {0: 0.2, 1: 0.6, 2: 0.3, 3: 0.6, 4: 0.7}  # after each step, in some tests
GRADE, SUMMARY = solve.grade, train.summary


def graded(grade):
    """grade(), but a rollout is right if no plan of it was cut."""

    def by_length(rollouts, judge):
        for rollout in rollouts:
            cut = any(completion.cut for completion in rollout.sampled)
            rollout.answer = "cut" if cut else "whole"
        grade(rollouts, judge)

    return by_length


def jsonl(path, *questions):
    rows = [json.dumps({"question": question, "answer": "whole"}) for question in questions]
    Path(path).write_text("\n".join(rows) + "\n")
    return str(path)


def write(folder):
    """A random model whose completions may end at many tokens.

    Its tokenizer knows the words of our prompts: they are short then, and the tests fast."""
    texts = planner.prompt(Memory(""), TOOLS), planner.analysis_prompt("", TOOLS), generator.PROMPT
    tok = tokenizer().train_new_from_iterator(texts * 2, 1000)
    tok.chat_template = CHATML
    sizes = dict(vocab_size=len(tok), num_hidden_layers=1, max_position_embeddings=4096)
    tiny(**sizes).save_pretrained(folder)
    tok.save_pretrained(folder)
    stops = {"eos_token_id": [2, *range(20, 150)]}
    Path(folder, "generation_config.json").write_text(json.dumps(stops))


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A folder with a model and questions; tests run inside it."""
    folder = tmp_path_factory.mktemp("train")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["train.py"])
        patch.setattr(solve, "grade", graded(GRADE))
        patch.setattr(train.fit, "free_memory", lambda device: (0, 64e9))  # whatever runs beside
        patch.setattr("models.local.ignores_padding", lambda *_: True)  # tests/test_local.py tries
        patch.setattr("record.folder.version", lambda: "code")
        write("model")
        jsonl("data.jsonl", *"abcde")
        jsonl("valid.jsonl", *"vwxyz")
        yield folder


@pytest.fixture(autouse=True)
def signals_as_before():
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    train.SIGNALS.clear()
    for number, handler in before.items():
        signal.signal(number, handler)


def words(out, **changed):
    """The command line: FLAGS with these changes."""
    given = [*FLAGS.split(), "--out", str(out)]
    for name, value in changed.items():
        given += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return given


def command(*words):
    """train.py with these words, in this process: its exit code, or the sentence that it leaves."""
    train.SIGNALS.clear()
    torch.seed()  # a new process has other random numbers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "lock", lambda folder: None)  # this process would keep it
        try:
            train.train(train.settings(train.given(words)))
        except SystemExit as left:
            return left.code
        except Mistake as why:
            return f"train.py: {why}"
    return 0


def run(out, **changed):
    assert command(*words(out, **changed)) == 0
    return Path(out)


def resume(out, *more):
    assert command("--resume", str(out), *more) == 0
    return Path(out)


def rows(folder, name="log.csv"):
    with open(Path(folder, name), newline="") as file:
        return list(csv.DictReader(file))


def texts(folder):
    return without_seconds(Path(folder, "rollouts.jsonl"))


def everything(folder, step=4):
    """What a run leaves, byte for byte, but for the seconds of its rollouts."""
    folder = Path(folder)
    last = folder / f"step-{step}"
    saved = torch.load(last / "trainer-0.pt", weights_only=True)["state"]
    state = {(a, b): value.tolist() for a, each in saved.items() for b, value in each.items()}
    names = "log.csv", "evals.csv", f"step-{step}/model.safetensors", f"step-{step}/train.json"
    return [(folder / name).read_bytes() for name in names], state, texts(folder), best(folder)


def best(run):
    """The checkpoint to which `best` points; None if there is none."""
    return os.readlink(Path(run, "best")) if Path(run, "best").exists() else None


def folders(run):
    return sorted(path.name for path in Path(run).glob("*/"))


@pytest.fixture(scope="module")
def whole(place):
    """A run that nothing interrupted."""
    return run("whole")


def accuracies(monkeypatch):
    """Evaluations find ACCURACIES, whatever the tiny model has learnt."""
    evaluate, steps = train.evaluate, []

    def evaluated(args, cast, frozen, step, *rest):
        steps.append(step)
        evaluate(args, cast, frozen, step, *rest)

    def found(rollouts):
        return SUMMARY(rollouts) | {"accuracy": ACCURACIES[steps[-1]]}

    monkeypatch.setattr(train, "evaluate", evaluated)
    monkeypatch.setattr(train, "summary", found)


# ------------------------------------------------------------------------------ what a run leaves
def test_a_run_leaves_its_settings_its_logs_and_checkpoints(whole):
    files = {path.name for path in whole.iterdir()} - {"best"}
    logs = {"args.json", "log.csv", "evals.csv", "rollouts.jsonl"}
    assert files == logs | {"step-2", "step-4"}
    assert list(rows(whole)[0])[:5] == ["step", "reward", "right", "judged", "turns"]
    assert [row["step"] for row in rows(whole)] == list("1234") and len(texts(whole)) == 32
    assert any(float(row["grad_norm"]) > 0 and float(row["kl"]) > 0 for row in rows(whole))
    evaluated = [(row["step"], row["questions"], row["n"]) for row in rows(whole, "evals.csv")]
    names = [("0", "test"), ("0", "valid"), ("2", "valid"), ("4", "valid"), ("4", "test")]
    assert evaluated == [(*name, "5") for name in names]
    settings = json.loads((whole / "args.json").read_text())
    assert settings["group_size"] == 4 and settings["fixed"] == "model" and "code" in settings
    saved = json.loads((whole / "step-4" / "train.json").read_text())
    assert (saved["fixed"], saved["tools"]) == ("model", ["base_generator"])
    args = solve.flags(["q", "--model", str(whole / "step-4")])
    assert (args.fixed, args.corpus) == ("model", None)


def test_another_seed_gives_another_run(whole):
    assert rows(run("other", **QUICK | {"seed": 2})) != rows(whole)[:1]


def test_training_changes_the_policy_and_not_the_frozen_copy(monkeypatch):
    calls = spy(monkeypatch, train, "update")
    out = run("two", **QUICK | {"steps": 2})
    (policy, reference, *_), *_ = calls[-1]
    state = lambda model: {name: weight.tolist() for name, weight in model.state_dict().items()}
    models = [load(str(name), flow_grpo.distribution).model for name in ("model", out / "step-2")]
    assert state(reference) == state(models[0]) != state(models[1]) == state(policy)


def test_best_is_a_link_to_the_checkpoint_that_beats_the_untrained_and_all_before(
    monkeypatch, capsys
):
    accuracies(monkeypatch)
    out = run("best", every=1, keep=1, steps=3, test="none")
    assert best(out) == "step-1" and folders(out) == ["best", "step-1", "step-3"]
    files = {path.name for path in (out / "step-1").iterdir()}
    assert "trainer-0.pt" not in files and "model.safetensors" in files
    text = capsys.readouterr().out
    assert f"Try: python solve.py --model {out}/best\n" in text
    assert text.count("] of 5 | ") == text.count("\nvalid after step ") == 4
    (out / "step-1-merged").mkdir()  # somebody's own
    resume(out, "--steps", "4")  # the best of before is not kept for ever
    assert folders(out) == ["best", "step-1-merged", "step-4"]
    shutil.move(out / "step-4", "damaged")
    why = f"train.py: {out} has steps, but no checkpoint to go on from: give another --out"
    assert command("--resume", str(out), "--steps", "4") == why and len(rows(out)) == 4
    with monkeypatch.context() as patch:
        patch.setitem(ACCURACIES, 0, 0.9)
        assert not (run("none", **QUICK | {"valid": "valid.jsonl"}) / "best").exists()


def test_a_run_of_before_a_setting_was_new_goes_on():
    out = run("older", **QUICK)
    args = json.loads((out / "args.json").read_text())
    del args["trained"]
    folder.replace_file(out / "args.json", json.dumps(args).encode())
    resume(out, "--steps", "2")
    assert json.loads((out / "step-2/train.json").read_text())["trained"] == ["planner"]


def test_a_checkpoint_without_its_optimiser_is_written_again():
    out = run("halves", **QUICK | {"steps": 2}, every=1)
    weights = (out / "step-2/model.safetensors").read_bytes()
    (out / "step-2/trainer-0.pt").unlink()  # to save room
    (out / "step-2/model.safetensors").write_bytes(b"")
    assert checkpoints.last_checkpoint(out).name == "step-1"
    resume(out)
    assert checkpoints.last_checkpoint(out).name == "step-2"
    assert (out / "step-2/model.safetensors").read_bytes() == weights


def test_a_checkpoint_that_is_gone_is_not_the_best_nor_is_one_for_its_test(tmp_path):
    values = {0: 0.1, 10: 0.6, 20: 0.5, 30: 0.55}
    lines = [f"{step},valid,{value}\n{step},test,{1 - value}\n" for step, value in values.items()]
    (tmp_path / "evals.csv").write_text("step,questions,accuracy\n" + "".join(lines))
    for step in (20, 30):
        (tmp_path / f"step-{step}").mkdir()
    checkpoints.mark_best(tmp_path, keep=None)
    assert best(tmp_path) == "step-30"


def test_minutes_save_between_evaluations_and_a_run_begins_with_a_checkpoint(monkeypatch, capsys):
    now, update = [0.0], train.update

    def slow(*given, **settings):
        now[0] += 40
        return update(*given, **settings)

    monkeypatch.setattr(train, "update", slow)
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    out = run("slow", **QUICK | {"steps": 5}, every=9, minutes=1, keep=9)
    assert folders(out) == ["step-0", "step-2", "step-4", "step-5"]
    first = Path("model", "model.safetensors").stat().st_size
    assert (out / "step-0" / "model.safetensors").stat().st_size == first
    text = capsys.readouterr().out
    assert "5 to train on, 0 to validate, 0 to test" in text
    assert f"Try: python solve.py --model {out}/step-5\n" in text


def test_a_disk_that_is_too_small_for_the_checkpoints_is_refused_before_the_first_step(monkeypatch):
    why = "train.py: checkpoints in small need 0.0 GB, and there is room for 0.0: make"
    disk = SimpleNamespace()
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda folder: disk)
    weights = 4 * sum(w.numel() for w in load("model", flow_grpo.distribution).model.parameters())
    # two checkpoints, each with the weights and two moments, and the weights of the best one
    disk.free, small = int(6.9 * weights), words("small", every=1, keep=1)
    assert command(*small).startswith(why) and not Path("small").exists()
    disk.free = int(7.1 * weights)
    assert command(*small) == 0
    disk.free = int(3.0 * weights)  # and what is there will be deleted
    resume("small", "--steps", "5")
    half = Path("small/writing/half")  # of a run that was killed: resuming deletes it
    half.parent.mkdir()
    half.write_bytes(bytes(5 * weights))
    disk.free = 0
    resume("small", "--steps", "6")
    assert command("--resume", "small", "--steps", "7").startswith(why)
    assert command(*words("small2", every=9, steps=8, minutes=30, keep=0)).startswith(why[:26])


def test_the_last_step_is_saved_and_evaluated_whatever_every_says():
    out = run("odd", steps=3, every=2, test="none")
    steps = [row["step"] for row in rows(out, "evals.csv")]
    assert steps == list("023") and (out / "step-3" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "trained, model", [(("generator",), "model"), (("planner", "generator"), "trains2/step-1")]
)
def test_the_last_line_names_the_modules_that_were_trained(trained, model, monkeypatch, capsys):
    monkeypatch.setattr(train, "TRAINED", trained)
    out = run(f"trains{len(trained)}", **QUICK)
    told = f"Try: python solve.py --model {model} --generator {out}/step-1\n"
    assert capsys.readouterr().out.endswith(told)
    args = solve.flags(["q", "--model", f"{out}/step-1"])
    assert args.generator == f"{out}/step-1" and args.verifier is None


def test_a_model_for_a_module_that_is_trained_is_refused(monkeypatch):
    monkeypatch.setattr(train, "TRAINED", ("planner", "verifier"))
    told = command(*words("refused", **QUICK, verifier="elsewhere"))
    assert "the verifier is trained: leave out --verifier, which would not act" in told


@pytest.mark.parametrize("right", [True, False])
def test_a_model_whose_rows_cannot_be_trees_is_said_to_be_slower(right, monkeypatch, capsys):
    monkeypatch.setattr(train.trees, "one_is_right", lambda model: right)
    run(f"trees-{right}", **QUICK)
    assert ("the update reads a row for each plan" in capsys.readouterr().out) == (not right)


def test_plain_changes_a_log_by_rounding_only(whole, monkeypatch):
    updates = spy(monkeypatch, train, "update")
    plain = run("plain", **QUICK, plain=True)
    assert updates[0][1]["rows"] is flow_grpo.padded
    assert texts(plain)[:8] == texts(whole)[:8]
    numbers = [{k: float(v) for k, v in rows(out)[0].items()} for out in (plain, whole)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=1e-4)


def test_every_flag_of_the_objective_reaches_it(monkeypatch):
    updates, rollouts = spy(monkeypatch, train, "update"), spy(monkeypatch, solve, "roll_out")
    made = spy(monkeypatch, train.masters, "Masters")
    recomputed = spy(monkeypatch, modeling_utils, "checkpoint")
    flags = dict(temperature=0.9, beta=0.01, minibatches=3, token_budget=999, token_mean=True)
    flags["max_grad_norm"] = 0.5
    how = dict(clip_low=0.1, clip_high=0.4, lr=2e-4, optimizer_device="cpu")
    run("flags", **QUICK, **flags, **how, gradient_checkpointing=True)
    [((model, _, optimizer, _, groups), settings, _)] = updates
    assert model.is_activation_checkpointing and recomputed
    assert settings.pop("clip") == (0.1, 0.4) and groups == [0] * 4 + [1] * 4
    assert flags.items() <= settings.items() and settings["seed"] == 1_000_003 + 1
    found = {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert found == {(2e-4, 0)} and made[0][0][2] == "cpu"
    how = {"temperature": 0.9, "max_turns": 2, "max_new_tokens": 6, "trained": ("planner",)}
    assert rollouts[0][1] == how


# --------------------------------------------------------------------------- killed and resumed
class Killed(BaseException):
    pass


def kill(monkeypatch, module, name, number=1):
    """The run is killed when this function is called for the number-th time."""
    calls, function = [], getattr(module, name)

    def killed(*given, **settings):
        calls.append(given)
        if len(calls) == number:
            raise Killed
        return function(*given, **settings)

    monkeypatch.setattr(module, name, killed)


MOMENTS = {  # {when: (module, function, which of its calls)}, after the moment before
    "before the settings are written": (checkpoints, "replace_file", 1),
    "before there is a checkpoint": (checkpoints.local, "save", 1),
    "in the first evaluation": (solve, "roll_out", 1),
    "in the rollouts of a step": (solve, "roll_out", 3),
    "in the second mini-batch": (flow_grpo, "gradient", 2),
    "between two logs": (train.checkpoints, "add_rollouts", 1),
    "while the weights are written": (checkpoints.local, "save", 1),
    "while a checkpoint is synced": (checkpoints, "sync", 3),
    "before a checkpoint gets its name": (Path, "rename", 1),
    "in an evaluation": (train, "summary", 1),
    "before its row is written": (train, "add_row", 1),
    "before it is marked as the best": (train.checkpoints, "mark_best", 1),
    "while older ones are deleted": (checkpoints.shutil, "rmtree", 3),
    "while another one is marked": (Path, "rename", 3),
    "in the last evaluation": (train, "summary", 1),
}


@pytest.mark.exhaustive
def test_a_run_that_is_killed_at_every_moment_equals_one_that_was_not(monkeypatch):
    accuracies(monkeypatch)
    straight, steps = everything(run("straight", every=1)), []
    for module, name, call in MOMENTS.values():
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill(patch, module, name, call)
            command(*begun("killed", every=1))
        steps.append((max(folders("killed"), default=""), best("killed")))
        for file in Path("killed").glob("*.csv"):
            with open(file, "a") as half:  # a disk that took half a line
                half.write("3,0.")
    assert everything(resume("killed")) == straight and not Path("killed.new").exists()
    last = [("step-1", None), ("step-2", "step-1"), ("step-3", "step-1"), ("step-4", "step-1")]
    assert steps[-4:] == last and {step for step, _ in steps[:6]} == {"", "step-0"}


def begun(out, **changed):
    """The words that begin a run, or go on with it. Until it has its settings, it has no folder."""
    return ["--resume", out] if Path(out, "args.json").exists() else words(out, **changed)


SCRIPT = f"""
import os, runpy, signal, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import solve, test_train
from record import checkpoints
solve.grade, append = test_train.graded(solve.grade), checkpoints.append

def interrupted(path, records):
    checkpoints.append = append
    append(path, records)
    os.kill(os.getpid(), signal.SIGINT)

if os.environ.get("INTERRUPTED"):
    checkpoints.append = interrupted
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""


def started(*given, **env):
    """train.py in a new process, as a user starts it."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env)
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *given], **pipes)


def test_a_ctrl_c_that_comes_twice_at_once_is_one_and_a_later_one_ends_at_once(monkeypatch):
    now, killed = [10.0], []
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(train.os, "kill", lambda process, number: killed.append(number))
    for seconds in (0, 0.5, 1.5):
        assert not killed
        now[0] = 10 + seconds
        train.stop(signal.SIGINT, None)
    assert killed == [signal.SIGINT] and [*train.SIGNALS] == [signal.SIGINT]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_loses_its_pipe_or_its_terminal_keeps_its_step(whole, monkeypatch, number):
    reading, writing = os.pipe()
    out, line_of = f"unread{number}", train.line_of

    def ended(*row):
        os.close(reading)  # as if Ctrl-C had ended the tee of `train.py | tee log`
        if number == signal.SIGHUP:
            signal.raise_signal(number)
        return line_of(*row)

    with monkeypatch.context() as patch, os.fdopen(writing, "w") as stdout:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(train, "line_of", ended)
        assert command(*words(out)) == 128 + max(number, signal.SIGTERM)
    assert len(rows(out)) == 1 and everything(resume(out)) == everything(whole)


def test_no_line_commands_the_terminal(capsys):
    checkpoints.say("the code has changed: \x1b[2K")
    assert capsys.readouterr().out == "the code has changed: \\x1b[2K\n"


def test_nohup_is_not_undone():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run("nohup", **QUICK)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.exhaustive
def test_ctrl_c_ends_a_run_after_its_step_and_says_how_to_go_on(whole):
    process = started(*words("stopped"), INTERRUPTED="in step 1")
    out, error = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, error
    assert "\nStopping after this step; Ctrl-C again leaves at once.\n" in out
    assert "\nStopped after step 1. Go on with --resume stopped\n" in out
    assert len(rows("stopped")) == 1 and everything(resume("stopped")) == everything(whole)


@pytest.mark.exhaustive
def test_real_processes_that_are_killed_at_random_moments_lose_nothing(whole):
    changed = lambda path: os.path.exists(path) and os.stat(path).st_mtime
    for number in [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGKILL]:
        before, process = changed("real/args.json"), started(*begun("real"))
        while process.poll() is None and changed("real/args.json") in (before, False):
            time.sleep(0.01)
        time.sleep(random.uniform(0, 1.5))
        for _ in range(random.choice([1, 2])):  # the second Ctrl-C leaves at once
            process.send_signal(number)
        _, error = process.communicate()
        assert process.returncode in (0, 1, -number, 128 + number), error
        assert error.strip().rpartition("\n")[2][:9] in ("", "KeyboardI", "train.py:"), error
    process = started(*begun("real"))
    assert (process.communicate(), process.returncode)[1] == 0
    assert everything("real") == everything(whole)


def test_a_finished_run_may_be_given_more_steps_and_not_fewer(whole, monkeypatch):
    out = run("short", steps=2, test="none")
    monkeypatch.setattr(train.fit, "choose", None)  # a run keeps the plan that it began with
    before = everything(out, 2)
    assert everything(resume(out), 2) == before  # nothing is left to do
    why = command("--resume", "short", "--steps", "1")
    assert why == "train.py: short has done 2 steps: give --steps 2 or more"
    assert everything(out, 2) == before
    resume(out, "--steps", "4")
    assert rows(out) == rows(whole) and texts(out) == texts(whole)


def test_an_evaluation_says_how_far_the_weights_moved(whole):
    moved = {row["step"]: float(row["moved_max"]) for row in rows(whole, "evals.csv")}
    assert moved["0"] == 0 < moved["2"] < 6e-3 * 8 * 2 and len(moved) == 3


def test_an_answer_that_failed_in_an_evaluation_is_wrong(monkeypatch):
    grade = lambda rollouts, judge: [vars(rollout).update(right=True) for rollout in rollouts]
    monkeypatch.setattr(solve, "grade", grade)
    failing(monkeypatch, call=1, which=slice(1), failed=f"planner: {TOO_LONG}", right=False)
    [row] = rows(run("fails", **QUICK | {"valid": "none", "test": "valid.jsonl"}), "evals.csv")[:1]
    assert (row["n"], row["failed"], row["accuracy"]) == ("5", "1", "0.8")


def test_every_evaluation_samples_alike_and_as_the_training_does(monkeypatch):
    calls = spy(monkeypatch, train, "rollouts_of")
    run("alike", temperature=0.6, every=1, steps=2)
    found = [given for given, *_ in calls if given[1] == 1]  # one rollout a question
    assert len(found) == 5  # before, after each step, and the test twice
    assert {(temperature, seed) for *_, temperature, seed in found} == {(0.6, 1)}


def test_what_a_stateful_tool_keeps_is_not_sent_to_the_other_gpus(monkeypatch):
    rollout = SimpleNamespace(state={"connection": threading.Lock()})
    monkeypatch.setattr(solve, "roll_out", lambda *own, **how: [rollout])
    monkeypatch.setattr(train.sharded, "together", lambda results, copies: pickle.dumps(results))
    args = SimpleNamespace(max_turns=1, max_new_tokens=1)
    [sent] = pickle.loads(train.rollouts_of([None], 1, args, (), 1.0, 0))
    assert sent.state == {}


def test_chance_in_a_prompt_of_a_fork_depends_on_the_seed_alone(monkeypatch):
    args, seen = SimpleNamespace(max_turns=1, max_new_tokens=1), []
    monkeypatch.setattr(solve, "roll_out", lambda *own, **how: seen.append(random.random()) or [])
    for seed in (7, 7, 8):
        train.rollouts_of([None], 1, args, (), 1.0, seed)
    assert seen[0] == seen[1] != seen[2]


def test_advantages_of_other_rollouts_are_refused():
    rollouts = [SimpleNamespace(sampled=[Completion("", [1], [2])])] * 2
    with pytest.raises(ValueError, match="another length: remove the same"):
        train.actions_of(rollouts, torch.ones(3))
    assert [a.rollout for a in train.actions_of(rollouts, torch.ones(2))] == [0, 1]


def test_the_line_of_the_cost_has_the_time_that_is_left_and_the_modules_shares():
    output = lambda module, turn, seconds: dict(module=module, turn=turn, seconds=seconds)
    first = [output("planner", 1, 2.0), output("planner", 2, 1.0), output("judge", 2, 0.5)]
    other = [output("planner", 1, 2.0), output("judge", 1, 0.5), output("python_coder", 1, 9.0)]
    rollouts = [SimpleNamespace(outputs=outputs) for outputs in (first, other)]
    line = "        3.0 minutes are left, at 6 seconds a step (planner 50%, judge 8%)"
    of = lambda steps: health.cost_line(rollouts, 6.0, steps, TOOLS)
    assert of(30) == line and "        3.0 hours are left, at 6 seconds" in of(1800)
    first.append(output("critic", 1, 3.5))  # a module that a fork has added
    assert "(critic 58%, planner 50%, judge 8%)" in of(30)


def test_advice_names_a_tool_of_which_no_call_worked_and_no_other(capsys):
    step = lambda tool, error: SimpleNamespace(tool=tool, error=error, result="Error: no network")
    steps = [step("web_search", True)] * 5 + [step("python_coder", n < 5) for n in range(6)]
    steps += [step("wikipedia_search", True)] * 4
    rollouts = [SimpleNamespace(failed="", memory=SimpleNamespace(steps=steps))]
    calls = {"web_search": 5, "python_coder": 6, "wikipedia_search": 4, "unreadable": 0}
    errors = {"web_search": 5, "python_coder": 5, "wikipedia_search": 4, "unreadable": 0}
    row = calls | {f"{name}_errors": n for name, n in errors.items()} | {"flat": 1, "groups": 2}
    row["my_errors"] = 5  # a column of a fork
    why = "        none of the 5 calls of web_search worked, as: Error: no network"
    assert list(health.advice(row, rollouts)) == [why]
    flat = "        all groups are flat: all rollouts of a question have the same reward"
    assert list(health.advice(row | {"flat": 2}, rollouts)) == [why, flat]
    steps += [SimpleNamespace(tool="", error=True, result="Error: no line 'Tool: ...'")] * 4
    unread = "        4 of 19 plans could not be parsed, such as: Error: no line 'Tool: ...'"
    assert list(health.advice(row | {"unreadable": 4}, rollouts)) == [unread, why]


def test_the_check_before_the_first_update_names_what_is_outside_its_bounds():
    good = dict(reward=0.4, judged=0.1, flat=3, groups=8, cut_plans=0.0, unreadable=1)
    good |= dict(unreadable_errors=1, python_coder=6, python_coder_errors=3, web_search=0)
    good["web_search_errors"] = 0
    [line] = health.check_lines(good)
    assert "unreadable plans 14% (at most 20%)" in line and "errors: python_coder 50%" in line
    assert len([*health.check_lines(good | {"reward": 0.85})]) == 2
    bad = {
        "reward": dict(reward=0.05),
        "unreadable plans": dict(unreadable=2),
        "flat groups": dict(flat=7),
        "errors": dict(python_coder_errors=4),
    }
    for name, change in bad.items():
        _, cure = health.check_lines(good | change)
        assert cure.startswith(f"        outside its bounds: {name}; docs/log.md, ")


def test_small_numbers_in_the_line_of_a_step_keep_their_digits(whole):
    numbers = {name: float(value) for name, value in rows(whole)[0].items()}
    counts = {name: int(numbers[name]) for name in ("step", "flat", "groups")}
    line = health.line_of(numbers | counts | {"kl": 4.321e-9, "clip": 4.321e-5}, 4, 1, 1)
    assert " | kl 4.32e-09 | clip 0.00432% | " in line


def test_the_line_of_a_step_has_the_reward_first_and_then_what_can_go_wrong():
    row = dict(step=3, reward=0.5, right=0.5, turns=2.25, errors=0.125, flat=1, groups=4, kl=0.01)
    row |= dict(clip=0.02, failed=0, undecided=0, skipped=0)
    numbers = "| turns 2.25 | errors  12% | flat groups  1/4 | kl 0.01 | clip 2% | 1.0s + 2.0s"
    assert health.line_of(row, 50, 1, 2) == f"step   3/50 | reward 0.50 {numbers}"
    bad = row | dict(right=0.25, failed=2, undecided=1, skipped=4)
    line = f"step   3/50 | reward 0.50 | right  25% {numbers} | failed 2 | undecided 1 | skipped 4"
    assert health.line_of(bad, 50, 1, 2) == line


def test_the_log_counts_what_only_the_judge_granted_and_the_flat_groups():
    [judged, wrong, right] = (solve.Rollout(None, Memory("")) for _ in range(3))
    judged.judged = judged.right = wrong.judged = right.right = True
    row = health.log_row(1, [judged, wrong, right], [judged, wrong, right], [0, 0, 1], 1, [])
    assert (row["judged"], row["right"], row["flat"], row["groups"]) == (1 / 3, 2 / 3, 1, 2)


def test_the_log_counts_the_calls_of_each_tool_and_the_tokens_of_a_plan():
    rollout = solve.Rollout(None, Memory(""))
    rollout.sampled = [Completion("", [1], [2] * tokens) for tokens in (4, 8)]
    called = (1, "a", True), (2, "a", False), (3, "", True)
    rollout.memory.steps = [Step(turn, tool, "", "", "", bad) for turn, tool, bad in called]
    row = health.log_row(1, [rollout], [rollout], [0], 1, ["a", "b"])
    counts = dict(a=2, a_errors=1, b=0, b_errors=0, unreadable=1, unreadable_errors=1)
    assert row | counts | {"plan_tokens": 6} == row


@pytest.mark.parametrize("kept", [[], [0], [0, 1, 2, 3], [0, 1, 3, 4]])
def test_rows_of_the_log_that_are_lost_are_noticed(whole, tmp_path, kept):
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    log = tmp_path / "run" / "log.csv"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[i] for i in kept))
    why = command("--resume", str(tmp_path / "run"), "--steps", "5")
    steps = max(0, len(kept) - 1)
    assert f"log.csv has only {steps} steps, but the checkpoint is of step 4" in why


def test_a_state_that_was_saved_on_a_card_that_is_not_here_is_restored(
    whole, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    shutil.copytree(whole, run, symlinks=True, ignore=shutil.ignore_patterns("step-4"))
    file = run / "step-2/trainer-0.pt"
    saved = torch.load(file, weights_only=True)
    with monkeypatch.context() as patch:  # as rank 99 saves it
        patch.setattr("torch.serialization.location_tag", lambda storage: "cuda:99")
        torch.save(saved, file)
    assert everything(resume(run)) == everything(whole)


def test_a_row_with_other_columns_is_not_written_under_the_old_header(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    log_row = train.log_row
    monkeypatch.setattr(train, "log_row", lambda *given: {"mine": 1} | log_row(*given))
    why = command("--resume", str(tmp_path / "run"), "--steps", "5")
    assert "log.csv has other columns than a row of step 5" in why
    assert rows(tmp_path / "run") == rows(whole)


def test_a_folder_that_is_in_use_is_refused():
    out = run("used", **QUICK)
    folder.lock(out)  # a file that is opened twice counts as another process
    with pytest.raises(Mistake, match="used is in use by another process"):
        train.train(train.settings(train.given(["--resume", "used", "--steps", "2"])))
    assert len(rows(out)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_before_older_ones_go(monkeypatch):
    events, fsync, rename, rmtree = [], os.fsync, Path.rename, shutil.rmtree
    name = lambda path: os.path.relpath(path, Path("order").resolve())

    def synced(file):
        events.append(("sync", name(os.readlink(f"/proc/self/fd/{file}"))))
        fsync(file)

    def renamed(path, target):
        events.append(("rename", name(Path(target).absolute())))
        return rename(path, target)

    def deleted(path, **settings):
        events.append(("delete", name(Path(path).absolute())))
        rmtree(path, **settings)

    accuracies(monkeypatch)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(checkpoints.shutil, "rmtree", deleted)
    out = run("order", steps=1, every=1, keep=1, test="none")
    ours = events[events.index(("rename", "step-0")) + 1 :]
    position = {event: ours.index(event) for event in ours}
    named, marked = position["rename", "step-1"], position["rename", "best"]
    for file in [*(f"writing/{path.name}" for path in (out / "step-1").iterdir()), "writing"]:
        assert position["sync", file] < named, file
    for file in ("log.csv", "evals.csv", "rollouts.jsonl"):
        assert position["sync", file] < named
    last = len(ours) - 1 - ours[::-1].index(("sync", "."))
    first = ours.index(("sync", "."), named)  # the folder, which has the new name
    assert named < first < position["delete", "step-0"] < marked < last


# ------------------------------------------------------------------- failures, memory, what is said
def failing(monkeypatch, call=None, which=slice(None), **changes):
    """Some rollouts of all batches, or of one (counted from 1), end in another way."""
    batches, roll_out = [], solve.roll_out

    def rolled_out(*given, **settings):
        batches.append(roll_out(*given, **settings))
        if call in (None, len(batches)):
            for rollout in batches[-1][which]:
                vars(rollout).update(changes)
        return batches[-1]

    monkeypatch.setattr(solve, "roll_out", rolled_out)
    return batches


@pytest.mark.parametrize("changes", [{"failed": f"planner: {TOO_LONG}"}, {"undecided": True}])
def test_rollouts_without_an_outcome_leave_their_groups(monkeypatch, tmp_path, changes):
    compared, updates = spy(monkeypatch, train, "advantages"), spy(monkeypatch, train, "update")
    numbers = iter(range(100))
    monkeypatch.setattr("rewards.grade.reward", lambda rollout: next(numbers) % 2)
    batches = failing(monkeypatch, which=slice(5, None), **changes)
    [row] = rows(run(tmp_path / "run", **QUICK))
    [((rewards, groups), *_)], [((*_, actions, learnt), *_)] = compared, updates
    assert groups == learnt == [0] * 4 + [1] and len(rewards) == 5
    A, _ = flow_grpo.advantages(rewards, groups)
    assert A.any() and all(action.A == A[action.rollout] for action in actions)
    sampled = [(i, c) for i, rollout in enumerate(batches[0][:5]) for c in rollout.sampled]
    assert [(a.rollout, a.prompt_ids, a.ids) for a in actions] == [
        (i, c.prompt_ids, c.ids) for i, c in sampled
    ]
    assert row[list(changes)[0]] == "3" and float(row["reward"]) == sum(rewards) / 5


def test_two_equal_questions_in_a_batch_are_two_groups(monkeypatch, tmp_path):
    compared = spy(monkeypatch, train, "advantages")
    run(tmp_path / "run", **QUICK, data=jsonl(tmp_path / "twins.jsonl", "same", "same"))
    assert compared[0][0][1] == [0] * 4 + [1] * 4


DOWN = {  # {where: (which call of roll_out(), the last checkpoint then)}, after the one before
    "in the first test": (1, "step-0"),
    "in the first step": (3, "step-0"),
    "in an evaluation": (3, "step-2"),
    "in the step after a checkpoint": (2, "step-2"),
    "in another step": (2, "step-3"),
    "in the last test": (3, "step-4"),
}


def test_a_server_that_is_down_ends_the_run_and_nothing_is_lost(whole, monkeypatch):
    for call, step in DOWN.values():
        with monkeypatch.context() as patch:
            failing(patch, call=call, failed="judge: host answered 503")
            why = command(*begun("down"))
        sentence = r"train.py: (\d) of \1 rollouts were aborted \(judge: host answered 503\)\. Then"
        assert re.match(sentence, why) and "--resume down" in why
        assert max(folders("down"), default=None) == step, why
    assert everything(resume("down")) == everything(whole)


def test_a_step_in_which_every_rollout_failed_is_survived_and_said(monkeypatch, capsys):
    failing(monkeypatch, failed=f"planner: {TOO_LONG}")
    out = run("failed", **QUICK)
    assert rows(out)[0]["failed"] == "8" and rows(out)[0]["grad_norm"] == "0.0"
    text = capsys.readouterr().out
    assert f"failed 8 times: planner: {TOO_LONG}" in text and "| failed 8\n" in text


def test_a_resumed_run_says_that_the_code_changed_and_refuses_other_data(monkeypatch, capsys):
    Path("mine.jsonl").write_text(
        "".join(f'{{"question": "{n}?", "answer": {n}}}\n' for n in range(4))
    )
    monkeypatch.setattr(folder, "version", lambda: "a-old")
    Path("passages.jsonl").write_text(passage := '{"title": "Tin", "text": "a metal"}\n')
    run("changed", **QUICK | {"data": "mine.jsonl", "corpus": "passages.jsonl"})
    monkeypatch.setattr(folder, "version", lambda: "b-new")
    capsys.readouterr()
    for steps in ("2", "3"):  # it is said once, and stays
        assert command("--resume", "changed", "--steps", steps) == 0
        said = "the code has changed since the run began: a-old | b-new" in capsys.readouterr().out
        assert said == (steps == "2")
        monkeypatch.setattr(folder, "version", lambda: "c-new")  # another commit, the same scripts
        assert json.loads(Path("changed/args.json").read_text())["code"] == "a-old | b-new"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["baselines.py"])  # which exchanges a function of train.py
        refused = command("--resume", "changed", "--steps", "4")
        assert "script has changed since the run began: train.py, baselines.py" in refused
    Path("passages.jsonl").write_text(passage.replace("metal", "gas"))
    refused = command("--resume", "changed", "--steps", "4")
    assert "corpus_digest has changed since the run began" in str(refused)
    Path("passages.jsonl").write_text(passage)
    with open("mine.jsonl", "a") as file:
        file.write('{"question": "5?", "answer": 5}\n')
    assert "data_digest has changed since the run began" in str(
        command("--resume", "changed", "--steps", "4")
    )


def test_if_memory_is_short_the_token_budget_is_halved_and_stays_so(monkeypatch):
    sizes, gradient = [], flow_grpo.gradient

    def short(*given, **settings):
        sizes.append(max(batch.x.numel() for batch in given[1]))
        if sizes[-1] > 400:
            raise torch.OutOfMemoryError("out of memory")
        return gradient(*given, **settings)

    updates = spy(monkeypatch, train, "update")
    monkeypatch.setattr(flow_grpo, "gradient", short)
    run("memory", **QUICK | {"steps": 2}, token_budget=4000)
    first, second = (settings["token_budget"] for _, settings, _ in updates)
    assert first == 4000 and second <= 500 and sizes[0] > 400
    why = command("--resume", "memory", "--steps", "3", "--token-budget", "500")
    assert why == 0 and updates[-1][1]["token_budget"] == 500


@pytest.mark.exhaustive
def test_a_rehearsal_meets_what_a_long_run_meets(monkeypatch, server, capsys):
    server.reply = lambda body, turn: answer("Conclusion: STOP")
    then, calls = [], spy(monkeypatch, rehearsal, "sample")
    monkeypatch.setattr(train.os, "execv", lambda program, given: then.append(given))
    updates = spy(monkeypatch, train, "update")
    flags = QUICK | {"steps": 40, "questions": 3, "token_budget": 9000}
    run("rehearsed", **flags, rehearse=True, verifier=server.url)
    longest = 4096 - 6  # tokens of the model's context, and of a plan
    sampled = [(len(texts), len(texts[0]), n, stops) for (_, texts, stops, _, n, *_), *_ in calls]
    assert sampled[:2] == [(3 * 4, longest, 6, [])] * 2  # the planner, and the frozen model
    (*_, actions, _), settings, _ = updates[1]  # after the real one, which is saved
    plans = [(len(action.prompt_ids), len(action.ids)) for action in actions]
    assert plans == [(longest, 6)] * 4 and settings["minibatches"] == 1  # two micro-batches
    text = capsys.readouterr().out
    largest = r"largest planner: 12 x \(4090 \+ 6\) tokens: \d+ ms a token of the batch"
    assert re.search(f"{largest}, prefill included", text)
    assert re.search(r"largest update: 4 x \(4090 \+ 6\) tokens: \d+\.\d s\n", text)
    assert re.search(r"the whole run: 40 steps of 3 questions, about \d+ s each: .* dollars", text)
    [[_, _, *given]] = then
    assert command(*given) == 0 and len(rows("rehearsed-rehearsal")) == 2
    assert len(updates) == 3  # the longest, and two real ones


@pytest.mark.parametrize("context, rows_of_tokens", [(32_768, 4096 + 512), (2048, 2048)])
def test_a_rehearsal_says_what_a_whole_run_takes(context, rows_of_tokens):
    fits = lambda tokens: {rows_of_tokens: 50}[tokens]  # so 16 x 8 rollouts are three batches
    policy = SimpleNamespace(new_tokens=lambda n: n, context=lambda: context, rows=fits)
    whole = {"steps": 40, "questions": 16}
    args = SimpleNamespace(rehearse=whole, questions=2, group_size=8, max_new_tokens=512)
    text = rehearsal.whole_run(args, policy, 30, 4)  # 3 * 30 + 16 / 2 * 4 = 122; 122 / 90 = 1.36
    assert text == (
        "the whole run: 40 steps of 16 questions, about 122 s each: 1.4 hours, 3 dollars at 2.50 "
        "an hour"
    )


# ------------------------------------------------------------------------------ parts and settings
def test_each_question_comes_once_an_epoch_in_an_order_of_step_and_seed_alone():
    asked = lambda seed: [
        q for step in range(1, 8) for q in train.questions_of(step, "abcde", 3, seed)
    ]
    assert all(sorted(asked(0)[i : i + 5]) == list("abcde") for i in range(0, 20, 5))
    assert asked(0)[:5] != asked(0)[5:10] and asked(0) != asked(1)
    assert train.questions_of(7, "abcde", 3, 0) == asked(0)[18:]
    assert train.questions_of(1, "ab", 5, 0).count("a") in (2, 3)


@pytest.fixture
def flags(monkeypatch):
    """The settings of a command line."""
    monkeypatch.chdir(INVOKED)  # TOY is a path from there
    return lambda *given: train.settings(train.given(["--out", "unused", *given]))


def test_the_toy_and_a_real_model_have_defaults_of_their_own(flags):
    toy = flags()
    assert toy.model == TOY and toy.data == f"{TOY}/train.jsonl" and toy.judge == "none"
    assert (toy.valid, toy.lr, toy.keep) == (f"{TOY}/valid.jsonl", train.TOY["lr"], None)
    assert flags("--data", "x.jsonl").valid is None and flags("--lr", "1").lr == 1
    real = flags("--model", "Qwen/Qwen2.5-7B-Instruct")
    assert (real.data, real.valid, real.test) == ("nq+deepmath", None, None)
    assert real.fixed == real.judge == "Qwen/Qwen2.5-7B-Instruct"
    both = (8, 4, 3, 0.7, 0.001, 0.2, 0.3)
    names = "group_size minibatches max_turns temperature beta clip_low clip_high".split()
    paper = flags("--model", "Qwen/Qwen2.5-7B-Instruct", "--paper")
    for args, own in ((real, (40, 16, 512, 10)), (paper, (32, 32, 2048, 5))):
        assert own == (args.steps, args.questions, args.max_new_tokens, args.every)
        assert both == tuple(getattr(args, name) for name in names)
    assert train.settings(train.given(["--seed", "7"])).out == "runs/toy-seed7"
    with pytest.raises(Mistake, match="--paper is for a real model"):
        flags("--paper")


def test_without_valid_questions_some_are_held_out_and_never_trained_on():
    many = jsonl("many.jsonl", *map(str, range(200)))
    data, valid, test = train.three_sets(many, None, "none", limit=None, seed=0)
    assert (len(data), len(valid), test) == (136, 64, []) and not set(data) & set(valid)
    later = train.three_sets(many, None, "none", limit=None, seed=1)  # of a run that goes on
    assert later[0] == data and later[1] == valid


def test_questions_that_are_trained_on_and_tested_are_counted(capsys):
    some = jsonl("some.jsonl", "1", "2", "3")
    run("both", **QUICK | {"data": some, "test": jsonl("others.jsonl", "2", "9", "3")})
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 of the questions to validate or test are also trained on" in shown
    assert "also validate" not in shown
    others = {"valid": jsonl("seven.jsonl", "7", "8"), "test": jsonl("eight.jsonl", "8", "9")}
    run("twice", **QUICK | others)
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 of the questions to test also validate, so best/ is chosen on them" in shown


def test_a_rollout_that_is_taken_out_of_its_group_is_an_error_and_not_a_shift():
    group = lambda name: [SimpleNamespace(question=name, failed="", undecided=False)] * 3
    rollouts = group("first") + group("second")
    assert train.with_outcome(rollouts, 3) == (rollouts, [0, 0, 0, 1, 1, 1])
    for wrong in (rollouts[1:], rollouts[:2] + rollouts[3:], rollouts[:1] + rollouts[4:] * 4):
        with pytest.raises(ValueError, match=r"set rollout\.failed of what you leave out"):
            train.with_outcome(wrong, 3)


@pytest.mark.parametrize(
    "flag, what, named, other",
    [
        ("judge", "server", "http://far:8000/v1", "http://here:8000/v1"),
        ("cache", "cache", "/etc/cache", "cache"),
    ],
)
def test_a_server_or_a_cache_that_a_folder_names_must_be_repeated(
    flag, what, named, other, tmp_path
):
    """It gets our key, or is written to."""
    saved = vars(train.settings(train.given(words("unused")))) | {flag: named}
    (tmp_path / "args.json").write_text(json.dumps(saved))
    resumed = lambda *more: train.settings(train.given(["--resume", str(tmp_path), *more]))
    for given in ([], [f"--{flag}", other]):
        with pytest.raises(Mistake, match=f"uses a {what}: repeat --{flag} {named}"):
            resumed(*given)
    (tmp_path / "args.json").write_text(json.dumps(saved | {"allow_unconfined": True}))
    assert resumed(f"--{flag}", named).allow_unconfined is None  # that is for the user to say
    args = resumed(f"--{flag}", named, "--steps", "99")
    assert (vars(args)[flag], args.steps, args.out) == (named, 99, str(tmp_path))


def test_the_night_of_gpu_md_goes_on_with_the_same_words(tmp_path, monkeypatch):
    """The server that --fixed names is the judge, too."""
    monkeypatch.chdir(tmp_path)
    given = re.search('FLAGS="(.*)"', (ROOT / "docs/gpu.md").read_text("utf-8"))[1].split()
    begun = vars(train.settings(train.given(given)))
    assert begun["judge"] == begun["fixed"] == "http://127.0.0.1:8000/v1"
    folder.replace_file(Path(begun["out"], "args.json"), json.dumps(begun).encode())
    resumed = vars(train.settings(train.given([*given, "--resume", begun["out"]])))
    assert resumed == begun | {"resume": begun["out"]}


def test_a_run_that_has_gone_on_since_it_was_read_is_not_cut_back(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    args = train.settings(train.given(["--resume", str(run)]))
    with pytest.raises(Mistake, match=f"has just written into {run}: run this again"):
        checkpoints.open_run(args, {}, {}, done=2)  # it read this before another wrote step 4
    assert len(rows(run)) == 4


@pytest.mark.parametrize(
    "given, why",
    [
        ("--group-size 1", "--group-size 1 has no baseline: use 2 or more"),
        ("--dtype float16", "--dtype float16 cannot train: it has no small gradients"),
        ("--model whole", "whole is the folder of a run: give a checkpoint in it, as whole/best"),
        ("--judge whole", "whole is the folder of a run: give a checkpoint in it, as whole/best"),
        ("--temperature 0", "a greedy planner has no distribution to train"),
        ("--out whole", "whole exists: --resume whole goes on; or"),
        ("--model http://localhost:8000/v1", "--model must be local weights"),
        ("--resume nowhere", "nowhere is not the folder of a run"),
        ("--resume whole --seed 0", "leave out --seed"),
        ("--resume whole --group-size 8", "leave out --group-size"),
        ("--resume whole --out elsewhere", "leave out --out"),
        ("--data nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("--data bamboogle", "bamboogle is a test benchmark"),
        ("--model no-such/model", "there is no model 'no-such/model'"),
    ],
)
def test_a_mistake_that_people_make_daily_is_one_sentence(whole, capsys, given, why):
    given = given.split() if "--resume" in given else words("mistake") + given.split()
    left = command(*given)
    lines = f"{capsys.readouterr().err}{left}".splitlines()
    [line] = [line for line in lines if why in line]
    assert re.match(r"(train|__main__|pytest|-c)?[\w.]*: ", line) and left != 0
    assert not Path("mistake").exists()


def test_a_run_does_not_ask_wikipedia_without_saying_for_whom(monkeypatch):
    monkeypatch.setattr("world.search.CONTACT", "")
    why = "train.py: for many searches of Wikipedia, set WIKIMEDIA_CONTACT to your e-mail"
    assert command(*words("nobody", tools="wikipedia_search")).startswith(why)


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", ["solve.py", "train.py"])
def test_a_bug_keeps_its_traceback(script, tmp_path):
    """Mistake is a ValueError, too: only what a user has done is one sentence."""
    code = f"""import runpy, sys
import benchmarks.questions as questions
questions.read_questions = questions.three_sets = lambda *_, **__: int("a bug")
sys.argv = ["{script}", "--device", "cpu", "--data", "toy/test.jsonl", "--out", "{tmp_path}/out"]
runpy.run_path("{script}", run_name="__main__")"""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 1 and "Traceback" in run.stderr and "a bug" in run.stderr


def test_a_checkpoint_is_not_trained_on_other_data_at_another_rate_in_silence(flags, whole, place):
    checkpoint = str(place / whole / "step-4")
    for given in ([], ["--data", "d.jsonl"], ["--lr", "1e-3"]):
        with pytest.raises(Mistake, match="give --data and --lr, or go on with its run: --resume"):
            flags("--model", checkpoint, *given)
    assert flags("--model", checkpoint, "--data", "d.jsonl", "--lr", "1e-3").fixed == "model"


LINKS = ["rollouts.jsonl", "log.csv", "writing", "lock", "anything"]
HARD = "rollouts.jsonl", "hardlink_to"


@pytest.mark.parametrize("name, how", [*((name, "symlink_to") for name in LINKS), HARD])
def test_a_run_writes_through_no_link(name, how, whole, tmp_path):
    """A folder made by others could make us overwrite any file."""
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    (tmp_path / "ours").write_text("ours")
    target = tmp_path / "run" / name
    target.unlink(missing_ok=True)
    getattr(target, how)(tmp_path / "ours")
    why = command("--resume", str(tmp_path / "run"), "--steps", "5")
    assert f"{name} is a link, and a run writes only into its own folder: delete it" in why
    assert (tmp_path / "ours").read_text() == "ours" and not (tmp_path / "run/step-5").exists()


@pytest.mark.parametrize("lora, lr", [(None, 1e-6), (8, 2e-5)])
def test_the_learning_rate_and_the_memory_plan_follow_the_model_and_its_company(
    lora, lr, monkeypatch
):
    plans = []
    chosen = {"lora": lora, "token_budget": 99, "sampling_bytes": 77}
    choose = lambda *given, **how: plans.append((given[3], how)) or (chosen, [])
    monkeypatch.setattr(train.fit, "choose", choose)
    given = ["--model", "model", "--judge", "judge", "--verifier", "http://h:1/v1", "--out", "new"]
    args = train.settings(train.given(given))
    train.choose_device(args)
    assert (args.lr, args.token_budget, args.sampling_bytes) == (lr, 99, 77)
    ((chosen_by_user, plan),) = plans
    assert plan["others"] == {"judge", "http://h:1/v1"} and not chosen_by_user
    assert plan["frozen"] and plan["adapters_first"]
    served = ["--fixed", "http://h:1/v1", "--beta", "0", "--paper"]
    for more, rank in (([], 0), (["--lora", "8"], 8)):  # the paper's: all weights
        train.choose_device(train.settings(train.given([*given, *served, *more])))
        chosen_by_user, plan = plans.pop()
        assert chosen_by_user == {"lora": rank}
        assert not plan["frozen"]


def test_a_named_set_has_questions_for_the_papers_steps(flags):
    named = flags("--model", "model", "--paper")
    assert named.limit - 64 >= named.steps * named.questions  # 64 to validate on
    assert flags("--model", "model", "--limit", "7").limit == 7
    assert flags("--data", "data.jsonl").limit is None


def test_a_named_set_is_drawn_by_the_seed(monkeypatch):
    drawn = []
    monkeypatch.setattr("benchmarks.training.training", lambda *given: drawn.append(given) or [])
    for limit in (None, 7):
        train.three_sets("nq", "none", "none", limit=limit, seed=3)
    assert drawn == [("nq", 1000, 3), ("nq", 7, 3)]


def test_the_room_that_the_plan_leaves_reaches_each_model(monkeypatch):
    choose, rooms = train.fit.choose, spy(monkeypatch, train.fit, "give_room")

    def chosen(*given, **how):
        way, lines = choose(*given, **how)
        return way | {"sampling_bytes": 123}, lines  # as on a GPU

    monkeypatch.setattr(train.fit, "choose", chosen)
    run("room", **QUICK)
    engines, sizes, plain = zip(*(given for given, *_ in rooms), strict=True)
    assert [str(engine).split(" ")[0] for engine in engines] == ["model"] * 2
    assert len({id(engine.model) for engine in engines}) == 2  # the planner, and the frozen copy
    assert {*sizes} == {123} and {*plain} == {None}


def test_a_hub_name_without_a_gpu_is_refused_before_anything_is_downloaded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    why = command("--model", "no-such/model", "--out", "mistake")
    assert why.startswith("train.py: there is no folder no-such/model, and no GPU to train a model")


# --------------------------------------------------------------------- an edit of the parts acts
EARLY = """    logps = torch.cat(logps)[copy]
    early = torch.cat([torch.arange(len(a.ids)) < 2 for a in batch.actions])
    return torch.where(early, logps.detach(), logps)"""
MIN_P = """    logits = logits.float() / temperature
    low = logits < logits.max(-1, keepdim=True).values + math.log(0.2)
    return logits.masked_fill(low, -math.inf)"""
EDITS = {  # what: (file, from, to, does it change what is sampled in the first step?)
    "early tokens not trained": ("flow_grpo.py", "    return torch.cat(logps)[copy]", EARLY, False),
    "greedy sampling": ("models/local.py", "do_sample=True, top_k=0, top_p=1.0", "", True),
    "min-p": ("flow_grpo.py", "    return (logits.float() / temperature)", MIN_P, True),
}


def edited(folder, file, before, after):
    """A copy of our code in this folder, with this edit."""
    for name in [f"{script}.py" for script in ORDER] + ROOMS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    source = (folder / file).read_text()
    assert source.count(before) == 1, f"{file} no longer has the line that this test edits"
    (folder / file).write_text(source.replace(before, after))
    return folder


def trained_in(code, out, plain, **flags):
    """Two steps of training with the code in this folder: (what was sampled first, log.csv)."""
    flags = QUICK | {"steps": 2, "beta": 0, "max_new_tokens": 9} | flags
    with code_of(code):
        module = importlib.import_module("train")
        module.solve.grade = graded(module.solve.grade)
        module.train(module.settings(module.given(words(out, **flags) + ["--plain"] * plain)))
    records = [json.loads(line) for line in Path(out, "rollouts.jsonl").read_text().splitlines()]
    return [[output["text"] for output in record["outputs"]] for record in records[:8]], rows(out)


@pytest.fixture(scope="module")
def unedited(place):
    return {plain: trained_in(ROOT, f"unedited-{plain}", plain) for plain in (False, True)}


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
@pytest.mark.parametrize("what", EDITS)
def test_an_edit_acts(unedited, tmp_path, plain, what):
    *edit, samples = EDITS[what]
    sampled, log = trained_in(edited(tmp_path, *edit), tmp_path / "run", plain)
    sampled_before, log_before = unedited[plain]
    assert (sampled != sampled_before) == samples
    assert log[1]["entropy"] != log_before[1]["entropy"]
    assert all(math.isfinite(float(row[name])) for row in log for name in ("loss", "grad_norm"))


def test_a_schedule_of_the_temperature_acts_on_sampling_and_on_the_ratio(tmp_path):
    edit = "train.py", "temperature = args.temperature", "temperature = args.temperature / 2"
    scheduled = trained_in(edited(tmp_path, *edit), tmp_path / "run", plain=False)
    assert scheduled == trained_in(ROOT, tmp_path / "half", plain=False, temperature=0.35)
