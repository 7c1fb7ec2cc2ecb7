"""`baton bench transfer`: every way is measured between two processes, and nothing is left."""

import argparse
import json
import os
import subprocess
import sys

import pytest
from baton.bench.command import main
from baton.bench.transfer.bench import Found, as_table, chosen_block_bytes, summary
from baton.cluster.net.transport_names import has_nixl
from baton.tests.cluster.serving import wait_until


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton", "bench", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")


def test_every_way_is_measured_and_nothing_is_left():
    before = set(os.listdir("/dev/shm"))
    done = run("transfer", "--mib", "8", "--rounds", "1", "--windows", "4", "--block-kib", "2048", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["block_kib"] == 2048
    names = [row["way"] for row in document["ways"]]
    assert names[:3] == ["memcpy", "tcp socket", "unix socket"]
    guards = ("plain", "crc32c", "aes-128-gcm", "curve")
    wanted = {f"zmq {link}, {guard}, window 4" for link in ("tcp", "ipc") for guard in guards}
    wanted |= {"nixl, crc32c, window 4"} if has_nixl() else set()
    assert set(names[3:]) == wanted | {f"shm, {guard}, window 4" for guard in ("plain", "crc32c")}
    assert all(row["median"] > 0 and len(row["rates"]) == 1 for row in document["ways"])
    wait_until(
        lambda: set(os.listdir("/dev/shm")) <= before, 20, "nothing is left"
    )  # others have names there for a moment


@pytest.mark.parametrize(
    ("source", "target", "given", "kib"),
    [
        ("cpu", "cpu", None, 1024),
        ("cuda:0", "cpu", None, 1024),
        ("cuda:0", "cuda:1", None, 4096),
        ("cuda:0", "cuda:1", 512, 512),
    ],
)
def test_blocks_between_gpus_are_those_of_workers(source, target, given, kib):
    options = argparse.Namespace(source=source, target=target, block_kib=given)
    assert chosen_block_bytes(options) == kib << 10


def test_ratios_are_those_within_a_round():
    found = {
        "memcpy": Found([10.0, 20.0, 40.0], [1.0] * 3),
        "tcp socket": Found([2.0, 2.0, 2.0], [1.0] * 3),
        "unix socket": Found([4.0, 4.0, 4.0], [1.0] * 3),
        "zmq ipc, plain, window 4": Found([1.0, 2.0, 1.0], [0.5, 0.25, 0.125]),
    }
    row = summary(found)[-1]
    assert (row["best"], row["median"], row["of_memcpy"], row["of_socket"]) == (2.0, 1.0, 0.1, 0.25)
    assert row["cpu_s_per_gb"] == 0.25
    assert "| zmq ipc, plain, window 4 | 2.00 | 1.00 | 0.10 | 0.25 | 0.25 |" in as_table(
        summary(found), "here"
    )


def test_an_unknown_benchmark_and_a_wrong_number_are_refused_in_one_line(capsys):
    for flags, words in [
        (("transfr",), "did you mean 'transfer'"),
        (("transfer", "--mib", "1"), "1 is below 8"),
        (("transfer", "--block-kib", "65537"), "65537 is above 65536"),
        (("transfer", "--to", "cuda:99"), "'cuda:99' is no device of this machine, which has cpu"),
    ]:
        try:
            code = main(flags)
        except SystemExit as end:  # argparse's way
            code = end.code
        assert code == 2
        assert words in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "transfer" in capsys.readouterr().out
