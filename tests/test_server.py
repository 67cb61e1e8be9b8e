"""models/server.py against a real server on loopback: answers, refusals, and every way to fail."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import answer

import executor
from benchmarks.questions import Question
from models.completion import NEW_TOKENS, TOO_LONG, outage, servers_down
from models.server import WORD, Server
from tools import TOOLS


def replies(*answers):
    """A reply: these in turn, the last one from then on."""
    return lambda body, turn: answers[min(turn, len(answers)) - 1]


# ---- good answers
def test_answers_come_in_order_with_their_usage(server):
    completions = Server(server.url)(["a", "b", "c"] * 30, temperature=0.7)
    assert [c.text for c in completions] == ["echo a", "echo b", "echo c"] * 30
    assert {c.tokens for c in completions} == {10} and len(server.asked) == 90
    assert not any(c.ids or c.error or c.cut for c in completions)


@pytest.mark.parametrize("think", [False, True])
def test_a_request_says_what_the_model_reads_and_how_to_sample(server, think):
    Server(server.url, think=think)(["q</s>"], temperature=0.5, max_new_tokens=7)
    path, headers, body = server.asked[0]
    assert path == "/v1/chat/completions" and "Authorization" not in headers
    assert body.pop("seed") >= 0
    assert body == {
        "model": "a-model",
        "messages": [{"role": "user", "content": "q< /s>"}],
        "temperature": 0.5,
        "top_p": 1.0,
        "max_tokens": 7,
        "chat_template_kwargs": {"enable_thinking": think, "thinking": think},
        **({} if think else {"reasoning_effort": "none"}),
    }


@pytest.mark.parametrize(
    "status, message",
    [
        (400, "Budget 0 is invalid. This model only works in thinking mode"),
        (400, "Reasoning is mandatory for this endpoint and cannot be disabled."),
        (422, "body.reasoning_effort: Input should be 'low', 'medium' or 'high'"),
    ],
)
def test_a_model_that_must_think_is_asked_without_the_switch(server, status, message):
    refusal = status, {"error": {"message": message}}
    server.reply = lambda body, turn: refusal if "reasoning_effort" in body else answer("42")
    engine = Server(server.url)
    assert [c.text for c in engine(["q"]) + engine(["r"])] == ["42", "42"]
    assert len(server.asked) == 3 and "chat_template_kwargs" in server.asked[-1][2]


def test_a_call_that_a_server_took_out_of_the_text_is_read(server):
    given = {"name": "python_coder", "arguments": '{"code": "print(6 * 7)"}'}
    message = {"content": "", "tool_calls": [{"type": "function", "function": given}]}
    server.reply = lambda body, turn: (200, choice("tool_calls", message))
    [completion] = Server(server.url)(["q"])
    tool = TOOLS["python_coder"]
    call = executor.parse(completion.text, "python_coder", tool)
    assert str(call) == "python_coder(code='print(6 * 7)')" and not completion.error


def test_a_limit_of_requests_a_minute_is_waited_for_but_not_an_empty_account(server):
    slow = 429, {"error": {"message": "Rate limit reached. Limit 3, Requested 1."}}
    server.reply = lambda body, turn: slow if turn < 20 else answer("42")
    [completion] = Server(server.url)(["q"])
    assert completion.text == "42" and len(server.asked) == 20
    unpaid = {"error": {"message": "You exceeded your quota.", "code": "insufficient_quota"}}
    server.asked.clear()
    server.reply = lambda body, turn: (429, unpaid)
    [completion] = Server(server.url)(["q"])
    assert completion.error.endswith("answered 429 Too Many Requests: You exceeded your quota.")
    assert len(server.asked) == 6


def test_a_missing_key_is_named(server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server.reply = lambda body, turn: (401, {"error": {"message": "No key"}})
    [completion] = Server(server.url)(["q"])
    assert completion.error.endswith("answered 401 Unauthorized: OPENAI_API_KEY is not set")


def test_at_temperature_0_equal_prompts_are_sent_once_and_without_a_seed(server):
    completions = Server(server.url)(["q", "r", "q"])
    assert [c.text for c in completions] == ["echo q", "echo r", "echo q"]
    assert len(server.asked) == 2 and completions[0] is not completions[2]
    body = server.asked[0][2]
    assert "seed" not in body and "top_p" not in body and body["max_tokens"] == NEW_TOKENS


def test_a_seed_of_torch_decides_the_seeds_of_the_requests(server):
    engine, seeds = Server(server.url, at_once=1), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        engine(["q", "q"], temperature=1.0)
        seeds.append(tuple(body["seed"] for _, _, body in server.asked[-2:]))
    assert seeds[0] == seeds[1] != seeds[2] and len(set(seeds[0])) == 2


# ---- ten servers: what they refuse, and the shape of their answers
def of_openai(message, field):
    error = {"message": message, "type": "invalid_request_error", "param": field, "code": None}
    return field, 400, {"error": error}


def of_mistral(field):
    detail = {
        "type": "extra_forbidden",
        "loc": ["body", field],
        "msg": "Extra inputs are not permitted",
    }
    return field, 422, {"object": "error", "message": {"detail": [detail | {"input": 1}]}}


def of_gemini(field):
    message = f'Invalid JSON payload received. Unknown name "{field}": Cannot find field.'
    return field, 400, [{"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}}]


THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "6 * 7"}]}
LITELLM = (
    'litellm.BadRequestError: AnthropicException - {"type":"error","error":{"message":'
    '"`temperature` and `top_p` cannot both be specified for this model."}}'
)
SERVERS = {  # name: (refusals, more of the message, more of the choice, fields that are left out)
    "vLLM": ([], {"reasoning": None, "tool_calls": []}, {"stop_reason": None}, ""),
    "llama.cpp": ([], {"reasoning_content": "6 * 7"}, {"index": 0}, ""),
    "Ollama": ([], {"reasoning": "6 * 7"}, {"index": 0}, ""),
    "LM Studio": ([], {"reasoning_content": "", "tool_calls": []}, {"logprobs": None}, ""),
    "SGLang": ([], {"reasoning_content": None}, {"matched_stop": 151645}, ""),
    "OpenAI's newer models": (
        [
            of_openai(
                "Unrecognized request argument: chat_template_kwargs", "chat_template_kwargs"
            ),
            of_openai("Unsupported parameter: 'max_tokens' is not supported.", "max_tokens"),
            of_openai("Unsupported value: 'temperature' does not support 0.7.", "temperature"),
            of_openai("Unsupported parameter: 'top_p' is not supported.", "top_p"),
        ],
        {"refusal": None, "annotations": []},
        {},
        "chat_template_kwargs max_tokens temperature top_p",
    ),
    "Mistral": (
        [of_mistral("chat_template_kwargs"), of_mistral("seed")],
        {"content": [THOUGHT, {"type": "text", "text": "It is 42."}]},
        {},
        "chat_template_kwargs seed",
    ),
    "Claude": (
        [("top_p", 400, {"error": {"message": LITELLM, "type": "invalid_request_error"}})],
        {"refusal": None},
        {"logprobs": None},
        "top_p",
    ),
    "Gemini": (
        [of_gemini("chat_template_kwargs"), of_gemini("seed")],
        {"extra_content": {"google": {"thought_signature": "x"}}},
        {},
        "chat_template_kwargs seed",
    ),
    "a gateway": ([], {"reasoning_details": []}, {"native_finish_reason": "STOP"}, ""),
}


@pytest.mark.parametrize("name", SERVERS)
def test_each_kind_of_server_answers_and_what_it_refuses_is_left_out(server, name, capsys):
    refusals, message, choice, dropped = SERVERS[name]

    def reply(body, turn):
        status, data = answer("It is 42.", prompt_tokens=7, completion_tokens=5)
        data["choices"][0] |= choice
        data["choices"][0]["message"] |= message
        refused = [(status, error) for field, status, error in refusals if field in body]
        if name == "a gateway" and turn == 1:  # its provider failed
            error = {"code": 502, "message": "Provider returned error"}
            return 200, {"choices": [{"finish_reason": "error", "message": {}, "error": error}]}
        return refused[0] if refused else (status, data)

    server.reply, engine = reply, Server(server.url)
    (completion,) = engine(["What is 6 * 7?"], temperature=0.7)
    assert (completion.text, completion.error, completion.cut) == ("It is 42.", "", False)
    engine(["What is 6 * 7?"], temperature=0.7)
    assert len(server.asked) == len(refusals) + 2 + (name == "a gateway")  # it is remembered
    first, last = server.asked[0][2], server.asked[-1][2]
    assert first.keys() - last.keys() == set(dropped.split())
    assert last.get("max_tokens", last.get("max_completion_tokens")) == NEW_TOKENS
    said = capsys.readouterr().err.splitlines()
    fields = set(dropped.split()) - {"max_tokens"}
    assert sorted(line.split()[4] for line in said) == sorted(f"{field}:" for field in fields)


@pytest.mark.parametrize(
    "status, error",
    [
        (400, {"error": "property 'top_p' is unsupported"}),
        (400, {"message": '{"message":"Malformed: extraneous key [top_p] is not permitted"}'}),
        (422, {"detail": [{"loc": ["body", "top_p"], "msg": "extra fields not permitted"}]}),
        (400, {"error": {"param": "top_p", "message": "Unknown field."}}),
        (400, {"error": {"message": "chat_template is not supported for Mistral tokenizers."}}),
    ],
)
def test_a_refused_field_is_found_in_other_words_too(server, status, error):
    field = "chat_template_kwargs" if "chat_template" in str(error) else "top_p"
    server.reply = lambda body, turn: (status, error) if field in body else answer("a")
    assert Server(server.url)(["q"], temperature=1.0)[0].text == "a" and len(server.asked) == 2


def test_what_does_not_help_is_not_remembered_and_no_request_is_without_a_limit(server, capsys):
    error = {"error": {"message": "max_tokens and temperature are above what this key may have"}}
    server.reply = lambda body, turn: (400, error) if "fail" in str(body) else answer("a")
    engine = Server(server.url)
    failed = engine(["fail"])[0]
    assert "answered 400 Bad Request: max_tokens and" in failed.error and not outage(failed.error)
    assert all({"max_tokens", "max_completion_tokens"} & body.keys() for _, _, body in server.asked)
    assert engine(["q"])[0].text == "a" and capsys.readouterr().err == ""
    assert {"max_tokens", "temperature"} <= server.asked[-1][2].keys()


# ---- answers that are none
def choice(finish_reason, message, **rest):
    return {"choices": [{"finish_reason": finish_reason, "message": message, **rest}]}


@pytest.mark.parametrize(
    "data, error",
    [
        (choice("error", {"content": ""}), 'an error: finish_reason "error"'),
        (choice("stop", {"content": "It"}, error={"message": "upstream died"}), "upstream died"),
        (choice("abort", {"content": "It is 4"}), "an error: "),
        ({"error": {"message": "overloaded"}}, "an error: overloaded"),
        ({"error": "model crashed", "choices": []}, "an error: model crashed"),
        ([], "something that is not JSON|another shape"),
        ({"choices": []}, "something that is not JSON|another shape"),
    ],
)
def test_an_error_inside_a_good_answer_is_an_outage_that_is_tried_again_and_shown(
    server, data, error
):
    server.reply = replies((200, data))
    (completion,) = Server(server.url)(["q"])
    assert completion.text == "" and outage(completion.error) and len(server.asked) == 5
    assert any(words in completion.error for words in error.split("|"))
    server.reply = lambda body, turn: (200, data) if turn == 6 else answer("a")
    assert Server(server.url)(["q"])[0].text == "a"


INVISIBLE = ["\0\0\0", "\0 \n\0", "\x1b\x07", "\u200b", "\ufeff\u00ad"]
THINKING = "its thinking used up all tokens: raise --max-new-tokens"


@pytest.mark.parametrize(
    "data, error",
    [
        (choice("length", {"content": "", "reasoning_content": "6 * 7 is"}), THINKING),
        (choice("length", {"content": None, "reasoning": "6 * 7 is"}), THINKING),
        (choice("length", {"role": "assistant"}), THINKING),  # Gemini
        (choice("length", {"content": "<think>6 * 7 is"}), THINKING),
        (choice("MAX_TOKENS", {"content": [{"type": "thinking", "thinking": []}]}), THINKING),
        (choice("stop", {"content": "\n", "reasoning": "42"}), "all that it wrote is in reasoning"),
        (choice("stop", {"content": None, "refusal": "I must not."}), "wrote is in refusal"),
        (choice("tool_calls", {"content": None, "tool_calls": [{}]}), "is in tool_calls"),
        (choice("content_filter", {"content": ""}), "finish_reason is content_filter"),
        (choice("stop", {"content": ""}) | {"usage": {"completion_tokens": 0}}, " is stop"),
        (choice("stop", {"content": ""}) | {"usage": {"completion_tokens": 512}}, " is stop"),
        (choice("stop", {}), "it wrote nothing, and finish_reason is stop"),
        *((answer(text)[1], "it wrote control characters") for text in INVISIBLE),
        *((answer(text, completion_tokens=3)[1], "control characters") for text in INVISIBLE),
    ],
)
def test_an_empty_text_of_a_model_that_said_something_is_an_error_of_this_prompt(
    server, data, error
):
    server.reply = replies((200, data))
    (completion,) = Server(server.url)(["q"])
    assert completion.text == "" and "answered without a text: " in completion.error
    assert completion.error.endswith(error) and not outage(completion.error)
    assert len(server.asked) == 1


NO_COUNTS = [  # of tokens
    {"prompt_tokens": -3, "completion_tokens": -1, "total_tokens": -4},
    {"prompt_tokens": "1", "completion_tokens": "900", "total_tokens": "7"},
    {"prompt_tokens": float("nan"), "completion_tokens": float("inf"), "total_tokens": 1e99},
    {"total_tokens": 10**400, "prompt_tokens": [1], "completion_tokens": {"a": 9}},
    [1, 2],
    "none",
    7,
]


@pytest.mark.parametrize(
    "data, text, cut",
    [
        (choice("length", {"content": "It is 1"}), "It is 1", True),
        (choice("content_filter", {"content": "It is 1"}), "It is 1", True),
        (choice("end_turn", {"content": "It is 18"}), "It is 18", False),
        (choice(None, {"content": "It is 18", "reasoning": "9 + 9"}), "It is 18", False),
        (choice("stop", {"content": "It"}) | {"usage": {"completion_tokens": 8}}, "It", True),
        (choice("stop", {"content": ""}) | {"usage": {"completion_tokens": 1}}, "", False),
        (choice("stop", {"content": [{"type": "output_text", "text": "It"}]}), "It", False),
        (choice("stop", {"content": "[THINK]9 + 9[/THINK]18"}), "<think>9 + 9</think>18", False),
        *((choice("stop", {"content": "It"}) | {"usage": n}, "It", False) for n in NO_COUNTS),
    ],
)
def test_a_text_is_cut_unless_its_model_ended_it(server, data, text, cut):
    server.reply = replies((200, data))
    (completion,) = Server(server.url)(["q"], max_new_tokens=8)
    assert (completion.text, completion.error, completion.cut) == (text, "", cut)
    assert completion.tokens == 0 and len(server.asked) == 1


@pytest.mark.parametrize(
    "prompt, tokens, fits",
    [
        ("word | " * 20_000, 4095, False),
        ("word | " * 5000, 4095, False),
        ("今天天气很好" * 4000, 2048, False),
        ("x=1;y=f(x)\n" * 1000, 2048, False),
        ("word | " * 3, 3, True),
        ("word | " * 3, 0, True),
        ("word | " * 3, None, True),
        ("今天天气很好", 3, True),
    ],
)
def test_a_prompt_that_the_server_has_cut_is_too_long(server, prompt, tokens, fits):
    server.reply = replies(answer("42", prompt_tokens=tokens))
    (completion,) = Server(server.url)([prompt])
    assert (completion.text, completion.error) == (("42", "") if fits else ("", TOO_LONG))


@pytest.mark.parametrize(
    "dead, spoke, decided, down",
    [
        (4, 0, 60, "4 of 4 rollouts that needed the judge were aborted (judge: h answered 503)"),
        (5, 4, 55, "5 of 9 rollouts that needed the judge were aborted (judge: h answered 503)"),
        (4, 4, 56, ""),
        (3, 0, 61, ""),  # one may be hard to judge
        (2, 0, 1, "2 of 3 rollouts were aborted (judge: h answered 503)"),
    ],
)
def test_a_judge_that_is_down_stops_a_run_even_if_rules_decide_the_most(dead, spoke, decided, down):
    of = lambda failed="", judged=False: SimpleNamespace(
        failed=failed, judged=judged, undecided=False, question=Question("q", "")
    )
    rollouts = [of("judge: h answered 503")] * dead + [of(judged=True)] * spoke + [of()] * decided
    assert servers_down(rollouts, {}) == down


@pytest.mark.parametrize(
    "failed, others, down",
    [
        ("judge: h answered 400 Bad Request: x is no valid model", 0, "8 of 8 rollouts were"),
        ("judge: h answered 400 Bad Request: x is no valid model", 7, "8 of 15 rollouts were"),
        ("judge: h answered 400 Bad Request: x is no valid model", 8, ""),
        (f"planner: {TOO_LONG}", 0, ""),
    ],
)
def test_what_more_than_half_of_many_prompts_have_met_is_an_outage(failed, others, down):
    of = lambda number, failed="": SimpleNamespace(
        failed=failed, judged=True, undecided=False, question=Question(str(number), "")
    )
    told = servers_down([of(n, failed) for n in range(8)] + [of(9)] * others, {})
    assert told.startswith(down) if down else told == ""
    assert servers_down([of(1, failed)] * 8, {}) == ""  # a single question, eight times


@pytest.mark.parametrize(
    "results, down",
    [
        ("DDDDDDDFFF", "en.wikipedia.org did not answer 7 of 10 calls of search"),
        ("LLLLLLFFFFF", "en.wikipedia.org did not answer 6 of 11 calls of search"),
        ("DDDDDFFFFF", ""),
        ("DDDDDDDDD", ""),  # too few
        ("MMMMMMMMMM", ""),  # a page that is missing
    ],
)
def test_a_web_service_that_is_down_stops_a_run_that_would_learn_not_to_call_it(results, down):
    texts = {"D": "Error: en.wikipedia.org cannot be reached (no answer in time)", "F": "[1] Bern"}
    texts |= {"L": "Error: en.wikipedia.org answered 429 Too Many Requests"}
    texts |= {"M": "Error: en.wikipedia.org answered 404 Not Found"}
    steps = [SimpleNamespace(tool="search", result=texts[kind]) for kind in results]
    for other in ("own", "reads a page"):
        steps += [SimpleNamespace(tool=other, result=texts["D"])] * 40
    rollouts = [SimpleNamespace(failed="", judged=False, undecided=False, memory=None)]
    rollouts[0].memory = SimpleNamespace(steps=steps)
    of = lambda **settings: SimpleNamespace(**{"from_web": True, "arguments": {}} | settings)
    tools = {"search": of(), "own": of(from_web=False), "reads a page": of(arguments={"url": ""})}
    assert servers_down(rollouts, tools) == down


def test_a_word_has_at_least_one_token_in_any_script():
    for words in ("It is 42, café", "हिन्दी में लिखा हुआ", "বাংলা ভাষায় লেখা", "שָׁלוֹם לְכֻלָּם"):
        assert len(WORD.findall(words)) == len(words.split())
    assert len(WORD.findall("京都は日本の都市です。")) == 2


def of_a_cache(counts, context=10**9, rate=1):
    """A reply that counts `rate` tokens a word, of `context` tokens at most: the last ones.

    counts: "all" tokens, "new" ones, which no earlier prompt began with, or those "apart"."""
    seen, lock = [[]], threading.Lock()

    def reply(body, turn):
        words = body["messages"][0]["content"].split()
        tokens = ["<s>", *(f"{word} {part}" for word in words for part in range(rate))]
        tokens = tokens[:1] + tokens[1:][-context:]
        with lock:
            cached = max(len(os.path.commonprefix([tokens, other])) for other in seen)
            seen.append(tokens)
        cached = 0 if counts == "all" else min(cached, len(tokens) - 1)
        more = {"prompt_tokens_details": {"cached_tokens": cached}} if counts == "apart" else {}
        return answer("42", prompt_tokens=len(tokens) - cached, **more)

    return reply


TOOLSET = "A tool of many. " * 50
PROMPTS = [TOOLSET + f"Question {i}: what is it? " * 20 for i in range(8)]


@pytest.mark.parametrize("counts", ["new", "apart", "all"])
def test_a_prompt_in_the_cache_of_a_server_that_does_not_count_it_is_whole(server, counts):
    server.reply = of_a_cache(counts)
    for engine in Server(server.url), Server(server.url, at_once=1):  # for the latter all is cached
        for temperature in (0.7, 0.0):
            completions = engine(PROMPTS * 2, temperature)
            assert {(c.text, c.error) for c in completions} == {("42", "")}
    assert len(server.asked) <= 16 + 8 + 16 + 8 + 8 + 1  # and few requests are sent once more


@pytest.mark.parametrize("counts", ["new", "apart", "all"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_cut_prompt_is_too_long_whether_or_not_the_cache_is_counted(server, counts, order):
    server.reply = of_a_cache(counts, context=500)
    prompts = [text * times for times in (1, 3) for text in PROMPTS][::order]
    expected = [TOO_LONG if len(prompt.split()) > 500 else "" for prompt in prompts]
    for engine in Server(server.url), Server(server.url):
        for _ in range(2):
            assert [c.error for c in engine(prompts)] == expected


def test_two_more_requests_are_enough_and_a_longer_context_is_noticed(server):
    server.reply, engine = of_a_cache("all", context=500), Server(server.url)
    assert [engine([TOOLSET * n])[0].error for n in (5, 5, 6)] == [TOO_LONG] * 3
    assert len(server.asked) == 2 + 3
    server.reply = of_a_cache("all")
    assert [engine([TOOLSET * n])[0].error for n in (6, 5)] == [""] * 2 and len(server.asked) == 9


@pytest.mark.parametrize("counts", ["new", "apart", "all"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_cut_prompt_with_more_tokens_than_words_is_too_long_too(server, counts, order):
    server.reply = of_a_cache(counts, context=3000, rate=2)
    prompts = [text * times for times in (4, 6) for text in PROMPTS][::order]
    fits = [2 * len(prompt.split()) < 3000 for prompt in prompts]
    assert set(fits) == {True, False} and max(len(prompt.split()) for prompt in prompts) < 3000
    engine = Server(server.url)
    assert [c.error for c in engine(prompts)] == ["" if fit else TOO_LONG for fit in fits]
    assert len(server.asked) <= 16 + 2 * (4 if counts == "all" else 16)


def test_a_server_that_refuses_what_is_too_long_cuts_nothing(server):
    refusal = 400, {"error": {"message": "the request exceeds the available context size"}}
    full = lambda body: len(body["messages"][0]["content"].split()) > 1240
    count = of_a_cache("all")
    server.reply = lambda body, turn: refusal if full(body) else count(body, turn)
    completions = Server(server.url)([TOOLSET * 6, TOOLSET * 7])
    assert [c.error for c in completions] == ["", TOO_LONG] and len(server.asked) == 2 + 2


# ---- addresses and keys
def test_the_model_is_named_in_the_address_or_is_the_only_one(server):
    assert Server(server.url + "#other").name == "other"
    assert Server(server.url + "/").name == Server(server.url.removesuffix("/v1")).name == "a-model"
    server.models = ["a", "\x1b[31mb"]
    with pytest.raises(ValueError, match=r"serves a, \\x1b\[31mb: name one, as in .*/v1#MODEL\.$"):
        Server(server.url)
    with pytest.raises(ValueError, match="127.0.0.1:1 cannot be reached.*: start the server"):
        Server("http://127.0.0.1:1/v1")


def test_a_key_travels_in_a_header_to_this_machine_or_over_https_only(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "hunter2")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # would see the key
    monkeypatch.setenv("no_proxy", "")
    engine = Server(server.url)
    engine(["q"])
    assert server.asked[0][1]["Authorization"] == "Bearer hunter2" and "hunter2" not in str(engine)
    assert Server("http://gpu-box:8000/v1#m").headers == {}
    assert Server("https://api.example.com/v1#m").headers
    for address in ("http://u:hunter2@127.0.0.1/v1#m", "https://api.example.com/v1?key=hunter2#m"):
        with pytest.raises(ValueError, match="OPENAI_API_KEY") as why:
            Server(address)
        assert "hunter2" not in str(why.value)


def test_no_error_and_no_text_shows_the_key_or_a_control_character(server, monkeypatch):
    key = "sk-proj-Abc/def+0123456789=SECRETSECRET"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    server.reply = replies(
        (400, {"error": {"message": f"wrong: {key[:20]}... \x1b[2J"}}), answer(key)
    )
    first, second = Server(server.url, at_once=1)(["q", "r"])
    assert first.error.endswith(r"answered 400 Bad Request: wrong: *** \x1b[2J")
    assert second.text == "***"


# ---- failures
@pytest.mark.parametrize(
    "status, error, down",
    [
        (400, "no", False),
        (401, "no", True),
        (404, "no such model", True),
        (400, "Your credit balance is too low", True),
        (400, "The model is still loading", True),
        (400, "Failed to load model", True),
        (400, "Images cannot be loaded", False),
    ],
)
def test_a_refusal_is_not_repeated_and_its_message_is_shown_where_it_quotes_no_key(
    server, status, error, down
):
    for body in {"error": {"message": error}}, f"{error}\nTraceback: ...".encode():
        server.reply = replies((status, body))
        (completion,) = Server(server.url)(["q"])
        assert outage(completion.error) == down
        assert completion.error.endswith(f": {error}") == (status != 401)
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000",  # vLLM
        "the request exceeds the available context size, try increasing it",  # llama.cpp
        "the input length exceeds the context length",  # Ollama
        "input length and `max_tokens` exceed context limit: 174167 + 64000 > 200000",  # Claude
        "Trying to keep the first 15857 tokens when context the overflows.",  # LM Studio
        "Input length (160062 tokens) exceeds the maximum allowed length (59862)",  # SGLang
        "prompt is too long: 209000 tokens > 200000 maximum",
        "The input token count (1300000) exceeds the maximum number of tokens allowed",  # Gemini
        "`inputs` tokens + `max_new_tokens` must be <= 2048",  # TGI
    ],
)
def test_a_prompt_that_does_not_fit_has_the_same_error_as_with_a_local_model(server, message):
    for body in {"error": {"message": message}}, message.encode():
        for status in (200, 400, 413, 422, 404):
            server.reply = replies((status, body))
            assert (Server(server.url)(["q"])[0].error == TOO_LONG) == (status != 404)
    assert len(server.asked) == 2 * (5 + 4)  # an answer of 200 is asked for again


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "above maximum length"}},
        {"detail": [{"msg": "Field required", "input": {"content": "maximum context length"}}]},
        {"error": {"message": ["prompt too long"]}},
        {"error": 7},
        b"<html>The context length is the length of the context.</html>",
        b"Your prompt is refused:\nWhat is a context length?",
        b"",
    ],
)
def test_another_refusal_is_no_overflow_even_if_it_quotes_the_prompt(server, body):
    server.reply = replies((400, body))
    (completion,) = Server(server.url)(["q"])
    assert "answered 400" in completion.error and not outage(completion.error)
