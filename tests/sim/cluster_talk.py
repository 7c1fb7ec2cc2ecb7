"""The messages between the processes while one request is served, decoded from production's frames.

`python -m baton.tests.sim.cluster_talk` prints them, `--seed N` other ones; `--frame HEX` shows one frame,
from a packet dump for example. Ids are cut to 8 digits, as in logs.
"""

import argparse
import json
import re
from unittest.mock import patch

import msgspec
import torch
from baton.tests.sim.cluster_faults import Faults
from baton.tests.sim.cluster_net import Network
from baton.tests.sim.cluster_world import Options, Settings, run

LONG_ID = re.compile(r"([0-9a-f]{8})[0-9a-f]{24}")


def as_json(frame):
    """The messages of a frame, each as one line of JSON."""
    heard = msgspec.msgpack.decode(frame)
    messages = heard if isinstance(heard, list) else [heard]
    return [json.dumps(message, default=lambda value: f"{len(value)} bytes") for message in messages]


def shorter(message):
    return LONG_ID.sub(r"\1", message)


def talk(seed=0):
    """(virtual seconds, from, to, message as JSON, bytes behind it) of all arrivals while clients wait."""
    heard = []
    arrive = Network._arrive

    def listen(self, packet):
        line = packet.line
        ends = (line.client.name, line.server.name)
        source, target = ends if packet.is_up else ends[::-1]
        payload = sum(len(frame) for frame in packet.frames[1:])
        heard.extend(
            (self.timeline.now, source, target, message, payload) for message in as_json(packet.frames[0])
        )
        arrive(self, packet)

    settings = Settings(head_dim=96, chunk_size=8, step_s=0.01)
    options = Options(faults=Faults(), settings=settings, num_clients=1, num_prefills=1, num_decodes=1)
    with patch.object(Network, "_arrive", listen):
        outcome = run(seed, options)
    assert not outcome.violation, outcome.violation
    return heard


def of_one_request(heard):
    """From the router's first order to the last message of both workers on that room, without heartbeats."""
    begin = next(
        i for i, (*_, message, _) in enumerate(heard) if '"Reserve"' in message or '"Prefill"' in message
    )
    room = json.loads(heard[begin][3])["room"]
    last = max(i for i, (*_, message, _) in enumerate(heard) if room in message)
    return [line for line in heard[begin : last + 1] if room in line[3] or '"KV' in line[3]]


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="cluster_talk", description="Shows what the processes of baton say."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frame", help="a frame in hex")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.frame:
        print("\n".join(as_json(bytes.fromhex(options.frame))))
        return
    for when, source, target, message, payload in of_one_request(talk(options.seed)):
        behind = f" + {payload} bytes" if payload else ""
        print(f"{when:.4f} {source} -> {target} {shorter(message)}{behind}")


if __name__ == "__main__":
    main()
