"""Plans of kernel variants on disk: unreadable ones are replaced, and a changed source has another key."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.warmup.plan_file import (
    KEPT,
    driver_version,
    keep_verdict,
    kept_launches,
    plan_key,
    were_tested,
)
from baton.kernels.launch_plan import decode_launches, encode_launches
from baton.kernels.rms_norm import _rms_norm_kernel
from baton.kernels.triton_jit import (
    Launch,
    PointerArgument,
    is_descriptor,
    planned_launch,
    tensor_descriptor,
    tile_descriptor,
)

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


def launch(width: object = 64) -> Launch:
    x = PointerArgument(torch.bfloat16, 0)
    rest = [64 if param.is_constexpr else width for param in _rms_norm_kernel.params[1:]]
    return planned_launch(_rms_norm_kernel, (3,), (x, *rest), {"num_warps": 4})


@pytest.mark.parametrize("describe", [tensor_descriptor, tile_descriptor])
def test_a_descriptor_of_a_tensor_comes_back(describe: Callable[..., object]) -> None:
    descriptor = describe(torch.zeros(64, 128, dtype=torch.bfloat16), (16, 128))
    planned = launch(descriptor)
    (kept,) = decode_launches(encode_launches([planned]))
    assert kept.variant == planned.variant
    found = next(value for value in kept.arguments if is_descriptor(value))
    assert (found.shape, found.strides, found.block_shape) == ([64, 128], [128, 1], [16, 128])
    assert type(found) is type(descriptor)


def edited(**changes: object) -> str:
    document = json.loads(encode_launches([launch()]))
    document["launches"][0] |= changes
    return json.dumps(document)


BROKEN = [
    "",
    "[]",
    '{"format": 0, "launches": []}',
    edited(kernel=["rms_norm", "gone_kernel"]),
    edited(kernel=["gone", "_rms_norm_kernel"]),
    edited(kernel=["os.path", "join"]),
    edited(variant=["_rms_norm_kernel", "another"]),
    edited(arguments=[["int", 0]]),
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_plan_that_cannot_be_read_is_planned_again_and_replaced(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plan-k.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert kept_launches(tmp_path, "k", lambda: [launch()]) == [launch()]
    assert "planned again" in caplog.text
    assert decode_launches((tmp_path / "plan-k.json").read_text()) == [launch()]


def test_arguments_without_a_text_leave_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = [launch(object())]
    with caplog.at_level(logging.WARNING):
        assert kept_launches(tmp_path, "k", lambda: odd) == odd
    assert "not kept" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_tells_what_it_found_and_its_time_and_a_kept_plan_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter((3.0, 10.5))
    with caplog.at_level(logging.INFO):
        kept_launches(tmp_path, "k", lambda: [launch(), launch()], lambda: next(times))
        assert "a dry run found 2 kernel variants in 7.5 s" in caplog.text
        caplog.clear()
        kept_launches(tmp_path, "k", lambda: [launch()], lambda: next(times))
    assert caplog.text == ""


def test_a_folder_that_is_missing_is_no_error(tmp_path: Path) -> None:
    assert kept_launches(None, "k", lambda: [launch()]) == [launch()]


def test_only_the_plans_that_were_used_last_are_kept(tmp_path: Path) -> None:
    keys = [f"k{i}" for i in range(KEPT)]
    for age, key in enumerate(reversed(keys)):
        kept_launches(tmp_path, key, lambda: [launch()])
        os.utime(tmp_path / f"plan-{key}.json", (1e9 + age, 1e9 + age))
    (tmp_path / "plan-k.4711").touch()
    os.utime(tmp_path / "plan-k.4711", (1e9, 1e9))  # of a process that was killed
    (tmp_path / "kernel.json").touch()
    kept_launches(tmp_path, keys[-1], list)  # the oldest one is used
    kept_launches(tmp_path, "new", lambda: [launch()])
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"kernel.json", "plan-new.json", *(f"plan-{key}.json" for key in [*keys[:-2], keys[-1]])}


def test_a_self_test_is_known_by_its_key_until_one_fails(tmp_path: Path) -> None:
    keep_verdict(tmp_path / "new", "k", has_passed=True)
    assert [were_tested(tmp_path / "new", key) for key in ("k", "other")] == [True, False]
    keep_verdict(tmp_path / "new", "k", has_passed=False)
    keep_verdict(tmp_path / "new", "k", has_passed=False)
    assert not were_tested(tmp_path / "new", "k")


def test_only_the_verdicts_that_were_used_last_are_kept(tmp_path: Path) -> None:
    keys = [f"k{i}" for i in range(KEPT)]
    for age, key in enumerate(keys):
        keep_verdict(tmp_path, key, has_passed=True)
        os.utime(tmp_path / f"graphs-tested-{key}", (1e9 + age, 1e9 + age))
    assert were_tested(tmp_path, "k0"), "the oldest one is used"
    keep_verdict(tmp_path, "new", has_passed=True)
    assert [were_tested(tmp_path, key) for key in ("k0", "k1", "k2", "new")] == [True, False, True, True]


def test_a_self_test_without_a_folder_is_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file" / "below"):
        keep_verdict(folder, "k", has_passed=True)
        assert not were_tested(folder, "k")
    assert "is not kept" in caplog.text


def test_a_key_follows_each_part_and_the_source(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "a.py"
    source.write_text("a = 1")
    key = plan_key(["x", 1], tmp_path)
    assert key == plan_key(["x", 1], tmp_path)
    assert len({key, plan_key(["x", 2], tmp_path), plan_key(["x"], tmp_path)}) == 3
    source.write_text("a = 2")
    assert plan_key(["x", 1], tmp_path) != key


def test_graphs_are_tested_again_with_another_driver(tmp_path: Path) -> None:
    version = tmp_path / "version"
    keys = [plan_key([driver_version(version)], tmp_path)]
    for text in ("NVRM version: 570.124.06", "NVRM version: 570.133.20"):
        version.write_text(text)
        keys.append(plan_key([driver_version(version)], tmp_path))
    assert len(set(keys)) == 3
