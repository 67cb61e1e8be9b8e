"""docs/tour.html is what docs/annotate.py makes."""

import re
import sys
from pathlib import Path

import pytest
from test_flows import HOSTILE, TAGS, Reader

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
import annotate


@pytest.fixture(scope="module")
def page():
    return annotate.make()


def test_the_committed_tour_is_the_one_that_a_new_run_makes(page):
    """The text exactly. The rounded numbers nearly: another processor computes other last bits."""
    pages = page, annotate.PAGE.read_text("utf-8")
    new, old = (re.split("<i>(.*?)</i>", text) for text in pages)
    numbers = [[float(number) for number in parts[1::2]] for parts in (new, old)]
    if new[::2] != old[::2] or numbers[0] != pytest.approx(numbers[1], rel=0.02, abs=0.002):
        pytest.fail("docs/tour.html shows an older state: run python docs/annotate.py")


def test_the_page_has_each_note_and_each_line_of_code(page):
    assert page.count('class="box"') == len(re.findall(r"^\S", annotate.SHOWN, re.M))
    for name in annotate.NINE:
        lines = (annotate.ROOT / f"{name}.py").read_text("utf-8").splitlines()
        part = Reader(page.split(f'<h2 id="{name}">')[1].split("<h2")[0]).text
        assert all(" ".join(line.split()) in part for line in lines), name


def test_the_page_holds_no_script_and_loads_nothing(page):
    page = Reader(page)
    assert page.tags <= {*TAGS, "a", "em", "i", "span"}
    assert page.attributes <= {*"lang charset http-equiv content name class id href style".split()}


@pytest.mark.parametrize("text", HOSTILE)
def test_no_value_becomes_html(text):
    assert Reader(annotate.shown([text, {text: (text, 0.5)}])).tags == {"i"}
    assert not Reader(annotate.shown(text)).tags
