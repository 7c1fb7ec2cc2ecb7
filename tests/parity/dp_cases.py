"""Decode workers with data-parallel attention, one after the other, over one process group.

Rank 0 is the process of the test. The other ranks are real processes of `python -m`, each with a decode
worker of its own: what it is asked comes by its standard input, and what it says goes to its standard output.
"""

import json
import os
import secrets
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from baton.cluster.config.load import load_config, to_argv
from baton.cluster.config.roles import DecodeConfig
from baton.cluster.protocol.messages import Finished, Reserve, Sampling, Tokens
from baton.decode.worker import DecodeWorker
from baton.engine.engine import Engine
from baton.engine.loader import rank_device
from baton.engine.parallel.group import TensorGroup, leave_group
from baton.engine.parallel.lockstep import Exchange
from baton.tests.parity.rank_cases import joined, loaded
from baton.tests.parity.test_sampled_law import D, Ears
from baton.tests.parity.tp_worker import SIZES
from baton.worker.peer_table import PeerDescriptors, PeerTable
from baton.worker.rank_processes import rank_environment

LIMIT_S = 120.0
MOST_STEPS = 20_000
IDLE_STEPS = 20


@dataclass(frozen=True)
class Asked:
    """A prompt that comes when its rank has been in `at` rounds, or has had nothing to do for a while.

    `sampling`: beside greedy defaults.
    """

    ids: Sequence[int]
    num_tokens: int
    at: int = 0
    sampling: Mapping[str, object] = field(default_factory=dict)


class AskedWorker:
    """The worker of one rank, or of a worker that has one, and what it was asked."""

    def __init__(self, worker: DecodeWorker) -> None:
        self.worker = worker
        self.rounds = worker.engine.rounds
        self._coming: list[tuple[int, str, Asked]] = []
        self._rooms: list[str] = []
        self._first = self._num_idle = 0

    def ask(self, asked: Sequence[Asked]) -> None:
        """Takes in prompts; `said` tells their tokens once all have ended."""
        self._first, self._rooms = self._num_rounds, [secrets.token_hex(16) for _ in asked]
        self._coming = [(each.at, room, each) for room, each in zip(self._rooms, asked, strict=True)]
        self.worker.link.heard.clear()

    def step(self) -> bool:
        """One step of the worker; False when it has nothing to do."""
        done = self._num_rounds - self._first
        done = MOST_STEPS if self._num_idle > IDLE_STEPS else done
        due = [each for each in self._coming if each[0] <= done]
        self._coming = [each for each in self._coming if each[0] > done]
        for _, room, asked in due:
            self.worker.handle(order_of(room, asked), now=0.0)
        did_work = self.worker.step() or bool(due)
        self._num_idle = 0 if did_work else self._num_idle + 1
        return did_work

    @property
    def _num_rounds(self) -> int:
        return 0 if self.rounds is None else self.rounds.num_rounds

    @property
    def is_done(self) -> bool:
        """Whether all prompts have their answers."""
        return not self._coming and not self.worker.num_rooms

    def said(self) -> list[list[int]]:
        """The tokens of all prompts, in their order."""
        tokens: dict[str, list[int]] = {room: [] for room in self._rooms}
        for message in self.worker.link.heard:
            for item in message.items if isinstance(message, Tokens) else ():
                tokens[item.room].extend(item.ids)
        ended = {message.room for message in self.worker.link.heard if isinstance(message, Finished)}
        assert ended == set(self._rooms), "each request ends well"
        self.worker.engine.cache.allocator.check_integrity()
        return [tokens[room] for room in self._rooms]

    def end(self) -> None:
        """Gives up the graphs, so that the ranks can leave their group."""
        self.worker.engine.drop_graphs()


def order_of(room: str, asked: Asked) -> Reserve:
    wish = {"temperature": 0.0, "max_new_tokens": asked.num_tokens, "ignore_eos": True, **asked.sampling}
    return Reserve(
        room=room, epoch=0, instance=D, prompt_ids=list(asked.ids), sampling=Sampling(**wish), deadline_ms=0
    )


def asked_worker(engine: Engine, config: DecodeConfig, exchange: Exchange) -> AskedWorker:
    """A worker on the engine of one rank."""
    engine.begin_rounds(exchange)
    budget = engine.sizes.local_prefill_tokens
    worker = DecodeWorker(
        engine, Ears(), instance=D, max_running=config.max_running, local_prefill_tokens=budget
    )
    worker.local.budget_alone = worker.local.budget  # the same parts whether or not a stream runs
    return AskedWorker(worker)


