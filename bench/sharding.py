"""Two ways to train on several GPUs compared: scale/ranks.py, and torch's fully_shard (FSDP2).

    python bench/sharding.py    two processes on the CPU (gloo), a Qwen2 of 14 million weights: 3 minutes

    ranks.py               each process holds all bfloat16 weights; gradients are summed; the float32 masters
                           and moments are sharded (ZeroRedundancyOptimizer)
    fully_shard            each process holds its part of float32 weights, gradients and moments; the bfloat16
                           weights of a layer are gathered when it computes, in generate() for every token
    fully_shard, gathered  the same, but generate() gathers all layers once before it starts

    MB          weights, gradients, masters and moments of one process, after an update
    update, generate, state       seconds, medians of ROUNDS rounds in turn; state: the optimizer's, to rank 0
    error       distance to the weights of one process after STEPS steps, as a share of how far those moved
    resumed     do weights and state, loaded from a file into a new model, take exactly the same next step?
"""
import copy
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from scale import ranks
from scale.masters import MasterAdamW

STEPS, ROUNDS, ROWS, LENGTH, NEW, LR = 4, 5, 8, 64, 32, 1e-4
CONFIG = Qwen2Config(
    vocab_size=8192, hidden_size=256, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False, eos_token_id=None)


class Replicated:
    """scale/ranks.py; alone: the reference, one process that computes the whole batch in two
    micro-batches."""

    def __init__(self, model, alone=False):
        self.model, self.alone = model.bfloat16(), alone
        shard = ranks.sharded if not alone else lambda kind, weights, **settings: kind(weights, **settings)
        self.optimizer = shard(MasterAdamW, self.model.parameters(), lr=LR)

    def backward(self, ids):
        for part in (ids[0::2], ids[1::2]) if self.alone else (ranks.share(ids),):
            loss(self.model, part).backward()
        ranks.add_up_gradients([] if self.alone else self.model.parameters())

    def state(self):
        return ranks.state_of(self.optimizer)

    def load(self, state):
        ranks.load(self.optimizer, state)

    def generate(self):
        self.model.generate(batch(0), max_new_tokens=NEW, do_sample=False)


class Sharded(Replicated):
    """torch's fully_shard, a layer at a time."""

    def __init__(self, model, gathered=False):
        self.model, self.gathered = model, gathered
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in [*model.model.layers, model]:
            fully_shard(module, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)

    def backward(self, ids):
        (loss(self.model, ranks.share(ids)) * ranks.WORLD).backward()       # fully_shard takes the mean

    def state(self):
        options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
        return state_dict.get_optimizer_state_dict(self.model, self.optimizer, options=options)

    def load(self, state):
        options = state_dict.StateDictOptions(full_state_dict=True)
        state_dict.set_optimizer_state_dict(self.model, self.optimizer, state, options=options)

    def generate(self):
        shards = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for module in shards if self.gathered else ():
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        super().generate()
        for module in shards if self.gathered else ():
            module.set_reshard_after_forward(module is not self.model, recurse=False)
        for module in shards:
            module.reshard()  # the root stays gathered after a forward pass, and its state could not be saved


def batch(step):
    return torch.randint(CONFIG.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def loss(model, ids):
    """The part of these rows in the mean loss of the batch."""
    logits = model(ids[:, :-1], use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) * len(ids) / ROWS


def learn(way, step):
    way.model.zero_grad()
    way.backward(batch(step))
    way.optimizer.step()


def whole(way):
    """All weights, in the precision of the model."""
    weights = [weight.detach() for weight in way.model.parameters()]
    return [weight.full_tensor() if isinstance(weight, DTensor) else weight.clone() for weight in weights]


def flat(weights):
    return torch.cat([weight.bfloat16().float().flatten() for weight in weights])


def megabytes(way):
    held = [tensor for weight in way.model.parameters() for tensor in (weight, weight.grad)]
    states = getattr(way.optimizer, "optim", way.optimizer).state.values()
    held += [tensor for state in states for tensor in state.values()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]
    return sum(tensor.numel() * tensor.element_size() for tensor in local) / 1e6


def seconds(work):
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def resumes(way, again, file):
    """Load the state of one way into a new one, whose weights are the same already; let both take a step."""
    state = way.state()
    if ranks.RANK == 0:
        torch.save(state, file)
    dist.barrier()
    again.load(torch.load(file, weights_only=True))
    learn(way, 99)
    learn(again, 99)
    return torch.equal(flat(whole(way)), flat(whole(again)))


def process(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ranks.RANK, ranks.WORLD = rank, 2
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(CONFIG).bfloat16().float().eval()               # all start from the same numbers
    kinds = {"ranks.py": Replicated, "fully_shard": Sharded,
             "fully_shard, gathered": lambda model: Sharded(model, gathered=True)}
    reference = Replicated(copy.deepcopy(model), alone=True)
    ways = {name: kind(copy.deepcopy(model)) for name, kind in kinds.items()}
    for step in range(STEPS):
        for way in (reference, *ways.values()):
            learn(way, step)
    moved = flat(whole(reference)) - flat(model.parameters())
    end = flat(whole(reference))
    errors = {name: (flat(whole(way)) - end).norm() / moved.norm() for name, way in ways.items()}
    times = [{name: [seconds(lambda: learn(way, STEPS + n)), seconds(way.generate), seconds(way.state)]
              for name, way in ways.items()} for n in range(ROUNDS)]
    lines = ["| way | MB | update | generate | state | error | resumed |", "|---" * 7 + "|"]
    for name, way in ways.items():
        medians = map(statistics.median, zip(*(row[name] for row in times)))
        numbers = " | ".join(f"{median:.2f}" for median in medians)
        with torch.no_grad():
            for weight, value in zip(model.parameters(), whole(way)):
                weight.copy_(value)
        resumed = resumes(way, kinds[name](copy.deepcopy(model)), f"{folder}/state.pt")
        lines.append(f"| {name} | {megabytes(way):.0f} | {numbers} | {errors[name]:.3f} | {resumed} |")
    if rank == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process, (folder,), nprocs=2)
