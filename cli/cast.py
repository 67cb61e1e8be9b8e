"""The cast: which engine plays which module, and whether all of them fit into memory.

The planner is the policy. The other modules are fixed: --fixed plays them all, unless the command line names
another model for one of them. A model that plays several modules is loaded once.
"""

from typing import NamedTuple

import torch

from cli.command_line import local_models
from cli.flags import TOY_TOOLS
from models.completion import Cached
from models.loading import config_of, pick_device, pick_dtype
from scale import adapters, fit
from world.places import MODULES
from world.sandbox import protection
from world.services import Cache
from world.toolbox import choose, left_out

TOY_TOKEN = " 999"  # a token of the toy's vocabulary, and of no other


class Cast(NamedTuple):
    """Who plays what, in the order in which solve.roll_out_and_grade() takes them."""

    policy: object  # the planner's engine
    fixed: dict  # {module: engine} of the others; "default" plays those that are not named
    tools: dict  # {name: Tool}
    judge: object  # the engine that grades what the rules cannot, or None


def load_engines(args, loaded, cache):
    """({module: engine} for roll_out(), the judge or None). loaded: {name: engine} of models in memory."""

    def engine(name):
        if name not in loaded:
            loaded[name] = adapters.load(name, args.device, args.dtype, args.think, args.plain)
        return loaded[name]

    named = {module: getattr(args, module) for module in MODULES[1:] if getattr(args, module, None)}
    fixed = {"default": engine(args.fixed)} | {module: engine(name) for module, name in named.items()}
    return fixed, Cached(engine(args.judge), cache, args.max_new_tokens) if args.judge else None


def load_tools(args, table):
    """({name: Tool}, why tools are left out, the cache of the judge's verdicts). table: tools.TOOLS.

    Sets --tools to the names. With --cache, the cache also holds what tools have got from the web."""
    cache = Cache(args.cache or ":memory:")
    tools = choose(table, args.tools, args.corpus, cache if args.cache else None)
    without, args.tools = left_out(table, args.tools), list(tools)
    return tools, without, cache


def show_engines(policy, fixed, judge, tools, without):
    """The first lines of a run: the model of each module, and the tools. without: why tools are left out."""
    default = fixed["default"]
    lines = [f"planner {policy}", f"fixed   {default}"]
    lines += [f"{module} {engine}" for module, engine in fixed.items() if engine is not default]
    if judge:
        lines.append(f"judge   {judge}")
    lines.append(f"tools   {', '.join(tools)}")
    if "python_coder" in tools:
        lines.append(f"sandbox {protection()}")
    return "\n".join(lines + [f"without {why}" for why in without])


def toy_warning(policy, fixed, tools):
    """A sentence if one of the engines that read the list of tools is the toy, or was trained from it, and
    does not know one of them: it would answer badly, without an error. "" otherwise."""
    readers = [engine for module, engine in fixed.items() if module != "base_generator"]
    for engine in [policy, *readers]:
        # The name of a tool that it has learnt is one token. A server has no tokenizer here.
        vocabulary = engine.tokenizer.get_added_vocab() if hasattr(engine, "tokenizer") else {}
        unknown = [name for name in tools if f" {name}" not in vocabulary]
        if TOY_TOKEN in vocabulary and unknown:
            return (f"The toy has not learnt to use {', '.join(unknown)}. It will answer badly: "
                    f"use a real model, or --tools {' '.join(TOY_TOOLS)}.")
    return ""


def plan_memory(args):
    """Do the weights of all local models fit into memory? The line "memory ..." says so; ValueError if not,
    before any weights are downloaded. Without --dtype, and without a GPU, weights that do not fit in float32
    are loaded in bfloat16.
    """
    configs = [config_of(name) for name in local_models(args)]
    for config in configs:
        fit.context(config, args.max_new_tokens)  # ValueError if prompts have no room
    device = pick_device(args.device)
    weights = sum(fit.shapes(config)["parameters"] for config in configs)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else fit.host_memory()
    why = ""
    if args.dtype is None and device.type == "cpu" and 4 * weights > 0.9 * free:
        args.dtype, why = "bfloat16", ", because float32 does not fit"
    dtype = pick_dtype(args.dtype, device)
    name = str(dtype).removeprefix("torch.")
    needed = f"{dtype.itemsize * weights / 1e9:.1f} of {free / 1e9:.0f} GB for the weights, in {name}{why}"
    if dtype.itemsize * weights > 0.9 * free:
        raise ValueError(f"this needs {needed}: use smaller models, or a server for --model or --fixed")
    return f"memory  {needed}"
