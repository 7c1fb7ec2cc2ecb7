"""S18: schemas that cost more than they may are cut with the process that compiles them. Real processes."""

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from baton.router.errors import ApiError
from baton.router.sandbox.fork_server import ForkServer
from baton.router.sandbox.frames import framed
from baton.router.sandbox.grammar_compiler import Plan
from baton.router.sandbox.template_renderer import Setup
from baton.router.text.grammars import MAX_KEPT, Grammars
from baton.router.text.templates import Templates
from baton.tests.cluster.router_fakes import shared_fork_server
from baton.tests.corpora.corpus import schemas

# an automaton with as many states as both numbers multiplied: minutes and gigabytes at whoever builds it
ENDLESS = b'{"allOf":[{"type":"integer","multipleOf":9973},{"type":"integer","multipleOf":9967}]}'


@asynccontextmanager
async def grammars():
    made = Grammars(shared_fork_server(), time.monotonic, Counter())
    try:
        yield made
    finally:
        made.close()


async def outcome(made, schema):
    """200, or status and code of the refusal, and the seconds that it took."""
    began, found = time.monotonic(), (200, None)
    try:
        await made.of(Plan(answer=schema))
    except ApiError as error:
        found = error.status, error.body.code
    return found, time.monotonic() - began


def test_s18_an_endless_schema_is_cut_while_others_compile():
    async def main():
        async with grammars() as made:
            costly = asyncio.create_task(outcome(made, ENDLESS))
            found = []
            while not costly.done():
                found.append(await outcome(made, b'{"const": %d}' % len(found)))
                await asyncio.sleep(0.02)
            return costly.result(), found, made._events

    for _ in range(3):  # again where a process got no core for as long as a grammar may take
        (refusal, took), found, events = asyncio.run(main())
        if {code for code, _ in found} == {(200, None)} and median(found) < took / 8:
            break
    assert refusal == (400, "grammar_too_costly")
    assert took < 20, "it has 2 s"
    assert events["grammar_cut"] == 1
    assert {code for code, _ in found} == {(200, None)}
    assert median(found) < took / 8, "nobody stands behind it"


def median(found):
    return sorted(seconds for _, seconds in found)[len(found) // 2]


@pytest.mark.parametrize("kind", ["grammar", "template"])
def test_the_log_names_the_kind_of_worker_that_cannot_start(kind, caplog):
    class Barren(ForkServer):
        def fork(self):
            raise OSError("too many processes")

    async def main():
        if kind == "grammar":
            made = Grammars(Barren(), time.monotonic, Counter())
            asked = made.of(Plan(answer=b"{}"))
        else:
            made = Templates(Setup(chat_template="x", special_tokens={}), Barren(), time.monotonic)
            asked = made.render(b"{}", is_long=False)
        with pytest.raises(ApiError) as caught:
            await asked
        made.close()
        return caught.value

    error = asyncio.run(main())
    assert error.status == (429 if kind == "grammar" else 500), "no fault of the request"
    said = [record for record in caplog.records if "worker can be made" in record.getMessage()]
    assert {record.getMessage() for record in said} == {f"no {kind} worker can be made"}
    assert all("too many processes" in str(vars(record)) for record in said)


def test_a_schema_whose_worker_fails_to_start_is_not_called_costly(monkeypatch):
    async def main():
        async with grammars() as made:
            monkeypatch.setattr(made._pool, "_setup", framed(b"no setup"))  # of which a worker dies
            return await outcome(made, b"{}"), made._events

    (found, _), events = asyncio.run(main())
    assert found == (429, "overloaded")
    assert not events["grammar_cut"]


def test_a_plan_is_compiled_once_and_the_last_ones_are_kept():
    async def main():
        async with grammars() as made:
            asked, reply_to = [], made._pool.reply_to
            made._pool.reply_to = lambda data, *, is_long: (
                asked.append(data) or reply_to(data, is_long=is_long)
            )
            plan = Plan(answer=b'{"const": 1}')
            assert len({await made.of(plan) for _ in range(3)}) == 1
            assert await made.of(Plan()) == ""
            for i in range(MAX_KEPT + 5):
                await made.of(Plan(answer=b'{"const": "%d"}' % i))
            assert f"{MAX_KEPT} kept" in repr(made)
            return asked

    assert len(asyncio.run(main())) == 1 + MAX_KEPT + 5


@pytest.mark.slow
def test_s18_no_schema_of_the_corpus_is_answered_later_than_its_bound():
    async def main():
        async with grammars() as made:
            return [
                (name, *await outcome(made, text.encode("utf-8", "surrogatepass")))
                for name, text, _ in schemas()
            ]

    assert [(name, code, took) for name, code, took in asyncio.run(main()) if took > 5] == []
