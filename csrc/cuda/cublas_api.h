// The part of cuBLAS that is used: own declarations of its C interface, which CUDA 12 and 13 share. It is loaded at run
// time, so that building needs no cuBLAS. CuPy refuses to call cuBLAS while a stream is captured in a graph, so
// products go this way.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

namespace distopt::cublas {

struct Handle;  // opaque

enum class Status : int { success = 0 };
enum class Transpose : int { no = 0, yes = 1 };
enum class MathMode : int { standard = 0, tf32 = 3 };

#define DISTOPT_CUBLAS_GEMM(T) \
  (Handle*, Transpose, Transpose, int, int, int, const T*, const T*, int, const T*, int, const T*, T*, int)

// X(field, symbol, result, parameters)
#define DISTOPT_CUBLAS_REQUIRED(X)                                               \
  X(create, cublasCreate_v2, Status, (Handle**))                                 \
  X(get_status_string, cublasGetStatusString, const char*, (Status))             \
  X(set_stream, cublasSetStream_v2, Status, (Handle*, cudaStream_t))             \
  X(set_workspace, cublasSetWorkspace_v2, Status, (Handle*, void*, std::size_t)) \
  X(set_math_mode, cublasSetMathMode, Status, (Handle*, MathMode))               \
  X(sgemm, cublasSgemm_v2, Status, DISTOPT_CUBLAS_GEMM(float))                   \
  X(dgemm, cublasDgemm_v2, Status, DISTOPT_CUBLAS_GEMM(double))

struct CublasApi {
#define DISTOPT_CUBLAS_FIELD(field, symbol, result, parameters) result(*field) parameters = nullptr;
  DISTOPT_CUBLAS_REQUIRED(DISTOPT_CUBLAS_FIELD)
#undef DISTOPT_CUBLAS_FIELD
};

// Loads the library at this path, or with this name: glibc then returns the library that the process has loaded
// already, as CuPy does. It is never unloaded. Throws std::runtime_error with the reason.
const CublasApi& load(const std::string& path);

// Memory that cuBLAS may use while a product runs. Products that share it must be on streams that are in order.
struct Workspace {
  void* memory;
  std::size_t bytes;
};

// c [rows, columns] = a [rows, inner] b [inner, columns], plus c if `accumulate`; all are dense and row-major, and a or
// b transposed lies in memory as [inner, rows] or [columns, inner]. No size is 0.
template <class T>
struct Product {
  int rows, columns, inner;
  bool a_transposed, b_transposed, accumulate;
  const T *a, *b;
  T* c;
};

// Products on one device, which must be current: a handle of cuBLAS, never destroyed, because the library may
// be torn down before. Not thread-safe; its callers hold Python's lock.
class Products {
 public:
  Products(const CublasApi& api, bool tf32);
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  // Enqueues. The same bits for the same sizes, alignment and workspace size, in a capture or not.
  template <class T>
  void multiply(const Product<T>& product, const Workspace& workspace, cudaStream_t stream);

 private:
  void check(Status status, const char* call) const;

  const CublasApi& api_;
  Handle* handle_ = nullptr;
  cudaStream_t stream_ = nullptr;
  void* memory_ = nullptr;
};

}  // namespace distopt::cublas
