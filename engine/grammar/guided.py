"""Output that follows a grammar: a mask of allowed next tokens for each sampled row.

The grammar is in llguidance's JSON form or Lark text. `grammar_compile_pool` compiles it beside the steps, so
only requests with this grammar wait for it. A `Guide` then follows the chosen tokens of all attempts and
looks ahead along drafts. Each mask therefore belongs to the branch of its row. A draft that the grammar
forbids is never sampled in the row before it, so the masks behind it do not matter.

llguidance bounds the states of a grammar's lexer, which all requests of the grammar share. At this bound a
guide takes a new compilation and follows its tokens once more. A request that reaches the bound alone fails,
as do the others only if the compilation would hold up the steps.

Legend: R rows, W words of 32 tokens each.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..sampling.edits import Mask
from .grammar_compile_pool import MAX_CPU_S, Compilation, Compilations, GuideError
from .grammar_tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

MAX_SYMBOLS = 131072  # per grammar, about 600 bytes each; routers enforce the same limit
MAX_STATES = 100_000  # of a grammar's lexer, over all requests since its compilation: some 70 MB


class Guide:
    """The position of one request in its grammar. The caller passes the `chosen` tokens, which only ever
    grow.
    """

    def __init__(
        self, compilation: Compilation, compilations: Compilations, vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        self._compilation = compilation
        self._compilations = compilations
        self._num_words = -(-vocab_size // 32)
        self._eos_ids = tuple(eos_ids)
        self._matcher: LLMatcher | None = None  # a copy for this request
        self._num_consumed = 0
        self._is_lost = False
        self._fault = ""  # the limit that stopped this request
        self._is_ours = False

    def __repr__(self) -> str:
        return f"<Guide {self._compilation!r}, {self._num_consumed} tokens>"

    @property
    def is_ready(self) -> bool:
        """Whether `masks` may be called."""
        return self._compilation.is_ready

    @property
    def fault(self) -> str:
        """The reason why the grammar cannot be followed; "" without a fault or before the result is known."""
        if not self._compilation.is_ready:
            self._compilations.check()
        return self._compilation.fault or self._fault

    @property
    def is_fault_ours(self) -> bool:
        """Whether another worker might follow the grammar."""
        return self._compilation.is_ours or self._is_ours

    def masks(self, chosen: Sequence[int], branches: Sequence[Sequence[int]]) -> Mask:
        """Masks int32 `[R, W]`: bit t % 32 of word t // 32 allows token t behind `chosen` and the branch of
        drafts.

        All bits are set behind a branch that the grammar forbids, because its row is never used. No bit is
        set after `chosen` itself left the grammar, and after a limit of llguidance, which `fault` then names.
        Raises AssertionError before `is_ready`.
        """
        assert self._compilation.matcher is not None, "masks before is_ready"
        masks = np.zeros((len(branches), self._num_words), dtype=np.int32)
        if self._fault:
            return masks
        limit = self._fill_all(masks, chosen, branches)
        for _ in range(2):  # the first that there is may be another request's, and nearly as worn
            if limit and self._begin_anew(limit):
                limit = self._fill_all(masks, chosen, branches)
        if limit:
            self._fault = self._fault or f"the grammar cannot be followed: {limit}"
            masks[:] = 0
        return masks

    def _begin_anew(self, limit: str) -> bool:
        """Takes a compilation without the states that other requests have left. Returns False if there is
        none at once.
        """
        renewed = None if self._fault else self._compilations.renew(self._compilation)
        if renewed is None:
            self._fault, self._is_ours = f"the grammar must be compiled again: {limit}", True
            return False
        self._compilation, self._matcher, self._num_consumed = renewed, None, 0
        return True

    def _fill_all(
        self, masks: npt.NDArray[np.int32], chosen: Sequence[int], branches: Sequence[Sequence[int]]
    ) -> str:
        """Fills `masks`; returns the limit of llguidance that does not allow it, "" for none."""
        if self._matcher is None:
            assert self._compilation.matcher is not None
            self._matcher = self._compilation.matcher.deep_copy()
        matcher = self._matcher
        self._follow(matcher, chosen)
        path: list[int] = []  # drafts that the matcher has consumed
        known: dict[tuple[int, ...], Mask] = {}
        for mask, branch in zip(masks, branches, strict=True):
            if self._is_lost or matcher.is_error():
                break
            if self._walk(matcher, path, branch):
                self._fill(matcher, mask)
                known[tuple(path)] = mask
            elif self._is_limit(matcher, known.get(tuple(path)), branch[len(path)]):
                matcher.compute_bitmask()  # names the limit
                break
            else:
                mask[:] = -1
        if matcher.is_error():
            return (matcher.get_error() or "a limit of llguidance").splitlines()[0][:200]
        matcher.rollback(len(path))
        return ""

    def _follow(self, matcher: LLMatcher, chosen: Sequence[int]) -> None:
        new = list(chosen[self._num_consumed :])
        if new and not self._is_lost:
            if matcher.try_consume_tokens(new) != len(new):
                matcher.compute_bitmask()  # says whether it was a limit
                self._is_lost = not matcher.is_error()
            self._num_consumed += len(new)

    def _walk(self, matcher: LLMatcher, path: list[int], branch: Sequence[int]) -> bool:
        """Moves the matcher from `path` to `branch`. Returns False if the grammar, the end of the output or a
        limit does not let it go on behind `path`.
        """
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

    def _is_limit(self, matcher: LLMatcher, before: Mask | None, token: int) -> bool:
        """Whether the matcher refused `token` for a limit, although the mask `before` it, if known, allows
        it. llguidance itself does not say which.
        """
        if token in self._eos_ids or matcher.is_stopped():
            return False
        if before is None:
            before = np.zeros(self._num_words, dtype=np.int32)
            self._fill(matcher, before)
        return _has(before.view(np.uint32), token)

    def _fill(self, matcher: LLMatcher, mask: Mask) -> None:
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        mask[:] = words[: self._num_words]
        bits = mask.view(np.uint32)
        if any(_has(bits, token) for token in self._eos_ids):
            for token in self._eos_ids:
                bits[token // 32] |= np.uint32(1 << token % 32)


class GrammarCompiler:
    """Compiles grammars over a model's tokenizer and keeps the most recent ones.

    `max_cpu_s`: seconds of processor time after which a grammar fails.
    """

    def __init__(
        self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int], max_cpu_s: float = MAX_CPU_S
    ) -> None:
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._limits = LLParserLimits(
            verbose_errors=False, max_grammar_size=MAX_SYMBOLS, max_lexer_states=MAX_STATES
        )
        self._tokenizer: LLTokenizer | None = None
        self._fault = ""  # of the tokenizer
        self._compilations = Compilations(self._compile, max_cpu_s)

    def __repr__(self) -> str:
        return f"<GrammarCompiler {self._compilations!r}>"

    def load(self) -> None:
        """Reads the tokenizer. Call it before serving starts.

        It takes half a second per 50,000 tokens, and no other thread runs meanwhile. Without a usable
        tokenizer, every grammar fails with the fault of the tokenizer.
        """
        if not self._path.is_file():
            self._fault = "the model's directory has no tokenizer.json, which guided decoding needs"
            return
        try:
            self._tokenizer = load_tokenizer(self._path, self._vocab_size, self._eos_ids)
        except Exception as error:  # the model can be served without a tokenizer for grammars
            self._fault = (
                f"guided decoding cannot use the model's tokenizer: {' '.join(str(error).split())[:200]}"
            )
            logger.warning("%s", self._fault)

    def guide(self, grammar: str) -> Guide | None:
        """Returns the guide of a request and begins the compilation of its grammar; None for an empty
        grammar.
        """
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
