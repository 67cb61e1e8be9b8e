"""The model card of a checkpoint: its numbers are the run's, and nothing private or hostile gets into it."""
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

import train
from cli.command_line import FOR_PAPER, TOY, train_parser
from logbook import model_card
from scale import ranks

ROWS = "step,questions,accuracy,turns,errors,failed,undecided,n\n"
SETTINGS = vars(train_parser().parse_args([])) | FOR_PAPER | {
    "model": "Qwen/Qwen2.5-7B-Instruct", "fixed": "Qwen/Qwen2.5-7B-Instruct", "judge": None, "lr": 1e-6,
    "tools": ["python_coder", "web_search"], "dtype": "bfloat16",
    "code": [{"after step": 0, "commit": 40 * "a"}]}
PRIVATE = ["/home/alice/secret", "~/secret", "../../secret", "./runs/secret", "secret/../alice",
           "http://alice:secret@10.0.0.7:8000/v1?key=secret#/mnt/secret", "https://secret.example/v1",
           "secret\n---\nlicense: mit", "secret: {a: 1}", "secret/a/b", "<script>secret</script>",
           "secret](http://alice)", "| secret |"]


@pytest.fixture
def card(tmp_path):
    """Makes the card of a run whose settings are changed so: (the facts of its YAML, its text)."""
    def made(step=20, rows="", hardware=None, **changed):
        (tmp_path / "best").mkdir(exist_ok=True)
        (tmp_path / "args.json").write_text(json.dumps(SETTINGS | changed))
        (tmp_path / "evals.csv").write_text(ROWS + rows)
        (tmp_path / "best" / "train.json").write_text(json.dumps({"step": step, "hardware": hardware}))
        model_card.write(tmp_path / "best", tmp_path)
        text = (tmp_path / "best" / "README.md").read_text(encoding="utf-8")
        _, matter, body = text.split("---\n", 2)
        return yaml.safe_load(matter), body

    return made


def test_the_facts_at_the_top_are_what_a_hub_reads(card):
    facts, body = card(hardware="1 x NVIDIA H200")
    assert facts["base_model"] == "Qwen/Qwen2.5-7B-Instruct" and facts["base_model_relation"] == "finetune"
    assert facts["datasets"] == ["RUC-NLPIR/FlashRAG_datasets", "zwhe99/DeepMath-103K"]
    assert {"flow-grpo", "agentflow"} <= set(facts["tags"]) and facts["library_name"] == "transformers"
    for fact in ("trained: all weights", "hardware: 1 x NVIDIA H200", f"code: {40 * 'a'}\n", "lr 1e-06",
                 "steps: 20 of 32, each of 32 questions x 8 rollouts", "nq+deepmath, at most 1000",
                 "tools: python_coder, web_search", "judge: none", "dtype bfloat16"):
        assert fact in body, fact


def test_before_and_after_have_the_interval_and_the_number_of_questions(card):
    rows = "0,test,0.34,1.6,0.3,0,0,300\n10,valid,0.5,1.6,0.3,0,0,96\n20,valid,0.6,1.6,0.3,0,0,96\n"
    _, body = card(rows=rows + "20,test,0.97,1.5,0.0,0,0,300\n")
    # Wilson's interval of 102 and of 291 right answers of 300, from its formula
    assert "**test, 300 questions: 0.340 [0.29, 0.40] before → 0.970 [0.94, 0.98] after step 20.**" in body
    assert "valid, 96 questions" not in body and "step 10" not in body  # no "before"; other weights


def test_a_test_of_other_weights_is_not_this_checkpoints_after(card):
    rows = "0,test,0.34,1.6,0.3,0,0,300\n20,valid,0.6,1.6,0.3,0,0,96\n32,test,0.97,1.5,0.0,0,0,300\n"
    _, body = card(rows=rows)
    assert "before →" not in body
    [line] = [line for line in body.splitlines() if "0.970" in line]
    assert "NOT these" in line and "step 32" in line


