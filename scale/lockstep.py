"""The forward passes of an update on several GPUs, or of weights that fully_shard has sharded.

    passes = make_passes(model, reference, flow_grpo.token_logps)       # a Passes, or a RankPasses

A RankPasses is a Passes (passes.py) of one of several processes ("ranks"). Each computes its share of a
mini-batch, and gradients are summed: they are those of one process with all of it.

Sharded weights (sharding.py) are gathered a layer at a time, for each micro-batch, from all ranks. So the
ranks must go through the micro-batches in lock-step: all have the same number of them, and if one rank runs
out of memory, all begin again with the same smaller budget.
"""
from contextlib import contextmanager
from types import SimpleNamespace

from models.batches import TokenBudget
from scale import ranks, sharding
from scale.passes import Passes

# a micro-batch that teaches nothing: an action of weight 0
FILLER = [SimpleNamespace(prompt_ids=[0], ids=[0], logps=[0.0], A=0.0, weight=0.0, logp_old=None)]


def make_passes(model, reference, *arguments, **settings):
    """Passes; or RankPasses if there are several ranks, or one whose weights are sharded, too. The arguments
    are theirs."""
    kind = RankPasses if ranks.WORLD > 1 or sharding.parts(model) else Passes
    return kind(model, reference, *arguments, **settings)


class RankPasses(Passes):
    def __init__(self, model, *arguments, **settings):
        super().__init__(model, *arguments, **settings)
        # With adapters the weights are whole on each rank, and a rank computes on its own.
        self.in_lock_step = bool(sharding.parts(model))
        if self.in_lock_step:
            self.budget = LockStepBudget(self.budget.tokens, model, self.reference)

    def micro_batches(self, actions):
        """Yield this rank's micro-batches; in lock-step then FILLER, until all ranks are done."""
        batches = super().micro_batches(actions)
        if not self.in_lock_step:
            yield from batches
            return
        while ranks.any_left((batch := next(batches, None)) is not None):
            yield batch or FILLER

    @contextmanager
    def around_update(self):
        """Sharded weights are gathered a layer at a time in the update, and whole again after it."""
        with sharding.released(self.model, self.reference), super().around_update():
            yield

    def share(self, actions):
        """This rank's part of a mini-batch: whole rollouts, neighbours, because they share prompts."""
        rollouts = list(dict.fromkeys(action.rollout for action in actions))
        n = len(rollouts)
        own = {*rollouts[n * ranks.RANK // ranks.WORLD : n * (ranks.RANK + 1) // ranks.WORLD]}
        return [action for action in actions if action.rollout in own]

    def sum_gradients(self):
        """Sum the gradients of a mini-batch over the ranks."""
        sharding.add_up_gradients([p for p in self.model.parameters() if p.requires_grad])


class LockStepBudget(TokenBudget):
    """A TokenBudget that is the same on all ranks. models: those that may be sharded.

    When a rank runs out of memory, all make the same three exchanges:

      1. it gives SHORT; the others, at their next any_left() or check(), receive this and raise Elsewhere;
      2. how often a single item did not fit: the second time, all end;
      3. the new budget, the smallest of all.
    """

    def __init__(self, tokens, *models):
        super().__init__(tokens)
        self.models = models

    def shrink(self, why):
        name = "a row of another process"
        if isinstance(why, ranks.Elsewhere):
            why = None
        else:
            ranks.largest(ranks.SHORT)
            self.note_failure()
            name = self.in_work.name
        sharding.recover(*self.models)
        if ranks.largest(self.single_failures) > 1:
            raise MemoryError(f"{name} does not fit into memory") from why
        self.tokens = -ranks.largest(-self.tokens)  # the smallest
