"""Make a folder with a public model's real shapes and random weights: to time a run before any download.

    python bench/random_model.py qwen3-0.6b runs/qwen3-0.6b
    python experiments/smollm.py train --model runs/qwen3-0.6b --seeds 1 --warm-steps 2 --steps 2
    python bench/random_model.py qwen2.5-7b /tmp/7b --tokenizer dice        /tmp/7b/questions.jsonl, too
    python train.py --model /tmp/7b --data /tmp/7b/questions.jsonl --tools python_coder --valid none ...
    python bench/random_model.py --table        weights, predicted memory and operations of a step, computed

Such a model writes nonsense up to the token limit, so its seconds are an upper bound, and its rewards mean
nothing. The tokenizer is that of --tokenizer: SmolLM2's if runs/ has it, so that prompts are as long as real
ones (about 530 tokens; the toy's tokenizer was made for the prompts and needs a tenth).

With nonsense no plan parses, all answers are wrong, and a training step has no gradient. `--tokenizer dice`
is for whole steps: almost every token of its vocabulary decodes to a whole plan, call, verdict and answer
(dice()). Then a random model plays a game of chance, and wins half of its rollouts.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.qwen3_5 import Qwen3_5TextConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import executor
import generator
import planner
import verifier
from models.local import HF
from rewards.metrics import markdown
from scale import fit
from tools import TOOLS
from toy.make import CHAT

SMOLLM = ROOT / "runs" / "SmolLM2-135M-Instruct"
QUESTIONS = [{"question": f"Is throw {n} of the dice even?", "answer": "yes"} for n in range(100)]
CONFIGS = {  # configurations as published
    "smollm2-135m": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True),
    "qwen2.5-0.5b": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True),
    "qwen2.5-7b": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32768, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False),
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, head_dim=128,
        num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=40960,
        tie_word_embeddings=True),
    "qwen3.5-0.8b": Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, head_dim=256,
        num_attention_heads=8, num_key_value_heads=2, linear_num_key_heads=16, linear_num_value_heads=16,
        max_position_embeddings=262144, tie_word_embeddings=True),
}
# A step of smollm.py: 112 rollouts of two turns; prompt and completion tokens of planner, executor, verifier
# and generator. A forward pass takes 2 operations a weight and token, an update three forward passes.
ROLLOUTS, TURNS, PROMPT, COMPLETION = 112, 2, 530, 40
OTHER_PROMPTS = 200 + 500  # of executor and verifier, each turn


def make(name, folder, tokenizer, layers=None):
    """Write the folder, in bfloat16. layers: fewer than the published ones, to try it."""
    config = CONFIGS[name]
    if layers:
        settings = config.to_dict() | {"num_hidden_layers": layers}
        if settings.get("layer_types"):
            settings["layer_types"] = settings["layer_types"][-layers:]
        config = type(config).from_dict(settings)
    if tokenizer == "dice":
        tokenizer = dice_tokenizer(config.vocab_size)
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    else:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, None, None
    torch.manual_seed(0)
    HF(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tokenizer).save(folder)


def dice(n):
    """The text of token n. Any sequence of such texts is a plan, a call, a verdict and an answer at once.

    A second text begins on the last line of the first, so the first "Sub-goal:" is the only one that starts
    a line. All other labels repeat the same value. After the call, "#" makes all that follows a comment. One
    text in 20 says STOP. Of the answers, which are the parity of n, the last one counts.
    """
    stop = "# Conclusion: STOP\n" if n % 20 == 7 else ""
    return (f"Sub-goal: throw {n}: ```python_coder(code='print({n})') #```\n{stop}# Justification: a throw\n"
            f"# Context: none\n# Tool: python_coder - <answer>{('yes', 'no')[n % 2]}</answer>")


def dice_tokenizer(size):
    """A byte-level BPE with the words of our prompts; dice() fills its vocabulary up to `size` tokens."""
    scripts = planner.ANALYSIS_PROMPT, planner.PROMPT, executor.PROMPT, verifier.PROMPT, generator.PROMPT
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator([*scripts, planner.describe_all(TOOLS)], trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    data = json.loads(bpe.to_str())
    vocabulary = data["model"]["vocab"]
    vocabulary |= {bytes_of(dice(n))[0][0]: n for n in range(len(vocabulary), size)}
    whole = Tokenizer.from_str(json.dumps(data))
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=whole, chat_template=CHAT, **special)


def operations(parameters, vocabulary_weights):
    """Operations of one step of Flow-GRPO if nothing is shared: (of the rollouts, of the update)."""
    turns = ROLLOUTS * TURNS
    body = parameters - vocabulary_weights  # the prompt's tokens need no logits
    read = turns * (PROMPT + OTHER_PROMPTS) * body + turns * 3 * COMPLETION * parameters
    learned = turns * ((PROMPT + COMPLETION) * body + COMPLETION * vocabulary_weights)
    return 2 * read, 6 * learned


def table():
    """Weights, memory on a GPU in bfloat16 (scale/fit.py) and 10^12 operations a step, for each model."""
    lines = [["model", "10^6 weights", "GB on a GPU", "10^12 operations: rollouts", "update"]]
    for name, config in CONFIGS.items():
        of = fit.shapes(config)
        need = fit.predict(of, dtype=torch.bfloat16, token_budget=4096, max_new_tokens=80, prompt=PROMPT,
                           gradient_checkpointing=True)
        rollouts, update = operations(of["parameters"], of["V"] * of["d"])
        lines.append([name, f"{of['parameters'] / 1e6:.0f}", f"{need.gpu / 1e9:.1f}",
                      f"{rollouts / 1e12:.0f}", f"{update / 1e12:.0f}"])
    print(markdown(lines))


def main():
    settings = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], **settings)
    parser.add_argument("name", nargs="?", choices=CONFIGS, help="whose shapes")
    parser.add_argument("folder", nargs="?", help="folder to write")
    parser.add_argument("--layers", type=int, help="only so many layers, to try it")
    default = str(SMOLLM if SMOLLM.exists() else ROOT / "toy")
    parser.add_argument("--tokenizer", default=default, help="its folder or hub name; or dice")
    parser.add_argument("--table", action="store_true", help="print the table and write nothing")
    args = parser.parse_args()
    if args.table:
        return table()
    if not args.folder:
        parser.error("name a model and a folder, or --table")
    make(args.name, args.folder, args.tokenizer, args.layers)
    print(f"{args.folder}: {args.name} with random weights; the tokenizer is that of {args.tokenizer}")


if __name__ == "__main__":
    main()
