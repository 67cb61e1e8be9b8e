"""Training on two processes: today's scale/sharding.py, and the engine before it.

    python bench/sharding.py    two processes on the CPU (gloo), a Qwen2 of 14 million weights: a few minutes

    before   commit adc69bf, whose code is read from git: each process holds all bfloat16 weights; gradients
             are summed in bfloat16; the float32 masters and moments are sharded (ZeroRedundancyOptimizer)
    today    each process holds its part of float32 weights, gradients and moments (fully_shard); the bfloat16
             weights of a layer are gathered when it computes, and all of them once before generate()

Each engine first trains in one process, which is the reference of the same engine with two.

    update, rollouts    MB that one process holds then: weights, gradients, masters, moments, and gathered
                        weights; without a gathered layer, activations and buffers of communication
    seconds             medians of ROUNDS rounds in turn: an update; gather and generate(); the state of a
                        checkpoint, written to a file
    apart               distance to the weights of one process after STEPS steps, as a share of how far those
                        moved; both as generate() reads them, in bfloat16
"""
import argparse
import copy
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from logbook import checkpoints
from scale import ranks, sharding
from scale.masters import local

BEFORE = "adc69bf"
STEPS, ROUNDS, ROWS, LENGTH, NEW, LR = 3, 3, 4, 32, 16, 1e-4
CONFIG = Qwen2Config(
    vocab_size=8192, hidden_size=256, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False, eos_token_id=None)


class Before:
    """All bfloat16 weights in each process."""

    def __init__(self, model, folder):
        self.model, self.folder = model, folder
        self.ranks, masters = (importlib.import_module(f"before.{name}") for name in ("ranks", "masters"))
        self.ranks.RANK, self.ranks.WORLD = ranks.RANK, ranks.WORLD
        self.optimizer = self.ranks.sharded(masters.MasterAdamW, model.parameters(), lr=LR)

    def begin_update(self):
        pass

    def add_up(self):
        self.ranks.add_up_gradients(self.model.parameters())

    def begin_rollouts(self):
        pass

    def save(self):
        state = self.ranks.state_of(self.optimizer)
        if ranks.RANK == 0:
            torch.save(state, self.folder / "trainer.pt")

    def states(self):
        return getattr(self.optimizer, "optim", self.optimizer).state.values()


class Today:
    """scale/sharding.py, as train.py uses it."""

    def __init__(self, model, folder):
        self.model, self.folder = model, folder
        sharding.shard(model)
        self.optimizer = sharding.adamw(model, LR)

    def begin_update(self):
        sharding.release(self.model)

    def add_up(self):
        """The backward pass has done it."""

    def begin_rollouts(self):
        sharding.gather(self.model)

    def save(self):
        checkpoints.write_trainer(self.folder / "trainer", self.optimizer)

    def states(self):
        return self.optimizer.state.values()


ENGINES = {"before": Before, "today": Today}


def batch(step):
    return torch.randint(CONFIG.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def loss(model, ids):
    """The part of these rows in the mean loss of the batch."""
    logits = model(ids[:, :-1], use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) * len(ids) / ROWS


def learn(engine, step):
    """One update. One process takes the shares of two, one after the other."""
    ids = batch(step)
    engine.begin_update()
    engine.model.zero_grad()
    for share in (ids[0::2], ids[1::2]) if ranks.WORLD == 1 else (ranks.share(ids),):
        loss(engine.model, share).backward()
    engine.add_up()
    engine.optimizer.step()


def generate(engine):
    engine.begin_rollouts()
    engine.model.generate(batch(0), max_new_tokens=NEW, do_sample=False, synced_gpus=False)


def megabytes(engine):
    """Of all tensors that are held now."""
    groups = engine.optimizer.param_groups
    weights = [*engine.model.parameters(), *(weight for group in groups for weight in group["params"])]
    held = [*weights, *(weight.grad for weight in weights if weight.grad is not None)]
    held += [tensor for state in engine.states() for tensor in state.values()]
    parts = {part.data_ptr(): part.numel() * part.element_size() for part in map(local, held)}
    return sum(parts.values()) / 1e6


def flat(engine):
    """All weights, as generate() reads them."""
    engine.begin_rollouts()
    return torch.cat([weight.detach().float().flatten() for weight in engine.model.parameters()])


def seconds(work, *arguments):
    dist.barrier()
    start = time.perf_counter()
    work(*arguments)
    dist.barrier()
    return time.perf_counter() - start


def measure(folder):
    """{engine: (weights after STEPS steps, [MB], [seconds])}, and the weights at the start."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(CONFIG).bfloat16().eval()
    start = torch.cat([weight.detach().float().flatten() for weight in model.parameters()])
    engines, found = {name: kind(copy.deepcopy(model), folder) for name, kind in ENGINES.items()}, {}
    for name, engine in engines.items():
        for step in range(STEPS):
            learn(engine, step)
        held = [megabytes(engine)]
        engine.model.zero_grad()  # before the weights are gathered: later it would clear theirs
        found[name] = flat(engine)
        generate(engine)
        found[name] = found[name], held + [megabytes(engine)]
    times = [{name: [seconds(learn, engine, STEPS + n), seconds(generate, engine), seconds(engine.save)]
              for name, engine in engines.items()} for n in range(ROUNDS)]
    return start, {name: (*found[name], [statistics.median(column) for column in zip(*(
        round[name] for round in times))]) for name in engines}


def process(rank, world, folder):
    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))
    ranks.RANK, ranks.WORLD = rank, world
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{world}", rank=rank, world_size=world)
    found = measure(folder)
    if rank == 0:
        torch.save(found, folder / f"found{world}")
    dist.barrier()
    dist.destroy_process_group()


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    print("| engine | processes | MB, update | MB, rollouts | update, s | generate, s | save, s | apart |")
    print("|---" * 8 + "|")
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), {}
        (folder / "before").mkdir()
        for file in ("ranks.py", "masters.py"):
            code = subprocess.check_output(["git", "show", f"{BEFORE}:scale/{file}"], cwd=ROOT)
            (folder / "before" / file).write_bytes(code)
        for world in (1, 2):
            torch.multiprocessing.spawn(process, (world, folder), nprocs=world)
            start, found[world] = torch.load(folder / f"found{world}")
            for engine, (weights, held, times) in found[world].items():
                alone = found[1][engine][0]
                apart = (weights - alone).norm() / (alone - start).norm()
                numbers = [f"{n:.0f}" for n in held] + [f"{s:.2f}" for s in times] + [f"{apart:.4f}"]
                print(f"| {engine} | {world} | {' | '.join(numbers)} |", flush=True)


if __name__ == "__main__":
    main()
