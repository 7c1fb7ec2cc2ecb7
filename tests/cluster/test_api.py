"""The API over real workers of a toy model: prompts are judged as transformers judges them, through router and hand-off."""

import openai
import pytest
import torch
from baton.tests.cluster.serving import served_model
from baton.tests.parity.toy_models import reference_logits, reference_model


@pytest.fixture(scope="module")
def client(plain_cluster):
    with openai.OpenAI(base_url=plain_cluster.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        made.model = served_model(plain_cluster)
        yield made


@pytest.mark.parametrize("again", [False, True], ids=["cold", "cached"])
def test_echo_with_logprobs_gives_transformers_figures_and_the_next_token(client, served_dir, again):
    ids = [(7 * i) % 320 + 3 for i in range(40)]
    wanted = torch.log_softmax(reference_logits(reference_model(served_dir), ids), dim=1)
    options = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 2, "extra_body": {"return_token_ids": True}}
    reply = client.completions.create(model=client.model, prompt=[ids], **options)
    choice = reply.choices[0]
    got, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    assert (got[0], top[0]) == (None, None)
    assert got[1:-1] == pytest.approx([wanted[i, token].item() for i, token in enumerate(ids[1:])], abs=1e-4)
    assert choice.token_ids == [*ids, int(wanted[-1].argmax())]
    assert got[-1] == max(top[-1].values()), "greedy: the very same figure"
    assert [max(row.values()) for row in top[1:-1]] == pytest.approx(wanted[:-1].max(dim=1).values.tolist(), abs=1e-4)
    assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == 41
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (40, 1)


def test_choices_of_one_seed_differ_and_repeat(client):
    def ask():
        made = client.completions.create(model=client.model, prompt="hello", n=3, seed=5, max_tokens=12)
        return [choice.text for choice in made.choices]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first


def test_min_tokens_holds_against_stop_tokens(client):
    body = {"min_tokens": 9, "stop_token_ids": list(range(3, 330))}
    reply = client.completions.create(model=client.model, prompt="hello", max_tokens=30, extra_body=body)
    assert 9 < reply.usage.completion_tokens < 30
