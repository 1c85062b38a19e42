// Rows to slots of one layer's pool, and slots to slots of the whole pool.
#include "device.cuh"

namespace bc {
namespace {

constexpr int kThreads = 256;

// A block is (vectors of a row, heads, entries). K and V of one vector are read by one thread, each once.
template <typename V>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const Rows k, const Rows v, const Pool pool, const Entries e, const Totals totals, const int heads,
                   const int vectors) {
  if (blockIdx.x == 0 && totals.totals) {
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    write_totals(totals, e.num_tokens, thread, blockDim.x * blockDim.y * blockDim.z);
  }
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  if (i >= e.count) return;
  const int64_t row = e.src ? e.src[i] : i;
  const int to = e.dst[i], also = e.dst2 ? e.dst2[i] : -1;
  if (row < 0 || row >= e.num_tokens || (to < 0 && also < 0)) return;
  for (int head = threadIdx.y; head < heads; head += blockDim.y) {
    const V* const from_k = reinterpret_cast<const V*>(k.data + row * k.row + head * k.head);
    const V* const from_v = reinterpret_cast<const V*>(v.data + row * v.row + head * v.head);
    const int64_t at = head * pool.head;
    for (int x = threadIdx.x; x < vectors; x += blockDim.x) {
      const V new_k = from_k[x], new_v = from_v[x];
      if (to >= 0) {
        reinterpret_cast<V*>(slot_address(pool, to, 0) + at)[x] = new_k;
        reinterpret_cast<V*>(slot_address(pool, to, 1) + at)[x] = new_v;
      }
      if (also >= 0) {
        reinterpret_cast<V*>(slot_address(pool, also, 0) + at)[x] = new_k;
        reinterpret_cast<V*>(slot_address(pool, also, 1) + at)[x] = new_v;
      }
    }
  }
}

template <typename V>
void scatter(const Rows& k, const Rows& v, const Pool& pool, const Entries& e, const Totals& totals, int heads,
             int vectors, cudaStream_t stream) {
  const int x = vectors < 32 ? vectors : 32, y = heads < kThreads / x ? heads : kThreads / x;
  const dim3 block(x, y, kThreads / (x * y) < 64 ? kThreads / (x * y) : 64);
  const int64_t blocks = ceil_div(e.count, block.z);
  scatter_kernel<V><<<static_cast<unsigned>(blocks ? blocks : 1), block, 0, stream>>>(k, v, pool, e, totals, heads,
                                                                                      vectors);
}

// A block takes kThreads entries in one (layer, K or V, head). Most entries are -1: the live ones are gathered first, so
// that every thread then has something to copy. Source and destination slots of one call do not overlap.
template <typename V>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const Pool pool, const int32_t* src, const int32_t* dst, const int64_t count, const int heads,
                const int vectors, const int lanes, const unsigned chunks) {
  __shared__ int2 live[kThreads];
  __shared__ int live_before[kThreads / 32 + 1];
  const unsigned chunk = blockIdx.x % chunks, part = blockIdx.x / chunks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t i = static_cast<int64_t>(chunk) * kThreads + threadIdx.x;
  int2 entry = make_int2(-1, -1);
  if (i < count) entry = make_int2(src[i], dst[i]);
  const bool mine = entry.x >= 0 && entry.y >= 0;
  const unsigned ballot = __ballot_sync(~0u, mine);
  if (lane == 0) live_before[warp + 1] = __popc(ballot);
  __syncthreads();
  if (threadIdx.x == 0) {
    live_before[0] = 0;
    for (int w = 0; w < kThreads / 32; ++w) live_before[w + 1] += live_before[w];
  }
  __syncthreads();
  if (mine) live[live_before[warp] + __popc(ballot & ((1u << lane) - 1))] = entry;
  __syncthreads();

  const int total = live_before[kThreads / 32], step = kThreads / lanes;
  const int head = part % heads, kv = part / heads % 2;
  const int64_t at = part / (2 * heads) * pool.layer + head * pool.head;
  constexpr int kInFlight = 4;
  for (int x = threadIdx.x % lanes; x < vectors; x += lanes) {
    for (int first = threadIdx.x / lanes; first < total; first += kInFlight * step) {
      V value[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int e = first + j * step;
        if (e < total) value[j] = reinterpret_cast<const V*>(slot_address(pool, live[e].x, kv) + at)[x];
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int e = first + j * step;
        if (e < total) reinterpret_cast<V*>(slot_address(pool, live[e].y, kv) + at)[x] = value[j];
      }
    }
  }
}

template <typename V>
void copy(const Pool& pool, const int32_t* src, const int32_t* dst, int64_t count, int64_t layers, int heads,
          int vectors, cudaStream_t stream) {
  const int64_t chunks = ceil_div(count, kThreads), blocks = chunks * layers * 2 * heads;
  copy_kernel<V><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      pool, src, dst, count, heads, vectors, power_of_two_from(vectors, 32), static_cast<unsigned>(chunks));
}

}  // namespace

void scatter_kv_slots(const Rows& k, const Rows& v, const Pool& pool, const Entries& e, const Totals& totals,
                      int heads, int64_t row_bytes, cudaStream_t stream) {
  const int width = common_width({address(k.data), address(v.data), address(pool.data), k.row, k.head, v.row, v.head,
                                  pool.page, pool.kv, pool.head, pool.slot, row_bytes});
  const int vectors = static_cast<int>(row_bytes / width);
  switch (width) {
    case 16: return scatter<uint4>(k, v, pool, e, totals, heads, vectors, stream);
    case 8: return scatter<uint2>(k, v, pool, e, totals, heads, vectors, stream);
    case 4: return scatter<uint32_t>(k, v, pool, e, totals, heads, vectors, stream);
    case 2: return scatter<uint16_t>(k, v, pool, e, totals, heads, vectors, stream);
    default: return scatter<uint8_t>(k, v, pool, e, totals, heads, vectors, stream);
  }
}

void copy_kv_slots(const Pool& pool, const int32_t* src, const int32_t* dst, int64_t count, int64_t layers, int heads,
                   int64_t row_bytes, cudaStream_t stream) {
  const int width = common_width(
      {address(pool.data), pool.layer, pool.page, pool.kv, pool.head, pool.slot, row_bytes});
  const int vectors = static_cast<int>(row_bytes / width);
  switch (width) {
    case 16: return copy<uint4>(pool, src, dst, count, layers, heads, vectors, stream);
    case 8: return copy<uint2>(pool, src, dst, count, layers, heads, vectors, stream);
    case 4: return copy<uint32_t>(pool, src, dst, count, layers, heads, vectors, stream);
    case 2: return copy<uint16_t>(pool, src, dst, count, layers, heads, vectors, stream);
    default: return copy<uint8_t>(pool, src, dst, count, layers, heads, vectors, stream);
  }
}

}  // namespace bc
