"""The name under which baton is installed with pip.

The package index has a project of others called `baton`. Therefore the distribution has another name than the
package and the command, which are `baton`.
"""

DISTRIBUTION = "baton-serve"


def install_command(extra: str) -> str:
    """The command that installs baton with the optional dependencies `extra`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
