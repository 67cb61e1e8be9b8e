"""The warm start of a pretrained planner: it learns the format of a plan, and not which tool does what.

    python experiments/warm.py --model runs/SmolLM2-135M-Instruct --out runs/warm
    python experiments/warm.py --model runs/SmolLM2-135M-Instruct --toy hops --out runs/warm-hops
    python experiments/warm.py --model runs/warm-hops/best --toy hops --roles all --out runs/warm-all

A small instruct model writes no plan that can be parsed, so all its groups are flat and Flow-GRPO learns
nothing. Here it imitates a few hundred plans of a toy's teacher (toy/teacher.py, toy/hops/teacher.py), which
picks its tools blindly, and in the second toy's world the sub-goal and context, too; the toy plays all other
modules. Each plan is shown with each tool, so the model learns to ignore the sub-goal when it names the tool.
The prompts go through the model's own chat template and tokenizer, and the loss is the cross-entropy of the
plans' tokens alone. The learning rate falls to 0 in a straight line, so that the last few examples do not tip
the balance between the tools. At the end a check on other questions says if nine tenths of the sampled plans
parse and all tools are about equally likely.

With --roles all the model also learns to play the other modules, which the teacher plays without mistakes:
then one model can be the planner, and its frozen copy the other modules. (base_generator is not taught: in
the second toy's world, the toy's small model for that tool goes on.)

The first toy's questions come in many wordings (wordings.py): a planner that is warm-started in one wording
copies it into every plan. The second toy's are about a world that is drawn for the warm start alone.
"""

import argparse
import random
import re
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from logbook import endings

endings.without_traceback(__name__)

import torch

import executor
import generator
import planner
import solve
import verifier
from cli.flags import HOPS, TOY, TOY_TOOLS
from experiments import wordings
from fast import logps
from flow_grpo import Action, log_probs, token_logps, update
from models.loading import load_engine
from scale import sharding
from scale.lockstep import make_passes
from tools import TOOLS
from toy.hops import questions as hops_questions
from toy.hops import teacher as hops_teacher
from toy.make import write_rows
from toy.questions import for_flow
from toy.teacher import Teacher
from world.toolbox import choose

ROLLOUTS, PLANS, CHECKED = 400, 8, 24  # of the teacher; plans of a step; questions of the check
PROMPTS = {"planner": planner.PROMPT, "executor": executor.PROMPT, "verifier": verifier.PROMPT,
           "generator": generator.PROMPT, "analysis": planner.ANALYSIS_PROMPT}
ALL = {"planner": 3, "executor": 3, "verifier": 6, "generator": 3, "analysis": 1}  # --roles all: of a step
ENOUGH = 0.9  # share of the sampled plans that should parse, and of the other texts that should be right
BLIND = 0.07  # how far the share of each tool may be from an equal one


@dataclass
class Lessons:
    """What a planner is warm-started on."""

    toy: Path  # the checkpoint that plays the other modules, and base_generator if nothing else does
    tools: dict
    max_turns: int
    teacher: object  # the blind one, for all these questions
    made: list  # questions, as the toy's questions.py makes them
    others: list  # of the check
    base_generator: object = None  # in the second toy's world the teacher, which knows the new names
    with_context: float | None = None  # the share of plans that have a context; None: as they come

    def modules(self, device=None):
        """{module: engine} for solve.roll_out()."""
        modules = {"default": load_engine(str(self.toy), device)}
        return modules | ({"base_generator": self.base_generator} if self.base_generator else {})


def of_the_first_toy(seed):
    made = wordings.training(ROLLOUTS, seed)
    others = wordings.training(CHECKED, 1_000 + seed, [one["question"] for one in made])
    teacher = Teacher(made + others, blind=random.Random(seed))
    return Lessons(TOY, choose(TOOLS, TOY_TOOLS, TOY / "corpus.jsonl"), 3, teacher, made, others)


