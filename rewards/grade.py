"""Is a rollout's answer right, and what is its reward R? Rules decide, or a judge if they cannot.

    the rules decide                             right or not    trained on
    the rules cannot, and there is no judge      not right       trained on
    the rules cannot, and the judge decides      right or not    trained on (`judged`)
    the judge answers without a verdict          not right       `undecided`: left out of training
    the judge does not answer                    not right       `failed`: left out of training

With the gold answer "26", for example, the rules call "26.0" right and "27" not right, and cannot
decide on "about 26". With "Paris" they call "paris" right, and cannot decide on "London".

To train on another reward, change reward(). Accuracy, and with it the choice of best/ and all
comparisons, remains the share of right answers.
"""

import math
import time

from rewards import rules
from rewards.judge import verdicts_on
from world.mistakes import Mistake


def reward(rollout):
    """R of a rollout: here 1 or 0.

    A reward of yours may use the fields of solve.Rollout: `right`, `answer`, `question` (with its
    gold answer), `memory`, `plans` (one a turn, parsed) and `sampled`, what the planner wrote; not
    `seconds`, which rollouts of a batch share. `step.error`, for each step of rollout.memory.steps,
    says whether a plan or call could not be read, or a tool answered "Error: ...". To prefer short
    rollouts among the right ones, for example:

        rollout.right * (1 - 0.05 * (len(rollout.plans) - 1))

    Keep nothing between calls, such as a running mean: evaluations call it, too, and each GPU for
    its own rollouts. Do that in train.py's one_step().

    Beware: where the rewards of a group differ only by such a cost, its size cancels out, because
    eq. 7 divides by their standard deviation. docs/use.md, "Grading", has an example.
    """
    return float(rollout.right)


def grade(rollouts, judge=None):
    """Set `right` and `reward` of every rollout that has not failed. judge: an engine, or None."""
    answered = [rollout for rollout in rollouts if not rollout.failed]
    in_doubt = []
    for rollout in answered:
        verdict = rules.decide(rollout.question, rollout.answer)  # True, False, or None: in doubt
        rollout.right = verdict is True
        if verdict is None:
            in_doubt.append(rollout)
    if judge:
        let_judge_decide(judge, in_doubt)
    for rollout in answered:
        rollout.reward = float(reward(rollout))
        if not math.isfinite(rollout.reward):  # it would make every weight NaN
            where = f"rewards/grade.py: reward() is {rollout.reward} for the question "
            raise Mistake(f"{where}{rollout.question.question[:80]!r}: it must be finite.")


def let_judge_decide(judge, rollouts):
    """Set `right` and `judged` by the verdict; without one `undecided`, or `failed` by an error."""
    start = time.perf_counter()
    results = verdicts_on([(rollout.question, rollout.answer) for rollout in rollouts], judge)
    seconds = time.perf_counter() - start
    for rollout, (verdict, completion) in zip(rollouts, results, strict=True):
        rollout.right = verdict is True
        rollout.judged = verdict is not None
        rollout.undecided = verdict is None and not completion.error
        if completion.error:
            rollout.failed = f"judge: {completion.error}"
        rollout.seconds += seconds / len(rollouts)
        numbers = completion.tokens, seconds, completion.cut, len(completion.ids)
        rollout.add_output(len(rollout.plans), "judge", completion.text, *numbers)
