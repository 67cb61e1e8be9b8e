"""Which tools a run has: those of a table, tools.TOOLS, by their names, with a corpus and a cache.

A tool may need environment variables, such as a key; without them it is left out, or refused if it was named.
"""

import functools
import inspect
import keyword
import os
import re
from dataclasses import replace

from world.search import LIVE, LOCK, has_pages, index, remembered


def choose(table, names=None, corpus=None, cache=None):
    """{name: Tool}: the tools of these names (None: all that can run), always in the order of the table.

    corpus: what wikipedia_search reads, a JSONL file or "wikipedia:de"; None: the live English Wikipedia. If
    lines of the file have a "url", web_search reads these pages and no others.
    cache: a services.Cache for the results of tools that use the network.
    ValueError, as one sentence, for wrong names, a bad corpus, or a function that takes other arguments.
    """
    names = [name for name in table if not missing(table, name)] if names is None else names
    check_names(table, names)
    tools = {name: tool for name, tool in table.items() if name in names}
    corpus = str(corpus) if corpus else f"{LIVE}en"  # a file, or "wikipedia:" and a language
    if "wikipedia_search" in tools:
        tools["wikipedia_search"] = with_corpus(tools["wikipedia_search"], corpus)
    # If the file has pages of its own, web_search reads those, and no longer the network.
    if "web_search" in tools and not corpus.startswith(LIVE) and has_pages(corpus):
        pages = functools.partial(tools["web_search"].run, corpus=corpus)
        tools["web_search"] = replace(tools["web_search"], run=pages, from_web=False)
    for name, tool in tools.items():
        check_function(name, tool)
        if cache and tool.from_web:
            # The key names the corpus: the same query on another corpus has another result.
            tools[name] = replace(tool, run=remembered(cache, f"{name} {corpus}", tool.run))
    return tools


def with_corpus(tool, corpus):
    """wikipedia_search on this corpus. A bad corpus is a ValueError now, and not in the middle of a run."""
    live, language = corpus.startswith(LIVE), corpus.removeprefix(LIVE)
    if live and not re.fullmatch(r"[a-z]{2,12}(-[a-z]+)*", language):  # it becomes a part of a host name
        raise ValueError(f"{corpus} names no Wikipedia: give its language, as in {LIVE}de, or a JSONL file")
    if not live:
        with LOCK:
            index(corpus)  # searches find this index ready
    return replace(tool, run=functools.partial(tool.run, corpus=corpus), from_web=live)


def check_function(name, tool):
    """ValueError if no call of the tool could be written, or its function does not take the arguments."""
    for word in (name, *tool.arguments):
        if not word.isidentifier() or keyword.iskeyword(word):
            raise ValueError(f"the tool {name!r}: {word!r} is no name in Python, in which calls are written: "
                             "use letters, digits and _, and no keyword")
    try:
        if tool.run:
            inspect.signature(tool.run).bind(**tool.arguments)
    except TypeError as why:
        raise ValueError(f"the function of {name} does not take the tool's arguments: {why}") from None


def missing(table, name):
    """Which environment variables a tool lacks, as a sentence; "" if none.

    "google_search needs SERPER_API_KEY in the environment"
    """
    unset = [key for key in table[name].needs if not os.environ.get(key)]
    return f"{name} needs {' and '.join(unset)} in the environment" if unset else ""


def left_out(table, names):
    """One sentence for each tool that choose() leaves out; [] if the user chose the tools by name."""
    if names is not None:
        return []
    return [missing(table, name) for name in table if missing(table, name)]


def check_names(table, names):
    """ValueError, as one sentence, for an unknown or repeated name, or a tool that lacks a key."""
    problems = [] if names else ["no tool is named"]
    problems += [f"no tool is called {name!r}" for name in names if name not in table]
    problems += [f"{name} is named twice" for name in names if names.count(name) > 1]
    if problems:
        raise ValueError(f"{problems[0]}: choose from {', '.join(table)}")
    if lacking := [missing(table, name) for name in names if missing(table, name)]:
        raise ValueError(f"{lacking[0]}: set it, or leave the tool out of --tools")
