"""Listening sockets, bound before anything slow is imported.  Serves nothing, knows no HTTP."""

from __future__ import annotations

import errno
import socket

from gateway.config import GatewayConfig

EXIT_PORT_TAKEN = 98


class PortTaken(OSError):
    """Another process listens there; the message says what to do."""


def bind(host: str, port: int, backlog: int = 2048) -> socket.socket:
    """A listening socket, bound before anything slow is loaded; raise PortTaken or OSError."""
    return _bound(host, port, backlog)


def bind_shared(host: str, port: int, count: int, backlog: int = 2048) -> list[socket.socket]:
    """`count` listening sockets on one port, among which the kernel spreads the connections.

    For several processes of one server (Linux).  Any other process of the same user could join a
    port that is shared; see `check_free`.  Raise PortTaken or OSError.
    """
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(_bound(host, port, backlog, socket.SO_REUSEPORT))
            port = sockets[0].getsockname()[1]  # the first one picks, when it is 0
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def listen(config: GatewayConfig) -> list[socket.socket]:
    """The sockets of a server, one for each worker; raise PortTaken or OSError."""
    if config.workers == 1:
        return [bind(config.host, config.port, config.backlog)]
    check_free(config.host, config.port)
    return bind_shared(config.host, config.port, config.workers, config.backlog)


def check_free(host: str, port: int) -> None:
    """Raise PortTaken when anybody listens there, be it on a shared port."""
    _bound(host, port, 1).close()


def _bound(host: str, port: int, backlog: int, *options: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in (socket.SO_REUSEADDR, *options):
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind((host, port))
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                error.errno,
                f"Port {port} on {host} is taken by another process. Stop it, or choose another "
                f"port with --port (0 picks a free one).",
            ) from None
        raise
    sock.setblocking(False)
    return sock
