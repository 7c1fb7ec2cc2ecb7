"""Which ids of clients are taken."""

import pytest
from baton.router.api.request_headers import LONGEST_REQUEST_ID
from baton.router.http.request_ids import given_id, minted_id


@pytest.mark.parametrize(
    "value", [b"a", b"0af7651916cd43dd8448eb211c80319c", b"a/b:c+d=.~", b"x" * LONGEST_REQUEST_ID]
)
def test_visible_ascii_is_taken(value):
    assert given_id({b"x-request-id": [value]}) == value.decode()


@pytest.mark.parametrize(
    "values",
    [[b""], [b"a b"], [b"a\x00b"], [b"a\tb"], [b"\xc3\xa4"], [b"x" * (LONGEST_REQUEST_ID + 1)], [b"a", b"b"]],
)
def test_what_is_too_long_or_not_visible_or_twice_is_no_id(values):
    assert given_id({b"x-request-id": values}) == ""


def test_minted_ids_differ_and_could_be_given():
    one, other = minted_id(), minted_id()
    assert one != other
    assert given_id({b"x-request-id": [one.encode()]}) == one
