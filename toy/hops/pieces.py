"""The constant pieces of the second toy's prompts and texts, each a token of its vocabulary (toy/pieces.py).

Its tokenizer is the first toy's with more tokens: these pieces, its made-up names and its addresses.
"""

import planner
import tools as toolset
from toy import pieces
from toy.hops import teacher
from toy.hops.questions import NAMES, OLD_NAMES, URLS


def prompt_pieces():
    """All new tokens, in the order of the vocabulary; none of them is one of the first toy's."""
    found = [planner.describe("web_search", toolset.TOOLS["web_search"]), " web_search"]
    found += ['web_search(url="', " web_search(url='", '", query="number of', "', query='number of"]
    for name in ("wikipedia_search", "base_generator"):
        found += [f'{name}(query="number of', f" {name}(query='number of"]
    found += ['python_coder(code="number =', " python_coder(code='number ="]
    found += ['; print(number)")', "; print(number)')"]
    found += [*teacher.SKILLS.values(), *teacher.CHECKS.values(), teacher.WHY]
    found += [teacher.FOUND, teacher.UNKNOWN, teacher.END, f" {teacher.GOAL}".rstrip()]
    found += [": The number of", " is at", ", but see", "It is now called", " It is now called", "\n  [2]"]
    found += [" [1] passage 1 of 1 (", "): The number is", "): The number is at", "): It is filed as"]
    found += [" Error: no passage matches 'number of", " Error: this address is not a page of the corpus: "
              "take one that a result has shown"]
    found += [" Error: this is not a URL that can be read: it must be http or https, "
              "with a host and no password",
              " Error: this URL is too long, or has characters that no URL has"]
    found += [f" {name}" for name in (*NAMES, *OLD_NAMES)] + URLS
    known = pieces.prompt_pieces()
    return list(dict.fromkeys(piece for piece in found if piece not in known))
