"""What a run and a checkpoint keep: damaged files, locks, names that survive a move, the code of a run."""
import errno
import fcntl
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import NO_UPDATE
from safetensors.torch import load_file, save_file
from test_models import tokenizer, write

import solve
from cli import answering, setup
from cli.command_line import solve_arguments, train_arguments
from cli.progress import Progress
from cli.watching import Watch
from logbook import advice, checkpoints, code, log
from logbook import folder as run_lock
from logbook.checkpoints import load_state
from logbook.endings import errors_leave
from logbook.records import run_folder, saved_records
from models.loading import load_engine
from rewards.questions import Question
from scale import fit
from tools import TOOLS
from world import places
from world.files import replace_file
from world.search import index
from world.toolbox import choose

ROOT = Path(__file__).parents[1]


# Files of the wrong shape

class Evil:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def optimizer():
    return torch.optim.AdamW([("w", torch.nn.Parameter(torch.ones(2)))], lr=1e-3)


def checkpoint(folder):
    """step-2/ of one weight, after a step: its file of tensors."""
    trained = optimizer()
    (weight,) = trained.param_groups[0]["params"]
    weight.grad = torch.ones(2)
    trained.step()
    (folder / "step-2").mkdir()
    (folder / "step-2" / "train.json").write_text(json.dumps({"step": 2, "best": 0.5}))
    checkpoints.write_trainer(folder / "step-2" / "trainer", trained)
    (file,) = (folder / "step-2" / "trainer").iterdir()
    return file


def read(folder):
    """As --resume reads it: ({"step", "best", "moved"}, the tensors)."""
    state, fresh = load_state(folder / "step-2"), optimizer()
    checkpoints.restore(folder / "step-2", fresh)
    return state, {name: tensor.tolist() for name, tensor in checkpoints.tensors_of(fresh).items()}


def tensors(first=0, **changed):
    """The file with other tensors, or with None in place of one; first: the place where its part begins."""
    def write(file):
        left = {name: tensor for name, tensor in (load_file(file) | changed).items() if tensor is not None}
        places = {name: {"saved_offsets": [first if name == "w" else 0]} for name in left}
        save_file(left, file, {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)})
    return write


def train_json(**changed):
    text = json.dumps({"step": 2, "best": 0.5} | changed)
    return lambda file: (file.parents[1] / "train.json").write_text(text)


def elsewhere(file):
    shutil.move(file, file.parents[1] / "elsewhere")
    return file.parents[1] / "elsewhere"


