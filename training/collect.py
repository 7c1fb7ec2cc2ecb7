"""Collects training samples: from an endpoint of baton that serves the model, or from the engine in this
process.

Prompts come from a file, or from the model itself: it continues the opening of a user turn of its own chat
template, and what it writes becomes the user's text. Answers are the model's, some greedy and some sampled.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..engine.errors import CheckpointError
from ..engine.models.registry import load_model_config
from ..engine.sample_shards import Sample
from ..engine.sampling.params import SamplingParams
from .generate import PAGE_SIZE, Ask, Generator
from .samples import SampleWriter

TURN_TOKENS = 256  # of a user turn that the model writes
SEEDS = 1_000_003  # apart are the seeds of two collections
REQUEST_S = 600.0
BUSY = (429, 502, 503, 504)  # answers that a later request may not get
PAUSES_S = (1.0, 5.0, 20.0)  # before such a request is repeated
NO_ANSWER = (ValueError, KeyError, IndexError, TypeError)  # of a reply that is no answer
PROBE = "\x00turn\x00"  # stands for a user's text where the template is split


@dataclass(frozen=True, kw_only=True)
class CollectSettings:
    """`greedy_share` of the answers are greedy, the others are sampled at `temperature`. `past_end_share` of
    them go on behind the model's end, to `max_answer` tokens. In this process `max_prompt` tokens of a prompt
    leave room for a whole answer. `seconds` above 0 end the collection early.
    """

    url: str
    num_samples: int
    max_answer: int
    concurrency: int
    max_prompt: int = 512
    greedy_share: float = 0.5
    past_end_share: float = 0.0
    temperature: float = 1.0
    seed: int = 0
    api_key: str = ""
    seconds: float = 0.0

    def sampling(self, number: int, seed: int) -> SamplingParams:
        """How answer `number` is generated: greedy or sampled, and where it may end."""
        draw = random.Random(self.seed * 7919 + number)
        is_greedy = draw.random() < self.greedy_share
        return SamplingParams(
            temperature=0.0 if is_greedy else self.temperature,
            seed=seed,
            max_new_tokens=self.max_answer,
            ignore_eos=draw.random() < self.past_end_share,
        )


class Endpoint:
    """Token completions of one endpoint."""

    def __init__(self, client: httpx.AsyncClient, url: str, model: str) -> None:
        self._client, self._url, self._model = client, url.rstrip("/").removesuffix("/v1"), model

    @classmethod
    async def open(cls, client: httpx.AsyncClient, url: str) -> "Endpoint":
        """Raises CheckpointError if the endpoint does not answer or names no model."""
        base = url.rstrip("/").removesuffix("/v1")
        try:
            reply = await client.get(f"{base}/v1/models")
            reply.raise_for_status()
            model = reply.json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL, *NO_ANSWER) as error:
            raise CheckpointError(
                f"--url {url}: no model is served there ({type(error).__name__}: {error}); "
                "start `baton serve`"
            ) from None
        return cls(client, base, model)

    async def complete(self, prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], str]:
        """(token ids, reason of the end) of what follows `prompt`.

        A busy endpoint, or one that restarts, is asked again. Raises CheckpointError with the answer to a
        request that is refused, or if there is none.
        """
        body: dict[str, Any] = {
            "model": self._model, "prompt": list(prompt), "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature, "seed": sampling.seed, "return_token_ids": True,
        }  # fmt: skip
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        for pause_s in (*PAUSES_S, None):
            try:
                reply = await self._client.post(f"{self._url}/v1/completions", json=body)
            except httpx.HTTPError as error:
                if pause_s is None or isinstance(error, httpx.TimeoutException):
                    raise CheckpointError(
                        f"{self._url}: no answer ({type(error).__name__}: {error})"
                    ) from None
            else:
                if pause_s is None or reply.status_code not in BUSY:
                    break
            await asyncio.sleep(pause_s)
        if reply.status_code != 200:
            raise CheckpointError(f"{self._url}: answered {reply.status_code}: {reply.text[:200]}")
        try:
            choice = reply.json()["choices"][0]
            return list(choice["token_ids"]), choice["finish_reason"]
        except NO_ANSWER:
            raise CheckpointError(
                f"{self._url}: an answer without token_ids: {reply.text[:200]}; collect from `baton serve`"
            ) from None


class ChatPrompts:
    """Prompts as token ids, in the model's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise CheckpointError("the model has no chat template; give --prompts with texts to continue")
        self._tokenizer = tokenizer
        whole = tokenizer.apply_chat_template([{"role": "user", "content": PROBE}], tokenize=False)
        assert isinstance(whole, str)
        self._opening = whole.partition(PROBE)[0]

    def opening(self) -> list[int]:
        """The template up to the text of the first user turn."""
        return self._encode(self._opening)

    def of_text(self, text: str) -> list[int]:
        """The prompt of a chat whose only user turn is `text`."""
        return self.of_messages([{"role": "user", "content": text}])

    def of_messages(self, messages: list[dict[str, str]]) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(rendered, str)
        return self._encode(rendered)

    def text(self, ids: Sequence[int]) -> str:
        """The text of generated tokens up to the end of the turn."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text.strip()

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def read_prompts(
    path: Path, chat: Callable[[], ChatPrompts], encode: Callable[[str], list[int]]
) -> Iterator[list[int]]:
    """The prompts of a file of JSON lines: {"messages": [...]}, {"prompt": "text"} or {"tokens": [...]}.

    Raises CheckpointError naming the line of anything else.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                if "tokens" in entry:
                    yield [int(token) for token in entry["tokens"]]
                elif "messages" in entry:
                    yield chat().of_messages(entry["messages"])
                else:
                    yield encode(entry["prompt"])
            except (ValueError, KeyError, TypeError, TemplateError) as error:
                raise CheckpointError(
                    f"{path}:{number}: not a prompt ({type(error).__name__}: {error}); a line is an object "
                    'with "messages", "prompt" or "tokens"'
                ) from None


