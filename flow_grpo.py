"""Flow-GRPO: the objective that trains the planner inside the flow (arXiv 2510.05592, §3.2).

A rollout is one question carried through the flow, in T_i turns. In each turn the planner reads a
state s (the prompt) and writes an action a (the plan, one sequence of tokens). The reward comes
once, at the end: R is 1 if the final answer is right, else 0. In the words of RL, the planner is
the *policy* π_θ; θ are its weights.

  1. What we want: a larger expected reward, E[R] = Σ P(rollout) R(rollout) over all possible
     rollouts; P(rollout) is the probability of the whole rollout.
  2. Its gradient is Σ R ∇P(rollout). As ∇P = P ∇log P, this is Σ P R ∇log P = E[R ∇log P(rollout)],
     which a mean over sampled rollouts estimates. log P(rollout) is the sum of log π_θ of the
     planner's tokens and of terms that do not depend on θ (tools, frozen modules).
  3. Less variance: we may subtract a *baseline* from R, any number that does not depend on this
     rollout's plans. On average it changes nothing, because E[∇log P] = Σ P ∇log P = Σ ∇P = ∇ Σ P =
     ∇1 = 0. Here it is the mean reward of the group, the rollouts of the same question: if all of
     them are right, none is pushed up. (Strictly, this mean depends on the rollout's own R. But
     R - mean of all = (G - 1) / G · (R - mean of the others), and the mean of the others is a
     valid baseline: see advantages().)
  4. So every token of every turn of rollout i gets the same advantage A_i: how much better this
     rollout ended than its group. It is as if the planner were fine-tuned on its own plans, each
     weighted by its A: tokens with A > 0 are pushed up, tokens with A < 0 down. (In RL, this is
     REINFORCE with a baseline.)

So far this is a plain policy gradient. Flow-GRPO adds, as choices that do not follow from it:

  * A is divided by the group's standard deviation;
  * tokens are averaged over a turn, and turns over a rollout, which biases the gradient (see
    token_weight());
  * PPO's clipped ratio. The batch of rollouts is cut into mini-batches of whole rollouts, for one
    optimiser step each. From the second step on, the policy is no longer the one that sampled: the
    ratio corrects for that, approximately (see loss());
  * a KL that pulls the planner back towards the untrained one, π_ref.

Training maximises J. (q: a question; i: one of its G rollouts; t: a turn; j: a token of its plan)

(5) J(θ) = E_q [ 1/G Σ_i 1/T_i Σ_t 1/|a_i^t| Σ_j min( ρ A_i, clip(ρ, 1-ε, 1+ε') A_i ) ]
           - β KL(π_θ ‖ π_ref)
(6) ρ    = π_θ(a_ij^t | s_i^t, a_i,<j^t) / π_θold(a_ij^t | s_i^t, a_i,<j^t)       for each token j
(7) A_i  = ( R_i - mean_k R_k ) / std_k R_k                             over the group's G rollouts

π_θold is the planner as it was before the update, when it sampled the rollouts. It is no second
model: its log-probs are computed before the first step. π is always the distribution at the
sampling temperature. The paper has a single ε and does not give its value; 0.2
below and 0.3 above come from the released code.

The code takes one mean over all rollouts. That equals E_q and 1/G Σ_i while no rollout has failed.
So J has three nested means: over rollouts, over the turns of each, over the tokens of each turn.
The KL is averaged in the same way.

In the first optimiser step on a batch of rollouts, π_θ is still π_θold. Then ρ is 1 and the clip
does not act: apart from the KL, the gradient is the three means of A_i ∇log π.

    advantages()        eq. 7
    objective()         eq. 5 in plain loops: for reading, and for testing against
    distribution()      log π of all tokens: samples are drawn from it, and scored with it
    token_logps()       log π of each action token
    token_weight()      1/N 1/T_i 1/|a|: the three means, as the weight of a token
    loss()              -J of these tokens
    update()            one batch of rollouts -> optimiser steps

They work on token ids, one reward per rollout and two language models, and know nothing of agents
or text. All log-probs are one flat list of action tokens, (K,): there is no padding in the loss,
and no mask that could be forgotten. There is one of each function, and every run takes it. A faster
way is an argument: `rows` only arranges the tokens that the model reads (fast/trees.py).

Which choices are the paper's, the released code's and ours: docs/benchmarks.md, "Where this
differs".
"""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from models.local import without_head

