"""bench/: the scripts for a card run on a CPU, too; a static cache changes no token; costs. And the
script of docs/gpu.md for a night."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import spy
from test_local import TINY
from test_scale import QWEN_7B
from transformers import AutoModelForCausalLM, Qwen2Config

from bench import cost, static_cache
from fast.prefix import prefill
from flow_grpo import distribution
from models.local import sample, sampling_mode
from scale import adapters, fit

ROOT = Path(__file__).resolve().parents[1]
COUNTS = "prefill_s ms_a_token cpu lost load".split()


@pytest.mark.exhaustive
def test_the_script_for_a_card_runs_on_a_cpu():
    parts = "host sample prefill update".split()
    command = [sys.executable, "bench/card.py", "--cpu", *parts]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["part"] for line in lines if line["what"] == "ended"] == parts
    assert not [line for line in lines if line["what"] == "failed"], run.stderr
    sampled = [line for line in lines if "prefill_s" in line]
    assert len(sampled) >= 4 and all({*COUNTS} <= line.keys() for line in sampled)


@pytest.mark.exhaustive
def test_the_script_for_speed_measures_and_compares():
    command = [sys.executable, "bench/speed.py", "sample-512", "--repetitions", "1"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"(?m)^sample-512 +(\w+) .* CPU s .* times", shown) == ["ours", "plain"]
    assert "OTHER" not in shown  # number of tokens


# ----------------------------------------------------------------------------- the static cache
def tiny():
    """Two heads share a key."""
    torch.manual_seed(0)
    config = Qwen2Config(**TINY | dict(vocab_size=200, max_position_embeddings=512))
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    return AutoModelForCausalLM.from_config(config).eval()


def prompts():
    """Two groups of equal prompts, and a few others; some are longer than a chunk of prefill()."""
    dice = random.Random(0)
    shared, others = dice.choices(range(1, 200), k=90), (200, 310, 5)
    return [shared * 3] * 3 + [shared] * 2 + [dice.choices(range(1, 200), k=n) for n in others]


def sampled(model, temperature, begin, attention="sdpa", backend=None):
    torch.manual_seed(1)
    static_cache.attention(model, attention)
    with sampling_mode(model), static_cache.compiled(model, backend):
        return sample(model, prompts(), [], temperature, 12, distribution, begin)


def same_tokens(model, backend=None):
    begin = static_cache.Static(330)
    for temperature in 0, 0.7:
        wanted = sampled(model, temperature, prefill)
        for attention in "sdpa", "grouped":
            assert sampled(model, temperature, begin, attention, backend) == wanted
    assert len(begin.caches) == 1  # the same memory in each batch


def test_a_static_cache_and_grouped_attention_change_no_token(monkeypatch):
    calls = spy(monkeypatch, static_cache, "scaled_dot_product_attention")
    same_tokens(tiny())
    # two heads share a key: their queries become two of it
    assert calls and all(query.shape[2] == 2 for (query, *_), *_ in calls)


@pytest.mark.exhaustive
def test_neither_does_a_compiled_model():
    same_tokens(tiny(), "eager")


@pytest.mark.extras("peft")
@pytest.mark.parametrize("off", [False, True])
def test_nor_do_adapters(off):
    model = adapters.add(tiny(), 4)
    for weight in model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.3)
    with model.disable_adapter() if off else nullcontext():
        same_tokens(model)


# ----------------------------------------------------------------------------------------- costs
@pytest.mark.parametrize(
    "name, gpu, way",
    [("defaults", 79, {"lora": 32}), ("defaults, vLLM", 51, {"lora": 32}), ("`--paper`", 79, {})],
)
def test_the_room_that_cost_py_assumes_is_what_fit_leaves(name, gpu, way, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    of = fit.sizes(str(tmp_path))
    monkeypatch.setattr(fit, "sizes", lambda *_: of)
    way |= {"gradient_checkpointing": True, "optimizer_device": "cpu" if not way else None}
    need = fit.needed(of, way | {"token_budget": 16_384}, ranks=1, itemsize=2)
    engine = SimpleNamespace(name="any", model=SimpleNamespace(dtype=torch.bfloat16))
    fit.give_room(engine, int(fit.CARD * gpu * 2**30 - need.sampling))
    assert engine.sampling_tokens == cost.RUNS[name]["tokens"] and engine.row_tokens == cost.ROW
    assert of.weights == pytest.approx(cost.P, rel=1e-3) and 2 * of.cache == cost.CACHE


# ------------------------------------------------------------------------------ a night's script
STUB = """#!/bin/bash
name=$(basename $0); echo "$name $*" >> calls
case "$name $(wc -l < tries)" in
    "python 0") echo >> tries; kill -INT $$ ;;                    # during the imports
    "python 1") echo >> tries; mkdir -p runs/first/step-7; kill -KILL $$ ;;
    "python 2") echo >> tries; exit 1 ;;                          # a server was down
esac
"""


@pytest.mark.skipif(not shutil.which("setsid"), reason="a script for Linux")
def test_the_script_for_a_night_goes_on_after_each_stop_and_then_stops_the_machine(tmp_path):
    """With stubs that write down how they were called; the first three tries to train fail."""
    page = (ROOT / "docs/gpu.md").read_text("utf-8")
    script = re.search(r"^    \. \./flags\.sh$.*?^    STOP_COMMAND.*?$", page, re.S | re.M)[0]
    flags = re.search(r'^    FLAGS="(.*)"$', page, re.M)
    (tmp_path / "flags.sh").write_text(flags[0])  # without its lines before, for a real machine
    (tmp_path / "tries").touch()
    for name in "curl python sleep rsync tmux STOP_COMMAND".split():
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMUX": "a window"}
    script += "\nwait"  # for its first command
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True, env=os.environ | path)
    calls = (tmp_path / "calls").read_text().splitlines()
    # one would come after 11 hours
    assert calls.count("STOP_COMMAND ") == 2 and "sleep 11h" in calls
    assert f"tmux pipe-pane exec cat >> '{tmp_path}/night.log'" in calls
    start, resume = f"python train.py {flags[1]}", f"python train.py {flags[1]} --resume runs/first"
    compare = "python solve.py --compare MODEL runs/first/step-7 ..."
    keep = "rsync -a --exclude trainer-*.pt -e ssh -o BatchMode=yes runs answers.sqlite"
    wanted = [
        start,
        start,
        resume,
        resume,
        f"{keep} HOME:",
        compare,
        f"{keep} night.log HOME:",
    ]
    others = "curl", "sleep", "tmux", "STOP"
    assert [call for call in calls if not call.startswith(others)] == wanted
    assert sum(call.startswith("curl") for call in calls) == 4  # vLLM answers before each try
