"""Compiles planned kernel variants in several threads, and loads them onto the device."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from ...kernels.triton_jit import Launch

logger = logging.getLogger(__name__)

MAX_THREADS = (
    16  # Triton's passes and the assembler run without the interpreter's lock, its front end does not
)
PROGRESS_S = 5.0  # between two lines of progress


def compile_launches(
    launches: Sequence[Launch], device: torch.device, *, clock: Callable[[], float] = time.monotonic
) -> int:
    """Compiles the variant of every launch for `device`. Returns the number of variants that failed.

    A failure is logged and not raised: the first real launch would raise it where its cause is visible, and
    a variant of a rare shape may never be launched.
    """
    failed = 0
    started = told = clock()
    workers = max(1, min(MAX_THREADS, os.cpu_count() or 1, len(launches)))
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()

    def enter() -> None:
        if index is not None:
            torch.cuda.set_device(index)  # the current device belongs to a thread

    for launch in launches:
        launch.prepare()
    loads: list[Callable[[], None]] = []
    with ThreadPoolExecutor(workers, thread_name_prefix="compile", initializer=enter) as pool:
        waiting = {pool.submit(launch.compile): launch for launch in launches}
        for done, future in enumerate(as_completed(waiting), start=1):
            error = future.exception()
            if error is None:
                loads.append(future.result())
            else:
                failed += 1
                logger.error("kernel variant %s cannot be compiled: %s", waiting[future], error)
            if clock() - told >= PROGRESS_S:
                told = clock()
                logger.info("%d of %d kernel variants compiled", done, len(launches))
    for load in loads:
        load()
    logger.info(
        "%d kernel variants compiled in %.1f s by %d threads",
        len(launches) - failed,
        clock() - started,
        workers,
    )
    return failed
