"""`baton draft`: collect samples from a model, train a drafter on them, measure it, and roll it out."""

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, cast

import torch

from ..engine.config import resolve_device, resolve_dtype
from ..engine.errors import CheckpointError, UnknownCheckpoint
from ..engine.hub import resolve_checkpoint
from ..engine.models.registry import load_model_config
from .collect import CollectSettings, collect, collect_here, file_prompts
from .evaluate import held_out_prompts, measure
from .frozen_target import FrozenTarget
from .head_files import MAX_POSITIONS, write_weights
from .kinds import DFLASH, EAGLE3, KINDS, OPTIONS, HeadSettings
from .optimizers import ADAMW, NAMES
from .progress import progress_bar
from .samples import SampleSet, SampleWriter, read_samples
from .swap import RolledBack, SwapSettings, swap_heads
from .trainer import Trainer, TrainSettings, joined_ranks, num_ranks

PROG = "baton draft"
HEAD = "head"  # folder of the trained head below --out
RUN = "run"  # folder of the run's states below --out
MOST_EPOCHS = 1 << 20  # of a run that ends by time


class WrongOption(CheckpointError):
    """An option contradicts another one or has no valid value."""


def main(argv: Sequence[str]) -> int:
    """Runs `baton draft collect|train|evaluate|swap` and returns its exit code. A rank of torchrun ends here.

    The threads of a process group may abort a process that ends by itself, and torchrun then ends rank 0,
    which may still write the head.
    """
    code = _run(argv)
    if num_ranks() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(argv: Sequence[str]) -> int:
    try:
        options = _parser().parse_args(list(argv))
    except WrongOption as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 2
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (CheckpointError, OSError, RolledBack) as error:
        sys.stderr.write(f"{PROG} {options.command}: {error}\n")
        return 2 if isinstance(error, (WrongOption, UnknownCheckpoint)) else 1
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG} {options.command}: interrupted\n")
        return 130


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise WrongOption(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROG, description="Trains drafters for speculative decoding from a model's own answers."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_collect(commands.add_parser("collect", help="write samples: prompts with the model's answers"))
    _add_train(commands.add_parser("train", help="train a drafter on samples"))
    _add_evaluate(commands.add_parser("evaluate", help="measure accept length through the decode engine"))
    _add_swap(commands.add_parser("swap", help="roll a head out on running decode workers"))
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return integer


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to 1")
    return value


def _add_collect(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="checkpoint directory or hub id of the served model")
    add("--url", default="", help="endpoint that serves it (default: the model runs in this process)")
    add("--out", type=Path, required=True, metavar="DIR", help="where shards of samples are written")
    add(
        "--prompts", type=Path, metavar="FILE",
        help='JSON lines with "messages", "prompt" or "tokens" (default: user turns that the model writes)',
    )  # fmt: skip
    add("--samples", type=_at_least(1), default=10_000, help="how many (default %(default)s)")
    add("--max-answer", type=_at_least(1), default=512, help="tokens of an answer (default %(default)s)")
    add("--concurrency", type=_at_least(1), help="texts at once (default 256, with --url 64)")
    add("--minutes", type=_positive, help="begin no text after this time (default: until --samples)")
    add(
        "--max-prompt", type=_at_least(1), default=512,
        help="tokens of a prompt that leave room for a whole answer, without --url (default %(default)s)",
    )  # fmt: skip
    add("--greedy-share", type=_share, default=0.5, help="of the answers (default %(default)s)")
    add(
        "--past-end-share", type=_share, default=0.0,
        help="of the answers, which go on behind the model's end (default %(default)s)",
    )  # fmt: skip
    add("--seed", type=_at_least(0), default=0)
    _add_device(parser)
    parser.set_defaults(run=run_collect)


def _add_train(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="checkpoint directory or hub id of the target")
    add("--samples", type=Path, nargs="+", required=True, metavar="DIR", help="of `baton draft collect`")
    add(
        "--out", type=Path, required=True, metavar="DIR",
        help=f"DIR/{HEAD} is the drafter, DIR/{RUN} the state of the run; a killed run continues there",
    )  # fmt: skip
    add("--kind", choices=KINDS, default=EAGLE3, help="default %(default)s")
    add("--init", default="", metavar="HEAD", help="start from the weights of this drafter of the same kind")
    add("--layers", help="layer outputs to read, such as 4,15,26 (default: 3; DFLASH 5; MTP reads the last)")
    add(
        "--draft-vocab", type=_at_least(1),
        help="most frequent tokens that an EAGLE3 head can draft (default: the target's, or those of --init)",
    )  # fmt: skip
    add("--steps", type=_at_least(1), help="chain steps of EAGLE3 and MTP that are trained (default 7)")
    add("--sharpness", type=_positive, help="of the target's logits in EAGLE3's and MTP's loss (default 1)")
    add(
        "--missed", type=_share,
        help="weight of a draft of EAGLE3 and MTP for each wrong draft before it in its chain (default 1)",
    )  # fmt: skip
    add("--block", type=_at_least(2), help="tokens of a DFLASH block, the newest included (default 8)")
    add("--draft-layers", type=_at_least(1), help="of a DFLASH drafter (default 3)")
    add("--anchors", type=_at_least(1), help="DFLASH blocks of a sample in a batch (default 64)")
    add(
        "--mask-token",
        type=_at_least(0),
        help="id that stands for a draft in DFLASH (default: the rarest one)",
    )
    add(
        "--loss-vocab", type=_at_least(2),
        help="tokens in the loss of DFLASH and MTP: frequent ones and random others (default: all)",
    )  # fmt: skip
    add("--epochs", type=_at_least(1), help="default 2, or as many as fit --minutes")
    add("--minutes", type=_positive, help="train for this time (default: for --epochs)")
    add("--max-tokens", type=_at_least(2), default=16_384, help="of a batch per GPU (default %(default)s)")
    add("--max-length", type=_at_least(2), default=1024, help="tokens of a sample (default %(default)s)")
    add("--lr", type=_positive, default=3e-4, help="default %(default)s")
    add("--optimizer", choices=NAMES, default=ADAMW, help="default %(default)s")
    add("--held-out", type=_at_least(0), default=64, help="samples to measure with (default %(default)s)")
    add("--exclude", type=Path, metavar="FILE", help="prompts in JSON lines that are never trained on")
    add("--save-every", type=_at_least(1), default=200, help="steps between states (default %(default)s)")
    add("--seed", type=_at_least(0), default=0)
    _add_device(parser)
    parser.set_defaults(run=run_train)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="checkpoint directory or hub id of the target")
    add("--draft", nargs="+", required=True, metavar="HEAD", help="heads to measure on the same prompts")
    add("--samples", type=Path, nargs="+", metavar="DIR", help="the prompts of the last ones are asked")
    add("--prompt-file", type=Path, metavar="FILE", help="or prompts in JSON lines, as `collect` takes them")
    add("--prompts", type=_at_least(1), default=64, metavar="N", help="how many (default %(default)s)")
    add("--steps", type=_at_least(1), default=5, help="drafts of a chain (default %(default)s)")
    add("--tokens", type=_at_least(2), default=128, help="of each answer, greedy (default %(default)s)")
    add("--until-end", action="store_true", help="answers end where the model ends them (default: --tokens)")
    _add_device(parser)
    parser.set_defaults(run=run_evaluate)


