"""What simulated worlds and fault rows draw at random: identities and damage."""

from random import Random


def hex_id(rng: Random) -> str:
    """32 hex digits, as instances and rooms have."""
    return f"{rng.getrandbits(128):032x}"


def flipped(data: bytes, rng: Random) -> bytes:
    """`data`, which is not empty, with one bit changed."""
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)
