"""The names of a prompt's pages, which are as long as they are looked at."""

import itertools

from baton.engine.kv.page_names import PageScheme
from baton.router.scheduling.prefixes import MAX_EXPECTED, SeenPrompt, expect_prompt, held_tokens
from baton.tests.unit.router.workers.test_eligibility import worker
from hypothesis import given
from hypothesis import strategies as st

TOKENS = st.lists(st.integers(0, 3), max_size=40)
SCHEME = PageScheme(root=bytes(32), page_size=4)


def names(tokens, salt="", scheme=SCHEME):
    return list(SeenPrompt(tokens, salt).names(scheme))


@given(TOKENS, TOKENS, st.sampled_from(["", "a", "b"]), st.sampled_from(["", "a", "b"]), st.integers(0, 2))
def test_pages_share_a_name_exactly_when_salt_and_tokens_are_equal(one, two, salt, other, lookahead):
    scheme = PageScheme(root=bytes(32), page_size=4, lookahead=lookahead)
    for i, (left, right) in enumerate(zip(names(one, salt, scheme), names(two, other, scheme), strict=False)):
        end = 4 * i + 4 + lookahead
        assert (left == right) == (salt == other and one[:end] == two[:end])


def test_only_whole_pages_have_names():
    assert [len(names([1] * n)) for n in (0, 3, 4, 9)] == [0, 0, 1, 2]
    ahead = PageScheme(root=bytes(32), page_size=4, lookahead=1)
    assert [len(names([1] * n, "", ahead)) for n in (4, 5, 8, 9)] == [0, 1, 1, 2]


def test_names_are_computed_once_and_as_far_as_they_are_looked_at():
    found = SeenPrompt(range(4000)).names(SCHEME)
    assert list(itertools.islice(found, 3)) == names(range(4000))[:3]
    assert len(found._known) == 3
    one, two = iter(found), iter(found)
    assert [next(each) for _ in range(6) for each in (one, two)] == [
        name for name in names(range(24)) for _ in range(2)
    ]
    assert SeenPrompt(range(9)).names(SCHEME) is not found


def test_a_prompt_of_which_nobody_has_the_first_page_costs_one_digest():
    prompt, empty = SeenPrompt(range(100_000)), worker("a", "prefill")
    assert held_tokens(empty, prompt) == 0
    assert len(prompt.names(empty.prefixes.scheme)._known) == 1


def test_a_worker_is_expected_to_hold_a_bounded_part_of_a_prompt():
    made = worker("a", "prefill")
    expect_prompt(made, SeenPrompt(range(20_000)), 1.0)
    assert made.prefixes.num_told == MAX_EXPECTED
    assert held_tokens(made, SeenPrompt(range(64))) == 48
