"""The router's page in a real headless Chromium: live, dark and light, on a phone, by keyboard, with a key.

    SCREENSHOT=docs/images/page.png pytest -m slow tests/cluster/test_page.py

writes what the first test sees to that file.
"""

import os

import httpx
import pytest
from baton.cluster.protocol.messages import GraphCounts, WorkerStats
from baton.deploy.keys.api_keys import add
from baton.tests.cluster.browser import Browser, find_chromium
from baton.tests.cluster.router_fakes import BODY, post, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium here: apt-get install chromium"),
]
ROWS = "document.querySelectorAll('#request-table tbody tr').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def running(start):
    running, script = start()
    prefill, decode = running.pair(script, card="1: NVIDIA H200")
    counters = {"tokens": 5000.0, "handoff_bytes": 3e9}
    decode.stats = WorkerStats(
        pages_total=64,
        pages_free=40,
        running=2,
        accept_length=2.31,
        spec_steps=3,
        graphs=GraphCounts(),
        counters=counters,
    )
    prefill.stats = WorkerStats(
        pages_total=64, pages_free=58, counters={"prompt_tokens": 9000.0, "bytes": 3e9}
    )
    running.prefill, running.decode = prefill, decode
    return running


def shown(page, url):
    page.open(url + "/")
    page.until("document.querySelectorAll('#worker-table tbody tr').length === 2", "both workers are shown")
    return page


def text_of(page, selector):
    return page.run(f"document.querySelector({selector!r}).innerText")


def move(running, step):
    """What the workers say as time goes by."""
    before = running.decode.stats.counters
    counters = {
        "tokens": before["tokens"] + 90.0 * step,
        "handoff_bytes": before["handoff_bytes"] + 8e6 * step,
    }
    running.decode.stats = WorkerStats(
        pages_total=64, pages_free=40 - step, running=2, accept_length=2.31, spec_steps=3, counters=counters
    )


def test_workers_rates_and_requests_are_shown_live(browser, running):
    for count in range(3):
        assert post(running, max_tokens=10 + 9 * count).status_code == 200
    page = shown(browser.page(1280, 900), running.url)
    assert text_of(page, "#state") == "serving"
    assert "24 of 64" in text_of(page, "#worker-table")
    assert "2.31 (3 steps)" in text_of(page, "#worker-table")
    assert "1: NVIDIA H200" in text_of(page, "#worker-table")
    page.until(f"{ROWS} === 3", "three requests are shown")
    assert "4.00 KiB in" in text_of(page, "#request-table")
    assert post(running).status_code == 200
    page.until(f"{ROWS} === 4", "a fourth one comes by itself")
    step = 0
    while not page.run("/[1-9].*MiB\\/s/.test(document.getElementById('handoff').innerText)"):
        step += 1
        assert step < 30, "a rate is shown"
        move(running, step % 8)
        page.run("new Promise(done => setTimeout(done, 1000))")
    assert "tok/s" in text_of(page, "#tokens")
    assert running.decode.instance[:8] in text_of(page, "#worker-table")
    assert running.decode.instance not in page.run("document.documentElement.outerHTML"), "ids are cut"
    assert page.complaints == []
    if target := os.environ.get("SCREENSHOT"):
        page.screenshot(target)


def test_dark_and_light_follow_the_system_until_the_user_chooses(browser, running):
    page = shown(browser.page(), running.url)
    back = "getComputedStyle(document.body).backgroundColor"
    page.prefer("dark")
    dark = page.run(back)
    page.prefer("light")
    light = page.run(back)
    assert dark != light
    for theme, colour in (("light", light), ("dark", dark)):
        page.run("document.getElementById('theme').click()")
        assert text_of(page, "#theme") == f"Theme: {theme}"
        assert page.run(back) == colour
    shown(page, running.url)
    assert page.run(back) == dark, "remembered"
    page.run("localStorage.clear()")
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        shown(page, running.url)
        assert page.run(LOW_CONTRAST) == [], scheme


LOW_CONTRAST = """(() => {
  const lum = (c) => { const [r, g, b] = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
                       return .2126 * r + .7152 * g + .0722 * b; };
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const back = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
                        if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
  return [...document.querySelectorAll('#main *, header *')].filter(e => e.checkVisibility() && e.childElementCount === 0
      && e.innerText?.trim()).flatMap(e => {
    const [a, b] = [lum(rgb(getComputedStyle(e).color).slice(0, 3)), lum(back(e))].sort((x, y) => y - x);
    return (a + .05) / (b + .05) < 4.5 ? [e.innerText] : []; });
})()"""  # noqa: E501


def test_a_phone_needs_no_sideways_scrolling(browser, running):
    assert post(running).status_code == 200
    page = browser.page()
    page.resize(360, 740, is_mobile=True)
    shown(page, running.url)
    page.until(f"{ROWS} === 1", "the request is shown")
    width, most = page.run("[document.documentElement.scrollWidth, innerWidth]")
    assert width <= most
    assert page.run("[...document.querySelectorAll('td')].every(cell => cell.dataset.label)"), (
        "cells name their column"
    )
    small = (
        "[...document.querySelectorAll('header button')].filter(b => b.checkVisibility() && "
        "b.offsetHeight < 24).length"
    )
    assert page.run(small) == 0


