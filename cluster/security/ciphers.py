"""Protection of KV blocks on the wire, and how a pair of workers agrees on it.

    aes-128-gcm   sealed blocks over a separate plain connection; the keys travel over the CURVE link
    curve         blocks over the CURVE link itself, at several times the CPU cost of aes-128-gcm
    crc32c        a checksum against accidents only, for links that the operator trusts

Prefill chooses the first of its own ciphers that decode also accepts.
"""

from collections.abc import Sequence

from ..errors import ConfigError, HandshakeRefused

AUTO = "auto"  # setting value: the worker chooses
AES_128_GCM = "aes-128-gcm"
CURVE = "curve"
CRC32C = "crc32c"
CHOICES = (AUTO, AES_128_GCM, CURVE, CRC32C)


def ciphers_of(choice: str, *, has_keys: bool, trusted_network: bool) -> tuple[str, ...]:
    """The ciphers that a worker accepts, best first. With keys, `auto` yields no ciphers in the clear.

    Raises ConfigError for a choice that contradicts the other settings.
    """
    if choice == AUTO:
        return (AES_128_GCM, CURVE) if has_keys else (CRC32C,)
    if choice == CRC32C and has_keys and not trusted_network:
        raise ConfigError(
            "--kv-cipher crc32c sends KV blocks in the clear, although --keys protects the other messages: "
            "add --trusted-network if only trusted hosts can reach that link, or leave --kv-cipher out"
        )
    if choice in (AES_128_GCM, CURVE) and not has_keys:
        raise ConfigError(
            f"--kv-cipher {choice} needs keys: make them with `baton keys init` and name them with --keys"
        )
    if choice not in CHOICES:
        raise ConfigError(f"--kv-cipher {choice!r} is none of {', '.join(CHOICES)}")
    return (choice,)


def accepted(ciphers: Sequence[str], *, has_keys: bool) -> tuple[str, ...]:
    """`ciphers`, or the default of the link when it is empty.

    Block keys travel over CURVE links only.
    """
    assert has_keys or set(ciphers) <= {CRC32C}, "without keys blocks can only have a digest"
    return tuple(ciphers) or ciphers_of(AUTO, has_keys=has_keys, trusted_network=False)


def agree_cipher(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """The first of `ours` in `theirs`; an empty `theirs` means crc32c.

    Raises HandshakeRefused, which shows both lists.
    """
    accepted = tuple(theirs) or (CRC32C,)
    for cipher in ours:
        if cipher in accepted:
            return cipher
    shown = ", ".join(repr(name[:16]) for name in accepted[:4])
    raise HandshakeRefused(
        f"no common protection of KV blocks: ours {', '.join(ours)}, theirs {shown}; "
        "give both --keys, or neither, and the same --kv-cipher"
    )
