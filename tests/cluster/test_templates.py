"""S19: templates that run wild end alone. Real workers share one fork server for all tests of a process."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import psutil
import pytest
from baton.router.endpoints.service import INLINE_BYTES
from baton.router.errors import ApiError
from baton.router.sandbox.fork_server import ForkServer
from baton.router.sandbox.template_renderer import Chat, Setup, TemplateRenderer
from baton.router.text.templates import Templates
from baton.router.text.tokenizer import load_tokenizer
from baton.tests.cluster.router_fakes import TEMPLATE, in_thread, post, save_tokenizer, shared_fork_server
from baton.tests.corpora import corpus
from msgspec.json import encode

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
WILD = (
    "{% set last = messages[-1]['content'] %}{% if last == 'loop' %}" + ENDLESS + "{% elif last == 'bomb' %}"
    "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s "
    "| length }}"
    "{% elif last == 'long' %}{{ last * 9999999 }}{% elif last == 'odd' %}{{ 1 / 0 }}{% endif %}" + TEMPLATE
)


def chat(content, **switches):
    return encode(Chat(messages=[{"role": "user", "content": content}], switches=switches))


@asynccontextmanager
async def templates(template=WILD, fork_server=None):
    made = Templates(
        Setup(chat_template=template, special_tokens={}), fork_server or shared_fork_server(), time.monotonic
    )
    try:
        yield made
    finally:
        made.close()


async def code_of(awaited):
    """The length of what was rendered, or what the error is called."""
    try:
        return len(await awaited)
    except ApiError as error:
        return error.body.code or str(error.status)


def test_s19_endless_large_and_broken_templates_fail_alone():
    async def play():
        """Whether the endless one was still rendered when others had their answers."""
        async with templates() as made:
            usual = await made.render(chat("hi"), is_long=False)
            wild = ["loop", "bomb", "long", "odd"]
            asked = [asyncio.create_task(code_of(made.render(chat(what), is_long=False))) for what in wild]
            await asyncio.sleep(0)
            beside = [await made.render(chat("hi"), is_long=False) for _ in range(5)]
            is_alone = not asked[0].done()
            assert beside == [usual] * 5
            assert await asyncio.gather(*asked) == ["template_too_costly"] * 3 + ["invalid_value"]
            assert await made.render(chat("hi"), is_long=False) == usual
            assert made._events["template_cut"] == 3
            return is_alone

    # again where this process got no core for as long as an endless loop may take
    assert any(asyncio.run(play()) for _ in range(3)), "the others wait for no endless loop"


def test_s19_a_dead_worker_or_fork_server_costs_no_chat():
    async def play(fork_server):
        async with templates(fork_server=fork_server) as made:
            usual = await made.render(chat("hi"), is_long=False)
            many = [asyncio.create_task(made.render(chat("hi"), is_long=False)) for _ in range(20)]
            await kill_worker(made, fork_server)
            assert await asyncio.gather(*many) == [usual] * 20
            died = asyncio.create_task(code_of(made.render(chat("loop"), is_long=False)))
            await kill_worker(made, fork_server)
            assert not died.done(), "a death is forgiven"
            await kill_worker(made, fork_server)
            assert await died == "template_failed"
            for process in psutil.Process().children():
                if process.pid not in others:
                    process.kill()
            assert await made.render(chat("hi"), is_long=False) == usual, "another fork_server was started"

    shared_fork_server().fork()[1].close()  # it is there
    others = {process.pid for process in psutil.Process().children()}
    fork_server = ForkServer()
    try:
        asyncio.run(play(fork_server))
    finally:
        fork_server.close()
    assert {process.pid for process in psutil.Process().children()} <= others


async def kill_worker(made, fork_server):
    """The newest worker with a job, in the very turn of the loop that gave it one: a reply takes longer."""
    until = time.monotonic() + 60
    while not (busy := [key for key, one in made._pool._scheduler._workers.items() if one.jobs]):
        assert time.monotonic() < until, "no worker was given a job"
        await asyncio.sleep(0)
    key = max(busy)
    pipe = made._pool._pipes[key]
    fork_server.kill(pipe.number)
    while made._pool._pipes.get(key) is pipe:
        await asyncio.sleep(0.005)


@pytest.mark.slow
def test_s19_too_many_endless_templates_delay_no_other_request():
    async def play():
        async with templates() as made:
            await made.render(chat("hi"), is_long=False)
            endless = [
                asyncio.create_task(code_of(made.render(chat("loop"), is_long=False))) for _ in range(8)
            ]
            usual = asyncio.create_task(code_of(made.render(chat("hi"), is_long=False)))
            assert await asyncio.gather(*endless) == ["template_too_costly"] * 8
            assert isinstance(await usual, int)
            assert not made._pool._scheduler.num_open

    asyncio.run(play())


@pytest.mark.slow
def test_s19_the_corpus_of_templates_is_rendered_or_refused():
    async def play(name, template):
        async with templates(template) as made:
            return name, await code_of(made.render(chat("hi"), is_long=False))

    async def all_of_them():
        return await asyncio.gather(*(play(name, text) for name, text, _ in corpus.templates()))

    outcomes = dict(asyncio.run(all_of_them()))
    for name, _, is_fine in corpus.templates():
        if is_fine:
            assert outcomes[name] > 0, name
        else:
            assert outcomes[name] in ("template_too_costly", "invalid_value", 0), name


def test_the_worker_renders_what_transformers_renders(tmp_path):
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path)))
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hellö", "name": None}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    tokenizer._hf.chat_template = (
        "{{ bos_token }}{{ eos_token }}{{ tools | tojson }}{{ messages | tojson }}{{ thinking }}{% "
        "generation %}x{% endgeneration %}{{ add_generation_prompt }}"
    )
    given = {"tokenize": False, "add_generation_prompt": True, "thinking": True}
    expected = tokenizer._hf.apply_chat_template(messages, tools=tools, **given)
    asked = Chat(messages=messages, tools=tools, switches={"thinking": True})
    reply = TemplateRenderer(tokenizer.template_setup).answer(encode(asked))
    assert reply == b"t" + expected.encode()


@pytest.mark.slow
def test_s19_an_endless_template_does_not_stop_the_router(tmp_path, start):
    directory = save_tokenizer(tmp_path / "model", template=False)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": WILD}))
    running, script = start(model_dir=str(directory))
    running.pair(script)
    endless, replies = in_thread(lambda: post(running, messages=[{"role": "user", "content": "loop"}]))
    assert post(running).status_code == 200
    endless.join(30)
    error = replies[0].json()["error"]
    assert (replies[0].status_code, error["code"], error["param"]) == (400, "template_too_costly", "messages")
    assert running.call(lambda: running.router.dispatcher.events["template_cut"]) == 1
    assert post(running).status_code == 200


def test_every_chat_is_rendered_in_the_pool_as_short_or_long(start):
    running, script = start()
    running.pair(script)
    templates, asked = running.router._service.templates, []
    render = templates.render
    templates.render = lambda chat, *, is_long: asked.append(is_long) or render(chat, is_long=is_long)
    assert post(running).status_code == 200
    assert post(running, messages=[{"role": "user", "content": "refuse me"}]).status_code == 400
    assert post(running, messages=[{"role": "user", "content": "a" * INLINE_BYTES}]).status_code in (200, 400)
    assert asked == [False, False, True]
