"""docs/tour.html is what docs/annotate.py makes."""

import re
import sys
from pathlib import Path

import pytest
from test_flows import HOSTILE, TAGS, Reader

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
import annotate


def test_the_committed_tour_is_the_one_that_a_new_run_makes():
    """The text exactly. The rounded numbers nearly: another processor computes other last bits."""
    new, old = (
        re.split("<i>(.*?)</i>", page)
        for page in (annotate.make(), annotate.PAGE.read_text("utf-8"))
    )
    assert new[::2] == old[::2], "run: python docs/annotate.py"
    new, old = ([float(number) for number in page[1::2]] for page in (new, old))
    assert new == pytest.approx(old, rel=0.02, abs=0.002), "run: python docs/annotate.py"


def test_the_page_holds_no_script_and_loads_nothing():
    page = Reader(annotate.PAGE.read_text("utf-8"))
    assert page.tags <= {*TAGS, "a", "em", "h2", "i", "span"}
    assert page.attributes <= {*"lang charset http-equiv content name class id href".split()}


@pytest.mark.parametrize("text", HOSTILE)
def test_no_value_becomes_html(text):
    assert Reader(annotate.shown([text, {text: (text, 0.5)}])).tags == {"i"}
    assert not Reader(annotate.shown(text)).tags
