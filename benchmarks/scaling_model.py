"""A small model of a chunk's time over Ulysses ranks, for `bench_scaling.py --simulate`.

    time(U) = T1 * (replicated + (1 - replicated) / U) + packing + sending

T1 is the measured time on one GPU; `replicated` the part that every rank repeats (keys and values of the text);
packing reads and writes what is exchanged once more on each side; sending is two all-to-alls a layer and pass.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What a GPU sends through, as achieved: 10^9 bytes a second, and microseconds a collective takes at least."""

    gbs: float
    us: float


@dataclass(frozen=True)
class Machine:
    gpus_per_node: int
    link: Link
    network: Link
    memory_gbs: float

    def __str__(self) -> str:
        return (f"{self.gpus_per_node} GPUs a node, {self.link.gbs:g} GB/s and {self.link.us:g} us within it, "
                f"{self.network.gbs:g} GB/s and {self.network.us:g} us between nodes")


@dataclass(frozen=True)
class Prediction:
    milliseconds: float
    communication_share: float


def work(geometry) -> tuple[float, float]:
    """Multiply-adds of one pass of one layer: (all, those that every Ulysses rank repeats)."""
    g, inner = geometry, geometry.heads * geometry.head_dim
    attention = 2 * g.tokens * (g.window_tokens + g.tokens) * inner
    if not g.ffn:
        return attention, 0.0
    kv_inner = g.kv_heads * g.head_dim
    linears = g.tokens * inner * (2 * inner + 2 * kv_inner + g.ffn_matrices * g.ffn)
    cross = 2 * g.tokens * inner * (inner + g.text) if g.text else 0.0  # its q and output projections, its scores
    text = 2.0 * g.text * inner * inner
    return attention + linears + cross + text, text


def exchanged_bytes(geometry, degree: int, element_bytes: int = 2) -> tuple[int, int]:
    """Bytes of one layer's q, k, v and of its output that a rank holds: what its two all-to-alls take in."""
    rows = -(-geometry.tokens // degree)
    token = geometry.head_dim * element_bytes
    return rows * (geometry.heads + 2 * geometry.kv_heads) * token, rows * geometry.heads * token


def sending_seconds(size: int, degree: int, machine: Machine) -> float:
    """An all-to-all of `size` bytes a rank: to peers within the node and to those outside, at the same time."""
    if degree == 1:
        return 0.0
    inside = min(degree, machine.gpus_per_node)
    within = size * (inside - 1) / degree / (machine.link.gbs * 1e9)
    if degree <= inside:
        return within + machine.link.us * 1e-6
    across = size * (degree - inside) / degree / (machine.network.gbs * 1e9)
    return max(within, across) + machine.network.us * 1e-6


def predict(geometry, chunk_ms: float, degree: int, machine: Machine) -> Prediction:
    """One chunk on `degree` ranks, given `chunk_ms` on one."""
    total, repeated = work(geometry)
    compute = chunk_ms * (repeated / total + (1 - repeated / total) / degree)
    passes = geometry.layers * (geometry.denoise + 1)
    qkv, out = exchanged_bytes(geometry, degree)
    sending = sum(sending_seconds(size, degree, machine) for size in (qkv, out))
    packing = 0.0 if degree == 1 else 2 * (qkv + out) / (machine.memory_gbs * 1e9)
    milliseconds = compute + 1000 * passes * (sending + packing)
    return Prediction(milliseconds, 1000 * passes * sending / milliseconds)
