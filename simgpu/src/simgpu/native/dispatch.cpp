// PyTorch's operators on CUDA tensors, computed by the CPU's kernels over the same memory.
//
// Operators that only make, view or move memory stay PyTorch's own. Every other one that has a CUDA
// kernel gets `on_host` in its place, which hands the CPU's kernel views of the device's memory.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/library.h>

#include <random>
#include <set>
#include <string>
#include <vector>

#include "graph.h"
#include "uses.h"

namespace {

/// A tensor of the same elements with a storage of its own.
Tensor with_storage(const Tensor& x, c10::Storage storage, c10::DispatchKey key) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), x.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  made._set_conj(x.is_conj());
  made._set_neg(x.is_neg());
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

/// A tensor as a graph keeps it: what lies on a device may be freed meanwhile, what the host has is copied.
Tensor kept(const Tensor& x) {
  if (!x.defined()) return x;
  if (!x.is_cuda()) {
    Tensor copy = x.clone();
    if (x.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }
  auto* impl = x.storage().unsafeGetStorageImpl();
  c10::DataPtr data(impl->mutable_data(), x.device());
  return with_storage(x, c10::Storage(c10::Storage::use_byte_size_t(), impl->nbytes(), std::move(data)), c10::DispatchKey::CUDA);
}

/// Calls `f` with each tensor of a value, and returns the value of what it returns.
template <class F>
IValue each_tensor(const IValue& value, F f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& x : value.toTensorVector()) list.push_back(f(x));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (auto& x : value.toOptionalTensorVector()) list.push_back(x ? std::optional<Tensor>(f(*x)) : std::nullopt);
    return list;
  }
  return value;
}

