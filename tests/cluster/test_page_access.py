"""The router's page by keyboard, for screen readers, with API keys and without a router."""

import httpx
import pytest
from baton.deploy.keys.api_keys import add
from baton.tests.cluster.page_rig import (
    CARDS,
    NEEDS_CHROMIUM,
    ROWS,
    ask,
    browser,
    click,
    running,
    shown,
    text_of,
)
from baton.tests.cluster.router_fakes import BODY, MODEL, post

__all__ = ["browser", "running"]  # fixtures
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]


def test_a_requests_timeline_opens_and_closes_by_keyboard_in_place(browser, running):
    assert post(running).status_code == 200
    page = shown(browser.page(), running.url)
    page.until(f"{ROWS} === 1", "the request is shown")
    focused = "document.activeElement.innerText"
    page.key("r", "r")
    assert page.run("document.activeElement.id") == "requests"
    page.key("Tab")
    name = page.run(focused)
    assert len(name) == 8
    assert post(running).status_code == 200
    page.until(f"{ROWS} === 2", "a newer request is above it")
    assert page.run(focused) == name, "focus stays while rows come"
    page.key("Enter", "\r")
    page.until("document.getElementById('story').open", "the story opens")
    assert f"Request {name}: ok" in text_of(page, "#story")
    page.key("Escape")
    page.until("!document.getElementById('story').open", "it closes")
    assert page.run(focused) == name, "and focus is where it was"
    assert page.complaints == []


def test_single_keys_act_outside_of_fields_and_can_be_switched_off(browser, running):
    page = shown(browser.page(), running.url)
    page.key("/", "/")
    assert page.run("[document.activeElement.id, document.getElementById('ask').value]") == ["ask", ""]
    page.key("p", "p")
    assert page.run(
        "[document.getElementById('pause').ariaPressed, document.getElementById('ask').value]"
    ) == ["false", "p"]
    page.run("document.activeElement.blur()")
    page.key("?", "?")
    page.until("document.getElementById('shortcuts').open", "the list of keys")
    click(page, "#single-keys")
    page.key("Escape")
    page.until("!document.getElementById('shortcuts').open", "closed")
    page.key("p", "p")
    assert page.run("document.getElementById('pause').ariaPressed") == "false"
    page.run("localStorage.clear()")


def test_tab_goes_from_the_header_to_the_chat_and_then_to_the_overview(browser, running):
    assert post(running).status_code == 200
    page = shown(browser.page(), running.url)
    page.until(f"{ROWS} === 1", "the request is shown")
    places = []
    for _ in range(26):
        page.key("Tab")
        where = page.run("document.activeElement.closest('header, #chat, #overview, .skip')?.id || 'other'")
        if where not in places[-1:]:
            places.append(where)
    assert [place for place in places if place in ("chat", "overview")] == ["chat", "overview"]
    assert page.run("document.querySelector('.skip').getAttribute('href')") == "#overview"


def test_every_element_has_a_label_for_screen_readers(browser, running):
    assert post(running).status_code == 200
    page = shown(browser.page(), running.url)
    page.until(f"{ROWS} === 1", "the request is shown")
    told = page.accessible()
    wanted = (
        "banner main navigation table columnheader rowheader heading status button meter log textbox image"
    )
    assert set(wanted.split()) <= {role for role, _ in told}
    assert ("table", "Recent requests, the newest first") in told
    named = (
        "button",
        "meter",
        "heading",
        "table",
        "columnheader",
        "textbox",
        "image",
        "spinbutton",
        "link",
        "log",
    )
    assert [role for role, name in told if role in named and not name] == []
    assert any(name.startswith("Output, tok/s: ") for role, name in told if role == "image")
    assert page.run("document.documentElement.lang") == "en"


def test_a_pause_stops_the_polling(browser, running):
    page = shown(browser.page(), running.url)
    click(page, "#pause")
    assert page.run("document.getElementById('pause').ariaPressed") == "true"
    page.run("new Promise(done => setTimeout(done, 300))")
    asked = "performance.getEntriesByType('resource').length"
    count = page.run(asked)
    page.run("new Promise(done => setTimeout(done, 2500))")
    assert page.run(asked) == count
    click(page, "#pause")
    page.until(f"{asked} > {count} + 2", "it asks again")


