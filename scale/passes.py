"""The forward passes of an update, in micro-batches that fit into memory.

    passes = Passes(model, reference, flow_grpo.token_logps)    # once for a run
    with passes.around_update():
        update(passes, optimizer, actions, groups, ...)         # in each step

update() asks a Passes for policy_logps() and reference_logps(), and for the micro_batches() of a mini-batch.
If memory is short, retry() repeats a mini-batch with half the tokens in a micro-batch, and what was enough
stays for the next update (models/batches.py). What several GPUs need is at the end.
"""
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch

from models.batches import TokenBudget, memory_errors
from models.state import ready_to_update
from scale import ranks, sharding
from scale.report import Report

TOKENS = 16_384  # of a micro-batch, unless the caller knows how many fit
# a micro-batch that teaches nothing: an action of weight 0
FILLER = [SimpleNamespace(prompt_ids=[0], ids=[0], logps=[], A=0.0, weight=0.0, logp_old=None)]


def length(action):
    return len(action.prompt_ids) + len(action.ids)


class Passes:
    """model: the policy. reference: the frozen copy, which is π_ref; `model` itself if it carries adapters;
    or None, for no KL. token_logps(model, actions, temperature): the plain function, or that of
    fast/logps.py. cut(actions, tokens): how a mini-batch is cut into micro-batches; None: actions of similar
    length together (models/batches.py). Gradients add up, so this changes memory and nothing else."""

    def __init__(self, model, reference, token_logps, cut=None, token_budget=TOKENS):
        self.model, self.reference, self.token_logps, self.cut = model, reference, token_logps, cut
        self.budget, self.report = TokenBudget(token_budget), None

    def policy_logps(self, actions, temperature):
        """log π_θ of every action token, (K,); without a gradient, π_θold's."""
        return self.token_logps(self.model, actions, temperature)

    def reference_logps(self, actions, temperature):
        """log π_ref of the same tokens, on the policy's device."""
        adapters_off = self.model.disable_adapter() if self.reference is self.model else nullcontext()
        with torch.no_grad(), adapters_off:
            return self.token_logps(self.reference, actions, temperature).to(self.model.device)

    def begin(self):
        """An update begins: the models are ready for it, and `report` is new."""
        ready_to_update(self.model, self.reference)
        self.report = Report(self.model.device, self.budget)

    def micro_batches(self, actions):
        """Yield the actions of a mini-batch in micro-batches, as many as fit into memory at once."""
        batches = self.budget.batches(actions, length, cut=self.cut)
        return self.filled_up(batches) if self.in_lock_step() else batches

    def retry(self, work, *arguments):
        """work(self, *arguments); if memory is short, again from its beginning, in smaller micro-batches."""
        lock_step = {"agree": ranks.largest} if self.in_lock_step() else {}
        return self.budget.retry(work, self, *arguments, **lock_step,
                                 recover=lambda: sharding.recover(self.model, self.reference))

    # --------------------------------------------- several GPUs: each process ("rank") has a part of the work
    @contextmanager
    def around_update(self):
        """Sharded weights are gathered a layer at a time in the update (sharding.py). MemoryError if memory
        is short outside its micro-batches: for the optimiser's state, which its first step makes."""
        with sharding.released(self.model, self.reference), memory_errors("the optimiser's state"):
            yield

    def share(self, actions):
        """This rank's part of a mini-batch (with one rank, all): whole rollouts, neighbours, because they
        share prompts."""
        rollouts = list(dict.fromkeys(action.rollout for action in actions))
        n = len(rollouts)
        own = {*rollouts[n * ranks.RANK // ranks.WORLD : n * (ranks.RANK + 1) // ranks.WORLD]}
        return [action for action in actions if action.rollout in own]

    def sum_gradients(self):
        """Sum the gradients of a mini-batch over the ranks."""
        sharding.add_up_gradients([p for p in self.model.parameters() if p.requires_grad])

    def in_lock_step(self):
        """Are the weights sharded? Then the ranks gather them from each other, a layer at a time, for each
        micro-batch, so all must have the same number of micro-batches. (A single process may shard, too.)"""
        return bool(sharding.parts(self.model))

    def filled_up(self, batches):
        """Yield this rank's micro-batches, and then FILLER until all ranks are done."""
        while True:
            batch = next(batches, None)
            if not ranks.any_left(batch is not None):
                return
            yield batch or FILLER
