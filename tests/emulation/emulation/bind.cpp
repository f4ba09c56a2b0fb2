// The emulated runtime for Python, the module `_emulation`: what the stand-in for CuPy stands on.
#include <cuda_runtime.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace emulation {
namespace {

using Address = std::uintptr_t;

cudaStream_t stream_of(Address handle) { return reinterpret_cast<cudaStream_t>(handle); }
cudaEvent_t event_of(Address handle) { return reinterpret_cast<cudaEvent_t>(handle); }
void* pointer_of(Address address) { return reinterpret_cast<void*>(address); }

void check(cudaError_t code) {
  if (code != cudaSuccess)
    throw std::runtime_error(std::string(cudaGetErrorString(code)) + " (CUDA error " +
                             std::to_string(static_cast<int>(code)) + ")");
}

// Memory as CuPy's pool hands it out: what is given back on a stream is given out again on that stream at once, without
// waiting for any other. It turns into NaN in the order of that stream, as if others had used it, so that another
// stream which still reads it reads something wrong.
class Pool {
 public:
  Address take(std::size_t bytes, Address stream) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::vector<Address>& free = free_[{stream, bytes}];
      if (!free.empty()) {
        const Address address = free.back();
        free.pop_back();
        return address;
      }
    }
    void* pointer = nullptr;
    check(cudaMalloc(&pointer, bytes));
    return reinterpret_cast<Address>(pointer);
  }

  void give_back(Address address, std::size_t bytes, Address stream) {
    if (!bytes) return;
    // The stream may be gone; then nothing can be ordered behind it either.
    static_cast<void>(cudaMemsetAsync(pointer_of(address), 0xff, bytes, stream_of(stream)));
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[{stream, bytes}].push_back(address);
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<Address, std::size_t>, std::vector<Address>> free_;
};

Pool& pool() {
  static Pool* const pool = new Pool;  // arrays may outlive static objects
  return *pool;
}

template <class Handle, class Create>
Address created(Create create) {
  Handle handle = nullptr;
  check(create(&handle));
  return reinterpret_cast<Address>(handle);
}

bool ready(cudaError_t code) {
  if (code != cudaErrorNotReady) check(code);
  return code == cudaSuccess;
}

void bind_devices(nb::module_& m) {
  m.def("device_count", [] {
    int count = 0;
    check(cudaGetDeviceCount(&count));
    return count;
  });
  m.def("get_device", [] {
    int device = 0;
    check(cudaGetDevice(&device));
    return device;
  });
  m.def("set_device", [](int device) { check(cudaSetDevice(device)); });
  m.def("pci_bus_id", [](int device) {
    char text[16];
    check(cudaDeviceGetPCIBusId(text, sizeof text, device));
    return std::string(text);
  });
  m.def("device_synchronize", [] { check(cudaDeviceSynchronize()); }, nb::call_guard<nb::gil_scoped_release>());
}