CHUNK = 2**25  # the most logits in float32 at a time: 128 MiB, 220 tokens of a vocabulary of 152k
# No step if the gradient's norm is EXPLODED * max_grad_norm or more. Such a gradient is probably a
# numerical accident, and clipping would shorten it, but keep its meaningless direction.
EXPLODED = 1000


@dataclass
class Action:
    """One turn of one rollout, exactly as the engine sampled it (models.completion.Completion)."""

    prompt_ids: list[int]  # s^t
    ids: list[int]  # a^t, its last is the stop token, unless the plan was cut at the token limit
    rollout: int  # the number of its rollout, 0 .. N-1
    A: float = 0.0  # its advantage: the A_i of its rollout
    # filled in during an update, on a copy
    weight: float = 0.0  # the weight of each of its tokens: token_weight()
    logp_old: torch.Tensor | None = None  # log π_θold of ids, (|a|,)


# fmt: off
def advantages(rewards, groups):
    """Eq. 7: compare each rollout with its group -> A (N,), the number of flat groups.

    rewards: one number for each rollout, (N,). groups: the number of its group, N ints (not the
    question's text, because a question that comes twice in a batch makes two groups). Groups may
    differ in size, because a failed rollout leaves its group. A flat group (equal rewards, or a
    single rollout) gets A = 0 exactly.

        advantages([1, 0, 0, 1, 1], [0, 0, 0, 1, 1])  ->  [1.155, -0.577, -0.577, 0, 0], 1

    All turns of a rollout share its A: nothing here finds the turn that mattered. So the bad turns
    of a lucky rollout are rewarded, too. But of two plans for the same state, the worse one makes
    success less likely, so over many rollouts its mean A is lower. (Its mean push can still be
    higher, because 1/T_i and 1/|a| weigh the turns: see token_weight().)

    The division by std is not part of a plain policy gradient. With it, every group that is not
    flat has the same Σ A² = n - 1. So questions that are nearly always or nearly never solved weigh
    more than without it, and a group whose rewards differ by a tiny cost weighs as much as one of
    successes and failures.

    For another baseline, edit the line that sets A. Strictly, a baseline must not contain R_i: R_i
    should be compared with the mean of the n - 1 *others*. But R_i - mean of the others = n / (n -
    1) (R_i - mean of all): only a constant factor, if all groups have n rollouts. The difference
    from the others, without the division by the standard deviation, is RLOO (leave-one-out):
    rloo.diff in experiments/forks/.
    """
    R = torch.as_tensor(rewards, dtype=torch.float32)                   # (N,)
    groups = torch.as_tensor(groups)                                    # (N,)
    A, flat = torch.zeros_like(R), 0
    for number in groups.unique():
        group = groups == number                                        # (N,) True for its rollouts
        if R[group].max() == R[group].min():
            flat += 1
            continue
        # std() divides by n - 1, as in the released code
        A[group] = (R[group] - R[group].mean()) / (R[group].std() + 1e-6)
    return A, flat


def objective(rollouts, A, clip, beta):
    """J of eq. 5, term by term -> (), a scalar. The tests compare loss() and its gradient with it.

    rollouts[i][t][j]: log π_θ, log π_θold and log π_ref of token j of turn t of rollout i, each a
    tensor (). A: A_i of each rollout. clip: (ε, ε')."""
    J = 0.0
    N = len(rollouts)                       # 1/N: the mean over q and over the G rollouts of each
    low, high = clip                        # ε, ε'
    for turns, A_i in zip(rollouts, A):                                     # 1/N Σ_i
        for tokens in turns:                                                # 1/T_i Σ_t
            for logp, logp_old, logp_ref in tokens:                         # 1/|a| Σ_j
                ratio   = (logp - logp_old).exp()                           # ρ
                clipped = min(max(ratio, 1 - low), 1 + high)                # clip(ρ, 1-ε, 1+ε')
                gain    = min(ratio * A_i, clipped * A_i)
                kl      = (logp_ref - logp).exp() - (logp_ref - logp) - 1   # KL (k3), per token
                J       = J + (gain - beta * kl) / N / len(turns) / len(tokens)
    return J
