"""What an update reports: numbers that tell whether learning is healthy. Most are columns of log.csv.

    loss        -J, mean over the mini-batches; it does not measure learning, see flow_grpo.loss()
    kl          k3, each token weighted as in the objective (loss = -gain + beta * kl); 0 if π_ref was not
                scored
    clip        share of tokens whose gradient the clip removed: A > 0 and ρ > 1+ε', or A < 0 and ρ < 1-ε
    entropy     mean of -log π over the scored tokens. They were sampled from π_θold, so in the first
                mini-batch this estimates its entropy
    ratio_min, ratio_max   the extremes of ρ on this process
    sampling_gap   mean |log π when sampled - log π when scored|, in the first micro-batch of this process. If
                it is large, the scored policy is not the one that sampled; 0 if there are no log-probs
    grad_norm   norm of the gradient before clipping, mean over the mini-batches
    halved      how often memory was short and micro-batches were made smaller; the gradient stays the same
    token_budget   the tokens of a micro-batch that did fit: begin the next update with it
    skipped     mini-batches without a step, because the loss or gradient was not finite or far too large
    steps       optimiser steps taken; a mini-batch whose gradient is exactly 0 takes none
    tokens      action tokens scored: with beta = 0 only those of rollouts with A ≠ 0

clip, entropy and kl count all scored tokens. Tokens with A = 0 have no gain that the clip could bound, and
their old log-probs are not computed: they count as ρ = 1. All sums are over all processes.
"""
import torch

from scale import ranks


def measure(batch, minus_J, logp, ratio, kl, A, weight, clip):
    """The numbers of one micro-batch: loss (), sums over its tokens (4,), min ρ, max ρ, sampling gap."""
    logp, (low, high) = logp.detach(), clip
    clipped = ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low))
    sums = torch.stack([kl * weight, clipped.float(), -logp, torch.ones_like(kl)]).sum(1)
    sampled = torch.tensor([number for a in batch for number in a.logps], device=logp.device)
    gap = (sampled - logp).abs().mean() if len(sampled) == len(logp) else torch.zeros(())
    return minus_J.detach(), sums, ratio.min().item(), ratio.max().item(), gap.item()


class Report:
    """Collects the numbers of one update.

    In turn: begin_mini_batch(), add_micro_batch() for each of its micro-batches, end_mini_batch(), and after
    its step add_step(). summary() ends the update."""

    def __init__(self, device, budget):
        self.budget, self.halved_before = budget, budget.halved  # a models.batches.TokenBudget
        self.skipped, self.steps = 0, 0
        self.sums = torch.zeros(4, device=device)  # over tokens: kl * weight, clipped, -log π, 1
        self.losses, self.norms = [], []  # of each mini-batch
        self.low, self.high, self.gap = 1.0, 1.0, 0.0  # ratio_min, ratio_max, ...
        self.measured = []  # a measure() for each micro-batch of the present mini-batch

    def begin_mini_batch(self):
        """A mini-batch begins; or begins again, if memory was short."""
        self.measured = []

    def add_micro_batch(self, batch, *tensors):
        """Note a micro-batch; the arguments are those of measure(). The filler of a rank that has nothing
        left to compute has the weight 0, and is not counted."""
        if batch[0].weight:
            self.measured.append(measure(batch, *tensors))

    def end_mini_batch(self):
        """Add up the numbers of the mini-batch; return its loss."""
        total = torch.zeros((), device=self.sums.device)
        for loss, sums, low, high, _ in self.measured:
            total, self.sums = total + loss, self.sums + sums
            self.low, self.high = min(self.low, low), max(self.high, high)
        if self.measured and not self.losses:  # the first mini-batch
            self.gap = self.measured[0][-1]
        ranks.add_up(total)  # over all processes
        self.losses.append(total.item())
        return self.losses[-1]

    def add_step(self, norm, skipped, step):
        """Note the gradient's norm of a mini-batch, and whether its step was skipped or taken."""
        self.norms.append(norm)
        self.skipped += skipped
        self.steps += step

    def summary(self):
        """{name: number}, as described above."""
        ranks.add_up(self.sums)
        kl, clipped, entropy, tokens = self.sums.tolist()
        number = len(self.losses)
        numbers = dict(
            loss=sum(self.losses) / number, kl=kl / number, clip=clipped / max(tokens, 1),
            entropy=entropy / max(tokens, 1), ratio_min=self.low, ratio_max=self.high, sampling_gap=self.gap,
            grad_norm=sum(self.norms) / number, halved=self.budget.halved - self.halved_before,
            token_budget=self.budget.tokens, skipped=self.skipped, steps=self.steps, tokens=tokens)
        return {name: float(value) for name, value in numbers.items()}