/// The host's views of the tensors of one call; tensors that share memory share it here, too.
struct Views {
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages;
  std::vector<Viewed> tensors;
  const char* name;
  bool written = false, read = true;  // by the operator: what is asked for next

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
      it.read |= read;
      return it.mine;
    }
    require_live(name, x);
    Tensor made = with_storage(x, storage(x), c10::DispatchKey::CPU);
    tensors.push_back({made, x, written, read});
    return made;
  }

  IValue of(const IValue& value) {
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
    return each_tensor(value, [this](const Tensor& x) { return of(x); });
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

/// A call of an operator, which a graph makes again.
struct Call {
  c10::OperatorHandle op;
  c10::Stack arguments;
  c10::Device device;
  at::PhiloxCudaState random;   // of its generator, if it has one
  std::vector<Tensor> made;     // the new tensors that it returned
  bool again = false;           // those take what it returns now
  size_t next = 0;

  Tensor on_device(const Tensor& result) {
    if (!again) return made.emplace_back(::on_device(result, device));
    const Tensor& out = made.at(next++);
    bool alike = result.scalar_type() == out.scalar_type() && result.sizes() == out.sizes() && result.strides() == out.strides();
    TORCH_CHECK(alike, "simgpu: ", op.operator_name(), " has another result in a graph than when it was captured");
    move_bytes(out, result);
    return out;
  }
};

/// What a kernel returned, on CUDA: one of its arguments, a view of one, or a new tensor.
Tensor returned(Views& views, const Tensor& made, Call& call) {
  if (!made.defined() || !made.device().is_cpu()) return made;
  for (auto& [mine, theirs, written, read] : views.tensors)
    if (mine.is_same(made)) return theirs;
  for (auto& [mine, theirs, written, read] : views.tensors)
    if (made.storage().nbytes() && mine.storage().unsafeGetStorageImpl() == made.storage().unsafeGetStorageImpl())
      return at::empty({0}, theirs.options().dtype(made.dtype())).set_(theirs.storage(), made.storage_offset(), made.sizes(), made.strides());
  Tensor out = call.on_device(made);
  views.tensors.push_back({made, out, true, false});
  return out;
}

/// Arguments that the CPU's kernel gave another size or other memory get them on CUDA, too.
void follow_sizes(Views& views) {
  for (auto& [mine, theirs, written, read] : views.tensors) {
    bool moved = mine.storage().data() != simgpu_host(theirs.storage().data());
    if (!moved && mine.sizes() == theirs.sizes() && mine.strides() == theirs.strides()) continue;
    theirs.resize_(mine.sizes());
    if (mine.strides() != theirs.strides()) theirs.as_strided_(mine.sizes(), mine.strides());
    if (moved) move_bytes(theirs, mine);
  }
}

/// The next numbers of a CUDA generator, which are used up by that.
at::PhiloxCudaState next_numbers(const IValue& given, c10::Device device) {
  at::Generator g = given.isGenerator() ? given.toGenerator() : at::globalContext().defaultGenerator(device);
  std::lock_guard lock(g.mutex());
  return g.get<at::CUDAGeneratorImpl>()->philox_cuda_state(4);
}

/// A generator of the CPU for these numbers.
at::Generator host_generator(const at::PhiloxCudaState& random) {
  auto number = [&](at::PhiloxCudaState::Payload it) { return random.captured_ ? *(uint64_t*)simgpu_host(it.ptr) : it.val; };
  uint64_t seed = number(random.seed_), offset = number(random.offset_) + random.offset_intragraph_;
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
/// CUDA's norms of 16 bits compute in float, and layer_norm's statistics are float; the CPU's have 16 bits.
/// Returns the type of the results, of layer_norm's forward that of the first.
std::optional<at::ScalarType> widened(const std::string& name, c10::Stack& arguments) {
  if (name.find("aten::native_layer_norm") == 0 || name.find("aten::native_group_norm") == 0) {
    auto dtype = arguments[0].toTensor().scalar_type();
    if (!at::isReducedFloatingType(dtype)) return std::nullopt;
    for (auto& value : arguments)
      if (value.isTensor() && value.toTensor().defined()) value = value.toTensor().to(at::kFloat);
    return dtype;
  }
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
  constexpr double MOST = 3e10;  // multiplications: about two seconds of a core
  if (name != "aten::mm") return;
  const Tensor &a = arguments[0].toTensor(), &b = arguments[1].toTensor();
  double count = (double)a.size(0) * (double)a.size(1) * (double)b.size(1);
  TORCH_CHECK_WITH(OutOfMemoryError, count <= MOST, "simgpu: a product of ", count, " multiplications is too large to simulate");
}

/// Refuses what CUDA's kernels lack and the CPU's have: products of whole numbers.
void refuse_whole(const std::string& name, const c10::Stack& arguments) {
  static const std::set<std::string> PRODUCTS{"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addmv", "addmv_", "dot", "vdot"};
  if (!PRODUCTS.count(name.substr(6))) return;  // behind aten::
  auto dtype = arguments[0].toTensor().scalar_type();
  bool whole = at::isIntegralType(dtype, true);
  TORCH_CHECK_NOT_IMPLEMENTED(!whole, "\"", name, "\" not implemented for '", dtype, "' on CUDA");
}

/// Products of 16 bits whose result has another type, without rounding between: the CPU has none.
bool wide_product(const c10::OperatorName& name, c10::Stack& arguments) {
  static const std::map<std::string, size_t> ADDED{{"aten::mm", 0}, {"aten::bmm", 0}, {"aten::addmm", 1}, {"aten::baddbmm", 1}};
  auto found = ADDED.find(name.name);
  if (found == ADDED.end() || name.overload_name.find("dtype") != 0) return false;
  size_t at = found->second;
  Tensor made = at::matmul(arguments[at].toTensor().to(at::kFloat), arguments[at + 1].toTensor().to(at::kFloat));
  if (at) {
    auto beta = arguments[4].toScalar(), alpha = arguments[5].toScalar();
    if (!alpha.equal(1)) made.mul_(alpha);
    if (!beta.equal(0)) made.add_(arguments[0].toTensor(), beta);
  }
  auto asked = arguments[at + 2].toScalarType();
  TORCH_CHECK(asked == at::kFloat || asked == arguments[at].toTensor().scalar_type(), "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
  bool out = name.overload_name == "dtype_out";
  Tensor result = out ? arguments.back().toTensor().copy_(made) : made.to(asked);
  arguments.assign({result});
  return true;
}

struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

/// Computes a call by the CPU's kernel, and returns its results.
c10::Stack compute(Call& call) {
  const auto& schema = call.op.schema();
  const std::string& name = call.op.operator_name().name;
  c10::cuda::CUDAGuard on(call.device);
  BelowAutograd guards;
  Views views(name.c_str());
  c10::Stack arguments, results;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const IValue& given = call.arguments[i];
    views.written = argument.alias_info() && argument.alias_info()->isWrite();
    views.read = !argument.is_out();
    bool of_host = given.isGenerator() && given.toGenerator().device().is_cpu();
    TORCH_CHECK(!of_host, "Expected a 'cuda' device type for generator but found 'cpu'");
    if (argument.name() != "generator") {
      arguments.push_back(views.of(given));
      continue;
    }
    if (!call.again) call.random = next_numbers(given, call.device);
    arguments.emplace_back(host_generator(call.random));
  }
  refuse_huge(name, arguments);
  refuse_whole(name, arguments);
  if (asks_the_device(call.op, arguments)) check(simgpu_synchronize(stream_of(call.device), false));
  auto narrow = widened(name, arguments);
  if (!wide_product(call.op.operator_name(), arguments)) call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
  follow_sizes(views);
  for (auto& value : arguments) {
    results.push_back(each_tensor(value, [&](const Tensor& x) { return returned(views, narrow && x.defined() ? x.to(*narrow) : x, call); }));
    if (name == "aten::native_layer_norm") narrow.reset();  // statistics follow
  }
  if (!results.empty() && results[0].isTensor()) require_written(name, views.tensors, results[0].toTensor());
  simgpu_weigh(weight_of(call.op, call.arguments, views.tensors));
  note(name.c_str(), call.device, views.tensors);
  return results;
}

/// Lets the graph that a stream is captured for, if any, make a call again.
void keep(Call& call) {
  void* stream = stream_of(call.device);
  if (!simgpu_capture(stream)) return;
  for (IValue& value : call.arguments) value = each_tensor(value, kept);
  for (Tensor& x : call.made) x = kept(x);
  call.again = true;
  simgpu_keep(stream, [call](void*) mutable {
    try {
      call.next = 0;
      compute(call);
    } catch (const c10::Error& error) {
      return simgpu_fail(SIM_ILLEGAL_ADDRESS, "in a graph: %s", error.what_without_backtrace());
    } catch (const std::exception& error) {
      return simgpu_fail(SIM_ILLEGAL_ADDRESS, "in a graph: %s", error.what());
    }
    return (int)SIM_OK;
  });
}

void on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, c10::Stack* stack) {
  simgpu_count("operator");
  simgpu_count(op.operator_name().name.c_str());
  size_t first = stack->size() - op.schema().arguments().size();
  Call call{op, {stack->begin() + (long)first, stack->end()}, device_of(*stack, first), {}, {}};
  stack->resize(first);
  c10::Stack results = compute(call);
  keep(call);
  stack->insert(stack->end(), results.begin(), results.end());
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
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  Call call{op, {self, from, non_blocking}, self.device(), {}, {}};
  compute(call);
  keep(call);
  return self;
}

at::Scalar local_scalar_dense(const Tensor& x) {
  c10::cuda::CUDAGuard on(x.device());
  check(simgpu_written(x.const_data_ptr(), x.nbytes(), "item"));
  return at::native::_local_scalar_dense_cuda(x);
}

/// The host's view of a CUDA tensor: no copy, and nothing waits.
Tensor host(const Tensor& x) {
  Views views("attention");
  Tensor mine = views.of(x);
  simgpu_weigh({bytes_of(x), 0, 0});
  note("attention", x.device(), views.tensors);
  return mine;
}
Tensor to_device(const Tensor& made, const Tensor& like) {
  Tensor out = on_device(made, like.device());
  simgpu_weigh({0, bytes_of(out), 0});
  note("attention", out.device(), {{made, out, true, false}});
  return out;
}

TORCH_LIBRARY(simgpu, m) {
  m.def("host(Tensor x) -> Tensor");
  m.def("device(Tensor made, Tensor like) -> Tensor");
  m.def("kept(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(simgpu, CUDA, m) {
  m.impl("host", host);
  m.impl("device", to_device);
  m.impl("kept", kept);
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
    if (e.action_ == Entry::ALLOC) simgpu_note_block(e.addr_, e.size_, e.mempool_ != c10::MempoolId_t{});
    if (e.action_ == Entry::FREE_COMPLETED) simgpu_drop_block(e.addr_);
  });
}
}
