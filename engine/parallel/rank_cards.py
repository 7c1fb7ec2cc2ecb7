"""Which GPU a rank runs on: the visible one of its number, or, in tests, one that ranks share.

`BATON_RANKS_PER_CARD=n` puts n ranks on each GPU, so that a machine with few of them runs many ranks. NCCL
refuses two ranks of one host on a GPU, so they are given hosts of different names: it then takes sockets
between them. A sum waits for the GPU to change processes, some 7 ms for each rank on a card after the first.
"""

import logging
import os
from collections.abc import Mapping

from ..errors import CheckpointError

logger = logging.getLogger(__name__)

VARIABLE = "BATON_RANKS_PER_CARD"
HOST_VARIABLE = "NCCL_HOSTID"  # NCCL takes ranks with equal values for ranks of one host


def ranks_per_card(env: Mapping[str, str]) -> int:
    """The ranks on each GPU. CheckpointError: the variable is not a positive number."""
    text = env.get(VARIABLE, "1")
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise CheckpointError(f"{VARIABLE}={text!r}: it takes a number of ranks from 1; leave it out for 1")
    return int(text)


def card_of_rank(rank: int, env: Mapping[str, str]) -> int:
    """The number of the visible GPU of `rank`. CheckpointError as `ranks_per_card`."""
    return rank // ranks_per_card(env)


def name_host(rank: int) -> None:
    """Names the host of this process for NCCL, before a process group is made, where ranks share a GPU.

    CheckpointError as `ranks_per_card`.
    """
    if (count := ranks_per_card(os.environ)) > 1:
        logger.warning("rank %d shares its GPU: %s=%d, which is for tests and slow", rank, VARIABLE, count)
        os.environ[HOST_VARIABLE] = f"{VARIABLE}-{rank % count}"
