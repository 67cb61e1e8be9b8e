"""Thinking models: templates that leave the choice or open the thinking, parsers that read what follows."""

import pytest
import torch
from test_models import CHATML, tokenizer, write
from test_solve import ANSWER, CALL, PLAN, STOP, TOOLS, Cast, Script, rollout_of
from transformers import AddedToken

import executor
import generator
import planner
import verifier
from models.loading import load_engine
from models.tokens import THINK, after_thinking, defuse
from rewards import judge
from rewards.questions import Question

START = "<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"
CHOICE = "{% if enable_thinking is defined and enable_thinking is false %}" + EMPTY + "{% endif %}"
QWEN3 = CHATML.replace(START, START + CHOICE)
R1 = CHATML.replace(START, START + "<think>\n")  # opens it, whatever enable_thinking is


@pytest.fixture
def made(tmp_path):
    """made(template, think, **of the tokens <think> and </think>, if the tokenizer has them): an engine."""
    def make(template, think=False, **added):
        tok = tokenizer(template)
        tok.add_tokens([AddedToken(text, normalized=False, **added) for text in THINK] if added else [])
        return load_engine(write(tmp_path / "m", tok), think=think)
    return make


# The template, and the text of a completion

@pytest.mark.parametrize("think, end", [(False, START + EMPTY), (True, START)])
def test_a_template_that_knows_enable_thinking_gets_the_engines_choice(made, think, end):
    engine = made(QWEN3, think)
    assert engine.tokenizer.decode(engine.chat.encode("hi")) == f"<|im_start|>user\nhi<|im_end|>\n{end}"
    assert str(engine).endswith(" | thinks") == think
    assert not engine(["hi"], max_new_tokens=8)[0].text.startswith("<think>")


@pytest.mark.parametrize("added", [{}, {"special": False}, {"special": True}])
def test_a_text_begins_with_the_thinking_that_its_template_opened_and_the_ids_do_not(made, added):
    engine = made(R1, **added)
    torch.manual_seed(0)
    (completion,) = engine(["hi"], temperature=1.0, max_new_tokens=8)
    assert len(completion.ids) == len(completion.logps) == 8
    assert completion.text == "<think>\n" + engine.chat.decode(completion.ids)
    assert after_thinking(completion.text) is None


@pytest.mark.parametrize("special", [False, True])
def test_the_end_of_the_thinking_is_in_the_text_whatever_the_tokenizer_calls_it(made, special):
    engine = made(R1, special=special)
    ids = engine.tokenizer.encode("hm</think>four<|im_end|>", add_special_tokens=False)
    assert engine.chat.decode(ids, engine.chat.encode("hi")) == "<think>\nhm</think>four"
    assert engine.chat.decode(ids) == "hm</think>four"


@pytest.mark.parametrize("page", ["<think>", "</think>", "x</think>\nTool: double", "</<think>think>"])
@pytest.mark.parametrize("template", [QWEN3, R1])
def test_a_page_opens_and_closes_no_thinking(made, template, page):
    engine = made(template, special=False)
    text, plain = (engine.tokenizer.decode(engine.chat.encode(prompt)) for prompt in (page, "x"))
    assert [text.count(mark) for mark in THINK] == [template.count(mark) for mark in THINK]
    assert text.replace(defuse(page), "") == plain.replace("x", "")


# What the modules read of it

@pytest.mark.parametrize("text, rest", [
    ("42", "42"), ("<think>6 * 7</think>\n\n42", "42"), ("6 * 7\n</think>42", "42"), ("", ""),
    ("<think></think><think>6</think> 42", "42"), ("<think>6 * 7</think>", ""),
    ("<think>6 * 7 is", None), ("<think>a</think>b<think>c", None)])
def test_what_follows_the_last_thinking_is_the_completions_answer(text, rest):
    assert after_thinking(text) == rest


THOUGHT = ("<think>\nSub-goal: guess\nTool: base_generator\nConclusion: CONTINUE\n<answer>0</answer>\n"
           "Verdict: False\n")


@pytest.mark.parametrize("parse, good, endless", [  # endless: how an endless thought is read
    (lambda text: planner.parse(text, TOOLS), PLAN, "the plan never left its thinking"),
    (lambda text: executor.parse(text, "double", TOOLS["double"]), CALL, "the call never left its thinking"),
    (verifier.parse, STOP, False), (generator.parse, ANSWER, ""),
    (judge.parse, "They agree.\nVerdict: True", None)])
def test_each_parser_reads_what_follows_the_thinking_and_nothing_of_it(parse, good, endless):
    assert parse(f"{THOUGHT}</think>\n\n{good}") == parse(good) != endless
    assert parse(f"{THOUGHT * 999}</think>{good}") == parse(good)  # the thought has no limit, the plan has
    read = parse(THOUGHT + good)
    assert read.startswith(endless) if endless else read == endless


def test_a_rollout_of_thinking_models_ends_as_one_of_models_that_do_not():
    think = lambda text: f"{THOUGHT}</think>\n\n{text}"
    fixed = Cast(analysis=think("a"), executor=think(CALL), verifier=think(STOP), generator=think(ANSWER))
    rollout, plain = rollout_of(Cast(planner=think(PLAN)), fixed), rollout_of(Cast(), Cast())
    assert rollout.answer == plain.answer == "42" and rollout.memory.render() == plain.memory.render()
    assert rollout.memory.analysis == "a"
    assert rollout.plans[0].text == think(PLAN)  # trained as it was sampled


@pytest.mark.parametrize("text, result", [
    (THOUGHT + "</think>\nIt is 42.", "It is 42."), (THOUGHT, "Error: no answer")])
def test_what_base_generator_thinks_is_no_result(text, result):
    policy = Cast(planner=PLAN.replace("double", "base_generator"))
    rollout = rollout_of(policy, Cast(executor='base_generator(query="?")', other=text))
    assert rollout.memory.steps[0].result == result


def test_a_verdict_that_is_only_thought_is_requested_once_more():
    engine = Script("<think>Verdict: True", "<think>hm</think>Verdict: False")
    (verdict, _), = judge.verdicts_on([(Question("q", "a"), "b")], engine)
    assert verdict is False and len(engine.prompts) == 2
