"""The work that bench/speed.py compares: done by this project, and by a peer. One process does one of them.

    python bench/peers.py ours CHECKOUT '{"work": "update", "vocabulary": 1024, ...}'

speed.py starts such processes and lets them work in turn. A process prepares its work, does it once to warm
up, and says so; then it does the work again for each line that it reads, and writes what it cost.

    ours       flow_grpo.update() and the engine models.local.HF of that CHECKOUT; without fast/ if the case
               is "plain"
    trl        TRL's GRPOTrainer.train() as it is shipped; for "update" its rollouts are given to it

Both sides have the same weights and the same prompts, and sample the same number of tokens: the id of the
stop token is outside the vocabulary of the model. For "update" they have the same tokens and advantages, and
the warm-up returns a few projections of the gradient, which speed.py compares.
"""
import argparse
import json
import os
import random
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = sys.argv[2:3]        # before bench/, which has a memory.py of its own
sys.path.append(str(REPO))              # bench/meter.py, which an older checkout does not have
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from transformers.utils import logging

from bench.meter import Meter

LR = 1e-6


def on_gpu(case):
    return case.get("device", "cpu") != "cpu"


def model_of(case, dtype=torch.float32):
    """A small Qwen2 with random weights, the same in each process; for card.py, "size" names a public shape,
    with gradient checkpointing on both sides."""
    torch.manual_seed(0)
    if "size" in case:
        from bench.memory import config  # not at the top: TRL's environment may lack what it imports
        with torch.device(case["device"]):
            model = Qwen2ForCausalLM._from_config(config(case["size"]), dtype=dtype).eval()
        model.activation_checkpointing_enable()
        return model
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=case["vocabulary"], hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None)).eval()


def tokens(case, number, seed):
    return random.Random(seed).choices(range(1, case["vocabulary"]), k=number)


def batch_of(case):
    """(prompts, completions, advantages) of all rows: `groups` prompts, each with `group` completions."""
    prompts = [tokens(case, case["prompt"], group) for group in range(case["groups"])]
    rows = [prompt for prompt in prompts for _ in range(case["group"])]
    completions = [tokens(case, case["new"], 1000 + row) for row in range(len(rows))]
    return rows, completions, [(-1.0) ** row * (1 + row % 3) / 2 for row in range(len(rows))]


def projections(model):
    """The gradient, projected on three random directions."""
    noise = torch.Generator().manual_seed(0)
    sums = torch.zeros(3)
    for weight in model.parameters():
        for k in range(3):
            sums[k] += (weight.grad.cpu() * torch.randn(weight.shape, generator=noise)).sum()
    return sums.tolist()


def reward(ids):
    """Any number that differs between the completions of a group: no group is flat."""
    return float(sum(ids))


# ---------------------------------------------------------------------------------------------- this project
class Watched:
    """The optimizer; before its first step it projects the gradient."""

    def __init__(self, model, case):
        self.case, self.model, self.gradient = case, model, None
        self.optimizer = torch.optim.AdamW(     # as train.py's
            model.parameters(), lr=LR, weight_decay=0.0, fused=on_gpu(case) or None)

    def step(self):
        if not on_gpu(self.case):       # there the sides do not compute in the same dtype
            self.gradient = self.gradient or projections(self.model)
        self.optimizer.step()


def learning(model, case):
    """learn(optimizer, actions, A): an update, fast or plain, with an action a rollout."""
    import flow_grpo
    from fast import logps
    from scale.lockstep import make_passes
    plain = case.get("plain")
    how = (flow_grpo.token_logps,) if plain else logps.scoring(flow_grpo.log_probs, model)
    passes = make_passes(model, None, *how)

    def learn(optimizer, actions, A):
        actions = [replace(action, A=float(value)) for action, value in zip(actions, A, strict=True)]
        return flow_grpo.update(passes, optimizer, actions, range(len(actions)), temperature=1.0, beta=0)
    return learn


def ours_update(case):
    from flow_grpo import Action
    model = model_of(case)
    learn = learning(model, case)
    optimizer, (prompts, completions, A) = Watched(model, case), batch_of(case)
    actions = [Action(prompt, ids, row) for row, (prompt, ids) in enumerate(zip(prompts, completions))]

    def work():
        learn(optimizer, actions, A)
        return {"tokens": sum(len(action.ids) for action in actions), "gradient": optimizer.gradient}

    return work


def engine_of(model, **way):
    """An engine whose prompts are tuples of token ids. It has no stop token, so all rows are equally long."""
    from models.local import HF
    engine = HF(model, tokenizer=None, **way)
    engine.chat = SimpleNamespace(encode=list, decode=lambda ids, prompt_ids: "", stops=[])
    return engine


