"""A cluster needs no network but this host's own: it starts and answers where there is no other."""

import os
import shutil
import subprocess
import sys

import pytest

PROGRAM = """
import fcntl, socket, struct, sys
from baton.tests.cluster.serving import complete, serving
with socket.socket() as probe:  # a new namespace has its loopback down
    up = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
    fcntl.ioctl(probe, 0x8914, up)  # SIOCSIFFLAGS
assert [name for _, name in socket.if_nameindex()] == ["lo"]
with serving(sys.argv[1], transport="tcp", kv_memory_mb=8, threads=1) as cluster:
    print(len(complete(cluster, [7, 80, 33], max_tokens=4)[0]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="a network namespace needs root")
def test_s30_a_cluster_starts_and_answers_where_there_is_no_network(served_dir):
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", PROGRAM, str(served_dir)],
        capture_output=True, text=True, cwd="/", timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "4", done.stderr[-3000:]
