"""models/server.py against a real server on loopback: answers, failures, and what a rollout makes of them."""

import html
import json
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from test_solve import ANSWER, CALL, STOP, TOOLS, Cast, module_of

import solve
import train
from bench import faults, hostile
from models.completion import NEW_TOKENS, TOO_LONG, outage
from models.loading import load_engine
from models.server import Server
from rewards.questions import Question
from world import services

# Good answers

def test_answers_come_in_order_with_their_usage(server):
    completions = load_engine(server.url)(["a", "b", "c"] * 10, temperature=0.7)
    assert [c.text for c in completions] == ["echo a", "echo b", "echo c"] * 10 and len(server.asked) == 30
    assert {c.tokens for c in completions} == {10} and not any(c.ids or c.error for c in completions)


def test_a_request_says_what_the_model_reads_and_how_to_sample(server):
    load_engine(server.url)(["q</s>"], temperature=0.5, max_new_tokens=7)
    path, headers, body = server.asked[0]
    assert path == "/v1/chat/completions" and body.pop("seed") >= 0 and "Authorization" not in headers
    messages = [{"role": "user", "content": "q< /s>"}]
    assert body == dict(model="a-model", messages=messages, temperature=0.5, max_tokens=7, top_p=1.0)


def test_at_temperature_0_equal_prompts_are_sent_once_and_without_a_seed(server):
    completions = load_engine(server.url)(["q", "r", "q"])
    assert [c.text for c in completions] == ["echo q", "echo r", "echo q"] and len(server.asked) == 2
    assert "seed" not in server.asked[0][2] and server.asked[0][2]["max_tokens"] == NEW_TOKENS


def test_a_seed_of_torch_decides_the_seeds_of_the_requests(server):
    engine, seeds = Server(server.url, at_once=1), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        engine(["q", "q"], temperature=1.0)
        seeds.append(tuple(body["seed"] for _, _, body in server.asked[-2:]))
    assert seeds[0] == seeds[1] != seeds[2] and len(set(seeds[0])) == 2


@pytest.mark.parametrize("owner, field", [("vllm", True), ("sglang", True), ("llamacpp", True),
                                          ("openai", False), ("library", False), (None, False)])
@pytest.mark.parametrize("think", [False, True])
def test_only_servers_that_pass_it_to_the_template_hear_whether_to_think(server, owner, field, think):
    server.owner = owner
    for name in ("", "#a-model"):
        load_engine(server.url + name, think=think)(["q"])
        fields = server.asked[-1][2].get("chat_template_kwargs")
        assert fields == ({"enable_thinking": think} if field else None)


@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": ""}])
def test_null_is_an_empty_text_and_a_missing_one_is_an_error(server, message):
    body = json.dumps({"choices": [{"message": message}]}).encode()
    server.reply = lambda handler, *_: handler.send(body)
    completion = load_engine(server.url)(["q"])[0]
    assert completion.text == "" and bool(completion.error) == ("content" not in message)


@pytest.mark.parametrize("tokens, usage", [("1e999", None), ("1e300", 10**9), ("null", 0), ('"7"', 7),
                                           ("-100", 0)])
def test_an_endless_count_of_tokens_is_no_traceback(server, tokens, usage):
    body = b'{"choices": [{"message": {"content": "a"}}], "usage": {"total_tokens": %s}}' % tokens.encode()
    server.reply = lambda handler, *_: handler.send(body)
    completion = load_engine(server.url)(["q"])[0]
    assert completion.error if usage is None else completion.usage == usage


# Addresses and keys

def test_the_model_is_named_in_the_address_or_is_the_only_one(server):
    assert load_engine(server.url + "#a-model").name == "a-model"
    with pytest.raises(ValueError, match="serves a-model, not other: name one, as in"):
        load_engine(server.url + "#other")
    assert load_engine(server.url + "/").name == "a-model"
    server.models = ["a", "b"]
    with pytest.raises(ValueError, match="serves a, b: name one"):
        load_engine(server.url)


