"""The audit hook of every node in fault tests: once a node serves, data never becomes code and nothing is spawned.

A forbidden event prints a line with MARK, which fails the row, and raises. Imports may come late (libraries import on
first use): what importlib itself loads is let through, and what traceback parses to mark the place in a line.
"""

import sys
import traceback

from baton.cluster import life

MARK = "AUDIT VIOLATION"
SPAWNING = frozenset({"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork", "pickle.find_class"})
LOADING = frozenset({"marshal.loads", "exec", "compile"})
IMPORTERS = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>", "<frozen zipimport>")


class Hook:
    """Armed from the moment that the role serves until it leaves."""

    def __init__(self) -> None:
        self.is_armed = False

    def __call__(self, event: str, arguments: tuple) -> None:
        if not self.is_armed or (event not in SPAWNING and event not in LOADING):
            return
        if event in LOADING and _is_import():
            return
        self.is_armed = False  # the report itself may compile or load
        sys.stderr.write(f"{MARK} {event} {str(arguments)[:200]}\n{''.join(traceback.format_stack(limit=8))}")
        sys.stderr.flush()
        raise RuntimeError(f"{event} is forbidden while serving")


def install() -> None:
    """In a node, before its `__main__` is imported."""
    hook = Hook()
    sys.addaudithook(hook)
    run_role = life.run_role

    def watched(prog, start, env=None):
        def start_watched():
            serve = start()

            def serve_watched():
                hook.is_armed = True
                try:
                    return serve()
                finally:
                    hook.is_armed = False

            return serve_watched

        return run_role(prog, start_watched, *(() if env is None else (env,)))

    life.run_role = watched


def _is_import() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename in (*IMPORTERS, traceback.__file__):
            return True
        frame = frame.f_back
    return False
