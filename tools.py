"""Tools: what the planner may choose from, and how the calls of a turn are run (AgentFlow §3.1).

TOOLS has all tools. A run uses some of them (--tools): they are its toolset K. Each has a function,
which lives in world/ (base_generator has a language model instead), and the texts about it that the
planner and the executor read. run_calls() runs the calls of all rollouts in a turn:

    functions         in threads, by run_tool()
    base_generator    a language model: all queries of the turn in one batch, by answer_queries()

A result that starts with "Error:" is an *error*, whether the model made the mistake (no such
argument) or the world did (a missing page). The planner reads it in memory, and may try something
else. A query that is too long for base_generator is an error, too. If its language model gives no
completion for another reason, that is a *failure* (Result.failed), which ends the rollout."""

import inspect
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from models.chat import after_thinking  # what follows a thinking model's thoughts
from models.completion import TOO_LONG  # the error of a prompt that does not fit the model
from planner import Unparsed
from world import search, services
from world.mistakes import Mistake
from world.sandbox import python_coder
from world.text import CUT, truncate

RESULT_BUDGET = 4000  # characters of a result that reach memory


@dataclass(frozen=True)
class Tool:
    """One tool: its function, and what the modules read about it."""

    run: Callable[..., str] | None  # None: a language model answers the one argument, "query"
    description: str  # what it does, for the planner
    arguments: dict[str, str]  # name -> meaning; all are strings, all are required
    limits: str  # what to know before choosing it
    example: str  # one call
    needs: tuple[str, ...] = ()  # environment variables that must be set
    from_web: bool = False  # its results come from the network, so --cache keeps them
    stateful: bool = False  # its function also gets state=, see below

    def __post_init__(self):
        if self.run is None and list(self.arguments) != ["query"]:
            raise ValueError("a tool without a function, for the language model, takes 'query'")
        services.KEYS.update(self.needs)  # to be hidden


# To add a tool, write one function and one entry. The function
#   - receives every argument as a string (so write numbers in quotes in `example`: value="3");
#   - returns a string;
#   - may be called by several threads at once. Equal calls of a turn are run once, unless the tool
#     is stateful: then its function also gets state=, the rollout's own dict, to keep things in
#     (at first its question);
#   - reports an error by returning "Error: unknown unit", for example, or by raising
#     ServiceError("unknown unit"), from world/services.py; for any other exception, the planner
#     sees its type and message;
#   - must return on its own (those in world/ have a timeout): nothing here interrupts it.
TOOLS = {
    "base_generator": Tool(
        run=None,
        description="Asks a language model, which answers from its own knowledge and by reasoning.",
        arguments={"query": "the question or instruction, with everything needed to answer it"},
        limits="May hallucinate. Use it for reasoning and general knowledge, "
        "not for exact facts or arithmetic.",
        example='base_generator(query="Name three noble gases.")',
    ),
    "python_coder": Tool(
        run=python_coder,
        description="Runs Python code and returns what it prints.",
        arguments={"code": "a complete Python program that prints its result"},
        limits="No network, no files, 10 seconds, 512 MB. Nothing is kept between calls. "
        "Use it for exact calculation.",
        example='python_coder(code="print(2 + 2)")',
    ),
    # the paper's names: google_search searches the web, web_search reads one page
    "google_search": Tool(
        run=search.google_search,
        description="Searches the web with Google and returns titles, addresses and snippets "
        "of the best pages.",
        arguments={"query": "what you would type into a search box"},
        limits="Snippets only: read a page with web_search. Use it for general and recent facts. "
        "It cannot calculate.",
        example='google_search(query="2024 Nobel Prize in Physics winners")',
        needs=("SERPER_API_KEY",),
        from_web=True,
    ),
    "wikipedia_search": Tool(
        run=search.wikipedia_search,  # choose() names the corpus
        description="Searches Wikipedia and returns the best matching passages.",
        arguments={"query": "a few specific key words, such as a name and what to know about it"},
        limits="Wikipedia only. Use a specific query, one fact at a time. It cannot calculate.",
        example='wikipedia_search(query="atomic number of iron")',
    ),
    "web_search": Tool(
        run=search.web_search,
        description="Reads one public web page and returns the passages nearest to a query.",
        arguments={
            "url": "the full address of the page, as another tool has shown it",
            "query": "what to look for on the page",
        },
        limits="Public text pages only; no files, no pages behind a login. "
        "Do not invent addresses.",
        example='web_search(url="https://en.wikipedia.org/wiki/Iron", query="melting point")',
        from_web=True,
    ),
}


