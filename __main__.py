"""The `baton` command: one subcommand per role and tool, each imported only when it is chosen."""

import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Sequence

from .cluster.config.fields import did_you_mean
from .cluster.distribution import DISTRIBUTION
from .cluster.process.process import EXIT_USAGE

PACKAGE = "baton"
COMMANDS = {
    "up": (".deploy.up.launcher", "start router, prefill and decode workers on this host and supervise them"),
    "router": (".router.__main__", "run the router: one OpenAI-compatible endpoint in front of the workers"),
    "prefill": (".prefill.__main__", "run a prefill worker"),
    "decode": (".decode.__main__", "run a decode worker"),
    "serve": (".deploy.up.serve", "run `up` without prefill workers: decode computes the prompts"),
    "chat": (".deploy.cli.chat", "chat with a running cluster in the terminal"),
    "top": (".deploy.cli.top", "watch a running cluster in the terminal"),
    "demo": (".deploy.cli.demo", "start a small cluster on this host and ask it one question"),
    "draft": (".training.command", "train a drafter on a model's answers, measure it, and roll it out"),
    "bench": (".bench.command", "measure parts of baton on this machine"),
    "doctor": (".deploy.cli.doctor", "find what would keep baton from serving on this host"),
    "drain": (".deploy.cli.drain", "end a worker of this host after its requests"),
    "role": (".deploy.cli.role", "change the role of a running worker"),
    "plan": (".deploy.cli.plan", "how many workers, how long a hand-off takes, and when not to disaggregate"),
    "deploy": (".deploy.packaging.files", "write systemd units"),
    "keys": (".deploy.keys.keys", "make the keys that authenticate the processes to each other"),
    "model": (".deploy.cli.demo_model", "fetch the demo model and print its directory"),
    "version": ("", "print versions"),
}
REPORTED = ("torch", "transformers", "pyzmq", "msgspec")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that `argv` (default: the process's arguments) names; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else "--help"
    if command in ("-h", "--help", "help"):
        print(usage())
        return 0
    if command in ("version", "--version") and len(words) > 1 and words[1] not in ("-h", "--help"):
        print(f"baton {command}: unknown argument {words[1]!r}", file=sys.stderr)
        return EXIT_USAGE
    if command in ("version", "--version"):
        print(versions())
        return 0
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS) or f"; commands: {', '.join(COMMANDS)}"
        print(f"baton: unknown command {command!r}{hint}", file=sys.stderr)
        return EXIT_USAGE
    module = importlib.import_module(COMMANDS[command][0], PACKAGE)
    code = module.main(words[1:])
    assert isinstance(code, int)
    return code


def usage() -> str:
    """The text of `baton --help`."""
    lines = [
        "usage: baton COMMAND [options]",
        "",
        "Disaggregated serving of large language models.",
        "",
        "commands:",
    ]
    lines += [f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", "`baton COMMAND --help` shows a command's options."])


def versions() -> str:
    """One line per component; nothing heavy is imported to find out."""
    lines = [f"baton {_version(DISTRIBUTION)}", f"python {platform.python_version()}"]
    return "\n".join(lines + [f"{name} {_version(name)}" for name in REPORTED])


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
