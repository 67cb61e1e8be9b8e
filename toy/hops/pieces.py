"""The constant pieces of the second toy's prompts and texts, each a token of its vocabulary (toy/pieces.py).

Its tokenizer is the first toy's with more tokens: these pieces, its made-up names and its addresses.
"""

import planner
import tools as toolset
from toy import pieces
from toy.hops import teacher
from toy.hops.questions import NAMES, OLD_NAMES, URLS


def prompt_pieces():
    """{piece: where it comes from} of all new tokens, in the order of the vocabulary. None of them is a token
    of the first toy."""
    tool = planner.describe("web_search", toolset.TOOLS["web_search"])
    found = {"web_search:": "a tool's name", " web_search": "a tool's name"}
    found |= dict.fromkeys(pieces.lines(tool.removeprefix("web_search:")), "tools.TOOLS['web_search']")
    calls = ['web_search(url="', " web_search(url='", '", query="number of', "', query='number of"]
    for name in ("wikipedia_search", "base_generator"):
        calls += [f'{name}(query="number of', f" {name}(query='number of"]
    calls += ['python_coder(code="number =', " python_coder(code='number ="]
    calls += ['; print(number)")', "; print(number)')"]
    found |= dict.fromkeys(calls, "a call")
    texts = [*teacher.SKILLS.values(), *teacher.CHECKS.values(), teacher.WHY]
    texts += [teacher.FOUND, teacher.UNKNOWN, teacher.END, f" {teacher.GOAL}".rstrip()]
    texts += [": The number of", " is at", ", but see", "It is now called", " It is now called", "\n  [2]"]
    texts += [" [1] passage 1 of 1 (", "): The number is", "): The number is at", "): It is filed as"]
    found |= dict.fromkeys(texts, "toy/hops/teacher.py")
    errors = [" no passage matches 'number of", " this address is not a page of the corpus: "
              "take one that a result has shown"]
    errors += [" this is not a URL that can be read: it must be http or https, with a host and no password",
               " this URL is too long, or has characters that no URL has"]
    found |= dict.fromkeys(errors, "an error")
    found |= dict.fromkeys([f" {name}" for name in (*NAMES, *OLD_NAMES)] + URLS, "toy/hops/questions.py")
    known = pieces.prompt_pieces()
    return {piece: where for piece, where in found.items() if piece not in known}
