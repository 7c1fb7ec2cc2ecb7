"""A rank that has ended is lost at once; of silent ranks the first one, and a pause of all loses none."""

from baton.worker.rank_watch import RankSign, RankWatch

LIMIT, EVERY = 2.0, 0.5


def signs(*seen: int, codes: tuple[int | None, ...] = (), states: str = "SS") -> list[RankSign]:
    codes = codes or (None,) * len(seen)
    return [
        RankSign(rank=i + 1, pid=100 + i, code=codes[i], seen_alive=at, state=states[i])
        for i, at in enumerate(seen)
    ]


def test_a_rank_that_ended_is_named_with_its_end():
    watch = RankWatch(LIMIT, EVERY)
    killed = watch.look(signs(1, 1, codes=(None, -9)), is_serving=False)
    assert killed == "rank 2 (pid 101) was killed by SIGKILL"
    assert (
        watch.look(signs(1, 1, codes=(1, None)), is_serving=True) == "rank 1 (pid 100) ended with exit code 1"
    )


def test_the_rank_that_fell_silent_first_is_lost():
    watch = RankWatch(LIMIT, EVERY)
    found = [watch.look(signs(min(i, 1), min(i, 2)), is_serving=True) for i in range(12)]
    lost = next(text for text in found if text)
    assert lost == "rank 1 (pid 100) hangs: no sign of life for 2 s"
    assert found.index(lost) == 1 + LIMIT / EVERY


def test_a_stopped_rank_is_lost_before_one_that_waits_for_it():
    watch = RankWatch(LIMIT, EVERY)
    found = [watch.look(signs(1, 2, states="ST"), is_serving=True) for _ in range(6)]
    assert found[-1] == "rank 2 (pid 101) is stopped: no sign of life for 2 s"


def test_signs_of_life_a_start_and_a_pause_lose_none():
    watch = RankWatch(LIMIT, EVERY)
    assert not any(watch.look(signs(1, 1), is_serving=False) for _ in range(100))
    assert not any(watch.look(signs(i, i), is_serving=True) for i in range(100))
    # a pause of hours is one look, and ranks give signs before the next few
    assert not watch.look(signs(99, 99), is_serving=True)
    assert not watch.look(signs(10**15, 10**15), is_serving=True)


def test_a_start_ends_when_all_wait_for_one_rank():
    watch = RankWatch(LIMIT, EVERY, start_limit_s=20.0)
    found = [watch.look(signs(min(i, 5), min(i, 3)), is_serving=False) for i in range(60)]
    lost = next(text for text in found if text)
    assert lost == "rank 2 (pid 101) hangs in the start: no sign of life for 20 s"
    assert found.index(lost) == 3 + 20 / EVERY


def test_the_silence_of_a_start_does_not_count_in_serving():
    watch = RankWatch(LIMIT, EVERY, start_limit_s=20.0)
    assert not any(watch.look(signs(1, 1), is_serving=False) for _ in range(30))
    found = [watch.look(signs(1, 1), is_serving=True) for _ in range(6)]
    assert found.index("rank 1 (pid 100) hangs: no sign of life for 2 s") == LIMIT / EVERY


def test_without_a_limit_silence_is_allowed():
    watch = RankWatch(0.0, EVERY)
    assert not any(watch.look(signs(1, 1), is_serving=True) for _ in range(1000))
    assert not any(watch.look(signs(1, 1), is_serving=False) for _ in range(10_000))
