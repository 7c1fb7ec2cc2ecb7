"""Output that follows a grammar: which tokens may come next, as a mask per row that is sampled.

The grammar is llguidance's (its own JSON form, or Lark text). It is compiled in a thread, beside the steps: a request
whose grammar is not ready yet waits, and nobody else. A `Guide` then follows the tokens that were chosen, in any attempt,
and looks ahead along drafts, so that a mask is that of the row's own branch; a draft that the grammar forbids is never the
choice of the row before it, whatever stands behind it.

Legend: R rows, W words of 32 tokens each.
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_KEPT = 64  # compiled grammars

Mask = npt.NDArray[np.int32]


class GuideError(Exception):
    """A grammar that cannot be followed here."""


class Guide:
    """The place of one request in its grammar. `chosen` tokens are told by the caller; they never change."""

    def __init__(self, matcher: "Future[LLMatcher]", vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._future = matcher
        self._num_words = -(-vocab_size // 32)
        self._eos_ids = tuple(eos_ids)
        self._num_consumed = 0
        self._is_lost = False

    def __repr__(self) -> str:
        state = "pending" if not self._future.done() else self.fault or "ready"
        return f"<Guide {state}, {self._num_consumed} tokens>"

    @property
    def is_ready(self) -> bool:
        """Whether `masks` may be asked for."""
        return self._future.done() and not self.fault

    @property
    def fault(self) -> str:
        """Why the grammar cannot be followed, "" when it can or is not known yet."""
        error = self._future.exception() if self._future.done() else None
        return "" if error is None else str(error) or type(error).__name__

    def masks(self, chosen: Sequence[int], branches: Sequence[Sequence[int]]) -> Mask:
        """Masks `[R, W]`: bit t % 32 of word t // 32 says that token t may come behind `chosen` and the branch of drafts.

        All bits are set behind a branch that the grammar forbids, which nobody will ask for; none where it has lost its way.
        """
        matcher = self._future.result()
        self._follow(matcher, chosen)
        masks = np.zeros((len(branches), self._num_words), dtype=np.int32)
        path: list[int] = []  # drafts that the matcher has consumed
        for mask, branch in zip(masks, branches, strict=True):
            if self._is_lost:
                continue
            if self._walk(matcher, path, branch):
                self._fill(matcher, mask)
            else:
                mask[:] = -1
        matcher.rollback(len(path))
        return masks

    def _follow(self, matcher: LLMatcher, chosen: Sequence[int]) -> None:
        new = list(chosen[self._num_consumed :])
        if new and not self._is_lost:
            self._is_lost = matcher.try_consume_tokens(new) != len(new)
            self._num_consumed += len(new)

    def _walk(self, matcher: LLMatcher, path: list[int], branch: Sequence[int]) -> bool:
        """Brings the matcher from `path` to `branch`; False where the grammar, or the end of the output, forbids it."""
        common = 0
        while common < min(len(path), len(branch)) and path[common] == branch[common]:
            common += 1
        if common < len(path):
            matcher.rollback(len(path) - common)
            del path[common:]
        for token in branch[common:]:
            if token in self._eos_ids or matcher.is_stopped() or matcher.try_consume_tokens([token]) != 1:
                return False
            path.append(token)
        return True

    def _fill(self, matcher: LLMatcher, mask: Mask) -> None:
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        mask[:] = words[: self._num_words]
        if matcher.is_error():
            mask[:] = 0
        bits = mask.view(np.uint32)
        if any(_has(bits, token) for token in self._eos_ids):
            for token in self._eos_ids:
                bits[token // 32] |= np.uint32(1 << token % 32)


class GrammarCompiler:
    """Compiles grammars over a model's tokenizer in a thread of its own; the last ones are kept."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._limits = LLParserLimits(verbose_errors=False)
        self._threads: ThreadPoolExecutor | None = None
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()  # of the thread

    def __repr__(self) -> str:
        return f"<GrammarCompiler {len(self._kept)} grammars>"

    @property
    def is_able(self) -> bool:
        """Whether there is a tokenizer to compile for."""
        return self._path.is_file()

    def guide(self, grammar: str) -> Guide | None:
        """The guide of a request, whose grammar is compiled meanwhile; None without a grammar."""
        if not grammar:
            return None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        return Guide(self._threads.submit(self._compile, grammar), self._vocab_size, self._eos_ids)

    def _compile(self, grammar: str) -> LLMatcher:
        known = self._kept.get(grammar)
        if known is None:
            known = LLMatcher(self._load(), grammar, log_level=0, limits=self._limits)
            if known.is_error():
                raise GuideError(f"the grammar cannot be followed: {known.get_error()[:200]}")
            self._kept[grammar] = known
        self._kept.move_to_end(grammar)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return known.deep_copy()

    def _load(self) -> LLTokenizer:
        if self._tokenizer is None:
            if not self.is_able:
                raise GuideError("the model's directory has no tokenizer.json, which guided decoding needs")
            eos = self._eos_ids[0] if self._eos_ids else None
            self._tokenizer = LLTokenizer(str(self._path), n_vocab=self._vocab_size, eos_token=eos)
        return self._tokenizer


def _has(bits: npt.NDArray[np.uint32], token: int) -> bool:
    return bool(bits[token // 32] >> np.uint32(token % 32) & np.uint32(1))
