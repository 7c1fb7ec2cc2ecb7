"""A rank above 0 of `baton bench engine --tp N`: runs the benchmark in step and prints nothing."""

import logging
import os
import sys
from collections.abc import Sequence

import torch

from ...engine.config import resolve_device
from ...engine.parallel.group import leave_group
from .bench import cells_of, launches, parser, settings_of, sums_of
from .ranks import joined


def main(argv: Sequence[str]) -> int:
    """`argv`: the descriptor of the meeting file, rank, number of ranks, and the options of the benchmark."""
    meeting, rank, size = (int(part) for part in argv[:3])
    options = parser().parse_args(list(argv[3:]))
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=f"rank {rank}: %(message)s")
    if resolve_device(options.device).type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    group = joined(meeting, rank, size, resolve_device(options.device))
    settings = settings_of(options)
    with launches(options):
        sums_of(settings, group)
        for _ in cells_of(settings, options, group):
            pass
    leave_group(group)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
