// What the two kernels of qk_norm_rope_ share: pairs in fp32, weights, angles, where a row goes.
#pragma once

#include "device.cuh"

namespace bc {

// For 16-bit elements in whole heads of a power of two; false, and nothing launched, if it cannot take the call.
bool norm_rope_held(const NormRopeArgs& args, cudaStream_t stream);

namespace {

using Part = NormRopeArgs::Part;

// kPairs pairs (first, second) that rotate together. Interleaved pairs are neighbours; half-split ones lie head_dim / 2
// apart. With one pair a unit, an odd head_dim (never rotated) has a last unit without its second.
template <int kPairs>
struct Floats {
  float first[kPairs], second[kPairs];

  __device__ float squares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) sum += first[i] * first[i] + second[i] * second[i];
    return sum;
  }
};

// `at`: where the head's weights begin; u: the unit of kPairs pairs within the head.
template <int kPairs>
__device__ __forceinline__ void load_weight(const Part& p, int head_dim, bool interleaved, int64_t at, int u,
                                            Floats<kPairs>& w) {
  if constexpr (kPairs == 1) {
    const int other = interleaved ? 2 * u + 1 : u + head_dim / 2;
    load_floats<1>(p.weight, p.weight_kind, at + (interleaved ? 2 * u : u), w.first);
    if (other < head_dim) load_floats<1>(p.weight, p.weight_kind, at + other, w.second);
  } else if (interleaved) {
    float both[2 * kPairs];
    load_floats<2 * kPairs>(p.weight, p.weight_kind, at + 2 * kPairs * u, both);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) w.first[i] = both[2 * i], w.second[i] = both[2 * i + 1];
  } else {
    load_floats<kPairs>(p.weight, p.weight_kind, at + kPairs * u, w.first);
    load_floats<kPairs>(p.weight, p.weight_kind, at + head_dim / 2 + kPairs * u, w.second);
  }
}

template <int kPairs>
struct Angles {
  float cos[kPairs], sin[kPairs];

  __device__ __forceinline__ void load(const NormRopeArgs& a, int64_t row, int u) {
    const int64_t at = row * (a.head_dim / 2) + kPairs * u;
    load_floats<kPairs>(a.cos, Float::f32, at, cos);
    load_floats<kPairs>(a.sin, Float::f32, at, sin);
  }
  __device__ __forceinline__ void turn(Floats<kPairs>& x) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float f = x.first[i], s = x.second[i];
      x.first[i] = f * cos[i] - s * sin[i];
      x.second[i] = f * sin[i] + s * cos[i];
    }
  }
};

// Where row `row` of a part goes: one row of the outputs, or up to two slots.
struct Target {
  char* to[2] = {nullptr, nullptr};
  int64_t head;

  __device__ __forceinline__ Target(const NormRopeArgs& a, const Part& p, int which, int64_t row) {
    if (row >= a.rows) return;
    if (which == 0 || !a.pool.data) {
      to[0] = p.out.data + row * p.out.row, head = p.out.head;
      return;
    }
    head = a.pool.head;
    if (row >= a.entries.num_tokens || row >= a.entries.count) return;
    const int first = a.entries.dst[row], second = a.entries.dst2 ? a.entries.dst2[row] : -1;
    if (first >= 0) to[0] = slot_address(a.pool, first, which - 1);
    if (second >= 0) to[1] = slot_address(a.pool, second, which - 1);
  }
  __device__ __forceinline__ bool live() const { return to[0] || to[1]; }
};

}  // namespace
}  // namespace bc
