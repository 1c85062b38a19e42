"""The cudnn backend: paged scaled-dot-product attention graphs of the cuDNN frontend, on Ampere, Hopper and Blackwell.

A graph is built once a geometry and kept for the life of the process; lengths and page tables are device tensors that
the kernel reads, so a call can be captured and replays with other pages. See `splits.py` for how a call is cut.
"""

import atexit
import functools
import importlib
import threading
from dataclasses import dataclass

import torch

from .. import ops
from .splits import Work, best_runs, cut_lists


_DTYPES = (torch.bfloat16, torch.float16)
_lock = threading.RLock()  # a handle serves one thread at a time, and threads (of a web server, say) come and go
_handles: dict[int, object] = {}
_graphs: dict["Geometry", "Graph"] = {}
atexit.register(_graphs.clear)  # before the frontend's own module goes


@functools.cache
def _import_error() -> str | None:
    """Why the cuDNN frontend cannot be used here, found out once."""
    try:
        cudnn = importlib.import_module("cudnn")
        mine, torchs = cudnn.backend_version(), torch.backends.cudnn.version()
    except Exception as error:  # a missing package, or a library that does not load
        return (f"the cuDNN frontend cannot be used ({type(error).__name__}: {error}); pip install "
                "nvidia-cudnn-frontend")
    if mine != torchs:
        return (f"the cuDNN frontend loaded cuDNN {mine}, torch has {torchs}: two versions in one process; install "
                "nvidia-cudnn-frontend into torch's environment, and keep other cuDNNs off LD_LIBRARY_PATH")
    if mine < 90500 or mine in (91000, 91001):
        return f"cuDNN {mine} has no usable paged attention: 9.5 or later is needed, and neither 9.10.0 nor 9.10.1"
    return None


