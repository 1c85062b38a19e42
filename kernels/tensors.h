// A tensor argument read once through the stable ABI, and the refusals: the same as bc_diffusers/ops/checks.py, word
// for word, so that an operator refuses a call with one message on every device.
#pragma once

// Any torch from this version on loads the library, whichever it was compiled against.
#ifndef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))
#endif
#ifndef USE_CUDA  // declares the current stream in the stable ABI
#define USE_CUDA
#endif

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "launch.h"

namespace bc {

using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// A macro, so that the parts of the message are only built for a refusal.
#define BC_REQUIRE(condition, ...) \
  do {                             \
    if (!(condition)) ::bc::refuse(__VA_ARGS__); \
  } while (0)

struct Arg {
  bool given = false;
  char* data = nullptr;
  int64_t dim = 0, numel = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, device_type = 0, device_index = 0;

  Arg() = default;
  Arg(const Tensor& t) : given(true) {  // NOLINT: an argument is what the tensor is
    const AtenTensorHandle handle = t.get();
    void* pointer;
    int64_t *size_list, *stride_list;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &pointer));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &numel));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &size_list));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &stride_list));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &device_index));
    data = static_cast<char*>(pointer), sizes = size_list, strides = stride_list;
  }
  Arg(const std::optional<Tensor>& t) {  // NOLINT
    if (t) *this = Arg(*t);
  }

  int64_t size(int64_t i) const { return sizes[i < 0 ? i + dim : i]; }
  int64_t stride(int64_t i) const { return strides[i < 0 ? i + dim : i]; }
  int64_t element_size() const { return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)); }
  int64_t bytes(int64_t i) const { return stride(i) * element_size(); }  // the stride of dimension i in bytes
  bool is_int32() const { return dtype == aoti_torch_dtype_int32(); }
  bool is_int64() const { return dtype == aoti_torch_dtype_int64(); }
  bool is_float32() const { return dtype == aoti_torch_dtype_float32(); }
  bool computes() const { return is_float32() || dtype == aoti_torch_dtype_float16() || is_bfloat16(); }
  bool is_bfloat16() const { return dtype == aoti_torch_dtype_bfloat16(); }
  Float kind() const { return is_float32() ? Float::f32 : is_bfloat16() ? Float::bf16 : Float::f16; }
  bool contiguous() const {
    int64_t expected = 1;
    for (int64_t i = dim - 1; i >= 0; --i) {
      if (sizes[i] != 1 && strides[i] != expected && numel) return false;
      expected *= sizes[i];
    }
    return true;
  }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

// How Python prints a shape, a dtype, a device.
struct ListOf {
  const int64_t* values;
  int64_t count;
};
inline std::ostream& operator<<(std::ostream& out, const ListOf& list) {
  out << '(';
  for (int64_t i = 0; i < list.count; ++i) out << (i ? ", " : "") << list.values[i];
  return out << (list.count == 1 ? ",)" : ")");
}
inline ListOf shape(const Arg& t) { return {t.sizes, t.dim}; }
inline ListOf shape(const Arg& t, int64_t begin, int64_t end) { return {t.sizes + begin, end - begin}; }
inline ListOf strides(const Arg& t) { return {t.strides, t.dim}; }

struct DtypeOf {
  int32_t dtype;
};
inline DtypeOf dtype(const Arg& t) { return {t.dtype}; }
inline std::ostream& operator<<(std::ostream& out, const DtypeOf& d) {
  const std::pair<int32_t, const char*> names[] = {
      {aoti_torch_dtype_float32(), "float32"}, {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_float16(), "float16"}, {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_int64(), "int64"},     {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int16(), "int16"},     {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_uint8(), "uint8"},     {aoti_torch_dtype_bool(), "bool"}};
  for (const auto& [code, name] : names) {
    if (code == d.dtype) return out << "torch." << name;
  }
  return out << "dtype " << d.dtype;
}

using Named = std::pair<const char*, const Arg*>;

inline void same_device(const char* op, const std::vector<Named>& tensors) {
  const Arg* first = nullptr;
  bool same = true;
  for (const auto& [name, t] : tensors) {
    if (!t->given) continue;
    if (!first) first = t;
    same = same && t->device_type == first->device_type && t->device_index == first->device_index;
  }
  if (same) return;
  std::ostringstream listed;
  for (const auto& [name, t] : tensors) {
    if (!t->given) continue;
    listed << (listed.tellp() > 0 ? ", " : "") << name << " on ";
    if (t->device_type == aoti_torch_device_type_cpu()) {
      listed << "cpu";
    } else {
      listed << (t->device_type == aoti_torch_device_type_cuda() ? "cuda:" : "device ") << t->device_index;
    }
  }
  refuse(op, ": all tensors must be on one device, got ", listed.str());
}

inline void int32_list(const char* op, const char* name, const Arg& t, int64_t size = -1) {
  BC_REQUIRE(t.is_int32() && t.dim == 1 && (t.size(0) <= 1 || t.stride(0) == 1), op, ": ", name,
             " must be a contiguous int32 list, got ", dtype(t), ' ', shape(t), ' ', strides(t));
  BC_REQUIRE(size < 0 || t.size(0) == size, op, ": ", name, " must have ", size, " entries, got ", t.size(0));
}

inline int page_shift(const char* op, int64_t page_size) {
  BC_REQUIRE(page_size > 0 && (page_size & (page_size - 1)) == 0, op, ": page_size ", page_size,
             " is not a power of two");
  int shift = 0;
  while ((static_cast<int64_t>(1) << shift) < page_size) ++shift;
  return shift;
}

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  BC_REQUIRE(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
}

// Makes a tensor's device current and gives torch's stream on it.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Arg& t) : guard_(t.device_index), index_(t.device_index) {}
  cudaStream_t stream() const {
    void* stream;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    return static_cast<cudaStream_t>(stream);
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  int32_t index_;
};

}  // namespace bc
