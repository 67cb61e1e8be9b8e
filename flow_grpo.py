"""Flow-GRPO: the objective that trains the planner inside the running flow (arXiv 2510.05592, §3.2, eq. 5-7).

A rollout is one question carried through the whole flow: T_i turns, and in each of them the planner reads a state s (the
prompt) and writes an action a (the plan, one token sequence). The reward comes once, at the end: R is 1 if the final answer
is right, else 0. Which turn earned it? Flow-GRPO does not try to say: every token of every turn of rollout i gets the same
advantage A_i, "how much better did this rollout end than the others of its question". That turns one multi-turn problem into
many single-turn ones, each an ordinary clipped policy-gradient step on (prompt, plan, A_i):

    J(θ) = E_q [ 1/G Σ_i 1/T_i Σ_t 1/|a_i^t| Σ_j min( ρ A_i, clip(ρ, 1-ε, 1+ε') A_i ) ] - β KL(π_θ ‖ π_ref)      (5)
    ρ    = π_θ(a_ij^t | s_i^t, a_i,<j^t) / π_θold(same)          one ratio for each token j of turn t of rollout i   (6)
    A_i  = ( R_i - mean_k R_k ) / std_k R_k                      over the G rollouts of the question, not their turns (7)

Four steps, four functions: advantages() -> token_logps() -> loss() -> update(). None of them knows what an agent is: they
see token ids, a number per rollout, and two language models. Ids go in as they were sampled; text never comes here.

Dropped, on purpose:
  * the value network: the mean of the group is the baseline;
  * the entropy bonus, the format reward, the length penalty, a reward per turn: the paper's objective has none of them;
  * padding from the loss: log-probs are one flat list of action tokens, so nothing is there that a mask could forget.
Chosen, where the paper is silent, as in its released code: ε = 0.2 below and ε' = 0.3 above, the k3 estimate of the KL (weighed
like the gain), 1e-6 beside the std. Different from that code: the three nested means of eq. 5 are the default; there, every
token of the batch weighs the same (token_mean=True).

What the broadcast proves and what it does not. Appendix B of the paper re-indexes the sum: the objective over whole rollouts
equals one over visited states, each with weight 1/T_i, so single-turn updates optimise the multi-turn surrogate exactly. That
is bookkeeping, not credit assignment: a bad turn in a rollout that ended well is still pushed up, and only the average over
many rollouts washes it out. It also says nothing about variance, nor about the states a changed policy will visit next.
"""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from scale.batches import CHUNK, in_memory, short_of_memory

EXPLODED = 1000           # times max_grad_norm: such a gradient, clipped, would be a step in a direction that one token decides


@dataclass
class Action:
    """One turn of one rollout, exactly as the engine sampled it."""
    prompt_ids: list[int]   # s^t
    ids: list[int]          # a^t, the stop token included; a plan cut at the token limit has none and gets none
    flow: int               # which rollout of the batch this turn belongs to, 0 .. N-1
    logps: list[float] = field(default_factory=list)   # log π of ids as they were sampled, for sampling_gap


def advantages(rewards, groups):
    """Eq. 7. rewards: one number per rollout, (N,); groups: the *index* of its question, N ints -> A (N,), flat groups.

    Groups are indices and never texts: the same question asked twice is two groups. They may differ in size, since a rollout
    lost to an outage is left out rather than called wrong. A flat group (all right, all wrong, or one rollout left, which has
    no baseline) teaches nothing: its A is exactly 0, and it is counted, because a batch of flat groups is a wasted batch.

        advantages([1, 0, 0, 1, 1], [0, 0, 0, 1, 1])  ->  [1.155, -0.577, -0.577, 0, 0], 1
    """
    R = torch.as_tensor(rewards, dtype=torch.float32)                       # (N,) one outcome per rollout, however many turns
    groups = torch.as_tensor(groups)
    A, flat = torch.zeros_like(R), 0
    for question in groups.unique():
        mine = groups == question
        if R[mine].max() == R[mine].min():
            flat += 1
            continue
        # The sample std (n - 1), as in the released code, so that its clip range and learning rate carry over.
        A[mine] = (R[mine] - R[mine].mean()) / (R[mine].std() + 1e-6)
    return A, flat


