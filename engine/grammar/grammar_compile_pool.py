"""Compiles grammars in threads beside the decode steps, each within a bounded processor time.

The compiler releases the interpreter lock, so compilation costs the steps processor time only. Where both
need the same core, a compiler thread gets a tenth of a step's share. A thread cannot be ended. After
MAX_CPU_S on one grammar, the pool gives the thread up: the requests that wait for this grammar fail, as do
later requests for it. Another thread takes its place, and the abandoned thread continues at the lowest
priority. The interpreter must not exit under a thread that returns from native code, because the process
would end by SIGSEGV. Exit therefore waits for running threads, LAST_S at most.

    waiting    NUM_THREADS others run; a grammar without a waiting request is never begun
    running    in a thread of its own
    given up   exceeded its time; with MAX_GIVEN_UP of these, no unknown grammar is begun
    kept       compiled or failed: the last MAX_KEPT that were asked for

The memory of a compiled grammar follows from its compile time: 60 to 200 MB per second with llguidance 1.9.
The pool therefore accounts for time. Kept grammars may hold half of HELD_S. A grammar that would exceed the
rest is refused.

All requests of a grammar share the lexer of its compilation, whose states only ever grow. When one of them
runs into the limit of states, the compilation is worn: all fail, later ones too. `renew` replaces it.
"""

import os
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from llguidance import LLMatcher

NUM_THREADS = 3  # as many as a router compiles at a time
MAX_GIVEN_UP = 4
MAX_KEPT = 64
MAX_CPU_S = 2.0  # of processor time; the router's trial compile gets the same wall time
HELD_S = 6.0  # of processor time for all grammars in use or kept: half a gigabyte
SMALL_S = 0.01  # cheaper grammars are never refused for lack of memory
RENEWED_S = 0.05  # of compilation: cheaper grammars are compiled again between two steps
LAST_S = 5.0  # wall time to finish MAX_CPU_S on a busy machine
NICE, NICEST = 10, 19  # a tenth of a step's share of a core; idle time only


class GuideError(Exception):
    """A grammar that this worker cannot follow."""


