"""Thinking models: templates that leave the choice or open the thinking, marks, parsers."""

import pytest
from test_chat import CHATML, tokenizer
from test_modules import CALL, PLAN, TOOLS, read
from transformers import AddedToken

import generator
import planner
import verifier
from models.chat import THINK, Chat, after_thinking, defuse, plain_thoughts, unknown_thoughts

START = "<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"
CHOICE = "{% if enable_thinking is defined and enable_thinking is false %}" + EMPTY + "{% endif %}"
QWEN3 = CHATML.replace(START, START + CHOICE)
R1 = CHATML.replace(START, START + "<think>\n")  # opens it, whatever enable_thinking is


@pytest.mark.parametrize("think, end", [(False, START + EMPTY), (True, START)])
def test_a_template_that_knows_enable_thinking_gets_the_choice(think, end):
    chat = Chat(tokenizer(QWEN3), think=think)
    ids = chat.encode("hi")
    assert chat.tokenizer.decode(ids) == f"<|im_start|>user\nhi<|im_end|>\n{end}"
    assert chat.decode(chat.tokenizer.encode("four"), ids) == "four"


DEEPSEEK = CHATML.replace(START, START + "{{ '<think>' if thinking else '</think>' }}")
EFFORT = "Reasoning: {{ reasoning_effort or 'high' }}\n"


@pytest.mark.parametrize(
    "template, without, thinking",
    [
        (DEEPSEEK, "</think>", "<think>"),
        (EFFORT + CHATML + "<|channel|>", "Reasoning: low\n", "Reasoning: medium\n"),  # gpt-oss
        (EFFORT + CHATML, "Reasoning: high\n", "Reasoning: high\n"),  # values nobody knows
    ],
)
def test_the_switch_may_have_another_name(template, without, thinking):
    for think, mark in ((False, without), (True, thinking)):
        chat = Chat(tokenizer(template), think=think)
        assert mark in chat.tokenizer.decode(chat.encode("hi"))


@pytest.mark.parametrize(
    "template, said",
    [
        (CHATML, 0),
        (QWEN3, 0),
        (DEEPSEEK, 0),
        (R1, 1),
        (EFFORT + CHATML, 1),
        (CHATML + "[/THINK]", 1),
    ],
)
def test_a_template_that_mentions_thinking_without_a_known_switch_is_named(template, said):
    remarks = list(filter(None, Chat(tokenizer(template)).remarks()))
    assert len(remarks) == said and all("--think changes nothing" in remark for remark in remarks)


@pytest.mark.parametrize("special", [None, False, True])
def test_the_thinking_that_a_template_opened_is_in_the_text_whatever_the_tokenizer_calls_it(
    special,
):
    tok = tokenizer(R1)
    if special is not None:
        tok.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in THINK])
    chat = Chat(tok)
    ids = tok.encode("hm</think>four<|im_end|>", add_special_tokens=False)
    assert chat.decode(ids, chat.encode("hi")) == "<think>\nhm</think>four"
    assert chat.decode(ids) == "hm</think>four"


@pytest.mark.parametrize("page", ["<think>", "x</think>\nTool: double", "</<think>think>"])
@pytest.mark.parametrize("template", [QWEN3, R1])
def test_a_page_opens_and_closes_no_thinking(template, page):
    tok = tokenizer(template)
    tok.add_tokens(list(THINK))
    text, plain = (tok.decode(Chat(tok).encode(prompt)) for prompt in (page, "x"))
    assert [text.count(mark) for mark in THINK] == [template.count(mark) for mark in THINK]
    assert text.replace(defuse(page), "") == plain.replace("x", "")


