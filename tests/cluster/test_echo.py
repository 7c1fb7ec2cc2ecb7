"""An echoed prompt before several answers: the best are returned, with log probabilities of all tokens."""

import httpx
import pytest
from baton.cluster.protocol.messages import Prefill, PromptLogprobs, TokenLogprob
from baton.tests.cluster.router_fakes import MODEL, Script, assert_nothing_left

SEED = 7
# By seed. The means are in order; sums are not, nor anything in which the prompt counts.
TRIES = {SEED: ("abcd", -1.0), SEED + 1: ("efghij", -1.1), SEED + 2: ("kl", -1.5)}
PROMPTS = ["<|im_start|>user e\u0301 😀", "no control token"]


class Scored(Script):
    """Each try has an output of its own, and each token of a prompt a log probability of -5 - its number."""

    def __init__(self, tokenizer):
        super().__init__([])
        self._ids = {
            seed: [token for char in text for token in tokenizer.encode(char)]
            for seed, (text, _) in TRIES.items()
        }

    def outputs(self, sampling):
        return self._ids[sampling.seed]

    def logprobs(self, ids, sampling):
        value = TRIES[sampling.seed][1]
        return [TokenLogprob(logprob=value, top=[(token, value)]) for token in ids]

    def prefill(self, worker, message):
        if isinstance(message, Prefill):
            assert message.sampling.prompt_logprobs == 1
            items = [scored(number) for number in range(1, len(message.prompt_ids))]
            one = {"room": message.room, "epoch": message.epoch, "instance": worker.instance}
            worker.send(
                PromptLogprobs(start=1, items=items[:2], **one),
                PromptLogprobs(start=3, items=items[2:], **one),
            )
        super().prefill(worker, message)


def scored(number):
    return TokenLogprob(logprob=-5.0 - number, top=[(4, -0.5)])


@pytest.fixture
def served(start):
    running, _ = start()
    running.pair(Scored(running.tokenizer))
    return running


def assert_is_echoed(tokenizer, choice, prompt, seed):
    """The prompt as it was given, then the output of a try, and where each token begins."""
    output, value = TRIES[seed]
    ids = tokenizer.encode(prompt)
    told = choice["logprobs"]
    assert choice["text"] == prompt + output
    assert choice["token_ids"] == [*ids, *(tokenizer.encode(char)[0] for char in output)]
    assert told["token_logprobs"] == [
        None,
        *(-5.0 - number for number in range(1, len(ids))),
        *[value] * len(output),
    ]
    assert told["top_logprobs"][0] is None
    assert all(name in top for name, top in zip(told["tokens"][1:], told["top_logprobs"][1:], strict=True))
    assert told["text_offset"][len(ids) :] == [len(prompt) + i for i in range(len(output))]
    for name, at in zip(told["tokens"], told["text_offset"], strict=True):
        assert name.startswith("bytes:") or choice["text"].startswith(name, at), (name, at)


@pytest.mark.parametrize("num_best", [1, 2])
def test_best_of_with_echo_returns_the_answers_with_the_best_output(served, num_best):
    body = {
        "model": MODEL,
        "prompt": PROMPTS,
        "best_of": 3,
        "n": num_best,
        "seed": SEED,
        "echo": True,
        "logprobs": 1,
    }
    reply = httpx.post(
        f"{served.url}/v1/completions", json=body | {"max_tokens": 9, "return_token_ids": True}
    ).json()
    expected = [(prompt, seed) for prompt in PROMPTS for seed in list(TRIES)[:num_best]]
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(expected)))
    for choice, (prompt, seed) in zip(reply["choices"], expected, strict=True):
        assert_is_echoed(served.tokenizer, choice, prompt, seed)
    assert reply["usage"]["prompt_tokens"] == sum(len(served.tokenizer.encode(prompt)) for prompt in PROMPTS)
    assert reply["usage"]["completion_tokens"] == len(PROMPTS) * sum(len(text) for text, _ in TRIES.values())
    assert_nothing_left(served)
