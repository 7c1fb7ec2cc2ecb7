"""`baton bench engine`: measures a decode step, steps with drafts and a prefill of one engine, and compares
them with the device's limits.

Weights are random and made on the device from a config. Acceptance is simulated: a target accepts
`--accept-length` tokens of each chain. The engine does not know this, and a step's work does not depend on
it. `--drafts` names the drafters, each of which gets an engine of its own. "floor" is a lower bound: the time
to read the bytes of a step (weights of each pass, KV of the batch), or the time of its matrix products,
whichever is longer. The rates are those of a copy and of a matrix product, measured in the same run.
"""

import argparse
import gc
import json
import logging
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ...cluster.errors import ConfigError
from ...engine.config import DTYPES, resolve_device, resolve_dtype
from ...engine.errors import CheckpointError
from ...engine.models.registry import JOIN_NAMES, Joins, named_joins
from ...engine.parallel.group import SOLO, TensorGroup
from ...engine.sampling.params import SamplingParams, validate_params
from ...kernels.chained_launch import unchained_launches
from ..arguments import SAMPLING, at_least, sampling
from .drafters import ALL, DRAFTERS, named_drafters
from .floors import UNKNOWN, Ceilings, PassCounts, Work, measure_ceilings
from .ranks import rank_0, rank_device
from .rig import ComputedPrompt, Rig, RigSettings, Stepper, check_ranks
from .shapes import DRAFT_VOCABULARY, FORMS, MXFP4, SHAPES
from .sums import SumTime, sum_times, table
from .timing import STEPS_IN_TURN, Timing, measure, measure_in_turn

