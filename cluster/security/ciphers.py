"""How KV blocks are protected on the wire, and which way a pair of workers takes.

    aes-128-gcm   sealed, over a plain connection of their own; keys are agreed over the CURVE link
    curve         over the CURVE link itself, which costs several times the CPU of aes-128-gcm
    crc32c        checked for accidents only: for links that nobody else can reach, or that the operator trusts

Prefill chooses the first of its own ways that decode accepts too.
"""

from collections.abc import Sequence

from ..errors import ConfigError, HandshakeRefused

AUTO = "auto"  # the value of a setting that leaves the choice to the worker
AES_128_GCM = "aes-128-gcm"
CURVE = "curve"
CRC32C = "crc32c"
CHOICES = (AUTO, AES_128_GCM, CURVE, CRC32C)


def ciphers_of(choice: str, *, has_keys: bool, trusted_network: bool) -> tuple[str, ...]:
    """What a worker accepts under its settings, the best first; with keys nothing that others could read or change.

    Raises ConfigError for a choice that the other settings do not bear.
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
    """`ciphers`, or without any the best for a link. A block's key never travels over a link that is not CURVE."""
    assert has_keys or set(ciphers) <= {CRC32C}, "without keys blocks can only have a digest"
    return tuple(ciphers) or ciphers_of(AUTO, has_keys=has_keys, trusted_network=False)


def agree_cipher(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """The first of ours that they accept; who names none accepts crc32c. Raises HandshakeRefused, showing both."""
    accepted = tuple(theirs) or (CRC32C,)
    for cipher in ours:
        if cipher in accepted:
            return cipher
    shown = ", ".join(repr(name[:16]) for name in accepted[:4])
    raise HandshakeRefused(
        f"no common protection of KV blocks: ours {', '.join(ours)}, theirs {shown}; "
        "give both --keys, or neither, and the same --kv-cipher"
    )
