"""experiments/ratios.py keeps log-ratios, flows.py makes the page of a run, curves.py its picture.

The page is opened in a headless Chromium where there is one: CHROMIUM names it, or else it is looked for.
"""
import base64
import csv
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from test_models import CHATML, tokenizer, write
from test_solve import CALL, GO_ON, PLAN, Cast, doubling
from test_train import command, even_is_right, jsonl, words, wordy

import solve
import train
from experiments import curves, flows, ratios
from experiments.runs import ROOT
from fast import logps
from flow_grpo import log_probs
from logbook.log import Log
from memory import Memory, Step
from models.completion import Completion
from models.loading import load_engine
from rewards.questions import Question
from scale.passes import Passes
from world.services import ServiceError

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge"
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
TOOLS = ["python_coder", "wikipedia_search"]
SETTINGS = {"tools": TOOLS, "group_size": 2, "seed": 0, "out": "run", "beta": 0.1}
HOSTILE = [
    "</script><script>document.title = 'hacked'</script>",
    "<img src=x onerror=\"document.title = 'hacked'\">",
    "javascript:document.title='hacked'", "]]>--><!--", "line\u2028and\u2029paragraph", "\ud800 half a pair",
    "{data} {policy}", "&lt;b&gt; &amp;", "\u202eright to left", "\x00\x1b[31m", "w" * 3000]


def rollout(text="q?", reward=1.0, error=False, tool="python_coder", log_ratios=None):
    """A finished rollout of one turn in which every text is this one."""
    rollout = solve.Rollout(Question(text, text), Memory(text, text), answer=text)
    rollout.right, rollout.reward = reward > 0, reward
    rollout.memory.steps.append(Step(1, tool, text, text, text, error, "STOP"))
    for turn, module in enumerate(["analysis", "planner", "executor", tool, "verifier", "generator"]):
        rollout.add_output(min(turn, 1), module, text, 3, 0.5)
    if log_ratios:
        rollout.outputs[1]["log_ratios"] = log_ratios
    return rollout


@pytest.fixture
def run(tmp_path):
    """made(steps, **settings): the folder of a run with these rollouts in its steps 1, 2, ..."""
    def made(steps, **settings):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "args.json").write_text(json.dumps(SETTINGS | settings))
        for step, rollouts in enumerate(steps, 1):
            Log(folder, 99).add_row("log.csv", {"step": step, "reward": 0.5, "kl": 0.001 * step})
            Log(folder, 99).add_rollouts(step, rollouts)
        return folder
    return made


# ---- the log-ratios of a sample
@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    write(folder / "model", tokenizer(CHATML))
    return load_engine(str(folder / "model"), "cpu", "float32")


def acted(*turns):
    """A rollout whose planner sampled these (prompt_ids, ids)."""
    rollout = solve.Rollout(Question("q", "a"), Memory("q"))
    rollout.plans = [Completion("", list(prompt), list(ids)) for prompt, ids in turns]
    for turn in range(len(turns)):
        rollout.add_output(turn + 1, "planner", "", 0, 0)
    return rollout


def test_the_log_ratios_are_the_difference_of_the_log_probs_and_only_of_one_group(policy):
    rollouts = [acted(([5, 6], [7, 8])), acted(([5, 6], [9])),
                acted(([5, 6], [7, 8]), ([5, 6, 10], [3, 4, 2])),
                acted(([5, 6], []), ([4], [3])), acted(([5], [6])), acted(([5], [7]))]
    A = torch.tensor([0.0, 0, 1, -1, 1, -1])  # the first group is flat, the second is the sample
    apart = lambda: [token_logps(policy.model, [turn], 0.7).detach() for rollout in rollouts[2:4]
                     for turn in rollout.plans if turn.ids]
    token_logps = logps.scoring(log_probs, policy.model)[0]
    before = apart()

    def without_gradient(*args):
        assert not torch.is_grad_enabled()
        return token_logps(*args)

    passes = Passes(policy.model, None, without_gradient, logps.scoring(log_probs, policy.model)[1], 16)
    with ratios.log_ratios(policy, rollouts, [0, 0, 1, 1, 2, 2], A, 0.7, passes), torch.no_grad():
        policy.model.lm_head.weight.add_(torch.randn_like(policy.model.lm_head.weight) / 10)
    noted = [output.get("log_ratios") for rollout in rollouts for output in rollout.outputs]
    assert [noted[i] for i in (0, 1, 4, 6, 7)] == [None] * 5
    for one, new, old in zip([noted[i] for i in (2, 3, 5)], apart(), before, strict=True):
        assert [ratio for _, ratio in one] == pytest.approx((new - old).tolist(), rel=1e-2, abs=1e-5)
        assert max(abs(ratio) for _, ratio in one) > 1e-3


