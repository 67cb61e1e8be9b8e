"""The toolbox: plain functions from strings to a string, each with the text by which the planner chooses it.

    tools = toolbox(["python_coder", "wikipedia_search"], corpus="toy/corpus.jsonl")
    print(describe("python_coder", tools["python_coder"]))       # what the planner and the executor read
    result, error = call(tools, "python_coder", {"code": "2 + 2"})  # ("4", False)

A tool never raises at the flow. What goes wrong, by the model's mistake or the world's, is a result that starts with
"Error:" and says what to do instead; it enters memory like any other result and the planner can react to it.
Adding a tool is one function and one entry in TOOLS.
"""
import functools
import json
import re
import sqlite3
import threading
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from memory import cut
from sandbox import python_coder

RESULT_BUDGET = 2000     # characters of a result that reach memory
PASSAGE_BUDGET = 600     # characters of one passage, so that k = 3 of them fit into a result
STOP_WORDS = tuple("a an and are as at be by did do does for from how in is it of on or that the their this to was "
                   "were what when where which who whom whose why with".split())


@dataclass(frozen=True)
class Tool:
    run: Callable[..., str] | None  # None: answered by the fixed language model, which solve.py batches as a stage
    description: str                # what it does, for the planner
    arguments: dict[str, str]       # name -> meaning; all are strings, all are required
    limits: str                     # what to know before choosing it
    example: str                    # one call


def describe(name: str, tool: Tool) -> str:
    """The metadata of a tool as the planner and the executor read it: constant text, so prompts share it as a prefix."""
    arguments = "; ".join(f"{key} (string): {meaning}" for key, meaning in tool.arguments.items())
    return f"{name}: {tool.description}\n  Arguments: {arguments}\n  Limits: {tool.limits}\n  Example: {tool.example}\n"


# ---------------------------------------------------------------------------------------------- wikipedia_search
LOCK = threading.Lock()  # one index, many threads


def words(text: str) -> list[str]:
    """'Curaçao, 1954' -> ['curacao', '1954']: as FTS5's unicode61 splits it, without accents."""
    bare = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if not unicodedata.combining(c))
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFC", bare))


def passages(corpus: str) -> Iterator[tuple[str, str]]:
    """The (title, text) of each line; ValueError "corpus.jsonl:3: ..." where it is not one."""
    number = 0
    try:
        with open(corpus, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("title", "text")):
                        raise ValueError('each line must be {"title": "...", "text": "..."}')
                    (row["title"] + row["text"]).encode()  # half of a surrogate pair is valid JSON but no text
                    yield row["title"], row["text"]
    except OSError as e:
        raise ValueError(f"{corpus}: cannot read this corpus of wikipedia_search ({e.strerror})") from e
    except ValueError as e:
        raise ValueError(f"{corpus}:{number}: {e}") from e


@functools.lru_cache(maxsize=8)
def index(corpus: str) -> sqlite3.Connection:
    """The corpus as a full-text index in memory, built once per process."""
    table = sqlite3.connect(":memory:", check_same_thread=False)  # LOCK sees to one thread at a time
    table.execute("create virtual table passages using fts5(title, text, tokenize = 'unicode61 remove_diacritics 2')")
    if not table.executemany("insert into passages values (?, ?)", passages(corpus)).rowcount > 0:
        raise ValueError(f"{corpus}: this corpus of wikipedia_search has no passages")
    return table


def wikipedia_search(query: str, corpus: str, k: int = 3) -> str:
    """The best k passages, one a line, "[1] Iron: Iron is a ..."; those with all words of the query, or else those with
    more than half of them. A passage that shares only a number or a common word with the query is no answer."""
    asked = list(dict.fromkeys(words(query)))
    asked = [word for word in asked if word not in STOP_WORDS] or asked
    best = "select title, text from passages where passages match ? order by bm25(passages, 5, 1), rowid limit ?"
    all_of, any_of = (joint.join(f'"{word}"' for word in asked) for joint in (" ", " OR "))  # quoted: never an operator
    with LOCK:
        search = index(str(corpus)).execute
        found = search(best, (all_of, k)).fetchall() if asked else []
        some = search(best, (any_of, 1000)).fetchall() if asked and not found else []
    found = found or [row for row in some if 2 * len(set(asked) & set(words(" ".join(row)))) > len(asked)][:k]
    if not found:
        return f"Error: no passage matches {cut(query, 200)!r}. Try other or fewer words."
    lines = (f"[{n}] {title}: {' '.join(text.split())}" for n, (title, text) in enumerate(found, 1))
    return "\n".join(cut(line, PASSAGE_BUDGET) for line in lines)


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
    "wikipedia_search": Tool(
        run=wikipedia_search,
        description="Searches Wikipedia and returns the best matching passages.",
        arguments={"query": "a few specific key words, such as a name and what to know about it"},
        limits="Wikipedia only. Use a specific query, one fact at a time. It cannot calculate.",
        example='wikipedia_search(query="atomic number of iron")'),
    # Tools that need the network (google_search, web_search, Wikipedia online) go here.
}


def toolbox(names: list[str] | None = None, corpus: str | Path | None = None) -> dict[str, Tool]:
    """The chosen tools (None: all), always in the order of TOOLS, with wikipedia_search bound to the corpus.

    ValueError for what would quietly leave the planner with other tools than the ones asked for."""
    if names is None:
        names = [name for name in TOOLS if corpus or name != "wikipedia_search"]
    wrong = ("no tool is named" if not names else
             next((f"no tool is called {name!r}" for name in names if name not in TOOLS), "") or
             next((f"{name} is named twice" for name in names if names.count(name) > 1), ""))
    if wrong:
        raise ValueError(f"{wrong}: choose from {', '.join(TOOLS)}")
    chosen = {name: tool for name, tool in TOOLS.items() if name in names}
    if "wikipedia_search" in chosen:
        if not corpus:
            raise ValueError("wikipedia_search needs a corpus, a JSONL file of title and text: name one or leave it out of "
                             f"{', '.join(TOOLS)}")
        with LOCK:
            index(str(corpus))  # a bad corpus is told now, not in the middle of a training run
        bound = functools.partial(wikipedia_search, corpus=str(corpus))
        chosen["wikipedia_search"] = replace(chosen["wikipedia_search"], run=bound)
    return chosen


def check(tools: dict[str, Tool], name: str, arguments: dict[str, str]) -> str:
    """What is wrong with a call, as a sentence to the model; "" if nothing is."""
    if name not in tools:
        return f"Error: no tool called {cut(str(name), 80)!r}. Use one of: {', '.join(tools)}."
    wanted, example = tools[name].arguments, f"Example: {tools[name].example}"
    for key in wanted:
        if key not in arguments:
            return f"Error: {name} needs the argument {key!r}. {example}"
        if not isinstance(arguments[key], str):
            return f"Error: the argument {key!r} of {name} must be a string. {example}"
    unknown = [key for key in arguments if key not in wanted]
    return f"Error: {name} has no argument {cut(str(unknown[0]), 80)!r}. {example}" if unknown else ""


def call(tools: dict[str, Tool], name: str, arguments: dict[str, str], budget: int = RESULT_BUDGET) -> tuple[str, bool]:
    """(result, error) of one tool call; error is true iff the result starts with "Error:". Never raises at the flow."""
    try:
        result = check(tools, name, arguments) or tools[name].run(**arguments)
    except Exception as e:  # whatever a tool meets is told to the planner and counted, never swallowed
        result = f"Error: {name} failed: {type(e).__name__}: {e}"
    return cut(result, budget), result.startswith("Error:")
