"""The router's estimate of the workers' prefix caches."""

from baton.router.scheduling.prefixes import MAX_HASHED, PrefixIndex, SeenPrompt, page_names
from hypothesis import given
from hypothesis import strategies as st

TOKENS = st.lists(st.integers(0, 3), max_size=40)


@given(TOKENS, TOKENS, st.sampled_from(["", "a", "b"]), st.sampled_from(["", "a", "b"]))
def test_prefixes_share_a_name_exactly_when_salt_and_tokens_are_equal(one, two, salt, other):
    for i, (left, right) in enumerate(zip(page_names(one, 4, salt), page_names(two, 4, other), strict=False)):
        assert (left == right) == (salt == other and one[: 4 * i + 4] == two[: 4 * i + 4])


def test_only_whole_pages_have_names_and_their_number_is_bounded():
    assert [len(page_names([1] * n, 16, "")) for n in (0, 15, 16, 33)] == [0, 0, 1, 2]
    assert len(page_names([1] * 100_000, 1, "")) == MAX_HASHED


def test_a_workers_known_prefix_ends_at_the_first_missing_page():
    index, names = PrefixIndex(), SeenPrompt(range(40)).pages(4)
    index.add("p", names[:6])
    index.add("q", names[:2])
    assert [index.num_held(who, names) for who in "pqr"] == [6, 2, 0]
    index.learn("p", names, 3)
    assert index.num_held("p", names) == 3
    index.learn("q", names, 10)
    assert index.num_held("q", names) == 10


@given(st.lists(st.tuples(st.sampled_from("pqr"), TOKENS), max_size=30))
def test_the_index_is_bounded_and_forgets_ends_before_beginnings(adds):
    index = PrefixIndex(max_pages=5)
    for who, tokens in adds:
        names = page_names(tokens, 4, "")
        index.add(who, names)
        assert len(index) <= 5
        assert index.num_held(who, names) == min(5, len(names))


def test_a_page_remembers_its_last_holders_only():
    index, names = PrefixIndex(), page_names(range(4), 4, "")
    for i in range(100):
        index.add(str(i), names)
    assert [who for who in map(str, range(100)) if index.num_held(who, names)] == [
        str(i) for i in range(92, 100)
    ]
