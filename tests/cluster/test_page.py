"""The router's page in a real headless Chromium: what it shows, dark and light, on a desk and on a phone.

    SCREENSHOTS=DIRECTORY pytest tests/cluster/test_page.py

writes what the tests of the four looks see to that directory.
"""

import os
from pathlib import Path

import pytest
from baton.tests.cluster.page_checks import LOW_CONTRAST, OVERFLOWING, UNLABELLED
from baton.tests.cluster.page_rig import (
    CARDS,
    LOOKS,
    NEEDS_CHROMIUM,
    ROWS,
    STREAMING,
    ask,
    browser,
    click,
    decode_stats,
    fill_history,
    running,
    shown,
    stream_three,
    text_of,
)
from baton.tests.cluster.router_fakes import post

__all__ = ["browser", "running"]  # fixtures
pytestmark = NEEDS_CHROMIUM
LINES = "[...document.querySelectorAll('#charts .line')]"


def test_workers_rates_and_requests_are_shown_live(browser, running):
    for count in range(3):
        assert post(running, max_tokens=10 + 9 * count).status_code == 200
    page = shown(browser.page(1280, 900), running.url)
    assert text_of(page, "#state") == "serving"
    cards = text_of(page, "#worker-cards")
    for part in ("38 % 24 of 64", "2.31 of 4", "1: NVIDIA H200", "2 running", running.decode.instance[:8]):
        assert part in cards, "three rooms, one of which is a canary"
    assert text_of(page, "#accept") == "2.31"
    machines = text_of(page, "#machines")
    for part in ("80 %", "of 140 GiB", "box1 · 2 workers"):
        assert part in machines
    page.until(f"{ROWS} === 3", "three requests are shown")
    assert post(running).status_code == 200
    page.until(f"{ROWS} === 4", "a fourth one comes by itself")
    step = 0
    while not page.run(
        "/[1-9].*iB\\/s/.test(document.querySelector('.decode [data-measure=moved]').innerText)"
    ):
        step += 1
        assert step < 30, "a rate is shown"
        running.decode.stats = decode_stats(step)
        page.run("new Promise(done => setTimeout(done, 1000))")
    assert running.decode.instance not in page.run("document.documentElement.outerHTML"), "ids are cut"
    assert page.complaints == []


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_each_look_has_contrast_labels_and_no_overflow_while_streaming(browser, running, width, scheme):
    fill_history(running)
    connections = stream_three(running)
    page = browser.page()
    page.prefer(scheme)
    page.resize(width, 900 if width > 500 else 844, is_mobile=width < 500)
    shown(page, running.url)
    page.until(f"{STREAMING} === 3", "three requests stream")
    ask(page, "hi")
    page.until(f"{STREAMING} === 4", "and the one of the page")
    page.until("document.querySelector('.answer .draft')?.innerText", "the answer begins")
    assert text_of(page, "#running") == "4"
    if target := os.environ.get("SCREENSHOTS"):
        page.screenshot(Path(target) / f"page-{width}-{scheme}.png", whole=width < 500)
    click(page, "#settings > summary")
    assert page.run(LOW_CONTRAST) == []
    assert page.run(UNLABELLED) == []
    assert page.run(OVERFLOWING) == []
    click(page, "#request-table button")
    page.until("!!document.querySelector('#story[open] .waterfall rect')", "the waterfall opens")
    assert page.run(LOW_CONTRAST) == []
    assert page.run(OVERFLOWING) == []
    assert page.complaints == []
    for connection in connections:
        connection.close()


def test_dark_and_light_follow_the_system_until_the_user_chooses(browser, running):
    page = shown(browser.page(), running.url)
    back = "getComputedStyle(document.body).backgroundColor"
    page.prefer("dark")
    dark = page.run(back)
    page.prefer("light")
    light = page.run(back)
    assert dark != light
    for theme, colour in (("light", light), ("dark", dark)):
        click(page, "#theme")
        assert text_of(page, "#theme") == f"Theme: {theme}"
        assert page.run(back) == colour
    shown(page, running.url)
    assert page.run(back) == dark, "remembered"
    page.run("localStorage.clear()")


def test_a_reload_shows_the_last_fifteen_minutes_at_once(browser, running):
    fill_history(running)
    page = shown(browser.page(), running.url)
    assert page.run("document.querySelectorAll('#charts svg').length") == 4
    lengths = f"{LINES}.map(line => line.getAttribute('d').split('L').length)"
    assert min(page.run(lengths)) > 400, "with the first look"
    labels = page.run(
        "[...document.querySelectorAll('#charts svg')[0].querySelectorAll('text')].map(t => t.textContent)"
    )
    assert {"0", "\u221215 min", "\u22125 min", "now"} <= set(labels)
    assert any(label.isdigit() and int(label) >= 100 for label in labels), "the axis has numbers"
    assert page.run("document.querySelectorAll('.worker .spark .line').length") >= 6
    click(page, '.spans [data-minutes="1"]')
    points = page.run("document.querySelector('#charts .line').getAttribute('d').match(/L/g).length")
    assert 25 <= points <= 31, "a minute has thirty points"
    page.run("document.querySelector('#charts svg').focus()")
    for _ in range(3):
        page.key("ArrowLeft")
    assert page.run("document.querySelector('#charts svg').getAttribute('aria-label')").endswith("6 s ago")


def test_the_waterfall_has_each_part_at_its_offset(browser, running):
    assert post(running).status_code == 200
    page = shown(browser.page(), running.url)
    page.until(f"{ROWS} === 1", "the request is shown")
    click(page, "#request-table button")
    page.until("!!document.querySelector('#story[open] .waterfall rect')", "it opens")
    names = page.run(
        "[...document.querySelectorAll('.waterfall li:not(.scale) .name')].map(e => e.innerText)"
    )
    assert names[:3] == ["read, tokenize", "router queue", "prefill"]
    assert "hand-off" in names
    starts = page.run(
        "[...document.querySelectorAll('.waterfall rect')].map(e => Number(e.getAttribute('x')))"
    )
    assert starts == sorted(starts)
    assert starts[-1] > starts[0]
    assert f"{running.prefill.instance[:8]} → {running.decode.instance[:8]}: ok" in text_of(page, "#story")


def test_many_workers_and_requests_stay_short_until_asked(browser, start):
    running, script = start()
    running.pair(script)
    for _ in range(7):
        running.add("prefill", script.prefill)
        running.add("decode", script.decode)
    for _ in range(12):
        assert post(running).status_code == 200
    page = browser.page()
    page.resize(390, 844, is_mobile=True)
    page.open(running.url + "/")
    page.until(f"{CARDS} === 4", "four of sixteen workers")
    page.until(f"{ROWS} === 4", "four of twelve requests")
    assert text_of(page, "#more-workers") == "Show 12 more workers"
    click(page, "#more-workers")
    click(page, "#more-requests")
    page.until(f"{CARDS} === 16 && {ROWS} === 12", "all of them")
    assert page.run(OVERFLOWING) == []
    assert text_of(page, "#more-requests") == "Show fewer requests"


def test_a_phone_page_with_a_pair_is_short(browser, running):
    for _ in range(10):
        assert post(running).status_code == 200
    page = browser.page()
    page.resize(390, 844, is_mobile=True)
    shown(page, running.url)
    page.until(f"{ROWS} === 4", "requests are shown")
    assert page.run("document.documentElement.scrollHeight") < 3400
    buttons = "[...document.querySelectorAll('header button')].filter(b => b.checkVisibility())"
    assert page.run(f"{buttons}.filter(b => b.offsetHeight < 24).length") == 0
