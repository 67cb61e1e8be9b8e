"""The offline corpus at size: how long its index takes to build, and a query to answer.

    python bench/search.py        100 000 passages of 100 words; target: built in 30 s, a query in 20 ms

The passages are made up: words drawn by Zipf's law from a vocabulary of 50 000, so that, as in real text, a
few words are nearly everywhere. Four kinds of queries: words of one passage, words of which more than half
are, common words, and words that are never together.
"""
import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from world import search


def write(path, passages, words=100, vocabulary=50_000):
    """A corpus, and the words of some of its passages."""
    dice = random.Random(0)
    names = [f"w{n}x" for n in range(vocabulary)]
    weights = list(accumulate(1 / (rank + 10) for rank in range(vocabulary)))
    texts = []
    with open(path, "w", encoding="utf-8") as file:
        for n in range(passages):
            text = dice.choices(names, cum_weights=weights, k=words)
            file.write(json.dumps({"title": f"Title {n} {text[0]}", "text": " ".join(text)}) + "\n")
            texts += [text] * (n % (passages // 50) == 0)
    return texts


def timed(queries, corpus):
    seconds = []
    for query in queries:
        start = time.perf_counter()
        search.wikipedia_search(query, corpus)
        seconds.append(time.perf_counter() - start)
    median, worst = 1000 * statistics.median(seconds), 1000 * max(seconds)
    return f"median {median:.1f} ms, worst {worst:.1f} ms of {len(seconds)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--passages", type=int, default=100_000)
    args = parser.parse_args()
    dice = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        corpus = str(Path(folder) / "corpus.jsonl")
        texts = write(corpus, args.passages)
        start = time.perf_counter()
        search.index(corpus)
        seconds, size = time.perf_counter() - start, Path(corpus).stat().st_size / 1e6
        index = sum(file.stat().st_size for file in Path(folder).glob("*.fts5")) / 1e6
        print(f"{args.passages} passages, {size:.0f} MB: "
              f"indexed in {seconds:.1f} s, {index:.0f} MB beside it")
        search.index.cache_clear()
        start = time.perf_counter()
        search.index(corpus)
        print(f"opened again in {1000 * (time.perf_counter() - start):.1f} ms")
        together = [" ".join(dice.sample(text, 4)) for text in texts]
        print("all words:      ", timed(together, corpus))
        print("more than half: ", timed([f"{query} nowhere neverseen" for query in together], corpus))
        ranges = [(0, 5), (5, 10), (10, 50)]
        common = [" ".join(f"w{dice.randrange(*ends)}x" for ends in ranges) for _ in texts]
        print("common words:   ", timed(common, corpus))
        apart = [" ".join(text[0] for text in dice.sample(texts, 8)) for _ in texts]
        print("never together: ", timed(apart, corpus))


if __name__ == "__main__":
    main()
