"""Marking is the reward, and whatever it forgives is learnt: each row says what is right, what is wrong, and what is not guessed."""
import json
import random
import time
from fractions import Fraction

import pytest

from rewards.questions import Question, prose_warning, read_questions
from rewards.rules import LIMIT, decide, game_of_24, is_right, normalise, number

ALPHABET = tuple(f"choice {i}" for i in range(26))
CITIES = ("London", "Paris", "Rome", "None of these")
CATASTROPHE = 30  # seconds of our own time for what takes milliseconds: a pattern that backtracks, or a huge power

RIGHT, WRONG = True, False
NUMBERS = [
    ("26", "26", RIGHT), ("26", "26.0", RIGHT), ("26", " 26. ", RIGHT), ("26", "**26**", RIGHT), ("26", "$$26$$", RIGHT),
    ("26", "\\boxed{26}", RIGHT),
    ("26", "The answer is 26.", RIGHT), ("26", "Final answer: 26", RIGHT), ("26", "26 protons", RIGHT), ("26", "x = 26", RIGHT),
    ("26", "(26)", RIGHT),
    ("26", "not 26", WRONG), ("26", "The answer is not 26", WRONG), ("26", "about 26", WRONG), ("26", "26 or 27", WRONG),
    ("26", "26, 27", WRONG),
    ("26", "27", WRONG), ("26", "-26", WRONG), ("26", "2 6", WRONG), ("26", "26th", WRONG), ("26", "26 million", WRONG),
    ("26", "26x", WRONG),
    ("26", "26!", WRONG), ("26", "26?", WRONG), ("26", "26 Angry Men", WRONG), ("26", "26 times", WRONG), ("26", "26 versus", WRONG),
    ("26", "I think it is 26, not 27.", WRONG),
    ("26", "26 = 27", WRONG), ("26", "≈26", WRONG), ("26", "≥ 26", WRONG), ("2026", "2026-01-05", WRONG), ("1990", "1990s", WRONG),
    ("1234", "1,234", RIGHT), ("1,234", "1234", RIGHT), ("1,234", "1, 234", WRONG), ("1234", "1 234", WRONG), ("1.23", "1,23", WRONG),
    ("-3", "−3", RIGHT), ("-3", "3", WRONG), ("3", "- 3", WRONG), ("073", "73", RIGHT), ("3.14", "3.14159", WRONG), ("1/3", "0.333", WRONG),
    ("3/4", "0.75", RIGHT), ("\\frac{3}{4}", "3/4", RIGHT), ("-\\dfrac34", "-0.75", RIGHT), ("1½", "1.5", RIGHT), ("3/4", "3/4/5", WRONG),
    ("1000", "10³", RIGHT), ("103", "10³", WRONG), ("1500", "1.5 × 10^3", RIGHT), ("1500", "1.5e3", RIGHT), ("5000000", "5 million", RIGHT),
    ("50%", "50 percent", RIGHT), ("50%", "50\\%", RIGHT), ("50%", "0.5", RIGHT), ("50%", "50", WRONG), ("50", "50%", WRONG),
    ("0.5", "50%", RIGHT),
    ("$5", "5 dollars", RIGHT), ("5", "$5", RIGHT), ("$5", "€5", WRONG), ("$5", "5", RIGHT), ("$1.5 billion", "1,500,000,000", RIGHT),
    ("5 km", "5", RIGHT), ("5 km", "5 kilometres", RIGHT), ("5 km", "5km", RIGHT), ("5 km", "5 miles", WRONG), ("5 km", "5000 m", WRONG),
    ("26 protons", "26", RIGHT), ("26 protons", "26 neutrons", WRONG), ("90", "90°", RIGHT), ("3x", "3", WRONG),
    ("12 Angry Men", "12", WRONG),
]
LISTS = [
    ("3, 5", "3, 5", RIGHT), ("3, 5", "(3, 5)", RIGHT), ("(3, 5)", "3,5", RIGHT), ("3, 5", "3 and 5", RIGHT),
    ("3, 5, 7", "3, 5, and 7", RIGHT),
    ("3, 5", "5, 3", WRONG), ("3, 5", "3", WRONG), ("3, 5", "3 5", WRONG), ("3, 5", "3, 5, 7", WRONG), ("(0, 1)", "[0, 1]", WRONG),
    ("[0, 1)", "(0, 1]", WRONG), ("(1,234)", "(1, 234)", RIGHT), ("(1,234)", "1234", WRONG), ("\\{1, 2\\}", "{1,2}", RIGHT),
]
TEXTS = [
    ("Paris", "paris.", RIGHT), ("Paris", "The answer is Paris.", RIGHT), ("Paris", '"Paris"', RIGHT), ("Paris", "not Paris", WRONG),
    ("Paris", "Paris or London", WRONG), ("Paris", "Paris, Texas", WRONG), ("Paris", "", WRONG), ("Paris", " \n", WRONG),
    ("Paris", "I do not know", WRONG),
    ("The Beatles", "Beatles", RIGHT), ("Beyoncé", "beyonce", RIGHT), ("Łódź", "Lodz", RIGHT), ("Straße", "STRASSE", RIGHT),
    ("が", "か", WRONG),
    ("U.S.", "US", RIGHT), ("well-known", "well known", RIGHT), ("Hepatitis A", "Hepatitis", WRONG), ("A", "the", WRONG),
    ("Jeopardy!", "jeopardy", RIGHT),
    ("C++", "C", WRONG), ("C++", "c++", RIGHT), ("!!!", "???", WRONG), ("!!!", "!!!", RIGHT),
    ("Simon & Garfunkel", "Simon and Garfunkel", RIGHT),
    ("Paris", "A) Paris", WRONG), ("yes", "Yes", RIGHT), ("yes", "no", WRONG), ("yes", "yes and no", WRONG),
    ("2026-01-05", "2026-01-05", RIGHT), ("2026-01-05", "2026-01-06", WRONG),
    ("3.5 billion years ago", "35 billion years ago", WRONG), ("-3 or less", "3 or less", WRONG), ("9" * 900, "9" * 900, RIGHT),
    ("x^2+1", "$x^2 + 1$", RIGHT), ("x^2+1", "x^2-1", WRONG), ("-x", "x", WRONG), ("x", "-x", WRONG), ("n!", "n", WRONG),
    ("5!", "5", WRONG),
    ("\\dfrac{\\pi}{2}", "\\frac{\\pi}{2}", RIGHT), ("(x+1)/2", "x+1/2", WRONG), ("2(x+1)", "2x+1", WRONG),
]
OPTIONS = [
    ("B", "B", RIGHT), ("B", "b", RIGHT), ("B", "(B)", RIGHT), ("B", "B.", RIGHT), ("B", "B) Paris", RIGHT), ("B", "B. paris", RIGHT),
    ("B", "option B", RIGHT), ("B", "Option B: Paris", RIGHT),
    ("B", "The answer is B", RIGHT), ("B", "The answer is (B) Paris.", RIGHT), ("B", "Paris", RIGHT), ("Paris", "B", RIGHT),
    ("B. Paris", "(b)", RIGHT),
    ("B", "A", WRONG), ("B", "London", WRONG), ("B", "B) London", WRONG), ("B", "A) Paris", WRONG), ("B", "A Paris", WRONG),
    ("B", "B Paris", RIGHT), ("B", "A or B", WRONG), ("B", "A, B", WRONG), ("B", "not B", WRONG),
    ("B", "Paris or Rome", WRONG), ("B", "E", WRONG), ("B", "Berlin", WRONG), ("B", "", WRONG), ("B", "2", WRONG),
    ("B", "I cannot decide", WRONG),
    ("D", "none of these", RIGHT), ("D", "D", RIGHT), ("B", "none of these", WRONG), ("A", "none of these", WRONG),
    ("A", "none of the above", WRONG), ("A", "A", RIGHT),
]

