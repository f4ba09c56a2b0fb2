// CUDA devices for a PyTorch of CPUs, whose memory, streams and events are those of the emulated driver.
//
// An operation waits for the current stream, and is then computed by PyTorch's CPU kernel in the same memory. What a
// stream has not been told to wait for has not run yet, so a missing event shows as a wrong number.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <span>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "nccl/driver.h"

using distopt::cuda::Context;
using distopt::cuda::Event;
using distopt::cuda::Status;
using distopt::cuda::Stream;

// Of libcuda.so.1, which is loaded before.
extern "C" {
Status cuCtxSetCurrent(Context*);
Status cuCtxSynchronize();
Status cuEventCreate(Event**, unsigned);
Status cuEventDestroy_v2(Event*);
Status cuEventQuery(Event*);
Status cuEventRecord(Event*, Stream*);
Status cuEventSynchronize(Event*);
Status cuMemAlloc_v2(void**, std::size_t);
Status cuMemsetD8Async(void*, int, std::size_t, Stream*);
Status cuStreamCreateWithPriority(Stream**, unsigned, int);
Status cuStreamSynchronize(Stream*);
Status cuStreamWaitEvent(Stream*, Event*, unsigned);
int emulation_device();
void emulation_make_context();
}

namespace {

constexpr auto cuda = c10::DeviceType::CUDA;
constexpr int device_count = 8;  // as of the driver

void check(Status status) { TORCH_CHECK(status == Status::success, "the emulated driver returns an error"); }

// -- devices and streams: the number of a stream is its handle --------------------------------------------------------
thread_local std::map<int, c10::StreamId> current_streams;

Stream* handle_of(const c10::Stream& stream) { return reinterpret_cast<Stream*>(stream.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return cuda; }
  c10::Device getDevice() const override {
    emulation_make_context();  // where the thread has none, as CUDA's runtime does
    return {cuda, static_cast<c10::DeviceIndex>(emulation_device())};
  }
  void setDevice(c10::Device device) const override { check(cuCtxSetCurrent(context_of(device))); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { cuCtxSetCurrent(context_of(device)); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  void synchronizeDevice(c10::DeviceIndex) const override { check(cuCtxSynchronize()); }

  c10::Stream getStream(c10::Device device) const override {
    if (!device.has_index()) device = getDevice();
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Stream* made;
    check(cuStreamCreateWithPriority(&made, 1, 0));
    return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(made));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { check(cuStreamSynchronize(handle_of(stream))); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    auto** made = reinterpret_cast<Event**>(event);
    if (!*made) check(cuEventCreate(made, 0));
    check(cuEventRecord(*made, handle_of(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    check(cuStreamWaitEvent(handle_of(stream), static_cast<Event*>(event), 0));
  }
  bool queryEvent(void* event) const override { return cuEventQuery(static_cast<Event*>(event)) == Status::success; }
  void synchronizeEvent(void* event) const override { check(cuEventSynchronize(static_cast<Event*>(event))); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event) cuEventDestroy_v2(static_cast<Event*>(event));
  }

 private:
  static Context* context_of(c10::Device device) { return reinterpret_cast<Context*>(device.index() + 1l); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
const Guard guard;

struct CUDAHooks final : at::CUDAHooksInterface {  // the name by which PyTorch finds it
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  c10::DeviceIndex current_device() const override { return guard.getDevice().index(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  bool isPinnedPtr(const void*) const override { return false; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

// DDP asks for one for each device.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<std::int64_t> measureDifference(Event, Event) override { return {}; }
};
using c10d::RegistererTimerRegistry;
using c10d::TimerRegistry;
C10_REGISTER_TYPED_CLASS(TimerRegistry, cuda, Timer);

// -- memory: as in PyTorch, what is let go serves again at once for the stream that it was allocated on ---------------
struct Lent {
  std::size_t bytes;
  Stream* stream;
};
std::mutex mutex;
std::map<void*, Lent> lent;
std::map<std::pair<std::size_t, Stream*>, std::vector<void*>> free_memory;

}  // namespace

extern "C" void* emulated_torch_allocate(std::size_t bytes, Stream* stream) {
  const std::lock_guard lock(mutex);
  bytes = (bytes + 511) / 512 * 512;
  auto& free = free_memory[{bytes, stream}];
  void* memory = nullptr;
  if (free.empty()) {
    check(cuMemAlloc_v2(&memory, bytes ? bytes : 512));
  } else {
    memory = free.back();
    free.pop_back();
  }
  lent[memory] = {bytes, stream};
  return memory;
}

// It turns into NaN in the order of its stream: another stream that still reads it reads something wrong.
extern "C" void emulated_torch_free(void* memory) {
  const std::lock_guard lock(mutex);
  const auto found = lent.find(memory);
  const auto [bytes, stream] = found->second;
  lent.erase(found);
  cuMemsetD8Async(memory, 0xFF, bytes, stream);
  free_memory[{bytes, stream}].push_back(memory);
}

namespace {

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const auto device = guard.getDevice();
    if (!bytes) return {nullptr, nullptr, &emulated_torch_free, device};
    void* memory = emulated_torch_allocate(bytes, handle_of(guard.getStream(device)));
    return {memory, memory, &emulated_torch_free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &emulated_torch_free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
} allocator;
REGISTER_ALLOCATOR(cuda, &allocator);

const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard on(device.value_or(guard.getDevice()));
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard on(device.value_or(guard.getDevice()));
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

// -- operations -------------------------------------------------------------------------------------------------------
// A tensor like `like` over a storage.
at::Tensor over(c10::Storage storage, c10::DispatchKeySet key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// The same elements for the CPU's kernels.
at::Tensor on_host(const at::Tensor& tensor) {
  auto* kept = new c10::Storage(tensor.storage());
  const auto let_go = [](void* storage) { delete static_cast<c10::Storage*>(storage); };
  c10::DataPtr memory(kept->mutable_data(), kept, let_go, c10::DeviceType::CPU);
  auto* own = c10::GetAllocator(c10::DeviceType::CPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(memory), own, true);
  return over(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
}

struct Pair {
  at::Tensor given, host;
};

// Gives the tensor of the caller the size that the CPU's kernel has given to its own.
void resize(const Pair& pair) {
  const auto& [given, host] = pair;
  if (given.sizes() == host.sizes() && given.strides() == host.strides()) return;
  auto& storage = *given.storage().unsafeGetStorageImpl();
  if (const auto bytes = host.storage().nbytes(); bytes != storage.nbytes()) {
    storage.set_data_ptr_noswap(allocator.allocate(bytes));
    storage.set_nbytes(bytes);
    std::memcpy(storage.mutable_data(), host.storage().data(), bytes);
  }
  given.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
}

// What the caller gets for a result of the CPU's kernel: the tensor that it gave, a view of one, or new memory.
at::Tensor to_device(const at::Tensor& result, const std::vector<Pair>& pairs) {
  if (!result.defined() || !result.has_storage()) return result;
  for (const auto& [given, host] : pairs)
    if (result.is_same(host)) return given;
  for (const auto& [given, host] : pairs)
    if (result.storage().unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl())
      return over(given.storage(), keys, result);
  auto made = empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, {}, {});
  on_host(made).copy_(result);
  return made;
}

std::span<c10::IValue> last(torch::jit::Stack* stack, std::size_t count) {
  return {stack->data() + stack->size() - count, count};
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<Pair> pairs;
  const auto host = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (const auto& pair : pairs)
      if (pair.given.is_same(tensor)) return pair.host;
    return pairs.emplace_back(Pair{tensor, on_host(tensor)}).host;
  };
  c10::Device device = guard.getDevice();
  bool elsewhere = false;  // the result is asked for on another device
  for (auto& value : last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) {
      value = host(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorList().copy();
      for (std::size_t i = 0; i < list.size(); i++) list.set(i, host(list.get(i)));
      value = list;
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorList().copy();
      for (std::size_t i = 0; i < list.size(); i++)
        if (const std::optional<at::Tensor> item = list.get(i)) list.set(i, host(*item));
      value = list;
    } else if (value.isDevice()) {
      device = value.toDevice();
      elsewhere = !device.is_cuda();
      value = c10::Device(c10::DeviceType::CPU);
    }
  }
  if (!pairs.empty()) device = pairs.front().given.device();
  const c10::OptionalDeviceGuard on(device.is_cuda() ? std::optional(device) : std::nullopt);
  check(cuStreamSynchronize(handle_of(guard.getStream(guard.getDevice()))));
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  for (const auto& pair : pairs) resize(pair);
  if (elsewhere) return;
  for (auto& value : last(stack, op.schema().returns().size())) {
    if (value.isTensor()) {
      value = to_device(value.toTensor(), pairs);
    } else if (value.isTensorList()) {
      auto list = value.toTensorList();
      for (std::size_t i = 0; i < list.size(); i++) list.set(i, to_device(list.get(i), pairs));
    }
  }
}

// By the CPU's kernel on the tensors themselves: it looks at sizes and storages alone.
void compute_on_tensors(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  // Composed of what other devices have for it.
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&compute>());
  for (const char* name : {"set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_on_tensors>());
}

}  // namespace