PROG = "baton bench engine"
WARM_UPS = 3
ADAPTIVE_WARM_UPS = 60  # steps until the policy knows the acceptance
TOP_KERNELS = 12
MEASURED_SAMPLING = SAMPLING | {"logprobs": int}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement.

    `kind` is decode, prefill, the name of a drafter, that name behind "adaptive", or decode in turn with such
    steps. `size` counts requests, for a prefill tokens. `floor_ms` is the lower bound for all passes
    (`num_bytes`, `num_flops`). `accepted` is the measured number of tokens per step and request.
    """

    kind: str
    size: int
    has_graphs: bool
    path: str
    floor_ms: float
    num_bytes: float
    num_flops: float
    accepted: float
    timing: Timing

    @property
    def ratio(self) -> float:
        return self.timing.wall / self.floor_ms if self.floor_ms else 0.0


class EngineBench:
    """Measures the cells on one rig, in the order of the report. Prefill goes with plain steps."""

    def __init__(self, rig: Rig, ceilings: Ceilings, options: argparse.Namespace) -> None:
        self.rig = rig
        self.has_plain = rig.settings.has_plain
        self.ceilings = ceilings
        self._options = options
        self.target = PassCounts.of_target(rig.own, rig.settings.dtype.itemsize).of_rank(rig.group.size)

    def cells(self) -> Iterator[Cell]:
        options = self._options
        batches, lengths = sorted(set(options.batch)), sorted(set(options.prefill))
        prompts = self.rig.prompts(batches[-1], options.context) if batches and batches[-1] else []
        for has_graphs in {"both": (True, False), "on": (True,), "off": (False,)}[options.graphs]:
            self.rig.use_graphs(has_graphs)
            for length in lengths if self.has_plain else ():
                yield self._prefill(length, has_graphs)
            for kind in (
                ("decode", self.rig.settings.drafts) if self.has_plain else (self.rig.settings.drafts,)
            ):
                for batch in batches:
                    yield self._step(kind, prompts[:batch], has_graphs)
            if options.adaptive and has_graphs:
                for batch in batches:
                    yield from self._adaptive(prompts[:batch])

    def _prefill(self, length: int, has_graphs: bool) -> Cell:
        request = self.rig.long_prompt(length)
        run = partial(self.rig.prefill, request)
        return self._cell("prefill", length, has_graphs, run, lambda: [self.target.prefill(length)])

    def _step(self, kind: str, prompts: Sequence[ComputedPrompt], has_graphs: bool) -> Cell:
        stepper = self.rig.stepper(prompts, has_drafts=kind != "decode")
        batch = len(prompts)

        def works() -> list[Work]:
            context = self._options.context + stepper.requests[0].num_output // 2  # the mean over the run
            if kind == "decode":
                return [self.target.step(batch, 1, context, logit_rows=1)]
            return self.rig.kind.step(self.target, batch, self.rig.shape.steps, context)

        cell = self._cell(kind, batch, has_graphs, stepper.step, works)
        accepted = stepper.finish()
        return replace(cell, accepted=accepted, path="+".join(sorted(stepper.paths)))

    def _adaptive(self, prompts: Sequence[ComputedPrompt]) -> Iterator[Cell]:
        """Steps of the policy's choice, in turn with plain ones of the same context.

        They have no floor of their own: `path` names the chosen steps.
        """
        policy = self.rig.policy()
        first = self.rig.stepper(prompts, has_drafts=True, policy=policy)
        for _ in range(ADAPTIVE_WARM_UPS):
            first.step()
        first.finish()
        batches: dict[str, Stepper] = {}
        if self.has_plain:
            batches["decode in turn"] = self.rig.stepper(prompts, has_drafts=False)
        batches[f"adaptive {self.rig.settings.drafts}"] = self.rig.stepper(
            prompts, has_drafts=True, policy=policy
        )
        timings = measure_in_turn([*batches.values()], self.rig.settings.device)
        for (kind, batch), timing in zip(batches.items(), timings, strict=True):
            path = f"graph, {policy.current.steps if batch.decoder.policy else 0} drafts"
            yield Cell(
                kind=kind,
                size=len(prompts),
                has_graphs=True,
                path=path,
                floor_ms=0.0,
                num_bytes=0.0,
                num_flops=0.0,
                accepted=batch.finish(),
                timing=timing,
            )

    def _cell(
        self,
        kind: str,
        size: int,
        has_graphs: bool,
        run: Callable[[], object],
        works: Callable[[], list[Work]],
    ) -> Cell:
        forwards = self.rig.runner.counters.forwards
        before = dict(forwards)
        timing = measure(run, self.rig.settings.device, self._options.repeats, warm_ups=WARM_UPS)
        paths = [path for path, count in forwards.items() if count > before.get(path, 0)]
        done = works()
        return Cell(
            kind=kind,
            size=size,
            has_graphs=has_graphs,
            path="+".join(sorted(paths)),
            floor_ms=sum(map(self.ceilings.seconds, done)) * 1e3,
            num_bytes=sum(work.num_bytes for work in done),
            num_flops=sum(work.num_flops for work in done),
            accepted=1.0,
            timing=timing,
        )


HEAD = (
    "work",
    "graphs",
    "ms",
    "floor ms",
    "ratio",
    "device ms",
    "host ms",
    "GB",
    "TFLOP",
    "accepted",
    "ms a token",
)


def row_of(cell: Cell) -> str:
    """One cell as a row of the markdown table."""
    timing = cell.timing
    unit = "tokens" if cell.kind == "prefill" else "requests"
    cells = [
        f"{cell.kind}, {cell.size} {unit}",
        cell.path if cell.has_graphs else "off",
        f"{timing.wall:.3f}",
        f"{cell.floor_ms:.3f}" if cell.floor_ms else "",
        f"{cell.ratio:.2f}" if cell.floor_ms else "",
        "" if timing.device is None else f"{timing.device:.3f}",
        "" if timing.host is None else f"{timing.host:.3f}",
        f"{cell.num_bytes / 1e9:.2f}",
        f"{cell.num_flops / 1e12:.2f}",
        "" if cell.kind == "prefill" else f"{cell.accepted:.2f}",
        "" if cell.kind == "prefill" else f"{timing.wall / cell.accepted:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def profile_of(cell: Cell) -> str:
    """The slowest kernels of a cell, as lines of a markdown list."""
    lines = [f"{cell.kind}, {cell.size}, graphs {'on' if cell.has_graphs else 'off'}: ms, launches, kernel"]
    rest = sum(ms for _, ms, _ in cell.timing.kernels[TOP_KERNELS:])
    lines += [
        f"  {ms:8.3f} {count:6.1f}  {name[:90]}" for name, ms, count in cell.timing.kernels[:TOP_KERNELS]
    ]
    return "\n".join([*lines, f"  {rest:8.3f}         all others", ""])


def parser() -> argparse.ArgumentParser:
    description = (__doc__ or "").replace("`", "")
    made = argparse.ArgumentParser(
        prog=PROG,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add(
        "--shape",
        choices=sorted(SHAPES),
        default="llama-3.1-8b",
        help="a built-in model shape (default llama-3.1-8b)",
    )
    add(
        "--model",
        default="",
        help="take the shape from this checkpoint's config.json instead (weights stay random)",
    )
    add(
        "--draft-vocab",
        type=at_least(4),
        default=DRAFT_VOCABULARY,
        help=f"of the head (default {DRAFT_VOCABULARY})",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default auto: CUDA where there is one",
    )
    add(
        "--quantize",
        choices=("none", *FORMS, MXFP4),
        default="none",
        help="the form of the target's matrices (default none: that of --dtype)",
    )
    add("--dtype", choices=("auto", *DTYPES), default="bfloat16", help="of weights and KV (default bfloat16)")
    add(
        "--batch",
        type=at_least(1),
        nargs="*",
        default=[1, 8, 32, 64, 128],
        help="requests of a step (none: no steps)",
    )
    add("--context", type=at_least(2), default=1024, help="tokens before the first step (default 1024)")
    add(
        "--prefill",
        type=at_least(2),
        nargs="*",
        default=[1024, 8192],
        help="tokens of a prompt (default 1024 8192)",
    )
    add("--chunk-size", type=at_least(1), default=2048, help="tokens of one prefill forward (default 2048)")
    add(
        "--drafts",
        type=_drafters,
        default=["eagle3"],
        metavar=f"{ALL}|NAME[,NAME...]",
        help=f"drafters to measure: {', '.join(DRAFTERS)} (default eagle3)",
    )
    add("--spec-steps", type=at_least(1), default=3, help="drafts of a chain (default 3)")
    add(
        "--accept-length",
        type=at_least(1),
        default=3,
        help="tokens that each step with drafts yields, simulated (default 3)",
    )
    add(
        "--tp",
        type=at_least(1),
        default=1,
        help="ranks that share the target, one GPU each; figures, bytes and operations are those of rank 0",
    )
    add("--ep", action="store_true", help="ranks have whole experts, otherwise a part of the width of each")
    add(
        "--dp-attention",
        type=at_least(1),
        default=1,
        help="ranks that share the experts only, one GPU each; each has as many requests as --batch says",
    )
    add("--deterministic", action="store_true", help="with batch-invariant operations of the target")
    add(
        "--window-kv",
        choices=("free", "keep"),
        default="free",
        help="pages of their own for layers with windows, as a server has them, or one kind (default free)",
    )
    add(
        "--join",
        type=_joins,
        metavar="none|all|NAME[,NAME...]",
        help=f"steps of the target's layers that share launches for few rows: {', '.join(JOIN_NAMES)} "
        "(default: those of a server)",
    )
    add(
        "--unchained",
        action="store_true",
        help="start each kernel only after the one before it has ended, to see what chained launches give",
    )
    add(
        "--sampling",
        type=_sampling,
        default=SamplingParams(temperature=0.0),
        metavar="NAME=VALUE[,NAME=VALUE...]",
        help=f"how requests choose their tokens, of {', '.join(MEASURED_SAMPLING)} "
        "(default: the likeliest token)",
    )
    add("--page-size", type=at_least(1), default=16, help="tokens of a KV page (default 16)")
    add("--graphs", choices=("both", "on", "off"), default="both", help="default both")
    add(
        "--adaptive",
        action="store_true",
        help="also steps whose number of drafts follows load and acceptance, as a server chooses it "
        "(with graphs)",
    )
    add("--repeats", type=at_least(3), default=24, help="steps of each measurement (default 24)")
    add("--profile", action="store_true", help="the kernels of each cell that take the longest (CUDA)")
    add("--json", metavar="OUT", help="also write everything to this file")
    return made


def _drafters(text: str) -> list[str]:
    try:
        return named_drafters(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _joins(text: str) -> Joins:
    try:
        return named_joins(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _sampling(text: str) -> SamplingParams:
    made = SamplingParams(**sampling(MEASURED_SAMPLING)(text))  # type: ignore[arg-type]  # names are its fields
    try:
        validate_params(made, 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    return made


def settings_of(options: argparse.Namespace) -> RigSettings:
    """The settings from the options, of the first drafter.

    Raises ConfigError or CheckpointError naming option, value and remedy.
    """
    if options.accept_length > options.spec_steps + 1:
        raise ConfigError(
            f"--accept-length {options.accept_length}: "
            f"a chain of --spec-steps {options.spec_steps} yields at most "
            f"{options.spec_steps + 1} tokens; lower it"
        )
    if options.tp > 1 and options.dp_attention > 1:
        raise ConfigError(f"--tp {options.tp}: leave it out with --dp-attention {options.dp_attention}")
    ranks, name = num_ranks(options), "--tp" if options.tp > 1 else "--dp-attention"
    if ranks > 1 and options.adaptive:
        raise ConfigError(
            f"{name} {ranks}: ranks that choose by their own clocks would part; measure --adaptive with "
            f"{name} 1"
        )
    device = resolve_device(options.device)
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise ConfigError(f"{name} {ranks}: this process sees {torch.cuda.device_count()} GPUs; lower it")
    # measured steps, as many under the profiler, and the warm-ups; the first step may accept one token more
    num_steps = 2 * options.repeats + WARM_UPS
    if options.adaptive:
        num_steps = max(num_steps, ADAPTIVE_WARM_UPS, STEPS_IN_TURN)
    growth = (num_steps + 2) * (options.spec_steps + 1)
    return RigSettings(
        shape=options.shape,
        model=options.model,
        draft_vocab_size=options.draft_vocab,
        device=device,
        dtype=resolve_dtype(options.dtype, device),
        spec_steps=options.spec_steps,
        accept_length=options.accept_length,
        batches=tuple(sorted(set(options.batch))),
        max_request=options.context + growth,
        max_context=max(options.context + growth, max(options.prefill, default=0)),
        max_prompt=max(options.prefill, default=2),
        chunk_size=options.chunk_size,
        page_size=options.page_size,
        has_graphs=options.graphs != "off",
        is_adaptive=options.adaptive,
        is_invariant=options.deterministic,
        quantize=options.quantize,
        drafts=options.drafts[0],
        by_expert=options.ep,
        has_own_rows=options.dp_attention > 1,
        joins=options.join,
        has_window_pages=options.window_kv == "free",
        sampling=options.sampling,
    )


def num_ranks(options: argparse.Namespace) -> int:
    """Processes that measure together."""
    return max(int(options.tp), int(options.dp_attention))


def machine(device: torch.device) -> str:
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return f"{where}, torch {torch.__version__}, Python {platform.python_version()}"


def main(argv: Sequence[str]) -> int:
    """Runs `baton bench engine` and returns its exit code."""
    options = parser().parse_args(list(argv))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    try:
        settings = settings_of(options)
        ranks = num_ranks(options)
        check_ranks(settings, ranks)
        _progress(f"measuring the ceilings of {machine(settings.device)}")
        ceilings = measure_ceilings(settings.dtype, settings.device)
        _progress("making weights, prompts and graphs")
        cells: list[Cell] = []
        sums: list[SumTime] = []
        alone = nullcontext(SOLO)
        with launches(options), rank_0(ranks, argv, settings.device) if ranks > 1 else alone as group:
            sums += sums_of(settings, group)
            for cell in cells_of(settings, options, group, ceilings):
                cells.append(cell)
                _progress(row_of(cell))
    except (ConfigError, CheckpointError, ValueError) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 2
    sys.stdout.write(report(settings, ceilings, cells, options) + table(sums))
    if options.json:
        whole = document(settings, ceilings, cells, options) | {"sums": [asdict(each) for each in sums]}
        Path(options.json).write_text(json.dumps(whole) + "\n", encoding="utf-8")
    return 0


def launches(options: argparse.Namespace) -> AbstractContextManager[None]:
    """The context of all measurements."""
    return unchained_launches() if options.unchained else nullcontext()


def sums_of(settings: RigSettings, group: TensorGroup) -> list[SumTime]:
    """The times of sums over the ranks of `group`; none for one rank or on a CPU."""
    device = rank_device(settings.device, group.rank)
    return [] if group.is_solo or device.type != "cuda" else list(sum_times(group, device))


def cells_of(
    settings: RigSettings,
    options: argparse.Namespace,
    group: TensorGroup,
    ceilings: Ceilings = UNKNOWN,
) -> Iterator[Cell]:
    """All measurements, one drafter and its engine after the other. All ranks of `group` run them in step."""
    settings = replace(settings, device=rank_device(settings.device, group.rank))
    for number, drafts in enumerate(options.drafts):
        wanted = replace(settings, drafts=drafts, has_plain=number == 0)
        yield from EngineBench(Rig(wanted, group), ceilings, options).cells()
        _free_memory(settings.device)


def _free_memory(device: torch.device) -> None:
    """Returns the memory of an engine that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def report(
    settings: RigSettings, ceilings: Ceilings, cells: Sequence[Cell], options: argparse.Namespace
) -> str:
    """The whole report for the terminal, as markdown."""
    accepted = f"accept length {options.accept_length} of {options.spec_steps} drafts, simulated"
    lines = [
        f"{machine(settings.device)}; copy {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s (read + "
        "write), matmul "
        f"{ceilings.matmul_flop_per_s / 1e12:.1f} TFLOP/s",
        f"{options.model or options.shape}, {settings.dtype}, context {options.context}, {accepted}"
        + (f", rank 0 of {num_ranks(options)}" if num_ranks(options) > 1 else "")
        + (" with attention of their own" if options.dp_attention > 1 else "")
        + (", experts dealt whole" if options.ep else "")
        + (", deterministic" if options.deterministic else "")
        + (", launches not chained" if options.unchained else "")
        + (f", pages of {options.page_size} tokens" if options.page_size != 16 else "")
        + (f", weights in {options.quantize}" if options.quantize != "none" else ""),
        "",
        f"| {' | '.join(HEAD)} |",
        "|---" * len(HEAD) + "|",
        *map(row_of, cells),
        "",
    ]
    if options.profile:
        lines += [profile_of(cell) for cell in cells if cell.timing.kernels]
    return "\n".join(lines) + "\n"


def document(
    settings: RigSettings, ceilings: Ceilings, cells: Sequence[Cell], options: argparse.Namespace
) -> dict[str, object]:
    """The whole report as a JSON document."""
    return {
        "machine": machine(settings.device),
        "options": vars(options) | {"sampling": asdict(options.sampling), "join": repr(options.join)},
        "ceilings": asdict(ceilings),
        "accept_length": "simulated",
        "cells": [asdict(cell) | {"ratio": cell.ratio} for cell in cells],
    }


def _progress(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
