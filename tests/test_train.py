"""train.py: what a run leaves behind, whatever interrupts it; and that what is learnt from is what was sampled.

A tiny random Qwen2 writes no plan that anybody can read, so its groups would be flat. Here a flow answers "even" or "odd" by the
sum of the token ids its planner sampled, and "even" is right: something to learn, decided by the tokens and nothing else.
"""
import csv
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"          # before transformers reads it: no test asks the network
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from test_models import CHATML, tokenizer, write

import generator
import planner
import solve
import train
from flow_grpo import Action, token_logps
from models import loading
from models.completion import TOO_LONG
from models.loading import load_engine
from models.local import HF
from rewards import metrics
from rewards.questions import read_questions
from scale import adapters, checkpoints, fit
from tools import TOOLS

torch.set_num_threads(1)
ROLLOUT, SHOW, STEP, WRITE = solve.rollout, train.show, train.train_step, checkpoints.write_folder
SIGNALS = (signal.SIGINT, signal.SIGTERM)
QWEN_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def even_is_right(*args, **settings):
    flows = ROLLOUT(*args, **settings)
    for flow in flows:
        flow.answer = "even" if sum(sum(said.ids) for said in flow.actions) % 2 == 0 else "odd"
    return flows


def wordy(template):
    """The byte-level tokenizer of test_models.py with the words of our prompts, which makes them short and the tests fast."""
    tok = tokenizer().train_new_from_iterator([planner.prompt("", TOOLS, "", ""), planner.analysis_prompt("", TOOLS), generator.PROMPT] * 2, 1000)
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
        write(folder / name, tok, seed, generation={"eos_token_id": [2, *range(20, 150)]}, max_position_embeddings=4096)
    jsonl(folder / "data.jsonl", *"abcde")
    jsonl(folder / "valid.jsonl", *"vw")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "rollout", even_is_right)
        patch.chdir(folder)
        yield folder


@pytest.fixture(autouse=True)
def signals_as_before():
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before):
        signal.signal(number, handler)


FLAGS = dict(model="model", data="data.jsonl", valid="valid.jsonl", test="valid.jsonl", tools="base_generator", judge="none", steps=4, questions=2, group_size=4,
             max_turns=2, max_new_tokens=6, lr=3e-3, minibatches=2, every=2, device="cpu", dtype="float32")


def words(out, **changed):
    """The command line, as a shell would pass it; a flag that is None is left out, one that is True stands alone."""
    flags = {name: value for name, value in {**FLAGS, "out": out, **changed}.items() if value is not None}
    return ["train.py"] + [word for name, value in flags.items()
                           for word in (["--" + name.replace("_", "-")] + ([] if value is True else [str(value)]))]


def command(*argv):
    """train.py with this command line, in this process: its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(argv))
        try:
            train.main()
        except SystemExit as left:
            return left.code
    return 0


def run(out, **changed):
    assert command(*words(out, **changed)) == 0
    return Path(out)


def resume(out, *more):
    assert command("train.py", "--resume", str(out), *more) == 0
    return Path(out)


def logs(run):
    return [(run / name).read_bytes() for name in ("log.csv", "evals.csv")]


def rows(run, name="log.csv"):
    with open(run / name, newline="") as file:
        return list(csv.DictReader(file))


def everything(run, step=4):
    """Both logs, the weights, the trainer's state and the words of every rollout, without their seconds."""
    state = torch.load(run / f"step-{step}" / "trainer.pt")
    said = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    said = [(flow["step"], flow["question"], flow["reward"], [(w["module"], w["text"], w["tokens"]) for w in flow["words"]]) for flow in said]
    best = (run / "best" / "model.safetensors").read_bytes()
    return logs(run), (run / f"step-{step}" / "model.safetensors").read_bytes(), flat(state), said, best


def flat(state):
    """Nested state as a list that == can compare."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    return [(key, flat(value)) for key, value in state.items()] if isinstance(state, dict) else \
        [flat(value) for value in state] if isinstance(state, list) else state


@pytest.fixture(scope="module")
def whole(place):
    """A run that nothing interrupted."""
    return run("whole")


def at(step, do, monkeypatch):
    """do() in the middle of a run: a step's rows are in the logs, its checkpoint is not yet written."""
    def show(row, *rest):
        if row["step"] == step:
            do()
        return SHOW(row, *rest)
    monkeypatch.setattr(train, "show", show)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def crash():
    raise ZeroDivisionError("killed")


# One seed, one run

def test_the_tiny_planner_does_learn(whole):
    groups = [row["flat"] for row in rows(whole)]
    assert any(flat != "2" for flat in groups) and all(float(row["grad_norm"]) > 0 for row in rows(whole) if row["flat"] != "2")
    assert any(float(row["kl"]) > 0 for row in rows(whole)) and [r["step"] for r in rows(whole)] == list("1234")


def test_the_same_seed_gives_the_same_files_byte_for_byte(whole):
    assert everything(run("again", seed=0)) == everything(whole)


def test_another_seed_gives_another_run(whole):
    other = run("other-seed", seed=1, steps=2)
    assert rows(other) != rows(whole)[:2] and (other / "rollouts.jsonl").read_bytes() != (whole / "rollouts.jsonl").read_bytes()


def test_the_line_of_a_step_says_the_reward_first_and_never_the_loss(whole):
    row = {name: float(value) for name, value in rows(whole)[0].items()} | {"step": 1, "flat": 1, "groups": 2, "failed": 0}
    line = train.show(row, 4, 1.0, 2.0)
    assert line.startswith(f"step   1/4 | reward {row['reward']:.2f} | turns") and "loss" not in line


