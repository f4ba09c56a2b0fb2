#include "net/ucx_api.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

#include "base/errors.h"

namespace distopt::net::ucx {
namespace {

[[noreturn]] void fail(const std::string& text) { throw CommunicatorError(ErrorKind::other, text); }

std::unique_ptr<Api> load_new(const std::string& path) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(std::string("UCX cannot be loaded: ") + ::dlerror());
  auto api = std::make_unique<Api>();
#define DISTOPT_UCX_LOAD(field, symbol, result, parameters)                       \
  api->field = reinterpret_cast<result(*) parameters>(::dlsym(library, #symbol)); \
  if (api->field == nullptr) fail(path + " has no " #symbol ", so it is no UCX of version 1.12 or later");
  DISTOPT_UCX(DISTOPT_UCX_LOAD)
#undef DISTOPT_UCX_LOAD
  unsigned major = 0, minor = 0, patch = 0;
  api->get_version(&major, &minor, &patch);
  api->version = std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
  return api;
}

}  // namespace

const Api& load(const std::string& path) {
  static std::mutex mutex;
  static auto& loaded =
      *new std::map<std::string, std::unique_ptr<Api>>;  // not destroyed at exit: a thread may be in it
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Api>& api = loaded[path];
  if (!api) api = load_new(path);
  return *api;
}

}  // namespace distopt::net::ucx