# ------------------------------------------------------------------------------------ the toolset
def choose(names=None, corpus=None, cache=None):
    """{name: Tool} of these names, in the order of TOOLS; None: of all that have their keys.

    corpus: what wikipedia_search reads, a JSONL file or "wikipedia:de"; None: the live English
    Wikipedia. If lines of the file have a "url", web_search reads these pages and no others.
    cache: a services.Cache for the results of tools that use the network.
    Mistake, as one sentence, for an unknown name, a missing key or a bad corpus.
    """
    names = available() if names is None else names
    for name in names:
        if name not in TOOLS:
            raise Mistake(f"no tool is called {name!r}: choose from {', '.join(TOOLS)}")
        if lacking(name):
            raise Mistake(f"{name} needs {lacking(name)} in the environment")
    corpus = str(corpus or f"{search.LIVE}en")
    live = search.is_live(corpus)
    tools = {name: tool for name, tool in TOOLS.items() if name in names}
    bound = ["wikipedia_search"]
    if not live and search.has_pages(corpus):
        bound += ["web_search"]
    for name, tool in tools.items():
        if name in bound:
            tool = replace(tool, run=partial(tool.run, corpus=corpus), from_web=live)
        if cache and tool.from_web and not tool.stateful:
            key = f"{name} {corpus}"  # the same query on another corpus has another result
            tool = replace(tool, run=search.remembered(cache, key, tool.run))
        tools[name] = tool
    return tools


def available():
    """The names of the tools that have their keys."""
    return [name for name in TOOLS if not lacking(name)]


def lacking(name):
    """The environment variables that a tool needs and that are not set: "SERPER_API_KEY"; or ""."""
    return " and ".join(key for key in TOOLS[name].needs if not os.environ.get(key))


def without_contact(chosen):
    """A sentence, if these tools ask the live Wikipedia and do not say for whom; or ""."""
    tool = chosen.get("wikipedia_search")
    if search.CONTACT or not (tool and tool.from_web):
        return ""
    return "for many searches of Wikipedia, set WIKIMEDIA_CONTACT to your e-mail (docs/use.md)"


def left_out(chosen):
    """A sentence about the tools of TOOLS that are not among the chosen ones, and why; or ""."""
    whys = {name: lacking(name) for name in TOOLS if name not in chosen}
    other = "is not in --tools, nor in the toolset that the model was trained with"
    tools = [f"{name}, which {f'needs {why}' if why else other}" for name, why in whys.items()]
    return f"left out: {'; '.join(tools)}" if tools else ""


# --------------------------------------------------------------------------------- how calls run
@dataclass
class Result:
    """The result e^t of one call."""

    text: str
    error: bool  # a tool-calling error
    seconds: float = 0.0  # running time; for base_generator, its share of the batch's time
    tokens: int = 0  # of the language model's prompt and completion; 0 for a function
    written: int = 0  # of the completion alone; 0 if unknown
    failed: str = ""  # why the language model did not answer; "" if it did, or was not asked