def test_the_log_has_the_reward_first_and_no_times(whole):
    assert list(rows(whole)[0])[:4] == ["step", "reward", "turns", "errors"]
    assert not any("second" in name or "time" in name for name in rows(whole)[0])
    for row in rows(whole):
        flows = [json.loads(line) for line in (whole / "rollouts.jsonl").open()]
        rewards = [flow["reward"] for flow in flows if flow["step"] == int(row["step"])]
        assert float(row["reward"]) == sum(rewards) / 8 and len(rewards) == 8


def test_evals_are_made_before_when_saving_and_after(whole):
    made = [(row["step"], row["questions"]) for row in rows(whole, "evals.csv")]
    assert made == [("0", "test"), ("2", "valid"), ("4", "valid"), ("4", "test")]
    assert list(rows(whole, "evals.csv")[0]) == ["step", "questions", "accuracy", "turns", "errors", "failed", "undecided"]


def test_every_step_and_evaluation_draws_from_a_seed_of_its_own(tmp_path, monkeypatch):
    seeds = []
    monkeypatch.setattr(solve, "rollout", lambda *args, **settings: seeds.append(torch.initial_seed()) or even_is_right(*args, **settings))
    run(tmp_path / "run", steps=1, seed=3)
    assert seeds == [3, 3 * 1_000_003 + 1, 3, 3]              # test, the step, valid, test


def test_each_question_comes_once_an_epoch_in_an_order_of_the_seed():
    epochs = [train.questions_of(step, range(10), 5, seed) for seed in (0, 1) for step in range(1, 7)]
    for first, second in zip(epochs[::2], epochs[1::2]):
        assert sorted(first + second) == list(range(10))
    assert epochs[:2] != epochs[2:4] and epochs[:6] != epochs[6:]


def test_the_questions_of_a_step_depend_on_the_step_alone_and_may_cross_an_epoch():
    n = [question for step in range(1, 8) for question in train.questions_of(step, "abcde", 3, 0)]
    assert all(sorted(n[i : i + 5]) == list("abcde") for i in range(0, 20, 5))
    assert train.questions_of(7, "abcde", 3, 0) == n[18:] and train.questions_of(1, "ab", 5, 0).count("a") in (2, 3)


@pytest.mark.parametrize("number, held", [(2, 1), (5, 2), (100, 50), (200, 64)])
def test_without_valid_questions_some_are_held_out_and_never_trained_on(tmp_path, monkeypatch, number, held):
    seen = {}
    monkeypatch.setattr(train, "train", lambda *a: seen.update(train=a[6], valid=a[7], test=a[8]))
    assert command(*words(str(tmp_path / "run"), data=jsonl(tmp_path / "d.jsonl", *map(str, range(number))), valid=None, test=None)) == 0
    assert len(seen["valid"]) == held and len(seen["train"]) == number - held and seen["test"] == []
    assert not set(seen["train"]) & set(seen["valid"])


def test_a_run_says_how_many_questions_are_too_near_to_those_held_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "train", lambda *a: None)
    sums = jsonl(tmp_path / "sums.jsonl", *(f"What is {a} + {b}?" for a in range(20) for b in range(20)))
    assert command(*words(str(tmp_path / "run"), data=sums, valid=None)) == 0
    out = capsys.readouterr().out
    assert re.search(r"^data    \d+ of 400 questions are left out, .* --valid FILE.jsonl keeps", out, re.M)


# Interrupted and resumed

@pytest.mark.parametrize("step", [1, 2])
def test_a_run_interrupted_by_ctrl_c_and_resumed_equals_one_that_was_not(whole, monkeypatch, capsys, step):
    at(step, interrupt, monkeypatch)
    stopped = run(f"stopped-{step}")
    assert (stopped / f"step-{step}" / "trainer.pt").exists() and len(rows(stopped)) == step
    assert f"Go on with: python train.py --resume {stopped}" in capsys.readouterr().out
    assert everything(resume(stopped)) == everything(whole)


def test_ctrl_c_before_the_first_step_can_be_resumed(whole, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "accuracy_line", lambda *a: interrupt() or "")
        stopped = run("stopped-0")
    assert everything(resume(stopped)) == everything(whole)


def test_a_run_ended_by_two_sigterms_is_saved_and_goes_on(whole, monkeypatch):
    at(2, lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)], monkeypatch)      # a scheduler and torchrun send one each
    stopped = run("ended")
    assert len(rows(stopped)) == 2 and everything(resume(stopped)) == everything(whole)


def test_a_second_ctrl_c_leaves_at_once():
    train.Stopping()
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_what_a_crash_left_after_the_last_checkpoint_is_dropped_and_made_again(whole, monkeypatch):
    at(3, crash, monkeypatch)
    with pytest.raises(ZeroDivisionError):
        run("crashed")
    assert len(rows(Path("crashed"))) == 3                    # one row more than the checkpoint of step 2
    for name, half in (("log.csv", "1"), ("evals.csv", "2,va"), ("rollouts.jsonl", '{"step": 3, "id')):
        with open(Path("crashed") / name, "a") as file:       # and a disk that took half a line
            file.write(half)
    monkeypatch.setattr(train, "show", SHOW)
    assert everything(resume("crashed")) == everything(whole)