def test_scoring_the_sample_draws_no_random_number_and_changes_no_mode_and_no_gradient(policy):
    state = lambda: (torch.get_rng_state().tolist(), [module.training for module in policy.model.modules()],
                     [p.grad for p in policy.model.parameters()])
    before = state()
    rollouts = [acted(([5, 6], [7, 8])), acted(([5, 6], [9]))]
    passes = Passes(policy.model, None, *logps.scoring(log_probs, policy.model), token_budget=16)
    with ratios.log_ratios(policy, rollouts, [0, 0], torch.tensor([1.0, -1]), 0.7, passes):
        pass
    assert state() == before and rollouts[0].outputs[0]["log_ratios"]


def test_the_first_rank_takes_the_first_group_that_is_not_flat_and_the_others_none(monkeypatch):
    A, groups = torch.tensor([0.0, 0, 1, -1, 1, -1]), [1, 1, 2, 2, 4, 4]
    assert ratios.first_group("abcdef", groups, A) == ["c", "d"]
    monkeypatch.setattr(ratios.ranks, "RANK", 1)
    assert ratios.first_group("abcdef", groups, A) == []


def test_the_pieces_of_a_plan_are_its_text_whatever_characters_share_tokens(policy):
    text = "naïve 😀 Tool: x\n  日本 "
    ids = policy.tokenizer.encode(text, add_special_tokens=False)
    pieces = ratios.pieces(policy.tokenizer, ids + [policy.tokenizer.eos_token_id])
    assert "".join(pieces[:-1]) == text and pieces[-1] == policy.tokenizer.eos_token
    assert "😀" in pieces and len(ids) > len(text)
    assert "".join(ratios.pieces(policy.tokenizer, ids[:3])) == "na�"  # the plan was cut inside a character


