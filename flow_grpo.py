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
     them are right, none is pushed up. A rollout then moves the weights only by how much it differs
     from its group, so what all of them share, such as an easy question, no longer shakes the
     gradient: docs/ladder.md, rung 1, shows it. (That this mean contains the rollout's own R
     makes a constant factor: see advantages().)
  4. So every token of every turn of rollout i gets the same advantage A_i: how much better this
     rollout ended than its group. It is as if the planner were fine-tuned on its own plans, each
     weighted by its A: tokens with A > 0 are pushed up, tokens with A < 0 down. (In RL, this is
     REINFORCE with a baseline.)

So far this is a plain policy gradient. Flow-GRPO adds, as choices that do not follow from it:

  * A is divided by the group's standard deviation;
  * tokens are averaged over a turn, and turns over a rollout, which biases the gradient (see
    token_weight());
  * the clipped ratio of PPO, from which GRPO comes (there, the baseline is a second network). The
    batch of rollouts is cut into mini-batches of whole rollouts, for one optimiser step each. From
    the second step on, the policy is no longer the one that sampled: the ratio corrects for that,
    approximately (see loss());
  * a KL that pulls the planner back towards the untrained one, π_ref.

Training maximises J (q: a question; i: one of G rollouts; t: a turn; j: one of its |a| tokens):