# gold, right, wrong, and what the rules leave to a judge: decide() is True, False, None
DECIDED = [
    ("26", ("26", "26.", "+26", "026", "\\text{26}", "The final answer is 26", "26 people"), ("27", "-26", "2.6", "26%", "260", "", " "),
     ("twenty-six", "about 26", "26 or 27", "not 26", "26th", "26 as computed", "26 = 27", "I do not know", "2 6")),
    ("3/4", ("0.75", "75%", "6/8", ".75", "\\tfrac{3}{4}", "¾", "x = 3/4"), ("4/3", "0.7500001", "3.4", "75"), ("three quarters", "3 of 4", "3:4")),
    ("50%", ("50 %", "1/2", "50 percent"), ("50", "5%", "0.05"), ("half", "fifty percent", "50% or so")),
    ("1,234,567", ("1234567", "1,234,567.0", "1.234567e6"), ("1,234,568", "1234", "12,34,567"), ("1.234.567", "1 234 567")),
    ("6.02e23", ("6.02 × 10^23", "6.02·10²³", "602e21", "6.02 x 10^{23}"), ("6.02e22", "6.02"), ("6.02 times a lot", "6.02 × 10", "6.02 × 10^")),
    ("5 km", ("5 kilometers", "5km", "5.0"), ("5 miles", "5000 m", "6 km", "$5"), ("five km", "5 km north", "5m")),
    ("$72,641", ("72641", "$72641", "72,641 dollars"), ("$72,640", "€72,641"), ("around $72,641", "$72.641k")),
    ("150 pounds", ("150 lbs", "£150", "150"), ("150 kg", "151 pounds"), ("150 stones",)), ("£150", ("150 pounds", "150 GBP"), ("150 lbs", "$150"), ()),
    ("5 minutes", ("5 min", "5 mins"), ("5 hours",), ("5 rounds",)), ("20 °C", ("20°C", "20"), ("20 °F", "20 kg"), ("20 degrees",)),
    ("26 protons", ("26", "26 protons"), ("27 protons",), ("26 neutrons", "26 km")),
    ("-1.5", ("−1.5", "-3/2", "-1 1/2"), ("1.5", "-15"), ("minus 1.5", "- 1.5")),
    ("3, 5", ("3,5", "(3, 5)", "3 and 5", "3; 5"), ("5, 3", "3", "3, 5, 7", "8"), ("3 or 5", "3 5", "three and five")),
    ("(1, 2)", ("(1,2)", "1, 2"), ("[1, 2]", "(2, 1)", "(1, 2, 3)"), ("(1, 2) or (2, 1)", "x=1, y=2")),
    ("x^2 + 1", ("x^2+1", "$x^2 + 1$"), ("",), ("1 + x^2", "x^2 - 1", "x**2+1", "5")),
    ("\\frac{\\pi}{2}", ("\\dfrac{\\pi}{2}",), (), ("\\pi/2", "1.5708", "\\frac{\\pi}{3}")),
    ("June 5, 2004", ("june 5, 2004", "June 5 2004", "The answer is June 5, 2004."), ("",), ("5 June 2004", "2004-06-05", "June 6, 2004", "2004")),
    ("2004", ("2004", "2,004"), ("2005",), ("June 5, 2004", "in 2004", "2004-06-05", "the 2000s")),
    ("João Esteves", ("joao esteves", "João  Esteves.", "**João Esteves**"), ("\n",), ("João", "Esteves, João", "João Esteves da Veiga")),
    ("Dvořák", ("dvorak", "DVOŘÁK"), (), ("Antonín Dvořák", "Dvo")),
    ("The African Queen", ("African Queen", "the african queen", "“The African Queen”"), (), ("Queen", "African Queens", "not The African Queen")),
    ("Who's Afraid of Virginia Woolf?", ("Who's Afraid of Virginia Woolf", "who's afraid of virginia woolf?"), (), ("Virginia Woolf?",)),
    ("Paris", ("paris", "PARIS!", "Answer: Paris"), ("",), ("Paris?", "not Paris", "Paris or London", "Paris, France", "London", "It is Paris", "5")),
    ("yes", ("Yes", "YES."), ("",), ("no", "yes and no", "Yes, both are", "true")),
    ("two", ("Two",), (), ("2", "one", "two or three")),
    ("Beijing", ("beijing",), ("9" * 2001, "Beijing" * 300), ("Peking", "北京")),
]
DECIDED_OPTIONS = [                                                  # of London, Paris, Rome, None of these
    ("B", ("B", "(b)", "B.", "[B]", "B) Paris", "b: paris", "Paris", "the answer is B", "choice B", "**B. Paris**"),
     ("A", "C)", "London", "A. London", "D", "none of these", ""),
     ("A or B", "B, C", "B) London", "A Paris", "E", "Z) Paris", "not B", "the capital of France", "none", "neither", "2", "Paris and Rome", "?")),
    ("None of these", ("D", "d)", "none of these.", "D) None of these"), ("A", "Rome", ""), ("none of the above", "None of these or A")),
]
CASES = [((), gold, *case) for gold, *columns in DECIDED for verdict, responses in zip((True, False, None), columns)
         for case in zip(responses, [verdict] * len(responses))]
