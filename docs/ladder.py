"""Flow-GRPO without a language model: the planner is a table. docs/ladder.md climbs it.

A question needs STATES tools in the right order. The state counts those that have worked, as a
planner sees it in the last result. In state s only tool s works, and leads to state s + 1. Any
other tool costs the turn. R is 1 if all states are passed within TURNS turns. An action is one
token, the tool. advantages(), token_weight() and loss() are those that train.py uses.
"""

import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from flow_grpo import Action, advantages, loss, token_weight

STATES, TOOLS, TURNS = 3, 4, 5
GUESS, LUCK = None, 0  # a tool that guesses the answer, and how often it is right
QUESTIONS, GROUP = 16, 8  # of a batch; rollouts of each question
RATE, PASSES = 0.1, 1  # the learning rate; optimiser steps on each batch
CLIP, BETA = (0.2, 0.3), 0
SHARED = 0  # how strong the habits are, logits that all states share


def roll_out(pi, dice):
    """Try a question once -> [(state, tool)] of its turns, and whether the answer is right."""
    turns, state = [], 0
    while state < STATES and len(turns) < TURNS:
        [tool] = dice.choices(range(TOOLS), pi[state])
        turns.append((state, tool))
        if tool == state:
            state += 1
        elif tool == GUESS and state >= 0:  # in state -1, after a wrong guess, nothing works
            state = STATES if dice.random() < LUCK else -1
    return turns, state == STATES


def train(seed, steps=30):
    """Train a table -> the share of right answers in the batch of each step."""
    dice, N, shares = random.Random(seed), QUESTIONS * GROUP, []
    table = torch.zeros(STATES + 1, TOOLS, dtype=torch.float64, requires_grad=True)
    habits = torch.zeros(TOOLS, dtype=torch.float64, requires_grad=True)
    log_pi = lambda: (table + SHARED * habits).log_softmax(-1)  # (STATES + 1, TOOLS)
    reference, optimizer = log_pi().detach(), torch.optim.Adam([table, habits], lr=RATE)
    for _ in range(steps):
        old = log_pi().detach()
        rollouts = [roll_out(old.exp().tolist(), dice) for _ in range(N)]
        shares.append(sum(right for turns, right in rollouts) / N)
        R = [float(right) for turns, right in rollouts]
        A, _ = advantages(R, [i // GROUP for i in range(N)])
        actions, weight = [], []
        for i, (turns, _) in enumerate(rollouts):
            for t, (state, tool) in enumerate(turns):
                actions.append(Action([state], [tool], i, A=A[i].item(), turn=t))
                weight.append(token_weight(actions[-1], len(turns), N))
        at = torch.tensor([a.prompt_ids + a.ids for a in actions]).unbind(1)  # (K,) states, tools
        A, weight = torch.tensor([a.A for a in actions]), torch.tensor(weight)  # (K,), (K,)
        for _ in range(PASSES):
            logps = log_pi()[at], old[at], reference[at]  # (K,) each
            optimizer.zero_grad()
            loss(*logps, A, weight, clip=CLIP, beta=BETA)[0].backward()
            if table.grad.any():  # as in update(): else momentum alone would move the table
                optimizer.step()
    return shares


if __name__ == "__main__":
    seeds = [train(seed) for seed in range(5)]
    for step in 10, 20, 30:
        print(f"step {step}:", *(f"{shares[step - 1]:.2f}" for shares in seeds))