class Compilation:
    """The compilation of one grammar.

    `fault` tells why the grammar cannot be followed. `is_ours`: the fault belongs to this worker at this
    time, so another worker may follow the grammar.
    """

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.matcher: LLMatcher | None = None
        self.fault = ""
        self.is_ours = False
        self.cost_s = 0.0  # processor time that went into the matcher
        self.thread: threading.Thread | None = None
        self._thread_id = 0  # the id that the kernel uses
        self._clock: Callable[[], float] | None = None  # processor time of its thread
        self._began = 0.0

    def __repr__(self) -> str:
        return f"<Compilation {'ready' if self.matcher is not None else self.fault or 'open'}>"

    @property
    def is_ready(self) -> bool:
        return self.matcher is not None and not self.fault

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time that the compilation has used so far."""
        if self._clock is None:
            return 0.0
        try:
            return self._clock() - self._began
        except OSError:  # the thread has just ended
            return 0.0

    def begin(self) -> None:
        """Binds the compilation to the current thread."""
        self._thread_id = threading.get_native_id()
        _yield_to_steps(self._thread_id, NICE)
        clock = _clock_of_this_thread()
        self._began = clock()
        self._clock = clock

    def step_back(self) -> None:
        _yield_to_steps(self._thread_id, NICEST)


class Compilations:
    """A pool of compilations by `compile_grammar`, which may raise. One thread calls its methods."""

    def __init__(
        self,
        compile_grammar: Callable[[str], LLMatcher],
        max_cpu_s: float = MAX_CPU_S,
        held_s: float = HELD_S,
    ) -> None:
        self._compile = compile_grammar
        self._max_cpu_s = max_cpu_s
        self._held_s = held_s
        self._lock = threading.Lock()
        self._waiting: deque[weakref.ref[Compilation]] = deque()  # the asking guides hold the references
        # Waiting and running compilations.
        self._open: weakref.WeakValueDictionary[str, Compilation] = weakref.WeakValueDictionary()
        self._running: set[Compilation] = set()
        self._given_up: set[Compilation] = set()
        self._kept: OrderedDict[str, Compilation] = OrderedDict()
        self._held: weakref.WeakSet[Compilation] = weakref.WeakSet()  # compiled; kept or in use
        # Runs at the exit of the process, because threads hold this object until then.
        weakref.finalize(self, _leave, self._lock, self._waiting, self._running)

    def __repr__(self) -> str:
        return (
            f"<Compilations {len(self._running)} running, {len(self._given_up)} given up, "
            f"{len(self._kept)} kept>"
        )

    def ask(self, grammar: str) -> Compilation:
        """Returns the compilation of `grammar` and begins it if it is unknown."""
        with self._lock:
            known = self._kept.get(grammar) or self._open.get(grammar)
            if known is None:
                known = self._open[grammar] = Compilation(grammar)
                self._waiting.append(weakref.ref(known))
                self._pump()
            elif grammar in self._kept:
                self._kept.move_to_end(grammar)
            return known

    def renew(self, worn: Compilation) -> Compilation | None:
        """A compilation of the same grammar without its states. Returns None if it would take too long here:
        the next request begins it.
        """
        with self._lock:
            known = self._kept.get(worn.grammar)
            if known is not None and known is not worn:
                return known if known.is_ready else None
            self._kept.pop(worn.grammar, None)
        if worn.cost_s > RENEWED_S:
            return None
        renewed = Compilation(worn.grammar)
        renewed.cost_s = worn.cost_s
        try:
            renewed.matcher = self._compile(worn.grammar)
        except GuideError:  # it was followed before
            return None
        with self._lock:
            self._held.add(renewed)
            self._keep(renewed)
        return renewed

    def check(self) -> None:
        """Gives up compilations that exceed their time, even those without a waiting request. Waiting callers
        poll it.
        """
        for compilation in list(self._running):  # threads of grammars change it meanwhile
            if compilation.cpu_s > self._max_cpu_s:
                self._give_up(compilation)

    def _give_up(self, compilation: Compilation) -> None:
        with self._lock:
            if compilation in self._running:  # it has not ended meanwhile
                self._running.remove(compilation)
                self._given_up.add(compilation)
                compilation.fault = f"the grammar takes more than {self._max_cpu_s:g} s to compile"
                self._keep(compilation)
                compilation.step_back()
                self._pump()

    def _pump(self) -> None:
        """Starts waiting compilations while threads are free."""
        while self._waiting and (len(self._running) < NUM_THREADS or len(self._given_up) >= MAX_GIVEN_UP):
            compilation = self._waiting.popleft()()
            if compilation is None:  # no request waits for it any more
                continue
            if len(self._given_up) >= MAX_GIVEN_UP:
                self._turn_away(
                    compilation, f"{len(self._given_up)} grammars that take too long are being compiled here"
                )
                continue
            self._running.add(compilation)
            try:  # a daemon thread cannot block the exit of the process
                thread = threading.Thread(target=self._run, args=(compilation,), name="grammar", daemon=True)
                thread.start()
                compilation.thread = thread  # set only after the start succeeded, to avoid a reference cycle
            except RuntimeError as error:  # the user's limit of threads
                self._running.remove(compilation)
                self._turn_away(compilation, f"no thread can be started for a grammar: {error}")

    def _run(self, compilation: Compilation) -> None:
        matcher, fault = None, ""
        try:
            compilation.begin()
            matcher = self._compile(compilation.grammar)
        # Any error concerns this grammar alone. A panic of the compiler does not derive from Exception.
        except BaseException as error:
            fault = str(error) or type(error).__name__
        cost_s = compilation.cpu_s
        with self._lock:
            if compilation in self._running:
                self._settle(compilation, matcher, fault, cost_s)
            self._running.discard(compilation)
            self._given_up.discard(compilation)
            self._pump()

    def _settle(self, compilation: Compilation, matcher: LLMatcher | None, fault: str, cost_s: float) -> None:
        if matcher is not None and cost_s > SMALL_S:
            self._make_room(cost_s)
            if sum(one.cost_s for one in self._held) + cost_s > self._held_s:
                return self._turn_away(
                    compilation, "the grammars in use here hold as much memory as they may"
                )
        compilation.matcher, compilation.fault = matcher, fault
        if matcher is not None:
            compilation.cost_s = cost_s
            self._held.add(compilation)
        return self._keep(compilation)

    def _make_room(self, cost_s: float) -> None:
        """Evicts kept grammars until one more of this cost fits. Small grammars do not count."""
        costly = [one for one in self._kept.values() if one.cost_s > SMALL_S]
        total = sum(one.cost_s for one in costly) + cost_s
        for one in costly:
            if total <= self._held_s / 2:
                break
            total -= one.cost_s
            del self._kept[one.grammar]

    def _turn_away(self, compilation: Compilation, fault: str) -> None:
        compilation.fault, compilation.is_ours = fault, True
        del self._open[compilation.grammar]

    def _keep(self, compilation: Compilation) -> None:
        self._kept[compilation.grammar] = compilation
        self._open.pop(compilation.grammar, None)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)


def _leave(lock: threading.Lock, waiting: deque[weakref.ref[Compilation]], running: set[Compilation]) -> None:
    """Starts no further compilation and waits for the running ones."""
    with lock:
        waiting.clear()
        threads = [compilation.thread for compilation in running]
    end = time.monotonic() + LAST_S
    for thread in threads:
        if thread is not None:
            thread.join(max(0.0, end - time.monotonic()))


def _clock_of_this_thread() -> Callable[[], float]:
    """A clock of this thread's processor time in seconds; wall time on platforms without such a clock."""
    if sys.platform != "linux":
        return time.monotonic
    return partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))


def _yield_to_steps(thread_id: int, nice: int) -> None:
    """Lowers the priority of one thread, and never raises it, as root could. Only Linux supports this."""
    if sys.platform == "linux":
        with suppress(OSError):  # a filter of system calls may not allow it
            now = os.getpriority(os.PRIO_PROCESS, thread_id)
            os.setpriority(os.PRIO_PROCESS, thread_id, max(now, nice))