CASES += [(CITIES, gold, *case) for gold, *columns in DECIDED_OPTIONS for verdict, responses in zip((True, False, None), columns)
          for case in zip(responses, [verdict] * len(responses))]


@pytest.mark.parametrize("choices, answer, response, verdict", CASES)
def test_the_rules_say_true_false_or_that_only_a_judge_could_tell(choices, answer, response, verdict):
    question = Question("?", answer, choices=choices)
    assert decide(question, response) is verdict
    assert is_right(question, response) is (verdict is True), "what only a judge could tell is not right without one"


def test_the_table_of_verdicts_is_long_and_has_every_verdict():
    assert len(CASES) >= 120 and len(set(CASES)) == len(CASES)
    assert all(sum(case[-1] is verdict for case in CASES) >= 40 for verdict in (True, False, None))


@pytest.mark.parametrize("response, verdict", [("51", None), ("50", True), ("US of A", None), ("", False)])
def test_one_gold_of_words_among_the_aliases_is_enough_to_need_a_judge(response, verdict):
    assert decide(Question("?", "50", aliases=("fifty",)), response) is verdict


def test_two_numbers_as_aliases_leave_nothing_to_a_judge_but_words():
    question = Question("?", "50", aliases=("51", " "))
    assert [decide(question, text) for text in ("50", "51", "52", "fifty")] == [True, True, False, None]


