"""The tree of errors that cross a process or floor boundary.

BatonError
├── ConfigError            a setting, file or command line is wrong; the message names the value and the
                           remedy
├── StartupError           the process cannot start (port in use, model does not load)
├── ProtocolError          a message is not of the protocol
│   ├── LocalProtocolError     fault of this process
│   └── RemoteProtocolError    fault of the peer
│       ├── DamagedMessage         the message changed on the way
│       └── UnknownMessage         the message's type belongs to another release
├── HandshakeRefused       two layouts do not agree; the message shows both
├── PeerLost               the peer went away, or is another instance now
├── TransferError          a hand-off failed
│   ├── HandoffAborted         prefill gave it up and has sent the reason to the router
│   ├── TransferTimeout        no progress within the lease
│   └── DigestMismatch         a block's bytes were wrong more often than allowed
├── Draining               a worker drains and hands its rooms back; not a fault
├── OutOfPages             a pool has too few free pages for a request
└── DeadlineExceeded       a request exceeded its time limit
"""


class BatonError(Exception):
    """Base of baton's errors; `str()` is one line for the user."""


class ConfigError(BatonError, ValueError):
    """A setting is wrong."""


class StartupError(BatonError):
    """The process cannot start."""


class ProtocolError(BatonError):
    """A message is not of the protocol."""


class LocalProtocolError(ProtocolError):
    """This process was about to break the protocol."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol."""


class DamagedMessage(RemoteProtocolError):
    """A message's checksum does not match its bytes."""


class UnknownMessage(RemoteProtocolError):
    """A message has a type that this release does not know."""


class HandshakeRefused(BatonError):
    """Two layouts do not agree."""


class PeerLost(BatonError):
    """The peer went away or restarted."""


class TransferError(BatonError):
    """A hand-off failed."""


class HandoffAborted(TransferError):
    """Prefill gave a hand-off up."""


class TransferTimeout(TransferError):
    """No progress within the lease."""


class DigestMismatch(TransferError):
    """A block's digest did not match, more often than allowed."""


class Draining(BatonError):
    """A worker leaves and hands its rooms back."""


class OutOfPages(BatonError):
    """A pool has too few free pages for a request."""


class DeadlineExceeded(BatonError):
    """A request exceeded its time limit."""
