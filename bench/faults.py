"""What a bad model server does to the flow: rollouts through one that fails in every way.

    python bench/faults.py                 200 rollouts, about a minute
    python bench/faults.py --rollouts 40 --share 0.5

A real server on loopback speaks OpenAI's API, fails 30 % of its requests, and plays all modules, so each
rollout's reward is known: "Double 7" is answered right, but one question in four is answered wrong, on
purpose, and one in twenty is refused for good, at one module or another. Ends with exit code 1 if a rollout
is lost or rewarded wrongly, if one that is refused for good does not fail, or if more than 2 % of the others
fail (those whose every retry met a fault).
"""

import argparse
import json
import random
import re
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import executor
import generator
import planner
import solve
import tools as toolset
import verifier
from models.server import Server
from rewards.questions import Question

PROMPTS = {"analysis": planner.ANALYSIS_PROMPT, "planner": planner.PROMPT, "executor": executor.PROMPT,
           "verifier": verifier.PROMPT, "generator": generator.PROMPT}
FAULTS = ("429", "500", "503", "dropped", "cut", "garbage", "another shape", "wrong type", "endless", "slow",
          "redirect loop")
PATIENCE = 1.5  # seconds that our client waits for an answer; "slow" is slower


def perfect(prompt):
    """(module, number, text) of a perfect model, but for a wrong answer to every fourth question."""
    module = next((name for name, text in PROMPTS.items() if prompt[:40] == text[:40]), "base_generator")
    n = int(re.search(r"Double (\d+)", prompt)[1])
    tool = "base_generator" if n % 5 == 0 else "double"
    call = f'double(number="{n}")' if tool == "double" else f'base_generator(query="Double {n}")'
    texts = {"analysis": "A number.", "verifier": "Conclusion: STOP", "base_generator": "I think so.",
             "planner": f"Context: none\nSub-goal: Double {n}\nTool: {tool}", "executor": call,
             "generator": f"<answer>{2 * n + (n % 4 == 3)}</answer>"}
    return module, n, texts[module]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle(self):
        try:
            super().handle()
        except ConnectionResetError:
            pass  # the client hung up between two requests

    def send(self, body, status=200, kind="application/json", length=None, **headers):
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": length or len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send(b'{"data": [{"id": "bad-server"}]}')

    def do_POST(self):
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        module, n, text = perfect(prompt)
        with self.server.lock:
            random, fault = self.server.random, ""
            if random.random() < self.server.share:
                fault = random.choice(FAULTS)
            if module == self.server.refused.get(n):
                fault = "refused"
            self.server.seen[fault or "good"] += 1
        try:
            self.fail(fault) if fault else self.send(answer(text))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client has hung up: that is what it should do

    def fail(self, fault):
        if fault in ("429", "500", "503", "refused"):
            headers = {"Retry_After": 0} if fault == "429" else {}
            status = 500 if fault == "refused" else int(fault)
            return self.send(b'{"error": {"message": "not now"}}', status, **headers)
        self.close_connection = True
        if fault == "dropped":
            return self.connection.shutdown(2)
        if fault == "cut":
            return self.send(answer("half")[:30], length=500)
        if fault == "slow":
            return time.sleep(2 * PATIENCE)
        if fault == "redirect loop":
            return self.send(b"", 302, Location=self.path)
        if fault == "endless":
            self.send(b"[", length=10**12)
            while True:
                self.wfile.write(b"1," * 32768)
        self.send(*{"garbage": (b'{"choices": [{"mess', 200), "another shape": (b'{"choices": []}', 200),
                    "wrong type": (b"<html>Gateway</html>", 200, "text/html")}[fault])


def answer(text):
    choice = {"message": {"role": "assistant", "content": text}}
    return json.dumps({"choices": [choice], "usage": {"total_tokens": 10}}).encode()


def bad_server(share, refused, seed=0):
    """A running server; refused: {number: module whose requests always fail}."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.lock, server.seen = True, threading.Lock(), Counter()
    server.share, server.refused, server.random = share, refused, random.Random(seed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def run(number, share):
    """(server, [Rollout], what is wrong with them, seconds)"""
    refused = {n: (*PROMPTS, "base_generator")[n // 20 % 6] for n in range(0, number, 20)}
    server = bad_server(share, refused)
    engine = Server(f"http://127.0.0.1:{server.server_port}/v1", seconds=PATIENCE)
    double, arguments = lambda number: str(2 * int(number)), {"number": "an integer"}
    tools = {"base_generator": toolset.TOOLS["base_generator"],
             "double": toolset.Tool(double, "Doubles.", arguments, "", 'double(number="2")')}
    start = time.perf_counter()
    questions = [Question(f"Double {n}", str(2 * n)) for n in range(number)]
    _, rollouts = solve.evaluate(questions, engine, engine, tools, max_turns=3)
    wrong = [f"{number - len(rollouts)} rollouts are lost"] * (len(rollouts) != number)
    for n, rollout in enumerate(rollouts):
        if n in refused and not rollout.failed:
            wrong.append(f"rollout {n} did not fail though it was refused")
        if rollout.reward != float(not rollout.failed and n % 4 != 3):
            wrong.append(f"rollout {n} has the reward {rollout.reward}")
    unlucky = sum(rollout.failed != "" for n, rollout in enumerate(rollouts) if n not in refused)
    if unlucky > 0.02 * number:
        wrong.append(f"{unlucky} rollouts failed though they were not refused for good")
    server.shutdown()
    return server, rollouts, wrong, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.3, help="of the requests that fail")
    args = parser.parse_args()
    server, rollouts, wrong, seconds = run(args.rollouts, args.share)
    bad = sum(server.seen.values()) - server.seen["good"]
    kinds = ", ".join(f"{name} {n}" for name, n in sorted(server.seen.items()))
    print(f"{sum(server.seen.values())} requests, {bad} of them failed: {kinds}")
    right = sum(rollout.reward == 1 for rollout in rollouts)
    failures = [rollout.failed for rollout in rollouts if rollout.failed]
    print(f"{len(rollouts)} rollouts in {seconds:.1f} s: {right} right, "
          f"{len(rollouts) - right - len(failures)} wrong, {len(failures)} failed")
    for why, times in Counter(re.sub(r"127\.0\.0\.1:\d+", "the server", why) for why in failures).items():
        print(f"  failed {times} times: {why}")
    print("\n".join(wrong) or "No rollout is lost and none wrongly rewarded.")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
