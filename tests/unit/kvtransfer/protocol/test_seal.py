"""Sealed blocks: only the right bytes at the right place under the right key open; no nonce is used twice."""

import secrets
from dataclasses import replace
from unittest.mock import patch

import pytest
from baton.cluster.errors import (
    ConfigError,
    DigestMismatch,
    HandshakeRefused,
    LocalProtocolError,
    RemoteProtocolError,
)
from baton.cluster.protocol.messages import Announce, KVWelcome, Layout
from baton.cluster.security import tickets as module
from baton.cluster.security.ciphers import AES_128_GCM, CRC32C, CURVE, agree_cipher, ciphers_of
from baton.cluster.security.tickets import MAX_PER_USER, TICKET_S, Tickets
from baton.kvtransfer.protocol import seal
from baton.kvtransfer.protocol.seal import KEY_BYTES, TAG_BYTES, BlockName, Opener, Sealer
from hypothesis import given
from hypothesis import strategies as st

KEY = bytes(range(16))
PLAIN = bytes(range(40, 104))
NAME = BlockName(room="ab" * 16, epoch=3, block=7, size=len(PLAIN), fingerprint="f")


def sealed(sealer, name=NAME, plain=PLAIN):
    out = bytearray(len(plain) + TAG_BYTES)
    return sealer.seal(name, memoryview(plain), memoryview(out)), bytes(out)


def opened(key, name, attempt, data):
    out = bytearray(max(0, len(data) - TAG_BYTES))
    Opener(key).open(name, attempt, memoryview(data), memoryview(out))
    return bytes(out)


def test_a_sealed_block_opens():
    attempt, data = sealed(Sealer(KEY))
    assert attempt == 0
    assert PLAIN not in data
    assert opened(KEY, NAME, attempt, data) == PLAIN


OTHER_PLACES = {
    "room": replace(NAME, room="cd" * 16),
    "epoch": replace(NAME, epoch=4),
    "block": replace(NAME, block=8),
    "size": replace(NAME, size=len(PLAIN) - 1),
    "fingerprint": replace(NAME, fingerprint="g"),
}


@pytest.mark.parametrize("place", OTHER_PLACES)
def test_a_block_does_not_open_in_another_place(place):
    attempt, data = sealed(Sealer(KEY))
    with pytest.raises(DigestMismatch):
        opened(KEY, OTHER_PLACES[place], attempt, data)


def test_a_block_opens_under_its_own_key_and_attempt_only():
    sealer = Sealer(KEY)
    (_, first), (attempt, second) = sealed(sealer), sealed(sealer)
    assert attempt == 1
    assert first != second, "the same bytes are never sealed alike"
    assert opened(KEY, NAME, 1, second) == PLAIN
    for key, number, data in ((KEY, 1, first), (KEY, 0, second), (secrets.token_bytes(16), 1, second)):
        with pytest.raises(DigestMismatch):
            opened(key, NAME, number, data)


def test_every_flipped_bit_and_every_truncation_is_seen():
    attempt, data = sealed(Sealer(KEY))
    for i in range(8 * len(data)):
        wrong = bytearray(data)
        wrong[i // 8] ^= 1 << i % 8
        with pytest.raises(DigestMismatch):
            opened(KEY, NAME, attempt, bytes(wrong))
    for length in range(len(data)):
        with pytest.raises(DigestMismatch):
            opened(KEY, NAME, attempt, data[:length])
    with pytest.raises(DigestMismatch):
        Opener(KEY).open(NAME, attempt, memoryview(data), memoryview(bytearray(len(PLAIN) + 1)))


class Recorder:
    """Stands for AES-GCM and notes the nonces."""

    def __init__(self):
        self.nonces = []

    def encrypt_into(self, nonce, plain, associated_data, out):
        self.nonces.append(nonce)


@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**48)), max_size=60))
def test_no_nonce_is_used_twice_in_any_order_of_requests(blocks):
    recorder = Recorder()
    with patch.object(seal, "AESGCM", lambda key: recorder):
        sealer = Sealer(KEY)
    attempts = [
        sealer.seal(replace(NAME, block=block), memoryview(b""), memoryview(bytearray(16)))
        for block in blocks
    ]
    assert len(set(recorder.nonces)) == len(blocks)
    assert {len(nonce) for nonce in recorder.nonces} <= {12}
    assert len(set(zip(blocks, attempts, strict=True))) == len(blocks)


def test_a_block_that_used_up_its_nonces_is_not_sealed(monkeypatch):
    monkeypatch.setattr(seal, "MAX_ATTEMPTS", 1)
    sealer = Sealer(KEY)
    assert [sealed(sealer)[0] for _ in range(2)] == [0, 1]
    with pytest.raises(LocalProtocolError, match="sealed 2 times"):
        sealed(sealer)