def test_an_address_without_its_path_gets_the_usual_one_where_that_lists_models(server):
    def list_models(handler):
        found = handler.path == server.path
        handler.send(b'{"data": [{"id": "a-model:latest"}]}' if found else b"no", 200 if found else 404)
    server.list, address = list_models, server.url.removesuffix("/v1")
    for server.path, url in (("/v1/models", server.url), ("/models", address), ("nowhere", server.url)):
        assert load_engine(f"{address}#a-model").url == url
        engine = load_engine(f"{address}/#a-model")  # as Ollama takes it
        assert engine.name == ("a-model" if server.path == "nowhere" else "a-model:latest")


def test_a_key_travels_in_a_header_to_this_machine_or_over_https_only(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "hunter2")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # would see the key of a request to this machine
    monkeypatch.setenv("no_proxy", "")
    engine = load_engine(server.url)
    engine(["q"])
    assert server.asked[0][1]["Authorization"] == "Bearer hunter2" and "hunter2" not in str(engine)
    monkeypatch.setattr(Server, "find", lambda self, name: name)  # these hosts do not exist
    assert Server("http://gpu-box:8000/v1#m").headers == {} and Server("https://api.example.com/v1#m").headers
    for address in ("http://user:pass@127.0.0.1/v1#m", "https://api.example.com/v1?key=hunter2#m"):
        with pytest.raises(ValueError, match="OPENAI_API_KEY") as why:
            load_engine(address)
        assert "hunter2" not in str(why.value)


def test_a_server_that_does_not_run_is_an_error_at_once():
    with pytest.raises(ValueError, match="127.0.0.1:1 cannot be reached.*start the model server, or corr"):
        load_engine("http://127.0.0.1:1/v1")


@pytest.mark.parametrize("status, body", [
    (500, b"{}"), (401, b"{}"), (404, b"no"), (200, b"[]"), (200, b"no JSON"), (200, b'{"data": null}'),
    (200, b'{"data": ["x"]}'), (200, b'{"data": [{}]}')])
def test_a_server_without_a_list_of_its_models_wants_a_name_and_works_with_one(server, status, body):
    server.list = lambda handler: handler.send(body, status)
    with pytest.raises(ValueError, match=f"name it, as in {server.url}#MODEL") as why:
        load_engine(server.url)
    assert "\n" not in str(why.value) and (status == 200 or str(status) in str(why.value))
    assert load_engine(server.url + "#m")(["q"])[0].text == "echo q"


# Every way to fail

@pytest.mark.parametrize("fault", faults.FAULTS)
def test_every_way_to_fail_is_tried_again(server, fault, monkeypatch):
    monkeypatch.setattr(faults, "PATIENCE", 0.5)
    good = server.reply
    server.reply = lambda handler, body, turn: handler.fail(fault) if turn == 1 else good(handler, body, turn)
    (completion,) = Server(server.url, seconds=0.5)(["q"])
    assert (completion.text, completion.error) == ("echo q", "") and len(server.asked) == 2


@pytest.mark.parametrize("fault", [fault for fault in faults.FAULTS if fault not in ("slow", "endless")])
def test_what_fails_for_good_is_an_error_and_never_an_answer(server, fault):
    server.reply = lambda handler, *_: handler.fail(fault)
    (completion,) = Server(server.url)(["q"])
    assert completion.text == "" and completion.error.startswith("127.0.0.1:") and 3 < len(server.asked) < 30


@pytest.mark.parametrize("status, shown", [(400, True), (401, False), (404, True), (413, False)])
def test_a_refusal_is_not_repeated_and_its_message_is_shown_where_it_quotes_no_key(server, status, shown):
    server.reply = lambda handler, *_: handler.send(b'{"error": {"message": "no"}}', status)
    (completion,) = load_engine(server.url)(["q"])
    assert f"answered {status}" in completion.error and completion.error.endswith(": no") == shown
    assert len(server.asked) == 1


