"""The forward passes of an update, in micro-batches that fit into memory.

    passes = Passes(model, reference, flow_grpo.token_logps)    # once for a run
    with passes.around_update():                                # in each step
        update(passes, optimizer, actions, groups, ...)

update() asks a Passes for policy_logps() and reference_logps(), and for the micro_batches() of a mini-batch.
If memory runs out, retry() repeats the mini-batch with smaller micro-batches, and later updates keep their
size (models/batches.py).

A Passes is for one device. Several GPUs, and weights that fully_shard has sharded (sharding.py), need a
RankPasses (lockstep.py). It overrides the methods below the line, and computes the same gradient.
"""
from contextlib import nullcontext

import torch

from models.batches import TokenBudget, memory_errors
from models.state import ready_to_update
from scale.report import Report

TOKENS = 16_384  # the default size of a micro-batch


def length(action):
    """The tokens of an action's row."""
    return len(action.prompt_ids) + len(action.ids)


class Passes:
    """model: the policy.
    reference: the frozen copy, which is π_ref; `model` itself if it carries adapters; None for no KL.
    token_logps(model, actions, temperature): flow_grpo's plain function, or that of fast/logps.py.
    cut(actions, tokens) -> [(micro-batch, its tokens)]: how a mini-batch is split. None: by_length() of
    models/batches.py, which leaves little padding; that of fast/logps.py keeps equal prompts together. The
    gradients of micro-batches add up, so the choice changes only memory, time and rounding.
    token_budget: the most tokens of a micro-batch.
    """

    def __init__(self, model, reference, token_logps, cut=None, token_budget=TOKENS):
        self.model, self.reference, self.token_logps, self.cut = model, reference, token_logps, cut
        self.budget = TokenBudget(token_budget)

    def policy_logps(self, actions, temperature):
        """log π_θ of every action token, (K,); before the first optimiser step, π_θ is π_θold."""
        return self.token_logps(self.model, actions, temperature)

    def reference_logps(self, actions, temperature):
        """log π_ref of the same tokens, on the policy's device."""
        adapters_off = nullcontext()
        if self.reference is self.model:  # with adapters, π_ref is the base model under them
            adapters_off = self.model.disable_adapter()
        with torch.no_grad(), adapters_off:
            return self.token_logps(self.reference, actions, temperature).to(self.model.device)

    def begin(self):
        """An update begins: dropout off, gradient checkpointing on if asked for. Returns a new Report."""
        ready_to_update(self.model, self.reference)
        return Report(self.model.device, self.budget)

    def end(self):
        """The update is over: free the gradients, and leave the model ready to sample."""
        self.model.zero_grad()
        self.model.eval()  # begin() has set `training` in the layers with gradient checkpointing

    def retry(self, work, *arguments):
        """work(*arguments); if memory runs out, again from its beginning, with smaller micro-batches."""
        return self.budget.retry(work, *arguments)

    # ---------------------------------------------------------------------------- RankPasses overrides these
    def micro_batches(self, actions):
        """Yield the actions of a mini-batch in micro-batches as large as memory allows."""
        return self.budget.batches(actions, length, cut=self.cut)

    def around_update(self):
        """A context for a whole update, which the caller enters; update() itself calls begin() and end().

        If memory runs out in it, but outside retry(), that is a MemoryError. It names the optimiser's state,
        because this usually happens in the first optimiser step, which allocates AdamW's moments."""
        return memory_errors("the optimiser's state")

    def share(self, actions):
        """This process's part of a mini-batch: all of it."""
        return actions

    def sum_gradients(self):
        """Sum the gradients of a mini-batch over all processes. There is one: nothing to do."""