def file_prompts(path: Path, model: Path) -> Iterator[list[int]]:
    """The prompts of a file of JSON lines, as `read_prompts`, for the model at `model`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats: list[ChatPrompts] = []

    def chat() -> ChatPrompts:
        if not chats:
            chats.append(ChatPrompts(tokenizer))
        return chats[0]

    return read_prompts(path, chat, lambda text: list(tokenizer.encode(text)))


async def collect(
    settings: CollectSettings,
    model: Path,
    writer: SampleWriter,
    prompts: Path | None,
    progress: Callable[[int, int], None] = lambda samples, tokens: None,
) -> int:
    """Writes up to `num_samples` samples and returns their number.

    Raises CheckpointError for an endpoint that refuses, a bad prompt, or a file without prompts. The samples
    until then are written, also when the task is cancelled.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    limits = httpx.Limits(max_connections=settings.concurrency)
    async with httpx.AsyncClient(timeout=REQUEST_S, limits=limits, headers=headers) as client:
        endpoint = await Endpoint.open(client, settings.url)
        asked = _from_file(prompts, model, settings) if prompts else _own(endpoint, tokenizer, settings)
        done = tokens = 0
        running: set[asyncio.Task[Sample | None]] = set()
        number, is_open, started = 0, True, time.monotonic()
        try:
            while is_open or running:
                while is_open and len(running) < settings.concurrency:
                    if settings.seconds and time.monotonic() - started > settings.seconds:
                        is_open = False
                        break
                    try:
                        prompt = await anext(asked)
                    except StopAsyncIteration:
                        is_open = False
                        break
                    running.add(asyncio.create_task(_answered(endpoint, prompt, number, settings)))
                    number += 1
                if not running:
                    break
                finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                # those that failed last: the answers beside them are kept
                for task in sorted(finished, key=lambda one: one.exception() is not None):
                    sample = task.result()
                    if sample is not None and done < settings.num_samples:
                        writer.add(sample)
                        done, tokens = done + 1, tokens + len(sample.tokens)
                progress(done, tokens)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            writer.flush()
    if not done:
        raise CheckpointError(f"{prompts or settings.url}: no sample was collected")
    return done