@pytest.mark.parametrize("message", [
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
    "context_length_exceeded", "the request exceeds the available context size", "prompt is too long: 9",
    "You passed 9 input tokens and requested 10. However, the model's context length is only 8 tokens",
    "The decoder prompt (length 10127) is longer than the maximum model length of 8192",
    "The prompt (total length 25938) is too long to fit into the model (context length 4096)",
    "The input (61709 tokens) is longer than the model's context length (40960 tokens).",
    "Input length (160062 tokens) exceeds the maximum allowed length (59862 tokens)",
    "Requested tokens (2285) exceed context window of 2048", "the input length exceeds the context length",
    "prompt too long; exceeded max context length by 12 tokens",
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 1244 `inputs` tokens",
    "Input validation error: `inputs` must have less than 1024 tokens. Given: 1872",
    "input length and `max_tokens` exceed context limit: 174167 + 64000 > 200000",
    "The input token count (1300000) exceeds the maximum number of tokens allowed (1048576)."])
def test_a_prompt_that_does_not_fit_has_the_same_error_as_with_a_local_model(server, message):
    body = json.dumps({"error": {"message": message}}).encode()
    for status in (400, 413, 422, 404):
        server.reply = lambda handler, *_: handler.send(body, status)
        assert (load_engine(server.url)(["q"])[0].error == TOO_LONG) == (status != 404)


@pytest.mark.parametrize("body", [
    {"error": {"message": "temperature: maximum value is 1"}}, {"error": {"message": "above maximum length"}},
    {"detail": [{"msg": "Field required", "input": {"messages": [{"content": "maximum context length"}]}}]},
    [{"error": {"message": "no"}}], {"error": {"message": ["prompt too long"]}}, {"error": 7},
    {"detail": None}])
def test_another_refusal_is_no_overflow_even_if_it_quotes_the_prompt(server, body):
    server.reply = lambda handler, *_: handler.send(json.dumps(body).encode(), 400)
    (completion,) = load_engine(server.url)(["q"])
    assert "answered 400" in completion.error and not outage(completion.error)


@pytest.mark.parametrize("message", [
    "maximum monthly spend reached", "Your credit balance is too low", "You exceeded your current quota"])
def test_an_account_that_is_used_up_is_an_outage_and_no_prompt_that_is_too_long(server, message):
    server.reply = lambda handler, *_: handler.send(json.dumps({"error": {"message": message}}).encode(), 400)
    (completion,) = load_engine(server.url)(["q"])
    assert completion.error.endswith(f" does not serve this account: {message}") and outage(completion.error)


KEY = "sk-proj-Abc/def+0123456789=SECRETSECRET"


@pytest.mark.parametrize("quoted", [
    KEY, f"Bearer {KEY}", KEY[:20] + "...", KEY[-12:], quote(KEY, safe=""), html.escape(KEY + "&"),
    KEY.upper(), "x" * 190 + KEY, json.dumps({"a": KEY}), KEY.replace("/", "\\/")])
@pytest.mark.parametrize("status", [400, 404, 422])
def test_no_error_shows_the_key_however_a_server_quotes_it(server, monkeypatch, quoted, status):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    body = json.dumps({"error": {"message": f"wrong: {quoted} so"}}).encode()
    server.reply = lambda handler, *_: handler.send(body, status)
    error = load_engine(server.url)(["q"])[0].error
    parts = [KEY[i : i + 8].lower() for i in range(len(KEY) - 7)]
    assert f"answered {status}" in error and not any(part in error.lower() for part in parts)


def test_the_keys_of_search_services_and_of_other_tools_are_hidden_too(monkeypatch):
    for name in ("SERPER_API_KEY", "MY_TOOL_TOKEN"):
        monkeypatch.setenv(name, f"{name}-hunter2")
        assert services.ServiceError("no", 400, f"a {name}-hunter2 b").body == "a *** b"


