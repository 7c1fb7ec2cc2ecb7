"""/docs in a real headless Chromium: examples that run, contents, dark and light, on a phone."""

import json

import pytest
from baton.deploy.keys.api_keys import add
from baton.tests.cluster.page_checks import LOW_CONTRAST, OVERFLOWING, UNLABELLED
from baton.tests.cluster.page_rig import LOOKS, NEEDS_CHROMIUM, browser, click, running, text_of
from baton.tests.cluster.router_fakes import ANSWER

__all__ = ["browser", "running"]  # fixtures
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]
CHAT = 'form[data-path="/v1/chat/completions"]'


def opened(page, url):
    page.open(url + "/docs")
    page.until("document.querySelectorAll('section').length > 10", "the operations are there")
    return page


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_each_look_has_contrast_labels_and_no_overflow(browser, running, width, scheme):
    page = browser.page()
    page.prefer(scheme)
    page.resize(width, 900, is_mobile=width < 500)
    opened(page, running.url)
    page.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.run(LOW_CONTRAST) == []
    assert page.run(UNLABELLED) == []
    assert page.run(OVERFLOWING) == []
    assert page.complaints == []


def test_an_example_can_be_edited_and_sent_and_shown_as_curl(browser, running):
    page = opened(browser.page(), running.url)
    body = json.loads(page.run(f"document.querySelector('{CHAT} textarea').value"))
    assert (body["model"], body["stream"]) == ("tiny", True)
    body |= {"stream": False, "max_tokens": 200}
    page.run(f"document.querySelector('{CHAT} textarea').value = {json.dumps(json.dumps(body))}")
    click(page, f"{CHAT} button[type=submit]")
    page.until(f"document.querySelector('{CHAT} [role=status]').innerText.includes('complete')", "it answers")
    assert json.loads(text_of(page, f"{CHAT} pre"))["choices"][0]["message"]["content"] == ANSWER
    assert text_of(page, f"{CHAT} [role=status]").startswith("200 in ")
    click(page, f"{CHAT} [data-curl]")
    curl = text_of(page, f"{CHAT} pre")
    assert f"curl -N {running.url}/v1/chat/completions" in curl
    assert '"max_tokens": 200' in curl.replace('":', '": ').replace("  ", " ")
    click(page, 'form[data-path="/v1/models"] button[type=submit]')
    page.until(
        """document.querySelector('form[data-path="/v1/models"] pre').innerText.includes('"tiny"')""", "a GET"
    )
    assert page.complaints == []


def test_a_stream_is_shown_while_it_comes(browser, running):
    page = opened(browser.page(), running.url)
    click(page, f"{CHAT} button[type=submit]")
    page.until(f"document.querySelector('{CHAT} pre').innerText.includes('[DONE]')", "the events")


def test_the_contents_lead_to_sections_and_can_be_filtered(browser, running):
    page = opened(browser.page(), running.url)
    links = "[...document.querySelectorAll('.contents a')]"
    assert page.run(f"{links}.every(a => document.getElementById(a.hash.slice(1)))")
    page.run("document.getElementById('filter').focus()")
    page.type("return_token_strs")
    shown = f"{links}.filter(a => a.checkVisibility()).map(a => a.hash)"
    page.until(f"{shown}.length < 5", "few operations have this field")
    assert "#post-tokenize" in page.run(shown)
    assert "#get-health" not in page.run(shown)
    visible = "[...document.querySelectorAll('section')].filter(e => e.checkVisibility()).length"
    assert page.run(visible) == len(page.run(shown))


def test_with_keys_an_example_needs_one_and_it_stays_in_memory(browser, start, tmp_path):
    path = tmp_path / "api.json"
    key = add(path, {"name": "alice"})[0]
    running, script = start(api_keys=str(path))
    running.pair(script)
    page = opened(browser.page(), running.url)
    status = f"document.querySelector('{CHAT} [role=status]').innerText"
    click(page, f"{CHAT} button[type=submit]")
    page.until(f"{status}.startsWith('401') && {status}.includes('complete')", "a key is needed")
    page.run("document.getElementById('key').focus()")
    page.type(key)
    click(page, f"{CHAT} button[type=submit]")
    page.until(f"{status}.startsWith('200') && {status}.includes('complete')", "and taken")
    kept = page.run("[document.cookie, JSON.stringify(localStorage), sessionStorage.length]")
    assert kept == ["", '{"theme":"auto"}', 0]
