"""The chat box of the router's page, in a real headless Chromium."""

import json

import pytest
from baton.cluster.protocol.messages import Reserve
from baton.tests.cluster.page_rig import (
    NEEDS_CHROMIUM,
    ask,
    browser,
    click,
    hold_streams,
    running,
    shown,
    text_of,
)
from baton.tests.cluster.router_fakes import ANSWER

__all__ = ["browser", "running"]  # fixtures
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]


def test_the_chat_streams_an_answer_with_tinted_drafts_and_its_speed(browser, running):
    page = shown(browser.page(), running.url)
    page.run("document.getElementById('set-system').value = 'Be brief.'")
    for name, value in (("temperature", "0.5"), ("seed", "7"), ("max", "200")):
        page.run(f"document.getElementById('set-{name}').value = {value!r}")
    ask(page, "hi")
    page.until("!!document.querySelector('.answer .facts button')", "the answer is complete")
    assert text_of(page, ".answer .text") == ANSWER
    drafts = page.run("[...document.querySelectorAll('.answer .draft')].map(e => e.textContent).join('')")
    own = page.run("[...document.querySelectorAll('.answer .own')].map(e => e.textContent).join('')")
    assert 0 < len(drafts) < len(ANSWER)
    assert len(drafts) + len(own) == len(ANSWER)
    facts = text_of(page, ".answer .facts")
    for part in ("to first token", f"{len(running.script.output)} tokens", "drafts", "16 cached"):
        assert part in facts
    sampling = running.decode.of(Reserve)[-1].sampling
    assert (sampling.temperature, sampling.seed, sampling.max_new_tokens) == (0.5, 7, 200)
    click(page, "#set-tint")
    assert (
        page.run("getComputedStyle(document.querySelector('.answer .draft')).backgroundColor")
        == "rgba(0, 0, 0, 0)"
    )
    click(page, ".answer .facts button")
    page.until("!!document.querySelector('#story[open] .waterfall')", "the answer's own waterfall")
    page.key("Escape")
    ask(page, "again")
    page.until("document.querySelectorAll('.answer .facts button').length === 2", "a second turn")
    assert len(running.decode.of(Reserve)[-1].prompt_ids) > len(running.decode.of(Reserve)[-2].prompt_ids)
    click(page, "#chat-clear")
    assert page.run("document.querySelectorAll('.answer').length") == 0
    assert page.complaints == []


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_the_chat_stops_an_answer_by_button_and_by_key(browser, running, way):
    hold_streams(running)
    page = shown(browser.page(), running.url)
    ask(page, "hi")
    page.until("document.querySelector('.answer .text').innerText.length > 3", "the answer begins")
    assert page.run("document.getElementById('send').hidden")
    if way == "button":
        click(page, "#stop")
    else:
        page.key("Escape")
    page.until("document.querySelector('.answer .facts').innerText.includes('stopped')", "it is stopped")
    page.until("!document.getElementById('send').hidden", "another message can be sent")
    assert page.run("document.activeElement.id") == "ask"
    page.until(
        "[...document.querySelectorAll('#request-table tr')].some(r => /cancelled/.test(r.innerText))",
        "cancelled",
    )


def test_reasoning_is_folded_and_errors_are_told(browser, running):
    page = shown(browser.page(), running.url)
    deltas = [{"reasoning_content": "first I "}, {"reasoning_content": "think"}, {"content": "42"}]
    events = [{"id": "x", "choices": [{"delta": delta}]} for delta in deltas]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.run(f"""(() => {{ const real = window.fetch;
      window.fetch = (path, ...rest) =>
        path.startsWith('v1/') ? Promise.resolve(new Response({json.dumps(stream)})) : real(path, ...rest);
    }})()""")
    ask(page, "hi")
    page.until("!!document.querySelector('.answer details')", "a fold")
    assert page.run("document.querySelector('.answer details').open") is False
    assert page.run("document.querySelector('.answer details div').textContent") == "first I think"
    assert text_of(page, ".answer .text") == "42"
    shown(page, running.url)
    page.run("document.getElementById('set-max').value = '100000'")
    ask(page, "hi")
    page.until("!!document.querySelector('.answer [role=alert]')", "the router's own words")
    assert "100000" in text_of(page, ".answer [role=alert]")
