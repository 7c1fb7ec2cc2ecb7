"""A router with a pair, and a headless Chromium that looks at its page."""

import pytest
from baton.cluster.protocol.messages import (
    GraphCounts,
    ResourceUsage,
    RoomCounts,
    TokenItem,
    Tokens,
    WorkerStats,
)
from baton.tests.cluster.browser import Browser, find_chromium
from baton.tests.cluster.router_fakes import open_request, until

NEEDS_CHROMIUM = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium here: apt-get install chromium"
)
ROWS = "document.querySelectorAll('#request-table tbody tr').length"
CARDS = "document.querySelectorAll('#worker-cards > li').length"
TABLE_ROWS = "[...document.querySelectorAll('#request-table tbody tr')]"
STREAMING = f"{TABLE_ROWS}.filter(row => /streaming/.test(row.innerText)).length"
USAGE = ResourceUsage(
    cpu_cores=1.5,
    num_cores=8,
    memory_bytes=2 << 30,
    gpu_busy=0.8,
    gpu_memory_bytes=112 << 30,
    gpu_memory_total=140 << 30,
)
LOOKS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def running(start):
    running, script = start()
    prefill, decode = running.pair(script, card="1: NVIDIA H200", host="box1", spec_tokens=3)
    decode.stats = decode_stats()
    prefill.stats = WorkerStats(
        pages_total=64, pages_free=58, usage=USAGE, counters={"prompt_tokens": 9000.0, "bytes": 3e9}
    )
    running.prefill, running.decode, running.script = prefill, decode, script
    return running


def decode_stats(step=0, **more):
    """Decode's condition after `step` seconds of work."""
    counters = {"tokens": 5000.0 + 90.0 * step, "handoff_bytes": 3e9 + 8e6 * step}
    counts = {"pages_total": 64, "pages_free": 40, "running": 3, "canaries": RoomCounts(running=1)}
    told = {"accept_length": 2.31, "spec_steps": 3, "graphs": GraphCounts(), "usage": USAGE}
    return WorkerStats(**(counts | told | {"counters": counters} | more))


def shown(page, url):
    page.open(url + "/")
    page.until(f"{CARDS} === 2", "both workers are shown")
    return page


def text_of(page, selector):
    return page.run(f"document.querySelector({selector!r}).innerText")


def click(page, selector):
    page.run(f"document.querySelector({selector!r}).click()")


def hold_streams(running):
    """From now on decode sends one step of a stream and no more; returns a function that sends the next."""
    held = []

    def stream(worker, reserve):
        held.append((worker, reserve, [1]))
        go_on()

    def go_on():
        for worker, reserve, at in held:
            ids = running.script.outputs(reserve.sampling)[at[0] : at[0] + 3]
            if ids:
                item = TokenItem(room=reserve.room, epoch=reserve.epoch, seq=at[0], ids=ids)
                worker.send(Tokens(instance=worker.instance, items=[item]))
                at[0] += len(ids)

    running.script.stream = stream
    return go_on


def stream_three(running):
    """Three requests that stream until their connections are closed."""
    hold_streams(running)
    connections = [open_request(running, stream=True, max_tokens=40) for _ in range(3)]
    replies = [connection.getresponse() for connection in connections]
    for reply in replies:
        reply.read1(100)
    return [*replies, *connections]


def ask(page, text):
    page.run("document.getElementById('ask').focus()")
    page.type(text)
    page.key("Enter", "\r")


def fill_history(running):
    """Fifteen minutes of load, as the router's timer would have kept them."""

    def work():
        history = running.router.dispatcher.load_history
        for number, ring in enumerate(history._router.values()):
            for point in range(history._last - 449, history._last + 1):
                ring.put(point, 100 + 10 * number + point % 40)
        for worker in history._workers.values():
            for ring in worker.rings.values():
                for point in range(history._last - 449, history._last + 1):
                    ring.put(point, 200 + point % 50)
        history._first = 0

    until(lambda: running.call(lambda: len(running.router.dispatcher.load_history._workers)) == 2, "a point")
    running.call(work)
