"""Output that follows a grammar: which tokens may come next, as a mask per row that is sampled.

The grammar is llguidance's (its own JSON form, or Lark text). It is compiled beside the steps, as
`compilations` has it: a request whose grammar is not ready yet waits, and nobody else. A `Guide` then follows
the tokens that were chosen, in any attempt, and looks ahead along drafts, so that a mask is that of the row's
own branch; a draft that the grammar forbids is never the choice of the row before it, whatever stands behind
it.

Legend: R rows, W words of 32 tokens each.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..sampling.edits import Mask
from .grammar_compile_pool import Compilation, Compilations, GuideError
from .grammar_tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

MAX_SYMBOLS = 131072  # of a grammar, each of which takes some 600 bytes; routers send none of more


class Guide:
    """The place of one request in its grammar. `chosen` tokens are told by the caller; they never change."""

    def __init__(
        self, compilation: Compilation, compilations: Compilations, vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        self._compilation = compilation
        self._compilations = compilations
        self._num_words = -(-vocab_size // 32)
        self._eos_ids = tuple(eos_ids)
        self._matcher: LLMatcher | None = None  # this request's own
        self._num_consumed = 0
        self._is_lost = False

    def __repr__(self) -> str:
        return f"<Guide {self._compilation!r}, {self._num_consumed} tokens>"

    @property
    def is_ready(self) -> bool:
        """Whether `masks` may be asked for."""
        return self._compilation.is_ready

    @property
    def fault(self) -> str:
        """Why the grammar cannot be followed, "" when it can or is not known yet."""
        if not self._compilation.is_ready:
            self._compilations.check()
        return self._compilation.fault

    @property
    def is_fault_ours(self) -> bool:
        """Whether another worker might follow it."""
        return self._compilation.is_ours

    def masks(self, chosen: Sequence[int], branches: Sequence[Sequence[int]]) -> Mask:
        """Masks `[R, W]`: bit t % 32 of word t // 32 says that token t may come behind `chosen` and the
        branch of drafts.

        All bits are set behind a branch that the grammar forbids, which nobody will ask for; none where it
        has lost its way.
        """
        if self._matcher is None:
            assert self._compilation.matcher is not None, "masks before is_ready"
            self._matcher = self._compilation.matcher.deep_copy()
        matcher = self._matcher
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
        """Brings the matcher from `path` to `branch`; False where the grammar, or the end of the output,
        forbids it."""
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
    """Compiles grammars over a model's tokenizer; the last ones are kept."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._limits = LLParserLimits(verbose_errors=False, max_grammar_size=MAX_SYMBOLS)
        self._tokenizer: LLTokenizer | None = None
        self._fault = ""  # of the tokenizer
        self._compilations = Compilations(self._compile)

    def __repr__(self) -> str:
        return f"<GrammarCompiler {self._compilations!r}>"

    def load(self) -> None:
        """Reads the tokenizer, before anything is served: that takes half a second for each 50,000 tokens, in
        which no other thread runs. Without a tokenizer that can be used the grammars that are asked for
        cannot be followed.
        """
        if not self._path.is_file():
            self._fault = "the model's directory has no tokenizer.json, which guided decoding needs"
            return
        try:
            self._tokenizer = load_tokenizer(self._path, self._vocab_size, self._eos_ids)
        except Exception as error:  # whatever is wrong with it, the model can be served without
            self._fault = (
                f"guided decoding cannot use the model's tokenizer: {' '.join(str(error).split())[:200]}"
            )
            logger.warning("%s", self._fault)

    def guide(self, grammar: str) -> Guide | None:
        """The guide of a request, whose grammar is compiled meanwhile; None without a grammar."""
        if not grammar:
            return None
        return Guide(self._compilations.ask(grammar), self._compilations, self._vocab_size, self._eos_ids)

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            raise GuideError(self._fault or "the tokenizer was not loaded")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GuideError(f"the grammar cannot be followed: {matcher.get_error()[:200]}")
        return matcher


def _has(bits: npt.NDArray[np.uint32], token: int) -> bool:
    return bool(bits[token // 32] >> np.uint32(token % 32) & np.uint32(1))
