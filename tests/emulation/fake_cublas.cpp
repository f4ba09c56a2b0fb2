// A cuBLAS for host memory, as far as distopt/nn/kernels/gpu_base.py uses it. Products run when their stream gets
// there.
//
// FAKE_CUBLAS_RECORD=path: every product becomes a line of that file.
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
  int math_mode = 0;
};

template <class T>
struct Arguments {
  bool a_transposed, b_transposed;
  int m, n, k;
  T alpha, beta;
  const T *a, *b;
  T* c;
  int a_width, b_width, c_width;
};

// Column-major, as BLAS has it.
template <class T>
void run(const void* arguments) {
  const auto& p = *static_cast<const Arguments<T>*>(arguments);
  std::vector<double> column(static_cast<std::size_t>(p.m));
  for (std::ptrdiff_t j = 0; j < p.n; ++j) {
    column.assign(column.size(), 0.0);
    for (std::ptrdiff_t l = 0; l < p.k; ++l) {
      const double factor = p.b_transposed ? p.b[j + l * p.b_width] : p.b[l + j * p.b_width];
      const T* a = p.a + (p.a_transposed ? l : l * p.a_width);
      const std::ptrdiff_t step = p.a_transposed ? p.a_width : 1;
      for (std::ptrdiff_t i = 0; i < p.m; ++i) column[static_cast<std::size_t>(i)] += factor * a[i * step];
    }
    for (std::ptrdiff_t i = 0; i < p.m; ++i) {
      T& c = p.c[i + j * p.c_width];
      const double sum = p.alpha * column[static_cast<std::size_t>(i)];
      c = static_cast<T>(p.beta == 0 ? sum : sum + p.beta * c);  // with a beta of 0, c may be NaN
    }
  }
}

template <class T>
int gemm(Handle* handle, const Arguments<T>& p) {
  const int a_rows = p.a_transposed ? p.k : p.m, b_rows = p.b_transposed ? p.n : p.k;
  if (p.m < 0 || p.n < 0 || p.k < 0 || p.a_width < a_rows || p.b_width < b_rows || p.c_width < p.m)
    return invalid_value;
  if (handle->workspace == nullptr) return execution_failed;  // the real one would allocate, and that is not wanted
  if (const char* path = std::getenv("FAKE_CUBLAS_RECORD")) {
    if (std::FILE* file = std::fopen(path, "a")) {
      std::fprintf(file, "%d %d %d mode %d\n", p.n, p.m, p.k, handle->math_mode);
      std::fclose(file);
    }
  }
  using Launch = int (*)(void*, void (*)(const void*), const void*, std::size_t);
  static const auto launch = reinterpret_cast<Launch>(::dlsym(RTLD_DEFAULT, "emulation_launch"));
  if (launch == nullptr) {
    std::fprintf(stderr, "fake cuBLAS: load the emulated libcuda.so.1 with RTLD_GLOBAL before\n");
    std::abort();
  }
  return launch(handle->stream, run<T>, &p, sizeof p) == 0 ? 0 : execution_failed;
}

template <class T>
int gemms(Handle* handle, Arguments<T> p, long long a_step, long long b_step, long long c_step, int count) {
  int status = count < 0 ? invalid_value : 0;
  for (; count > 0 && status == 0; --count, p.a += a_step, p.b += b_step, p.c += c_step) status = gemm(handle, p);
  return status;
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
  handle->stream = stream;
  handle->workspace = nullptr;  // as the real one does it
  return 0;
}

EXPORT int cublasSetWorkspace_v2(Handle* handle, void* workspace, std::size_t bytes) {
  handle->workspace = bytes != 0 ? workspace : nullptr;
  return 0;
}

EXPORT int cublasSetMathMode(Handle* handle, int mode) {
  handle->math_mode = mode;
  return 0;
}

EXPORT int cublasSgemm_v2(Handle* handle, int at, int bt, int m, int n, int k, const float* alpha, const float* a,
                          int lda, const float* b, int ldb, const float* beta, float* c, int ldc) {
  return gemm<float>(handle, {at != 0, bt != 0, m, n, k, *alpha, *beta, a, b, c, lda, ldb, ldc});
}

EXPORT int cublasDgemm_v2(Handle* handle, int at, int bt, int m, int n, int k, const double* alpha, const double* a,
                          int lda, const double* b, int ldb, const double* beta, double* c, int ldc) {
  return gemm<double>(handle, {at != 0, bt != 0, m, n, k, *alpha, *beta, a, b, c, lda, ldb, ldc});
}

EXPORT int cublasSgemmStridedBatched(Handle* handle, int at, int bt, int m, int n, int k, const float* alpha,
                                     const float* a, int lda, long long a_step, const float* b, int ldb,
                                     long long b_step, const float* beta, float* c, int ldc, long long c_step,
                                     int count) {
  return gemms<float>(handle, {at != 0, bt != 0, m, n, k, *alpha, *beta, a, b, c, lda, ldb, ldc}, a_step, b_step,
                      c_step, count);
}

EXPORT int cublasDgemmStridedBatched(Handle* handle, int at, int bt, int m, int n, int k, const double* alpha,
                                     const double* a, int lda, long long a_step, const double* b, int ldb,
                                     long long b_step, const double* beta, double* c, int ldc, long long c_step,
                                     int count) {
  return gemms<double>(handle, {at != 0, bt != 0, m, n, k, *alpha, *beta, a, b, c, lda, ldb, ldc}, a_step, b_step,
                       c_step, count);
}
