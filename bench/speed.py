"""How fast this project is beside a naive update and TRL: the same work, in turn, in one run.

    python bench/speed.py --trl-python /tmp/trl/bin/python     all but the toy; 40 minutes
    python bench/speed.py update step                          two cases, without TRL
    python bench/speed.py toy --before FOLDER                  beside another checkout

    update      an update of 8 completions of one prompt, 512 + 32 tokens, hidden size 128
    turns       the same, but the last 256 tokens of a prompt are its own, as a later turn's memory
    step        a training step of that shape: sampling, advantages, update
    vocabulary  an update of 16 completions of two prompts, 512 + 64 tokens, vocabulary of 152k
    sample-512  32 tokens for each of 8 copies of a prompt of 512 tokens; sample-2048: of 2048
    smollm      `step` in SmolLM2-135M's shape; smollm-turns: `turns` in that shape
    toy         python train.py in all, without evaluations; another seed in each repetition

    ours        sample() and update(), as train.py calls them
    plain       the same without fast/, as with --plain
    naive       an update as one would first write it: logits of all tokens, one batch
    trl         GRPOTrainer.train() as it is shipped; in an update, its rollouts are given to it
    before      the same as ours, by the bench/speed.py of another checkout

All weights are random, in float32, and the same on all sides. No side can sample a stop token, so
all sample the same number of tokens. Where the work is an update, the gradients are compared.

Each side is a process of its own, with one thread on one core, which has warmed up. The sides take
turns (A B A B); printed are medians. CPU seconds count most: other work on the machine changes them
least. MiB is the peak of memory beyond what the process held before, in one more repetition, by a
process in which malloc returns at once what is freed. `times` is the ratio of CPU seconds to ours.

TRL needs an environment of its own, with the torch and transformers of this project:

    python -m venv /tmp/trl && /tmp/trl/bin/pip install -r requirements.txt "trl==1.16.*"
"""

import argparse
import itertools
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
TINY = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4)
TINY |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=1024)
SMOLLM = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30)
SMOLLM |= dict(num_attention_heads=9, num_key_value_heads=3, vocab_size=49152)
EIGHT = dict(model=TINY, groups=1, group=8, prompt=512, new=32, work="update", beside=["trl"])
CASES = {
    "update": EIGHT | dict(beside=["naive", "trl"]),
    "turns": EIGHT | dict(own=256, beside=["naive", "trl"]),
    "step": EIGHT | dict(work="step"),
    "vocabulary": EIGHT | dict(model=TINY | dict(vocab_size=151936), groups=2, new=64),
    "sample-512": EIGHT | dict(work="sample", beside=["plain"]),
    "sample-2048": EIGHT | dict(work="sample", prompt=2048, beside=["plain"]),
    "smollm": EIGHT | dict(model=SMOLLM, work="step", micro=2),  # for trl: 8 rows take 17 GB
    "smollm-turns": EIGHT | dict(model=SMOLLM, own=256, beside=["plain"]),
    "toy": dict(work="toy", beside=[]),
}
RETURNED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


# ----------------------------------------------------------------- the work, done by one side
def model_of(case):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    stops = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config = dict(max_position_embeddings=8192, tie_word_embeddings=True) | case["model"] | stops
    return Qwen2ForCausalLM(Qwen2Config(**config)).eval()


def batch_of(case):
    """(prompts, completions, A) of all rows: `groups` prompts, each with `group` completions. The
    last `own` tokens of a prompt differ in each row."""
    draw = random.Random(0)
    ids = range(1, case["model"]["vocab_size"])
    prompts = [draw.choices(ids, k=case["prompt"]) for _ in range(case["groups"])]
    prompts = [prompt for prompt in prompts for _ in range(case["group"])]
    if own := case.get("own"):
        prompts = [prompt[:-own] + draw.choices(ids, k=own) for prompt in prompts]
    completions = [draw.choices(ids, k=case["new"]) for _ in prompts]
    return prompts, completions, [(-1.0) ** row * (1 + row % 3) for row in range(len(prompts))]


def reward(ids):
    """A number that differs between the completions of a group: no group is flat."""
    return float(sum(ids))