BROKEN = {
    "no number": train_json(best=[1]),
    "no best": lambda file: (file.parents[1] / "train.json").write_text('{"step": 2}'),
    "no train.json": lambda file: (file.parents[1] / "train.json").unlink(),
    "empty": lambda file: file.write_bytes(b""), "noise": lambda file: file.write_bytes(b"\xff" * 500),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "code": lambda file: file.write_bytes(pickle.dumps(Evil())),
    "code of torch": lambda file: torch.save(Evil(), file), "no file": Path.unlink,
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a link": lambda file: file.symlink_to(elsewhere(file)),
    "no weight": tensors(w=None), "no moment": tensors(**{"w.exp_avg_sq": None}),
    "other shapes": tensors(w=torch.ones(3)), "more weights": tensors(v=torch.ones(2)),
    "moments of other shapes": tensors(**{"w.exp_avg": torch.ones(3)}),
    "the first half of a weight is gone": tensors(1, w=torch.ones(1)),
    "a weight twice": lambda file: shutil.copy(file, file.with_name("again.safetensors"))}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_checkpoint_is_one_sentence_that_says_what_to_remove_and_runs_no_code(
        tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    BROKEN[name](checkpoint(tmp_path))
    with pytest.raises(ValueError, match="step-2 is damaged: remove it, then --resume continues") as why:
        read(tmp_path)
    assert "\n" not in str(why.value) and not Path("pwned").exists()


def test_a_whole_checkpoint_is_read_and_code_beside_it_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = checkpoint(tmp_path)
    for name in (".metadata", "optimizer.pt"):  # torch.distributed.checkpoint's own format has pickles
        file.with_name(name).write_bytes(pickle.dumps(Evil()))
    state, found = read(tmp_path)
    assert state == {"step": 2, "best": 0.5, "moved": True} and not Path("pwned").exists()
    assert found == {name: tensor.tolist() for name, tensor in load_file(file).items()}
    assert found["w"] != [1.0, 1.0] and found["w.step"] == [1.0]


LOGS = {
    "words": ("log.csv", b"step,reward\nhello,world\n"), "bytes": ("log.csv", b"step,reward\n\xff\xfe,1\n"),
    "no header": ("log.csv", b"1,0.5\n2,0.5\n"),
    "another header": ("log.csv", b"step,loss\n1,0.5\n2,0.5\n"),
    "a huge number": ("log.csv", b"step,reward\n" + b"9" * 5000 + b",0\n"),
    "evaluations": ("evals.csv", b"step,questions,accuracy\n1\n"),
    "evaluations, bytes": ("evals.csv", b"\x80\n"), "no JSON": ("rollouts.jsonl", b"hello\n"),
    "a list": ("rollouts.jsonl", b"[1]\n"), "no step": ("rollouts.jsonl", b"{}\n"),
    "a step in words": ("rollouts.jsonl", b'{"step": "1"}\n'),
    "deep": ("rollouts.jsonl", b"[" * 10**5 + b"\n")}
HEADERS = {"log.csv": ["step", "reward"], "evals.csv": ["step", "questions", "accuracy"]}


@pytest.mark.parametrize("name", LOGS)
def test_a_damaged_log_is_one_sentence_and_stays_as_it_is(tmp_path, name):
    file, content = LOGS[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} cannot be used .*move it away, and --resume begins") as why:
        log.Log(tmp_path, 2, HEADERS)
    assert "\n" not in str(why.value) and (tmp_path / file).read_bytes() == content


def test_what_came_after_the_checkpoint_is_dropped_and_half_a_line_with_it(tmp_path):
    rows = {"log.csv": "step,reward\n1,0\n2,0\n",
            "rollouts.jsonl": '{"step": 1, "id": ""}\n' * 2 + '{"step": 2, "id": ""}\n',
            "evals.csv": "step,questions,accuracy\n0,test,0\n2,valid,0\n2,test,0\n"}
    later = {"log.csv": "3,0\n4,", "rollouts.jsonl": '{"step": 3, "id": ""}\n{"st',
             "evals.csv": "3,valid,0\n"}
    for name in rows:
        (tmp_path / name).write_text(rows[name] + later[name])
    log.Log(tmp_path, 2, HEADERS)
    assert {name: (tmp_path / name).read_text() for name in rows} == rows


def test_the_columns_that_are_checked_are_those_that_are_written():
    rollout = SimpleNamespace(memory=SimpleNamespace(steps=[]), outputs=[], plans=[], right=True,
                              reward=1.0, failed="", undecided=False)
    assert list(log.step_row(1, [rollout], [rollout], [0], 0, NO_UPDATE, ["a"])) == log.columns(["a"])


REMEMBERED = {
    "{": "Expecting property name", "[]": "no JSON object",
    '{"tools": ["rm"]}': "was trained with the tool 'rm', which this code does not have: give --tools",
    "[" * 10**5: "recursion", "\udcff": "decode",
    '{"fixed": "https://evil.example/v1\\u001b[31m"}': r"--fixed https://evil.example/v1\x1b[31m: give that",
    '{"fixed": "/gone/model"}': "--fixed /gone/model, which is not there: give --fixed, in its new place"}


@pytest.mark.parametrize("text", REMEMBERED)
def test_a_train_json_that_cannot_be_used_is_one_printable_sentence(tmp_path, monkeypatch, capsys, text):
    (tmp_path / "train.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    monkeypatch.setattr(sys, "argv", ["solve.py", "Who?", "--model", str(tmp_path)])
    with pytest.raises(SystemExit) as stop, errors_leave("solve.py"):
        args = solve_arguments(TOOLS)
        choose(TOOLS, args.tools, args.corpus)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and REMEMBERED[text] in error and error.count("\n") == 1
    assert "\x1b" not in error


# Code in a checkpoint

@pytest.mark.parametrize("kind", ["plain", "zip"])
def test_weights_that_would_run_code_are_one_sentence_and_run_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "model", tokenizer())
    (tmp_path / "model" / "model.safetensors").unlink()
    weights = tmp_path / "model" / "pytorch_model.bin"
    if kind == "zip":
        torch.save({"a": Evil()}, weights)
    else:
        weights.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="would run code while they are read, or are damaged") as why:
        load_engine("model")
    assert "\n" not in str(why.value) and not Path("pwned").exists()