def test_an_answer_that_quotes_the_key_takes_it_nowhere(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.reply = lambda handler, *_: handler.send(faults.answer(f"it is {KEY}, {KEY}"))
    assert load_engine(server.url)(["q"])[0].text == "it is ***, ***"
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")  # as many local servers want it
    server.reply = lambda handler, *_: handler.send(faults.answer("empty, not EMPTY"))
    assert load_engine(server.url)(["q"])[0].text == "empty, not EMPTY"


def test_a_setting_that_only_sounds_like_a_key_hides_no_word(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert services.ServiceError("no", 400, "this is false").body == "this is false"


def test_what_a_server_calls_itself_is_short_and_harmless_on_a_terminal(server, monkeypatch):
    server.models = [f"org/model-{i}" for i in range(10_000)]
    with pytest.raises(ValueError, match="serves 10000 models, such as org/model-0, .*: name one") as why:
        load_engine(server.url)
    assert len(str(why.value)) < 300
    server.models = ["\x1b[31ma"]
    server.reply = lambda handler, *_: handler.send(b'{"error": {"message": "\\u001b[2J"}}', 400)
    engine = load_engine(server.url)
    assert str(engine).startswith(r"\x1b[31ma | ") and engine(["q"])[0].error.endswith(r": \x1b[2J")


# In a rollout and in the scripts

def run(script, flags, server, monkeypatch):
    monkeypatch.chdir(Path(solve.__file__).parent)
    monkeypatch.setattr(sys, "argv", [script.__file__, *flags.format(server.url).split()])
    script.main()


def test_helpers_without_token_ids_take_no_reward_away(server):
    texts = dict(analysis="a", executor=CALL, verifier=STOP, generator=ANSWER)
    def reply(handler, body, turn):
        handler.send(faults.answer(texts[module_of(body["messages"][0]["content"])]))
    server.reply = reply
    _, (rollout,) = solve.evaluate([Question("q?", "42")], Cast(), load_engine(server.url), TOOLS)
    assert rollout.reward == 1 and not rollout.failed and not rollout.undecided and rollout.plans[0].ids


def test_each_module_may_have_an_engine_of_its_own():
    casts = {name: Cast() for name in ("default", "base_generator", "executor", "verifier", "generator")}
    rollout = solve.roll_out([Question("q?", "42")], Cast(), casts, TOOLS)[0]
    calls = {name: len(cast.calls) for name, cast in casts.items()}
    assert rollout.answer == "42" and calls == {name: name != "base_generator" for name in casts}


def test_solve_is_a_client_for_all_modules_and_the_judge(server, monkeypatch, capsys):
    def reply(handler, body, turn):
        judged = "reference answer" in body["messages"][0]["content"]
        handler.send(faults.answer("They agree.\nVerdict: True" if judged else "<answer>somebody</answer>"))
    server.reply = reply
    flags = "--model {0} --fixed {0} --judge {0} --data toy/test.jsonl --limit 2 --max-turns 1 --tools "
    run(solve, flags + "base_generator", server, monkeypatch)
    out = capsys.readouterr().out
    assert f"planner a-model | a server at 127.0.0.1:{server.server_port}" in out and "judge   a-model" in out
    assert "2 rollouts, 80 tokens" in out  # 3 requests of 10 tokens a rollout, and 1 of the judge


@pytest.mark.parametrize("script, flags, sentence", [
    (solve, "--model {0}#m --fixed localhost:9/v1 1+1?", "write http://localhost:9/v1"),
    (solve, "--model {0}#m --fixed {0} 1+1?", "#MODEL"),
    (train, "--model {0}#m --data toy/train.jsonl", "local weights")])
def test_a_wrong_address_is_one_sentence(server, script, flags, sentence, monkeypatch, capsys):
    server.list = lambda handler: handler.send(b"{}", 500)
    with pytest.raises(SystemExit) as stop:
        run(script, flags, server, monkeypatch)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and sentence in error and error.count("\n") == 1


@pytest.mark.exhaustive
def test_a_server_that_fails_a_third_of_its_requests_loses_and_rewards_nothing_wrongly(monkeypatch):
    monkeypatch.setattr(faults, "PATIENCE", 1.0)
    monkeypatch.setattr(services, "PAUSE", 0.01)
    _, rollouts, wrong, _ = faults.run(20, 0.3)
    assert wrong == [] and rollouts[0].failed and sum(rollout.reward for rollout in rollouts) == 14


def test_hostile_texts_of_models_break_nothing():
    wrong, numbers = hostile.run(60)
    tools = {"base_generator", "python_coder", "wikipedia_search", "web_search"}
    assert wrong == [] and numbers["failed"] == 0 and set(numbers["calls"]) == {"unreadable", *tools}
