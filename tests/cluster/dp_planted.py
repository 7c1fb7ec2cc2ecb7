"""A real decode worker with data-parallel attention whose rank RANK has the bug PLANT of `dp_plants`.

`python -m baton.tests.cluster.dp_planted RANK PLANT FLAGS...` in place of `python -m baton.decode FLAGS...`.
"""

import logging
import os
import sys

from baton.decode import __main__ as decode
from baton.decode import peer_process
from baton.deploy.up.children import role_command
from baton.tests.parity.dp_plants import PLANTS
from baton.worker import peers
from baton.worker.rank_processes import spawn_rank

OWN, CHILD = "tests.cluster.dp_planted", "child"


def planted(rank: int, plant: str):
    """For `serving`: the command of a role's child."""

    def command_of(role, flags):
        command = role_command(role, flags)
        if role == "decode":
            at = command.index("baton.decode")
            command[at : at + 1] = [f"baton.{OWN}", str(rank), plant]
        return command

    return command_of


def main() -> int:
    rank, plant, *flags = sys.argv[1:]
    if rank == CHILD:
        if plant:
            PLANTS[plant]()
        return peer_process.main(flags)
    if rank == "0":
        PLANTS[plant]()
    of_child = plant if rank == "1" else ""

    def spawn(module, arguments, fds):
        return spawn_rank(OWN, [CHILD, of_child, *arguments], fds)

    peers.spawn_rank = spawn
    return decode.main(flags)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)