class DpCases:
    """Ranks 1 to `size` - 1 of workers that come one by one, in float32, each on the CPU or on a GPU. Close
    it in the end. `limit_s`: the longest wait in a collective of CPUs.
    """

    def __init__(self, size: int, device: str = "cpu", limit_s: float = 5 * LIMIT_S) -> None:
        self.size = size
        self.device = device
        meeting, descriptors = os.memfd_create("baton-ranks"), PeerDescriptors.create(size)
        shown = [descriptors.table, descriptors.ready, descriptors.call]
        self.children = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, json.dumps([rank, size, meeting, shown, device, limit_s])],
                pass_fds=(meeting, *descriptors.all),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=rank_environment(),
                text=True,
            )
            for rank in range(1, size)
        ]
        self.table = PeerTable(descriptors, 0, size)
        self._group = joined(meeting, 0, size, device_of(device, 0, size), limit_s)
        self._worker: AskedWorker | None = None

    @contextmanager
    def workers(self, target: Path, draft: Path | str = "", **settings: object) -> Iterator["DpCases"]:
        """Aggregated workers of all ranks. A failure inside ends the ranks."""
        values: Mapping[str, object] = {"local_prefill_tokens": 16, **SIZES, **settings}
        config = DecodeConfig(
            model=str(target), draft=str(draft), aggregated=True, dp_attention=self.size, threads=1,
            device=self.device, dtype="float32", **values,
        )  # fmt: skip
        try:
            for child in self.children:
                self._send(child, {"flags": to_argv(config)})
            self._worker = asked_worker(loaded(config, self._group), config, self.table)
            yield self
            for child in self.children:
                self._send(child, {"end": True})
            self._worker.end()
        except BaseException:
            self.kill()
            raise
        finally:
            self._worker = None

    @property
    def worker(self) -> DecodeWorker:
        """That of rank 0."""
        assert self._worker is not None
        return self._worker.worker

    def ask(self, asked: Mapping[int, Sequence[Asked]]) -> list[list[list[int]]]:
        """The tokens of all prompts by rank."""
        own = self._worker
        assert own is not None
        for rank, child in enumerate(self.children, start=1):
            self._send(child, {"ask": [vars(each) | {"ids": list(each.ids)} for each in asked.get(rank, ())]})
        own.ask(asked.get(0, ()))
        said: dict[int, list[list[int]]] = {}
        for _ in range(MOST_STEPS):
            did_work = own.step()
            for rank, child in enumerate(self.children, start=1):
                if rank not in said and select.select([child.stdout], [], [], 0)[0]:
                    said[rank] = json.loads(child.stdout.readline())["said"]
            if own.is_done and len(said) == self.size - 1:
                return [own.said(), *(said[rank] for rank in sorted(said))]
            if not did_work:
                self.table.wait_for_call(0.002)
        raise AssertionError("the ranks do not end")

    def kill(self) -> None:
        """Ends the ranks by force; no further worker starts."""
        for child in self.children:
            child.kill()

    def close(self) -> None:
        """Ends the ranks and their group, which all leave at once: on GPUs each waits for the others."""
        for child in self.children:
            assert child.stdin is not None
            child.stdin.close()
        leave_group(self._group)
        for child in self.children:
            child.wait(timeout=LIMIT_S)
            assert child.stdout is not None
            child.stdout.close()

    @staticmethod
    def _send(child: subprocess.Popen[str], message: Mapping[str, object]) -> None:
        assert child.stdin is not None
        child.stdin.write(json.dumps(message) + "\n")
        child.stdin.flush()


def device_of(device: str, rank: int, size: int) -> torch.device:
    return rank_device(torch.device(device), TensorGroup(rank=rank, size=size))


def serve_one(worker: AskedWorker, table: PeerTable) -> None:
    """Answers what standard input asks, until it says that the worker ends."""
    is_asked = False
    while True:
        did_work = worker.step()
        if is_asked and worker.is_done:
            is_asked = False
            print(json.dumps({"said": worker.said()}), flush=True)
        if is_asked and (did_work or table.wait_for_call(0.01)):
            continue
        if not select.select([sys.stdin], [], [], 0.002)[0]:
            continue
        message = json.loads(sys.stdin.readline())
        if "end" in message:
            return
        worker.ask([Asked(**each) for each in message["ask"]])
        is_asked = True


def main() -> None:
    """One rank: a line of standard input is a worker's flags."""
    rank, size, meeting, shown, device, limit_s = json.loads(sys.argv[1])
    group = joined(meeting, rank, size, device_of(device, rank, size), limit_s)
    table = PeerTable(PeerDescriptors(*shown), rank, size)
    while line := sys.stdin.readline():
        message = json.loads(line)
        config = load_config(DecodeConfig, message["flags"], {}, warns=False)
        worker = asked_worker(loaded(config, group), config, table)
        serve_one(worker, table)
        worker.end()
    leave_group(group)


if __name__ == "__main__":
    main()