@pytest.mark.parametrize("file, changes", [
    ("config.json", {"model_type": "own",
                     "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}),
    ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.T", None]}})])
def test_code_of_a_model_is_not_run_and_nobody_is_asked(tmp_path, monkeypatch, file, changes):
    write(tmp_path, tokenizer())
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | changes))
    (tmp_path / "own.py").write_text("import os; os.mkdir('pwned')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    monkeypatch.chdir(tmp_path)
    try:
        load_engine(str(tmp_path))
    except ValueError as why:
        assert "brings Python code of its own, which is not run here" in str(why) and "\n" not in str(why)
    assert not Path("pwned").exists()


@pytest.mark.parametrize("file, changes, sentence", [
    ("config.json", {"attn_implementation": "evil/kernel"}, "names a kernel on the hub, evil/kernel"),
    ("adapter_config.json", {"base_model_name_or_path": "evil/base"}, "holds adapters at its top"),
    ("config.json", {"num_hidden_layers": "4"}, "does not hold a whole model"),
    ("config.json", {"num_hidden_layers": None}, "")])
def test_a_configuration_that_names_code_or_another_model_or_nonsense_is_one_sentence(
        tmp_path, file, changes, sentence):
    write(tmp_path, tokenizer())
    before = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (tmp_path / file).write_text(json.dumps(before | changes))
    with pytest.raises(ValueError) as why:
        load_engine(str(tmp_path))
    assert sentence in str(why.value) and "\n" not in str(why.value)


# One process at a time

HOLD = "import sys, time; from pathlib import Path; from logbook import folder; " \
       "folder.lock(Path(sys.argv[1]), 'x'); print('locked', flush=True); time.sleep(60)"


def holder(folder, **environment):
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder], cwd=ROOT, env=os.environ | environment,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_folder_is_taken_until_its_process_ends_however_it_ends(tmp_path):
    process = holder(tmp_path)
    with pytest.raises(ValueError, match=rf"is in use by another process \({process.pid}\): wait until"):
        run_lock.lock(tmp_path, "train.py")
    process.send_signal(signal.SIGKILL)
    process.wait()
    run_lock.lock(tmp_path, "train.py")
    run_lock.lock(tmp_path, "train.py")  # ours already
    other = subprocess.run([sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert f"is in use by another process ({os.getpid()})" in other.stderr


def test_of_several_ranks_the_first_alone_takes_the_folder(tmp_path):
    run_lock.lock(tmp_path, "train.py")
    holder(tmp_path, RANK="1").kill()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks")))
    run_lock.lock(tmp_path, "train.py")
    assert capsys.readouterr().err.startswith(f"train.py: the file system of {tmp_path} has no locks: see")
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    (tmp_path / "other").mkdir()
    with pytest.raises(OSError, match="broken"):
        run_lock.lock(tmp_path / "other", "train.py")


def test_a_second_resume_of_a_run_is_refused_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tmp_path / "new")])
    (tmp_path / "args.json").write_text(json.dumps(vars(train_arguments(TOOLS))))
    before = (tmp_path / "args.json").read_bytes()
    process = holder(tmp_path)
    second = subprocess.run([sys.executable, "train.py", "--resume", tmp_path], cwd=ROOT, capture_output=True,
                            text=True, timeout=60)
    process.kill()
    assert second.returncode == 2 and second.stderr.count("\n") == 1
    assert second.stderr.startswith(f"train.py: {tmp_path} is in use by another process ({process.pid})")
    assert (tmp_path / "args.json").read_bytes() == before


def test_a_second_solve_with_the_same_out_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["solve.py", "--limit", "1", "--out", str(tmp_path / "out")])
    args = solve_arguments(TOOLS)
    (tmp_path / "out").mkdir()
    process = holder(tmp_path / "out")
    (tmp_path / "out" / "settings.json").write_text("{}")
    monkeypatch.setattr(answering, "run_folder", lambda out, settings: Path(out))
    with pytest.raises(ValueError, match="is in use by another process"):
        answering.open_run(args)
    process.kill()


# Folders that somebody else made

def own_files(folder):
    """{a file of a run that is added to: what opens it}"""
    rollouts = lambda: saved_records(folder / "questions-0.jsonl", [], 1)
    logs = dict.fromkeys(("log.csv", "evals.csv", "rollouts.jsonl"), lambda: log.Log(folder, 2, HEADERS))
    return {"lock": lambda: run_lock.lock(folder, "train.py"), "questions-0.jsonl": rollouts, **logs}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", own_files(Path()))
def test_a_link_in_a_folder_lets_no_file_elsewhere_be_written(tmp_path, name, there):
    elsewhere, folder = tmp_path / "thesis", tmp_path / "run"
    folder.mkdir()
    if there:
        elsewhere.write_text("precious")
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(ValueError, match=f"{name} is a link to another place, which is not written to"):
        own_files(folder)[name]()
    assert elsewhere.read_text() == "precious" if there else not elsewhere.exists()


