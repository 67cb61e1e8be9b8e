"""docs/tour.html is what docs/annotate.py makes of docs/tour.txt and a run."""

import re
import shutil
import subprocess
import sys

import pytest
from test_flows import HOSTILE, TAGS, Reader
from test_house import ORDER, ROOMS, ROOT

sys.path.insert(0, str(ROOT / "docs"))
import annotate

pytestmark = pytest.mark.exhaustive  # a fork's run may well look different


@pytest.fixture(scope="module")
def page():
    return annotate.make()


def same(page):
    """Is this the committed page? The text exactly, the rounded numbers nearly: another processor
    computes other last bits."""
    new, old = (re.split("<i>(.*?)</i>", text) for text in (page, annotate.PAGE.read_text("utf-8")))
    numbers = [[float(number) for number in parts[1::2]] for parts in (new, old)]
    return new[::2] == old[::2] and numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=1e-5)


def test_the_committed_tour_is_the_one_that_a_new_run_makes(page):
    if not same(page):
        pytest.fail("docs/tour.html shows an older state: run python docs/annotate.py")


def test_an_edit_of_what_the_tour_does_not_show_leaves_it_as_it_is(tmp_path):
    for name in [*ORDER, "docs/annotate", "experiments/flows"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / f"{name}.py", tmp_path / f"{name}.py")
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room)
    shutil.copy(annotate.STOPS, tmp_path / "docs")
    (tmp_path / "toy").symlink_to(ROOT / "toy")
    source = (tmp_path / "train.py").read_text("utf-8")
    for old, new in [
        ('now and then."""', 'now and then, and a remark."""\n    # a comment'),
        ('"temperature": 0.7', '"temperature": 0.5'),
        ('"minibatches": 4', '"minibatches": 2'),
        ('"clip_high": 0.3', '"clip_high": 9.0'),
        ('"lr": 4e-4', '"lr": 1e-2'),
        ("return row | metrics", 'return row | metrics | {"a_new_column": 1}'),
    ]:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (tmp_path / "train.py").write_text(source, "utf-8")
    subprocess.run([sys.executable, tmp_path / "docs/annotate.py"], check=True)
    assert same((tmp_path / "docs/tour.html").read_text("utf-8"))


def test_a_line_that_is_gone_or_a_moment_that_never_came_is_named():
    with pytest.raises(ValueError, match="in flow_grpo.py loss, no line begins with 'lost ='"):
        annotate.excerpt("flow_grpo.py loss", "ratio   = .. lost =")
    with pytest.raises(ValueError, match="no line begins with 'def gone"):
        annotate.excerpt("flow_grpo.py gone", "ratio   =")
    with pytest.raises(ValueError, match="train.py train: row = did not happen"):
        annotate.held(annotate.moment("train.py train: row = | step == 2 | step"))


def test_the_page_holds_no_script_and_loads_nothing(page):
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    page = Reader(page)
    assert page.tags <= {*TAGS, "a", "br", "em", "i", "span", "table", "tr", "td"}
    assert page.attributes <= {*"lang charset http-equiv content name class id href style".split()}


@pytest.mark.parametrize("text", HOSTILE)
def test_no_value_becomes_html(text):
    assert Reader(annotate.shown([text, 0.5])).tags == {"i"}
    assert Reader(annotate.shown([(text, 0.5)])).tags == {"table", "tr", "td", "i"}
    assert not Reader(annotate.shown(text)).tags