def _add_swap(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("head", type=Path, metavar="HEAD", help="directory of the head, on every host of a decode worker")
    add("--url", default="http://127.0.0.1:8000", help="router of the cluster (default %(default)s)")
    add(
        "--verifies", type=_at_least(0), default=500, metavar="N",
        help="that judge a head, of requests that began with it; 0: no judgement (default %(default)s)",
    )  # fmt: skip
    add(
        "--tolerance", type=_share, default=0.1,
        help="share by which the accept length may be lower (default %(default)s)",
    )  # fmt: skip
    add(
        "--timeout-s", type=_positive, default=600.0, metavar="S",
        help="longest wait for a worker's verdict (default %(default)s)",
    )  # fmt: skip
    add(
        "--link", type=Path, metavar="LINK",
        help="symbolic link that the workers' --draft names; in the end it names HEAD",
    )  # fmt: skip
    add(
        "--restart", action="store_true",
        help="a head of another shape: restart the workers one by one, which needs --link",
    )  # fmt: skip
    parser.set_defaults(run=run_swap)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")


def run_collect(options: argparse.Namespace) -> int:
    """Collects samples from a running endpoint, or with the engine in this process."""
    settings = CollectSettings(
        url=options.url,
        num_samples=options.samples,
        max_answer=options.max_answer,
        concurrency=options.concurrency or (64 if options.url else 256),
        max_prompt=options.max_prompt,
        greedy_share=options.greedy_share,
        past_end_share=options.past_end_share,
        seed=options.seed,
        api_key=os.environ.get("BATON_API_KEY", ""),
        seconds=60 * (options.minutes or 0.0),
    )
    writer, model = SampleWriter(options.out), resolve_checkpoint(options.model)
    with _bar("collecting", options.samples) as bar, _terminable():

        def show(samples: int, tokens: int) -> None:
            bar(samples, f"collecting  {tokens} tokens")

        if options.url:
            count = asyncio.run(collect(settings, model, writer, options.prompts, show))
        else:
            count = collect_here(
                settings, model, writer, options.prompts, show, device=options.device, dtype=options.dtype
            )
    _say(f"{count} samples in {options.out}")
    return 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """A termination ends the block as an interruption does, so that it can clean up."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_train(options: argparse.Namespace) -> int:
    """Trains a drafter, writes its checkpoint, and measures it on the samples held out."""
    model = resolve_checkpoint(options.model)
    config = load_model_config(model)
    samples = read_samples(options.samples, config.vocab_size)
    trained, held_out = samples.split(options.held_out)
    # the model may have written one prompt more than once
    asked = {held_out.prompt(index) for index in range(len(held_out))}
    if options.exclude is not None:
        asked |= {tuple(prompt) for prompt in file_prompts(options.exclude, model)}
    trained = trained.without(asked)
    if not len(trained):
        raise CheckpointError("every sample has a prompt that is held out; collect others")
    counts = trained.counts(config.vocab_size)
    kind = _head_settings(options).resolved(config, counts)
    device = resolve_device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dtype = resolve_dtype(options.dtype, device)
    head: Path = options.out / HEAD
    with joined_ranks(device) as ranks:
        # beside the states: a run that is refused below must not change the head of the run before
        if ranks.is_first:
            kind.write_config(options.out / RUN, model, config)
        ranks.wait()
        target = FrozenTarget.load(model, kind.layers, dtype=dtype, device=device)
        trainee = kind.trainee(options.out / RUN, config, target, counts)
        cast(torch.nn.Module, trainee).to(device)
        settings = TrainSettings(
            epochs=options.epochs or (MOST_EPOCHS if options.minutes else 2),
            minutes=options.minutes or 0.0,
            max_tokens=options.max_tokens,
            max_length=min(
                options.max_length, options.max_tokens, MAX_POSITIONS, config.max_position_embeddings
            ),
            lr=options.lr,
            optimizer=options.optimizer,
            seed=options.seed,
            save_every=options.save_every,
        )
        about = kind.about() | {"dtype": str(dtype).removeprefix("torch.")}
        trainer = Trainer(trainee, target, trained, settings, options.out / RUN, ranks=ranks, about=about)
        if not trainer.epoch_steps:
            raise CheckpointError(
                f"{len(trained)} samples make fewer batches than there are processes, {ranks.count}; collect "
                "more samples or lower --max-tokens"
            )
        if ranks.is_first:
            _say(
                f"{options.kind}: {len(trained)} samples of {trained.num_tokens} tokens, "
                f"{trainer.epoch_steps} steps an epoch on {ranks.count} x {device.type}, {kind}"
            )
        done = trainer.run()
        if ranks.is_first:
            kind.write_config(head, model, config)
            write_weights(head, trainee.checkpoint_tensors(), torch.bfloat16)
            _say(f"{head}: {done.step} steps, {done.num_samples} samples, {done.seconds:.0f} s")
    if not ranks.is_first or not len(held_out):
        return 0
    del trainer, trainee, target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    steps = kind.block_size - 1 if options.kind == DFLASH else 5
    return _evaluate(options, model, [head], _held_out(held_out), steps=steps, num_tokens=128)


def run_evaluate(options: argparse.Namespace) -> int:
    """Measures heads on the prompts of a file, or of the last samples of a set."""
    model = resolve_checkpoint(options.model)
    heads = [resolve_checkpoint(draft, "--draft") for draft in options.draft]
    if (options.samples is None) == (options.prompt_file is None):
        raise WrongOption("give either --samples or --prompt-file: prompts to measure with")
    if options.prompt_file is not None:
        prompts = list(itertools.islice(file_prompts(options.prompt_file, model), options.prompts))
    else:
        samples = read_samples(options.samples, load_model_config(model).vocab_size)
        few = options.prompts >= len(samples)
        prompts = _held_out(samples if few else samples.split(options.prompts)[1])
    return _evaluate(options, model, heads, prompts, options.steps, options.tokens)


def _held_out(samples: SampleSet) -> list[list[int]]:
    return held_out_prompts(samples, len(samples))


def run_swap(options: argparse.Namespace) -> int:
    """Swaps the head of every decode worker in turn."""
    path = Path(os.path.abspath(options.head.expanduser()))
    settings = SwapSettings(
        path=path,
        link=None if options.link is None else Path(os.path.abspath(options.link.expanduser())),
        may_restart=options.restart,
        verifies=options.verifies,
        tolerance=options.tolerance,
        verdict_s=options.timeout_s,
    )
    swap_heads(settings, options.url, os.environ.get("BATON_API_KEY", ""), _say)
    if options.link is None:
        _say(f"done; set --draft {path} for workers that restart")
    return 0


def _evaluate(
    options: argparse.Namespace,
    model: Path,
    heads: Sequence[Path],
    prompts: Sequence[Sequence[int]],
    steps: int,
    num_tokens: int,
) -> int:
    room = load_model_config(model).max_position_embeddings - num_tokens - 2 * (steps + 1)
    prompts = [prompt for prompt in prompts if len(prompt) <= room]
    if not prompts:
        raise CheckpointError("no sample has a prompt before its answer that fits the model's context")
    for head in heads:
        with _bar(f"measuring {head.name}", len(prompts)) as show:
            found = measure(
                model, head, prompts, steps=steps, num_tokens=num_tokens, device=options.device,
                dtype=options.dtype, ignore_eos=not getattr(options, "until_end", False),
                progress=lambda done: show(done, ""),
            )  # fmt: skip
        _say(f"{head}: {found} ({len(prompts)} prompts, {num_tokens} greedy tokens, chains of {steps})")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _head_settings(options: argparse.Namespace) -> HeadSettings:
    """Raises WrongOption for an option that the kind does not have."""
    given = {name: getattr(options, name) for names in OPTIONS.values() for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given.keys() - set(OPTIONS[options.kind]):
        kinds = " or ".join(kind for kind, names in OPTIONS.items() if name in names)
        raise WrongOption(
            f"--{name.replace('_', '-')}: --kind {options.kind} has no such option; leave it out, or use "
            f"--kind {kinds}"
        )
    if "layers" in given:
        given["layers"] = _layers(given["layers"])
    renamed = {"block": "block_size", "draft_layers": "num_layers", "anchors": "num_anchors"}
    return HeadSettings(
        kind=options.kind,
        seed=options.seed,
        init=resolve_checkpoint(options.init, "--init") if options.init else None,
        **{renamed.get(name, name): value for name, value in given.items()},
    )


def _layers(text: str) -> tuple[int, ...]:
    parts = text.split(",") if text else []
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise WrongOption(f"--layers {text!r}: write layer numbers with commas, such as 4,15,26")
    return tuple(int(part) for part in parts)


@contextlib.contextmanager
def _bar(text: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on stderr; yields the call that moves it."""
    with progress_bar() as bar:
        task = bar.add_task(text, total=total)
        yield lambda done, now: bar.update(task, completed=done, description=now or text)