def test_a_file_that_is_replaced_does_not_change_what_a_link_in_its_place_leads_to(tmp_path):
    (tmp_path / "thesis").write_text("precious")
    for name in ("table.md", f"table.md.{os.getpid()}.writing"):
        (tmp_path / name).symlink_to(tmp_path / "thesis")
    replace_file(tmp_path / "table.md", "mine")
    assert (tmp_path / "thesis").read_text() == "precious" and (tmp_path / "table.md").read_text() == "mine"


@pytest.mark.parametrize("name", [
    *own_files(Path()), "step-2/trainer/a.safetensors", "settings.json", "corpus.jsonl"])
def test_a_pipe_in_a_folder_is_one_sentence_and_nobody_waits_for_it(tmp_path, name):
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for the pipe"))
    (tmp_path / "step-2" / "trainer").mkdir(parents=True)
    (tmp_path / "step-2" / "train.json").write_text(json.dumps({"step": 2, "best": 0.5}))
    os.mkfifo(tmp_path / name)
    opened = own_files(tmp_path) | {"step-2/trainer/a.safetensors": lambda: load_state(tmp_path / "step-2"),
                                    "settings.json": lambda: run_folder(tmp_path, {"seed": 0}),
                                    "corpus.jsonl": lambda: index(str(tmp_path / name))}
    signal.alarm(20)
    try:
        with pytest.raises(ValueError, match=f"{name} is not a regular file"):
            opened[name]()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_kill_before_the_settings_leaves_a_folder_that_the_same_command_uses(tmp_path):
    assert run_folder(tmp_path / "new", {"seed": 0}) == tmp_path / "new"
    (tmp_path / "new" / "settings.json").unlink()
    run_folder(tmp_path / "new", {"seed": 0})
    with pytest.raises(ValueError, match="another --seed"):
        run_folder(tmp_path / "new", {"seed": 1})


@pytest.mark.parametrize("text", ["[" * 10**5, "[]", "{", "\udcff"])
def test_settings_of_another_shape_are_one_sentence(tmp_path, text):
    (tmp_path / "settings.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="settings.json cannot be used .*: give another --out"):
        run_folder(tmp_path, {"seed": 0})


# Names that survive a move

@pytest.mark.parametrize("path, folder, name", [
    ("{root}/toy", "{root}/runs/a/best", "./toy"),
    ("{root}/toy/corpus.jsonl", "{tmp}/run", "./toy/corpus.jsonl"),
    ("{tmp}/base", "{tmp}/out/run/best", "../../../base"), ("{tmp}/run/corpus", "{tmp}/run", "../run/corpus"),
    ("{home}/models/base", "{home}/code/runs", "~/models/base"), ("/usr/bin", "{tmp}/run", "/usr/bin")])
def test_a_path_is_named_so_that_it_is_found_again_and_says_little_of_the_machine(
        tmp_path, monkeypatch, path, folder, name):
    names = {"root": str(places.ROOT), "tmp": str(tmp_path / "t"), "home": str(tmp_path / "home")}
    monkeypatch.setenv("HOME", names["home"])
    path, folder = Path(path.format(**names)), Path(folder.format(**names))
    if not path.exists():
        path.mkdir(parents=True)
    assert places.portable(str(path), folder) == name
    assert places.located(name, folder) == str(path)


def test_names_on_the_hub_servers_and_absent_settings_stay_as_they_are(tmp_path):
    for name in ("Qwen/Qwen2.5-7B", "http://localhost:8000/v1#m", "none", None, "nq+math", "wikipedia:de"):
        assert places.portable(name, tmp_path) == name == places.located(name, tmp_path)


# Disk

def planned(monkeypatch, tmp_path, free, **changed):
    (tmp_path / "run").mkdir(exist_ok=True)
    monkeypatch.setattr(fit, "shapes", lambda config: {"parameters": 7e9, "adapter": 1e6})
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    args = dict(model="toy", out=str(tmp_path / "run"), dtype="bfloat16", device="cpu", lora=None, steps=32,
                every=5, keep=2, valid=None, optimizer_device=None, resume=None) | changed
    monkeypatch.chdir(ROOT)
    setup.plan_disk(SimpleNamespace(**args))


@pytest.mark.parametrize("changed, need", [
    ({}, 3 * 98 + 14), ({"keep": None}, 7 * 98 + 14), ({"valid": "none"}, 3 * 98), ({"steps": 5}, 98 + 14),
    ({"lora": 32}, 3 * (14 + 16 * 0.032) + 14 + 4 * 0.032)])
def test_the_start_says_what_disk_the_checkpoints_need_and_refuses_what_does_not_fit(
        tmp_path, monkeypatch, capsys, changed, need):
    planned(monkeypatch, tmp_path, need * 1e9 + 1e6, **changed)
    assert capsys.readouterr().out.startswith(f"disk    {need:.3g} of {need:.3g} GB, for at most ")
    with pytest.raises(ValueError, match="GB of disk, and .* are free for .*: give --keep 1"):
        planned(monkeypatch, tmp_path, need * 1e9 - 1e6, **changed)


def test_a_resumed_run_counts_its_own_checkpoints_and_is_only_warned(tmp_path, monkeypatch, capsys):
    (tmp_path / "run" / "step-1" / "trainer").mkdir(parents=True)
    with open(tmp_path / "run" / "step-1" / "trainer" / "a.safetensors", "wb") as file:
        file.truncate(10**9)  # takes no disk
    planned(monkeypatch, tmp_path, 307.5e9, resume="run")
    assert "warning" not in capsys.readouterr().out
    planned(monkeypatch, tmp_path, 300e9, resume="run")
    assert "\nwarning: the checkpoints need 308 GB of disk, and 301 are free" in capsys.readouterr().out


@pytest.mark.parametrize("flags, keep", [
    ([], None), (["--model", "a/b"], 2), (["--model", "a/b", "--keep", "9"], 9)])
def test_a_real_model_keeps_two_checkpoints_and_the_toy_all(monkeypatch, tmp_path, flags, keep):
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tmp_path / "run"), *flags])
    assert train_arguments(TOOLS).keep == keep