def test_without_test_questions_the_validation_set_is_compared_and_without_any_the_card_says_so(card):
    _, body = card(rows="0,valid,0.25,1,0,0,0,64\n20,valid,0.5,1,0,0,0,64\n")
    assert "**valid, 64 questions: 0.250 [0.16, 0.37] before → 0.500 [0.38, 0.62] after step 20.**" in body
    assert "It was not evaluated." in card()[1]


@pytest.mark.parametrize("setting", ["model", "fixed", "executor", "judge", "data", "valid", "test", "corpus",
                                     "cache", "out", "device"])
def test_no_path_address_or_hostile_name_gets_into_a_card(card, setting):
    left_out = {"model": {"base_model", "base_model_relation"}, "data": {"datasets"}}.get(setting, set())
    expected = set(card()[0]) - left_out
    for name in PRIVATE:
        facts, body = card(**{setting: name})
        assert set(facts) == expected, name
        assert not any(word in f"{facts}{body}" for word in ("secret", "alice", "10.0.0.7", "script")), name


@pytest.mark.parametrize("changed", [
    {"tools": ["python_coder", "a\n---\nsecret"]}, {"dtype": "secret:\n- x"}, {"hardware": "x\n# secret`|"}])
def test_no_text_of_the_settings_is_copied(card, changed):
    _, body = card(**changed)
    assert "secret" not in body.replace("x secret", "") and "---\n" not in body
    assert body.count("\n#") == card()[1].count("\n#")


def test_the_name_of_a_model_on_a_server_is_shown_and_its_address_is_not(card):
    _, body = card(fixed="http://10.0.0.7:8000/v1#Qwen/Qwen2.5-7B-Instruct")
    assert "other modules: Qwen/Qwen2.5-7B-Instruct on a server\n" in body and "10.0.0.7" not in body


def test_a_run_that_was_resumed_with_other_code_names_both_commits(card):
    _, body = card(code=[{"after step": 0, "commit": None}, {"after step": 8, "commit": 40 * "b" + "-dirty"}])
    assert f"code: no known commit; {40 * 'b'}-dirty (after step 8)" in body


def test_several_ranks_are_counted(monkeypatch):
    assert model_card.hardware(torch.device("cpu")) == "CPU"
    monkeypatch.setattr(ranks, "WORLD", 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert model_card.hardware(torch.device("cuda", 3)) == "8 x NVIDIA H100 80GB HBM3"


def test_the_cards_of_all_checkpoints_are_written_again(card, tmp_path):
    card()
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "train.json").write_text('{"step": 5}')
    with open(Path(tmp_path, "evals.csv"), "a") as file:
        file.write("32,test,0.5,1,0,0,0,10\n")
    model_card.rewrite(tmp_path)
    assert all("0.500" in (tmp_path / name / "README.md").read_text() for name in ("best", "step-5"))


def test_a_run_writes_the_card_beside_its_weights_and_again_when_the_test_is_known(
        tmp_path, monkeypatch, capsys):
    for name, lines in (("test", 4), ("valid", 2)):
        text = (TOY / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"my-{name}.jsonl").write_text("".join(text[:lines]))
    flags = "--device cpu --steps 1 --every 1 --questions 1 --group-size 4 --max-turns 1 --limit 20"
    files = [word for name in ("test", "valid") for word in (f"--{name}", str(tmp_path / f"my-{name}.jsonl"))]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split(), *files, "--out", str(tmp_path / "run")])
    train.main()
    printed = capsys.readouterr().out
    cards = {folder.name: (folder / "README.md").read_text()
             for folder in (tmp_path / "run").iterdir() if folder.is_dir()}
    assert set(cards) == {"step-1", "best"}
    before, after = re.findall(r"test after step \d: accuracy (\S+ \[.*\]) of 4", printed)
    assert f"**test, 4 questions: {before} before → {after} after step 1.**" in cards["step-1"]
    assert "hardware: CPU\n" in cards["best"] and "test questions: a local file\n" in cards["best"]
    assert str(tmp_path) not in "".join(cards.values()) and "my-" not in "".join(cards.values())
    modes = {file.stat().st_mode for file in (tmp_path / "run" / "best").iterdir()}
    assert len(modes) == 1  # the card is as readable as the weights