def collect_here(
    settings: CollectSettings,
    model: Path,
    writer: SampleWriter,
    prompts: Path | None,
    progress: Callable[[int, int], None] = lambda samples, tokens: None,
    *,
    device: str = "auto",
    dtype: str = "auto",
) -> int:
    """As `collect`, with the engine in this process; `concurrency` texts are generated at once.

    A prompt that was asked already is left out, so that samples held out are no copies of others. With
    `seconds` in the settings, no text is begun after that time. The samples until an interruption are
    written. Raises CheckpointError for a model that cannot be loaded, a bad prompt, or a file without
    prompts.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = None if prompts else ChatPrompts(tokenizer)
    longest = load_model_config(model).max_position_embeddings - PAGE_SIZE
    generator = Generator(
        str(model), batch=settings.concurrency,
        max_tokens=min(longest, settings.max_prompt + settings.max_answer), device=device, dtype=dtype,
    )  # fmt: skip
    known: set[tuple[int, ...]] = set()
    counts = {"samples": 0, "tokens": 0, "asked": 0}
    started = time.monotonic()

    def is_over() -> bool:
        late = settings.seconds and time.monotonic() - started > settings.seconds
        return bool(late) or counts["asked"] >= settings.num_samples

    def answer_of(ids: Sequence[int]) -> Ask | None:
        if not ids or tuple(ids) in known or is_over():
            return None
        known.add(tuple(ids))
        counts["asked"] += 1
        sampling = settings.sampling(counts["asked"], settings.seed * SEEDS + counts["asked"])

        def keep(answer: list[int]) -> None:
            writer.add(Sample([*ids, *answer], [0] * len(ids) + [1] * len(answer)))
            counts["samples"] += 1
            counts["tokens"] += len(ids) + len(answer)

        return Ask(prompt=list(ids), sampling=sampling, then=keep)

    def asks() -> Iterator[Ask]:
        if prompts is not None:
            yield from filter(None, map(answer_of, file_prompts(prompts, model)))
            return
        assert chat is not None
        opening = chat.opening()

        def of_turn(ids: list[int]) -> Ask | None:
            text = chat.text(ids)
            return answer_of(chat.of_text(text)) if text else None

        for number in itertools.count():
            if is_over() or number >= 2 * settings.num_samples:
                return
            seed = settings.seed * SEEDS + number
            sampling = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=TURN_TOKENS)
            yield Ask(prompt=opening, sampling=sampling, then=of_turn)

    try:
        generator.run(asks(), lambda _: progress(counts["samples"], counts["tokens"]))
    finally:
        writer.flush()
    if not counts["samples"]:
        raise CheckpointError(f"{prompts or model}: no sample was collected")
    return counts["samples"]


async def _answered(
    endpoint: Endpoint, prompt: "Asked", number: int, settings: CollectSettings
) -> Sample | None:
    ids = await prompt()
    if not ids:
        return None
    answer, _ = await endpoint.complete(ids, settings.sampling(number, settings.seed + number))
    return Sample([*ids, *answer], [0] * len(ids) + [1] * len(answer))


Asked = Callable[[], Any]  # a coroutine function that gives a prompt's token ids, or None


async def _from_file(path: Path, model: Path, settings: CollectSettings) -> AsyncIterator[Asked]:
    for ids in itertools.islice(file_prompts(path, model), settings.num_samples):

        async def prompt(ids: list[int] = ids) -> list[int]:
            return ids

        yield prompt


async def _own(
    endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase, settings: CollectSettings
) -> AsyncIterator[Asked]:
    """User turns that the model writes at temperature 1, each with a seed of its own."""
    chat = ChatPrompts(tokenizer)
    opening = chat.opening()
    for number in range(settings.num_samples):

        async def prompt(number: int = number) -> list[int] | None:
            seed = settings.seed * SEEDS + number
            sampling = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=TURN_TOKENS)
            ids, _ = await endpoint.complete(opening, sampling)
            text = chat.text(ids)
            return chat.of_text(text) if text else None

        yield prompt