def of_the_second_toy(seed):
    """Half of the teacher's plans are perfect, though all that it shows are blind: so there are memories in
    which much is known, too.

    Only one plan in five has a context to copy (an address, a calculation). Taken as they come, they taught
    SmolLM2 too little: it copied the address in a third of its plans, and named web_search in a fifth of
    those. So a search was hardly ever followed by the page it names."""
    world = hops_questions.World(f"warm start of a language model {seed}")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        write_rows(corpus, world.rows)
        tools = choose(TOOLS, list(hops_teacher.TOOLS), corpus)
    made, others = world.questions(ROLLOUTS, "train", seed), world.questions(CHECKED, "test", seed)
    teacher = hops_teacher.Teacher(made + others, world.renamed, blind=random.Random(seed), guided=0.5)
    return Lessons(HOPS, tools, hops_questions.MAX_TURNS, teacher, made, others, base_generator=teacher,
                   with_context=0.5)


LESSONS = {"first": of_the_first_toy, "hops": of_the_second_toy}


def examples(lessons, made, fixed):
    """{module: [(prompt, text)]}: what the teacher reads and writes in rollouts on these questions, with real
    tools. fixed: who plays the other modules; those that the teacher plays are in the examples."""
    lessons.teacher.examples.clear()
    solve.evaluate(for_flow(made), lessons.teacher, fixed, lessons.tools, max_turns=lessons.max_turns)
    found = defaultdict(list)
    for prompt, text in dict.fromkeys(lessons.teacher.examples):
        for module, known in PROMPTS.items():
            if prompt.startswith(known[:40]):
                found[module].append((prompt, text))
    return found


def shown_in_a_step(found, roles, lessons, rng):
    """[(prompt, [text])]: what a step imitates.

    A plan comes once with each tool: so it teaches that all are equally likely, whatever is planned."""
    counts = ALL if roles == "all" else {"planner": PLANS}
    plans = taken(found["planner"], counts["planner"], lessons.with_context, rng)
    shown = [(prompt, [f"{plan.rpartition('Tool: ')[0]}Tool: {tool}" for tool in sorted(lessons.tools)])
             for prompt, plan in plans]
    for module, count in counts.items():
        if module != "planner":
            shown += [(prompt, [text]) for prompt, text in spread(found[module], count, rng)]
    return shown


def taken(found, count, with_context, rng):
    """`count` of the examples, at random; the share with_context of them have a context."""
    if with_context is None:
        return rng.sample(found, count)
    filled = [example for example in found if "\nContext: none\n" not in example[1]]
    bare = [example for example in found if "\nContext: none\n" in example[1]]
    often = round(with_context * count)
    return rng.sample(filled, often) + rng.sample(bare, count - often)


def spread(found, count, rng):
    """`count` examples, in which rare cases are as likely as common ones. A case: the tool of a call, or the
    first line of another text, with the objective and the last tool that its prompt shows. (Taken as they
    come, few verdicts would be STOP, and hardly any about one number that has just been calculated: there
    SmolLM2 wrote CONTINUE, and then "unknown" as the answer.)"""
    alike = defaultdict(list)
    for prompt, text in found:
        shown = re.findall(r"\n(?:Objective|Tool): (.*)", prompt)
        alike[text.splitlines()[0].partition("(")[0], *shown[:1], *shown[-1:]].append((prompt, text))
    return [rng.choice(alike[rng.choice(sorted(alike))]) for _ in range(count)]


def actions_of(engine, shown):
    """The texts as Actions: in the loss are the tokens of each text and its stop token, and no others.

    The texts after one prompt are the turns of one rollout, and weigh as much as one text together."""
    encode, end = engine.tokenizer.encode, [engine.tokenizer.eos_token_id]
    return [Action(engine.chat.encode(prompt), encode(text, add_special_tokens=False) + end, n, A=1.0)
            for n, (prompt, texts) in enumerate(shown) for text in texts]


def learn(engine, optimizer, actions, token_budget=4096):
    """One step of cross-entropy, the mean over examples, texts and tokens: -log π a token before the step.

    At ρ = 1 the gradient of Flow-GRPO's objective with A = 1 is that of the log-likelihood."""
    scoring = logps.scoring(log_probs, engine.model)
    passes = make_passes(engine.model, None, *scoring, token_budget=token_budget)
    rollouts = range(1 + max(action.rollout for action in actions))
    numbers = update(passes, optimizer, actions, rollouts, temperature=1.0)
    return numbers["entropy"]  # of on-policy tokens it estimates the entropy; here it is the mean -log π