# fmt: on


def distribution(logits, temperature):
    """log π of every token of the vocabulary, always in float32: (..., V) -> (..., V).

    The policy is defined here, once. Samples are drawn from this distribution (models/local.py),
    and token_logps() scores them with it. An edit, such as top-k, changes both. (If an edit makes
    tokens impossible, π_ref may be unable to write what was sampled: then give --beta 0.)"""
    return (logits.float() / temperature).log_softmax(-1)


def padded(model, actions, token_budget):
    """Lay the actions of a mini-batch out in rows, one a row, in parts that fit into memory.

    Yields micro-batches (actions, x, place, settings), the longest rows first:

        x         (B, L)  the tokens that the model reads, padded on the right. B x L is at most
                          token_budget, unless one row alone has more. In a causal model no token
                          sees what comes after it, so the padding needs no mask.
        place     (K,)    where each action token is predicted: an index into x.flatten()
        settings          more arguments for the model: none

    fast/trees.py does the same with rows of several actions, which share the beginning of a
    prompt."""
    left = sorted(actions, key=lambda a: len(a.prompt_ids) + len(a.ids), reverse=True)
    while left:
        longest = len(left[0].prompt_ids) + len(left[0].ids) - 1
        number = max(1, min(len(left), token_budget // longest))
        some, left = left[:number], left[number:]
        # the last token of a plan predicts nothing, so the model need not read it
        x = pad_sequence([torch.tensor(a.prompt_ids + a.ids[:-1]) for a in some], batch_first=True)
        starts = [row * x.shape[1] + len(a.prompt_ids) - 1 for row, a in enumerate(some)]
        place = torch.cat([start + torch.arange(len(a.ids)) for start, a in zip(starts, some)])
        yield some, x, place, {}


def token_logps(model, micro_batch, temperature):
    """log π(a_j | s, a_<j) of every action token of a micro-batch -> (K,), K = Σ |a|, in float32.

    The actions come one after the other. New, old and reference log-probs all come from this
    function, so they differ only if the models do.

    The logits of all tokens would not fit into memory: with a vocabulary of 152k, those of 1 000
    tokens take 600 MB in float32, and their log-softmax and gradient as much again. So the model
    returns the states before its output layer (the head), only where an action token is predicted,
    and logits are made of them a chunk at a time. The backward pass makes them again (that is what
    checkpoint() does)."""
    actions, x, place, settings = micro_batch
    y = torch.tensor([token for a in actions for token in a.ids])  # (K,)
    # A prediction is a place and the token that follows it. Where actions share a row, they share
    # predictions: of the K, only the P different ones are computed. copy: which of them each is.
    (place, y), copy = torch.stack([place, y]).unique(dim=1, return_inverse=True)
    keep = torch.zeros(x.numel(), dtype=torch.bool)  # True at the M places that predict
    keep[place] = True
    which = keep.cumsum(0)[place] - 1  # (P,) the place of each prediction, among these M
    x, keep, which, y, copy = (t.to(model.device) for t in (x, keep.view_as(x), which, y, copy))
    settings = {name: tensor.to(model.device) for name, tensor in settings.items()}

    with without_head(model) as head:
        states = model(x, logits_to_keep=keep, use_cache=False, **settings).logits  # (M, d)
    states = states[which]  # (P, d)

    def logps_at(states, y):  # (p, d), (p,) -> (p,)
        return distribution(head(states), temperature).gather(-1, y[:, None]).squeeze(-1)

    size = max(1, CHUNK // model.config.get_text_config().vocab_size)
    score = logps_at
    if len(y) > size:
        score = partial(checkpoint, logps_at, use_reentrant=False, preserve_rng_state=False)
    logps = [score(*chunk) for chunk in zip(states.split(size), y.split(size))]
    return torch.cat(logps)[copy]  # (P,) -> (K,)


def token_weight(action, T, N, num_tokens=None):
    """The three nested means of eq. 5 as the weight of each token of an action: 1/N 1/T_i 1/|a|.

    N: the rollouts of the mini-batch (on all GPUs together). T: the turns of this rollout. 1/N
    stands for both means, over questions and over the G rollouts of each. So every rollout weighs
    the same, and a group with a failed rollout weighs less than a whole one. As N counts the whole
    mini-batch, the losses of the micro-batches add up to the loss of the mini-batch.

    1/T_i and 1/|a| are not part of a plain policy gradient: each turn of a short rollout, and each
    token of a short plan, weighs more, right or wrong. With 1/T_i, the gradient (at ρ = 1, leaving
    1/|a| aside) is that of E[A / T], as if A / T were the reward: quick successes pay more than
    slow ones, and slow failures cost less than quick ones. (A constant baseline b no longer drops
    out: it adds -b E[1 / T].) This can favour the worse of two plans. Say the first plan is X or Y,
    and A is 1 if right, -1 if wrong:

                      P(right)    turns if right    turns if wrong  mean push A/T
        after plan X    0.6             3                3          0.6/3 - 0.4/3 = 0.07
        after plan Y    0.5             1                3          0.5/1 - 0.5/3 = 0.33

    X is right more often, but Y is pushed up five times as hard. They compete for probability, so Y
    wins.

    num_tokens: the tokens of the mini-batch, to weigh all of them equally (the released code: those
    of a micro-batch). Then long plans and long rollouts weigh more."""
    return 1 / num_tokens if num_tokens else 1 / (N * T * len(action.ids))


def weighted(actions, rollouts, token_mean=False):
    """The actions of a mini-batch, those of these rollouts, with their token's weights: [Action].

    If an engine returns an action without tokens, it is left out, but still counts in T_i and N."""
    actions = [a for a in actions if a.rollout in rollouts]
    turns = Counter(a.rollout for a in actions)  # turns[i] = T_i
    tokens = sum(len(a.ids) for a in actions) if token_mean else None
    return [
        replace(a, weight=token_weight(a, turns[a.rollout], len(rollouts), tokens))
        for a in actions
        if a.ids
    ]


def split_rollouts(groups, minibatches, seed):
    """Rollouts 0..N-1 as `minibatches` lists of equal size (± 1). groups: the group of each, (N,).

    The groups, in shuffled order, are laid out one after the other and cut into equal parts. No
    group is divided if all have the same size and their number is a multiple of `minibatches`:
    copies of a prompt are cheaper together (fast/trees.py). A rollout is never divided."""
    groups = torch.as_tensor(groups).tolist()
    distinct, N = sorted(set(groups)), len(groups)
    places = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed)).tolist()
    place = dict(zip(distinct, places))  # of each group in the new order
    rollouts = sorted(range(N), key=lambda i: place[groups[i]])  # a group stays together
    return [rollouts[N * k // minibatches : N * (k + 1) // minibatches] for k in range(minibatches)]


def per_token(actions, values):
    """One value for each action -> one for each token: (K,)."""
    return torch.tensor(values).repeat_interleave(torch.tensor([len(a.ids) for a in actions]))


# fmt: off
def loss(logp, logp_old, logp_ref, A, weight, clip, beta):
    """-J of eq. 5 for K action tokens -> loss (), ratio (K,), kl (K,). logp_ref=None: no KL.

    Tensors are (K,); only logp carries a gradient. At ρ = 1, `ratio * A` has the gradient A ∇log π.

    Why a ratio? We want a large mean of A over rollouts of π_θ, but these were sampled with π_θold.
    A rollout that π_θ makes twice as likely should count twice. That factor is the product of the
    ratios of all tokens of its plans. But a product of hundreds of ratios is very noisy. So PPO
    gives each token only its own ratio. At π_θ = π_θold the sum of these ratios has the same
    gradient as the product. Further away the approximation gets worse, so the clip removes the
    incentive to go further:

        A > 0    the gain grows with ρ up to 1+ε', and is flat above
        A < 0    the gain grows as ρ falls to 1-ε, and is flat below; it keeps falling as ρ rises

    The KL is estimated token by token as k3 = r - log r - 1, with r = π_ref / π_θ. It is never
    negative, and its mean over tokens drawn from π_θ is KL(π_θ ‖ π_ref). But its mean gradient is
    that of the reversed KL, KL(π_ref ‖ π_θ) (docs/fork.md, "Another KL"). Both are smallest at
    π_θ = π_ref. As the tokens were drawn from π_θold, this is exact at ρ = 1 only.

    Add a term of your own to `terms`. If it needs π_ref, or tokens with A = 0, or a flag:
    docs/fork.md, "Another term in the objective".

    The value of the loss does not measure learning: with the three means it is -1/N Σ_i A_i (plus β
    KL) at ρ = 1, and the A of a whole group add up to 0, whatever its rewards.
    """
    low, high = clip                                                    # ε, ε'
    ratio   = (logp - logp_old).exp()                                   # ρ
    clipped = ratio.clamp(1 - low, 1 + high)                            # clip(ρ, 1-ε, 1+ε')
    gain    = torch.min(ratio * A, clipped * A)                         # min(ρ A, clip(ρ) A)
    kl      = torch.zeros_like(logp)
    if logp_ref is not None:
        kl  = (logp_ref - logp).exp() - (logp_ref - logp) - 1           # KL (k3), never negative
    terms   = gain - beta * kl                                          # + a term of yours, (K,)
    # -1/N Σ_i 1/T_i Σ_t 1/|a| Σ_j
    return -(terms * weight).sum(), ratio.detach(), kl.detach()
# fmt: on


def update(
    model,
    reference,
    optimizer,
    actions,
    groups,
    *,
    temperature,
    clip,
    beta,
    minibatches,
    max_grad_norm=1.0,
    token_mean=False,
    seed=0,
    token_budget=16_384,
    rows=padded,
    ranks=None,
):
    """Train the policy on one batch of rollouts, in `minibatches` optimiser steps -> metrics.

    Call it once for a batch: a second call would take the policy as it is then for π_θold.

        model           the policy
        reference       π_ref; `model` itself if it carries adapters, which are then switched off;
                        None: no KL
        actions         [Action], all turns of all rollouts, in any order
        groups          the group of each rollout, (N,); Action.rollout is an index into it
        temperature     that of sampling
        clip            (ε, ε')
        beta            the weight of the KL; with 0 there is no forward pass for it
        max_grad_norm   longer gradients are scaled down to this norm
        token_mean      see token_weight()
        seed            shuffles the groups
        token_budget    the most tokens of a micro-batch: bounds the memory, changes only rounding
        rows            padded, or another layout of the same tokens
        ranks           None, or what several GPUs need (scale/sharded.py)

    The metrics say whether learning is healthy. Sums are over all GPUs.

        kl          k3, each token weighted as in the objective (loss = -gain + beta * kl)
        clip        share of tokens whose gradient the clip removed: A > 0 and ρ > 1+ε', or A < 0
                    and ρ < 1-ε
        entropy     mean of -log π over the tokens. They were sampled from π_θold, so in the first
                    mini-batch this estimates its entropy
        grad_norm   norm of the gradient before clipping, mean over the mini-batches
        skipped     mini-batches skipped because the gradient was not finite, or far too large
        loss        -J, mean over the mini-batches; it does not measure learning, see loss()

    With beta = 0, the metrics leave out actions with A = 0. The result also has "token_budget", the
    largest that fitted: start the next update with it."""
    beta = beta if reference is not None else 0
    check_actions(actions, len(groups), temperature)

    minis = []  # the actions of each mini-batch
    for rollouts in split_rollouts(groups, minibatches, seed):
        # First the weights: N and T also count actions that are on other GPUs, or left out here.
        mini = weighted(actions, rollouts, token_mean)
        mini = ranks.share(mini) if ranks else mini
        if not beta:  # actions with A = 0 have no gradient (for a term of yours, see docs/fork.md)
            mini = [a for a in mini if a.A != 0]
        minis.append(mini)

    def in_micro_batches(mini, compute):
        """compute(micro-batches of a mini-batch). If memory runs out, again in smaller ones."""
        nonlocal token_budget
        while True:
            batches = list(rows(model, mini, token_budget))
            batches = ranks.even(batches) if ranks else batches  # as many on each GPU
            try:
                return compute(batches)
            except torch.OutOfMemoryError:
                if ranks or len(batches) == len(mini):  # nothing is left to cut
                    raise
            token_budget //= 2

    # All mini-batches but the first need log π_θold, so they are scored before any step. The first
    # is scored during its step, in which π_θ still is π_θold.
    for mini in minis[1:]:
        in_micro_batches(mini, lambda batches: score_old(model, batches, temperature))

    totals, norms, skipped = torch.zeros(5), [], 0
    how = reference, temperature, clip, beta
    for mini in minis:  # one optimiser step each
        sums = in_micro_batches(mini, lambda batches: gradient(model, batches, *how))
        if ranks:
            ranks.sum_gradients(model, sums)
        totals += sums.cpu()
        # clips the gradient, and returns its norm before
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item()
        norms.append(norm)
        # One bad mini-batch must not end the run.
        if not math.isfinite(sums[0].item() + norm) or norm >= EXPLODED * max_grad_norm:
            skipped += 1
        # No step if the gradient is exactly 0: AdamW's momentum would still move θ. Without a KL,
        # this is a mini-batch of flat groups. With one, only while the policy is still π_ref:
        # later, even such a mini-batch takes a step, by the KL and by the momentum.
        elif norm > 0:
            optimizer.step()
    model.zero_grad()

    minus_J, kl, clipped, entropy, tokens = totals.tolist()
    return {
        "kl": kl / minibatches,
        "clip": clipped / max(tokens, 1),
        "entropy": entropy / max(tokens, 1),
        "grad_norm": sum(norms) / minibatches,
        "skipped": skipped,
        "loss": minus_J / minibatches,
        "token_budget": token_budget,
    }


def check_actions(actions, num_rollouts, temperature):
    """ValueError for what would be a silent mistake in the objective."""
    if any(not 0 <= a.rollout < num_rollouts for a in actions):
        last = num_rollouts - 1
        raise ValueError(
            f"an Action.rollout is outside 0..{last}: renumber the rollouts that are left"
        )
    if not all(a.prompt_ids for a in actions):
        raise ValueError("an action without a prompt: nothing predicts its first token")
    if temperature <= 0:
        raise ValueError("temperature must be > 0: a greedy planner has no distribution to train")


def score_old(model, batches, temperature):
    """Set Action.logp_old of a mini-batch, while the model is π_θold."""
    for batch in batches:
        with torch.no_grad():
            logps = token_logps(model, batch, temperature)  # (K,)
        for a, logp in zip(batch[0], logps.split([len(a.ids) for a in batch[0]])):
            a.logp_old = logp  # (|a|,)


def gradient(model, batches, reference, temperature, clip, beta):
    """Set .grad to the gradient of -J of a mini-batch: those of its micro-batches add up.

    -> (5,): -J, and sums over the tokens of kl * weight, clipped, -log π and 1."""
    model.zero_grad()
    sums = torch.zeros(5, device=model.device)
    for batch in batches:
        actions = batch[0]
        logp_ref = None
        if beta:
            adapters_off = model.disable_adapter() if reference is model else nullcontext()
            with torch.no_grad(), adapters_off:
                logp_ref = token_logps(reference, batch, temperature).to(model.device)  # (K,)
            if logp_ref.isinf().any():
                raise ValueError("π_ref cannot write a token that was sampled: the KL is infinite")
        logp = token_logps(model, batch, temperature)  # (K,)
        if actions[0].logp_old is None:  # in the first mini-batch, the model still is π_θold
            logp_old = logp.detach()  # (K,)
        else:
            logp_old = torch.cat([a.logp_old for a in actions])  # (K,)
        A = per_token(actions, [a.A for a in actions]).to(logp)  # (K,)
        weight = per_token(actions, [a.weight for a in actions]).to(logp)  # (K,)
        minus_J, ratio, kl = loss(logp, logp_old, logp_ref, A, weight, clip, beta)
        minus_J.backward()

        clipped = ((A > 0) & (ratio > 1 + clip[1])) | ((A < 0) & (ratio < 1 - clip[0]))
        counted = weight.sign()  # 1, and 0 for the filler of a GPU that has nothing left to compute
        of_tokens = torch.stack([kl * weight, clipped * counted, -logp.detach() * counted, counted])
        sums += torch.cat([minus_J.detach()[None], of_tokens.sum(1)])
    return sums