def refuses(shape) -> str | None:
    if shape.device.type != "cuda":
        return f"it runs on CUDA devices, not on {shape.device.type}"
    if shape.dtype not in _DTYPES:
        return f"no kernel for {shape.dtype}: bfloat16 or float16"
    capability = torch.cuda.get_device_capability(shape.device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0 or later, this device has {capability[0]}.{capability[1]}"
    most = 256 if capability >= (9, 0) else 128
    if shape.head_dim % 8 or shape.head_dim > most:
        return f"head_dim {shape.head_dim} must be a multiple of 8, at most {most}"
    if shape.page_size < 4:
        return f"page_size {shape.page_size} must be at least 4"
    return _import_error()


@dataclass(frozen=True)
class Geometry:
    """Everything that a graph is built for."""

    device: int
    dtype: torch.dtype
    sequences: int
    rows: int
    heads: int
    head_dim: int
    q_stride: tuple[int, int, int]  # of a sequence, a row, a head
    o_stride: tuple[int, int, int]
    pool_shape: tuple[int, ...]
    pool_stride: tuple[int, ...]
    width: int
    scale: float
    ragged: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # where each sequence's q and o begin, in elements
    q_lens: tuple[int, ...] = ()
    lse: bool = False


class Graph:
    """One built graph with what it needs besides its inputs: constant lengths and offsets, a workspace."""

    Q, K, V, O, LSE, Q_LENS, KV_LENS, TABLE, Q_OFFSETS, O_OFFSETS = range(1, 11)  # noqa: E741

    def __init__(self, g: Geometry):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("cuDNN attention of a new geometry cannot be built during CUDA graph capture: run the "
                               "forward once before capturing it")
        import cudnn

        handle = _handle(g.device)
        io = cudnn.data_type.BFLOAT16 if g.dtype == torch.bfloat16 else cudnn.data_type.HALF
        f32, i32, n = cudnn.data_type.FLOAT, cudnn.data_type.INT32, g.sequences
        graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=f32, compute_data_type=f32, handle=handle)

        def tensor(name, uid, dim, stride, dtype):
            return graph.tensor(name=name, uid=uid, dim=list(dim), stride=list(stride), data_type=dtype)

        def heads_first(stride):
            return stride[0], stride[2], stride[1], 1

        kv = (g.pool_shape[0], *g.pool_shape[2:]), (g.pool_stride[0], *g.pool_stride[2:])
        one = (n, 1, 1, 1), (1, 1, 1, 1)
        q = tensor("q", self.Q, (n, g.heads, g.rows, g.head_dim), heads_first(g.q_stride), io)
        table = tensor("table", self.TABLE, (n, 1, g.width, 1), (g.width, g.width, 1, 1), i32)
        offsets = (n + 1, 1, 1, 1), (1, 1, 1, 1)
        if g.ragged:
            q.set_ragged_offset(tensor("q_offsets", self.Q_OFFSETS, *offsets, i32))
        o, lse = graph.sdpa(
            name="attention", q=q, k=tensor("k", self.K, *kv, io), v=tensor("v", self.V, *kv, io), attn_scale=g.scale,
            generate_stats=g.lse, use_padding_mask=True, seq_len_q=tensor("q_lens", self.Q_LENS, *one, i32),
            seq_len_kv=tensor("kv_lens", self.KV_LENS, *one, i32), paged_attention_k_table=table,
            paged_attention_v_table=table, paged_attention_max_seq_len_kv=g.width * g.pool_shape[3])
        o.set_output(True).set_uid(self.O).set_dim([n, g.heads, g.rows, g.head_dim])
        o.set_stride(list(heads_first(g.o_stride))).set_data_type(io)
        if g.ragged:
            o.set_ragged_offset(tensor("o_offsets", self.O_OFFSETS, *offsets, i32))
        if g.lse:
            lse.set_output(True).set_uid(self.LSE).set_dim([n, g.heads, g.rows, 1])
            lse.set_stride([g.heads * g.rows, g.rows, 1, 1]).set_data_type(f32)
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])

        device = torch.device("cuda", g.device)
        self._graph, self._handle = graph, handle
        self._workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)
        lens = g.q_lens or (g.rows,) * n
        self._constants = {self.Q_LENS: torch.tensor(lens, dtype=torch.int32, device=device)}
        if g.ragged:
            for uid, starts in zip((self.Q_OFFSETS, self.O_OFFSETS), g.ragged):
                self._constants[uid] = torch.tensor(starts, dtype=torch.int32, device=device)

    def __call__(self, tensors: dict[int, torch.Tensor]) -> None:
        import cudnn

        stream = torch.cuda.current_stream(self._workspace.device).cuda_stream
        cudnn.set_stream(handle=self._handle, stream=stream)
        self._graph.execute({**tensors, **self._constants}, self._workspace, handle=self._handle)


def _handle(device: int):
    import cudnn

    if device not in _handles:
        with torch.cuda.device(device):
            _handles[device] = cudnn.create_handle()
    return _handles[device]


def _execute(geometry: Geometry, tensors: dict[int, torch.Tensor]) -> None:
    with _lock:
        graph = _graphs.get(geometry)
        if graph is None:
            with torch.cuda.device(geometry.device):
                graph = _graphs[geometry] = Graph(geometry)
        graph(tensors)


def run(q: torch.Tensor, layer, plan, scale: float, runs: int = -1) -> torch.Tensor:
    """q [rows, heads, head_dim] over the pages of `plan`; `runs` as in `cudnn_paged_attention`."""
    state = plan._state
    return cudnn_paged_attention(q, layer.pool, plan.pages, plan.totals, state.state, plan.num_tokens,
                                 plan.causal_block_size, state.geometry.spec.window_tokens,
                                 plan._views.geometry.private_pages, runs, scale)