@torch.no_grad()
def probabilities(engine, planned, tools, temperature=0.7):
    """{tool: the probability with which a sampled plan names it}, the mean over these rollouts."""
    encode = partial(engine.tokenizer.encode, add_special_tokens=False)
    means = dict.fromkeys(sorted(tools), 0.0)
    for rollout in planned:
        before = engine.chat.decode(rollout.plans[0].ids).rpartition("Tool:")[0] + "Tool:"
        prompt_ids = rollout.plans[0].prompt_ids + encode(before)
        logps = [token_logps(engine.model, [Action(prompt_ids, encode(f" {tool}"), 0)], temperature).sum()
                 for tool in means]
        for tool, share in zip(means, torch.stack(logps).softmax(0).tolist()):
            means[tool] += share / len(planned)
    return means


def check(engine, lessons, fixed):
    """{"plans": share of the sampled plans of first turns that parse, tool: its probability in those}"""
    torch.manual_seed(0)
    planned = solve.roll_out(for_flow(lessons.others), engine, fixed, lessons.tools, max_turns=1,
                             max_new_tokens=80)
    parsed = [rollout for rollout in planned if isinstance(rollout.plan, planner.Plan)]
    shares = probabilities(engine, parsed, lessons.tools) if parsed else {}
    return {"plans": len(parsed) / len(planned)} | shares


def check_others(engine, found):
    """{module: the share of its texts, decoded greedily, that are the teacher's}, of all but the planner."""
    shares = {}
    for module in ALL.keys() - {"planner"}:
        some = spread(found[module], CHECKED, random.Random(0))
        written = engine([prompt for prompt, _ in some], max_new_tokens=80)
        shares[module] = sum(c.text.strip() == text for c, (_, text) in zip(written, some)) / CHECKED
    return dict(sorted(shares.items()))


def good_enough(numbers, tools):
    """Do the plans parse, are the tools still blind, and are the other modules' texts right?"""
    blind = all(abs(numbers.get(tool, 1) - 1 / len(tools)) <= BLIND for tool in tools)
    return blind and all(numbers.get(name, 1) >= ENOUGH for name in ("plans", *ALL))


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    add = parser.add_argument
    add("--model", required=True, help="folder or hub name of an instruct model")
    add("--toy", choices=LESSONS, default="first", help="whose world and teacher: toy/, or toy/hops/")
    add("--roles", choices=["planner", "all"], default="planner", help="the modules that it learns to play")
    add("--steps", type=int, default=40, help="steps: as few as suffice")
    add("--lr", type=float, default=1.5e-4, help="learning rate of AdamW at the first step")
    add("--device", help="cuda, mps or cpu; None: the first there is")
    add("--dtype", help="float32, bfloat16, ...; None: bfloat16 on cuda, float32 elsewhere")
    add("--seed", type=int, default=0, help="decides everything random")
    add("--out", type=Path, required=True, help="the run's folder: best/ is the checkpoint")
    args = parser.parse_args()
    lessons = LESSONS[args.toy](args.seed)
    engine = load_engine(args.model, args.device, args.dtype)
    fixed = lessons.modules(args.device)
    sharding.shard(engine.model)  # in bfloat16 it trains float32 masters
    optimizer = sharding.adamw(engine.model, args.lr)
    players = dict.fromkeys(fixed, lessons.teacher) if args.roles == "all" else fixed
    found = examples(lessons, lessons.made, players)
    for step in range(1, args.steps + 1):
        shown = shown_in_a_step(found, args.roles, lessons, random.Random(f"{args.seed} {step}"))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - (step - 1) / args.steps)
        loss = learn(engine, optimizer, actions_of(engine, shown))
        print(f"step {step}/{args.steps} | loss {loss:.3f}", flush=True)
    sharding.gather(engine.model)
    numbers = check(engine, lessons, fixed)
    if args.roles == "all":
        numbers |= check_others(engine, examples(lessons, lessons.others, players))
    print(" | ".join(f"{name} {value:.3g}" for name, value in numbers.items()))
    if not good_enough(numbers, lessons.tools):
        print("Not as it should be: try more --steps")
    engine.save(args.out / "best")


if __name__ == "__main__":
    main()
