"""`baton bench checkpoint DIR`: writes a checkpoint of random weights in a real shape, for measurements of
servers.

A server takes DIR/target as its `--model` and DIR/head as its `--draft`. They are the target and the EAGLE3
head of `bench/engine/model`: the target accepts a chosen number of the head's drafts. The tokenizer encodes
bytes.

With `--quantize` the target's matrices have the form and the names that published checkpoints give them. The
head stays in `--dtype`.

With `--answers N` there is no head, and answers end by themselves: at temperature 1 every token is about
equally likely, and one of N ends an answer. Lengths are then distributed geometrically around N. An answer
depends on its prompt and its `seed` alone.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from ...cluster.errors import ConfigError
from ...engine.config import DTYPES, resolve_device, resolve_dtype
from ...engine.errors import CheckpointError
from ...engine.models.layers import NamedTensors
from ...engine.models.weights import INDEX_FILE
from ...engine.parallel.vocabulary import rows_of
from ...engine.speculative.drafters.eagle3_head import Eagle3Head
from ..arguments import at_least
from .model import random_answers, random_head, stored_target
from .shapes import DRAFT_VOCABULARY, FORMS, MXFP4, SHAPES, form_keys, head_config, target_config

PROG = "baton bench checkpoint"
SHARD_BYTES = 2 << 30
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
FIRST_BYTE = 4  # the ids below it are special; target and head generate two of them

logger = logging.getLogger(__name__)


def write_checkpoint(
    folder: Path,
    shape: str,
    accept_length: int,
    *,
    draft_vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    answers: int = 0,
    layers: int = 0,
    quantize: str = "none",
) -> None:
    """Writes `folder`/target and `folder`/head, with weights made on `device`.

    `answers`: mean length of answers that end by themselves, and no head; 0: they end at `max_tokens`.
    `layers`: of the target; 0: as many as the shape has. `quantize`: the form of the target's matrices, a
    name in `shapes.FORMS`, MXFP4, or "none" for `dtype`.

    Raises ConfigError when one of the two directories exists, when `accept_length` is below 1, or for more
    layers than the shape has; CheckpointError for a form that the shape does not have or does not fit.
    """
    if accept_length < 1:
        raise ConfigError(f"--accept-length {accept_length}: every step yields at least one token; raise it")
    for name in ("target", "head"):
        if (folder / name).exists():
            raise ConfigError(f"{folder / name} exists; name another directory, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch:  # a refusal leaves neither directory behind
        made = Path(scratch)
        config = target_config(shape, "", made, quantize, layers)
        keys = form_keys(config, quantize)
        if answers:
            keys["eos_token_id"] = list(range(answers, config.vocab_size, answers))
        _add_keys(made / "target" / "config.json", keys)
        write_tokenizer(made / "target", config.vocab_size)
        dtype_name = str(dtype).removeprefix("torch.")
        drafts = None if answers else head_config(config, dtype_name, draft_vocab_size, made)
        tensors = (random_answers if answers else stored_target)(config, dtype, device).tensors()
        for part in made.iterdir():
            part.rename(folder / part.name)
    _write_shards(folder / "target", tensors)
    if drafts is not None:
        head = random_head(drafts, accept_length, dtype, device)
        _write_shards(folder / "head", _head_tensors(head, config.vocab_size))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of `vocab_size` tokens that encodes each byte of a text as one token.

    Token n of the others decodes to the word `tn`. Raises ConfigError when the vocabulary is too small for
    the bytes.
    """
    alphabet = sorted(ByteLevel.alphabet())
    if vocab_size < FIRST_BYTE + len(alphabet):
        raise ConfigError(f"a vocabulary of {vocab_size} holds no byte-level tokenizer; choose another shape")
    words = {f"\u0120t{n}": n for n in range(vocab_size)}  # U+0120 is the byte alphabet's letter for a space
    for n, letter in enumerate(alphabet, start=FIRST_BYTE):
        del words[f"\u0120t{n}"]
        words[letter] = n
    made = Tokenizer(BPE(words, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = ByteLevelDecoder()
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _add_keys(path: Path, keys: dict[str, object]) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | keys), encoding="utf-8")


def _head_tensors(head: Eagle3Head, vocab_size: int) -> NamedTensors:
    """The head's own tensors, with a draft vocabulary of the target's first `vocab_size` tokens."""
    yield from head.tensors()
    assert head.lm_head is not None
    yield "lm_head.weight", rows_of(head.lm_head)
    num_drafts = head.config.draft_vocab_size
    yield "d2t", torch.zeros(num_drafts, dtype=torch.int64)
    yield "t2d", torch.arange(vocab_size) < num_drafts


def _write_shards(folder: Path, tensors: NamedTensors) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(tensors)):
        name = f"model-{number + 1:05}.safetensors"
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
        logger.info("%s: %.1f GB", folder / name, total / 1e9)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


def _shards(tensors: NamedTensors) -> Iterator[dict[str, torch.Tensor]]:
    """`tensors` copied to the host and grouped into shards of about SHARD_BYTES bytes."""
    shard: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in tensors:
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += tensor.nbytes
        if held >= SHARD_BYTES:
            yield shard
            shard, held = {}, 0
    if shard:
        yield shard


def main(argv: Sequence[str]) -> int:
    """Runs `baton bench checkpoint` and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog=PROG, description=(__doc__ or "").split("\n\n")[1], allow_abbrev=False
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="where to: DIR/target and DIR/head")
    add(
        "--shape", choices=sorted(SHAPES), default="llama-3.1-8b", help="of the target (default llama-3.1-8b)"
    )
    add(
        "--accept-length", type=at_least(1), default=3, help="tokens that each EAGLE3 step yields (default 3)"
    )
    add(
        "--answers",
        type=at_least(2),
        default=0,
        metavar="N",
        help="mean tokens of answers that end by themselves, without a head; default: they never end",
    )
    add(
        "--layers",
        type=at_least(1),
        default=0,
        metavar="N",
        help="only the first N layers of the shape, where disk or memory hold no more (default: all)",
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
        help="where weights are made (default auto)",
    )
    add("--dtype", choices=("auto", *DTYPES), default="bfloat16", help="of the weights (default bfloat16)")
    add(
        "--quantize",
        choices=("none", *FORMS, MXFP4),
        default="none",
        help="the form of the target's matrices (default none: that of --dtype)",
    )
    options = parser.parse_args(list(argv))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    try:
        device = resolve_device(options.device)
        write_checkpoint(
            options.folder,
            options.shape,
            options.accept_length,
            draft_vocab_size=options.draft_vocab,
            dtype=resolve_dtype(options.dtype, device),
            device=device,
            answers=options.answers,
            layers=options.layers,
            quantize=options.quantize,
        )
    except (ConfigError, CheckpointError, OSError) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    draft = "" if options.answers else f" --draft {options.folder / 'head'}"
    sys.stdout.write(f"--model {options.folder / 'target'}{draft}\n")
    return 0
