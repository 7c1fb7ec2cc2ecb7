"""The certificate of the HTTP endpoint: an unusable one is refused in one line, a replaced one is adopted."""

import os
import ssl

import pytest
from baton.cluster.errors import ConfigError
from baton.cluster.security.tls_faults import tls_fault
from baton.router.http.tls import LOOK_AGAIN_S, Certificate, certificate_of
from baton.tests.cluster.certificates import DAY, Authority, pem
from baton.tests.meta.kubernetes.secret_volume import SecretVolume
from cryptography.hazmat.primitives.serialization import Encoding

ISSUER = Authority()
ONE, OTHER = ISSUER.issue("one"), ISSUER.issue("other")
GOOD = pem(ONE[0]), pem(ONE[1])
MISTAKES = {
    "no files": (None, None, "--tls-cert .*chain.* cannot be read"),
    "no key file": (GOOD[0], None, "--tls-key .*key.* cannot be read"),
    "empty": (b"", b"", "holds no certificate in PEM"),
    "no certificate": (
        b"-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n",
        GOOD[1],
        "cannot be used",
    ),
    "not PEM": (ONE[0].public_bytes(Encoding.DER), GOOD[1], "holds no certificate in PEM"),
    "turned round": (GOOD[1], GOOD[0], "holds no certificate in PEM"),
    "two certificates": (GOOD[0], GOOD[0], "holds no private key in PEM"),
    "another's key": (GOOD[0], pem(OTHER[1]), "is not the key of the first certificate"),
    "its authority first": (
        pem(ISSUER.certificate) + GOOD[0],
        GOOD[1],
        "the server's own certificate stands first",
    ),
    "a passphrase": (GOOD[0], pem(ONE[1], b"secret"), "openssl pkey -in .*key"),
}


@pytest.fixture
def files(tmp_path):
    return tmp_path / "chain.pem", tmp_path / "key.pem"


@pytest.fixture
def loaded(files):
    """A certificate with its own clock; `loaded.later()` is its context after the files were read again."""
    ISSUER.write(*files, "first")
    return Loaded(files)


class Loaded:
    def __init__(self, files):
        self.files, self.now = files, 0.0
        self.certificate = Certificate(*map(str, files), monotonic=lambda: self.now)
        self.num_writes = 0

    def later(self):
        self.now += LOOK_AGAIN_S
        return self.certificate.context

    def write(self, file, content):
        """Its time of change is one that the file never had, whatever the file system rounds."""
        self.num_writes += 1
        file.write_bytes(content)
        os.utime(file, (self.num_writes, self.num_writes))


def test_without_files_there_is_no_tls():
    assert certificate_of("", "") is None


@pytest.mark.parametrize("given", [("a", ""), ("", "b")])
def test_one_file_without_the_other_is_refused(given):
    with pytest.raises(ConfigError, match="belong together"):
        certificate_of(*given)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_file(files, name):
    *contents, said = MISTAKES[name]
    for path, content in zip(files, contents, strict=True):
        if content is not None:
            path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        certificate_of(*map(str, files))
    assert "\n" not in str(caught.value)
    assert "_ssl.c" not in str(caught.value)


def test_replaced_files_are_loaded_once_key_and_certificate_match(loaded, caplog):
    first = loaded.certificate.context
    certificate, key = ISSUER.issue("second")
    loaded.write(loaded.files[0], pem(certificate))
    assert loaded.certificate.context is first, "files are not looked at all the time"
    assert loaded.later() is first
    assert "stays as it was" in caplog.text
    loaded.write(loaded.files[1], pem(key))
    second = loaded.later()
    assert second is not first
    assert loaded.later() is second
    loaded.files[1].unlink()
    assert loaded.later() is second
    assert caplog.text.count("stays as it was") == 2


def test_a_renewed_mounted_secret_is_loaded_at_once(tmp_path, caplog):
    volume = SecretVolume(tmp_path / "tls")

    def renew(name):
        certificate, key = ISSUER.issue(name)
        volume.write({"tls.crt": pem(certificate), "tls.key": pem(key)})

    renew("first")
    loaded = Loaded((volume.path / "tls.crt", volume.path / "tls.key"))
    contexts = [loaded.later()]
    for name in ("second", "third"):
        renew(name)
        contexts.append(loaded.later())
    assert len({id(context) for context in contexts}) == 3
    assert loaded.later() is contexts[-1]
    assert "stays as it was" not in caplog.text, "certificate and key change in one step"


@pytest.mark.parametrize(("ends_in", "said"), [(-DAY, "has ended"), (2 * DAY, "ends soon"), (20 * DAY, "")])
def test_an_expired_certificate_is_reported_and_the_start_goes_on(files, caplog, ends_in, said):
    ISSUER.write(*files, ends_in=ends_in)
    Certificate(*map(str, files))
    assert said in caplog.text
    assert bool(caplog.records) == bool(said)


def refusal(code, message):
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, message
    return error


def test_a_tls_error_of_a_client_names_the_remedy(tmp_path):
    unknown = refusal(20, "unable to get local issuer certificate")
    assert "SSL_CERT_FILE" in tls_fault("https://x", unknown, {})
    assert "which cannot be read" in tls_fault(
        "https://x", unknown, {"SSL_CERT_FILE": str(tmp_path / "none")}
    )
    assert "which has not signed it" in tls_fault("https://x", unknown, {"SSL_CERT_FILE": str(tmp_path)})
    ended = tls_fault("https://x", refusal(10, "certificate has expired"), {})
    assert "has expired" in ended
    assert "SSL_CERT_FILE" not in ended
    assert "the name that it was made for" in tls_fault(
        "https://x", refusal(62, "Hostname mismatch, not for 'x'."), {}
    )
    plain = ssl.SSLError(1, "wrong version number")
    plain.reason = "WRONG_VERSION_NUMBER"
    assert tls_fault("https://x", plain, {}) == "https://x does not speak TLS; write http://"
    assert tls_fault("https://x", ConnectionResetError(), {}) == ""