def test_a_requests_timeline_opens_and_closes_by_keyboard_in_place(browser, running):
    assert post(running).status_code == 200
    page = shown(browser.page(), running.url)
    page.until(f"{ROWS} === 1", "the request is shown")
    focused = "document.activeElement.innerText"
    for _ in range(12):
        page.key("Tab")
        if page.run("document.activeElement.closest('#request-table') !== null"):
            break
    name = page.run(focused)
    assert len(name) == 8
    assert post(running).status_code == 200
    page.until(f"{ROWS} === 2", "a newer request is above it")
    assert page.run(focused) == name, "focus stays while rows come"
    page.key("Enter", "\r")
    page.until("document.getElementById('story').open", "the story opens")
    story = text_of(page, "#story")
    assert f"Request {name}: ok" in story
    assert "attempt 1" in story
    assert "4.00 KiB in" not in story.partition("attempt")[2]
    assert running.prefill.instance[:8] in story
    page.key("Escape")
    page.until("!document.getElementById('story').open", "it closes")
    assert page.run(focused) == name, "and focus is where it was"
    assert page.complaints == []


def test_every_element_has_a_label_for_screen_readers(browser, running):
    assert post(running).status_code == 200
    page = shown(browser.page(), running.url)
    page.until(f"{ROWS} === 1", "the request is shown")
    told = page.accessible()
    roles = {role for role, _ in told}
    assert {
        "banner",
        "main",
        "table",
        "columnheader",
        "rowheader",
        "heading",
        "status",
        "button",
        "meter",
    } <= roles
    assert ("table", "Workers, with their load") in told
    assert ("table", "Recent requests, the newest first") in told
    assert all(
        name
        for role, name in told
        if role in ("button", "meter", "heading", "table", "columnheader", "textbox")
    )
    assert ("status", "") in told or any(role == "status" for role, _ in told)
    assert page.run("document.documentElement.lang") == "en"


def test_a_pause_stops_the_polling(browser, running):
    page = shown(browser.page(), running.url)
    page.run("document.getElementById('pause').click()")
    assert page.run("document.getElementById('pause').ariaPressed") == "true"
    page.run("new Promise(done => setTimeout(done, 300))")
    asked = "performance.getEntriesByType('resource').length"
    count = page.run(asked)
    page.run("new Promise(done => setTimeout(done, 2500))")
    assert page.run(asked) == count
    page.run("document.getElementById('pause').click()")
    page.until(f"{asked} > {count} + 2", "it asks again")


def test_a_lost_router_is_shown_and_reconnected(browser, running):
    page = shown(browser.page(), running.url)
    page.call("Network.enable")
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=True, **offline)
    page.until("document.getElementById('state').innerText === 'router cannot be reached'", "it is told")
    page.call("Network.emulateNetworkConditions", offline=False, **offline)
    page.until("document.getElementById('state').innerText === 'serving'", "it is back")


def test_with_keys_the_page_asks_for_one_and_never_puts_it_into_an_address(browser, start, tmp_path):
    path = tmp_path / "api.json"
    key = add(path, {"name": "eve", "operator": True})[0]
    running, script = start(api_keys=str(path))
    running.pair(script)
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.post(running.url + "/v1/chat/completions", json=BODY, headers=headers).status_code == 200
    page = browser.page()
    page.open(running.url + "/")
    page.until("!document.getElementById('login').hidden", "it asks for a key")
    assert page.run("document.getElementById('main').hidden")
    assert page.run("document.activeElement.id") == "key"
    page.type("bk-00000000-wrong")
    page.key("Enter", "\r")
    page.until(
        "document.getElementById('refused').innerText === 'This key is not valid.'", "a wrong key is told"
    )
    page.type(key)
    page.key("Enter", "\r")
    page.until("document.querySelectorAll('#worker-table tbody tr').length === 2", "the workers are shown")
    page.until(f"{ROWS} === 1", "the request is shown")
    addresses = page.run("[location.href, ...performance.getEntriesByType('resource').map(e => e.name)]")
    assert all(key not in address for address in addresses)
    assert page.run("document.documentElement.outerHTML.includes('bk-')") is False
    assert page.run("[document.cookie, JSON.stringify(localStorage)]") == ["", '{"theme":"auto"}']
    page.run("document.getElementById('forget').click()")
    page.until("!document.getElementById('login').hidden", "forgotten")
    assert until(lambda: page.run("sessionStorage.length") == 0, "nothing is kept")


def test_a_tenant_s_key_shows_its_own_requests_and_nothing_of_the_cluster(browser, start, tmp_path):
    path = tmp_path / "api.json"
    alice, bob = (add(path, {"name": name})[0] for name in ("alice", "bob"))
    running, script = start(api_keys=str(path))
    running.pair(script)
    for key in (alice, alice, bob):
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.post(running.url + "/v1/chat/completions", json=BODY, headers=headers).status_code == 200
    page = browser.page()
    page.open(running.url + "/")
    page.until("!document.getElementById('login').hidden", "it asks for a key")
    page.type(bob)
    page.key("Enter", "\r")
    page.until(f"{ROWS} === 1", "its own request is shown")
    assert page.run("document.getElementById('state').innerText") == "own requests"
    assert "This key shows its own requests" in text_of(page, "main")
    assert page.run("document.getElementById('worker-table').checkVisibility()") is False
    assert page.run("document.querySelectorAll('#worker-table tbody tr').length") == 0
