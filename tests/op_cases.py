"""Random calls of every operator, on the CPU: `CASES[name](seed)` -> (args, kwargs). Shapes, dtypes, strides, offsets
and aliasing vary; every tensor's storage is filled, gaps included, so that a write beside the target shows."""

import random

import torch

from bc_diffusers.cache.geometry import Geometry
from bc_diffusers.cache.spec import RolloutSpec
from bc_diffusers.cache.state import RolloutState


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def noise(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def rows_of(r, rows, heads, dim, dtype, seed):
    """[rows, heads, dim] with last stride 1: contiguous, a slice of packed QKV, head-major, padded, or misaligned."""
    kind = r.choice(["contiguous", "packed", "head-major", "padded", "misaligned"])
    if kind == "contiguous":
        return noise(rows, heads, dim, dtype=dtype, seed=seed)
    if kind == "packed":
        return noise(rows, 3, heads, dim, dtype=dtype, seed=seed)[:, 1]
    if kind == "head-major":
        return noise(heads, rows, dim, dtype=dtype, seed=seed).transpose(0, 1)
    if kind == "padded":
        return noise(rows, heads, dim + 8, dtype=dtype, seed=seed)[..., :dim]
    return noise(rows * heads * dim + 1, dtype=dtype, seed=seed)[1:].view(rows, heads, dim)


def rotate_rows(seed):
    r = random.Random(seed)
    dtype = r.choice([torch.uint8, torch.int16, torch.bfloat16, torch.int32, torch.float32, torch.int64])
    n = r.choice([1, 2, 7, 33, 300, 5000, 60_000])
    m = r.choice([None, 0, 1, 5, 70_000 if n <= 7 else 3])
    shift = torch.tensor(r.choice([0, 1, -1, n, r.randrange(-3 * n, 3 * n + 1), 10**12 + 7]))
    generator = torch.Generator().manual_seed(seed)
    if m is None:
        return (torch.randint(0, 120, (n + 3,), generator=generator).to(dtype)[3:], shift), {}
    stride = n + r.choice([0, 1, 5])
    return (torch.randint(0, 120, (m, stride), generator=generator).to(dtype)[:, :n], shift), {}


def advance_state(seed):
    r = random.Random(seed)
    state = torch.tensor([r.randrange(10**r.choice([2, 5, 12])), r.randrange(100), r.randrange(50), 3, 4])
    return (state, r.randrange(2000), r.randrange(10**r.choice([1, 3, 5])), 1 << r.randrange(8)), {}


def random_spec(r):
    chunk = r.choice([1, 3, 6, 24, 60])
    sizes = {chunk: 1} | {b: r.randrange(1, 4) for b in {r.randrange(1, chunk + 1) for _ in range(2)} if b != chunk}
    return RolloutSpec(window_tokens=r.choice([0, 2, 9, 40, 100]), max_staged_tokens=chunk, causal_blocks=sizes,
                       max_pin_tokens=r.choice([0, 5, 16, 33]))


def block_causal_layout(seed):
    r = random.Random(seed)
    state = RolloutState(0, Geometry(random_spec(r), 1 << r.randrange(6)), torch.device("cpu"))
    state.reset(r.randrange(state.geometry.spec.max_pin_tokens + 1))
    g = state.geometry
    pool = torch.zeros(1, g.pages, 2, 1, g.page_size, 1)
    for _ in range(r.randrange(6)):
        state.commit(pool, r.randrange(1, g.spec.max_staged_tokens + 1))
    for t in (state.pages, state.lengths, state.copy_src, state.scatter_dst):
        t.fill_(-7)  # what the layout does not rewrite must stay
    return (state.state, state.fixed, state.ring, state.sizes, state.private, state.pages, state.lengths,
            state.copy_src, state.copy_dst, state.scatter_src, state.scatter_dst, state.scatter_dst2, g.page_size,
            g.spec.window_tokens, g.copied_slots), {}


def commit(seed):
    r = random.Random(seed)
    (state, *lists, page, window, copied), _ = block_causal_layout(seed)
    pages = 1 + max(int(t.max()) for t in (lists[0], lists[1], lists[3]) if t.numel())
    dtype = r.choice([*FLOATS, torch.float8_e4m3fn])
    pool = noise(r.choice([1, 3]), pages, 2, r.choice([1, 5]), page, r.choice([3, 16]), seed=seed).to(dtype)
    return (pool, state, *lists, r.randrange(1, 80), page, window, copied), {}


def slots(r, count, pool_slots):
    """`count` different slots; some entries are -1."""
    return [-1 if r.random() < 0.2 else slot for slot in r.sample(range(pool_slots), count)]


def scatter_kv_slots(seed):
    r = random.Random(seed)
    dtype = r.choice([*FLOATS, torch.float8_e4m3fn])
    rows, heads, dim = r.choice([0, 1, 5, 40]), r.choice([1, 2, 5, 8, 40]), r.choice([1, 3, 16, 80, 128])
    page, pages = r.choice([1, 4, 16]), r.choice([16, 60])
    entries = r.choice([0, 1, rows, min(rows + 7, page * pages // 2)])
    entries = min(entries, page * pages // 2)
    both = slots(r, 2 * entries, page * pages)
    kwargs = {"dst2": r.choice([None, int32(both[entries:])]), "num_tokens": r.choice([-1, r.randrange(rows + 1)])}
    if r.random() < 0.6 and rows:
        kwargs["src"] = int32([r.choice([-1, r.randrange(rows), r.randrange(rows)]) for _ in range(entries)])
    if r.random() < 0.5:
        count = r.choice([0, 1, 4])
        kwargs |= {"lengths": int32([r.randrange(99) for _ in range(count)]), "totals": int32([-5] * count),
                   "causal_block_size": r.randrange(1, 20)}
    k, v = (rows_of(r, rows, heads, dim, torch.float32, seed + i).to(dtype) if dtype.itemsize == 1
            else rows_of(r, rows, heads, dim, dtype, seed + i) for i in range(2))
    layers = noise(3, pages, 2, heads, page, dim, seed=seed + 2).to(dtype)
    return (k, v, layers[1], int32(both[:entries])), kwargs


def copy_kv_slots(seed):
    r = random.Random(seed)
    dtype, page, pages = r.choice([*FLOATS, torch.float8_e4m3fn]), r.choice([1, 4, 16]), r.choice([16, 60])
    heads, dim = r.choice([1, 5, 8]), r.choice([1, 3, 16, 80, 128])
    entries = r.choice([0, 1, page * pages // 2, page * pages // 3])
    both = slots(r, 2 * entries, page * pages)
    pool = noise(r.choice([1, 3]), pages, 2, heads, page, dim, seed=seed).to(dtype)
    return (pool, int32(both[:entries]), int32(both[entries:])), {}


def split_page_lists(seed):
    r = random.Random(seed)
    state = RolloutState(0, Geometry(random_spec(r), 1 << r.randrange(6)), torch.device("cpu"))
    state.reset(r.randrange(state.geometry.spec.max_pin_tokens + 1))
    g = state.geometry
    pool = torch.zeros(1, g.pages, 2, 1, g.page_size, 1)
    for _ in range(r.randrange(12)):
        state.commit(pool, r.randrange(1, g.spec.max_staged_tokens + 1))
    size, count = r.choice(g.spec.causal_blocks)
    n = r.randrange(1, min(size * count, g.spec.max_staged_tokens) + 1)
    blocks, views = -(-n // size), state.views[size]
    totals = views.lengths[:blocks] + torch.tensor([min(size, n - j * size) for j in range(blocks)])
    rows = r.randrange(1, 6) + (blocks if blocks > 1 else 0)
    tables = torch.full((rows, views.pages.shape[1]), -7, dtype=torch.int32)
    return (state.state, views.pages[:blocks], totals.int(), tables, int32([-7] * rows), int32([-7] * rows), size,
            g.spec.window_tokens, g.page_size), {}


def merge_partials(seed):
    r = random.Random(seed)
    n, rows, heads = r.choice([0, 1, 2, 5]), r.choice([0, 1, 9, 50]), r.choice([1, 3, 12, 40])
    dim = r.choice([1, 7, 16, 64, 80, 128, 256])
    kind, out_kind = r.choice(FLOATS), r.choice(FLOATS)
    partials = noise(n, rows, heads, dim, dtype=kind, seed=seed)
    if r.random() < 0.5:
        partials = noise(n, heads, rows, dim, dtype=kind, seed=seed).transpose(1, 2)
    lse = noise(n, heads, rows, seed=seed + 1).transpose(1, 2) * 3 + r.choice([0, 60, -300])
    if lse.numel():
        empty = torch.rand(lse.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
        lse.masked_fill_(empty, -torch.inf)
        partials[empty] = torch.nan
    out = noise(rows, heads, dim + r.choice([0, 8]), dtype=out_kind, seed=seed + 2)[..., :dim]
    kwargs = {"num_tokens": r.choice([-1, r.randrange(rows + 1)])}
    if n and r.random() < 0.4:
        blocks = r.randrange(1, 4)
        kwargs["tail_lse"] = noise(blocks, heads, -(-rows // blocks) + r.randrange(3), seed=seed + 3).transpose(1, 2)
        lse, partials[-1] = lse[:-1], partials[-1].nan_to_num(0)
    if r.random() < 0.4:
        kwargs["keys"] = int32([r.randrange(3) for _ in range(lse.shape[0])])
    return (partials, lse, out), kwargs


def qk_norm_rope(seed):
    """Every second call is one that kernels/norm_rope_fast.cu takes, unless its rows are misaligned; the others differ
    from that in anything."""
    r = random.Random(seed)
    usual = seed % 2 == 0
    dtype, rows = r.choice(FLOATS[1:] if usual else FLOATS), r.choice([1, 4, 17, 50] if usual else [0, 1, 4, 50])
    heads, kv_heads = r.choice([(1, 1), (8, 2), (12, 12), (40, 8), (3, 3), (40, 40)])
    dim = r.choice([8, 64, 80, 96, 128, 256] if usual else [2, 6, 64, 80, 128, 256, 7])
    full, weight_dtype = r.random() < 0.5, r.choice([dtype, torch.float32])
    q = rows_of(r, rows, heads, dim, dtype, seed)
    k = rows_of(r, rows, kv_heads, dim, dtype, seed + 1)
    if heads == kv_heads and r.random() < 0.5:  # views of one packed projection
        packed = noise(rows, 3, heads, dim, dtype=dtype, seed=seed)
        q, k = packed[:, 0], packed[:, 1]

    def weight(n, seed):
        size, dtype = r.choice([None, dim, n * dim]), r.choice(FLOATS)
        if usual:
            size, dtype = n * dim if full else dim, weight_dtype
        return None if size is None else 1 + 0.1 * noise(size, dtype=dtype, seed=seed)

    cos = sin = None
    if dim % 2 == 0 and (usual or r.random() < 0.8):
        angles = noise(rows, dim // 2, seed=seed + 4) * 9
        cos, sin = angles.cos(), angles.sin()
    args = (q, k, weight(heads, seed + 2), weight(kv_heads, seed + 3), cos, sin, 1e-6)
    kwargs = {"interleaved": r.random() < 0.5}
    if r.random() < 0.4:
        kwargs["q_out"] = torch.empty_like(q, memory_format=torch.contiguous_format).fill_(3)
    if r.random() < 0.5:
        page, pages = 4, 40
        given = r.randrange(rows + 1)
        both = slots(r, 2 * given, page * pages)
        kwargs |= {"v": rows_of(r, rows, kv_heads, dim, dtype, seed + 5), "dst": int32(both[:given]),
                   "layer_pool": noise(2, pages, 2, kv_heads, page, dim, dtype=dtype, seed=seed + 6)[1],
                   "dst2": r.choice([None, int32(both[given:])]), "num_tokens": r.choice([-1, r.randrange(rows + 1)])}
        if r.random() < 0.5:
            kwargs |= {"lengths": int32([3, 50]), "totals": int32([-5, -5]), "causal_block_size": 7}
    elif r.random() < 0.4:
        kwargs["k_out"] = torch.empty_like(k, memory_format=torch.contiguous_format).fill_(3)
    return args, kwargs


def residual_norm(seed):
    r = random.Random(seed)
    dtype, rows = r.choice(FLOATS), r.choice([0, 1, 5, 33])
    dim = r.choice([1, 7, 64, 200, 1536, 1536, 3072, 5120, 8192])

    def like(seed, dtype=dtype, rows=rows):
        """[rows, dim] with last stride 1: contiguous, a slice of something wider, or misaligned."""
        wide = noise(rows, dim + r.choice([0, 8, 3]), dtype=dtype, seed=seed)
        return wide[:, -dim:] if r.random() < 0.5 else wide[:, :dim]

    def modulation(seed):
        """One row for all or one for each, as a chunk of packed ones is."""
        return noise(r.choice([1, rows]), r.choice([1, 6]), dim, dtype=r.choice(FLOATS), seed=seed)[:, -1]

    x, delta, sum_out, norm_out = (like(seed + i) for i in range(4))
    adds, norms = r.choice([(True, True), (True, False), (False, True), (True, True)])
    gate, scale, shift = (modulation(seed + 4 + i) for i in range(3))
    if r.random() < 0.3:
        sum_out = r.choice([x, delta])
    if not norms or r.random() < 0.3:
        scale = shift = None
    args = (x, delta if adds else None, gate if adds and r.random() < 0.6 else None, scale, shift,
            r.choice([0.0, 1.0]), 1e-6)
    return args, {"sum_out": sum_out if adds else None, "norm_out": norm_out if norms else None}


CASES = {f"{f.__name__}_": f for f in (rotate_rows, advance_state, block_causal_layout, commit, scatter_kv_slots,
                                       copy_kv_slots, split_page_lists, merge_partials, qk_norm_rope,
                                       residual_norm)}


def checkable_seeds(name, count=2):
    """Seeds of calls that `opcheck` can clone and compare: no empty tensor, no float8."""
    def fits(seed):
        return all(t.numel() and not (t.is_floating_point() and t.itemsize == 1)
                   for t in tensors_of(*CASES[name](seed)))

    return [seed for seed in range(100) if fits(seed)][:count]


def mirrored(args, kwargs, device):
    """The same call on `device`, every storage copied once: strides, offsets, gaps and aliasing stay."""
    storages = {}

    def move(t):
        if not isinstance(t, torch.Tensor):
            return t
        storage = t.untyped_storage()
        if storage.nbytes() == 0:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
        if storage.data_ptr() not in storages:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            storages[storage.data_ptr()] = flat.to(device, copy=True)
        base = storages[storage.data_ptr()].untyped_storage()
        empty = torch.empty(0, dtype=t.dtype, device=device)
        return empty.set_(base, t.storage_offset(), t.shape, t.stride())

    return tuple(map(move, args)), {name: move(t) for name, t in kwargs.items()}


def tensors_of(args, kwargs):
    return [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]


def whole_storage(t):
    """Everything in a tensor's storage, gaps included, as the tensor's dtype."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())


def assert_same_storages(got, expected, exact):
    """Every storage of the two calls' tensors agrees: bit for bit, or within a rounding of their dtype."""
    for a, b in zip(tensors_of(*got), tensors_of(*expected), strict=True):
        a, b = whole_storage(a).cpu(), whole_storage(b).cpu()
        if exact or not a.dtype.is_floating_point or a.dtype.itemsize == 1:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        else:
            rtol = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[a.dtype]
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol / 4, equal_nan=True)
