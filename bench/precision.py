"""What bfloat16 costs a trainer: in the weights that the optimizer moves, and in the probabilities that the
ratio compares.

    python bench/precision.py              the tables as Markdown: two minutes on one core, no GPU, no network

The first table trains one small Qwen2 six ways, on one fixed batch, from the same weights, for 200 AdamW
steps at the paper's learning rate and at ten times that. All are read as the forward pass reads them, in the
weights' own dtype:

    moved       weights that are not what they were, after the first step and after the last
    cosine      between the whole way that these weights went and the way that float32's went
    progress    how far the loss fell, as a share of float32's fall; both computed in float32. Where the whole
                fall is small, rounding shows: at lr 1e-6 the rounded float32 result has 107 %
    bytes       a weight with its gradient and its optimizer state, counted in the tensors that were there

The schemes that are not ours are written out here, a few lines each. Plain AdamW, stochastic rounding and
Kahan's sum keep their two moments in bfloat16 too, since that is what they are chosen for; with float32
moments they would take 12, 12 and 14 bytes. One batch is kind to them: with β₂ = 0.999 a second moment in
bfloat16, rounded to nearest, can never fall (a thousandth is less than half its last bit), and here it hardly
has to.

The second table: a mini-batch of a 7B is hundreds of micro-batches, whose gradients add up in the weights'
dtype.

The third table is about the old policy. generate() samples a token from log-probs that it computed token by
token, from a cache; the update computes them once more, from the whole sequence, and in bfloat16 the two
differ. A trainer that takes generate()'s for π_old begins with a ratio ρ = π/π_old that is not 1, before
anything was learnt. So does one that scores the old policy in other micro-batches than the new one.
flow_grpo.update() scores both in the same ones: exactly 1. The models: Qwen2.5-7B's configuration scaled
down, with random weights and so with small logits; and the toy's planner, a trained one.
"""
import argparse
import copy
import itertools
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import planner
from cli import command_line
from fast import logps
from flow_grpo import Action, log_probs
from models.loading import load_engine
from models.local import HF
from rewards.questions import read_questions
from scale import sharding
from scale.adapters import dithered
from tools import TOOLS

STEPS, BETA1, BETA2, EPS = 200, 0.9, 0.999, 1e-8
TEMPERATURE = 0.7


# -------------------------------------------------------------------------------------- six ways to step
class Bare:
    """Adam on bfloat16 weights and moments, without weight decay; how float32 becomes bfloat16 is the
    subclass's matter."""

    def __init__(self, model, lr):
        self.weights, self.lr, self.t = list(model.parameters()), lr, 0
        zeros = torch.zeros_like
        self.state = {weight: {"m": zeros(weight), "v": zeros(weight)} for weight in self.weights}

    @torch.no_grad()
    def step(self):
        self.t += 1
        for weight in self.weights:
            state, g = self.state[weight], weight.grad.float()
            m = BETA1 * state["m"].float() + (1 - BETA1) * g
            v = BETA2 * state["v"].float() + (1 - BETA2) * g * g
            delta = -self.lr * (m / (1 - BETA1**self.t)) / ((v / (1 - BETA2**self.t)).sqrt() + EPS)
            self.write(weight, state, m, v, delta)


class Stochastic(Bare):
    """Up or down at random, in proportion to what is nearer: each step is wrong, and right on average."""

    def write(self, weight, state, m, v, delta):
        state["m"].copy_(dithered(m, torch.bfloat16))
        state["v"].copy_(dithered(v, torch.bfloat16))
        weight.copy_(dithered(weight.float() + delta, torch.bfloat16))


class Kahan(Bare):
    """What one rounding lost is remembered, in bfloat16, and added to the next step."""

    def write(self, weight, state, m, v, delta):
        state["m"].copy_(m)
        state["v"].copy_(v)
        lost = state.setdefault("lost", torch.zeros_like(weight))
        wanted = delta + lost.float()
        before = weight.float()
        weight.copy_(before + wanted)
        lost.copy_(wanted - (weight.float() - before))


