"""A decoder turns any bytes of a peer into a message or a RemoteProtocolError."""

import contextlib
import zlib

import msgpack
import msgspec
import pytest
import zmq
from baton.cluster.errors import DamagedMessage, RemoteProtocolError
from baton.cluster.protocol import messages as m
from baton.cluster.protocol.codec import (
    CRC_MARK,
    Decoder,
    control_down_decoder,
    control_up_decoder,
    decoder,
    encode,
    kv_down_decoder,
    kv_up_decoder,
)
from hypothesis import given
from hypothesis import strategies as st

ROOM, ME, YOU = "a" * 32, "b" * 32, "c" * 32
PULL = m.Pull(room=ROOM, epoch=1, instance=ME, block=7)

SAMPLES = [
    (control_up_decoder(), m.Heartbeat(instance=ME, stats=m.WorkerStats(pages_free=3, counters={"x": 1.5}))),
    (control_up_decoder(), m.Tokens(instance=ME, items=[m.TokenItem(room=ROOM, epoch=0, seq=1, ids=[5, 6])])),
    (control_up_decoder(), m.FirstToken(room=ROOM, epoch=0, instance=ME, token=9)),
    (control_down_decoder(), m.Cancel(room=ROOM, epoch=0, instance=ME)),
    (
        control_down_decoder(),
        m.Prefill(
            room=ROOM, epoch=2, instance=ME, prompt_ids=[1, 2], sampling=m.Sampling(seed=3), deadline_ms=9
        ),
    ),
    (kv_up_decoder(), PULL),
    (kv_down_decoder(), m.Block(room=ROOM, epoch=1, instance=YOU, block=7, size=9, digest=2**32 - 1)),
]


@pytest.mark.parametrize(("decode", "message"), SAMPLES)
def test_a_message_survives_the_wire(decode: Decoder[object], message: m.Message) -> None:
    frame = encode(message)
    assert decode.decode(frame) == message
    assert decode.decode(memoryview(frame)) == message
    assert decode.decode(zmq.Frame(frame)) == message


@pytest.mark.parametrize(("decode", "message"), SAMPLES)
def test_an_independent_messagepack_peer_speaks_with_us(decode: Decoder[object], message: m.Message) -> None:
    seen = msgpack.unpackb(encode(message), strict_map_key=False)
    assert seen["type"] == type(message).__name__
    assert decode.decode(msgpack.packb(seen)) == message


def test_unknown_fields_are_ignored_and_unknown_types_refused() -> None:
    seen = _unpacked(PULL)
    assert kv_up_decoder().decode(msgpack.packb({**seen, "new": [1, {"a": None}]})) == PULL
    with pytest.raises(RemoteProtocolError, match="unknown message type"):
        kv_up_decoder().decode(msgpack.packb({**seen, "type": "Pull2"}))


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        kv_down_decoder().decode(encode(PULL))


@pytest.mark.parametrize(("decode", "message"), SAMPLES)
def test_no_flipped_bit_changes_a_message(decode: Decoder[object], message: m.Message) -> None:
    frame = encode(message)
    num_refused = 0
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert decode.decode(damaged) == message, "only the word that there is a checksum may be lost"
        except RemoteProtocolError as error:
            num_refused += isinstance(error, DamagedMessage)
    assert num_refused >= 8 * (len(frame) - len(CRC_MARK))


@pytest.mark.parametrize("num_fields", [1, 13, 14, 15, 16, 300])
def test_a_checked_frame_is_a_map_of_one_field_more(num_fields: int) -> None:
    fields = [(f"f{i}", int) for i in range(num_fields - 1)]
    kind = msgspec.defstruct("Wide", fields, bases=(m.Message,), kw_only=True)
    message = kind(**{name: i for i, (name, _) in enumerate(fields)})
    frame = encode(message)
    seen = msgpack.unpackb(frame)
    assert seen.pop("crc") == zlib.crc32(frame[:-4])
    assert seen == {"type": "Wide", **{name: i for i, (name, _) in enumerate(fields)}}
    assert decoder(kind, 1 << 14).decode(frame) == message


def _unpacked(message: m.Message) -> dict[str, object]:
    """A message as a peer sees it that makes another of it, whose checksum would be wrong."""
    return {key: value for key, value in msgpack.unpackb(encode(message)).items() if key != "crc"}


def _hostile_frames() -> list[tuple[str, bytes]]:
    good = _unpacked(PULL)
    deep = b"\x81\xa1x" + b"\x91" * 15000
    frames = {
        "empty": b"",
        "reserved byte": b"\xc1",
        "cut": encode(PULL)[:-1],
        "trailing garbage": encode(PULL) + b"\x00",
        "two messages": encode(PULL) * 2,
        "deep nesting": deep,
        "array claim": b"\xdd\xff\xff\xff\xff",
        "map claim": b"\xdf\xff\xff\xff\xff",
        "string claim": b"\x81\xdb\xff\xff\xff\xff",
        "extension": b"\xc7\x04\x05abcd",
        "timestamp": b"\xd6\xff\x00\x00\x00\x00",
        "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n.",
        "bad utf-8": b"\x81\xa4type\xa4\xff\xfe\xff\xfe",
        "list": msgpack.packb([good]),
        "tag is a number": msgpack.packb({**good, "type": 3}),
        "no tag": msgpack.packb({k: v for k, v in good.items() if k != "type"}),
        "missing field": msgpack.packb({k: v for k, v in good.items() if k != "block"}),
        "room too short": msgpack.packb({**good, "room": "a"}),
        "room not hex": msgpack.packb({**good, "room": "../../etc/passwd" * 2}),
        "room is bytes": msgpack.packb({**good, "room": b"a" * 32}),
        "null": msgpack.packb({**good, "block": None}),
        "float": msgpack.packb({**good, "block": 1.5}),
        "nan": msgpack.packb({**good, "block": float("nan")}),
    }
    numbers = {
        f"block {n}": msgpack.packb({**good, "block": n})
        for n in (-1, -(2**63), 2**48 + 1, 2**63 - 1, 2**64 - 1)
    }
    return [*frames.items(), *numbers.items()]


@pytest.mark.parametrize(("name", "frame"), _hostile_frames())
def test_a_hostile_frame_is_refused_in_one_line_that_repeats_none_of_it(name: str, frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as refusal:
        kv_up_decoder().decode(frame)
    text = str(refusal.value)
    assert text.isprintable()
    assert len(text) < 300
    assert "passwd" not in text
    assert "system" not in text


def test_a_frame_above_the_limit_is_refused_unread() -> None:
    small: Decoder[m.KVUp] = decoder(m.KVUp, 16)
    with pytest.raises(RemoteProtocolError, match="at most 16"):
        small.decode(encode(PULL))


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_the_codec_error(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        control_up_decoder().decode(frame)


@given(st.data())
def test_a_changed_message_decodes_or_is_refused(data: st.DataObject) -> None:
    decode, message = data.draw(st.sampled_from(SAMPLES))
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        decode.decode(bytes(frame))


def test_numbers_of_a_wrong_type_or_range_are_refused() -> None:
    prefill = msgspec.to_builtins(SAMPLES[4][1])
    for value in (float("nan"), float("inf"), -1.0, "1", True):
        broken = {**prefill, "sampling": {**prefill["sampling"], "temperature": value}}
        with pytest.raises(RemoteProtocolError):
            control_down_decoder().decode(msgpack.packb(broken))
