"""Samples from an endpoint: its own user turns or a file's prompts, answers as the endpoint gave them."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from baton.engine.errors import CheckpointError
from baton.training import collect as collecting
from baton.training.collect import CollectSettings, collect
from baton.training.samples import SampleWriter, read_samples
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "<u>", "</s>", "<a>", *(f"w{i}" for i in range(60))]
TURNS = "{% for m in messages %}<u> {{ m['content'] }} </s> {% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}<a>{% endif %}"


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer(TEMPLATE).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class Server:
    """An endpoint whose answer to a prompt is its last token, plus one and two, then the end token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bodies: list[dict[str, object]] = []
        self.status = 200
        self.refuses_from = 1 << 30  # the request from which all are refused
        self.num_busy = 0  # first requests without an answer, but the last of them, which gets 503
        transport = httpx.MockTransport(self._answer)
        monkeypatch.setattr(collecting.httpx, "AsyncClient", _client_of(transport))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        self.num_busy -= 1
        if self.num_busy > 0:
            raise httpx.ConnectError("refused")
        if self.num_busy == 0:
            return httpx.Response(503, text="busy")
        body = json.loads(request.content)
        self.bodies.append(body)
        if self.status != 200 or len(self.bodies) > self.refuses_from:
            return httpx.Response(max(400, self.status), text="no such field")
        last = body["prompt"][-1]
        ids = [10 + body["seed"] % 7, 30, 2] if last == 1 else [last + 1, last + 2, 2]
        return httpx.Response(200, json={"choices": [{"token_ids": ids, "finish_reason": "stop"}]})


REAL_CLIENT = httpx.AsyncClient


def _client_of(transport: httpx.MockTransport) -> Callable[..., httpx.AsyncClient]:
    return lambda **given: REAL_CLIENT(transport=transport, **_plain(given))


def _plain(given: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in given.items() if name != "limits"}


def settings(**changes: object) -> CollectSettings:
    values: dict[str, object] = {
        "url": "http://here:1", "num_samples": 12, "max_answer": 8, "concurrency": 3,
    }  # fmt: skip
    return CollectSettings(**(values | changes))  # type: ignore[arg-type]


def test_own_user_turns_become_chats_with_masked_answers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(monkeypatch)
    count = asyncio.run(collect(settings(), model, SampleWriter(tmp_path / "out"), None))
    samples = read_samples([tmp_path / "out"], len(WORDS))
    assert count == len(samples) == 12
    turns = {body["prompt"][0] for body in server.bodies}
    assert turns == {1}
    for i in range(12):
        sample = samples.sample(i)
        # <u> turn </s> <a>, then the answer to <a>
        assert (sample.tokens[0], sample.tokens[-5:-3]) == (1, [2, 3])
        assert sample.tokens[-3:] == [4, 5, 2]
        assert sample.mask == [0] * (len(sample.tokens) - 3) + [1] * 3
    answers = [body for body in server.bodies if body["prompt"][-1] == 3]
    assert {body["temperature"] for body in answers} == {0.0, 1.0}
    assert all(body["return_token_ids"] and body["max_tokens"] == 8 for body in answers)


def test_prompts_of_a_file_are_answered_in_all_three_forms(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(monkeypatch)
    lines = [
        {"tokens": [5, 6]},
        {"prompt": "w10 w11"},
        {"messages": [{"role": "user", "content": "w20"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    some = settings(past_end_share=1.0)
    asyncio.run(collect(some, model, SampleWriter(tmp_path / "out"), path))
    assert all(body["ignore_eos"] for body in server.bodies)
    samples = read_samples([tmp_path / "out"], len(WORDS))
    found = sorted(tuple(samples.sample(i).tokens) for i in range(len(samples)))
    assert found == [(1, 24, 2, 3, 4, 5, 2), (5, 6, 7, 8, 2), (14, 15, 16, 17, 2)]


@pytest.mark.parametrize("line", ["{", '{"text": "x"}', '{"tokens": "ab"}', "[1]", '{"messages": 3}'])
def test_a_bad_line_of_the_prompts_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    Server(monkeypatch)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"tokens": [5]}\n' + line)
    with pytest.raises(CheckpointError, match=r"prompts\.jsonl:2: not a prompt"):
        asyncio.run(collect(settings(), model, SampleWriter(tmp_path / "out"), path))


def test_an_endpoint_that_refuses_is_quoted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(monkeypatch)
    server.status = 400
    with pytest.raises(CheckpointError, match="answered 400: no such field"):
        asyncio.run(collect(settings(), model, SampleWriter(tmp_path / "out"), None))


def test_answers_until_a_refusal_are_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Server(monkeypatch).refuses_from = 4
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"tokens": [5, i]}) + "\n" for i in range(5, 15)))
    with pytest.raises(CheckpointError, match="answered 400"):
        asyncio.run(collect(settings(concurrency=1), model, SampleWriter(tmp_path / "out"), path))
    assert len(read_samples([tmp_path / "out"], len(WORDS))) == 4


@pytest.mark.parametrize("answer", [{"choices": []}, {"choices": [{"text": "x"}]}, [1]])
def test_an_endpoint_without_token_ids_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    models = httpx.Response(200, json={"data": [{"id": "m"}]})
    transport = httpx.MockTransport(
        lambda request: models if request.method == "GET" else httpx.Response(200, json=answer)
    )
    monkeypatch.setattr(collecting.httpx, "AsyncClient", _client_of(transport))
    with pytest.raises(CheckpointError, match="answer without token_ids"):
        asyncio.run(collect(settings(), model, SampleWriter(tmp_path / "out"), None))


@pytest.mark.parametrize(("num_busy", "is_enough"), [(3, True), (50, False)])
def test_an_endpoint_that_restarts_is_asked_again_for_a_while(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_busy: int, is_enough: bool
) -> None:
    monkeypatch.setattr(collecting, "PAUSES_S", (0.0, 0.0, 0.0))
    Server(monkeypatch).num_busy = num_busy
    made = collect(settings(concurrency=1, num_samples=3), model, SampleWriter(tmp_path / "out"), None)
    if is_enough:
        assert asyncio.run(made) == 3
    else:
        with pytest.raises(CheckpointError, match=r"no answer \(ConnectError"):
            asyncio.run(made)
