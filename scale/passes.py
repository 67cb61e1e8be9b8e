"""The forward passes of an update, in micro-batches that fit into memory.

    passes = Passes(model, reference, flow_grpo.token_logps)    # once for a run
    update(passes, optimizer, actions, groups, ...)             # in each step

On one device, a Passes is three things: policy_logps(), reference_logps(), and micro_batches(), which cuts a
mini-batch to the token budget. Everything else is for memory or for several GPUs: if memory is short,
retry() repeats a mini-batch with half the budget (models/batches.py), and the budget that was enough stays
for the next update. And ranks go in lock-step: sharded weights are gathered from all ranks for each
micro-batch, so a rank that has none left computes one of weight 0.
"""
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch

from models.batches import DONE, LEFT, TokenBudget, by_length, memory_errors
from scale import ranks, sharding
from scale.report import Report

TOKENS = 16_384  # of a micro-batch, unless the caller knows how many fit


def length(action):
    return len(action.prompt_ids) + len(action.ids)


def similar_lengths(actions, tokens):
    """[(micro-batch, its tokens)]: actions of similar length, at most `tokens` unless one has more."""
    return by_length(actions, tokens, length)


def filler():
    """A micro-batch that teaches nothing: an action of weight 0."""
    return [SimpleNamespace(prompt_ids=[0], ids=[0], logps=[], A=0.0, weight=0.0, logp_old=None)]


def ready_to_update(model, reference=None):
    """Dropout off, because the model that is scored must be the one that sampled; gradient checkpointing on.

    transformers checkpoints a layer only if the layer's own `training` flag is set, but model.train() would
    also turn on dropout. So all modules are in eval mode, and only the layers to checkpoint get the flag.
    Layers of some families (OPT) call dropout themselves while it is set: their own rates become 0.
    """
    if reference is not None:
        reference.eval()
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


class Passes:
    """model: the policy. reference: the frozen copy, which is π_ref; `model` itself if it carries adapters;
    or None, for no KL. token_logps(model, actions, temperature), micro_batches(actions, tokens): the plain
    functions, or those of fast/logps.py. Gradients add up, so how a mini-batch is cut changes memory and
    nothing else."""

    def __init__(self, model, reference, token_logps, micro_batches=similar_lengths, token_budget=TOKENS):
        self.model, self.reference, self.token_logps = model, reference, token_logps
        self.batches_of = micro_batches
        self.budget, self.report = TokenBudget(token_budget), None

    def begin(self):
        """An update begins: the models are ready for it, and `report` is new."""
        ready_to_update(self.model, self.reference)
        self.report = Report(self.model.device, self.budget)

    @contextmanager
    def released(self):
        """Around update(): sharded weights are gathered a layer at a time (sharding.py). MemoryError if there
        is no room for the optimizer's state, which its first step makes."""
        with sharding.released(self.model, self.reference), memory_errors("the optimiser's state"):
            yield

    def share(self, actions):
        """This rank's part of a mini-batch (with one rank, all): whole rollouts, neighbours, because they
        share prompts."""
        rollouts = list(dict.fromkeys(action.rollout for action in actions))
        n = len(rollouts)
        own = {*rollouts[n * ranks.RANK // ranks.WORLD : n * (ranks.RANK + 1) // ranks.WORLD]}
        return [action for action in actions if action.rollout in own]

    def policy_logps(self, actions, temperature):
        """log π_θ of every action token, (K,); without a gradient, π_θold's."""
        return self.token_logps(self.model, actions, temperature)

    def reference_logps(self, actions, temperature):
        """log π_ref of the same tokens, on the policy's device."""
        adapters_off = self.model.disable_adapter() if self.reference is self.model else nullcontext()
        with torch.no_grad(), adapters_off:
            return self.token_logps(self.reference, actions, temperature).to(self.model.device)

    def retry(self, work, *arguments):
        """work(self, *arguments); if memory is short, again from its beginning, in smaller micro-batches."""
        agree = ranks.largest if self.in_lock_step() else int
        return self.budget.retry(work, self, *arguments, agree=agree,
                                 recover=lambda: sharding.recover(self.model, self.reference))

    def micro_batches(self, actions):
        """Yield the actions of a mini-batch in micro-batches, as many as fit into memory at once."""
        batches = self.budget.batches(actions, length, batches_of=self.batches_of)
        if not self.in_lock_step():
            yield from batches
            return
        while True:
            batch = next(batches, None)
            if ranks.latest(LEFT if batch else DONE) == DONE:
                return
            yield batch or filler()

    def in_lock_step(self):
        """Do ranks compute layer by layer together, because the weights are sharded?"""
        return bool(sharding.parts(self.model))

    def sum_gradients(self):
        """Sum the gradients of a mini-batch over the ranks."""
        sharding.add_up_gradients([p for p in self.model.parameters() if p.requires_grad])
