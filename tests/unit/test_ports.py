import socket
import subprocess
import sys

import zmq
from baton.tests.ports import HeldPorts, free_port

LISTEN = "import socket, sys; socket.create_server(('127.0.0.1', int(sys.argv[1])))"


def is_unused(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_a_held_port_is_nobody_elses_until_it_is_released():
    held = HeldPorts(3)
    ports = held.ports
    assert len(set(ports)) == 3
    assert not any(map(is_unused, ports))
    assert free_port() not in ports
    held.release()
    held.release()
    assert all(map(is_unused, ports))


def test_servers_listen_at_a_held_port_one_life_after_another():
    held = HeldPorts(2)
    first, second = held.ports
    for _ in range(2):
        subprocess.run([sys.executable, "-c", LISTEN, str(first)], check=True)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(f"tcp://127.0.0.1:{second}")
            socket.create_connection(("127.0.0.1", second)).close()
        assert not is_unused(first)
        assert not is_unused(second)
    held.release()