def test_a_lost_router_is_shown_and_reconnected(browser, running):
    page = shown(browser.page(), running.url)
    page.call("Network.enable")
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=True, **offline)
    page.until("document.getElementById('state').innerText === 'router cannot be reached'", "it is told")
    page.call("Network.emulateNetworkConditions", offline=False, **offline)
    page.until("document.getElementById('state').innerText === 'serving'", "it is back")


def enter(page, key):
    page.until("!document.getElementById('login').hidden", "it asks for a key")
    page.type(key)
    page.key("Enter", "\r")


def keyed(start, tmp_path, *names, **role):
    """A router with a pair, and a key for each name."""
    path = tmp_path / "api.json"
    keys = [add(path, {"name": name, **role})[0] for name in names]
    running, script = start(api_keys=str(path))
    running.pair(script)
    return running, *keys


def chat_with(running, key):
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.post(running.url + "/v1/chat/completions", json=BODY, headers=headers).status_code == 200


def test_a_key_is_kept_in_memory_only_and_forgotten_by_a_reload(browser, start, tmp_path):
    running, key = keyed(start, tmp_path, "eve", operator=True)
    chat_with(running, key)
    page = browser.page()
    page.open(running.url + "/")
    page.until("!document.getElementById('login').hidden", "it asks for a key")
    assert page.run("document.getElementById('main').hidden")
    assert page.run("document.activeElement.id") == "key"
    enter(page, "bk-00000000-wrong")
    page.until(
        "document.getElementById('refused').innerText === 'This key is not valid.'", "a wrong key is told"
    )
    enter(page, key)
    page.until(f"{CARDS} === 2 && {ROWS} === 1", "workers and the request are shown")
    ask(page, "hi")
    page.until("!!document.querySelector('.answer .facts button')", "the chat has the key, too")
    click(page, 'nav a[href="metrics"]')
    page.until(
        "document.getElementById('raw-body').innerText.includes('baton_requests_total')", "so has the link"
    )
    addresses = page.run("[location.href, ...performance.getEntriesByType('resource').map(e => e.name)]")
    assert all(key not in address for address in addresses)
    assert page.run("document.documentElement.outerHTML.includes('bk-')") is False
    kept = page.run("[document.cookie, JSON.stringify(localStorage), sessionStorage.length]")
    assert kept == ["", '{"theme":"auto"}', 0]
    page.run("document.getElementById('raw').close()")
    click(page, "#forget")
    page.until("!document.getElementById('login').hidden", "forgotten")
    enter(page, key)
    page.until(f"{CARDS} === 2", "known again")
    page.open(running.url + "/")
    page.until("!document.getElementById('login').hidden", "a reload forgets it")


def test_a_tenant_s_key_shows_its_own_requests_and_nothing_of_the_cluster(browser, start, tmp_path):
    running, alice, bob = keyed(start, tmp_path, "alice", "bob")
    for key in (alice, alice, bob):
        chat_with(running, key)
    page = browser.page()
    page.open(running.url + "/")
    enter(page, bob)
    page.until(f"{ROWS} === 1", "its own request is shown")
    assert page.run("document.getElementById('state').innerText") == "own requests"
    assert "This key shows its own requests" in text_of(page, "main")
    assert page.run("document.getElementById('worker-cards').checkVisibility()") is False
    assert page.run(CARDS) == 0
    page.until(f"document.getElementById('model').innerText === {MODEL!r}", "the model is known")
    ask(page, "hi")
    page.until("!!document.querySelector('.answer .facts button')", "and it may chat")
    page.until(f"{ROWS} === 2", "its request is shown")


def test_an_observer_s_key_shows_the_cluster_and_is_refused_answers(browser, start, tmp_path):
    running, key = keyed(start, tmp_path, "scraper", observer=True)
    page = browser.page()
    page.open(running.url + "/")
    enter(page, key)
    page.until(f"{CARDS} === 2", "the workers are shown")
    ask(page, "hi")
    page.until("!!document.querySelector('.answer [role=alert]')", "it is told why")