def run_calls(calls, states, tools, ask_model):
    """Run the calls of one turn, of all rollouts together: [Result], in the order of the calls.

    A call that cannot work becomes an error. The functions run in up to eight threads, equal calls
    once; meanwhile the queries of the language model are answered, as one batch.

    calls: [executor.Call or planner.Unparsed]. states: the dict of each rollout, for stateful
    tools. ask_model: [query] -> [Completion], the language model behind base_generator."""
    results = {}  # {i: Result of calls[i]}
    queries = {}  # {i: query}, for the language model
    running = {}  # {a call and its state: Future of a Result}, of the functions
    key_of = {}  # {i: key in `running`}
    with ThreadPoolExecutor(max_workers=8) as pool:
        for i, (call, state) in enumerate(zip(calls, states, strict=True)):
            if problem := problem_with(call, tools):
                results[i] = Result(problem, error=True)
            elif (tool := tools[call.tool]).run is None:
                queries[i] = call.arguments["query"]
            else:
                key = key_of[i] = str(call), i if tool.stateful else None
                given = call.arguments | ({"state": state} if tool.stateful else {})
                if key not in running:
                    running[key] = pool.submit(run_tool, tool.run, call.tool, given)
        if queries:
            results |= answer_queries(queries, ask_model)  # meanwhile, the functions run
    results |= {i: running[key].result() for i, key in key_of.items()}
    return [results[i] for i in range(len(calls))]


def answer_queries(queries, ask_model):
    """{i: Result} of {i: query}, from the language model, in one batch."""
    start = time.perf_counter()
    completions = ask_model(list(queries.values()))
    seconds = (time.perf_counter() - start) / len(queries)  # its share of the batch's time
    results = {}
    for i, completion in zip(queries.keys(), completions, strict=True):
        # A query that is too long is an error, from which the planner can learn. Any other missing
        # completion is a failure.
        if completion.error and completion.error != TOO_LONG:
            results[i] = Result("", error=False, failed=completion.error)
            continue
        text = f"Error: {completion.error}" if completion.error else after_thinking(completion.text)
        text = f"{text}{CUT}" if text and completion.cut else text
        numbers = seconds, completion.tokens, len(completion.ids)
        results[i] = result_of(text or "Error: no answer", *numbers)
    return results


def run_tool(function, name, arguments):
    """Run the function of a tool: Result."""
    start = time.perf_counter()
    try:
        result = function(**arguments)
        if inspect.isawaitable(result) or inspect.isgenerator(result):
            raise TypeError(f"it returned a {type(result).__name__}, not a string")
        text = "Error: no result" if result is None else services.without_whole_keys(str(result))
    except services.ServiceError as why:
        text = f"Error: {why}"
    except (Exception, SystemExit) as why:  # a bug in a tool is shown to the planner, too
        why = services.without_keys(f"{type(why).__name__}: {why}")
        text = f"Error: {name} failed: {why}"
    return result_of(text, time.perf_counter() - start)


def result_of(text, seconds, tokens=0, written=0):
    """The Result of a call that has finished. (If python_coder's program prints "Error: ...", that
    counts as an error, too.)"""
    error = text.startswith("Error:")
    return Result(truncate(text, RESULT_BUDGET), error, seconds, tokens, written)


def problem_with(call, tools):
    """Why a call cannot run, as a sentence for the model; "" if it can.

    >>> from executor import Call
    >>> problem_with(Call("python_coder", {"program": "print(6)"}), TOOLS)[:54]
    "Error: python_coder needs the argument 'code'. Example"
    """
    if isinstance(call, Unparsed):
        return f"Error: {call}"
    tool = tools[call.tool]
    problems = []
    for key in tool.arguments:
        if key not in call.arguments:
            problems.append(f"{call.tool} needs the argument {key!r}")
        elif not isinstance(call.arguments[key], str):
            problems.append(f"the argument {key!r} of {call.tool} must be a string")
    for key in call.arguments:
        if key not in tool.arguments:
            problems.append(f"{call.tool} has no argument {truncate(str(key), 80)!r}")
    return f"Error: {problems[0]}. Example: {tool.example}" if problems else ""
