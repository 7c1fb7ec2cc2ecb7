"""Many requests of every kind on a pool that is far too small: each gets the tokens of an undisturbed run.

Real processes in float32: greedy and seeded requests, penalties, log probabilities, grammars and several
choices, without drafts, with chains and with trees. Answers of very different lengths make the router expect
too little, so pages are taken back all the time.
"""

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import httpx
import pytest
from baton.tests.cluster.random_heads import random_head
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import served_model, serving, status, wait_until
from baton.tests.parity.toy_models import write_toy_checkpoint

VOCAB, LAYERS = 330, (1, 2, 3)
DRAFTS = {"off": None, "chain": {}, "tree": {"spec_topk": 3, "spec_tokens": 8}}
QUICK, MANY = 60, 700
CLIENTS, TOLD_S = 12, 5.0
AMPLE, TIGHT = 600, 22  # pages of decode
REGEX = "([a-h]{2,4} ){6,14}end"
KINDS = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.0, "seed": 5, "ignore_eos": True},
    {"temperature": 0.8, "seed": 6, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "ignore_eos": True},
    {"temperature": 0.0, "logprobs": 2, "ignore_eos": True},
    {"temperature": 0.7, "seed": 7, "guided_regex": REGEX},
    {"temperature": 1.0, "seed": 8, "n": 3, "ignore_eos": True},
    {"temperature": 0.0, "min_tokens": 3},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("soak") / "model"
    write_toy_checkpoint(
        path, "llama", vocab_size=VOCAB, num_hidden_layers=4, max_position_embeddings=512, seed=3
    )
    return save_tokenizer(path)


@pytest.fixture(scope="module")
def head(model, tmp_path_factory):
    return random_head(model, tmp_path_factory.mktemp("head") / "head", 4, LAYERS)


def asked(number):
    """Request `number`: its kind, its prompt and its length follow from the number."""
    rng = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    is_long = number // len(KINDS) % 3 == 2  # seven short ones twice, then seven long ones
    return {
        "prompt": [rng.randrange(3, VOCAB) for _ in range(rng.randint(4, 40))],
        "max_tokens": rng.randint(60, 110) if is_long else rng.randint(3, 10),
        "return_token_ids": True,
        **kind,
    }


def answers(cluster, num_requests, what):
    """The choices of every request: token ids, end and log probabilities."""
    url, name = f"{cluster.url}/v1/completions", served_model(cluster)
    found, numbers, lock = {}, count(), threading.Lock()
    told = [time.monotonic()]

    def client(_):
        with httpx.Client(timeout=300, trust_env=False) as http:
            while True:
                with lock:
                    number = next(numbers)
                if number >= num_requests:
                    return
                answer = http.post(url, json={"model": name, **asked(number)})
                assert answer.status_code == 200, (number, asked(number), answer.text)
                found[number] = [shown(choice) for choice in answer.json()["choices"]]
                with lock:
                    if time.monotonic() - told[0] > TOLD_S:
                        told[0] = time.monotonic()
                        print(f"{what}: {len(found)} of {num_requests}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    return [found[number] for number in range(num_requests)]


def held_pages(cluster):
    return [worker["pages_total"] - worker["pages_free"] for worker in status(cluster)["workers"]]


def shown(choice):
    scores = choice.get("logprobs") or {}
    return {
        "ids": choice["token_ids"],
        "end": choice["finish_reason"],
        "top": [sorted(top) for top in scores.get("top_logprobs") or []],
        "logprobs": scores.get("token_logprobs") or [],
    }


def are_equal(given, expected):
    """Equal but for what sums of other shapes round differently in log probabilities."""
    scores = [[score for choice in each for score in choice["logprobs"]] for each in (given, expected)]
    texts = [[{**choice, "logprobs": ()} for choice in each] for each in (given, expected)]
    return texts[0] == texts[1] and scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.mark.parametrize(
    ("drafts", "num_requests", "least"),
    [
        ("chain", QUICK, 1),
        *(pytest.param(drafts, MANY, 50, marks=pytest.mark.slow) for drafts in DRAFTS),
    ],
)
def test_retracted_requests_of_every_kind_give_the_same_answers(model, head, drafts, num_requests, least):
    shape = DRAFTS[drafts]
    settings = {
        "prefill": 1, "decode": 1, "threads": 1, "kv_memory_mb": 64, "max_running": 16, "page_size": 16,
        "chunk_size": 32, **(shape or {}),
    }  # fmt: skip
    draft = head if shape is not None else ""

    def run(pages):
        env = {"BATON_DECODE_PAGES": str(pages), "BATON_ROUTER_MAX_QUEUE": "4096"}
        with serving(model, draft, env, is_watched=False, **settings) as cluster:
            found = answers(cluster, num_requests, f"{drafts}, {pages} pages")
            wait_until(lambda: not any(held_pages(cluster)), 20, "no page is held")
            return found, status(cluster)["router"]

    expected, calm = run(AMPLE)
    given, full = run(TIGHT)
    retracted = full["events"].get("retracted", 0)
    print(f"{drafts}: {num_requests} requests, {retracted} retractions", file=sys.stderr, flush=True)
    assert calm["events"].get("retracted", 0) == 0
    assert retracted >= least
    wrong = [n for n in range(num_requests) if not are_equal(given[n], expected[n])]
    for number in wrong[:3]:
        print(asked(number), given[number], expected[number], sep="\n", file=sys.stderr, flush=True)
    assert wrong == []
    assert full["open_rooms"] == 0
