#include "nccl/driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace distopt::cuda {
namespace {

constexpr const char* library_name = "libcuda.so.1";

template <class... Parameters>
void find(void* library, Function<Parameters...>& function) {
  void* found = ::dlsym(library, function.name);
  if (found == nullptr)
    throw std::runtime_error(std::string(library_name) + " has no " + function.name +
                             ", so the driver is older than CUDA 12");
  function.status = reinterpret_cast<Status (*)(Parameters...)>(found);
}

Driver load() {
  void* library = ::dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(::dlerror());
  Driver made;
#define DISTOPT_CUDA_FIND(field, ...) find(library, made.field);
  DISTOPT_CUDA_DRIVER(DISTOPT_CUDA_FIND)
#undef DISTOPT_CUDA_FIND
  return made;
}

}  // namespace

void check(Status status, const char* function) {
  if (status == Status::success) return;
  const char* name = nullptr;
  driver().get_error_name.status(status, &name);
  throw std::runtime_error(std::string(function) + ": " +
                           (name == nullptr ? "error " + std::to_string(static_cast<int>(status)) : name));
}

const Driver& driver() {
  static const Driver loaded = load();
  return loaded;
}

}  // namespace distopt::cuda
