"""The header fields of a request, and what is refused by them."""

from baton.router.http.request_head import fault_of, fields_of


def test_a_repeated_header_keeps_both_values_and_two_hosts_are_an_error():
    fields = fields_of([(b"host", b"a"), (b"accept", b"x"), (b"accept", b"y")])
    assert fields[b"accept"] == [b"x", b"y"]
    assert fault_of(fields, "1.1", 10) is None
    assert fault_of(fields_of([(b"host", b"a"), (b"host", b"b")]), "1.1", 10).status == 400
    assert fault_of(fields_of([(b"host", b"a"), (b"content-length", b"11")]), "1.1", 10).status == 413
