"""Certificates that cannot be used are refused when the router starts."""

import pytest
from baton.cluster.errors import ConfigError
from baton.router.tls import tls_context


def test_without_files_there_is_no_tls():
    assert tls_context("", "") is None


@pytest.mark.parametrize("content", [None, "", "-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n"])
def test_files_that_cannot_be_used_are_named_in_one_line(tmp_path, content):
    paths = [tmp_path / "cert.pem", tmp_path / "key.pem"]
    for path in paths:
        if content is not None:
            path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        tls_context(*map(str, paths))
    assert all(str(path) in str(caught.value) for path in paths)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [("a", ""), ("", "b")])
def test_one_file_without_the_other_is_refused(given):
    with pytest.raises(ConfigError, match="belong together"):
        tls_context(*given)