def test_a_tokenizer_that_drops_the_first_space_loses_none_in_the_pieces():
    def decode(ids, **settings):  # as Llama 2's does
        return "".join("▁Tool ▁: ▁x".split()[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert ratios.pieces(SimpleNamespace(decode=decode), [0, 1, 2]) == ["Tool", " :", " x"]


def test_a_run_that_keeps_log_ratios_learns_the_same_as_one_that_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(solve, "roll_out", even_is_right)
    stops = {"eos_token_id": [2, *range(20, 150)]}
    write(tmp_path / "model", wordy(CHATML), 0, generation=stops, max_position_embeddings=4096)
    jsonl(tmp_path / "data.jsonl", *"abcde")
    settings = dict(steps=2, valid=None, test=None, max_turns=1)
    command(*words("without", **settings))
    learnt, policy = [], SimpleNamespace(tokenizer=wordy(CHATML))

    def actions_of(*arguments, original=train.actions_of):
        learnt[:] = arguments[:2]
        return original(*arguments)

    def update(passes, optimizer, actions, groups, original=train.update, **settings):
        with ratios.log_ratios(policy, learnt[0], groups, learnt[1], settings["temperature"], passes):
            return original(passes, optimizer, actions, groups, **settings)

    monkeypatch.setattr(train, "actions_of", actions_of)
    monkeypatch.setattr(train, "update", update)
    command(*words("with", **settings))
    for name in ("log.csv", "step-2/model.safetensors"):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
    for step, records in flows.steps_of(tmp_path / "with"):
        samples = [any("log_ratios" in word for word in record["words"]) for record in records]
        assert sum(samples) == 4 and samples in ([True] * 4 + [False] * 4, [False] * 4 + [True] * 4)
    text = flows.page(tmp_path / "with")
    assert '"sample": true' in text and '"sample": true' not in flows.page(tmp_path / "without")


# ---- the page
def test_the_prompts_that_the_page_shows_are_those_that_were_read(tmp_path):
    def double(number):
        raise ServiceError("no such number")

    tools = doubling(double)
    plans = iter([PLAN, "no plan", PLAN.replace("double it", "again"), PLAN])
    calls = iter([CALL, "no call", CALL])
    engine = Cast(planner=lambda prompt: next(plans), executor=lambda prompt: next(calls), verifier=GO_ON)
    rollout = solve.roll_out([Question("Q?", "42")], engine, engine, tools, max_turns=4)[0]
    Log(tmp_path, 99).add_rollouts(1, [rollout])
    [(step, [record])] = flows.steps_of(tmp_path)
    again = flows.rollout_of(record)
    shown = flows.prompts_of(again, tools)
    modules = [output["module"] for output in again.outputs]
    assert [text for text, module in zip(shown, modules) if module != "double"] == engine.prompts
    assert [text for text, module in zip(shown, modules) if module == "double"] == [
        "double(number='21')", "", "double(number='21')"]
    errors = [flows.error_of(step) for step in again.memory.steps]
    assert errors == ["tool", "plan", "call", "tool"]


def test_the_advantages_of_the_page_are_those_of_training():
    half = math.sqrt(0.5)
    group = [rollout(reward=1.0), rollout(reward=0.0), rollout(reward=1.0), rollout(reward=1.0)]
    group[2].failed = "planner: down"
    assert flows.advantages_of(group, 2) == pytest.approx([half, -half, None, 0.0], abs=1e-5)


def test_no_text_of_a_run_reaches_the_page_as_html(run):
    class Elements(HTMLParser):
        def handle_starttag(self, tag, attributes):
            self.seen.append((tag, [(name, value) for name, value in attributes if name != "content"]))

    def elements(texts):
        parser = Elements()
        parser.seen = []
        text = flows.page(run([[rollout(text), rollout(text)] for text in texts], model=texts[0]))
        parser.feed(text)
        return text, parser.seen

    text, seen = elements(HOSTILE)
    assert seen == elements(["tame"] * len(HOSTILE))[1]
    template = flows.TEMPLATE.read_text()
    scripts = len(HOSTILE) + 1  # the texts of each step, and the index
    assert text.count("<") == template.count("<") + 2 * scripts
    assert not {"\u2028", "\u2029", "\u202e", "\ud800", "\x00"} & set(text)


def test_the_pages_policy_allows_its_own_script_and_style_and_nothing_else(run):
    text = flows.page(run([[rollout(), rollout()]]))
    policy = re.search('http-equiv="Content-Security-Policy" content="(.*?)"', text)[1].split("; ")
    assert policy[0] == "default-src 'none'" and "unsafe" not in text.partition("<style>")[0]
    for name in ("script", "style"):
        code = re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert "http" not in text.replace("http-equiv", "") and "innerHTML" not in text


def test_a_page_that_would_be_too_large_has_fewer_steps_evenly_spread_and_says_so(run):
    folder = run([[rollout(str(step)), rollout(str(step))] for step in range(10)])
    assert "evenly" not in flows.page(folder) and flows.page(folder).count('id="texts-') == 10
    bytes_of_a_step = len(re.search(r'id="texts-0">(.*?)<', flows.page(folder))[1])
    small = flows.page(folder, limit=4.5 * bytes_of_a_step / 1e6)
    assert small.count('id="texts-') == 4 and "Only 4 of 10 steps are shown" in small  # 1, 4, 7, 10
    assert flows.page(folder, chosen={2, 3}).count('id="texts-') == 2
    with pytest.raises(SystemExit, match="no rollouts of these steps"):
        flows.page(folder, chosen={99})


def test_a_link_in_a_run_does_not_let_the_page_replace_a_file_elsewhere(run, tmp_path, monkeypatch):
    folder = run([[rollout(), rollout()]])
    (tmp_path / "thesis").write_text("precious")
    (folder / "flows.html").symlink_to(tmp_path / "thesis")
    monkeypatch.setattr(sys, "argv", ["flows.py", str(folder)])
    flows.main()
    assert (tmp_path / "thesis").read_text() == "precious"
    assert (folder / "flows.html").stat().st_size > 1000


@pytest.mark.parametrize("file, text", [("args.json", "{"), ("args.json", "[]"), ("log.csv", "step,a\nx,y\n"),
                                        ("log.csv", "step,reward\n1,\x1b[2J\n")])
def test_a_damaged_run_is_one_sentence(run, monkeypatch, capsys, file, text):
    folder = run([[rollout(), rollout()]])
    (folder / "log.csv").write_text("step,reward\n1,0.5\n")
    (folder / file).write_text(text)
    monkeypatch.setattr(sys, "argv", ["flows.py", str(folder)])
    with pytest.raises(SystemExit) as stop:
        flows.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "\x1b" not in error


def test_a_run_that_still_writes_and_one_with_another_codes_tool_can_be_seen(run):
    folder = run([[rollout(), rollout(), rollout()]], tools=["sql_query"])
    with open(folder / "rollouts.jsonl", "a") as file:
        file.write('{"step": 2, "id": "half')
    text = flows.page(folder)
    assert text.count('"reward": 1.0') == 2 and "This code has no tool sql_query" in text


def test_the_published_page_has_todays_script_and_style_and_no_path_of_a_machine():
    page, template = (ROOT / "docs" / "rollouts.html").read_text(), flows.TEMPLATE.read_text()
    for name in ("script", "style"):
        assert re.search(f"<{name}>(.*?)</{name}>", template, re.DOTALL)[0] in page
    index = json.loads(re.search(r'id="index">(.*?)</script>', page)[1])
    assert index["name"] == "runs/toy-seed0" and not re.search("/(home|root|tmp|work)/", json.dumps(index))


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium; the variable CHROMIUM may name one")
def test_in_a_browser_the_page_shows_filters_and_lets_no_text_run(run):
    """Everything that is chosen is in the address behind the #, so one visit shows a filter and a rollout."""
    ratios = [["Tool: <b>", -0.25], [HOSTILE[1], 0.5], ["\u202e", None]]
    steps = [[rollout(reward=0.0), rollout(error=True)] for _ in range(3)]
    steps.append([rollout("".join(HOSTILE), 0.0, True, log_ratios=ratios), rollout("".join(HOSTILE))])
    folder = run(steps)
    (folder / "flows.html").write_text(flows.page(folder))
    page = (folder / "flows.html").as_uri() + "#error=tool&reward=down&rollout=4.0"
    flags = "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000", "--dump-dom"
    shown = subprocess.run([CHROMIUM, *flags, f"--user-data-dir={folder / 'profile'}", page],
                           capture_output=True, text=True, timeout=60).stdout
    if "<html" not in shown:
        pytest.skip("Chromium does not start here")
    assert 'data-shown="4.0"' in shown and "1 of 8 rollouts." in shown
    assert shown.count("<img") == 0 and "&lt;img src=x" in shown and shown.count("<script") == 6
    title = re.search("<title>(.*?)</title>", shown)[1]
    assert title.endswith("rollouts") and "hacked" not in title
    assert "what it read" in shown and "You are the planner" in shown and "turn 1 planner" in shown
    tokens = re.findall(r'<span class="" title="log-ratio ([^"]*)"[^>]*>(.*?)</span>', shown)
    assert [value for value, _ in tokens] == ["−0.25", "+0.5", "–"] and tokens[2][1] == r"\u{202e}"


# ---- the picture
COLUMNS = "step", "reward", "errors", "turns", "kl", "clip", "entropy", "plan_tokens"


def trained(folder, rewards):
    folder.mkdir(parents=True)
    with open(folder / "log.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        rows.writerows([step, reward, *[0.1] * 6] for step, reward in enumerate(rewards, 1))
    return folder


def test_runs_whose_folders_differ_in_the_number_at_the_end_are_one_line_in_a_band(tmp_path):
    names = "old-seed1", "old-seed2", "new", "7"
    runs = [trained(tmp_path / name, [0.1, 0.2]) for name in names]
    lines = curves.lines_of([f"{runs[0]}/", *runs[1:]])  # with the slash that a shell completes
    assert {name: len(rows) for name, rows in lines.items()} == {"old": 2, "new": 1, "7": 1}


def test_a_line_has_the_steps_for_which_every_run_has_a_finite_number(tmp_path):
    one, two = trained(tmp_path / "a0", [0.0, 0.7, "nan", 5]), trained(tmp_path / "a1", [0.2, 0.5, 0.9, ""])
    [rows] = curves.lines_of([one, two]).values()
    assert curves.points(rows, "reward") == [
        (1, 0.0, pytest.approx(0.1), 0.2), (2, 0.5, pytest.approx(0.6), 0.7)]
    assert curves.points(rows, "no such column") == []


@pytest.mark.extras("matplotlib")
def test_curves_py_draws_a_run_into_the_runs_own_folder(tmp_path, monkeypatch):
    run = trained(tmp_path / "<run>", [-0.4, 0.6])  # a reward of one's own may be negative
    (tmp_path / "thesis").write_text("precious")
    (run / "curves.svg").symlink_to(tmp_path / "thesis")
    monkeypatch.setattr(sys, "argv", ["curves.py", str(run)])
    curves.main()
    assert (tmp_path / "thesis").read_text() == "precious"
    drawn = (run / "curves.svg").read_text()
    ElementTree.fromstring(drawn)
    assert all(f">{title}<" in drawn for title in curves.PANELS.values())
    assert ">&lt;run&gt;<" in drawn and ">0.60<" in drawn


@pytest.mark.extras("matplotlib")
@pytest.mark.parametrize("text", ["step,a\nx,y\n", "step,reward\n1,\x1b[2J\n"])
def test_a_damaged_log_is_one_sentence(tmp_path, monkeypatch, capsys, text):
    run = trained(tmp_path / "run", [0.5])
    (run / "log.csv").write_text(text)
    monkeypatch.setattr(sys, "argv", ["curves.py", str(run)])
    with pytest.raises(SystemExit) as stop:
        curves.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "\x1b" not in error


def test_without_matplotlib_or_a_log_curves_py_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(curves, "find_spec", lambda name: None)
    for folder, sentence in ((trained(tmp_path / "run", [1]), "needs matplotlib"), (tmp_path, "no log.csv")):
        monkeypatch.setattr(sys, "argv", ["curves.py", str(folder)])
        with pytest.raises(SystemExit):
            curves.main()
        assert sentence in capsys.readouterr().err
