"""The passes of an update over its micro-batches: what large models and several GPUs need, from outside.

    passes = Passes(model, reference, token_logps, micro_batches, token_budget)
    N, = passes.total(len(rollouts))            # summed over the ranks
    passes.score(actions, work)                 # work(batch) for each micro-batch, without gradients
    results = passes.learn(actions, work)       # work(batch) adds the batch's gradient

If memory is short, micro-batches are halved (batches.py). The ranks go in lock-step: sharded weights are
gathered from all ranks for each micro-batch, so a rank that has none left computes one that teaches nothing.
"""
from functools import partial
from types import SimpleNamespace

import torch

from models.batches import in_memory, memory_errors
from scale import ranks, sharding
from scale.laps import lap
from scale.report import Report


class Passes:
    def __init__(self, model, reference, token_logps, micro_batches, token_budget):
        self.model, self.reference, self.token_logps = model, reference, token_logps
        self.report = Report(model.device, token_budget)
        sharded = ranks.WORLD > 1 and sharding.parts(model)
        self.settings = dict(
            length=lambda a: len(a.prompt_ids) + len(a.ids), batches_of=micro_batches,
            recover=partial(sharding.recover, model, reference),
            filler=[SimpleNamespace(prompt_ids=[0], ids=[0])] if sharded else None,
            agree=ranks.largest if sharded else int)

    def total(self, *counts):
        """Whole numbers, each summed over the ranks."""
        counts = torch.tensor(counts, device=self.model.device)
        ranks.add_up(counts)
        return counts.tolist()

    def score(self, actions, work):
        """work(batch) for each micro-batch of the actions, without gradients."""
        lap("old")
        with torch.no_grad():
            self.over(actions, work, partial(self.token_logps, self.model))

    def learn(self, actions, work):
        """[work(batch)] of the micro-batches; work() adds a gradient to .grad. If memory is short, all begin
        again, because a failed backward pass has added an unknown part of its gradient."""
        # model.zero_grad, not optimizer.zero_grad: the optimizer may hold float32 copies of the parameters.
        return self.over(actions, work, self.learn_nothing, restart=self.model.zero_grad)

    def learn_nothing(self, filler, temperature):
        """The passes of work(), in its order, with a gradient of 0."""
        if self.reference is not None:
            with torch.no_grad():
                self.token_logps(self.reference, filler, temperature)
        (0 * self.token_logps(self.model, filler, temperature).sum()).backward()

    def over(self, actions, work, idle, **settings):
        filler = self.settings["filler"]
        one = lambda batch: idle(batch, 1.0) if batch is filler else work(batch)
        return self.report.results(
            in_memory(one, actions, budget=self.report.token_budget, **self.settings | settings))

    def add_up_gradients(self):
        """Sum the gradients over the ranks."""
        sharding.add_up_gradients([p for p in self.model.parameters() if p.requires_grad])

    def step(self, optimizer):
        """One step. MemoryError if there is no room for the optimizer's state, which the first step makes."""
        with memory_errors("the optimiser's state"):
            optimizer.step()
