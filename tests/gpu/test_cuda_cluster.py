"""A cluster whose workers run on a GPU: greedy answers equal transformers', with and without drafts."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from baton.deploy.up.launcher import Cluster
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import at_once, complete, pages_held, random_ids, serving, status, wait_until
from baton.tests.embeds import embeds_text
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.toy_models import reference_greedy, reference_model
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 330  # of the tokenizer
AUX_IDS = (0, 2, 4)
NUM_TOKENS = 24
PROMPT_LENGTHS = (3, 17, 64, 150)


@pytest.fixture(scope="module")
def model(toy_checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "toy"
    return save_tokenizer(
        shutil.copytree(toy_checkpoint("llama", vocab_size=VOCAB, num_hidden_layers=6), folder)
    )


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Path:
    """Random drafts, nearly all refused: every verify has something to throw away."""
    tensors = {name: tensor for name, tensor in head_tensors().items() if name != "t2d"}
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, AUX_IDS, vocab_size=VOCAB), tensors)


@pytest.fixture(scope="module", params=["no draft", "draft", "draft, no graphs"])
def cluster(request, model, head) -> Iterator[tuple[str, Cluster]]:
    draft = "" if request.param == "no draft" else head
    settings = {"chunk_size": 64, "max_running": 4, "prompt_embeds": True}
    settings["graphs"] = "off" if "no graphs" in request.param else "on"
    settings["spec_adaptive"] = "off"  # a busy card measures costs by which refused drafts do not pay
    with serving(model, draft, device="cuda", prefill=1, decode=1, is_watched=False, **settings) as running:
        yield request.param, running


@pytest.fixture(scope="module")
def answers(model) -> dict[tuple[int, ...], list[int]]:
    """What transformers says to each prompt, in float32 on the same device's host."""
    reference = reference_model(model)
    prompts = [random_ids(length, VOCAB, seed=length) for length in PROMPT_LENGTHS]
    return {tuple(ids): reference_greedy(reference, ids, NUM_TOKENS) for ids in prompts}


def test_greedy_answers_equal_those_of_transformers_alone_and_in_a_batch(cluster, answers):
    kind, running = cluster
    alone = {ids: complete(running, ids, max_tokens=NUM_TOKENS) for ids in answers}
    assert {ids: tokens for ids, (tokens, _) in alone.items()} == answers
    jobs = [partial(complete, running, ids, max_tokens=NUM_TOKENS) for ids in answers]
    assert dict(zip(answers, [tokens for tokens, _ in at_once(jobs, len(jobs))], strict=True)) == answers
    drafted = [document["timeline"]["verify_steps"] for _, document in alone.values()]
    assert all(drafted) if kind != "no draft" else not any(drafted), "the drafter was used, or there is none"


def test_embeddings_are_answered_as_their_ids(cluster, model, answers):
    """Beside prompts of ids in one forward, behind the graphs that both leave."""
    kind, running = cluster
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"].float()
    texts = [embeds_text(table[list(ids)]) for ids in answers]
    given = {"prompt_embeds": texts, "max_tokens": NUM_TOKENS}
    answer = complete(running, [], **given | {"prompt": [list(ids) for ids in answers]})[1]
    wanted = list(answers.values())
    assert [choice["token_ids"] for choice in answer["choices"]] == wanted * 2
    timelines = answer["timeline"]["choices"]
    assert all(timeline["verify_steps"] for timeline in timelines[: len(texts)]) == (kind != "no draft")
    if "no graphs" not in kind:
        wait_until(lambda: eager_prompts(running) > 0, 10, "a count of the eager forward in a heartbeat")


def eager_prompts(running: Cluster) -> float:
    counters = {worker["role"]: worker["counters"] for worker in status(running)["workers"]}
    return counters["prefill"].get("graph_fallback_target_prefill_caller_embeds", 0)


def test_workers_are_on_the_device_with_their_own_graphs_and_keep_no_page(cluster, answers):
    kind, running = cluster
    workers = {worker["role"]: worker for worker in status(running)["workers"]}
    assert {worker["device"] for worker in workers.values()} == {"cuda"}
    graphs = {
        role: {name for name, count in worker["graphs"].items() if count} for role, worker in workers.items()
    }
    wanted = {"draft_prefill", "verify", "decode"} if kind == "draft" else {"decode"}
    if kind == "draft, no graphs":
        assert graphs == {"prefill": set(), "decode": set()}
    else:
        assert graphs["prefill"] == {"prefill"}
        assert graphs["decode"] >= wanted
    wait_until(
        lambda: pages_held(running) == (dict.fromkeys(pages_held(running)[0], 0), 0), 10, "every page free"
    )
