"""Flow-GRPO: the objective that trains the planner inside the running flow (arXiv 2510.05592, §3.2, eq. 5-7).

A rollout is one question carried through the flow, in T_i turns. In each turn the planner reads a state s
(the prompt) and writes an action a (the plan, one sequence of tokens). The reward comes once, at the end: R
is 1 if the final answer is right, else 0. In the words of RL, the planner is the *policy* π_θ; θ are its
weights.

  1. What we want: a larger expected reward, E[R] = Σ P(rollout) R(rollout) over all possible rollouts;
     P(rollout) is the probability of the whole rollout.
  2. Its gradient is Σ R ∇P(rollout). As ∇P = P ∇log P, this is Σ P R ∇log P = E[R ∇log P(rollout)], which a
     mean over sampled rollouts estimates. log P(rollout) is the sum of log π_θ of the planner's tokens and
     of terms that do not depend on θ (tools, frozen modules).
  3. Less variance: we may subtract a *baseline* from R, any number that does not depend on this rollout's
     plans. On average it changes nothing, because E[∇log P] = Σ P ∇log P = Σ ∇P = ∇ Σ P = ∇1 = 0. Here it is
     the mean reward of the group, the rollouts of the same question: if all of them are right, none is
     pushed up. (Strictly, this mean depends on the rollout's own R. But R minus it is (G - 1) / G times R
     minus the mean of the *others*, and that mean is a valid baseline: see advantages().)
  4. So every token of every turn of rollout i gets the same advantage A_i, how much better this rollout ended
     than its group: as if the planner were fine-tuned on its own plans, each weighted by its A. Tokens with
     A > 0 are pushed up, tokens with A < 0 down. (In RL, this is REINFORCE with a baseline.)

So far this is a plain policy gradient. Flow-GRPO adds, as choices that do not follow from it:

  * A is divided by the group's standard deviation;
  * tokens are averaged over a turn, and turns over a rollout, which biases the gradient (see token_weight());
  * PPO's clipped ratio. The batch of rollouts is cut into mini-batches of whole rollouts, for one optimiser
    step each (one PPO epoch; there is no setting for more). From the second step on, the policy is no longer
    the one that sampled: the ratio corrects for that, approximately (see loss());
  * a KL that pulls the planner back towards the untrained one, π_ref.

Training maximises J. (q: a question; i: one of its G rollouts; t: a turn; j: a token of the plan in it)

(5) J(θ) = E_q [ 1/G Σ_i 1/T_i Σ_t 1/|a_i^t| Σ_j min( ρ A_i, clip(ρ, 1-ε, 1+ε') A_i ) ] - β KL(π_θ ‖ π_ref)
(6) ρ    = π_θ(a_ij^t | s_i^t, a_i,<j^t) / π_θold(a_ij^t | s_i^t, a_i,<j^t)        for each token j
(7) A_i  = ( R_i - mean_k R_k ) / std_k R_k                                        over the group's G rollouts

π_θold is the planner as it was before the update, when it sampled the rollouts. π is always the distribution
at the sampling temperature. The paper has a single ε and does not give its value; 0.2 below and 0.3 above
come from the released code.

Together, E_q and 1/G Σ_i are one mean over all rollouts, because all groups have the same size unless a
rollout fails. So J has three nested means: over rollouts, over the turns of each, over the tokens of
each turn. This code averages the KL in the same way.

With one optimiser step per batch of rollouts, our default for real models (the toy takes 4), π_θ is still
π_θold when the gradient is taken. Then ρ is 1 and the clip never acts: apart from the KL, the gradient is the
three means of A_i ∇log π.

    advantages()        eq. 7
    objective()         eq. 5 in plain loops: for reading, and for testing against
    token_logps()       log π of each token
    token_weight()      1/N 1/T_i 1/|a|: the three means, as the weight of a token
    split_rollouts()    rollouts -> mini-batches, one optimiser step each
    loss()              -J of these tokens
    simple_update()     one batch of rollouts -> optimiser steps: for reading, and for testing against
    update()            what train.py runs: the same, for limited memory, several GPUs and bad gradients

They work on token ids, one reward per rollout and two language models, and know nothing of agents or text.
All log-probs are one flat list of action tokens, (K,): there is no padding in the loss, and no mask that
could be forgotten.

Which choices are the paper's, the released code's and ours: docs/benchmarks.md, "Where this differs".
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch.nn.utils.rnn import pad_sequence

# No step if the gradient's norm is EXPLODED * max_grad_norm or more. Such a gradient is probably a numerical
# accident, and clipping would shorten it, but keep its meaningless direction.
EXPLODED = 1000


@dataclass
class Action:
    """One turn of one rollout, exactly as the engine sampled it. train.py makes it from a Completion."""
    prompt_ids: list[int]   # s^t
    ids: list[int]          # a^t, stop token included (absent if cut off at the token limit: no special case)
    rollout: int            # the number of its rollout, 0 .. N-1
    A: float = 0.0          # its advantage: the A_i of its rollout
    # log π of ids as the engine computed it while sampling, for the report only. It is not used as π_θold:
    # sampling and scoring round differently, so ρ would not be exactly 1 in the first mini-batch.
    logps: list[float] = field(default_factory=list)
    # filled in during an update, on a copy
    weight: float = 0.0     # the weight of each of its tokens: token_weight()
    logp_old: torch.Tensor | None = None    # log π_θold of ids, (|a|,): score_old()


def advantages(rewards, groups):
    """Eq. 7: compare each rollout with the others of its group -> A (N,), the number of flat groups.

    rewards: one number for each rollout, (N,). groups: the number of its group, N ints (not the question's
    text, because a question that comes twice in a batch makes two groups). Groups may differ in size, because
    a failed rollout leaves its group. A flat group (equal rewards, or a single rollout) gets A = 0 exactly.

        advantages([1, 0, 0, 1, 1], [0, 0, 0, 1, 1])  ->  [1.155, -0.577, -0.577, 0, 0], 1

    All turns of a rollout share its A: nothing here finds the turn that mattered. So the bad turns of a lucky
    rollout are rewarded, too. But of two plans for the same state, the worse one makes success less likely,
    so over many rollouts its mean A is lower. (How much a turn weighs in J also depends on its length and on
    the number of turns: see token_weight().)

    The division by std is not part of a plain policy gradient. With it, every group that is not flat has the
    same Σ A² = n - 1. So questions that are nearly always or nearly never solved weigh more than without it,
    and a group whose rewards differ by a tiny cost weighs as much as one of successes and failures.

    For another baseline, edit the line that sets A. Strictly, a baseline must not contain R_i: R_i should be
    compared with the mean of the n - 1 *others*. But R_i - mean of the others = n / (n - 1) (R_i - mean of
    all): only a constant factor, if all groups have n rollouts. The difference from the others, without the
    division by the standard deviation, is RLOO (leave-one-out): rloo.diff in experiments/forks/.
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

    rollouts[i][t][j]: log π_θ, log π_θold and log π_ref of token j of turn t of rollout i, each a tensor ().
    A: A_i of each rollout. clip: (ε, ε')."""
    J = 0.0
    N = len(rollouts)                                   # 1/N: the mean over q and over the G rollouts of each
    low, high = clip                                    # ε, ε'
    for turns, A_i in zip(rollouts, A):                                     # 1/N Σ_i
        for tokens in turns:                                                # 1/T_i Σ_t
            for logp, logp_old, logp_ref in tokens:                         # 1/|a| Σ_j
                ratio   = (logp - logp_old).exp()                           # ρ
                clipped = min(max(ratio, 1 - low), 1 + high)                # clip(ρ, 1-ε, 1+ε')
                gain    = min(ratio * A_i, clipped * A_i)
                kl      = (logp_ref - logp).exp() - (logp_ref - logp) - 1   # KL (k3), per token
                J       = J + (gain - beta * kl) / N / len(turns) / len(tokens)
    return J


def token_logps(model, actions, temperature):
    """log π(a_j | s, a_<j) of every action token: (K,) float32, one action after the other, K = Σ |a|.

    New, old and reference log-probs all come from one function, so they differ only if the models do (and by
    rounding). Rows are padded on the right. In a causal model, no token sees what comes after it, so the
    padding needs no attention mask.

    This is the definition. train.py calls it with --plain; otherwise fast/logps.py computes the same numbers,
    up to rounding, in less time and memory. To change the log-prob itself, edit log_probs(): fast/ notices if
    it is no longer the plain log-softmax, and then calls it.
    """
    sequences = [torch.tensor(a.prompt_ids + a.ids) for a in actions]
    x = pad_sequence(sequences, batch_first=True).to(model.device)          # (B, L) padded on the right
    keep = torch.zeros_like(x, dtype=torch.bool)            # (B, L) True where the next token is an action's
    for row, a in zip(keep, actions):
        first = len(a.prompt_ids)                           # place of a's first token; first - 1 predicts it
        row[first - 1 : first - 1 + len(a.ids)] = True
    logits = model(x, use_cache=False).logits[keep]         # (B, L, V) -> (K, V), one action after the other
    y = torch.tensor([token for a in actions for token in a.ids], device=x.device)                  # (K,)
    return log_probs(logits, y, temperature)


def log_probs(logits, y, temperature):
    """log softmax(logits / temperature) at y, always in float32: (K, V), (K,) -> (K,)."""
    logps = (logits.float() / temperature).log_softmax(-1)                  # (K, V)
    return logps.gather(-1, y[:, None]).squeeze(-1)                         # (K,)


def token_weight(action, T, N, num_tokens=None):
    """The three nested means of eq. 5 as the weight of each token of one action: 1/N * 1/T_i * 1/|a|.

    N: the rollouts of the mini-batch (on all GPUs together). T: the turns of this rollout. 1/N stands for
    both means, over questions and over the G rollouts of each. So every rollout weighs the same, and a group
    with a failed rollout weighs less than a whole one. As N counts the whole mini-batch, the losses of the
    micro-batches add up to the loss of the mini-batch.

    1/T_i and 1/|a| are not part of a plain policy gradient: each turn of a short rollout, and each token of a
    short plan, weighs more, right or wrong. With 1/T_i, the gradient (at ρ = 1, leaving 1/|a| aside) is that
    of E[A / T], as if A / T were the reward: quick successes pay more than slow ones, and slow failures cost
    less than quick ones. (A constant baseline b no longer drops out: it adds -b E[1 / T].) This can favour
    the worse of two plans. Say the first plan is X or Y, and A is 1 if right, -1 if wrong:

                      P(right)    turns if right    turns if wrong  mean push A/T
        after plan X    0.6             3                3          0.6/3 - 0.4/3 = 0.07
        after plan Y    0.5             1                3          0.5/1 - 0.5/3 = 0.33

    X is right more often, but Y is pushed up five times as hard, and wins: they compete for probability.

    num_tokens: the tokens of the mini-batch, to weigh all of them equally, as the released code does. Then
    long plans and long rollouts weigh more.
    """
    return 1 / num_tokens if num_tokens else 1 / (N * T * len(action.ids))


def weighted(actions, rollouts, token_mean=False):
    """The actions of a mini-batch of these rollouts, with the weight of each of their tokens: [Action].

    If an engine returns an action without tokens, it is left out, but still counts in T_i and N."""
    actions = [a for a in actions if a.rollout in rollouts]
    turns = Counter(a.rollout for a in actions)                             # turns[i] = T_i
    tokens = sum(len(a.ids) for a in actions) if token_mean else None
    return [replace(a, weight=token_weight(a, turns[a.rollout], len(rollouts), tokens))
            for a in actions if a.ids]


def split_rollouts(groups, minibatches, seed):
    """Rollouts 0..N-1 as `minibatches` lists of equal size (± 1). groups: the group of each, N ints.

    The groups, in shuffled order, are laid out one after the other and cut into equal parts: none is divided
    if all have the same size and `minibatches` divides their number. (Copies of a prompt are cheaper
    together, see fast/trees.py.) A rollout is never divided."""
    groups = torch.as_tensor(groups).tolist()
    distinct, N = sorted(set(groups)), len(groups)
    places = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed)).tolist()
    place = dict(zip(distinct, places))                                     # of each group in the new order
    rollouts = sorted(range(N), key=lambda i: place[groups[i]])             # a group stays together
    return [rollouts[N * k // minibatches : N * (k + 1) // minibatches] for k in range(minibatches)]


def per_token(actions, values):
    """One value for each action -> one for each token: (K,)."""
    return torch.tensor(values).repeat_interleave(torch.tensor([len(a.ids) for a in actions]))


def loss(logp, logp_old, logp_ref, A, weight, clip, beta):
    """-J of eq. 5 for K action tokens -> loss (), ratio (K,), kl (K,). logp_ref=None: no KL.

    Tensors are (K,); only logp carries a gradient. At ρ = 1 the gradient of `ratio * A` is A ∇log π.

    Why a ratio? We want a large mean of A over rollouts of π_θ, but these were sampled with π_θold. A rollout
    that π_θ makes twice as likely should count twice. That factor is the product of the ratios of all tokens
    of its plans. But a product of hundreds of ratios is very noisy. So PPO gives each token only its own
    ratio. At π_θ = π_θold the sum of these ratios has the same gradient as the product. Further away the
    approximation gets worse, so the clip removes the incentive to go further:

        A > 0    the gain grows with ρ up to 1+ε', and is flat above
        A < 0    the gain grows as ρ falls to 1-ε, and is flat below; if ρ rises, it falls without limit

    The KL is estimated token by token as k3 = r - log r - 1, with r = π_ref / π_θ. It is never negative, and
    its mean over tokens drawn from π_θ is KL(π_θ ‖ π_ref). But the mean of its gradient is the gradient of
    the KL with its arguments exchanged, KL(π_ref ‖ π_θ), which has the same minimum (docs/fork.md, "Another
    KL"). As the tokens were drawn from π_θold, both statements are exact at ρ = 1 only.

    Add a term of your own to `terms`. If it needs π_ref, or tokens with A = 0, or a flag: docs/fork.md,
    "Another term in the objective".

    The value of the loss does not measure learning: with the three means it is -1/N Σ_i A_i (plus β KL) at
    ρ = 1, and the A of a whole group add up to 0, whatever its rewards.
    """
    low, high = clip                                                        # ε, ε'
    ratio   = (logp - logp_old).exp()                                       # ρ
    clipped = ratio.clamp(1 - low, 1 + high)                                # clip(ρ, 1-ε, 1+ε')
    gain    = torch.min(ratio * A, clipped * A)                             # min(ρ A, clip(ρ) A)
    kl      = torch.zeros_like(logp)
    if logp_ref is not None:
        kl  = (logp_ref - logp).exp() - (logp_ref - logp) - 1               # KL (k3), never negative
    terms   = gain - beta * kl                                              # + a term of yours, (K,)
    return -(terms * weight).sum(), ratio.detach(), kl.detach()             # -1/N Σ_i 1/T_i Σ_t 1/|a| Σ_j


def simple_update(model, reference, optimizer, actions, groups, temperature, clip, beta, minibatches,
                  max_grad_norm, seed):
    """Train the policy on one batch of rollouts, in `minibatches` optimiser steps.

    Read this first. train.py calls update() instead, also with --plain; a test shows that both take the same
    steps, except that update() takes none where the gradient is bad, or 0. Here, a whole mini-batch must fit
    into memory, on one device. model and reference: in eval mode. The other arguments are those of update().

    π_θold is the model before the first step: so all mini-batches are scored before it.
    """
    minis = [weighted(actions, rollouts) for rollouts in split_rollouts(groups, minibatches, seed)]
    with torch.no_grad():
        old = [token_logps(model, mini, temperature) for mini in minis]                     # (K,) each
    for mini, logp_old in zip(minis, old):
        with torch.no_grad():
            logp_ref = token_logps(reference, mini, temperature)                            # (K,)
        logp   = token_logps(model, mini, temperature)                                      # (K,)
        A      = per_token(mini, [a.A for a in mini]).to(logp.device)                       # (K,)
        weight = per_token(mini, [a.weight for a in mini]).to(logp.device)                  # (K,)
        minus_J, ratio, kl = loss(logp, logp_old, logp_ref, A, weight, clip, beta)
        model.zero_grad()
        minus_J.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()


# ------------------------------------------------------------------- the same update, for large models
def check_actions(actions, num_rollouts, temperature):
    """ValueError for what would be a silent mistake in the objective."""
    if any(not 0 <= a.rollout < num_rollouts for a in actions):
        raise ValueError(f"an Action.rollout is outside 0..{num_rollouts - 1}: "
                         "renumber the rollouts that are left")
    if not all(a.prompt_ids for a in actions):
        raise ValueError("an action without a prompt: nothing predicts its first token")
    if temperature <= 0:
        raise ValueError("temperature must be > 0: a greedy planner has no distribution to train")


def score_old(passes, actions, temperature):
    """Set Action.logp_old, log π_θold of each token. Call it while the model is π_θold."""
    for micro in passes.micro_batches(actions):
        with torch.no_grad():
            logps = passes.policy_logps(micro, temperature)                                 # (K,)
        for a, logp in zip(micro, logps.split([len(a.ids) for a in micro])):
            a.logp_old = logp                                                               # (|a|,)


def old_or_current(actions, logp):
    """log π_θold of each token, (K,): Action.logp_old, or where that is None, the current log-prob, detached.

    It is None in two cases, and then ρ becomes 1: in the first mini-batch, where this is exact, because π_θ
    still is π_θold; and at A = 0, where it does no harm, because ρ A is 0 anyway."""
    current = logp.detach().split([len(a.ids) for a in actions])            # (|a|,) each
    old = [now if a.logp_old is None else a.logp_old for a, now in zip(actions, current)]
    return torch.cat(old)                                                   # (K,)


def set_gradient(passes, report, actions, temperature, clip, beta):
    """Set .grad to the gradient of -J of a mini-batch: those of its micro-batches add up.

    It begins by clearing all that it sets, because passes.retry() calls it again if memory runs out."""
    passes.model.zero_grad()
    report.begin_mini_batch()
    for micro in passes.micro_batches(actions):
        add_gradient(passes, report, micro, temperature, clip, beta)


def add_gradient(passes, report, micro, temperature, clip, beta):
    """Add the gradient of -J of a micro-batch to .grad."""
    logp_ref = passes.reference_logps(micro, temperature) if beta else None                 # (K,)
    logp     = passes.policy_logps(micro, temperature)                                      # (K,)
    logp_old = old_or_current(micro, logp)                                                  # (K,)
    A        = per_token(micro, [a.A for a in micro]).to(logp.device)                       # (K,)
    weight   = per_token(micro, [a.weight for a in micro]).to(logp.device)                  # (K,)
    minus_J, ratio, kl = loss(logp, logp_old, logp_ref, A, weight, clip, beta)
    minus_J.backward()
    report.add_micro_batch(micro, minus_J, logp, ratio, kl, A, weight, clip)    # for the log and the check


def update(passes, optimizer, actions, groups, *, temperature, clip=(0.2, 0.3), beta=0.001, minibatches=1,
           max_grad_norm=1.0, token_mean=False, seed=0):
    """Train the policy on one batch of rollouts, in `minibatches` optimiser steps -> the metrics that
    scale/report.py describes. This is simple_update(), but

      * a mini-batch is computed in micro-batches, as much as fits into memory; their gradients add up;
      * in the first mini-batch, the model is still π_θold: its log-probs, detached, serve as the old ones;
      * actions with A = 0 have no gain. With a KL, they are still scored, for the KL alone, and ρ is set to
        1; without one, they are left out, but still count in N and T;
      * a mini-batch with a bad gradient, or with none, takes no step;
      * the KL can be left out, and tokens can weigh the same (token_mean).

    passes: Passes(model, reference, token_logps, ...) of scale/passes.py. It has
      model, reference                the policy, and π_ref or None
      around_update                   a context that the caller enters (train.py: run.updating)
      begin, end                      prepare the models for training, and for sampling again
      policy_logps, reference_logps   token_logps() of the two models, or the same from fast/
      micro_batches                   a mini-batch in parts that fit into memory
      retry(f, *x)                    f(*x); if memory runs out, again, with smaller micro-batches
      share, sum_gradients            for several GPUs; with one process, they change nothing
    actions: list[Action], all turns of all rollouts, in any order. groups: the group of each rollout, (N,);
    Action.rollout is an index into it.
    temperature: that of sampling. clip: (ε, ε'). beta: the weight of the KL; with 0, or without a reference,
    there is no forward pass for it. minibatches: the number of optimiser steps. max_grad_norm: longer
    gradients are scaled down to this norm. token_mean: see token_weight(). seed: shuffles the groups.
    """
    model = passes.model
    beta = beta if passes.reference is not None else 0
    check_actions(actions, len(groups), temperature)
    # Dropout off, gradient checkpointing on if asked for. The report (scale/report.py) adds up the loss of
    # each mini-batch, which must be finite for a step (below); all else in it is only for the log.
    report = passes.begin()

    minis = []                      # the actions of each mini-batch
    for rollouts in split_rollouts(groups, minibatches, seed):
        # weighted() comes first, so N and T are those of the whole mini-batch: they also count actions that
        # are on other GPUs, or left out here
        mini = passes.share(weighted(actions, rollouts, token_mean))
        if not beta:  # then actions with A = 0 have no gradient (for a term of yours, see docs/fork.md)
            mini = [a for a in mini if a.A != 0]
        minis.append(mini)

    # The old log-probs of all mini-batches but the first, while the model still is π_θold. minis[0] needs no
    # pass of its own: in its step, the current log-probs are the old ones.
    for mini in minis[1:]:
        need_old = [a for a in mini if a.A != 0]        # at A = 0, there is no ρ in the loss
        passes.retry(score_old, passes, need_old, temperature)

    for mini in minis:                                  # one optimiser step each
        passes.retry(set_gradient, passes, report, mini, temperature, clip, beta)
        passes.sum_gradients()                          # over all processes
        loss_value = report.end_mini_batch()            # -J of the mini-batch, over all processes
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item()     # before clipping
        # one bad mini-batch must not end the run
        finite = math.isfinite(loss_value) and math.isfinite(norm)
        skipped = not finite or norm >= EXPLODED * max_grad_norm
        # No step if the gradient is exactly 0: AdamW's momentum would still move θ. Without a KL, this is a
        # mini-batch of flat groups. With one, only while the policy is still π_ref: later, even such a
        # mini-batch takes a step, by the KL and by the momentum.
        taken = norm > 0 and not skipped
        if taken:
            optimizer.step()
        report.add_step(norm, skipped, taken)
    passes.end()                                        # the model can sample again
    return report.summary()
