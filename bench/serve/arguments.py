"""The command line of `baton bench serve`."""

import argparse
from collections.abc import Sequence

from ..arguments import SAMPLING, at_least, sampling
from .prompts import MOST_LENGTH

PROG = "baton bench serve"
ROUNDS = 3
INPUT, OUTPUT = (512, 512), (128, 128)
PLAIN_SAMPLING = {"temperature", "top_p", "frequency_penalty", "presence_penalty"}  # fields of OpenAI


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options in `argv`. Exits with code 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog=PROG, description="Load on an OpenAI endpoint, and what its clients saw."
    )
    _add_load(parser)
    _add_questions(parser)
    _add_output(parser)
    options = parser.parse_args(argv)
    if options.compare and options.metrics:
        parser.error("--metrics names the routers of one --url; leave it out with --compare")
    if options.compare and options.plot:
        parser.error("--plot shows the distributions of one server; with --compare draw --curve FILE")
    if options.workload and options.prompts:
        parser.error("--prompts and --workload both name the requests; a --workload file may hold prompts")
    if options.rounds != ROUNDS and not options.compare:
        parser.error("--rounds belongs to --compare")
    if options.take_turns and (not options.workload or options.rate):
        parser.error("--take-turns is for the conversations of --workload under --concurrency")
    if options.take_turns and options.duration and not options.requests:
        parser.error("--take-turns needs --requests, which says how many conversations there are")
    if options.own_answers and (not options.workload or options.plain):
        parser.error("--own-answers is for the conversations of --workload, and needs token ids: no --plain")
    if options.plain and (foreign := sorted(options.sampling.keys() - PLAIN_SAMPLING)):
        parser.error(f"--plain sends OpenAI's fields alone; leave {', '.join(foreign)} out of --sampling")
    if options.context and not options.workload:
        parser.error("--context cuts the requests of --workload; use --input and --output instead")
    if options.workload and (options.input or options.output or options.shared_prefix):
        parser.error("--workload has lengths and prefixes of its own: no --input, --output, --shared-prefix")
    options.input, options.output = options.input or INPUT, options.output or OUTPUT
    if options.shared_prefix >= options.input[0] and options.shared_prefix:
        parser.error(
            f"--shared-prefix {options.shared_prefix} leaves nothing of --input {options.input[0]} to differ"
        )
    return options


def _add_load(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", default="http://127.0.0.1:8000", help="the endpoint (http://127.0.0.1:8000)")
    where.add_argument(
        "--compare",
        nargs=2,
        default=[],
        metavar=("URL_A", "URL_B"),
        help="two endpoints, measured in turn with the same requests",
    )
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        default=ROUNDS,
        metavar="N",
        help=f"times that --compare measures each load on both, each with --requests ({ROUNDS})",
    )
    parser.add_argument(
        "--metrics",
        default="",
        metavar="URL[,URL]",
        help="whose /metrics are read, such as the --own-port of each router",
    )
    parser.add_argument(
        "--model", default="", help="name of the model; else the first that the endpoint names"
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=at_least(1),
        nargs="+",
        default=[8],
        metavar="N",
        help="closed loop: so many clients (8)",
    )
    load.add_argument(
        "--rate",
        type=_positive,
        nargs="+",
        default=[],
        metavar="R",
        help="open loop: R requests per second, Poisson",
    )
    parser.add_argument(
        "--requests",
        type=at_least(1),
        default=0,
        metavar="N",
        help="requests per load (100); with --compare per round",
    )
    parser.add_argument(
        "--duration", type=_positive, default=0.0, metavar="S", help="begin requests for so long instead"
    )
    parser.add_argument(
        "--warmup", type=at_least(0), default=4, metavar="N", help="requests before, not counted (4)"
    )
    parser.add_argument(
        "--timeout", type=_positive, default=600.0, metavar="S", help="longest wait for one answer (600)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (0)")


def _add_questions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input", type=lengths, default=None, metavar="N[-M]", help="tokens of a prompt (512)"
    )
    parser.add_argument(
        "--output", type=lengths, default=None, metavar="N[-M]", help="tokens of an answer (128)"
    )
    parser.add_argument(
        "--shared-prefix", type=at_least(0), default=0, metavar="N", help="tokens that all prompts share"
    )
    parser.add_argument(
        "--vocab", type=at_least(4), default=256, metavar="N", help="random ids are 3 to N-1 (256)"
    )
    parser.add_argument(
        "--prompts", default="", metavar="FILE", help='JSONL: {"prompt": ...} or {"messages": [...]}'
    )
    parser.add_argument(
        "--workload",
        default="",
        metavar="NAME|FILE",
        help="chat, turns or documents, or a JSONL file of lengths, conversations and prompts",
    )
    parser.add_argument(
        "--context",
        type=at_least(2),
        default=0,
        metavar="N",
        help="cut the requests of --workload so that prompt and answer have at most N tokens together",
    )
    parser.add_argument(
        "--take-turns",
        action="store_true",
        help="conversations of --workload take turns with each other: the one that waited longest is next",
    )
    parser.add_argument(
        "--own-answers",
        action="store_true",
        help="later turns of a conversation repeat the server's answers, not random tokens",
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--sampling",
        type=sampling(SAMPLING),
        default={"temperature": 0.0},
        metavar="NAME=VALUE[,NAME=VALUE...]",
        help=f"what requests say of {', '.join(SAMPLING)} (temperature=0)",
    )
    chosen.add_argument(
        "--temperature",
        type=_temperature,
        dest="sampling",
        default=argparse.SUPPRESS,
        help="short for --sampling temperature=TEMPERATURE",
    )
    parser.add_argument(
        "--plain", action="store_true", help="send OpenAI's fields alone: no ignore_eos, no token ids"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slo-ttft", type=_positive, default=0.0, metavar="MS", help="goodput: first token within MS"
    )
    parser.add_argument(
        "--slo-itl", type=_positive, default=0.0, metavar="MS", help="goodput: MS per later token (mean)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument(
        "--curve",
        default="",
        metavar="FILE",
        help="throughput against TTFT and TPOT over all loads, PNG; needs Pillow (extra plot)",
    )
    parser.add_argument(
        "--plot", default="", metavar="FILE", help="a picture of all loads, PNG; needs Pillow (extra plot)"
    )


def lengths(text: str) -> tuple[int, int]:
    """A range of lengths from `N` or `N-M`, in tokens. Any other text is a usage error."""
    low, _, high = text.partition("-")
    try:
        found = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither N nor N-M") from None
    if not 1 <= found[0] <= found[1] <= MOST_LENGTH:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of lengths from 1 up")
    return found


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _temperature(text: str) -> dict[str, float]:
    return {"temperature": 0.0 if _number(text) == 0 else _positive(text)}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
