#include "cuda/cublas_api.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <type_traits>

namespace distopt::cublas {
namespace {

void* find(void* library, const char* symbol, const std::string& path) {
  void* found = ::dlsym(library, symbol);
  if (found == nullptr) throw std::runtime_error(path + " has no " + symbol + ", so it is not cuBLAS of CUDA 12 or 13");
  return found;
}

}  // namespace

const CublasApi& load(const std::string& path) {
  static std::map<std::string, std::unique_ptr<CublasApi>> loaded;
  std::unique_ptr<CublasApi>& api = loaded[path];
  if (api) return *api;
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(::dlerror());
  auto fresh = std::make_unique<CublasApi>();
#define DISTOPT_CUBLAS_LOAD(field, symbol, result, parameters) \
  fresh->field = reinterpret_cast<result(*) parameters>(find(library, #symbol, path));
  DISTOPT_CUBLAS_REQUIRED(DISTOPT_CUBLAS_LOAD)
#undef DISTOPT_CUBLAS_LOAD
  api = std::move(fresh);
  return *api;
}

Products::Products(const CublasApi& api, bool tf32) : api_(api) {
  check(api_.create(&handle_), "cublasCreate");
  check(api_.set_math_mode(handle_, tf32 ? MathMode::tf32 : MathMode::standard), "cublasSetMathMode");
}

template <class T>
void Products::multiply(const Product<T>& p, const Workspace& workspace, cudaStream_t stream) {
  if (stream != stream_ || workspace.memory != memory_) {
    check(api_.set_stream(handle_, stream), "cublasSetStream");
    // To set the stream takes the workspace away; without one of ours a capture would allocate in the graph.
    check(api_.set_workspace(handle_, workspace.memory, workspace.bytes), "cublasSetWorkspace");
    stream_ = stream;
    memory_ = workspace.memory;
  }
  // cuBLAS counts by columns: a row-major matrix is its transpose to it, and c' = b' a'.
  const auto gemm = [this] {
    if constexpr (std::is_same_v<T, float>)
      return api_.sgemm;
    else
      return api_.dgemm;
  }();
  const T one = 1, beta = p.accumulate ? 1 : 0;
  const Transpose a = p.a_transposed ? Transpose::yes : Transpose::no;
  const Transpose b = p.b_transposed ? Transpose::yes : Transpose::no;
  const int a_width = p.a_transposed ? p.rows : p.inner, b_width = p.b_transposed ? p.inner : p.columns;
  check(gemm(handle_, b, a, p.columns, p.rows, p.inner, &one, p.b, b_width, p.a, a_width, &beta, p.c, p.columns),
        "cublasGemm");
}

template void Products::multiply(const Product<float>&, const Workspace&, cudaStream_t);
template void Products::multiply(const Product<double>&, const Workspace&, cudaStream_t);

void Products::check(Status status, const char* call) const {
  if (status != Status::success)
    throw std::runtime_error(std::string(call) + ": " + api_.get_status_string(status) + " (cuBLAS status " +
                             std::to_string(static_cast<int>(status)) + ")");
}

}  // namespace distopt::cublas