def token_logps(model, actions, temperature):
    """log π(a_j | s, a_<j) of every action token: (K,) float32, the actions one after the other, K = Σ |a|.

    The new, the old and the reference log-probs all come from here, so a difference between them is a difference of models.
    Rows are padded on the right: a causal model never looks there, so no attention mask and no position ids are needed.
    Logits exist only where an action token is predicted (the boolean `logits_to_keep` of transformers 5.23): with a vocabulary of
    152k, logits for the prompts as well cost eight times the time and seven times the memory.

    In half precision the log-softmax would still be most of the memory: 12 bytes a logit, 6.9 GiB for 4 096 tokens. So it goes
    in chunks of rows, and is computed again in the backward pass: 5 bytes, 3.1 GiB, same numbers. The logits themselves come
    from the model's own forward and not from its hidden states: some architectures scale or bend them behind their last matrix
    (Gemma, Granite, Cohere), and chunks of that matrix need its gradient three times over (1.1 GB each in a 7B).
    """
    if temperature <= 0:
        raise ValueError("temperature must be > 0: a greedy planner is not a distribution that could be trained")
    if not all(a.prompt_ids for a in actions):
        raise ValueError("an action without a prompt: nothing predicts its first token")
    row  = lambda a: torch.tensor(a.prompt_ids + a.ids)
    here = lambda a: torch.tensor([False] * (len(a.prompt_ids) - 1) + [True] * len(a.ids) + [False])
    x    = pad_sequence([row(a) for a in actions], batch_first=True)        # (B, L)
    keep = pad_sequence([here(a) for a in actions], batch_first=True)       # (B, L) True *before* each token, where it is predicted
    y    = torch.tensor([token for a in actions for token in a.ids])        # (K,)
    x, keep, y = x.to(model.device), keep.to(model.device), y.to(model.device)
    out = model(x, logits_to_keep=keep, use_cache=False)
    # Gradient checkpointing drops a cache without a word, and a prompt in it: the gradient was wrong by 78 %.
    assert getattr(out, "past_key_values", None) is None, "the update reads whole sequences: no model may keep a cache here"
    rows = max(1, CHUNK // out.logits.shape[-1])                            # out.logits: (K, V)
    if len(y) <= rows:
        return log_probs(out.logits, y, temperature)
    parts = zip(out.logits.split(rows), y.split(rows))                      # (rows, V) and (rows,), views
    again = dict(use_reentrant=False, preserve_rng_state=False)             # nothing in there is random
    return torch.cat([checkpoint(log_probs, logits, own, temperature, **again) for logits, own in parts])    # (K,)


def log_probs(logits, y, temperature):
    """log softmax(logits / temperature) at y, in float32 whatever the model computes in: (K, V), (K,) -> (K,)."""
    every = (logits.float() / temperature).log_softmax(-1)                  # (K, V) the temperature that sampled, or ρ is wrong
    return every.gather(-1, y[:, None]).squeeze(-1)                         # (K,)


def token_weights(actions, turns, num_flows, num_tokens=None):
    """The three nested means of eq. 5 as one weight per token, (K,): 1/N for the rollouts, 1/T_i for the turns, 1/|a| for
    the tokens. With every group full, E over questions and 1/G over rollouts are together one 1/N; a group that lost a
    rollout counts for one less. turns: T_i by rollout. With num_tokens every token weighs 1/num_tokens instead.

    A mean that is only a weight does not care how the batch is cut: micro-batches simply add up.
    """
    if num_tokens:
        return per_token(actions, [1 / num_tokens] * len(actions))
    return per_token(actions, [1 / (num_flows * turns[a.flow] * len(a.ids)) for a in actions])


def per_token(actions, values):
    """One value per action -> one value per token: (K,)."""
    return torch.tensor([value for a, value in zip(actions, values) for _ in a.ids])


def loss(logp, logp_old, logp_ref, A, weight, clip_low, clip_high, beta):
    """-J of eq. 5 for K action tokens; every argument is (K,), only logp carries a gradient -> loss (), ratio (K,), kl (K,).

    The reward's gradient is in `ratio * A`: at ρ = 1 it is A ∇log π. The clip takes it away where the policy has already
    moved far enough in the direction A asks for. The value measures no learning: at ρ = 1 it is -1/N Σ_i A_i, and that is 0
    whatever the rewards were. logp_ref=None -> no KL term. (As a loss, k3 pulls along the gradient of KL(π_ref ‖ π_θ): the
    same minimum by another path.)
    """
    ratio   = (logp - logp_old).exp()                                       # ρ
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)                      # clip(ρ, 1-ε, 1+ε')
    gain    = torch.min(ratio * A, clipped * A)                             # min(ρ A, clip(ρ) A)
    kl      = torch.zeros_like(logp)
    if logp_ref is not None:
        kl  = (logp_ref - logp).exp() - (logp_ref - logp) - 1               # KL (k3), never negative
    J       = ((gain - beta * kl) * weight).sum()                           # 1/N Σ_i 1/T_i Σ_t 1/|a| Σ_j
    return -J, ratio.detach(), kl.detach()