def test_a_game_of_24_needs_no_judge_and_a_question_without_a_gold_has_no_right_answer():
    game = Question("1 2 3 4", "24", kind="gameof24")
    assert [decide(game, text) for text in ("1*2*3*4", "4*6", "no solution", "")] == [True, False, False, False]
    assert [decide(Question("?", gold), text) for gold in ("", "  ") for text in ("Paris", "")] == [False] * 4


@pytest.mark.parametrize("choices, answer, response, verdict", [
    (("200 mL", "200 mL", "180 mL"), "A. 200 mL", "200 mL", True), (("200 mL", "200 mL", "180 mL"), "A. 200 mL", "B", True),
    (("200 mL", "200 mL", "180 mL"), "C", "200 mL", False), (("q/L^2", "q/l^2"), "A", "q/L^2", True),
    (("q/L^2", "q/l^2"), "A", "q/l^2", False), (("q/L^2", "q/l^2"), "A", "Q/L^2", None), (("c", "a", "b"), "A", "c", None)])
def test_two_options_of_one_text_are_one_option_and_case_tells_two_apart(choices, answer, response, verdict):
    assert decide(Question("?", answer, choices=choices), response) is verdict


@pytest.mark.parametrize("answer, response, verdict", NUMBERS + LISTS + TEXTS)
def test_a_response_is_right_or_wrong_and_never_nearly_right(answer, response, verdict):
    assert is_right(Question("?", answer), response) is verdict


@pytest.mark.parametrize("answer, response, verdict", OPTIONS)
def test_a_response_names_exactly_one_option_or_is_wrong(answer, response, verdict):
    assert is_right(Question("?", answer, choices=CITIES), response) is verdict


@pytest.mark.parametrize("response, verdict", [
    ("USA", RIGHT), ("United States", RIGHT), ("50", RIGHT), ("50.0", RIGHT), ("51", WRONG), ("US of A", WRONG)])
def test_an_alias_is_as_good_as_the_answer(response, verdict):
    assert is_right(Question("?", "United States", aliases=("U.S.A.", "50")), response) is verdict


@pytest.mark.parametrize("response", ["none of these", "Z", "", "?", "A B C", "the first one", "option", "None"])
def test_no_response_falls_back_to_the_first_option(response):
    assert not is_right(Question("?", "A", choices=("London", "Paris")), response)


