"""Warnings where the toy would answer badly, without an error: an edited prompt, a new tool, a new question.

Each constant piece of a prompt is one token of the toy's vocabulary (toy/pieces.py). An edited prompt becomes
hundreds of tokens that the toy has never read in such a place. toy/make.py notes in toy/made_for.json how
many tokens each module's prompt has in one example, and which questions the toy knows, as a regular
expression. A difference means that something was edited since.
"""
import json
import re

from cli.command_line import HOPS, TOY, TOY_TOOLS

LAST_NUMBER = " 999"  # a token of the toy's vocabulary, and of no other
KINDS = ("What is 15 + 27?", "What is the capital of France?", "Tell me the atomic number of Iron times 3.",
         "I want to know whether Japan and Kenya share a continent.")  # a question of each kind


def warning(engines, prompts, tools=(), question=None):
    """A warning if an engine is the toy, or was trained from it, and it does not know the prompts, one of the
    tools, or a question like this one; else "".

    prompts: {module: its prompt}, from solve.example_prompts()."""
    toys = [engine for engine in engines if is_made_of_pieces(engine)]
    if not toys:
        return ""
    vocabulary = toys[0].tokenizer.get_added_vocab()
    folder = HOPS if " web_search" in vocabulary else TOY
    made_for = json.loads((folder / "made_for.json").read_text(encoding="utf-8"))
    if unknown := [name for name in tools if f" {name}" not in vocabulary]:
        return (f"The toy has not learnt to use {', '.join(unknown)}. It will answer badly: "
                f"use a real model, or --tools {' '.join(TOY_TOOLS)}.")
    if question is not None and not re.fullmatch(made_for["questions"], question.strip()):
        return ("This question is unlike those of the toy, and its answer may well be wrong. "
                f"The toy knows these kinds: {' '.join(made_for.get('kinds', KINDS))}")
    lengths = prompt_lengths(toys[0], prompts)
    changed = [module for module in prompts if lengths[module] != made_for["prompts"].get(module)]
    if changed:
        return (f"The toy was made for other prompts, and that of {', '.join(changed)} has changed. It will "
                f"answer badly: remake it with python {folder.relative_to(TOY.parent)}/make.py "
                "(14 minutes; toy/hops 38), or use a real model.")
    return ""


def is_made_of_pieces(engine):
    """Is this engine the toy, or trained from it? A server has no tokenizer here."""
    return hasattr(engine, "tokenizer") and LAST_NUMBER in engine.tokenizer.get_added_vocab()


def prompt_lengths(engine, prompts):
    """{module: the tokens of its prompt}."""
    return {module: len(engine.encode(prompt)) for module, prompt in prompts.items()}
