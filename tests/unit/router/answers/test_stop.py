"""Stop strings: the same end wherever the text is cut, and nothing withheld without need."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from baton.router.answers.stop import StopStrings
from hypothesis import example, given

letters = st.text(alphabet="ab\n", max_size=24)
stops_of = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def run(stops, pieces):
    machine = StopStrings(stops)
    out = "".join(machine.feed(piece) for piece in pieces)
    return out + machine.flush(), machine.is_hit


def first_completed(stops, text):
    """The definition: read letter by letter, end at the first complete stop, the longest if several are."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(stops_of, letters, st.lists(st.integers(0, 24), max_size=6))
@example(["abab"], "aabab", [1, 2, 3, 4])
@example(["bb", "abba"], "abba", [])
def test_result_is_the_definition_however_the_text_is_cut(stops, text, cuts):
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(stops, pieces) == first_completed(stops, text)


@given(stops_of, letters, st.lists(st.integers(0, 24), max_size=6))
def test_a_kept_stop_string_ends_the_text(stops, text, cuts):
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    machine = StopStrings(stops, keeps_stop=True)
    out = "".join(machine.feed(text[a:b]) for a, b in pairwise(edges)) + machine.flush()
    before, is_hit = first_completed(stops, text)
    assert out == text if not is_hit else out.startswith(before) and out.endswith(tuple(stops))
    assert not is_hit or first_completed(stops, out)[0] == before


@given(stops_of, letters)
def test_no_more_is_withheld_than_could_begin_a_stop(stops, text):
    machine = StopStrings(stops)
    out = machine.feed(text)
    if not machine.is_hit:
        held = text[len(out) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(text.endswith(stop[: len(held) + 1]) for stop in stops if len(stop) > len(held) + 1)


def test_nothing_follows_a_hit():
    machine = StopStrings(["X"])
    assert machine.feed("aXb") == "a"
    assert machine.is_hit
    assert machine.feed("more") == ""
    assert machine.flush() == ""


def test_without_stops_text_passes_through():
    assert run([], ["a", "b"]) == ("ab", False)


def test_empty_stop_string_is_a_programming_error():
    with pytest.raises(AssertionError):
        StopStrings([""])