@pytest.mark.parametrize("choices, answer, response, verdict", [
    (("A. 0.9", "B. 0.95"), "A. 0.9", "0.90", RIGHT), (("A. 0.9", "B. 0.95"), "A", "A", RIGHT),
    (("A. 0.9", "B. 0.95"), "A. 0.9", "A) 0.95", WRONG),
    (("1", "2", "3"), "B", "2", RIGHT), (("5 km", "5 m"), "A", "5", WRONG), (("5 km", "5 m"), "A", "5 km", RIGHT),
    (("Emma", "Ulysses", "A Tale"), "C", "A Tale", RIGHT), (("Emma", "Ulysses", "A Tale"), "C", "tale", RIGHT),
    (("B", "A"), "A", "A", WRONG)])        # the letter A and the text "A" are different options here, so nothing is right
def test_options_may_bring_their_letters_and_be_numbers(choices, answer, response, verdict):
    assert is_right(Question("?", answer, choices=choices), response) is verdict


@pytest.mark.parametrize("response, verdict", [("5", RIGHT), ("5 km", RIGHT), ("5 kilometers", RIGHT), ("5 miles", WRONG), ("$5", WRONG)])
def test_a_unit_the_question_did_not_ask_for_is_wrong(response, verdict):
    assert is_right(Question("How many km is it?", "5"), response) is verdict


@pytest.mark.parametrize("text, value", [
    ("1,234.5", Fraction(2469, 2)), (".5", Fraction(1, 2)), ("-3/4", Fraction(-3, 4)), ("€3.50", Fraction(7, 2)),
    ("2\\frac{1}{2}", Fraction(5, 2)), ("-$5", -5),
    ("1 234", None), ("1,23", None), ("1.2.3", None), ("1/0", None), ("2 3/2", None), ("3x", None), ("5m", None), ("twenty", None),
    ("", None), ("one", None),
    ("inf", None), ("nan", None), ("0x10", None), ("1_000", None), ("1e999999999", None), ("9" * 1000, None),
    ("$5%", None), ("$5 euros", None), ("26protons", None),
    ("26-27", None),
    ("5:30", None)])
def test_a_number_is_one_number_by_value_or_none(text, value):
    assert number(text) == value


@pytest.mark.parametrize("text, plain", [
    ("  The  Eiffel Tower! ", "eiffel tower"), ("Café", "cafe"), ("O'Brien", "obrien"), ("A", "a"), ("the", "the"), ("日本", "日本"),
    ("हिन्दी", "हिन्दी"), ("Pa\u200bris", "paris"), ("-3.5", "-3.5"), ("1,234", "1234"), ("", "")])
def test_normalise_keeps_what_changes_the_meaning(text, plain):
    assert normalise(text) == plain == normalise(plain)


@pytest.mark.parametrize("numbers, response, verdict", [
    ((1, 2, 3, 4), "(1+2+3)×4", RIGHT), ((1, 2, 3, 4), "(1 + 2 + 3) * 4 = 24", RIGHT), ((3, 3, 8, 8), "8 / (3 - 8 / 3)", RIGHT),
    ((1, 2, 3, 4), "1*2*3*4", RIGHT),
    ((4, 4, 10, 10), "(10×10−4)÷4 = 24", RIGHT), ((3, 3, 8, 8), "$\\frac{8}{3-\\frac{8}{3}}$", RIGHT),
    ((1, 2, 3, 4), "The answer is 4 x 3 x 2 x 1.", RIGHT),
    ((1, 2, 3, 4), "4*6", WRONG), ((1, 2, 3, 4), "1+2+3+4", WRONG), ((1, 2, 3, 4), "24", WRONG), ((1, 2, 3, 4), "1*2*3*4*1", WRONG),
    ((2, 2, 2, 3), "2*2*2*3*1", WRONG),
    ((1, 2, 3, 4), "1*2*3*4 or 4*3*2*1", WRONG), ((1, 2, 3, 4), "1*2*3*4\n4*3*2*1", WRONG), ((1, 2, 3, 4), "1*2*3*4 = 24 = 24", WRONG),
    ((1, 2, 3, 4), "", WRONG),
    ((1, 2, 3, 4), "12*(3-4+3)", WRONG), ((2, 4, 4, 8), "(2**4)+4+8", WRONG), ((3, 8, 1, 1), "3*8//1//1", WRONG),
    ((1, 1, 3, 8), "-(-1)*1*3*8", WRONG),
    ((1, 2, 3, 4), "1*2*3*4 = 25", WRONG), ((4, 6, 1, 1), "4*6/(1-1)", WRONG), ((1, 2, 3, 4), "True*2*3*4", WRONG),
    ((1, 2, 3, 4), "4!", WRONG),
    ((1, 2, 3, 4), "(1+2+3)(4)", WRONG), ((1, 2, 3, 4), "1.0*2*3*4", WRONG), ((98, 97), "99**98**97", WRONG),
    ((1,), "__import__('os').abort()", WRONG),
    ((1, 2, 3, 4), "(" * 90 + "1*2*3*4" + ")" * 90, RIGHT), ((1, 2, 3, 4), "(" * 500 + "1" + ")" * 500, WRONG),
    ((1, 2, 3, 4), "9" * 5000, WRONG),
    ((1, 2, 3, 4), "1+" * 10**6 + "1", WRONG), ((1, 2, 3, 4), "(" * 10**6, WRONG), ((1, 2, 3, 4), "1*2*3*4\0", WRONG),
    ((24, *[0] * 150), "24" + "+0" * 150, WRONG)])                  # right, but longer than any game: refused unread
