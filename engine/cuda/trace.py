"""Which stage of a step each kernel of a device trace belongs to.  Records no trace.

Kernels of neighbours may overlap (kernels/overlap.py): the later one then waits for most of that
time, so it belongs to the earlier one.  Products carry one name whatever they compute; which one it
is follows from the order in which a layer runs them.  A device's draft launches products, norms and
rotations of its own: from its first kernel on all is the draft's, until the next forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

PRODUCTS = ("qkv", "out", "gate_up", "down", "head")
DRAFT, COPIES, GAPS, OTHER = "draft", "copies", "gaps", "other"
STAGES = (*PRODUCTS, "attention", "norms, rope, embed", "sampler", DRAFT, COPIES, OTHER, GAPS)

FIRST = "_embed"  # the kernel that begins a forward pass
_NAMES = {
    "attention": ("_short_kernel", "_chunk_kernel"),
    "norms, rope, embed": ("_norm", "_rotate_kernel", FIRST),
    "sampler": ("_score", "_pick", "_walk", "_pivot", "_compact", "_finish", "_search",
                "_chunk", "_row"),
    # Those that nothing but a draft launches (kernels/chain_*.py).
    DRAFT: ("_take", "_begin", "_inputs", "_norms", "_attend", "_merge", "_draw"),
    COPIES: ("_update",),
}  # fmt: skip
_STAGE = dict(chain.from_iterable(((name, stage) for name in names)
                                  for stage, names in _NAMES.items()))
_COPIES = ("Memcpy", "Memset")
_OURS = ("_project", "_product")
_LIBRARY = ("nvjet", "cublas", "gemm", "gemv", "cutlass", "xmma")  # what cuBLAS calls its kernels
_SECOND = ("reduce", "reduction")  # in the name of its second kernel for one product


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel or copy on the device; microseconds."""

    name: str
    start: float
    end: float


@dataclass(slots=True)
class Shares:
    """What each stage took of the trace's time, in microseconds."""

    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    unknown: set[str] = field(default_factory=set)  # names behind OTHER

    @property
    def total(self) -> float:
        """From the first start to the last end."""
        return sum(self.times.values())


def shares(spans: Iterable[Span], layers: int) -> Shares:
    """Divide the time of a trace of steps by stage; nothing is counted twice or left out.

    `layers` of the model tell its last `down` from the others: the next product is the head's.
    """
    found = Shares()
    order = _Order(layers)
    reached: float | None = None
    for span in sorted(spans, key=lambda span: span.start):
        stage = _stage(span.name, order)
        if stage == OTHER:
            found.unknown.add(span.name)
        if reached is None:
            reached = span.start
        found.times[GAPS] += max(0.0, span.start - reached)
        found.times[stage] += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return found


def waits(spans: Iterable[Span]) -> list[float]:
    """Microseconds between a step's last kernel and the next step's first, for each two steps.

    Copies lie within: a step that needs the host waits for them too.
    """
    found: list[float] = []
    last: float | None = None
    for span in sorted(spans, key=lambda span: span.start):
        if _copied(span.name):
            continue
        if span.name == FIRST and last is not None:
            found.append(max(0.0, span.start - last))
        last = span.end if last is None else max(last, span.end)
    return found


def _stage(name: str, order: _Order) -> str:
    if name == FIRST:
        order.begin()
    if _copied(name):
        return COPIES
    stage = _STAGE.get(name)
    if stage == DRAFT:
        order.drafts = True
    if order.drafts:
        return DRAFT
    if stage:
        return stage
    if name == "_gate":  # follows a product by cuBLAS
        return "gate_up"
    lower = name.lower()
    if name in _OURS:
        return order.next()
    if any(part in lower for part in _LIBRARY):
        return order.same() if any(part in lower for part in _SECOND) else order.next()
    return OTHER


def _copied(name: str) -> bool:
    return name.startswith(_COPIES) or _STAGE.get(name) == COPIES


class _Order:
    """The products of a forward pass one after the other."""

    def __init__(self, layers: int) -> None:
        self._layers, self._done = layers, 0
        self.begin()

    def begin(self) -> None:
        """A forward pass begins."""
        self._done, self.drafts = 0, False

    def next(self) -> str:
        """Which product comes now."""
        self._done += 1
        return self.same()

    def same(self) -> str:
        """Which product came last."""
        layer, place = divmod(max(0, self._done - 1), 4)
        return PRODUCTS[place] if layer < self._layers else "head"
