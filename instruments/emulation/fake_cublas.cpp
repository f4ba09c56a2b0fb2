// A cuBLAS for host memory, as far as distopt/nn/numerics/gpu_base.py uses it. Products run when their stream gets
// there.
#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int invalid_value = 7, execution_failed = 13;

struct Handle {
  void* stream = nullptr;
  void* workspace = nullptr;
};

// Column-major, as BLAS has it; the steps lead from one matrix to the next.
struct Arguments {
  bool a_transposed, b_transposed;
  int m, n, k;
  float alpha, beta;
  const float *a, *b;
  float* c;
  int a_width, b_width, c_width;
  long long a_step, b_step, c_step;
};

void run(const void* arguments) {
  const auto& p = *static_cast<const Arguments*>(arguments);
  std::vector<double> column(static_cast<std::size_t>(p.m));
  for (std::ptrdiff_t j = 0; j < p.n; ++j) {
    column.assign(column.size(), 0.0);
    for (std::ptrdiff_t l = 0; l < p.k; ++l) {
      const double factor = p.b_transposed ? p.b[j + l * p.b_width] : p.b[l + j * p.b_width];
      const float* a = p.a + (p.a_transposed ? l : l * p.a_width);
      const std::ptrdiff_t step = p.a_transposed ? p.a_width : 1;
      for (std::ptrdiff_t i = 0; i < p.m; ++i) column[static_cast<std::size_t>(i)] += factor * a[i * step];
    }
    for (std::ptrdiff_t i = 0; i < p.m; ++i) {
      float& c = p.c[i + j * p.c_width];
      const double sum = p.alpha * column[static_cast<std::size_t>(i)];
      c = static_cast<float>(p.beta == 0 ? sum : sum + p.beta * c);  // with a beta of 0, c may be NaN
    }
  }
}

int gemm(Handle* handle, Arguments p, int count) {
  const int a_rows = p.a_transposed ? p.k : p.m, b_rows = p.b_transposed ? p.n : p.k;
  if (p.m < 0 || p.n < 0 || p.k < 0 || count < 0 || p.a_width < a_rows || p.b_width < b_rows || p.c_width < p.m)
    return invalid_value;
  if (handle->workspace == nullptr) return execution_failed;  // the real one would allocate, and that is not wanted
  using Launch = int (*)(void*, void (*)(const void*), const void*, std::size_t);
  static const auto launch = reinterpret_cast<Launch>(::dlsym(RTLD_DEFAULT, "emulation_launch"));
  if (launch == nullptr) {
    std::fprintf(stderr, "fake cuBLAS: load the emulated libcuda.so.1 with RTLD_GLOBAL before\n");
    std::abort();
  }
  for (; count > 0; --count, p.a += p.a_step, p.b += p.b_step, p.c += p.c_step)
    if (launch(handle->stream, run, &p, sizeof p) != 0) return execution_failed;
  return 0;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int cublasCreate_v2(Handle** handle) {
  *handle = new Handle;
  return 0;
}

EXPORT const char* cublasGetStatusString(int status) {
  return status == invalid_value ? "CUBLAS_STATUS_INVALID_VALUE" : "CUBLAS_STATUS_EXECUTION_FAILED";
}

EXPORT int cublasSetStream_v2(Handle* handle, void* stream) {
  *handle = {stream, nullptr};  // it takes the workspace away, as the real one does
  return 0;
}

EXPORT int cublasSetWorkspace_v2(Handle* handle, void* workspace, std::size_t bytes) {
  handle->workspace = bytes != 0 ? workspace : nullptr;
  return 0;
}

EXPORT int cublasSetMathMode(Handle*, int) { return 0; }

EXPORT int cublasSgemmStridedBatched(Handle* handle, int at, int bt, int m, int n, int k, const float* alpha,
                                     const float* a, int lda, long long a_step, const float* b, int ldb,
                                     long long b_step, const float* beta, float* c, int ldc, long long c_step,
                                     int count) {
  return gemm(handle, {at != 0, bt != 0, m, n, k, *alpha, *beta, a, b, c, lda, ldb, ldc, a_step, b_step, c_step},
              count);
}

EXPORT int cublasSgemm_v2(Handle* handle, int at, int bt, int m, int n, int k, const float* alpha, const float* a,
                          int lda, const float* b, int ldb, const float* beta, float* c, int ldc) {
  return cublasSgemmStridedBatched(handle, at, bt, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1);
}