def test_game_of_24_takes_one_expression_with_exactly_these_numbers(numbers, response, verdict):
    start = time.process_time()
    assert game_of_24(numbers, response) is verdict
    assert time.process_time() - start < CATASTROPHE


@pytest.mark.parametrize("answer", ["1 2 3 4", "[1, 2, 3, 4]", "(1+2+3)*4 = 24", "24"])
def test_a_game_of_24_question_is_marked_by_its_numbers(answer):
    question = Question("Make 24 from 1, 2, 3, and 4.", answer, kind="gameof24")
    assert is_right(question, "1*2*3*4") and not is_right(question, "4*6") and not is_right(question, "24")


@pytest.mark.parametrize("response", [
    "a" * 10**6, "9" * 10**6, " " * 10**6 + "6", "(" * 10**6, "$" * LIMIT, " , " * 600, "1," * 900, "1 " * 900, "\\text{" * 300,
    "\ufdfa" * 1900, "\ufdfa" * 100, "**" * 900, "-" * 1900,
    "9" * 5000, "1e999999999", "1e-999999999", "1e" + "9" * 1900, "10^" + "9" * 500, "1/" + "9" * 500, "\ud800", "26\0", "\0",
    "\u202e26", "the " * 480, "\ud83d 26"])
def test_a_hostile_response_is_wrong_at_once(response):
    start = time.process_time()
    options, game = Question("?", "B", choices=ALPHABET), Question("1 2", "24", kind="gameof24")
    for gold in (Question("?", "62"), Question("?", "Paris"), Question("?", "x^2"), options, game):
        assert is_right(gold, response) is False
    assert time.process_time() - start < CATASTROPHE


def test_marking_never_raises_on_random_strings():
    dice = random.Random(24)
    pieces = [*"0123456789.,-+*/^%$()[]{}\\ \n\0=ABab€½²−×\ud800\u0301", "\\frac{", "\\text{", "the answer is ", " or ", " and ", " km", "**"]
    golds = [Question("How many km?", "5 km"), Question("?", "(3, 5)"), Question("?", "a"),
             Question("?", "B", choices=("1", "2 km")), Question("1 2", "24", kind="gameof24")]
    for i in range(4000):
        response = "".join(dice.choices(pieces, k=dice.randrange(12)))
        is_right(golds[i % 5], response)
        assert is_right(Question("?", response), response) is bool(response.strip()), "a gold answer equals itself"


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_load_reads_questions_in_order_and_turns_numbers_into_text(tmp_path):
    full = {"question": "é\u2028?", "answer": 0.5, "aliases": [1, "x"], "id": 7, "kind": "math"}
    path = write(tmp_path / "q.jsonl", {"question": "2 + 2?", "answer": 4, "pid": 9}, "", json.dumps(full, ensure_ascii=False))
    assert read_questions(path) == [Question("2 + 2?", "4"), Question("é\u2028?", "0.5", aliases=("1", "x"), id="7", kind="math")]