def adamw(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


def sharded(model, lr):
    """As train.py does it on one GPU: fully_shard with one process."""
    sharding.shard(model)
    return sharding.adamw(model, lr)


def on_host(model, lr):
    """--optimizer-device cpu"""
    return sharding.adamw(model, lr, host=True)


SCHEMES = {
    "float32 AdamW": (torch.float32, adamw),
    "bfloat16, plain AdamW": (torch.bfloat16, adamw),
    "bfloat16, stochastic rounding": (torch.bfloat16, Stochastic),
    "bfloat16, Kahan summation": (torch.bfloat16, Kahan),
    "**bfloat16, float32 masters (ours)**": (torch.bfloat16, sharded),
    "**the same, on the host (ours)**": (torch.bfloat16, on_host),
}


# -------------------------------------------------------------------------------- what becomes of a step
def start():
    """A small Qwen2 whose weights are bfloat16 numbers, so that all start at one place; a batch with every
    token in it."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)
    model = Qwen2ForCausalLM(config).bfloat16()
    return model.eval(), torch.randperm(256).view(8, 32)


def flat(model):
    return torch.cat([weight.detach().float().flatten() for weight in model.parameters()])


def loss_in_float32(model, ids):
    wide = start()[0].float()
    torch.nn.utils.vector_to_parameters(flat(model), wide.parameters())
    with torch.no_grad():
        return wide(ids, labels=ids).loss.item()


def size(model, optimizer):
    """Bytes a weight: itself, its gradient, its state; sharded ones without the layer that is gathered."""
    of = lambda weight: (weight, weight.grad, *optimizer.state[weight].values())
    tensors = [tensor for weight in model.parameters() for tensor in of(weight)]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim())
    return held / sum(weight.numel() for weight in model.parameters())


def trained(dtype, make, lr):
    """(share moved by the first step, the whole way gone, fall of the loss, bytes a weight)."""
    torch.manual_seed(1)
    model, ids = start()
    model, before, loss = model.to(dtype), flat(model), loss_in_float32(model, ids)
    optimizer = make(model, lr)
    sharding.gather(model)
    for step in range(STEPS):
        with sharding.released(model):
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            held = size(model, optimizer)
        if step == 0:
            first = (flat(model) != before).float().mean().item()
    return first, flat(model) - before, loss - loss_in_float32(model, ids), held


def optimizer_table():
    print(f"| AdamW, {STEPS} steps | lr | moved, first step | moved, all steps | cosine | progress | bytes |")
    print("|---" * 7 + "|")
    for lr, (name, (dtype, make)) in itertools.product((1e-6, 1e-5), SCHEMES.items()):
        first, way, fall, held = trained(dtype, make, lr)
        if dtype == torch.float32:
            wanted, whole = way, fall
        cosine = torch.nn.functional.cosine_similarity(way.double(), wanted.double(), dim=0).item()
        moved, progress = (way != 0).float().mean(), fall / whole
        print(f"| {name} | {lr:.0e} | {first:.1%} | {moved:.1%} | {cosine:.3f} | {progress:.0%} "
              f"| {held:.0f} |", flush=True)


def accumulation_table():
    model, _ = start()
    ids = torch.randint(256, (128, 32))
    wanted, _ = gradient(copy.deepcopy(model).float(), ids, 1)
    print("| micro-batches | error of the gradient, added up in bfloat16 | in float32 |")
    print("|---" * 3 + "|")
    for parts in (1, 16, 128):
        errors = [(found - wanted).norm() / wanted.norm() for found in gradient(model, ids, parts)]
        print(f"| {parts} | {errors[0]:.2%} | {errors[1]:.2%} |", flush=True)


def gradient(model, ids, parts):
    """Of the mean loss of all rows, in so many micro-batches: (added up in the weights' dtype, as .grad does,
    and in float32)."""
    narrow, wide = 0, 0
    for rows in ids.chunk(parts):
        added = torch.autograd.grad(model(rows, labels=rows).loss / parts, list(model.parameters()))
        added = torch.cat([part.flatten() for part in added])
        narrow, wide = narrow + added, wide + added.float()
    return narrow.float(), wide


# ------------------------------------------------------------------------------------ sampled and scored
def real(dtype):
    """Qwen2.5-7B's configuration, 32 times narrower and 7 times shallower, with the toy's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=112, intermediate_size=592, num_hidden_layers=4,
        num_attention_heads=28, num_key_value_heads=4, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, max_position_embeddings=32768,
        eos_token_id=tokenizer.eos_token_id)
    return HF(Qwen2ForCausalLM(config).to(dtype).eval(), tokenizer)


def toy(dtype):
    return load_engine(str(ROOT / "toy"), "cpu", dtype)


def ratio_table():
    questions = read_questions(ROOT / "toy" / "test.jsonl")[:16]
    tools = {name: TOOLS[name] for name in command_line.TOY_TOOLS}
    prompts = [planner.prompt(question.question, tools, "", "") for question in questions for _ in range(4)]
    print("| model | dtype | π_old from | tokens | mean abs Δ log π | max abs Δ log π | ρ min | ρ max |")
    print("|---" * 8 + "|")
    models = {"Qwen2.5-7B's shape, random": real, "the toy's planner": toy}
    for (name, make), dtype in itertools.product(models.items(), ("bfloat16", "float32")):
        engine = make(getattr(torch, dtype))
        torch.manual_seed(0)
        done = engine(prompts, temperature=TEMPERATURE, max_new_tokens=64)
        seen = torch.tensor([logp for c in done for logp in c.logps])
        actions = [Action(c.prompt_ids, c.ids, i) for i, c in enumerate(done)]
        token_logps = logps.scoring(log_probs, engine.model)["token_logps"]
        with torch.no_grad():
            new, again = (token_logps(engine.model, actions, TEMPERATURE) for _ in range(2))
            alone = torch.cat([token_logps(engine.model, [action], TEMPERATURE) for action in actions])
        ways = {"generate()": seen, "scored one by one": alone,
                "**scored in the same batches (ours)**": again}
        for way, old in ways.items():
            delta, ratio = (new - old).abs(), (new - old).exp()
            print(f"| {name} | {dtype} | {way} | {len(new)} | {delta.mean():.1e} | {delta.max():.1e} "
                  f"| {ratio.min():.4f} | {ratio.max():.4f} |", flush=True)


if __name__ == "__main__":
    settings = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    argparse.ArgumentParser(description=__doc__, **settings).parse_args()
    torch.set_num_threads(1)
    optimizer_table()
    print()
    accumulation_table()
    print()
    ratio_table()