# ---- other marks
COMPLETIONS = {  # marks, as separate tokens of the vocabulary -> a completion
    "<|channel|> <|message|> <|end|> <|start|>": "<|channel|>analysis<|message|>6 * 7<|end|>"
    "<|start|>assistant<|channel|>final<|message|>42",
    "[THINK] [/THINK]": "[THINK]6 * 7[/THINK]42",
    "<|channel> <channel|>": "<|channel>thought\n6 * 7<channel|>42",
    "<seed:think> </seed:think>": "<seed:think>6 * 7</seed:think>42",
    "<|START_THINKING|> <|END_THINKING|> <|START_RESPONSE|>": "<|START_THINKING|>6 * 7"
    "<|END_THINKING|><|START_RESPONSE|>42",
    "<|inner_prefix|> <|inner_suffix|>": "<|inner_prefix|>6 * 7<|inner_suffix|>42",
    "<thought> </thought>": "<thought>6 * 7</thought>42",
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("marks", COMPLETIONS)
def test_thoughts_between_other_marks_are_thoughts(marks, special):
    tok, text = tokenizer(), COMPLETIONS[marks]
    tok.add_tokens([AddedToken(t, special=special, normalized=False) for t in marks.split()])
    chat = Chat(tok)
    decode = lambda text: chat.decode(tok.encode(text, add_special_tokens=False))
    assert after_thinking(decode(text)) == "42"
    assert after_thinking(decode(text[: text.index("7") + 1])) is None
    assert unknown_thoughts(tok) == ""


ANALYSIS = "<|channel|>analysis<|message|>6 * 7<|end|><|start|>assistant"
QUOTED = [  # marks in an answer hide nothing
    "Here are my reasoning steps: 6 * 7. <answer>42</answer>",
    "It begins: Here are my reasoning steps: and [BEGIN FINAL RESPONSE]",
    "A <think> opens a thought.",
    "A <think> opens a thought, a </think> closes it, a <think> opens another.",
    "Magistral writes [THINK] and [/THINK], gpt-oss <|channel|>final<|message|>.",
    "`<|channel|>analysis<|message|>` and <|channel|>commentary<|message|> are channels.",
    "(<thought> and </thought>)",
]


@pytest.mark.parametrize(
    "text, rest",
    [
        ("analysis6 * 7 is easy.assistantfinal42", "42"),  # gpt-oss, its special tokens dropped
        ("We need 6 * 7.assistantfinal42", "42"),
        ("analysisWe need 6 * 7", None),
        ('analysis_db(query="x")', 'analysis_db(query="x")'),
        ("analysis('x')", "analysis('x')"),
        ("analysis(6 * 7) is easy.assistantfinal42", "42"),
        ("<|channel|>commentary<|message|>I add.<|end|><|channel|>final<|message|>42", "42"),
        ("Here are my reasoning steps:\n6 * 7\n[BEGIN FINAL RESPONSE]\n42", "42"),
        ("analysis of 42", "analysis of 42"),
        ("<unused94>thought\n6 * 7<unused95>42", "42"),
        ("<|START_RESPONSE|>42<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "42"),
        ("<think>6 * 7</think>\n<|begin_of_box|>42<|end_of_box|>", "42"),
        ("<think>6 * 7</think>\n<response>\n42\n</response>", "42"),
        ("<|x|>" * 99_999 + "42", "<|x|>" * 99_997 + "42"),
        (" \n[THINK]6 * 7 [THINK][/THINK]42", "42"),
        ("6 * 7 [/THINK]It writes [THINK].", "It writes [THINK]."),
        (f"{ANALYSIS}<|channel|>final <|constrain|>json<|message|>42", "42"),
        ("<|channel|>final json<|message|>42", "42"),
        (f"{ANALYSIS}<|channel|>commentary to=f x", "to=f x"),
        (f"{ANALYSIS} to=f<|channel|>x", "to=f<|channel|>x"),
        ("42", "42"),
        ("6 * 7\n</think>42", "42"),
        ("<think></think><think>6</think> 42", "42"),
        ("<think>6 * 7</think>", ""),
        ("<think>a</think>b<think>c", None),
        *zip(QUOTED, QUOTED),
    ],
)
def test_thoughts_in_the_text_of_a_server_are_thoughts(text, rest):
    assert after_thinking(plain_thoughts(text)) == rest


@pytest.mark.parametrize(
    "call",
    [
        "<|channel|>commentary to=functions.python_coder <|constrain|>json<|message|>{}<|call|>",
        " to=functions.python_coder<|channel|>commentary json<|message|>{}",
    ],
)
def test_a_call_of_gpt_oss_ends_its_thinking(call):
    call = call.replace("{}", '{"code": "print(6 * 7)"}')
    for thought in ("", "<|channel|>analysis<|message|>print(1)<|end|><|start|>assistant"):
        assert read(after_thinking(plain_thoughts(thought + call))) == read(CALL)


@pytest.mark.parametrize("opens, closes", [THINK, ("[THINK]", "[/THINK]")])
def test_a_mark_that_is_a_token_of_its_own_opens_thoughts_anywhere(opens, closes):
    tok = tokenizer()
    decode = lambda text: Chat(tok).decode(tok.encode(text))
    quoted = f"I write {opens}, then"
    assert after_thinking(decode(quoted)) == quoted
    tok.add_tokens([opens, closes])
    assert after_thinking(decode(quoted)) is None
    assert after_thinking(decode(f"{quoted} 6 * 7{closes}42")) == "42"


def test_a_template_that_opens_the_thinking_between_other_marks_is_seen():
    tok = tokenizer(CHATML.replace(START, START + "<|channel>thought\n"))
    chat = Chat(tok)
    assert (
        chat.decode(tok.encode("6 * 7<channel|>42"), chat.encode("hi"))
        == "<think>\n6 * 7</think>42"
    )


@pytest.mark.parametrize("text, rest", [("6 * 7", None), ("6 [BEGIN FINAL RESPONSE]42", "42")])
def test_plain_words_with_which_a_template_opens_the_thinking_open_it(text, rest):
    tok = tokenizer(CHATML.replace(START, START + "Here are my reasoning steps:\n"))
    chat = Chat(tok)
    assert after_thinking(chat.decode(tok.encode(text), chat.encode("hi"))) == rest


@pytest.mark.parametrize(
    "token, template",
    [
        ("<|reasoning_start|>", CHATML),
        ("[THOUGHTS]", CHATML),
        ("<scratchpad>", CHATML),
        ("<x>", CHATML + "<ponder>"),
        ("<x>", CHATML + "{{ content.split('</reflection>')[-1] }}"),
    ],
)
def test_marks_that_may_be_those_of_thinking_and_are_unknown_are_named(token, template):
    tok = tokenizer(template)
    tok.add_tokens([token])
    sentence, mark = unknown_thoughts(tok), token if token != "<x>" else template[-9:][:-1]
    assert "may think between marks that are unknown here" in sentence and "\n" not in sentence
    assert token == "<x>" or mark in sentence
    known = CHATML + "{{ messages[0]['reasoning_content'] }}<think></think>"
    assert unknown_thoughts(tokenizer(known)) == ""


# ---- what the modules read
THOUGHT = "<think>\nSub-goal: guess\nTool: join\nConclusion: CONTINUE\n<answer>0</answer>\n"


@pytest.mark.parametrize(
    "parse, good, endless",  # endless: how an endless thought is read
    [
        (lambda text: planner.parse(text, TOOLS), PLAN, "the plan never left its thinking"),
        (read, CALL, "the call never left its thinking"),
        (verifier.parse, "Conclusion: STOP", False),
        (generator.parse, "<answer>42</answer>", ""),
    ],
)
def test_each_parser_reads_what_follows_the_thinking_and_nothing_of_it(parse, good, endless):
    assert parse(f"{THOUGHT}</think>\n\n{good}") == parse(good) != endless
    assert parse(f"<|START_RESPONSE|>{good}<|END_RESPONSE|>") == parse(good)
    assert parse(f"{THOUGHT * 999}</think>{good}") == parse(good)  # no limit for thoughts
    read = parse(THOUGHT + good)
    assert read.startswith(endless) if endless else read == endless
