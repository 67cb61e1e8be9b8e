"""tools"""

import functools
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from world import services
from world.sandbox import python_coder
from world.search import LIVE, LOCK, google_search, index, remembered, web_search, wikipedia_search
from world.text import truncate

RESULT_BUDGET = 4000     # characters of a result that reach memory


@dataclass(frozen=True)
class Tool:
    run: Callable[..., str] | None  # None: answered by the fixed language model, which flow.py batches as a stage
    description: str                # what it does, for the planner
    arguments: dict[str, str]       # name -> meaning; all are strings, all are required
    limits: str                     # what to know before choosing it
    example: str                    # one call
    needs: tuple[tuple[str, ...], ...] = ()  # environment variables without which it cannot run: one of these sets
    from_web: bool = False          # it asks the network: what it has answered may be kept (--cache)


# ---------------------------------------------------------------------------------------------- the toolbox
TOOLS: dict[str, Tool] = {
    "base_generator": Tool(
        run=None,
        description="Asks a language model, which answers from its own knowledge and by reasoning.",
        arguments={"query": "the question or instruction, with everything needed to answer it"},
        limits="May hallucinate. Use it for reasoning and general knowledge, not for exact facts or arithmetic.",
        example='base_generator(query="Name three noble gases.")'),
    "python_coder": Tool(
        run=python_coder,
        description="Runs Python code and returns what it prints.",
        arguments={"code": "a complete Python program that prints its result"},
        limits="No network, no files, 10 seconds, 512 MB. Nothing is kept between calls. Use it for exact calculation.",
        example='python_coder(code="print(2 + 2)")'),
    "google_search": Tool(
        run=google_search,
        description="Searches the web with Google and returns titles, addresses and snippets of the best pages.",
        arguments={"query": "what you would type into a search box"},
        limits="Snippets only: read a page with web_search. Use it for general and recent facts. It cannot calculate.",
        example='google_search(query="2024 Nobel Prize in Physics winners")',
        needs=(("SERPER_API_KEY",), ("GOOGLE_API_KEY", "GOOGLE_CSE_ID")), from_web=True),
    "wikipedia_search": Tool(
        run=wikipedia_search,
        description="Searches Wikipedia and returns the best matching passages.",
        arguments={"query": "a few specific key words, such as a name and what to know about it"},
        limits="Wikipedia only. Use a specific query, one fact at a time. It cannot calculate.",
        example='wikipedia_search(query="atomic number of iron")'),
    "web_search": Tool(
        run=web_search,
        description="Reads one public web page and returns the passages nearest to a query.",
        arguments={"url": "the full address of the page, as another tool has shown it", "query": "what to look for on the page"},
        limits="Public text pages only; no files, no pages behind a login. Do not invent addresses.",
        example='web_search(url="https://en.wikipedia.org/wiki/Iron", query="melting point")', from_web=True),
}


def missing(name: str) -> str:
    """What a tool lacks to run, "" if nothing: 'google_search needs SERPER_API_KEY, or GOOGLE_API_KEY and GOOGLE_CSE_ID'."""
    needs = TOOLS[name].needs
    if not needs or any(all(os.environ.get(key) for key in keys) for keys in needs):
        return ""
    return f"{name} needs {', or '.join(' and '.join(keys) for keys in needs)} in the environment"