def size(action):
    return len(action.prompt_ids) + len(action.ids)


def split(num_flows, minibatches, seed):
    """Rollouts 0..N-1, shuffled, in `minibatches` sets of equal size (± 1). A rollout is never divided: its T_i is one mean."""
    order = torch.randperm(num_flows, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[k::minibatches] for k in range(minibatches)]


def ready_to_update(model):
    """No dropout, gradient checkpointing on if it was enabled: what is scored must be the policy that sampled.

    transformers checkpoints a layer only if that layer's own `training` flag is set, and model.train() would wake dropout
    (an adapter's too) with it. So everything is in eval mode, and only the flag of the layers to checkpoint is set, not the
    flags of what is in them.
    """
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def update(model, reference, optimizer, actions, advantages, *, temperature, clip_low=0.2, clip_high=0.3, beta=0.001,
           minibatches=1, token_budget=16384, max_grad_norm=1.0, token_mean=False, seed=0, all_reduce=None):
    """Learn from one batch of rollouts, in `minibatches` optimiser steps, and return what happened (a dict of floats).

    reference: the frozen copy for the KL; `model` itself if it carries adapters (peft), which are then switched off for it;
        None, or beta = 0, means no KL and no forward pass for it. Rollouts with A = 0 then have no gradient at all and are not
        computed, but they still count in N.
    actions: list[Action], all turns of all rollouts, in any order; advantages: (N,), indexed by Action.flow.
    all_reduce: for several processes, sums a tensor over them in place (torch.distributed.all_reduce). Each process brings its
        own rollouts and the same `minibatches`; counts and gradients are summed, so the objective is that of the joint batch.

    The old policy is the one that enters. Its log-probs are computed before the first step for every mini-batch but the first,
    where the policy still is the old one: there logp.detach() serves, ρ is exactly 1, and one step per batch costs no extra
    forward pass. The model comes back in eval mode, ready to sample.

    loss        mean over the steps of -J; measures nothing, see loss()
    kl          k3 under the weights of the objective (loss = -gain + beta * kl); 0 where it is not computed
    clip        share of tokens whose gradient the clip removed: A > 0 and ρ > 1+ε', or A < 0 and ρ < 1-ε
    entropy     mean of -log π over the tokens scored, which costs nothing: they were sampled from the policy that entered, so in the
                first mini-batch this estimates its entropy, later that of a policy a step or two away. beta = 0: of rollouts with A ≠ 0
    ratio_min, ratio_max   the extremes of ρ (of this process)
    ratio_first max |ρ - 1| in the first mini-batch: 0, or the old policy is not the one that is trained
    sampling_gap   mean |log π as sampled - as scored| in this process's first micro-batch: rounding, or what
                is scored is not the policy that sampled (temperature, penalty); 0 without Action.logps
    grad_norm   before clipping to max_grad_norm, mean over the steps
    halved      how often memory was short and the micro-batches were halved, see in_memory(); the gradient is the same
    token_budget   what was enough in the end: begin the next update with it
    skipped     mini-batches whose loss or gradient was not finite, or EXPLODED, and took no step; loss and grad_norm then show it
    steps       optimiser steps taken; a mini-batch whose gradient is exactly 0 takes none
    tokens      action tokens scored
    """
    sum_up = all_reduce or (lambda tensor: None)
    beta = beta if reference is not None else 0
    A = torch.as_tensor(advantages).tolist()
    turns = Counter(a.flow for a in actions)                                # T_i
    device, params = model.device, [p for p in model.parameters() if p.requires_grad]
    if any(not 0 <= a.flow < len(A) for a in actions):
        raise ValueError(f"{len(A)} advantages, but an Action.flow outside 0..{len(A) - 1}: number the kept rollouts anew")
    if beta:
        reference.eval()
    ready_to_update(model)

    parts = []                                                              # (actions, N, tokens) of each mini-batch
    for flows in split(len(A), minibatches, seed):
        chosen = [a for a in actions if a.flow in flows and a.ids]
        counts = torch.tensor([len(flows), sum(len(a.ids) for a in chosen)], device=device)
        sum_up(counts)                                                      # flat rollouts count, whether computed or not
        parts.append(([a for a in chosen if beta or A[a.flow]], *counts.tolist()))      # a term of yours without A needs all of them, too

    @torch.no_grad()
    def score(batch):
        """log π_θold of a micro-batch, by action: {id: (|a|,)}."""
        return dict(zip(map(id, batch), token_logps(model, batch, temperature).split([len(a.ids) for a in batch])))

    old, halved = {}, 0                                                     # scored before the first step
    for later, _, _ in parts[1:]:
        done, token_budget, times = in_memory(score, later, size, token_budget)
        old, halved = old | {name: logp for batch in done for name, logp in batch.items()}, halved + times

    sums = torch.zeros(4, device=device)                                    # kl, clipped tokens, -log π, tokens
    low, high, first, sampling_gap, losses, norms, skipped, steps = 1.0, 1.0, 0.0, 0.0, [], [], 0, 0
    for k, (chosen, N, tokens) in enumerate(parts):
        def learn(batch):
            """Add one micro-batch's gradient to .grad -> loss (), ratios (K,), diagnostics (4,), gap ()."""
            logp_ref = reference_logps(reference, model, batch, temperature) if beta else None    # before logp and its graph
            logp     = token_logps(model, batch, temperature)
            logp_old = torch.cat([old[id(a)] for a in batch]) if k else logp.detach()             # k = 0: it still is the old policy
            adv      = per_token(batch, [A[a.flow] for a in batch]).to(device)     # the broadcast: A_i to every token of i
            weight   = token_weights(batch, turns, N, tokens if token_mean else None).to(device)
            value, ratio, kl = loss(logp, logp_old, logp_ref, adv, weight, clip_low, clip_high, beta)
            value.backward()                                                # adds up: the weights hold the whole mini-batch
            cut = ((adv > 0) & (ratio > 1 + clip_high)) | ((adv < 0) & (ratio < 1 - clip_low))
            sampled = torch.tensor([number for a in batch for number in a.logps], device=device)
            gap = (sampled - logp.detach()).abs().mean() if len(sampled) == len(logp) else torch.zeros(())
            row = torch.stack([kl * weight, cut.float(), -logp.detach(), torch.ones_like(kl)]).sum(1)
            return value.detach(), ratio, row, gap

        # model.zero_grad and not the optimizer's, which may hold float32 copies instead.
        done, token_budget, times = in_memory(learn, chosen, size, token_budget, restart=model.zero_grad)
        halved, total = halved + times, torch.zeros((), device=device)
        sampling_gap = done[0][3].item() if done and not k else sampling_gap
        for value, ratio, row, _ in done:
            total, sums = total + value, sums + row
            low, high = min(low, ratio.min().item()), max(high, ratio.max().item())
            first = first if k else max(first, (ratio - 1).abs().max().item())
        sum_up(total)
        losses.append(total.item())
        if all_reduce:
            for p in params:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # every process must bring every gradient
                sum_up(p.grad)
        norms.append(torch.nn.utils.clip_grad_norm_(params, max_grad_norm).item())    # returns the norm before clipping
        if not (math.isfinite(losses[-1]) and norms[-1] < EXPLODED * max_grad_norm):
            skipped += 1                                                    # one poisoned batch must not end the run
        elif norms[-1] > 0:                                                 # momentum alone is no lesson
            try:
                optimizer.step()
            except RuntimeError as why:
                if not short_of_memory(why):
                    raise
                raise MemoryError(f"The optimiser's state does not fit into memory") from why
            steps += 1
    model.zero_grad()
    model.eval()
    sum_up(sums)
    kl, cut, entropy, scored = sums.tolist()
    return dict(loss=sum(losses) / minibatches, kl=kl / minibatches, clip=cut / max(scored, 1),
                entropy=entropy / max(scored, 1), ratio_min=low, ratio_max=high, ratio_first=first,
                sampling_gap=sampling_gap, grad_norm=sum(norms) / minibatches, halved=float(halved),
                token_budget=float(token_budget),
                skipped=float(skipped), steps=float(steps), tokens=scored)


def reference_logps(reference, model, actions, temperature):
    """log π_ref of the same tokens, on the policy's device. With adapters, π_ref is the policy's own weights without them."""
    with torch.no_grad(), model.disable_adapter() if reference is model else nullcontext():
        return token_logps(reference, actions, temperature).to(model.device)