def ours(case, lap_ended, plain=False):
    import torch

    from fast import trees
    from fast.prefix import prefill
    from flow_grpo import Action, advantages, distribution, padded, update
    from models.local import ready_to_update, sample, sampling_mode

    model = model_of(case)
    ready_to_update(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    prompts, completions, A = batch_of(case)
    groups = [row // case["group"] for row in range(len(prompts))]
    while True:
        if case["work"] != "update":
            with sampling_mode(model):
                how = 1.0, case["new"], distribution, None if plain else prefill
                completions = sample(model, prompts, [], *how)
            A = advantages([reward(ids) for ids in completions], groups)[0].tolist()
        if case["work"] != "sample":
            rows = zip(prompts, completions, A, strict=True)
            actions = [Action(s, a, row, A_i) for row, (s, a, A_i) in enumerate(rows)]
            how = dict(temperature=1.0, clip=(0.2, 0.3), beta=0.0, minibatches=1)
            how |= dict(rows=padded if plain else trees.rows)
            update(model, None, optimizer, actions, groups, **how)
        if not lap_ended(sum(map(len, completions))):
            return


def plain(case, lap_ended):
    ours(case, lap_ended, plain=True)


def naive(case, lap_ended):
    import torch

    model = model_of(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    s, a, A = map(torch.tensor, batch_of(case))  # (N, P), (N, T), (N,)
    while True:
        optimizer.zero_grad()
        logits = model(torch.cat([s, a], 1)).logits.float()  # (N, P + T, V)
        logp = logits.log_softmax(-1)[:, s.shape[1] - 1 : -1].gather(-1, a[..., None]).squeeze(-1)
        ratio = (logp - logp.detach()).exp()
        gain = torch.min(ratio * A[:, None], ratio.clamp(0.8, 1.3) * A[:, None])
        (-gain.mean(1).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not lap_ended(a.numel()):
            return


def trl(case, lap_ended):
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows, V = case["groups"] * case["group"], case["model"]["vocab_size"]
    micro = case.get("micro", rows)
    sampled = [rows * case["new"]]

    def rewards(completion_ids, **_):
        sampled[0] = sum(map(len, completion_ids))
        return [reward(ids) for ids in completion_ids]

    class EachStep(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = not lap_ended(sampled[0])

    # The word "17" is token 17; the stop token is one that the model does not have.
    words = {str(number): number for number in range(V)} | {"<stop>": V}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [" ".join(map(str, prompt)) for prompt in batch_of(case)[0][:: case["group"]]]
    sizes = dict(per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro)
    sizes |= dict(num_generations=case["group"], max_completion_length=case["new"])
    sizes |= dict(max_steps=10**6, beta=0.0, temperature=1.0)
    # Gradient checkpointing would save memory and cost time; ours does without, too.
    plain = dict(use_cpu=True, bf16=False, gradient_checkpointing=False)
    quiet = dict(report_to="none", save_strategy="no", disable_tqdm=True)
    rates = dict(learning_rate=1e-6, lr_scheduler_type="constant")
    config = GRPOConfig(tempfile.gettempdir(), **sizes, **plain, **quiet, **rates)
    names = dict(tokenizer_object=tokenizer, eos_token="<stop>", pad_token="0")
    trainer = GRPOTrainer(
        model_of(case),
        rewards,
        args=config,
        callbacks=[EachStep()],
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=PreTrainedTokenizerFast(**names),
    )
    if case["work"] == "update":
        s, a, A = map(torch.tensor, batch_of(case))
        masks = dict(prompt_mask=torch.ones_like(s), completion_mask=torch.ones_like(a))
        given = dict(prompt_ids=s, completion_ids=a, advantages=A, **masks)
        given["num_items_in_batch"] = torch.tensor(a.numel())
        trainer._generate_and_score_completions = lambda _: given
    trainer.train()


def worker(side, case):
    """Warm up, then do the work once for each line of standard input; write what each lap cost."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    sys.path.insert(0, str(REPO))
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    gradients, start = [], []

    def project(optimizer, *_):
        if not gradients:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            wave = lambda w: torch.arange(w.numel()).sin().view_as(w)
            gradients.append(sum((w.grad * wave(w)).sum().item() for w in weights))

    def lap_ended(tokens):
        """Write what it cost, and wait for the next; False if there is none."""
        if start:  # not of the first lap, the warm-up
            cpu, wall, held = time.process_time(), time.perf_counter(), start.pop()
            cost = dict(cpu=cpu - held[0], wall=wall - held[1], peak=memory("VmHWM") - held[2])
            cost |= dict(tokens=tokens, gradient=gradients[:1])
        else:
            cost = {}
        print(json.dumps(cost), file=answers, flush=True)
        more = sys.stdin.readline()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak, begins anew
        start.append((time.process_time(), time.perf_counter(), memory("VmRSS")))
        return bool(more)

    register_optimizer_step_pre_hook(project)
    globals()[side](case, lap_ended)


def memory(key):
    """Bytes of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


# ------------------------------------------------------------------------ the sides take turns
def laps_of(side, case, args, environment=()):
    """Yield what each lap of a side costs: {"cpu", "wall", "peak", "tokens", "gradient"}."""
    folder = args.before if side == "before" else REPO
    python = args.trl_python if side == "trl" else sys.executable
    worker = "ours" if side == "before" else side
    with subprocess.Popen(
        [python, folder / "bench/speed.py", "--worker", worker, json.dumps(case)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.readline()  # it has warmed up
        while True:
            print(file=process.stdin, flush=True)
            yield json.loads(process.stdout.readline())


def laps_of_toy(side, args):
    """Yield what each whole run of train.py costs: {"cpu", "wall"}."""
    folder = args.before if side == "before" else REPO
    for seed in itertools.count():
        with tempfile.TemporaryDirectory() as out:
            flags = f"--valid none --test none --seed {seed} --out {out}/run {args.flags}"
            used, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            run = [sys.executable, "train.py", *flags.split()]
            subprocess.run(run, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = ended.ru_utime + ended.ru_stime - used.ru_utime - used.ru_stime
        yield dict(cpu=cpu, wall=time.perf_counter() - start)


def measure(name, case, args):
    """Print a line for each side."""
    sides = ["ours", *case["beside"], *(["before"] if args.before else [])]
    sides = [side for side in sides if side != "trl" or args.trl_python]
    toy = name == "toy"
    running = {s: laps_of_toy(s, args) if toy else laps_of(s, case, args) for s in sides}
    laps = {side: [] for side in sides}
    for _ in range(args.repetitions):
        for side in sides:
            laps[side].append(next(running[side]))
    for side in sides:
        running[side].close()
        middle = lambda key, of: statistics.median(lap[key] for lap in laps[of])
        cpu, wall, ours = middle("cpu", side), middle("wall", side), middle("cpu", "ours")
        line = f"{name:<13}{side:<8}{cpu:8.3f} CPU s{wall:8.3f} s{cpu / ours:7.2f} times"
        if not toy:
            alone = laps_of(side, case, args, RETURNED_AT_ONCE)
            line += f"{next(alone)['peak'] / 2**20:8.0f} MiB"
            alone.close()
            line += difference(case, laps[side][-1], laps["ours"][-1])
        print(line, [round(lap["cpu"], 3) for lap in laps[side]], flush=True)


def difference(case, lap, ours):
    """A warning if a side did not do the same work as ours."""
    if lap["tokens"] != ours["tokens"]:
        return "  OTHER NUMBER OF TOKENS"
    pairs = zip(lap["gradient"], ours["gradient"], strict=True)
    same = all(math.isclose(*pair, rel_tol=1e-4) for pair in pairs)
    return "" if same or case["work"] != "update" else "  ANOTHER GRADIENT"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"{', '.join(CASES)}; default: all but toy")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--trl-python", help="the Python of an environment with TRL 1.16")
    parser.add_argument("--before", type=Path, help="another checkout of this project")
    parser.add_argument("--flags", default="--steps 5", help="of train.py, for the toy")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    for name in args.cases or [name for name in CASES if name != "toy"]:
        measure(name, CASES[name], args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