# The code that made a run

def git(*words):
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *author, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = (tmp_path / "repository").resolve()
    folder.mkdir()
    monkeypatch.setattr(code, "ROOT", folder)
    monkeypatch.chdir(folder)
    git("init", "-q")
    Path("flow.py").write_text("a = 1\n")
    Path("README.md").write_text("words\n")
    git("add", ".")
    git("commit", "-qm", "first")
    return folder


def test_the_commit_is_recorded_and_whether_files_were_changed_since(repository):
    git("tag", "-am", "a", "v1")
    clean = code.present()
    assert re.fullmatch("[0-9a-f]{40}", clean)
    Path("flow.py").write_text("a = 2\n")
    changed = code.present()
    assert re.fullmatch(f"{clean}-dirty-[0-9a-f]{{8}}", changed) and code.present() == changed
    Path("flow.py").write_bytes(b"a = '\xe9'\n")
    git("config", "diff.external", "true")  # a program that shows no difference
    assert code.present() not in (clean, changed)


@pytest.mark.parametrize("why", ["no git", "no repository", "another's repository"])
def test_code_without_a_repository_of_its_own_has_no_commit(repository, tmp_path, monkeypatch, why):
    (repository / "copy").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path)) if why == "no git" else None
    monkeypatch.setattr(code, "ROOT", repository / "copy" if "another" in why else tmp_path)
    assert code.present() is None


def test_a_run_that_goes_on_with_other_code_records_both(repository):
    records = code.with_present([], 0)
    assert code.with_present(records, 3) == records
    Path("flow.py").write_text("a = 3\n")
    assert [record["after step"] for record in code.with_present(records, 3)] == [0, 3]


# What others wrote, on a terminal

def test_no_text_of_a_model_a_server_or_a_data_set_reaches_the_terminal_raw(capsys):
    failed = SimpleNamespace(failed="\x1b[31m server", memory=SimpleNamespace(steps=[SimpleNamespace(
        tool="", turn=1, result="Error: \x1b[2J")]), outputs=[
            {"module": "planner", "turn": 1, "text": "\x1b]0;x\x07"}])
    log.say("\x1b[31m data")
    assert "\x1b" not in advice.failures([failed]) + advice.unparsed([failed]) + capsys.readouterr().out


def test_the_gold_of_a_data_set_is_printed_without_control_characters(capsys):
    rollout = solve.Rollout(Question("q", "\x1b[31mgold"), memory=None, answer="a")
    with Progress(1) as progress:
        args = SimpleNamespace(quiet=False, benchmark=None, question=None)
        Watch(None, args, progress).print_traces([rollout])
    assert r"(wrong: \x1b[31mgold)" in capsys.readouterr().out


