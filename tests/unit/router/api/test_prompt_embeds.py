"""`prompt_embeds`: what is read, and what each wrong value is told."""

import base64
import json
import pickle
import struct

import pytest
import torch
from baton.cluster.protocol.codec import CONTROL_MAX_FRAME, encode
from baton.cluster.protocol.messages import Prefill, Sampling
from baton.router.api.body_checks import parse_body, prompts_of
from baton.router.api.body_types import CompletionBody
from baton.router.api.prompt_embeds import MAX_HEADER, check_size, read_embeds
from baton.router.errors import ApiError
from baton.tests.embeds import embeddings_of, embeds_text
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

ROWS = [[1.0, -2.5, 3.0], [4.0, 5.0, 6.0]]
ONES = torch.ones(2, 3)


def text_of(header, data=b"", *, size=None):
    """Base64 of a file with this header, an object or bytes, that claims to have `size` bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return base64.b64encode(struct.pack("<Q", len(raw) if size is None else size) + raw + data).decode()


def described(**more):
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | more


def one(**more):
    return text_of({"a": described(**more)}, bytes(24))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_each_type_are_kept_as_they_were_sent(dtype):
    found = embeddings_of(ROWS, dtype)
    assert found.rows.count == 2
    assert torch.frombuffer(bytearray(found.data), dtype=dtype).view(2, 3).tolist() == ROWS


@pytest.mark.parametrize("size", [128, 640])
def test_a_header_whose_size_begins_like_a_pickle_is_read(size):
    raw = json.dumps({"a": described()}).encode().ljust(size)
    assert read_embeds(text_of(raw, bytes(24)), 3).rows.count == 2


def test_equal_digests_need_equal_rows_type_and_width():
    ones = torch.ones(4, 6)
    alike = [ones, ones.view(8, 3), ones.half(), ones[:3], ones * 2, -ones]
    assert len({embeddings_of(rows, rows.dtype).rows.digest for rows in alike}) == len(alike)
    named = read_embeds(embeds_text(ones, name="another name"), 6)
    assert named.rows == embeddings_of(ones).rows


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("!" * 40, "is not base64"),
        ("é" * 40, "is not base64"),
        (embeds_text(ONES)[:-7], "is not base64"),
        ("", "not a safetensors file"),
        (base64.b64encode(b"12345678").decode(), "not a safetensors file"),
        (base64.b64encode(b"PK\x03\x04" + bytes(90)).decode(), "pickled tensor, which is never read"),
        (base64.b64encode(pickle.dumps([1.0])).decode(), "pickled tensor, which is never read"),
        (text_of({}, bytes(24)), "has 0 tensors"),
        (text_of({"__metadata__": {"a": "b"}}), "has 0 tensors"),
        (base64.b64encode(save({"a": ONES, "b": ONES + 1})).decode(), "has 2 tensors"),
        (text_of(described(), bytes(24)), "a header that is not one of safetensors"),
        (text_of([], bytes(24)), "a header that is not one of safetensors"),
        (text_of(b"\xff\xfe", bytes(24)), "a header that is not one of safetensors"),
        (text_of(b"[" * 9000), "a header that is not one of safetensors"),
        (text_of({"a": described()}, bytes(24), size=2**63), "with a header of at most"),
        (text_of(b"{" + b" " * MAX_HEADER + b"}", bytes(24)), "with a header of at most"),
        (one(more=1), "a header that is not one of safetensors"),
        (one(shape=[2, 3.5]), "a header that is not one of safetensors"),
        (one(shape=[2**70, 3]), "which its header does not describe"),
        (one(dtype="F64"), "has type 'F64': send F32, F16, BF16"),
        (one(dtype="\x1b[31m"), "has type"),
        (one(shape=[6]), r"has shape [6]: this model takes [tokens, 3]"),
        (one(shape=[3, 2]), r"has shape [3, 2]"),
        (one(shape=[0, 3]), r"has shape [0, 3]"),
        (one(shape=[-2, 3]), r"has shape [-2, 3]"),
        (one(shape=[2, 1, 3]), r"has shape [2, 1, 3]"),
        (one(shape=[2**40, 3]), "which its header does not describe"),
        (one(data_offsets=[0, 23]), "which its header does not describe"),
        (one(data_offsets=[4, 24]), "which its header does not describe"),
        (one(data_offsets=[-1, 24]), "which its header does not describe"),
        (text_of({"a": described()}, bytes(28)), "which its header does not describe"),
        (text_of({"a": described()}, bytes(20)), "which its header does not describe"),
    ],
)
def test_every_wrong_value_is_one_line_that_names_it(text, told):
    with pytest.raises(ApiError) as caught:
        read_embeds(text, 3)
    error = caught.value
    assert (error.status, error.body.param, told in error.body.message) == (400, "prompt_embeds", True), error
    assert error.body.message.isprintable()
    assert len(error.body.message) < 250


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers_are_refused_with_their_place(value, dtype):
    rows = torch.ones(5, 3)
    rows[4, 1] = value
    with pytest.raises(ApiError, match=r"is not finite at \[4, 1\]"):
        embeddings_of(rows, dtype)


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_raise_anything_but_the_error(data, has_size):
    file = struct.pack("<Q", min(len(data), 80)) + data if has_size else data
    with pytest.raises(ApiError):
        read_embeds(base64.b64encode(file).decode(), 3)


def test_a_size_is_checked_for_all_choices_before_anything_is_decoded():
    texts = ["!" * 200_000] * 2
    check_size(texts, 1, 300_000)
    with pytest.raises(ApiError, match=r"for 2 choices, at most 300000 are allowed.*--prompt-embeds-mb"):
        check_size(texts, 2, 300_000)


@pytest.mark.parametrize("width", [3, 16384])
def test_parts_are_whole_rows_in_order_that_fit_a_frame(width):
    given_rows = embeddings_of(torch.randn(2_500_000 // width, width))
    common = {"room": "a" * 32, "epoch": 7, "instance": "b" * 32}
    parts = list(
        given_rows.parts_before(Prefill(prompt_ids=[0], sampling=Sampling(), deadline_ms=0, **common))
    )
    assert len(parts) > 5
    assert b"".join(part.data for part in parts) == given_rows.data
    assert all(part.start * width * 4 == i * len(parts[0].data) for i, part in enumerate(parts))
    assert all(len(encode(part)) <= CONTROL_MAX_FRAME for part in parts)
    assert {(part.room, part.epoch, part.instance) for part in parts} == {("a" * 32, 7, "b" * 32)}


def body(**more):
    return parse_body(json.dumps({"model": "m"} | more).encode(), CompletionBody)


def test_a_prompt_may_be_empty_where_embeddings_are_given():
    for prompt in ({}, {"prompt": ""}, {"prompt": None}, {"prompt": []}):
        asked = body(prompt_embeds="YQ==", **prompt)
        assert (prompts_of(asked), asked.embeds) == ([], ["YQ=="])
    asked = body(prompt_embeds=["YQ==", "Yg=="], prompt="hi")
    assert (prompts_of(asked), asked.embeds) == (["hi"], ["YQ==", "Yg=="])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt_embeds": None}, "prompt"),
        ({"prompt_embeds": ""}, "prompt_embeds"),
        ({"prompt_embeds": []}, "prompt_embeds"),
        ({"prompt_embeds": ["YQ==", ""]}, "prompt_embeds"),
        ({"prompt_embeds": 5}, "prompt_embeds"),
        ({"prompt_embeds": [[1.0]]}, "prompt_embeds"),
        ({"prompt_embeds": "YQ==", "echo": True}, "echo"),
        ({"prompt_embeds": ["YQ=="] * 65, "n": 2}, "n"),
        ({"prompt_embeds": ["YQ=="] * 64, "prompt": ["hi"], "n": 2}, "n"),
    ],
)
def test_fields_that_contradict_embeddings_are_named(fields, param):
    with pytest.raises(ApiError) as caught:
        prompts_of(body(**fields))
    assert (caught.value.status, caught.value.body.param) == (400, param)