(5) J(θ) = E_q [ 1/G Σ_i 1/T_i Σ_t 1/|a_i^t| Σ_j min( ρ A_i, clip(ρ, 1-ε, 1+ε') A_i ) ]
           - β KL(π_θ ‖ π_ref)
(6) ρ    = π_θ(a_ij^t | s_i^t, a_i,<j^t) / π_θold(a_ij^t | s_i^t, a_i,<j^t)       for each token j
(7) A_i  = ( R_i - mean_k R_k ) / std_k R_k                             over the group's G rollouts

π_θold is the planner as it was before the update, when it sampled the rollouts. It is no second
model: its log-probs are computed before the first step. π always means
softmax(logits / temperature). The paper has a single ε and does not give its value; 0.2 below and
0.3 above come from the released code.

The code takes one mean over all rollouts. With groups of equal size, that is the mean of the
groups' means, E_q and 1/G Σ_i. So J has three nested means: over rollouts, over the turns of each,
over the tokens of each turn. The KL is averaged in the same way.

In the first optimiser step on a batch of rollouts, π_θ is still π_θold. Then ρ is 1 and the clip
does not act: apart from the KL, the gradient is the three means of A_i ∇log π.

    advantages()        eq. 7
    objective()         eq. 5 in plain loops: for reading, and for testing against
    distribution()      log π of all tokens: samples are drawn from it, and scored with it
    token_logps()       log π of each action token
    token_weight()      1/N 1/T_i 1/|a|: the three means, as the weight of a token (here N is the
                        number of rollouts in a mini-batch)
    loss()              -J of these tokens
    update()            one batch of rollouts -> optimiser steps

They work on token ids, one reward per rollout and two language models, and know nothing of agents
or text. All log-probs are one flat list of action tokens, (K,). The loss sees only plan tokens, so
it needs no mask. No function exists twice: a faster way is an argument, such as `rows`, which says
how tokens are laid out for the model (fast/trees.py).

Which choices are the paper's, the released code's and ours: docs/benchmarks.md, "Where this
differs".
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from models.local import MicroBatch, without_head

CHUNK = 2**25  # the most logits in float32 at a time: 128 MiB, 220 tokens of a vocabulary of 152k
# No step if the gradient's norm is EXPLODED * max_grad_norm or more. Such a gradient is probably a
# numerical accident, and a shorter one would still have its meaningless direction.
EXPLODED = 1000
R_MAX = 11  # beyond this π_ref / π_θ the KL goes on straight in its logarithm, with slope R_MAX - 1


@dataclass
class Action:
    """One turn of one rollout, exactly as the engine sampled it (models.completion.Completion)."""

    prompt_ids: list[int]  # s^t
    ids: list[int]  # a^t, its last is the stop token, unless the plan was cut at the token limit
    rollout: int  # the number of its rollout, 0 .. N-1
    A: float = 0.0  # its advantage: the A_i of its rollout
    turn: int = 0  # t, here from 0 on: for advantages that differ from turn to turn
    # update() fills these in, on copies; a logp_old that is set, of an older policy's plan, is kept
    weight: float = 0.0  # the weight of each of its tokens: token_weight()
    logp_old: Tensor | None = None  # log π_θold of ids, (|a|,)


# fmt: off
def advantages(rewards: Sequence[float], groups: Sequence[int]) -> tuple[Tensor, int]:
    """Eq. 7: compare each rollout with its group -> A (N,), the number of flat groups.

    rewards: one number for each rollout, (N,). groups: the number of its group, N ints (not the
    question's text, because a question that comes twice in a batch makes two groups). Groups may
    differ in size, because a failed rollout leaves its group. A group is flat if its rewards are
    equal, or if it has a single rollout. It gets A = 0 exactly.

        >>> A, flat = advantages([1, 0, 0, 1, 1], [0, 0, 0, 1, 1])
        >>> [round(a, 3) for a in A.tolist()], flat
        ([1.155, -0.577, -0.577, 0.0, 0.0], 1)

    All turns of a rollout share its A: nothing here finds the turn that mattered. So the bad turns
    of a lucky rollout are rewarded, too. But of two plans for the same state, the worse one makes
    success less likely, so over many rollouts its mean A is lower. (Its mean push can still be
    higher, because 1/T_i and 1/|a| weigh the turns: see token_weight().)

    The division by std is not part of a plain policy gradient. With it, every group that is not
    flat has the same Σ A² = n - 1. So questions that are nearly always or nearly never solved weigh
    more than without it, and a group whose rewards differ by a tiny cost weighs as much as one of
    successes and failures.

    For another baseline, edit the line that sets A. Then A may differ from 0 in a flat group, whose
    std is 0: divide by the std of all rewards, or by nothing. Strictly, a baseline must not contain
    R_i: R_i should be compared with the mean of the n - 1 *others*. But R_i - mean of the others =
    n / (n - 1) (R_i - mean of all): only a constant factor, if all groups have n rollouts. The
    difference from the others, without the division by the standard deviation, is RLOO
    (leave-one-out). experiments/forks/rloo.diff is the whole of it: without ratio, clip, means.
    """
    R = torch.as_tensor(rewards, dtype=torch.float32)                   # (N,)
    groups = torch.as_tensor(groups)                                    # (N,)
    A, flat = torch.zeros_like(R), 0
    for number in groups.unique():
        group = groups == number                                        # (N,) True for its rollouts
        r = R[group]                                                    # (n,)
        flat += bool((r == r[0]).all())
        mean = r[0] + (r - r[0]).mean()          # r.mean(), but without rounding in a flat group
        std = r.std(correction=min(1, len(r) - 1))  # divides by n - 1, as in the released code
        A[group] = (r - mean) / (std + 1e-6)
    return A, flat


def objective(rollouts, A: Sequence[float], clip: tuple[float, float], beta: float) -> Tensor:
    """J of eq. 5, term by term -> (), a scalar. The tests compare loss() and its gradient with it.

    rollouts[i][t][j]: log π_θ, log π_θold and log π_ref of token j of turn t of rollout i, each a
    tensor (). A: A_i of each rollout. clip: (ε, ε')."""
    J = 0.0
    N = len(rollouts)                       # 1/N: the mean over q and over the G rollouts of each
    low, high = clip                        # ε, ε'
    for turns, A_i in zip(rollouts, A, strict=True):                                     # 1/N Σ_i
        for tokens in turns:                                                # 1/T_i Σ_t
            for logp, logp_old, logp_ref in tokens:                         # 1/|a| Σ_j
                ratio   = (logp - logp_old).exp()                           # ρ
                clipped = min(max(ratio, 1 - low), 1 + high)                # clip(ρ, 1-ε, 1+ε')
                gain    = min(ratio * A_i, clipped * A_i)
                log_r   = logp_ref - logp                                   # r = π_ref / π_θ
                bend    = math.log(R_MAX)
                r       = log_r.exp() if log_r < bend else R_MAX * (1 + log_r - bend)
                kl      = r - log_r - 1                                     # KL (k3), per token
                J       = J + (gain - beta * kl) / N / len(turns) / len(tokens)
    return J
# fmt: on


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """log π of every token of the vocabulary, always in float32: (..., V) -> (..., V).

    π is defined here, once: softmax(logits / temperature). Samples are drawn from this distribution
    (models/local.py), and token_logps() scores them with it, so an edit, such as top-k, changes
    both. Give the tokens that it forbids a logit of -1e4, not -inf: sampling and scoring round
    differently, so now and then a token at the border is drawn by the one and forbidden by the
    other, and log 0 has no gradient."""
    return (logits.float() / temperature).log_softmax(-1)


def padded(model, actions: Sequence[Action], token_budget: int) -> Iterator[MicroBatch]:
    """Lay the actions of a mini-batch out in rows, one a row, in parts that fit into memory.

    Yields micro-batches, the longest rows first. Rows are padded on the right: in a causal model no
    token sees what comes after it, so the padding needs no mask. A micro-batch has at most
    token_budget tokens, padding included, unless one row alone has more.

    fast/trees.py does the same with rows of several actions, which share the beginning of a
    prompt."""
    left = sorted(actions, key=lambda a: len(a.prompt_ids) + len(a.ids), reverse=True)
    while left:
        longest = len(left[0].prompt_ids) + len(left[0].ids) - 1
        number = max(1, min(len(left), token_budget // longest))
        some, left = left[:number], left[number:]
        # the last token of a plan predicts nothing, so the model need not read it
        x = pad_sequence([torch.tensor(a.prompt_ids + a.ids[:-1]) for a in some], batch_first=True)
        # (K,) where each action token is predicted, as an index into x.flatten()
        starts = [row * x.shape[1] + len(a.prompt_ids) - 1 for row, a in enumerate(some)]
        pairs = zip(starts, some, strict=True)
        place = torch.cat([start + torch.arange(len(a.ids)) for start, a in pairs])
        yield MicroBatch(some, x, place, {})


def token_logps(model, batch: MicroBatch, temperature: float) -> Tensor:
    """log π(a_j | s, a_<j) of every action token of a micro-batch -> (K,), K = Σ |a|, in float32.

    The actions come one after the other. New, old and reference log-probs all come from this
    function, so they differ only if the models do.

    The rest saves memory, and can be skipped at first. The logits of all tokens would not fit: with
    a vocabulary of 152k, those of 1 000 tokens take 600 MB in float32, and their log-softmax and
    gradient as much again. So the model returns the states before its output layer (the head), only
    where an action token is predicted, and logits are made of them a chunk at a time. The backward
    pass makes them again (that is what checkpoint() does)."""
    y = torch.tensor([token for a in batch.actions for token in a.ids])  # (K,)
    # A prediction is a place and the token that follows it. Plans that share a row can share
    # predictions. Compute each distinct one once: P of the K. copy[k] says which one token k uses.
    (place, y), copy = torch.stack([batch.place, y]).unique(dim=1, return_inverse=True)
    keep = torch.zeros(batch.x.numel(), dtype=torch.bool)  # True at the M places that predict
    keep[place] = True
    which = keep.cumsum(0)[place] - 1  # (P,) the place of each prediction, among these M
    keep = keep.view_as(batch.x)
    x, keep, which, y, copy = (t.to(model.device) for t in (batch.x, keep, which, y, copy))
    settings = {name: tensor.to(model.device) for name, tensor in batch.settings.items()}

    with without_head(model) as head:
        hidden = model(x, logits_to_keep=keep, use_cache=False, **settings).logits  # (M, d)
    hidden = hidden[which]  # (P, d)

    def logps_at(hidden, y):  # (p, d), (p,) -> (p,)
        return distribution(head(hidden), temperature).gather(-1, y[:, None]).squeeze(-1)

    size = max(1, CHUNK // model.config.get_text_config().vocab_size)
    score = logps_at
    if len(y) > size:
        score = partial(checkpoint, logps_at, use_reentrant=False, preserve_rng_state=False)
    logps = [score(*chunk) for chunk in zip(hidden.split(size), y.split(size), strict=True)]
    return torch.cat(logps)[copy]  # (P,) -> (K,)


def token_weight(action: Action, T: int, N: int, num_tokens: int | None = None) -> float:
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


def weighted(
    actions: Sequence[Action], rollouts: Sequence[int], token_mean: bool = False
) -> list[Action]:
    """The actions of a mini-batch, those of these rollouts, as copies with their token's weights.

    Here the whole mini-batch is in one place, on every GPU: take its statistics here, such as a
    mean of A to subtract, not in loss(). If an engine returns an action without tokens, it is left
    out, but still counts in T_i and N."""
    actions = [a for a in actions if a.rollout in rollouts]
    turns = Counter(a.rollout for a in actions)  # turns[i] = T_i
    tokens = sum(len(a.ids) for a in actions) if token_mean else None
    return [
        replace(a, weight=token_weight(a, turns[a.rollout], len(rollouts), tokens))
        for a in actions
        if a.ids
    ]


def split_rollouts(groups: Sequence[int], minibatches: int, seed: int) -> list[list[int]]:
    """Rollouts 0..N-1 as `minibatches` lists of equal size (± 1), or as N, if there are fewer.
    groups: the group of each, (N,).

    The groups, in shuffled order, are laid out one after the other and cut into equal parts. No
    group is divided if all have the same size and their number is a multiple of `minibatches`:
    copies of a prompt are cheaper together (fast/trees.py). A rollout is never divided."""
    groups = torch.as_tensor(groups).tolist()
    distinct, N = sorted(set(groups)), len(groups)
    places = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed)).tolist()
    place = dict(zip(distinct, places, strict=True))  # of each group in the new order
    rollouts = sorted(range(N), key=lambda i: place[groups[i]])  # a group stays together
    parts = max(1, min(minibatches, N))
    return [rollouts[N * k // parts : N * (k + 1) // parts] for k in range(parts)]


def per_token(actions: Sequence[Action], values: Sequence[float]) -> Tensor:
    """One value for each action -> one for each token: (K,)."""
    return torch.tensor(values).repeat_interleave(torch.tensor([len(a.ids) for a in actions]))


# fmt: off
def loss(
    logp: Tensor, logp_old: Tensor, logp_ref: Tensor | None, A: Tensor, weight: Tensor,
    *, clip: tuple[float, float], beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """-J of eq. 5 for K action tokens -> loss (), ratio (K,), kl (K,). logp_ref=None: no KL.

    Tensors are (K,), the tokens of a micro-batch. So statistics taken here, such as a mean of A,
    would depend on the token budget: take them in weighted(). Only logp carries a gradient. At
    ρ = 1, `ratio * A` has the gradient A ∇log π.

    Why a ratio? We want a large mean of A over rollouts of π_θ, but these were sampled with π_θold.
    A rollout that π_θ makes twice as likely should count twice. That factor is the product of the
    ratios of all tokens of its plans. But a product of hundreds of ratios is very noisy. So PPO
    gives each token only its own ratio. At π_θ = π_θold all factors are 1, so the sum of these
    ratios has the same gradient as the product. Further away the approximation gets worse, so the
    clip limits how far one batch can push a token:

        A > 0    the gain grows with ρ up to 1+ε', and is flat above
        A < 0    the gain grows as ρ falls to 1-ε, and is flat below; it keeps falling as ρ rises

    (So the min: the clip alone would be flat above 1+ε' for A < 0, too, and would leave a bad token
    there that has become likelier.)

    The KL is estimated token by token as r - log r - 1, with r = π_ref / π_θ (J. Schulman calls it
    k3). It is never negative, and its mean over tokens drawn from π_θ is KL(π_θ ‖ π_ref): the mean
    of r is Σ π_ref = 1, that of -log r is the KL. Its mean gradient is that of the reversed KL,
    with the same minimum (docs/fork.md, "Another KL"). The tokens were drawn from π_θold, so this
    is exact at ρ = 1 only.

    The gradient of k3 is 1 - r for each ∇log π: one token that π_ref finds a thousand times
    likelier can outweigh all others, and end the run. So above R_MAX, r goes on as its tangent in
    log r. Such a token is still pulled back, but at most ten times as hard as any token is pushed
    away. This makes the mean a little less than the KL, and leaves the minimum where it is.

    Add a term of your own to `terms`. If it needs π_ref, or tokens with A = 0, or a flag:
    docs/fork.md, "Another term in the objective".

    Don't watch the loss. At ρ = 1 it is -1/N Σ_i A_i (plus β KL), and the A of a whole group add up
    to 0, whatever its rewards. Its gradient does not.
    """
    low, high = clip                                                    # ε, ε'
    ratio   = (logp - logp_old).clamp(max=20).exp()                     # ρ, never infinite
    clipped = ratio.clamp(1 - low, 1 + high)                            # clip(ρ, 1-ε, 1+ε')
    gain    = torch.min(ratio * A, clipped * A)                         # min(ρ A, clip(ρ) A)
    kl      = torch.zeros_like(logp)
    if logp_ref is not None:
        log_r, bend = logp_ref - logp, math.log(R_MAX)                  # r = π_ref / π_θ
        r   = log_r.clamp(max=bend).exp() + R_MAX * (log_r - bend).relu()
        kl  = r - log_r - 1                                             # KL (k3), never negative
    terms   = gain - beta * kl                                          # + a term of yours, (K,)
    # -1/N Σ_i 1/T_i Σ_t 1/|a| Σ_j
    return -(terms * weight).sum(), ratio.detach(), kl.detach()
# fmt: on


def update(
    model,
    reference,
    optimizer,
    actions: Sequence[Action],
    groups: Sequence[int],
    *,
    temperature: float,
    clip: tuple[float, float],
    beta: float,
    minibatches: int,
    max_grad_norm: float = 1.0,
    token_mean: bool = False,
    seed: int = 0,
    token_budget: int = 16_384,
    rows: Callable = padded,
    ranks=None,
    **more,
) -> dict[str, float]:
    """Train the policy on one batch of rollouts, in `minibatches` optimiser steps -> metrics.

    Call it once for a batch: a second call would take the policy as it is then for π_θold.

        model           the policy
        reference       π_ref; `model` itself if it carries adapters, which are then switched off;
                        None: no KL
        actions         [Action], all turns of all rollouts, in any order. To leave a turn out, set
                        its A to 0 (the KL still acts): deleting it would lower T_i
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
        more            settings of a term of yours: loss() gets them by name

    The metrics say whether learning is healthy. Sums are over all GPUs.

        kl          as in loss(), each token weighted as in the objective (loss = -gain + beta * kl)
        clip        share of tokens whose gradient the clip removed: A > 0 and ρ > 1+ε', or A < 0
                    and ρ < 1-ε
        entropy     mean of -log π over the tokens. They were sampled from π_θold, so in the first
                    mini-batch this estimates its entropy
        grad_norm   norm of the gradient before max_grad_norm acts, mean over the mini-batches that
                    have one
        skipped     steps skipped because the gradient was not finite, or far too large
        loss        -J, mean over the optimiser steps; it does not measure learning, see loss()

    With beta = 0 and no `more`, the metrics leave out actions with A = 0. The result also has
    "token_budget", the largest that fitted: start the next update with it."""
    beta = beta if reference is not None else 0
    check_actions(actions, len(groups), temperature)
    if ranks:
        ranks.release(model)  # from here on, each GPU holds a part of the weights

    minis = []  # the actions of each mini-batch
    for rollouts in split_rollouts(groups, minibatches, seed):
        # First the weights: N and T also count actions that are on other GPUs, or left out here.
        mini = weighted(actions, rollouts, token_mean)
        mini = ranks.own_actions(mini) if ranks else mini
        if not (beta or more):  # actions with A = 0: no gradient (a term of yours: docs/fork.md)
            mini = [a for a in mini if a.A != 0]
        minis.append(mini)

    def in_micro_batches(compute, mini, **settings):
        """compute(model, micro-batches of a mini-batch). If memory runs out, in smaller ones."""
        nonlocal token_budget
        while True:
            batches = list(rows(model, mini, token_budget))
            batches = ranks.even(batches) if ranks else batches  # as many on each GPU
            try:
                return compute(model, batches, temperature=temperature, **settings)
            except torch.OutOfMemoryError:
                if ranks or len(batches) == len(mini) or token_budget < 2:  # nothing is left to cut
                    raise
            token_budget //= 2

    steps = minis  # minis * 2: every mini-batch twice (the epochs of PPO)
    # log π_θold is computed before any step. The first mini-batch needs no pass of its own: it is
    # scored during its step, in which π_θ still is π_θold.
    for mini in {id(mini): mini for mini in steps}.values():  # each once
        if mini is not steps[0]:
            in_micro_batches(score_old, mini)

    totals, norms, skipped = Counter(), [], 0
    for mini in steps:  # one optimiser step each
        sums = in_micro_batches(gradient, mini, reference=reference, clip=clip, beta=beta, **more)
        if ranks:
            ranks.sum_gradients(model, sums)
        sums = {name: value.item() for name, value in sums.items()}
        totals.update(sums)
        # scales the gradient down, and returns its norm before
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item()
        norms.append(norm)
        # One bad mini-batch must not end the run.
        if not math.isfinite(sums["loss"] + norm) or norm >= EXPLODED * max_grad_norm:
            skipped += 1
        # No step if the gradient is exactly 0: AdamW's momentum would still move θ. Without a KL,
        # this is a mini-batch of flat groups. With one, only while the policy is still π_ref:
        # later, even such a mini-batch takes a step, by the KL and by the momentum.
        elif norm > 0:
            optimizer.step()
    model.zero_grad()
    if ranks:
        ranks.gather(model)  # whole weights, for the next rollouts

    tokens, nonzero = max(totals.pop("tokens"), 1), [norm for norm in norms if norm != 0]
    return {
        "kl": totals["kl"] / len(norms),
        "clip": totals["clip"] / tokens,
        "entropy": totals["entropy"] / tokens,
        "grad_norm": sum(nonzero) / max(1, len(nonzero)),
        "skipped": skipped,
        "loss": totals["loss"] / len(norms),
        "token_budget": token_budget,
    }


def check_actions(actions: Sequence[Action], num_rollouts: int, temperature: float) -> None:
    """ValueError for what would be a silent mistake in the objective."""
    if any(not 0 <= a.rollout < num_rollouts for a in actions):
        why = "renumber the rollouts that are left"
        raise ValueError(f"an Action.rollout is outside 0..{num_rollouts - 1}: {why}")
    if not all(a.prompt_ids for a in actions):
        raise ValueError("an action without a prompt: nothing predicts its first token")
    if temperature <= 0:
        raise ValueError("temperature must be > 0: a greedy planner has no distribution to train")


def check_possible(*logps: Tensor) -> None:
    """ValueError if one is infinite: a sampled token has probability 0."""
    if any(logp.isinf().any() for logp in logps):
        raise ValueError(
            "a token that was sampled has probability 0 here: in distribution(), give forbidden "
            "tokens a logit of -1e4, not -inf"
        )


def score_old(model, batches: Sequence[MicroBatch], *, temperature: float) -> None:
    """Set Action.logp_old of a mini-batch, while the model is π_θold."""
    for batch in batches:
        with torch.no_grad():
            keep_old(batch.actions, token_logps(model, batch, temperature))


def keep_old(actions: Sequence[Action], logps: Tensor) -> None:
    """logps (K,) become Action.logp_old of those actions that have none."""
    check_possible(logps)
    for a, logp in zip(actions, logps.split([len(a.ids) for a in actions]), strict=True):
        if a.logp_old is None:
            a.logp_old = logp  # (|a|,)


def gradient(
    model, batches: Sequence[MicroBatch], *, temperature: float, reference, clip, beta, **more
) -> dict[str, Tensor]:
    """Set .grad to the gradient of -J of a mini-batch: those of its micro-batches add up.

    -> {name: ()}: -J, and sums over the tokens of kl * weight, of those clipped, -log π and 1. All
    of them are added up over mini-batches and GPUs."""
    model.zero_grad()
    names = "loss", "kl", "clip", "entropy", "tokens"
    sums = {name: torch.zeros((), device=model.device) for name in names}
    for batch in batches:
        actions, logp_ref = batch.actions, None
        if beta:
            adapters_off = model.disable_adapter() if reference is model else nullcontext()
            with torch.no_grad(), adapters_off:
                logp_ref = token_logps(reference, batch, temperature).to(model.device)  # (K,)
        logp = token_logps(model, batch, temperature)  # (K,)
        if logp_ref is not None:
            check_possible(logp, logp_ref)
        # The first time for the first mini-batch, π_θ is π_θold. (`any`: where memory has run out,
        # the parts that are tried again hold tokens that have been scored, and others.)
        if any(a.logp_old is None for a in actions):
            keep_old(actions, logp.detach())
        logp_old = torch.cat([a.logp_old for a in actions]).to(logp.device)  # (K,)
        A = per_token(actions, [a.A for a in actions]).to(logp)  # (K,)
        weight = per_token(actions, [a.weight for a in actions]).to(logp)  # (K,)
        minus_J, ratio, kl = loss(logp, logp_old, logp_ref, A, weight, clip=clip, beta=beta, **more)
        minus_J.backward()

        clipped = ((A > 0) & (ratio > 1 + clip[1])) | ((A < 0) & (ratio < 1 - clip[0]))
        counted = weight != 0  # not the filler of a GPU that has nothing left to compute
        sums["loss"] += minus_J.detach()
        sums["kl"] += (kl * weight).sum()
        sums["clip"] += (clipped & counted).sum()
        sums["entropy"] -= logp.detach()[counted].sum()
        sums["tokens"] += counted.sum()
    return sums