def toolbox(names: list[str] | None = None, corpus: str | Path | None = None, cache: services.Cache | None = None) -> dict[str, Tool]:
    """The chosen tools (None: all that can run), always in the order of TOOLS.

    corpus: what wikipedia_search reads, a JSONL file or "wikipedia:de"; None: the live English one. cache: answers of the search
    tools are kept there and asked for once. ValueError for what would quietly leave the planner with other tools than those asked for."""
    wanted = [name for name in TOOLS if not missing(name)] if names is None else names
    wrong = ("no tool is named" if not wanted else
             next((f"no tool is called {name!r}" for name in wanted if name not in TOOLS), "") or
             next((f"{name} is named twice" for name in wanted if wanted.count(name) > 1), ""))
    if wrong:
        raise ValueError(f"{wrong}: choose from {', '.join(TOOLS)}")
    if lacking := next(filter(None, map(missing, wanted)), ""):
        raise ValueError(f"{lacking}: set it, or leave the tool out of --tools")
    chosen = {name: tool for name, tool in TOOLS.items() if name in wanted}
    corpus = str(corpus or LIVE + "en")
    if "wikipedia_search" in chosen:
        if not corpus.startswith(LIVE):
            with LOCK:
                index(corpus)  # a bad corpus is told now, not in the middle of a training run
        elif not re.fullmatch(r"[a-z]{2,12}(-[a-z]+)*", corpus.removeprefix(LIVE)):  # it becomes part of a host's name
            raise ValueError(f"{corpus} names no Wikipedia: give its language, as in {LIVE}de, or a JSONL file")
        bound = functools.partial(wikipedia_search, corpus=corpus)
        chosen["wikipedia_search"] = replace(chosen["wikipedia_search"], run=bound, from_web=corpus.startswith(LIVE))
    if cache:
        chosen |= {name: replace(tool, run=remembered(cache, f"{name} {corpus}", tool.run)) for name, tool in chosen.items() if tool.from_web}
    return chosen


def check(tools: dict[str, Tool], name: str, arguments: dict[str, str]) -> str:
    """What is wrong with a call, as a sentence to the model; "" if nothing is."""
    if name not in tools:
        return f"Error: no tool called {truncate(str(name), 80)!r}. Use one of: {', '.join(tools)}."
    wanted, example = tools[name].arguments, f"Example: {tools[name].example}"
    for key in wanted:
        if key not in arguments:
            return f"Error: {name} needs the argument {key!r}. {example}"
        if not isinstance(arguments[key], str):
            return f"Error: the argument {key!r} of {name} must be a string. {example}"
    unknown = [key for key in arguments if key not in wanted]
    return f"Error: {name} has no argument {truncate(str(unknown[0]), 80)!r}. {example}" if unknown else ""


def call(tools: dict[str, Tool], name: str, arguments: dict[str, str], budget: int = RESULT_BUDGET) -> tuple[str, bool]:
    """(result, error) of one tool call; error is true iff the result starts with "Error:". Never raises at the flow."""
    try:
        result = check(tools, name, arguments) or str(tools[name].run(**arguments))
    except services.Failed as why:
        result = f"Error: {why}"
    except Exception as e:  # whatever a tool meets is told to the planner and counted, never swallowed
        result = f"Error: {name} failed: {type(e).__name__}: {e}"
    return truncate(result, budget), result.startswith("Error:")


def run(calls, tools, generate):
    """Run one batch of calls: [(result e^t, whether it is a tool-calling error, seconds)], in their order.

    calls: [Call, or a parse error]; generate: [query] -> [text], the fixed language model. base_generator is
    this model and not a function, so all its queries are answered first, as one batch, and then looked up.
    """
    generated = [call for call in calls if not isinstance(call, str) and tools[call.tool].run is None]
    queries = [call.arguments.get("query") for call in generated]
    queries = list(dict.fromkeys(query for query in queries if isinstance(query, str)))
    start = time.perf_counter()
    answers = dict(zip(queries, generate(queries))) if queries else {}
    generating = time.perf_counter() - start
    look_up = lambda query: answers[query]
    ready = {name: tool if tool.run else replace(tool, run=look_up) for name, tool in tools.items()}

    def one(parsed):
        if isinstance(parsed, str):
            return f"Error: {parsed}", True, 0.0
        start = time.perf_counter()
        result, error = call(ready, parsed.tool, parsed.arguments)
        seconds = time.perf_counter() - start
        return result, error, seconds + (generating if tools[parsed.tool].run is None else 0.0)

    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(one, calls))