def test_a_checkpoint_never_counts_on_a_best_that_is_not_on_the_disk(monkeypatch):
    def write_folder(folder, write):
        WRITE(folder, write)
        if folder.name != "best":                             # if the machine stopped here, --resume would never make best/ again
            assert json.loads((folder.parent / "best" / "train.json").read_text())["step"] <= torch.load(folder / "trainer.pt")["step"]
    monkeypatch.setattr(checkpoints, "write_folder", write_folder)
    run("order", steps=2, every=1)


def test_a_finished_run_given_more_steps_equals_a_longer_run(whole):
    assert everything(resume(run("short", steps=2), "--steps", "4")) == everything(whole)


def test_resuming_a_finished_run_changes_nothing(whole):
    shutil.copytree(whole, "copy")
    assert everything(resume("copy")) == everything(whole)


def test_ctrl_c_ends_the_process_with_code_0_after_a_checkpoint(place):
    script = "import sys, test_train as t, solve, train; solve.rollout = t.even_is_right; train.main()"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([sys.executable, "-c", script, *words("process", steps=500, every=500)[1:]], env=env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said = next(line for line in process.stdout if line.startswith("step"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    done = int(re.search(r"Stopped after step (\d+)", out)[1])
    assert process.returncode == 0 and "Traceback" not in err and len(rows(Path("process"))) == done and said.startswith("step   1/500")
    assert len(rows(resume("process", "--steps", str(done + 1)))) == done + 1


# Checkpoints

def limited(size):
    """Files may not grow beyond this: what safetensors and torch.save do then is what they do on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def no_space(*args, **settings):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["the weights", *(pytest.param(where, marks=pytest.mark.exhaustive) for where in
                                                    ("the trainer's state", "the first byte"))])
def test_a_disk_that_fills_while_saving_leaves_the_last_checkpoint_and_says_so(whole, monkeypatch, where):
    weights = os.path.getsize("model/model.safetensors")
    full = {"the weights": lambda: limited(weights // 2), "the trainer's state": lambda: limited(weights * 3 // 2),
            "the first byte": lambda: monkeypatch.setattr(HF, "save", no_space)}[where]
    at(4, full, monkeypatch)
    out = f"full-{where.split()[-1]}"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("step-4"))
    try:
        code = command("train.py", "--resume", out)
    finally:
        limited(resource.RLIM_INFINITY)
    monkeypatch.undo()
    assert re.fullmatch(r"train.py: could not save [^\n]+ the last checkpoint is untouched. Free some disk, then --resume.", code)
    assert not list(Path(out).glob("*.writing")) and checkpoints.checkpoints(out)[-1].name == "step-2"
    assert load_engine(f"{out}/best") and everything(resume(out)) == everything(whole)


@pytest.mark.parametrize("before", ["write_text", "rename"])
def test_a_run_killed_while_its_folder_is_made_leaves_none_and_can_begin_anew(tmp_path, monkeypatch, before):
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Path, before, lambda *args, **settings: crash())
        run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert len(rows(run(tmp_path / "run", steps=1))) == 1 and not list(tmp_path.glob("*.writing"))


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600)])
def test_every_file_of_a_checkpoint_has_the_permissions_that_other_new_files_have(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        out = run(tmp_path / "run", steps=1)
    finally:
        os.umask(before)
    files = {file.name: file.stat().st_mode & 0o777 for file in out.rglob("*") if file.is_file()}
    assert {"model.safetensors", "trainer.pt", "args.json"} <= set(files) and set(files.values()) == {mode}


def test_only_whole_folders_are_taken_for_checkpoints(tmp_path):
    for name in ("step-2", "step-10", "step-12.writing", "step-14.old", "step-", "step-x", "best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer.pt").touch()
    (tmp_path / "step-16").mkdir()
    assert [folder.name for folder in checkpoints.checkpoints(tmp_path)] == ["step-2", "step-10"] and checkpoints.checkpoints(tmp_path / "none") == []


def test_a_crash_between_the_two_renames_loses_nothing(tmp_path):
    (tmp_path / "best.old").mkdir()                           # the folder before; best itself was about to be renamed from .writing
    (tmp_path / "best.old" / "a").write_text("before")
    (tmp_path / "best.writing").mkdir()
    with pytest.raises(OSError):
        checkpoints.write_folder(tmp_path / "best", no_space)
    assert [path.name for path in tmp_path.iterdir()] == ["best"] and (tmp_path / "best" / "a").read_text() == "before"
    checkpoints.write_folder(tmp_path / "best", lambda path: path.mkdir())
    assert [path.name for path in tmp_path.iterdir()] == ["best"] and not (tmp_path / "best" / "a").exists()


# What cannot work is refused before anything is written

REFUSED = [
    (dict(group_size=1), "--group-size 1 has no baseline"), (dict(max_turns=0), "--max-turns 0 does nothing"),
    (dict(steps=0), "--steps 0 does nothing"), (dict(temperature=0), "--temperature 0.0 does not sample"),
    (dict(temperature="inf"), "--temperature inf"), (dict(lr="nan"), "--lr nan cannot work"), (dict(lr=-1), "--lr -1.0"), (dict(beta=-1), "--beta -1.0"),
    (dict(clip_low=2), "--clip-low 2.0"), (dict(limit=0), "--limit 0"), (dict(lora=0), "--lora 0"), (dict(data="bamboogle"), "bamboogle is a test benchmark"),
    (dict(temperature="nan"), "--temperature nan"), (dict(max_new_tokens=100_000), "--max-new-tokens 100000 leaves too little room"),
    (dict(data="nowhere.jsonl"), "nowhere.jsonl: no such file"), (dict(data="empty.jsonl"), "empty.jsonl: the file is empty"),
    (dict(data="keyless.jsonl"), "keyless.jsonl, line 2: lacks \"answer\""), (dict(valid="keyless.jsonl"), "keyless.jsonl, line 2"),
    (dict(data="one.jsonl", valid=None), "one.jsonl has too few questions"), (dict(tools="googel"), "no tool is called 'googel'"),
    (dict(tools="wikipedia_search", corpus="nowhere.jsonl"), "nowhere.jsonl: cannot read"), (dict(model="./nowhere"), "There is no folder './nowhere'"),
    (dict(model="untold"), "has no chat template"), (dict(fixed="untold"), "has no chat template"), (dict(dtype="int8"), "no dtype 'int8'"),
    (dict(out="data.jsonl/run"), "data.jsonl/run can't be made"), (dict(out="model"), "model exists already"),
    (dict(resume="model"), "model is not the folder of a run"), (dict(resume="nowhere"), "nowhere is not the folder of a run")]


@pytest.mark.parametrize("changed, says", REFUSED, ids=[says for _, says in REFUSED])
def test_what_cannot_work_is_refused_with_a_sentence_and_code_2(place, capsys, changed, says):
    Path("empty.jsonl").touch()
    Path("keyless.jsonl").write_text('{"question": "q", "answer": "a"}\n{"question": "q"}\n')
    jsonl(Path("one.jsonl"), "q")
    if not Path("untold").exists():
        write(Path("untold"), tokenizer(template=None))
    before = sorted(place.rglob("*"))
    assert command(*words(changed.get("out", "refused"), **{k: v for k, v in changed.items() if k != "out"})) == 2
    said = capsys.readouterr().err
    assert says in said and said.startswith("train.py: ") and said.count("\n") == 1 and sorted(place.rglob("*")) == before


def test_an_existing_run_is_refused_and_untouched(whole, capsys):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert command(*words("whole")) == 2 and "whole exists already and is not written over" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def test_resuming_takes_only_a_new_number_of_steps_beside_the_run(whole, capsys):
    for more in (["--lr", "1"], ["--temperature", "0.7"], ["--token-mean"], ["--steps", "0"]):    # 0.7 is the default, and was given
        assert command("train.py", "--resume", str(whole), *more) == 2
        assert f"leave out {more[0]}" in capsys.readouterr().err


# What is learnt from

class Spy:
    """Stands in for a function of train.py: remembers what it was given, then calls it."""

    def __init__(self, monkeypatch, name):
        self.real, self.calls, self.settings = getattr(train, name), [], []
        monkeypatch.setattr(train, name, self)

    def __call__(self, *args, **settings):
        self.calls.append(args)
        self.settings.append(settings)
        return self.real(*args, **settings)


def failing(which, monkeypatch, why=f"planner: {TOO_LONG}"):
    """Rollouts in which some flows have failed, as when a prompt did not fit."""
    def rollout(questions, *args, **settings):
        flows = even_is_right(questions, *args, **settings)
        for i in which if len(questions) == 8 else ():        # a training step, not an evaluation
            flows[i].failed = why
        return flows
    monkeypatch.setattr(solve, "rollout", rollout)


def test_two_equal_questions_in_a_batch_are_two_groups(tmp_path, monkeypatch):
    spy = Spy(monkeypatch, "advantages")
    run(tmp_path / "run", steps=1, data=jsonl(tmp_path / "twins.jsonl", "same", "same"))
    (rewards, groups), = spy.calls
    assert groups == [0] * 4 + [1] * 4 and len(rewards) == 8 and rows(tmp_path / "run")[0]["groups"] == "2"


def test_what_is_learnt_from_is_the_very_ids_that_were_sampled_stop_token_included(tmp_path, monkeypatch):
    spy, flows = Spy(monkeypatch, "update"), []
    monkeypatch.setattr(train, "train_step", lambda *a: flows.append(STEP(*a)) or flows[-1])
    run(tmp_path / "run", steps=1)
    (model, _, _, actions, A), = spy.calls
    said = [(i, said) for i, flow in enumerate(flows[0][1]) for said in flow.actions]
    assert len(said) == len(actions) == 16 and len(A) == 8
    assert all(a.ids is s.ids and a.prompt_ids is s.prompt_ids and a.flow == i for a, (i, s) in zip(actions, said))
    stops = load_engine("model").stop_ids()
    assert all(len(a.ids) == 6 or a.ids[-1] in stops for a in actions) and any(a.ids[-1] in stops for a in actions)
    assert any(a.ids[-1] not in stops for a in actions)       # a plan cut at the limit gets no stop token


def test_without_test_questions_those_that_choose_best_are_run_once_before_and_at_each_checkpoint(tmp_path, capsys):
    made = rows(run(tmp_path / "run", steps=2, test=None), "evals.csv")
    assert [(row["step"], row["questions"]) for row in made] == [("0", "valid"), ("2", "valid")]
    resume(tmp_path / "run")                                  # of a finished run: nothing is run again
    assert rows(tmp_path / "run", "evals.csv") == made


def test_without_any_questions_aside_all_are_trained_on_and_the_last_checkpoint_is_what_there_is(tmp_path, capsys):
    out = run(tmp_path / "run", steps=2, valid="none", test="none")
    assert "5 questions to train on, 0 to choose best/, 0 to test" in (said := capsys.readouterr().out)
    assert sorted(folder.name for folder in out.glob("*/")) == ["step-2"] and f"--model {out}/step-2" in said


def test_every_flag_of_the_objective_reaches_it(tmp_path, monkeypatch):
    spy, sampled = Spy(monkeypatch, "update"), []
    monkeypatch.setattr(solve, "rollout", lambda *args, **settings: sampled.append(settings) or even_is_right(*args, **settings))
    monkeypatch.setattr(train, "advantages", lambda R, groups: (torch.ones(len(R)), 0))
    flags = dict(temperature=0.9, clip_low=0.1, clip_high=0.4, beta=0.01, minibatches=3, token_budget=999, token_mean=True)
    run(tmp_path / "run", steps=1, lr=2e-4, seed=2, **flags)
    assert {name: spy.settings[0][name] for name in flags} == flags and spy.calls[0][2].param_groups[0]["lr"] == 2e-4
    assert {(s["temperature"], s["max_turns"], s["max_new_tokens"]) for s in sampled} == {(0.9, 2, 6)}
    assert spy.calls[0][2].param_groups[0]["weight_decay"] == 0 and spy.settings[0]["seed"] == 2 * 1_000_003 + 1


def test_a_flow_that_failed_leaves_its_group_and_is_counted(tmp_path, monkeypatch, capsys):
    failing([1, 6], monkeypatch)
    groups, learnt = Spy(monkeypatch, "advantages"), Spy(monkeypatch, "update")
    row = rows(run(tmp_path / "run", steps=1))[0]
    (rewards, which), (_, _, _, actions, A) = groups.calls[0], learnt.calls[0]
    assert which == [0] * 3 + [1] * 3 and sorted({a.flow for a in actions}) == list(range(6)) and len(actions) == 12 == 2 * len(A)
    assert row["failed"] == "2" and float(row["reward"]) == sum(rewards) / 6 and "| failed 2" in capsys.readouterr().out


def test_a_step_in_which_every_flow_failed_is_survived_and_said(tmp_path, monkeypatch, capsys):
    failing(range(8), monkeypatch)
    assert command(*words(tmp_path / "run", steps=2)) == "train.py: every rollout failed, and nothing was learnt"
    assert [row["failed"] for row in rows(tmp_path / "run")] == ["8", "8"]
    assert f"| failed 8\nfailed 8 times: planner: {TOO_LONG}" in capsys.readouterr().out
    before, after = (Path(path, "model.safetensors").read_bytes() for path in ("model", tmp_path / "run" / "step-2"))
    assert before == after


def test_a_server_that_is_down_ends_the_run_and_uses_up_no_questions(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing(range(8), patch, "executor: host:8000 cannot be reached")
        said = command(*words(tmp_path / "run", steps=2))
    assert said.startswith("train.py: 8 of 8 rollouts did not come to an end (executor: host:8000 cannot be reached), after step 0. Mend that, then go on with: ")
    assert command("train.py", "--resume", str(tmp_path / "run")) == 0 and rows(tmp_path / "run") == rows(whole)[:2]


@pytest.mark.parametrize("when, after", [("test", 0), ("valid", 4), *(pytest.param(*when, marks=pytest.mark.exhaustive) for when in
                                                                      (("valid", 2), ("test", 4)))])
def test_a_server_that_is_down_while_questions_are_marked_is_no_wrong_answer(whole, tmp_path, monkeypatch, when, after):
    roll_out = train.marked_rollouts
    marks, seen = ["test 0", "valid 2", "valid 4", "test 4"], []

    def rolled(questions, copies, *rest):
        if copies == 1:
            seen.append(marks[len(seen)])
            if seen[-1] == f"{when} {after}":
                raise train.Down("2 of 2 rollouts did not come to an end (judge: host cannot be reached)")
        return roll_out(questions, copies, *rest)
    with monkeypatch.context() as patch:
        patch.setattr(train, "marked_rollouts", rolled)
        assert command(*words(tmp_path / "run")).startswith("train.py: 2 of 2 rollouts did not come to an end (judge: host cannot be reached), after step ")
    assert everything(resume(tmp_path / "run")) == everything(whole)


def test_an_undecided_rollout_leaves_its_group_as_a_failed_one_does(tmp_path, monkeypatch):
    def rollout(questions, *args, **settings):
        flows = even_is_right(questions, *args, **settings)
        flows[0].undecided = len(questions) == 8
        return flows
    monkeypatch.setattr(solve, "rollout", rollout)
    spy = Spy(monkeypatch, "advantages")
    made = rows(run(tmp_path / "run", steps=1))
    assert made[0]["undecided"] == "1" and [len(rewards) for rewards, _ in spy.calls] == [7]


def test_gradient_checkpointing_changes_nothing_of_a_step(whole, tmp_path, monkeypatch):
    spy = Spy(monkeypatch, "update")
    assert rows(run(tmp_path / "run", steps=2, gradient_checkpointing=True)) == rows(whole)[:2]
    assert spy.calls[0][0].is_activation_checkpointing


# Who learns

@pytest.mark.parametrize("other", [None, "other"])
def test_training_changes_the_policy_and_neither_the_fixed_model_nor_the_reference(tmp_path, monkeypatch, other):
    spy = Spy(monkeypatch, "train")
    run(tmp_path / "run", steps=2, fixed=other)
    _, policy, fixed, reference, *_ = spy.calls[0]
    played = fixed["executor"]
    assert set(fixed.values()) == {played} and same(played.model, load_engine(other or "model").model) and same(reference.model, load_engine("model").model)
    assert not same(policy.model, reference.model) and (played is reference) == (other is None)
    assert same(policy.model, load_engine(str(tmp_path / "run" / "step-2")).model)
    made = json.loads((tmp_path / "run" / "step-2" / "train.json").read_text())
    assert made["fixed"] == str(Path(other or "model").resolve()) and made["step"] == 2 and made["tools"] == ["base_generator"]


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_a_run_ended_before_its_first_checkpoint_begins_anew_on_resume(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for folder in [*checkpoints.checkpoints(tmp_path / "run"), tmp_path / "run" / "best"]:
        shutil.rmtree(folder)
    resume(tmp_path / "run")
    assert everything(tmp_path / "run") == everything(whole)


def test_only_the_newest_checkpoints_are_kept_if_asked(tmp_path):
    out = run(tmp_path / "run", steps=3, every=1, keep=2)
    assert sorted(folder.name for folder in out.glob("*/")) == ["best", "step-2", "step-3"]


def test_a_damaged_checkpoint_is_told_and_the_one_before_serves(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "step-4" / "trainer.pt").write_bytes(b"PK half of one")
    assert command("train.py", "--resume", str(tmp_path / "run")) == 2
    assert "step-4 is damaged: remove it, then --resume goes on from the one before" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run" / "step-4")
    assert everything(resume(tmp_path / "run")) == everything(whole)


def test_memory_that_does_not_suffice_for_one_turn_ends_the_run_with_what_to_change(tmp_path, monkeypatch):
    def short(*args, **settings):
        raise MemoryError("One turn of 9 tokens does not fit: give --lora 32")
    monkeypatch.setattr(train, "update", short)
    assert command(*words(tmp_path / "run")) == "train.py: One turn of 9 tokens does not fit: give --lora 32"


@pytest.mark.parametrize("changed, says", [({}, "a lower --lr than 0.003."), ({"temperature": 0.01}, "a higher --temperature than 0.01.")])
def test_gradients_that_stay_useless_end_the_run_with_a_checkpoint_and_what_to_change(tmp_path, monkeypatch, changed, says):
    step = train.train_step
    monkeypatch.setattr(train, "train_step", lambda *a, **k: (lambda row, *rest: (row | {"skipped": 2.0}, *rest))(*step(*a, **k)))
    said = command(*words(tmp_path / "run", steps=9, every=9, **changed))
    assert said.startswith(f"train.py: the last steps taught nothing: their gradients were not finite or far too large. Begin anew with {says}")
    assert [folder.name for folder in checkpoints.checkpoints(tmp_path / "run")] == ["step-3"]


def test_a_run_that_will_not_fit_is_refused_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(fit, "host_memory", lambda: 1e6)
    monkeypatch.setattr(loading, "load_engine", crash)
    assert command(*words("refused")) == 2
    assert "it needs 0 GB of memory even with --gradient-checkpointing --lora 32" in capsys.readouterr().err


@pytest.mark.parametrize("gigabytes, says", [(24, "--lora 32 --token-budget 5120"), (48, "--lora 32"), (80, "--optimizer-device cpu")])
def test_a_7b_gets_the_memory_plan_of_the_card_that_is_there_before_its_data_and_weights(tmp_path, monkeypatch, capsys, gigabytes, says):
    pytest.importorskip("peft") if "lora" in says else None
    Qwen2Config(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=False).save_pretrained(tmp_path / "7b")
    monkeypatch.setattr(loading, "pick_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(loading, "pick_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(gigabytes * 1.0737e9), 0))
    monkeypatch.setattr(fit, "host_memory", lambda: 128e9)
    monkeypatch.setattr(train.benchmarks, "training", no_network)
    assert command("train.py", "--model", str(tmp_path / "7b")) == 2
    out, error = capsys.readouterr()
    assert f"with {says} (without: 147 GB)\n" in out and error == "train.py: no network\n"


def no_network(*args):
    raise ValueError("no network")


def test_a_hub_name_on_a_machine_without_a_gpu_is_a_sentence_before_anything_is_downloaded(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(loading, "config_of", crash)
    assert command("train.py", "--model", "Qwen/Qwen2.5-7B-Instruct") == 2
    assert "there is no GPU here, and Qwen/Qwen2.5-7B-Instruct is not in a folder here" in capsys.readouterr().err


def test_the_users_own_command_says_in_four_lines_what_it_chose(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train.benchmarks, "training", lambda names, limit, seed: read_questions(jsonl(tmp_path / names, *map(str, range(limit)))))
    monkeypatch.setattr(train, "train", lambda *args: None)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "Qwen", wordy(QWEN_TEMPLATE), max_position_embeddings=32768)
    assert command("train.py", "--model", "Qwen", "--device", "cpu") == 0
    memory, data, judge, learn = capsys.readouterr().out.splitlines()[:4]
    assert re.fullmatch(r"memory  \d+\.\d of \d+ GB", memory)
    assert data.startswith("data    nq+deepmath: 936 questions to train on, 64 to choose best/, 0 to test")
    assert judge == "judge   Qwen (the frozen copy), for answers that the rules cannot read"
    assert learn == "learn   all weights, lr 1e-06, 32 steps of 32 questions x 8 rollouts, at most 3 turns"


def test_a_model_that_writes_no_plan_is_called_so_and_no_update_is_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(solve, "rollout", ROLLOUT)
    spy = Spy(monkeypatch, "update")
    out = run(tmp_path / "run", steps=3, group_size=2)
    text = capsys.readouterr().out
    assert "\n0 of 4 plans could be parsed. The commonest reasons:\n  4 x no line 'Sub-goal: ...'" in text
    assert text.count("plans could be parsed. The") == 2           # before the first step, and after the third flat one
    assert "\n3 steps in a row had flat groups only" in text and "Done, but nothing was learnt" in text and spy.calls == []
    assert [row["ratio_max"] for row in rows(out)] == ["1.0"] * 3


def test_a_step_of_which_one_mini_batch_exploded_has_moved_the_policy(tmp_path, monkeypatch, capsys):
    update = train.update
    monkeypatch.setattr(train, "update", lambda *a, **k: update(*a, **k) | {"grad_norm": float("nan"), "skipped": 1.0})
    run(tmp_path / "run", steps=1, valid="none", test="none")
    assert "nothing was learnt" not in capsys.readouterr().out


def test_a_run_of_which_no_first_rollout_comes_to_an_end_stops_there(tmp_path, monkeypatch, capsys):
    def rollout(*args, **settings):
        flows = even_is_right(*args, **settings)
        for flow in flows:
            flow.failed = f"planner: {TOO_LONG}"
        return flows
    monkeypatch.setattr(solve, "rollout", rollout)
    assert command(*words(tmp_path / "run")).startswith("train.py: no rollout of test ended. Mend that")
    assert f"failed 2 times: planner: {TOO_LONG}" in capsys.readouterr().out


# Adapters

@pytest.mark.extras("peft")
def test_adapters_are_trained_and_the_checkpoint_is_the_merged_model(tmp_path, monkeypatch):
    spy = Spy(monkeypatch, "train")
    out = run(tmp_path / "run", lora=4, lr=1e-2, steps=2)
    _, policy, fixed, reference, *_ = spy.calls[0]
    assert reference is policy and fixed["executor"].model is policy.model     # one copy for all
    merged, before = load_engine(str(out / "step-2")), load_engine("model")
    assert not same(merged.model, before.model) and merged.model.config.to_dict()["hidden_size"] == 32
    a = Action(before.encode("hi"), [40, 41, 42], 0)
    ours, theirs = token_logps(policy.model, [a], 1.0), token_logps(merged.model, [a], 1.0)
    assert torch.allclose(ours, theirs, atol=1e-5)
    with policy.model.disable_adapter():
        assert torch.equal(token_logps(policy.model, [a], 1.0), token_logps(before.model, [a], 1.0))    # nothing else has changed
    assert [c.ids for c in fixed["executor"](["hi"])] == [c.ids for c in before(["hi"])]                # the adapters are off


def test_what_adapters_learn_below_the_last_bit_of_a_weight_is_right_in_the_mean_of_the_merged_model():
    weight = torch.full((400, 500), -0.02).bfloat16()
    learnt = weight.float() + 3e-6                            # a fortieth of the gap between two bfloat16 numbers there
    assert torch.equal(learnt.bfloat16(), weight)             # the nearest: nothing was learnt
    merged = adapters.dithered(learnt, torch.bfloat16).float()
    assert (merged - weight.float()).mean().item() == pytest.approx(3e-6, rel=0.1) and len(merged.unique()) == 2
    assert torch.equal(adapters.dithered(learnt, torch.float32), learnt)


@pytest.mark.extras("peft")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_checkpoint_loads_as_exactly_the_policy_that_was_marked(tmp_path, monkeypatch, capsys, dtype):
    spy = Spy(monkeypatch, "train")
    out = run(tmp_path / "run", lora=4, lr=1e-2, steps=2, dtype=dtype, gradient_checkpointing=True)
    policy, loaded = spy.calls[0][1], adapters.load(str(out / "step-2"), dtype=dtype)
    before, merged = load_engine("model", dtype=dtype), load_engine(str(out / "step-2"), dtype=dtype)
    a = Action(policy.encode("hi"), [40, 41, 42], 0)
    engines = policy, loaded, before, merged
    ours, theirs, old, rounded = (token_logps(engine.model, [a], 1.0) for engine in engines)
    assert torch.equal(ours, theirs) and not torch.equal(ours, rounded)
    assert (ours - rounded).norm() < 0.5 * (ours - old).norm()    # the merged model is near
    assert str(loaded).startswith(f"{out / 'step-2'} |") and "merged" not in capsys.readouterr().err


@pytest.mark.extras("peft")
def test_without_its_base_model_a_checkpoint_with_adapters_is_the_merged_model_and_says_so(tmp_path, capsys):
    shutil.copytree("model", tmp_path / "base")
    out = run(tmp_path / "run", model=tmp_path / "base", lora=4, lr=1e-2, steps=1)
    shutil.copytree("other", tmp_path / "base", dirs_exist_ok=True)       # other weights under the same name
    assert same(adapters.load(str(out / "best")).model, load_engine(str(out / "best")).model)
    shutil.rmtree(tmp_path / "base")
    assert same(adapters.load(str(out / "best")).model, load_engine(str(out / "best")).model)
    changed, gone = capsys.readouterr().err.splitlines()
    assert "loaded without its adapters, as merged" in changed and "has changed since" in changed
    assert "loaded without its adapters, as merged" in gone and "There is no folder" in gone


def test_without_peft_a_checkpoint_with_adapters_is_the_merged_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    load_engine("model").save(tmp_path)
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text('{"base_model_name_or_path": "nowhere"}')
    flags = ["--tools", "base_generator", "--max-turns", "1", "--max-new-tokens", "4", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["solve.py", "Who?", "--model", str(tmp_path), *flags])
    solve.main()
    out, err = capsys.readouterr()
    assert f"planner {tmp_path} |" in out and "loaded without its adapters, as merged and rounded" in err
    assert "needs the package peft, which is not installed: pip install peft" in err


@pytest.mark.extras("peft")
def test_a_run_with_adapters_resumed_equals_one_that_was_not(tmp_path, monkeypatch):
    straight = run(tmp_path / "run", lora=4, steps=2)
    at(1, interrupt, monkeypatch)
    resumed = resume(run(tmp_path / "stopped", lora=4, steps=2))
    assert everything(resumed, 2) == everything(straight, 2)
    files = [folder / "step-2" / "adapters" / "adapter_model.safetensors" for folder in (resumed, straight)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.extras("peft")
def test_damaged_adapters_are_told_on_resuming(tmp_path, capsys):
    out = run(tmp_path / "run", lora=4, steps=1)
    (out / "step-1" / "adapters" / "adapter_model.safetensors").write_bytes(b"half of one")
    assert command("train.py", "--resume", str(out), "--steps", "2") == 2
    assert "step-1 is damaged: remove it, then --resume" in capsys.readouterr().err


def test_without_peft_adapters_are_refused_with_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert command(*words(tmp_path / "run", lora=4)) == 2
    assert "--lora needs the package peft, which is not installed: pip install peft" in capsys.readouterr().err


def test_the_optimizers_state_in_host_memory_gives_the_same_run_but_for_a_last_bit(whole, tmp_path):
    theirs = [row["reward"] for row in rows(whole)]
    assert [row["reward"] for row in rows(run(tmp_path / "run", optimizer_device="cpu"))] == theirs


# Half precision

def test_a_bfloat16_run_resumed_equals_one_that_was_not(monkeypatch):
    settings = dict(dtype="bfloat16", steps=2, lr=1e-5)       # below the last bit of most weights: the float32 copies carry it
    straight = run("bf16", **settings)
    at(1, interrupt, monkeypatch)
    assert everything(resume(run("bf16-stopped", **settings)), 2) == everything(straight, 2)
    assert not same(load_engine("bf16/step-2", dtype="bfloat16").model, load_engine("model", dtype="bfloat16").model)


# The real thing, scaled down

def test_two_steps_run_end_to_end_on_a_model_of_qwen2_5_7bs_configuration(tmp_path, monkeypatch, capsys):
    tok = wordy(QWEN_TEMPLATE)
    shipped = {"bos_token_id": 0, "pad_token_id": 0, "do_sample": True, "eos_token_id": [2, 0], "repetition_penalty": 1.05,
               "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    write(tmp_path / "qwen", tok, generation=shipped, hidden_size=112, intermediate_size=592, num_attention_heads=28, num_key_value_heads=4,
          rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False, initializer_range=0.02,
          max_position_embeddings=32768, sliding_window=131072, max_window_layers=28, bos_token_id=0, attention_dropout=0.0)
    made = rows(run(tmp_path / "run", model=tmp_path / "qwen", steps=2, group_size=2, max_turns=1))
    checkpoint = tmp_path / "run" / "step-2"
    kept = json.loads((checkpoint / "generation_config.json").read_text())
    assert len(made) == 2 and {key: kept[key] for key in shipped} == shipped
    config = AutoModelForCausalLM.from_pretrained(checkpoint).config
    assert (config.num_key_value_heads, config.tie_word_embeddings, config.rope_parameters["rope_theta"]) == (4, False, 1e6)

    monkeypatch.setattr(sys, "argv", ["solve.py", "Who?", "--model", str(checkpoint), "--tools", "base_generator", "--max-turns", "1",
                                      "--max-new-tokens", "4", "--device", "cpu"])
    solve.main()
    said = capsys.readouterr().out
    assert f"planner {checkpoint} |" in said and f"fixed   {tmp_path / 'qwen'} |" in said and "1 flows" in said


def test_every_turn_of_every_rollout_is_learnt_from_though_it_be_an_odd_number(tmp_path, monkeypatch):
    failing([3], monkeypatch)
    spy = Spy(monkeypatch, "update")
    run(tmp_path / "run", steps=1, max_turns=3)
    assert sorted(action.flow for action in spy.calls[0][3]) == [flow for flow in range(7) for _ in range(3)]


def test_the_token_budget_that_was_enough_serves_the_next_step(tmp_path, monkeypatch):
    real, budgets = train.update, []

    def update(*args, **settings):
        budgets.append(settings["token_budget"])
        return real(*args, **settings) | {"token_budget": 99.0}
    monkeypatch.setattr(train, "update", update)
    run(tmp_path / "run", steps=2)
    assert budgets == [16384, 99]


def test_the_row_of_a_step_holds_the_means_of_its_flows(tmp_path, monkeypatch):
    failing([3], monkeypatch)
    flows = []
    monkeypatch.setattr(train, "train_step", lambda *a: flows.append(STEP(*a)) or flows[-1])
    row = rows(run(tmp_path / "run", steps=1))[0]
    kept = [flow for flow in flows[0][1] if not flow.failed]
    plans = [len(said.ids) for flow in kept for said in flow.actions]
    assert float(row["reward"]) == sum(flow.reward for flow in kept) / 7
    assert float(row["plan_tokens"]) == sum(plans) / len(plans)
    assert row["unreadable"] == row["unreadable_errors"] == "16"
    assert row["base_generator"] == row["undecided"] == "0"