def ours_step(case):
    from flow_grpo import Action, advantages
    model, released = model_of(case, torch.bfloat16 if on_gpu(case) else torch.float32), nullcontext
    if on_gpu(case):        # as train.py there
        from scale import sharding
        sharding.shard(model)
        sharding.gather(model)
        released = sharding.released
    learn = learning(model, case)
    engine, optimizer = engine_of(model, plain=case.get("plain", False)), Watched(model, case)
    prompts = [tuple(prompt) for prompt in batch_of(case)[0]]

    def work():
        completions = engine(prompts, 1.0, case["new"])
        rows = [completion.ids for completion in completions]
        A, _ = advantages([reward(ids) for ids in rows], [row // case["group"] for row in range(len(rows))])
        actions = [Action(list(prompt), ids, row) for row, (prompt, ids) in enumerate(zip(prompts, rows))]
        with released(model):
            learn(optimizer, actions, A)
        return {"tokens": sum(map(len, rows))}

    return work


def ours_generate(case):
    engine = engine_of(model_of(case), plain=case.get("plain", False))
    prompts = [tuple(prompt) for prompt in batch_of(case)[0]]
    return lambda: {"tokens": sum(len(completion.ids) for completion in engine(prompts, 1.0, case["new"]))}


# ------------------------------------------------------------------------------------------------- the peer
def trl(case, turns):
    """GRPOTrainer.train(), whose steps are the work. On a CPU checkpointing and bfloat16 are off, as in ours;
    on a GPU its weights are float32 and it computes in bfloat16, as ours."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    rows, done = case["groups"] * case["group"], {}

    def rewards(completion_ids, **_):
        done["tokens"] = sum(map(len, completion_ids))
        return [reward(ids) for ids in completion_ids]

    class EachStep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            if case["work"] == "update" and "gradient" not in done:
                done["gradient"] = projections(model)

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = not turns.next(done)

    texts = [" ".join(map(str, prompt)) for prompt in batch_of(case)[0][::case["group"]]]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=rows, num_generations=case["group"],
            max_completion_length=case["new"], beta=0.0, learning_rate=LR, lr_scheduler_type="constant",
            temperature=1.0, max_steps=10**6, use_cpu=not on_gpu(case), bf16=on_gpu(case),
            gradient_checkpointing="size" in case, report_to="none", save_strategy="no", disable_tqdm=True)
        trainer = GRPOTrainer(
            model=model_of(case), reward_funcs=rewards, args=settings, callbacks=[EachStep()],
            train_dataset=Dataset.from_dict({"prompt": texts}), processing_class=tokenizer_of(case))
        if case["work"] == "update":
            trainer._generate_and_score_completions = lambda _: given(case)
            done["tokens"] = rows * case["new"]
        trainer.train()


def given(case):
    """A batch of rollouts as GRPOTrainer's own method returns it."""
    prompts, completions, A = map(torch.tensor, batch_of(case))
    return {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": completions,
            "completion_mask": torch.ones_like(completions), "advantages": A,
            "num_items_in_batch": torch.tensor(completions.numel())}


def tokenizer_of(case):
    """The word "17" is token 17; the stop token is one that the model does not have."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = {str(number): number for number in range(case["vocabulary"])} | {"<stop>": case["vocabulary"]}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<stop>", pad_token="0")


# ----------------------------------------------------------------------------------------------- the process
class Turns:
    """Waits before each repetition until it is asked for, and writes what the last one cost."""

    def __init__(self, channel):
        self.channel, self.meter = channel, Meter()

    def next(self, done):
        """False: there is no other turn. done: what the work of this one was. On a GPU, peak is the GPU's."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        cost = self.meter.cost()
        if torch.cuda.is_initialized():
            cost["peak"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        print(json.dumps(done | cost), file=self.channel, flush=True)
        line = sys.stdin.readline()
        self.meter = Meter()
        return line != ""       # "": speed.py has closed the pipe


WORKS = {"update": ours_update, "step": ours_step, "generate": ours_generate}


def main(peer, case):
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)       # what libraries print is not an answer
    logging.disable_progress_bar()
    turns = Turns(channel)
    if peer == "trl":
        return trl(case, turns)
    work = WORKS[case["work"]](case)
    turns.meter = Meter()
    while turns.next(work()):
        pass


if __name__ == "__main__":
    settings = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__, **settings)
    parser.add_argument("peer", choices=["ours", "trl"])
    parser.add_argument("checkout", help="the project's folder whose code is measured")
    parser.add_argument("case", type=json.loads, help="the work and its sizes, in JSON (speed.py)")
    args = parser.parse_args()
    main(args.peer, args.case)
