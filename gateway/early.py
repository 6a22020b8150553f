"""Start an engine's process before there is an event loop.  Watches it no longer than it must.

A server starts its engine first of all: while that imports what takes seconds, the server imports
its own libraries and looks at the model.  The engine makes nothing before it is told to go on, so
that what the server refuses is said once, and by the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


class Early:
    """The process `command --socket PATH --parent PID --after FD`; leaving the block ends it.

    A link that is given it (socket_link.py) watches and ends it as one of its own.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it; raise OSError.  `environment` of the process; None = ours."""
        self.command, self.environment = command, environment
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-"))  # of its socket; mode 0700
        word, self._word = os.pipe()
        try:
            # Its own process group: Ctrl-C in the terminal reaches the gateway only, which drains.
            self._popen = subprocess.Popen(  # noqa: S603 our own program
                [*command, "--socket", str(self.path), "--parent", str(os.getpid()),
                 "--after", str(word)],
                pass_fds=[word], start_new_session=True, env=environment,
            )
        except BaseException:
            self._close()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            os.close(word)

    def __enter__(self) -> Early:
        return self

    def __exit__(self, *_: object) -> None:
        """Make sure that it is gone, and its folder."""
        self._close()
        self.kill()
        self._popen.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def path(self) -> Path:
        """Its socket."""
        return self.folder / "engine.sock"

    def go(self) -> None:
        """Have it load the model."""
        with contextlib.suppress(OSError):  # it has ended, and whoever watches it will say so
            os.write(self._word, b"\n")
        self._close()

    def _close(self) -> None:
        if self._word >= 0:
            os.close(self._word)
        self._word = -1

    # -- as asyncio's Process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs, or nobody waits for it."""
        return self._popen.returncode

    def send_signal(self, number: int) -> None:
        """Nothing when it has ended."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """The same."""
        self._popen.kill()

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def tell(code: int) -> None:
            if not ended.done():
                ended.set_result(code)

        def watch() -> None:
            code = self._popen.wait()
            with contextlib.suppress(RuntimeError):  # the loop has ended before it
                loop.call_soon_threadsafe(tell, code)

        # A thread of its own, that nobody waits for: the loop's are joined when the loop ends.
        threading.Thread(target=watch, name="engine-end", daemon=True).start()
        return await ended
