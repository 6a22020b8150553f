"""Show a person how far the weights are loaded, on stderr if it is a terminal.  Loads nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def shown() -> Iterator[Callable[[int, int], None] | None]:
    """Where to report (done, total) in bytes while the block lasts; None when nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # late: engines without a terminal do not need it
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    with Progress(
        "weights", BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        console=Console(stderr=True), transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("weights", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
