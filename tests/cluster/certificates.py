"""Certificates for tests: an authority and what it signs. Elliptic curve keys take a millisecond to make."""

import ipaddress
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


def pem(thing, passphrase=b""):
    """Of a certificate or of a key."""
    if isinstance(thing, x509.Certificate):
        return thing.public_bytes(serialization.Encoding.PEM)
    locked = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return thing.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)


class Authority:
    """Signs for `localhost` and 127.0.0.1."""

    def __init__(self, name="authority"):
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._sign(self.name, self.key, 30 * DAY, is_authority=True)

    def issue(self, name="server", ends_in=30 * DAY):
        """(certificate, key)"""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        return self._sign(subject, key, ends_in, is_authority=False), key

    def write(self, chain, key, *names, **issued):
        """Puts a new pair into two files."""
        certificate, secret = self.issue(*names, **issued)
        chain.write_bytes(pem(certificate))
        key.write_bytes(pem(secret))

    def _sign(self, subject, key, ends_in, *, is_authority):
        now = datetime.now(timezone.utc)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        made = x509.CertificateBuilder(
            issuer_name=self.name, subject_name=subject, public_key=key.public_key(),
            serial_number=x509.random_serial_number(), not_valid_before=now - 60 * DAY,
            not_valid_after=now + ends_in,
        )  # fmt: skip
        made = made.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        if not is_authority:
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return made.sign(self.key, hashes.SHA256())
