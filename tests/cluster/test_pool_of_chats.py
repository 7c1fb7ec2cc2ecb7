"""Chats that ask for 4096 tokens and take a hundred share a pool that holds one whole reservation.

Nine of them at once on a new router, which knows nothing of their answers yet: with pages that grow at least
eight run at once and nobody is refused; with whole reservations they run one after the other.
"""

import threading
import time

import httpx
import pytest
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import served_model, serving, sse_events, wait_free
from baton.tests.parity.toy_models import write_toy_checkpoint

NUM_CHATS, MAX_TOKENS, PAGES, PAGE = 9, 4096, 375, 16
REGEX = "[a-h]{80,109}"
PROMPT = "It is a chat of some words, as they are. "


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "model"
    write_toy_checkpoint(path, "llama", vocab_size=330, max_position_embeddings=8192, seed=4)
    return save_tokenizer(path)


class Chat:
    """A streamed chat in a thread of its own: when its tokens came."""

    def __init__(self, cluster, number):
        self.times, self.end, self.error, self.text = [], "", None, ""
        self._url = f"{cluster.url}/v1/chat/completions"
        self._body = {
            "model": served_model(cluster), "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": number,
            "stream": True, "guided_regex": REGEX,
            "messages": [{"role": "user", "content": PROMPT * (2 + number % 3)}],
        }  # fmt: skip
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        with httpx.stream("POST", self._url, json=self._body, timeout=300) as answer:
            if answer.status_code != 200:
                self.error = answer.read().decode()
                return
            for event in sse_events(answer):
                self.error = event.get("error") or self.error
                for choice in event.get("choices", []):
                    self.end = choice.get("finish_reason") or self.end
                    if choice["delta"].get("content"):
                        self.text += choice["delta"]["content"]
                        self.times.append(time.monotonic())


def most_at_once(chats):
    """The most chats that were between their first token and their last at one moment."""
    begins = [chat.times[0] for chat in chats]
    return max(sum(chat.times[0] <= begin < chat.times[-1] for chat in chats) for begin in begins)


@pytest.mark.parametrize("reserve", ["grow", "whole"])
def test_nine_chats_share_a_pool_of_6000_tokens(model, reserve):
    env = {"BATON_DECODE_PAGES": str(PAGES)}
    settings = {"prefill": 1, "decode": 1, "threads": 1, "page_size": PAGE, "reserve": reserve}
    with serving(model, "", env, max_context=5000, **settings) as cluster:
        chats = [Chat(cluster, number) for number in range(NUM_CHATS)]
        for chat in chats:
            chat.thread.join(300)
        assert [chat.error for chat in chats] == [None] * NUM_CHATS
        assert [chat.end for chat in chats] == ["stop"] * NUM_CHATS
        assert all(80 <= len(chat.text) <= 109 for chat in chats), "bytes are tokens, at most"
        most = most_at_once(chats)
        print(f"--reserve {reserve}: {most} of {NUM_CHATS} chats at once")
        assert most >= 8 if reserve == "grow" else most <= 2
        wait_free(cluster)