void bind_memory(nb::module_& m) {
  m.def("malloc", [](std::size_t bytes) { return created<void*>([=](void** p) { return cudaMalloc(p, bytes); }); });
  m.def(
      "free", [](Address address) { check(cudaFree(pointer_of(address))); }, nb::call_guard<nb::gil_scoped_release>());
  m.def("malloc_host",
        [](std::size_t bytes) { return created<void*>([=](void** p) { return cudaMallocHost(p, bytes); }); });
  m.def(
      "free_host", [](Address address) { check(cudaFreeHost(pointer_of(address))); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "pool_malloc", [](std::size_t bytes, Address stream) { return pool().take(bytes, stream); }, "bytes"_a,
      "stream"_a, "Memory as CuPy's pool gives it on a stream.");
  m.def(
      "pool_free", [](Address address, std::size_t bytes, Address stream) { pool().give_back(address, bytes, stream); },
      "address"_a, "bytes"_a, "stream"_a, "Give pool memory back; `stream` is the one that it was taken on.");
  m.def(
      "memcpy_async",
      [](Address to, Address from, std::size_t bytes, int kind, Address stream) {
        check(cudaMemcpyAsync(pointer_of(to), pointer_of(from), bytes, static_cast<cudaMemcpyKind>(kind),
                              stream_of(stream)));
      },
      "to"_a, "from"_a, "bytes"_a, "kind"_a, "stream"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "memset_async",
      [](Address to, int value, std::size_t bytes, Address stream) {
        check(cudaMemsetAsync(pointer_of(to), value, bytes, stream_of(stream)));
      },
      "to"_a, "value"_a, "bytes"_a, "stream"_a);
}

void bind_streams(nb::module_& m) {
  m.def(
      "stream_create",
      [](bool non_blocking, int priority) {
        const unsigned flags = non_blocking ? cudaStreamNonBlocking : cudaStreamDefault;
        return created<cudaStream_t>(
            [=](cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, flags, priority); });
      },
      "non_blocking"_a = false, "priority"_a = 0);
  m.def("stream_destroy", [](Address stream) { check(cudaStreamDestroy(stream_of(stream))); });
  m.def(
      "stream_synchronize", [](Address stream) { check(cudaStreamSynchronize(stream_of(stream))); },
      nb::call_guard<nb::gil_scoped_release>(), "Run what is in the stream; the stand-in's way to look at arrays too.");
  m.def(
      "stream_query", [](Address stream) { return ready(cudaStreamQuery(stream_of(stream))); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def("stream_capturing", [](Address stream) {
    cudaStreamCaptureStatus status{};
    check(cudaStreamIsCapturing(stream_of(stream), &status));
    return status != cudaStreamCaptureStatusNone;
  });
  m.def(
      "launch",
      [](Address stream, nb::callable task) {
        // Tasks run, and go, on threads that need not have Python's lock.
        const std::shared_ptr<nb::callable> held(new nb::callable(std::move(task)), [](nb::callable* last) {
          const nb::gil_scoped_acquire lock;
          const std::unique_ptr<nb::callable> owner(last);
        });
        check(enqueue(stream_of(stream), [held] {
          const nb::gil_scoped_acquire lock;
          (*held)();
        }));
      },
      "stream"_a, "task"_a, "Put a Python function on the stream, as a kernel is.");
  m.def("stream_wait_event",
        [](Address stream, Address event) { check(cudaStreamWaitEvent(stream_of(stream), event_of(event))); });
}

void bind_graphs(nb::module_& m) {
  m.def("begin_capture", [](Address stream, int mode) {
    check(cudaStreamBeginCapture(stream_of(stream), static_cast<cudaStreamCaptureMode>(mode)));
  });
  m.def("end_capture", [](Address stream) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream_of(stream), &graph));
    return reinterpret_cast<Address>(graph);
  });
  m.def("graph_instantiate", [](Address graph) {
    return created<cudaGraphExec_t>(
        [=](cudaGraphExec_t* made) { return cudaGraphInstantiate(made, reinterpret_cast<cudaGraph_t>(graph)); });
  });
  m.def("graph_launch", [](Address executable, Address stream) {
    check(cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(executable), stream_of(stream)));
  });
  m.def("graph_destroy", [](Address graph) { check(cudaGraphDestroy(reinterpret_cast<cudaGraph_t>(graph))); });
  m.def("memory_type", [](Address address) {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, pointer_of(address)));
    return static_cast<int>(attributes.type);
  });
}

void bind_events(nb::module_& m) {
  m.def(
      "event_create",
      [](bool disable_timing) {
        const unsigned flags = disable_timing ? cudaEventDisableTiming : cudaEventDefault;
        return created<cudaEvent_t>([=](cudaEvent_t* event) { return cudaEventCreateWithFlags(event, flags); });
      },
      "disable_timing"_a = false);
  m.def("event_destroy", [](Address event) { check(cudaEventDestroy(event_of(event))); });
  m.def("event_record",
        [](Address event, Address stream) { check(cudaEventRecord(event_of(event), stream_of(stream))); });
  m.def(
      "event_synchronize", [](Address event) { check(cudaEventSynchronize(event_of(event))); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "event_query", [](Address event) { return ready(cudaEventQuery(event_of(event))); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def("event_elapsed_ms", [](Address start, Address stop) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, event_of(start), event_of(stop)));
    return milliseconds;
  });
}

}  // namespace
}  // namespace emulation

NB_MODULE(_emulation, m) {
  m.doc() = "The emulated CUDA runtime. Handles and addresses are integers.";
  emulation::bind_devices(m);
  emulation::bind_memory(m);
  emulation::bind_streams(m);
  emulation::bind_events(m);
  emulation::bind_graphs(m);
}