@given(
    st.lists(
        st.builds(
            BlockName,
            room=st.sampled_from(["ab" * 16, "ba" * 16]),
            epoch=st.integers(0, 2**48),
            block=st.integers(0, 2**48),
            size=st.integers(0, 2**48),
            fingerprint=st.text(max_size=4),
        ),
        min_size=2, max_size=2, unique=True,
    )
)  # fmt: skip
def test_two_places_never_have_the_same_associated_data(names):
    assert names[0].associated_data != names[1].associated_data


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_a_key_has_sixteen_bytes(size):
    with pytest.raises(RemoteProtocolError, match="16 bytes"):
        Opener(bytes(size))


def test_keys_and_tickets_appear_in_no_repr_or_message():
    key = secrets.token_bytes(KEY_BYTES)
    layout = Layout(fingerprint="f", dtype="float32", page_size=4, num_layers=1, num_kv_heads=1, head_dim=2)
    texts = [
        repr(Sealer(key)),
        repr(Opener(key)),
        repr(Announce(room="a" * 32, epoch=0, instance="b" * 32, tokens_ready=1, key=key)),
        repr(KVWelcome(instance="b" * 32, layout=layout, bulk_ticket=key.hex())),
    ]
    assert not any(repr(key)[2:-1] in text or key.hex() in text for text in texts)


# --- which way a pair takes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "has_keys", "trusted", "expected"),
    [
        ("auto", True, False, (AES_128_GCM, CURVE)),
        ("auto", True, True, (AES_128_GCM, CURVE)),
        ("auto", False, False, (CRC32C,)),
        ("aes-128-gcm", True, False, (AES_128_GCM,)),
        ("curve", True, False, (CURVE,)),
        ("crc32c", True, True, (CRC32C,)),
        ("crc32c", False, False, (CRC32C,)),
    ],
)
def test_with_keys_blocks_are_sealed_unless_the_network_is_trusted(choice, has_keys, trusted, expected):
    assert ciphers_of(choice, has_keys=has_keys, trusted_network=trusted) == expected


@pytest.mark.parametrize(
    ("choice", "has_keys", "words"),
    [
        ("crc32c", True, "--trusted-network"),
        ("aes-128-gcm", False, "--keys"),
        ("curve", False, "--keys"),
        ("des", True, "des"),
    ],
)
def test_a_protection_that_contradicts_other_settings_is_refused(choice, has_keys, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        ciphers_of(choice, has_keys=has_keys, trusted_network=False)
    assert choice in str(refusal.value)


def test_a_pair_takes_prefills_first_way_that_decode_accepts_and_no_other():
    assert agree_cipher((AES_128_GCM, CURVE), (CURVE, AES_128_GCM)) == AES_128_GCM
    assert agree_cipher((AES_128_GCM, CURVE), (CURVE,)) == CURVE
    assert agree_cipher((CRC32C,), ()) == CRC32C
    for ours, theirs in (
        ((AES_128_GCM,), ()),
        ((AES_128_GCM, CURVE), (CRC32C,)),
        ((CRC32C,), (AES_128_GCM,)),
    ):
        with pytest.raises(HandshakeRefused) as refusal:
            agree_cipher(ours, theirs)
        assert ours[0] in str(refusal.value)
        assert (theirs or (CRC32C,))[0] in str(refusal.value)


# --- tickets ------------------------------------------------------------------------------------------------


def test_a_ticket_works_once_and_in_its_time():
    now = [0.0]
    tickets = Tickets(lambda: now[0])
    first, second = tickets.issue("a"), tickets.issue("b")
    assert (tickets.redeem(second), tickets.redeem(second)) == ("b", "")
    assert tickets.redeem("") == tickets.redeem("0" * 32) == ""
    now[0] = TICKET_S
    assert tickets.redeem(first) == ""


def test_tickets_are_bounded_and_a_user_displaces_its_own(monkeypatch):
    tickets = Tickets()
    other = tickets.issue("b")
    mine = [tickets.issue("a") for _ in range(20)]
    assert [tickets.redeem(ticket) for ticket in mine] == [""] * (20 - MAX_PER_USER) + ["a"] * MAX_PER_USER
    assert tickets.redeem(other) == "b"
    monkeypatch.setattr(module, "MAX_TICKETS", 10)
    many = [tickets.issue(str(i)) for i in range(20)]
    assert [tickets.redeem(ticket) != "" for ticket in many] == [False] * 10 + [True] * 10
