// PyTorch's operators on CUDA tensors, computed by the CPU's kernels over the same memory.
//
// Operators that only make, view or move memory stay PyTorch's own. Every other one that has a CUDA
// kernel gets `on_host` in its place, which hands the CPU's kernel views of the device's memory.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/library.h>

#include <random>
#include <string>
#include <vector>

#include "uses.h"

namespace {

/// The host's views of the tensors of one call; tensors that share memory share it here, too.
struct Views {
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages;
  std::vector<Viewed> tensors;
  const char* name;
  bool written = false;  // by the operator: what is asked for next

  explicit Views(const char* of) : name(of) {}

  c10::Storage storage(const Tensor& x) {
    auto* impl = x.storage().unsafeGetStorageImpl();
    for (auto& [known, made] : storages)
      if (known == impl) return made;
    auto* held = new c10::Storage(x.storage());  // as long as the view is used
    auto let_go = [](void* it) { delete (c10::Storage*)it; };
    c10::DataPtr data(simgpu_host(impl->data()), held, let_go, c10::kCPU);
    c10::Storage made(c10::Storage::use_byte_size_t(), impl->nbytes(), std::move(data), c10::GetCPUAllocator(), true);
    storages.emplace_back(impl, made);
    return made;
  }

  Tensor of(const Tensor& x) {
    if (!x.defined() || !x.is_cuda()) return x;
    for (auto& it : tensors) {
      if (!it.theirs.is_same(x)) continue;
      it.written |= written;
      return it.mine;
    }
    require_live(name, x);
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(storage(x), c10::DispatchKeySet(c10::DispatchKey::CPU), x.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
    made._set_conj(x.is_conj());
    made._set_neg(x.is_neg());
    if (x.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    tensors.push_back({made, x, written});
    return made;
  }

  IValue of(const IValue& value) {
    if (value.isTensor()) return of(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : value.toTensorVector()) list.push_back(of(x));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (auto& x : value.toOptionalTensorVector()) list.push_back(x ? std::optional<Tensor>(of(*x)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
    return value;
  }
};

void move_bytes(const Tensor& to, const Tensor& made) {
  if (!made.numel()) return;
  size_t bytes = at::detail::computeStorageNbytes(made.sizes(), made.strides(), made.itemsize());
  memcpy(simgpu_host(to.data_ptr()), made.const_data_ptr(), bytes);
}

/// A CUDA tensor with what the CPU's kernel made.
Tensor on_device(const Tensor& made, c10::Device device) {
  Tensor out = at::empty_strided(made.sizes(), made.strides(), made.options().device(device).pinned_memory(false));
  move_bytes(out, made);
  return out;
}

/// What a kernel returned, on CUDA: one of its arguments, a view of one, or a new tensor.
Tensor returned(Views& views, const Tensor& made, c10::Device device) {
  if (!made.defined() || !made.device().is_cpu()) return made;
  for (auto& [mine, theirs, _] : views.tensors)
    if (mine.is_same(made)) return theirs;
  for (auto& [mine, theirs, _] : views.tensors)
    if (made.storage().nbytes() && mine.storage().unsafeGetStorageImpl() == made.storage().unsafeGetStorageImpl())
      return at::empty({0}, theirs.options().dtype(made.dtype())).set_(theirs.storage(), made.storage_offset(), made.sizes(), made.strides());
  Tensor out = on_device(made, device);
  views.tensors.push_back({made, out, true});
  return out;
}

/// Arguments that the CPU's kernel gave another size or other memory get them on CUDA, too.
void follow_sizes(Views& views) {
  for (auto& [mine, theirs, _] : views.tensors) {
    bool moved = mine.storage().data() != simgpu_host(theirs.storage().data());
    if (!moved && mine.sizes() == theirs.sizes() && mine.strides() == theirs.strides()) continue;
    theirs.resize_(mine.sizes());
    if (mine.strides() != theirs.strides()) theirs.as_strided_(mine.sizes(), mine.strides());
    if (moved) move_bytes(theirs, mine);
  }
}

/// A generator of the CPU for the next numbers of a CUDA one, which are used up by that.
at::Generator host_generator(const IValue& given, c10::Device device) {
  if (given.isGenerator() && given.toGenerator().device().is_cpu()) return given.toGenerator();
  at::Generator g = given.isGenerator() ? given.toGenerator() : at::globalContext().defaultGenerator(device);
  std::lock_guard lock(g.mutex());
  uint64_t seed = g.current_seed(), offset = g.get_offset();
  g.set_offset(offset + 4);
  std::seed_seq mixed{(uint32_t)seed, (uint32_t)(seed >> 32), (uint32_t)offset, (uint32_t)(offset >> 32)};
  uint32_t words[2];
  mixed.generate(words, words + 2);
  return at::detail::createCPUGenerator((uint64_t)words[0] << 32 | words[1]);
}

/// The device of a call: that of its first CUDA tensor, or the one that it names.
c10::Device device_of(const c10::Stack& stack, size_t first) {
  c10::Device found(c10::kCUDA, -1);
  auto look = [&](const Tensor& x) {
    if (x.defined() && x.is_cuda() && !found.has_index()) found = x.device();
  };
  for (size_t i = first; i < stack.size(); ++i) {
    if (stack[i].isTensor()) look(stack[i].toTensor());
    if (stack[i].isTensorList())
      for (const Tensor& x : stack[i].toTensorVector()) look(x);
    if (stack[i].isDevice() && stack[i].toDevice().is_cuda() && stack[i].toDevice().has_index()) return stack[i].toDevice();
  }
  return found.has_index() ? found : c10::Device(c10::kCUDA, c10::cuda::current_device());
}

/// CUDA's softmax takes 16 bits and gives float, and its backward the reverse; the CPU's does neither.
std::optional<at::ScalarType> widened(const std::string& name, c10::Stack& arguments) {
  bool softmax = name == "aten::_softmax" || name == "aten::_log_softmax";
  bool backward = name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data";
  if (softmax && arguments[2].toBool()) {
    arguments[0] = arguments[0].toTensor().to(at::kFloat);
    arguments[2] = false;
  }
  if (!backward) return std::nullopt;
  auto dtype = (at::ScalarType)arguments[3].toInt(), now = arguments[0].toTensor().scalar_type();
  arguments[3] = (int64_t)now;
  return dtype == now ? std::nullopt : std::optional(dtype);
}

/// Refuses a product that would take minutes; as if for want of memory, so that programs which measure
/// the speed of a device try a smaller one.
void refuse_huge(const std::string& name, const c10::Stack& arguments) {
  constexpr double MOST = 1e10;  // multiplications: about half a second of a core
  if (name != "aten::mm") return;
  const Tensor &a = arguments[0].toTensor(), &b = arguments[1].toTensor();
  double count = (double)a.size(0) * (double)a.size(1) * (double)b.size(1);
  TORCH_CHECK_WITH(OutOfMemoryError, count <= MOST, "simgpu: a product of ", count, " multiplications is too large to simulate");
}

struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

void on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, c10::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = op.operator_name().name;
  simgpu_count("operator");
  simgpu_count(name.c_str());
  size_t first = stack->size() - schema.arguments().size();
  c10::Device device = device_of(*stack, first);
  c10::cuda::CUDAGuard on(device);
  finish_current(device);  // what copies bring is there
  BelowAutograd guards;
  Views views(name.c_str());
  c10::Stack arguments;
  for (size_t i = first; i < stack->size(); ++i) {
    auto* alias = schema.arguments()[i - first].alias_info();
    views.written = alias && alias->isWrite();
    if (schema.arguments()[i - first].name() == "generator")
      arguments.emplace_back(host_generator((*stack)[i], device));
    else
      arguments.push_back(views.of((*stack)[i]));
  }
  stack->resize(first);
  refuse_huge(name, arguments);
  if (asks_the_device(op, arguments)) check(simgpu_synchronize(stream_of(device), false));
  auto narrow = widened(name, arguments);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
  follow_sizes(views);
  for (auto& value : arguments) {
    if (value.isTensor()) {
      Tensor result = value.toTensor();
      stack->emplace_back(returned(views, narrow ? result.to(*narrow) : result, device));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : value.toTensorVector()) list.push_back(returned(views, x, device));
      stack->emplace_back(list);
    } else {
      stack->push_back(value);
    }
  }
  if (stack->size() > first && (*stack)[first].isTensor()) require_written(name, views.tensors, (*stack)[first].toTensor());
  note(name.c_str(), device, views.tensors);
}

void unknown(const c10::OperatorHandle& op, c10::DispatchKeySet, c10::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "simgpu: ", op.operator_name(), " has neither a kernel for the CPU nor a decomposition");
}

/// copy_: PyTorch's own wherever it only moves bytes.
Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  BelowAutograd guards;
  bool alike = self.dtype() == from.dtype() && self.is_conj() == from.is_conj() && self.is_neg() == from.is_neg() &&
               self.sizes() == from.sizes() && self.strides() == from.strides() && self.is_non_overlapping_and_dense();
  if (alike || self.device() != from.device()) return at::native::copy_(self, from, non_blocking);
  simgpu_count("operator");
  finish_current(self.device());
  Views views("aten::copy_");
  Tensor source = views.of(from);
  views.written = true;
  views.of(self).copy_(source);
  note("aten::copy_", self.device(), views.tensors);
  return self;
}

at::Scalar local_scalar_dense(const Tensor& x) {
  c10::cuda::CUDAGuard on(x.device());
  check(simgpu_written(x.const_data_ptr(), x.nbytes(), "item"));
  return at::native::_local_scalar_dense_cuda(x);
}

/// The host's view of a CUDA tensor: no copy, and nothing waits.
Tensor host(const Tensor& x) {
  finish_current(x.device());
  Views views("attention");
  Tensor mine = views.of(x);
  note("attention", x.device(), views.tensors);
  return mine;
}
Tensor to_device(const Tensor& made, const Tensor& like) {
  Tensor out = on_device(made, like.device());
  note("attention", out.device(), {{made, out, true}});
  return out;
}

TORCH_LIBRARY(simgpu, m) {
  m.def("host(Tensor x) -> Tensor");
  m.def("device(Tensor made, Tensor like) -> Tensor");
}
TORCH_LIBRARY_IMPL(simgpu, CUDA, m) {
  m.impl("host", host);
  m.impl("device", to_device);
}

struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

/// Calls `each` with every line of a text.
template <class F>
void lines(const std::string& text, F each) {
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find('\n', at), text.size());
    each(text.substr(at, end - at));
    at = end + 1;
  }
}

}  // namespace

extern "C" {

/// Replaces CUDA kernels of aten: by the CPU's, and by an error. Names stand one to a line.
void simgpu_replace(const char* by_host, const char* by_error) {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  Quiet quiet;  // the dispatcher warns of each kernel that is replaced
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  lines(by_host, [](const std::string& name) { library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>()); });
  lines(by_error, [](const std::string& name) { library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&unknown>()); });
  library->impl("copy_", TORCH_FN(copy_));
  library->impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
}

/// Notes the blocks of PyTorch's allocator, so that a kernel is held to the tensors it was given.
void simgpu_watch_allocator() {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const Entry& e) {
    if (e.action_ == Entry::ALLOC) simgpu_note_block(e.addr_, e.size_);
    if (e.action_ == Entry::FREE_COMPLETED) simgpu_drop_block(e.addr_);
  });
}
}
