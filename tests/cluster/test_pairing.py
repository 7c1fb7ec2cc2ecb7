"""Real workers under the router's pairing policies: the timelines show which worker served a request."""

import contextlib
import shutil

import httpx
import pytest
from baton.router.text.tokenizer import load_tokenizer
from baton.tests.cluster.router_fakes import encode_chat, save_tokenizer
from baton.tests.cluster.serving import (
    at_once,
    complete,
    pages_held,
    random_ids,
    served_model,
    serving,
    sse_events,
    wait_until,
)
from baton.tests.parity.toy_models import reference_greedy, reference_model

PAGE = 16
SHORT = 8  # tokens that decode may compute itself
CONTEXT = 1 << 15  # a stream of so many tokens outlasts the turns of a chat on any host


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, toy_checkpoint):
    """Of a toy with room for a stream of the whole context and a chat beside it."""
    directory = tmp_path_factory.mktemp("long")
    shutil.copytree(
        toy_checkpoint("llama", vocab_size=330, max_position_embeddings=CONTEXT),
        directory,
        dirs_exist_ok=True,
    )
    settings = {"decode_policy": "session", "local_prefill_max": SHORT, "kv_memory_mb": 128, "threads": 1}
    with serving(save_tokenizer(directory), prefill=1, decode=2, **settings) as running:
        yield running


def turn(cluster, ids, max_tokens=9):
    output, document = complete(cluster, ids, max_tokens=max_tokens)
    return output, document["timeline"]


def wait_idle(cluster):
    def is_idle():
        pages, num_rooms = pages_held(cluster)
        return num_rooms == 0 and not any(pages.values())

    wait_until(is_idle, 60, "no room, and every heartbeat says idle")


@contextlib.contextmanager
def busy(cluster):
    """Meanwhile a stream of somebody else runs on the decode worker that an idle cluster prefers."""
    wait_idle(cluster)
    body = {
        "model": served_model(cluster),
        "prompt": random_ids(20, 330),
        "max_tokens": CONTEXT - 100,
        "ignore_eos": True,
    }
    body["stream"] = True
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        events = sse_events(response)  # without it the response would be closed
        next(events)
        yield
        wait_until(
            lambda: pages_held(cluster)[1] == 1, 10, "all rooms but this one's, which still runs, are closed"
        )


def test_later_turns_of_ten_hand_over_only_pages_of_new_tokens(cluster):
    wait_idle(cluster)
    history = random_ids(100, 330, seed=1)
    output, first = turn(cluster, history)
    assert first["have_tokens"] == 0
    page_bytes, rest = divmod(first["handoff_bytes"], -(-len(history) // PAGE))
    assert (page_bytes > 0, rest) == (True, 0)
    with busy(cluster):  # the idle decode worker would be the obvious choice
        for number in range(2, 11):
            known = (len(history) + len(output) - 1) // PAGE * PAGE  # whole pages; the newest token has no KV
            history = history + output + random_ids(25, 330, seed=number)
            output, told = turn(cluster, history)
            assert told["decode_instance"] == first["decode_instance"], number
            assert told["have_tokens"] == known, number
            assert told["handoff_bytes"] == page_bytes * (-(-len(history) // PAGE) - known // PAGE), number
            assert told["handoff_bytes"] <= page_bytes * 4, "of a history of up to 26 pages"


def said(cluster, tokenizer, messages, letters, seed):
    """The model's answer in these letters only, the ids of its prompt, its own ids, and the timeline."""
    bias = {str(tokenizer.encode(letter)[0]): 100 for letter in letters}
    body = {
        "model": served_model(cluster),
        "messages": messages,
        "max_tokens": 9,
        "seed": seed,
        "logit_bias": bias,
    }
    body["return_token_ids"] = True
    headers = {"x-baton-timeline": "1"}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    message = {"role": "assistant", "content": choice["message"]["content"]}
    return message, encode_chat(tokenizer, messages), choice["token_ids"], answer.json()["timeline"]


def num_equal(ids, others):
    """With how many tokens both begin."""
    pairs = zip(ids, others, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others)))


def test_later_turns_of_a_chat_hand_over_only_pages_of_new_tokens(cluster):
    """What was handed over may be so again from the page on in which the new prompt leaves the last turn's
    tokens: at the latest the page that was not full, at the earliest that of the answer's first token, as its
    text may be other tokens.
    """
    wait_idle(cluster)
    messages = [{"role": "user", "content": "remember this: " + "x y " * 12}]
    tokenizer = load_tokenizer(cluster.config.model)
    message, prompt, output, first = said(cluster, tokenizer, messages, "qz", seed=1)
    assert first["have_tokens"] == 0
    page_bytes, rest = divmod(first["handoff_bytes"], -(-len(prompt) // PAGE))
    assert (page_bytes > 0, rest) == (True, 0)
    was_respelled = set()
    with busy(cluster):  # the idle decode worker would be the obvious choice
        for number in range(2, 11):
            held, num_before = prompt + output[:-1], len(prompt)  # the newest token has no KV
            is_respelled = tokenizer.encode(message["content"]) != output
            messages += [message, {"role": "user", "content": f"and {number}?"}]
            message, prompt, output, told = said(
                cluster, tokenizer, messages, "qz" if number % 2 else "he", seed=number
            )
            common = num_equal(held, prompt)
            assert common == len(held) or (is_respelled and num_before <= common), number
            was_respelled.add(is_respelled)
            assert told["decode_instance"] == first["decode_instance"], number
            assert told["have_tokens"] == common // PAGE * PAGE, number
            assert told["handoff_bytes"] == page_bytes * (-(-len(prompt) // PAGE) - common // PAGE), number
            assert told["handoff_bytes"] <= page_bytes * 4, "of a chat of up to 23 pages"
    assert was_respelled == {True, False}, "the answer's text as it was said, and as other tokens"


def test_short_prompts_move_to_decode_once_measurements_favour_it(cluster):
    told = (turn(cluster, random_ids(SHORT, 330, seed=100 + i))[1] for i in range(50))
    assert any(timeline["local_prefill"] for timeline in told), "the search ends at the first one"
    long = [turn(cluster, random_ids(SHORT + 1, 330, seed=200 + i))[1] for i in range(3)]
    assert not any(timeline["local_prefill"] for timeline in long)


def test_decode_helps_with_prompts_that_would_wait_on_prefill(tmp_path, toy_checkpoint):
    """Prompts that come together are computed by both, with the same tokens; one alone goes to prefill."""
    path = toy_checkpoint("llama", vocab_size=330, max_position_embeddings=1 << 12)
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    settings = {"local_prefill_queued_max": 1 << 12, "kv_memory_mb": 64, "threads": 1, "chunk_size": 128}
    reference = reference_model(tmp_path)
    with serving(save_tokenizer(tmp_path), prefill=1, decode=1, **settings) as cluster:
        for seed, count in enumerate((20, 200, 900, 1800, 30)):  # the router learns what prompts cost
            wait_idle(cluster)
            _, told = turn(cluster, random_ids(count, 330, seed=seed))
            assert not told["local_prefill"], "prefill is idle"
        prompts = [random_ids(1500, 330, seed=seed) for seed in range(10, 22)]
        said = at_once([lambda ids=ids: turn(cluster, ids) for ids in prompts], len(prompts))
        for prompt, (tokens, _) in zip(prompts, said, strict=True):
            assert tokens == reference_greedy(reference, prompt, 9)
        assert {told["local_prefill"] for _, told in said} == {False, True}
        wait_idle(cluster)