@pytest.mark.parametrize("answer, gold", [
    ("She sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips.\n#### 72", "72"),
    ("It costs $1,234.\n#### 1,234\n", "1,234"), ("#### -3", "-3"), ("a\n#### 1\nb\n#### 2 km", "2 km"),
    ("x" * 2500 + "\n#### 5", "5"),                        # the solution may be longer than a gold
    ("a\n#### 1\nand more", "a\n#### 1\nand more"), ("C #### 4", "C #### 4"), ("#### ", "#### ")])
def test_the_gold_of_a_worked_solution_is_its_last_line_after_four_hashes(tmp_path, answer, gold):
    question, = read_questions(write(tmp_path / "gsm8k.jsonl", {"question": "How many?", "answer": answer}))
    assert question.answer == gold and is_right(question, gold)


PROSE = "It rains because warm air rises, cools down there, and then lets go of its water."


@pytest.mark.parametrize("golds, warned", [
    ([PROSE] * 3 + ["26"] * 2, True), ([PROSE] * 2 + ["26"] * 3, False), ([""], False),
    (["word " * 12], False), (["word " * 13], True)])
def test_golds_of_prose_are_told_before_a_run_that_has_no_judge(golds, warned):
    questions = [Question("Why?", gold) for gold in golds]
    assert ("give --judge MODEL" in prose_warning(questions)) is warned
    assert not prose_warning([Question("Why?", gold, aliases=("rain",)) for gold in golds])
    assert not prose_warning([Question("Why?", gold, choices=(gold, "26")) for gold in golds])


def test_two_questions_with_one_id_are_two_items(tmp_path):
    rows = read_questions(write(tmp_path / "q.jsonl", *[{"question": "?", "answer": a, "id": "0"} for a in "ABA"]))
    assert [row.answer for row in rows] == ["A", "B", "A"]


@pytest.mark.parametrize("row, sentence", [
    ("{", "not JSON"), ("{\"question\": \"?\", \"answer\": NaN}", "not JSON"), ("[" * 9999, "not JSON"), ("9" * 9999, "not JSON"),
    ([1], "not a JSON object but a list"),
    ({"answer": "4"}, 'lacks "question"'), ({"question": "?"}, 'lacks "answer"'),
    ({"question": "  ", "answer": "4"}, '"question" is empty'),
    ({"question": "?", "answer": ""}, '"answer" is empty'), ({"question": 5, "answer": "4"}, '"question" must be text, not 5'),
    ({"question": "?", "answer": None}, '"answer" must be text'),
    ({"question": "?", "answer": True}, '"answer" must be text or a number, not true'),
    ({"question": "?", "answer": ["4"]}, '"answer" must be text or a number'),
    ({"question": "?", "answer": "4", "aliases": "four"}, '"aliases" must be a list, not "four"'),
    ({"question": "?", "answer": "4", "aliases": [None]}, '"aliases" must be text'),
    ({"question": "?", "answer": "E", "choices": ["x", "y"]}, "'E' is not exactly one of the choices"),
    ({"question": "?", "answer": "x" * 9999}, "more than 2000 characters"),
    ({"question": "?", "answer": "24", "kind": "gameof24"}, "names no numbers"), ({"question": "?", "answer": "4", "kind": 1},
    '"kind" must be text')])
def test_load_names_the_file_the_line_and_the_fault(tmp_path, row, sentence):
    with pytest.raises(ValueError) as error:
        read_questions(write(tmp_path / "q.jsonl", {"question": "?", "answer": "1"}, row))
    assert "q.jsonl, line 2: " in str(error.value) and sentence in str(error.value)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_load_names_a_file_that_is_missing_empty_or_not_text(tmp_path):
    (tmp_path / "bytes.jsonl").write_bytes(b'{"question": "\xff", "answer": 1}')
    for path, sentence in ((tmp_path / "none.jsonl", "no such file"), (write(tmp_path / "empty.jsonl", "", " "), "is empty"),
        (tmp_path, "cannot be read"), (tmp_path / "bytes.jsonl", "line 1: not JSON")):
        with pytest.raises(ValueError, match=sentence) as error:
            read_questions(path)
        assert str(path) in str(error.value)
