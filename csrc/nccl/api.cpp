#include "nccl/api.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace distopt::nccl {
namespace {

void* find(void* library, const char* symbol, const std::string& path) {
  void* found = ::dlsym(library, symbol);
  if (found == nullptr)
    throw std::runtime_error(path + " has no " + symbol + ", so it is not NCCL of version " + dotted(oldest_version) +
                             " or later");
  return found;
}

std::unique_ptr<NcclApi> load_new(const std::string& path) {
  if (path.empty() || path[0] != '/') throw std::runtime_error("'" + path + "' is not an absolute path of a library");
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(::dlerror());
  auto api = std::make_unique<NcclApi>();
  api->path = path;
#define DISTOPT_NCCL_LOAD(field, symbol, result, parameters) \
  api->field = reinterpret_cast<result(*) parameters>(find(library, #symbol, path));
  // The version first: an old library would fail with the name of an unrelated function.
  DISTOPT_NCCL_LOAD(get_version, ncclGetVersion, Result, (int*))
  if (const Result result = api->get_version(&api->version); result != Result::success)
    throw std::runtime_error(path + ": ncclGetVersion failed with " + std::to_string(static_cast<int>(result)));
  if (api->version < oldest_version)
    throw std::runtime_error(path + " is NCCL " + dotted(api->version) + "; " + dotted(oldest_version) +
                             " is the oldest that works");
  DISTOPT_NCCL(DISTOPT_NCCL_LOAD)
#undef DISTOPT_NCCL_LOAD
  return api;
}

}  // namespace

const NcclApi& load(const std::string& path) {
  static std::mutex mutex;
  // Not destroyed at exit: a thread may still be in NCCL then.
  static auto& loaded = *new std::map<std::string, std::unique_ptr<NcclApi>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<NcclApi>& api = loaded[path];
  if (!api) api = load_new(path);
  return *api;
}

std::string dotted(int version) {
  // Up to 2.8 the code was 1000 * major + 100 * minor + patch.
  const int scale = version < 10000 ? 1000 : 10000;
  return std::to_string(version / scale) + "." + std::to_string(version % scale / 100) + "." +
         std::to_string(version % 100);
}

}  // namespace distopt::nccl