@torch.library.custom_op("bc_diffusers::cudnn_paged_attention", mutates_args=())
def cudnn_paged_attention(q: torch.Tensor, layer_pool: torch.Tensor, pages: torch.Tensor, totals: torch.Tensor,
                          state: torch.Tensor, num_tokens: int, causal_block_size: int, window_tokens: int,
                          private_pages: int, runs: int, scale: float) -> torch.Tensor:
    """Attention over page lists by cuDNN; see `reference_paged_attention` for the tensors.

    Args:
        state: of the rollout, which says what several causal blocks share.
        private_pages: how many pages of each list.
        runs: over how many sequences the keys (that all causal blocks see) are cut; 0 for one sequence a causal block
            and no merge, -1 for what the model of waves says.
    """
    work = Work.of(q, layer_pool, pages, num_tokens, causal_block_size, private_pages)
    if runs < 0:
        runs = best_runs(work)
    if runs == 0 and work.causal_blocks > 1 and num_tokens % causal_block_size:
        runs = 1  # one sequence a causal block must be of one length
    if q.stride(2) != 1 or q.stride(0) % 8 or q.stride(1) % 8 or q.data_ptr() % 16:
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    blocks, size = pages.shape[0], causal_block_size
    base = Geometry(
        device=q.device.index, dtype=q.dtype, sequences=blocks, rows=min(num_tokens, size), heads=q.shape[1],
        head_dim=q.shape[2], q_stride=(size * q.stride(0), q.stride(0), q.stride(1)),
        o_stride=(size * out.stride(0), out.stride(0), out.stride(1)), pool_shape=tuple(layer_pool.shape),
        pool_stride=layer_pool.stride(), width=pages.shape[1], scale=scale)
    tensors = {Graph.Q: q, Graph.K: layer_pool[:, 0], Graph.V: layer_pool[:, 1]}
    if runs == 0:
        _execute(base, {**tensors, Graph.O: out, Graph.KV_LENS: totals, Graph.TABLE: pages})
        if q.shape[0] > num_tokens:
            out[num_tokens:] = 0
        return out
    cut = cut_lists(state, pages, totals, work, runs, window_tokens)
    _cut_attention(base, tensors, cut, work, runs, out)
    return out


def _cut_attention(base: Geometry, tensors: dict, cut, work: Work, runs: int, out: torch.Tensor) -> None:
    """All rows over `runs` runs of the shared keys, and with several causal blocks each one's rows over the rest of
    its keys, in one launch; then the merge."""
    n, heads, dim, blocks, size = work.rows, work.heads, work.head_dim, work.causal_blocks, work.causal_block_size
    q_row, tails = base.q_stride[1], blocks > 1
    partials = out.new_empty(runs + tails, n, heads, dim)
    lse = torch.empty(cut.tables.shape[0], heads, n, dtype=torch.float32, device=out.device)
    one, row = n * heads * dim, heads * dim
    ragged, lens = None, ()
    if tails:
        starts = [j * size for j in range(blocks)]
        ragged = (tuple([0] * runs + [start * q_row for start in starts] + [n * q_row]),
                  tuple([i * one for i in range(runs)] + [runs * one + start * row for start in starts]
                        + [(runs + 1) * one]))
        lens = tuple([n] * runs + [min(size, n - start) for start in starts])
    geometry = Geometry(
        device=base.device, dtype=base.dtype, sequences=cut.tables.shape[0], rows=n, heads=heads, head_dim=dim,
        q_stride=(n * q_row if tails else 0, q_row, base.q_stride[2]), o_stride=(one, row, dim),
        pool_shape=base.pool_shape, pool_stride=base.pool_stride, width=cut.tables.shape[1], scale=base.scale,
        ragged=ragged, q_lens=lens, lse=True)
    _execute(geometry, {**tensors, Graph.O: partials, Graph.LSE: lse, Graph.KV_LENS: cut.lens,
                        Graph.TABLE: cut.tables})
    tail_lse = lse[runs:, :, :size].transpose(1, 2) if tails else None
    ops.merge_partials_(partials, lse[:runs].transpose(1, 2), out[:n], -1, cut.keys, tail_lse)
    if out.shape[0] > n:
        out[n:] = 0


@cudnn_paged_attention.register_fake
def _(q, layer_pool, pages, totals, state, num_tokens, causal_block_size, window_tokens, private_pages, runs, scale):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
