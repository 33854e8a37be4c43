// What an operator does to the memory of its tensors, as the stand-ins are told.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "sim.h"

namespace {

using at::Tensor;
using c10::IValue;

void* stream_of(c10::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

void check(int code) { TORCH_CHECK(!code, "simgpu: ", simgpu_last_failure()); }

struct Viewed {
  Tensor mine, theirs;  // the view, the CUDA tensor
  bool written = false, read = true;
};

/// Appends the bytes of a tensor's elements. Of one with many gaps only some are told.
void append_ranges(std::vector<SimRange>& all, const Tensor& x, bool written) {
  constexpr size_t MOST = 256;
  if (!x.numel()) return;
  auto* data = (const char*)x.const_data_ptr();
  int64_t item = (int64_t)x.itemsize(), run = 1;  // elements that lie together
  std::vector<std::pair<int64_t, int64_t>> apart;
  for (int64_t d = 0; d < x.dim(); ++d)
    if (x.size(d) > 1 && x.stride(d)) apart.emplace_back(x.stride(d), x.size(d));
  std::sort(apart.rbegin(), apart.rend());
  for (; !apart.empty() && apart.back().first <= run; apart.pop_back())
    run += apart.back().first * (apart.back().second - 1);
  std::vector<int64_t> starts{0};
  for (auto [stride, size] : apart) {
    auto before = std::move(starts);
    starts.clear();
    for (int64_t i = 0; i < size && starts.size() <= MOST; ++i)
      for (int64_t start : before) starts.push_back(start + i * stride);
  }
  bool many = starts.size() > MOST;
  if (many && written) all.push_back({data, at::detail::computeStorageNbytes(x.sizes(), x.strides(), item), SIM_COVERS});
  if (many) starts.resize(MOST);
  for (int64_t start : starts) all.push_back({data + start * item, (size_t)(run * item), written ? SIM_WRITES : SIM_READS});
}

/// Refuses a tensor whose memory is not there (any more), before anybody touches that.
void require_live(const char* name, const Tensor& x) {
  if (!x.numel()) return;
  size_t bytes = at::detail::computeStorageNbytes(x.sizes(), x.strides(), x.itemsize(), x.storage_offset());
  TORCH_CHECK(bytes <= x.storage().nbytes(), "simgpu: ", name, " uses memory that was freed: a tensor takes ", bytes, " bytes of ", x.storage().nbytes());
  check(simgpu_inside(x.storage().data(), bytes, name));
}

/// Tells the stand-ins what an operator did to the memory of its tensors.
void note(const char* name, c10::Device device, const std::vector<Viewed>& tensors) {
  c10::cuda::CUDAGuard on(device);
  std::vector<SimRange> ranges;
  for (auto& x : tensors) append_ranges(ranges, x.theirs, x.written);
  check(simgpu_work(stream_of(device), name, ranges.data(), (int)ranges.size()));
}

/// The bytes of a tensor's elements, each once however often a stride of 0 repeats it.
double bytes_of(const Tensor& x) {
  double n = (double)x.itemsize();
  for (int64_t d = 0; d < x.dim(); ++d) n *= x.stride(d) || !x.size(d) ? (double)x.size(d) : 1;
  return n;
}

/// What a call moves, and the multiplications of a matrix product.
SimWeight weight_of(const c10::OperatorHandle& op, const c10::Stack& arguments, const std::vector<Viewed>& tensors) {
  static const std::map<std::string, size_t> PRODUCTS{{"mm", 0}, {"bmm", 0}, {"addmm", 1}, {"addmm_", 1}, {"baddbmm", 1}, {"baddbmm_", 1}};
  static const std::set<std::string> CHOOSE{"embedding", "index", "index_select", "gather"};  // of their first tensor what they return
  static const std::set<std::string> ONLY_WRITE{"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"};
  const std::string plain = op.operator_name().name.substr(6);  // behind aten::
  auto named = [&](const char* name) { return arguments[(size_t)op.schema().argumentIndexWithName(name).value()]; };
  SimWeight weight{0, 0, 0};
  for (auto& x : tensors) {
    if (x.written) weight.written += bytes_of(x.theirs);
    if (x.read && !(x.written && ONLY_WRITE.count(plain))) weight.read += bytes_of(x.theirs);
  }
  if (CHOOSE.count(plain)) weight.read += std::min(0.0, weight.written - bytes_of(tensors.front().theirs));
  if (plain.find("nll_loss_") == 0) {  // forward it reads a number of each row, backward none
    Tensor of = named("self").toTensor();
    weight.read -= bytes_of(of) - (plain == "nll_loss_forward" ? bytes_of(of.select(-1, 0)) : 0);
  }
  if (plain == "_fused_adamw_" && named("grad_scale").isNone())  // with it the gradients are written
    for (const Tensor& x : named("grads").toTensorVector()) weight.written -= bytes_of(x);
  auto found = PRODUCTS.find(plain);
  if (found == PRODUCTS.end()) return weight;
  if (found->second && named("beta").toScalar().equal(0)) weight.read -= bytes_of(arguments[0].toTensor());
  weight.multiply_adds = (double)arguments[found->second].toTensor().numel() * (double)arguments[found->second + 1].toTensor().size(-1);
  return weight;
}

/// Whether a CUDA kernel must ask the device for a number on its way: how large its result is.
bool asks_the_device(const c10::OperatorHandle& op, const c10::Stack& arguments) {
  for (const IValue& value : arguments) {
    if (!value.isOptionalTensorList()) continue;  // of indices
    for (auto& x : value.toOptionalTensorVector())
      if (x && x->defined() && (x->scalar_type() == at::kBool || x->scalar_type() == at::kByte)) return true;
    return false;
  }
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

/// Refuses a number that depends on memory nobody has written: who makes it looks at all of that.
void require_written(const std::string& name, const std::vector<Viewed>& tensors, const Tensor& result) {
  static const std::set<std::string> WHOLE = {"aten::sum", "aten::mean", "aten::prod", "aten::std", "aten::var", "aten::max", "aten::min", "aten::amax",
                                              "aten::amin", "aten::all", "aten::any", "aten::norm", "aten::linalg_vector_norm"};
  if (result.numel() != 1 || !WHOLE.count(name)) return;
  for (auto& x : tensors)
    if (!x.written && x.theirs.numel() && x.theirs.is_non_overlapping_and_dense())
      check(simgpu_written(x.theirs.const_data_ptr(), x.theirs.nbytes(), name.c_str()));
}

}  // namespace
