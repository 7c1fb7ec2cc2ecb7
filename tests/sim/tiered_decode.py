"""A decode worker that computes its prompts itself, with tiers that real threads copy for."""

import json
import logging
import os
import secrets
import sys
import time
from types import SimpleNamespace

import torch
from baton.cluster.process.failpoints import reach_of
from baton.cluster.protocol.messages import Finished, Reserve, Sampling, Tokens
from baton.decode.worker import DecodeWorker
from baton.engine.config import EngineConfig
from baton.engine.loader import EngineLoader
from baton.tests.parity.test_sampled_law import D, Ears
from baton.tests.parity.toy_engine import random_ids
from baton.worker.tier_startup import open_tiers, page_keys_of

GIB = 1 << 30
MOST_TURNS, MOST_S = 20_000, 60.0


def decode_worker(target, head, device, *, pages, tiers=None, reach=lambda site: None, **settings):
    """`tiers`: (bytes of host memory, directory or "", bytes of it); None: no tiers."""
    config = EngineConfig(
        model=str(target), draft=str(head or ""), device=device, dtype="float32", page_size=16, pages=pages,
        max_context=160, max_running=4, aggregated=True, graphs="off", spec_adaptive="off", **settings,
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    engine = loader.engine()
    engine.weights = None  # no thread hashes them
    worker = DecodeWorker(engine, Ears(), instance=D, max_running=4, local_prefill_tokens=64)
    if tiers is not None:
        host, disk, disk_bytes = tiers
        wanted = SimpleNamespace(
            host_cache_gib=host / GIB, disk_cache=str(disk), disk_cache_gib=disk_bytes / GIB
        )
        worker.tiers = open_tiers(engine, wanted, page_keys_of(engine), reach=reach)
        worker.tiers.tiers.costs.is_sooner = lambda **_: True  # whatever the times of this machine are
    return worker


def told_without_tiers(target):
    """What each turn of `chats` says where the pool holds all of them."""
    return [said for said, _ in chats(decode_worker(target, None, "cpu", pages=80))]


def ask(worker, prompt, salt="", count=6):
    """(the tokens, the number of prompt tokens that were cached)"""
    room = secrets.token_hex(16)
    sampling = Sampling(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    order = Reserve(
        room=room, epoch=0, instance=D, prompt_ids=prompt, sampling=sampling, deadline_ms=0, salt=salt
    )
    worker.handle(order, now=0.0)
    turns(worker, lambda: worker.num_rooms == 0)
    said = [
        token
        for message in worker.link.heard
        if isinstance(message, Tokens)
        for item in message.items
        for token in item.ids
    ]
    ended = [message for message in worker.link.heard if isinstance(message, Finished)]
    worker.link.heard.clear()
    return said, ended[0].prefill.cached_tokens


def turns(worker, is_done):
    """Turns of the worker until `is_done`."""
    until = time.monotonic() + MOST_S
    for _ in range(MOST_TURNS):
        worker.step()
        if is_done():
            return
        assert time.monotonic() < until, worker
        time.sleep(0.0005)
    raise AssertionError(f"{worker!r} does not end")


def settled(worker):
    """Turns until no copy is under way, and the disk is open where there is one."""
    tiers = worker.tiers.tiers
    turns(worker, lambda: not tiers.is_busy and (tiers.is_off or not worker.tiers.is_opening))


def chats(worker, number=6, rounds=2, tokens=70, tell=lambda turn: None):
    """The answers of conversations that take turns, with the cached tokens of each turn."""
    texts = [random_ids(tokens, seed=seed) for seed in range(number)]
    said = []
    for _ in range(rounds):
        for chat, text in enumerate(texts):
            tokens, cached = ask(worker, text)
            said.append((tokens, cached))
            tell(said[-1])
            texts[chat] = text + tokens + [5, 6, 7]
            if worker.tiers is not None:
                settled(worker)
    return said


def main(target, disk):
    """A life of a worker: told on stdout are the pages found on disk, each turn, and the end.

    BATON_FAULT may end it earlier.
    """
    worker = decode_worker(
        target, None, "cpu", pages=14, tiers=(0, disk, 64 << 20), reach=reach_of(os.environ)
    )
    settled(worker)
    print(json.dumps(len(worker.tiers.tiers.disk)), flush=True)
    chats(worker, tell=lambda turn: print(json.dumps(turn), flush=True))
    worker.tiers.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    main(*sys.argv[1:])
