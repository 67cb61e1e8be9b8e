"""What an update reports: the numbers of log.csv that tell whether learning is healthy.

    loss        mean over the mini-batches of -J; it measures no learning, see flow_grpo.loss()
    kl          k3 with the weights of the objective (loss = -gain + beta * kl); 0 where it is not computed
    clip        share of tokens whose gradient the clip removed: A > 0 and ρ > 1+ε', or A < 0 and ρ < 1-ε
    entropy     mean of -log π over the tokens that were scored. They were sampled from the policy that
                entered, so in the first mini-batch this estimates its entropy. beta = 0: only where A ≠ 0
    ratio_min, ratio_max   the extremes of ρ on this process
    ratio_first    max |ρ - 1| in the first mini-batch: 0, or the old policy is not the one that is trained
    sampling_gap   mean |log π as sampled - as scored| in the first micro-batch of this process. If large, the
                policy that is scored is not the one that sampled; 0 if the engine gives no log-probs
    grad_norm   before clipping, mean over the mini-batches
    halved      how often memory was short and the micro-batches were halved; the gradient is the same
    token_budget   what was enough in the end: begin the next update with it
    skipped     mini-batches without a step because their loss or gradient was not finite or far too large
    steps       optimiser steps taken; a mini-batch whose gradient is exactly 0 takes none
    tokens      action tokens scored
"""
import torch

from scale import ranks


def measure(batch, value, logp, ratio, kl, A, weight, clip_low, clip_high):
    """What one micro-batch shows, without its graph: loss (), sums over its tokens (4,), min and max of ρ,
    gap."""
    logp = logp.detach()
    clipped = ((A > 0) & (ratio > 1 + clip_high)) | ((A < 0) & (ratio < 1 - clip_low))
    sums = torch.stack([kl * weight, clipped.float(), -logp, torch.ones_like(kl)]).sum(1)
    sampled = torch.tensor([logp_then for a in batch for logp_then in a.logps], device=logp.device)
    gap = (sampled - logp).abs().mean() if len(sampled) == len(logp) else torch.zeros(())
    return value.detach(), sums, ratio.min().item(), ratio.max().item(), gap.item()


class Report:
    """Collects the numbers of one update."""

    def __init__(self, device, token_budget):
        self.token_budget, self.halved, self.skipped, self.steps = token_budget, 0, 0, 0
        self.sums = torch.zeros(4, device=device)  # kl, clipped tokens, -log π, tokens
        self.losses, self.norms, self.low, self.high, self.first, self.gap = [], [], 1.0, 1.0, 0.0, 0.0

    def memory(self, results):
        """Note what scale.batches.in_memory() needed; return its results."""
        results, self.token_budget, halved = results
        self.halved += halved
        return results

    def micro_batches(self, measured):
        """Add what measure() gave for the micro-batches of a mini-batch; return their loss, over all
        processes."""
        total = torch.zeros((), device=self.sums.device)
        for value, sums, low, high, _ in measured:
            total, self.sums = total + value, self.sums + sums
            self.low, self.high = min(self.low, low), max(self.high, high)
            if not self.losses:
                self.first = max(self.first, abs(low - 1), abs(high - 1))
        if measured and not self.losses:
            self.gap = measured[0][-1]
        ranks.add_up(total)
        self.losses.append(total.item())
        return self.losses[-1]

    def mini_batch(self, norm, skipped, step):
        """Note the gradient of a mini-batch, and whether its step was skipped or taken."""
        self.norms.append(norm)
        self.skipped += skipped
        self.steps += step

    def summary(self):
        ranks.add_up(self.sums)
        kl, clipped, entropy, tokens = self.sums.tolist()
        number = len(self.losses)
        numbers = dict(
            loss=sum(self.losses) / number, kl=kl / number, clip=clipped / max(tokens, 1),
            entropy=entropy / max(tokens, 1), ratio_min=self.low, ratio_max=self.high, ratio_first=self.first,
            sampling_gap=self.gap, grad_norm=sum(self.norms) / number, halved=self.halved,
            token_budget=self.token_budget, skipped=self.skipped, steps=self.steps, tokens=tokens)
        return {name: float(value) for name, value in numbers.items()}
