"""The addresses of the ranks of a worker: behind that of its rank 0."""

import pytest
from baton.cluster.net.endpoints import endpoint_behind


@pytest.mark.parametrize(
    ("endpoint", "number", "expected"),
    [
        ("tcp://10.0.0.2:7200", 0, "tcp://10.0.0.2:7200"),
        ("tcp://10.0.0.2:7200", 3, "tcp://10.0.0.2:7203"),
        ("tcp://[::1]:7200", 1, "tcp://[::1]:7201"),
        ("tcp://127.0.0.1:0", 1, "tcp://127.0.0.1:0"),
        ("tcp://127.0.0.1:*", 1, "tcp://127.0.0.1:*"),
        ("ipc:///run/kv-0", 0, "ipc:///run/kv-0"),
        ("ipc:///run/kv-0", 2, "ipc:///run/kv-0.2"),
    ],
)
def test_the_ports_and_paths_of_ranks_follow_that_of_rank_0(endpoint, number, expected):
    assert endpoint_behind(endpoint, number) == expected
