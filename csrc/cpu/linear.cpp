#include "cpu/linear.h"

#include "cpu/gemm.h"

namespace distopt::DISTOPT_ISA {
namespace {

// Rows of a packed panel: more than in convolutions, because the start and end of a tile take as long as 10 rows.
constexpr Index kDepth = 256;
// Rows of the left matrix that stay in the second cache while all strips of a panel pass over them.
constexpr Index kChunk = 48;
// How many rows before it is copied a row is asked for: its piece is too short for the processor to foresee the next.
constexpr Index kAhead = 8;

// Rows of the next panel when `left` are left: all are about equally long.
inline Index depth_of(Index left) {
  const Index panels = (left + kDepth - 1) / kDepth;
  return (left + panels - 1) / panels;
}

template <class T>
void pack(const T* b, Index b_row, Index rows, Index columns, T* panel) {
  for (Index j = 0; j < columns; j += kStrip<T>) {
    const T* from = b + j;
    T* to = panel + j * rows;
    const Index some = smaller(columns - j, kStrip<T>);
    for (Index i = 0; i < rows; ++i, from += b_row, to += kStrip<T>) {
      if (j == 0)
        for (Index ahead = 0; ahead < columns; ahead += 64 / sizeof(T))
          __builtin_prefetch(from + kAhead * b_row + ahead);
      if (some == kStrip<T>)  // a constant size needs no call
        __builtin_memcpy(to, from, kStrip<T> * sizeof(T));
      else
        __builtin_memcpy(to, from, some * sizeof(T));
    }
  }
}

// C[rows, columns] = A[rows, depth] B, where B is a packed panel.
template <class T>
void multiply_packed(Index rows, Index depth, Left<T> left, const T* panel, T* c, Index c_row, Index columns,
                     Finish<T> finish) {
  for (Index i = 0; i < rows; i += kChunk)
    multiply_panel<T>(smaller(rows - i, kChunk), depth, {left.a + i * left.row, left.row, left.inner},
                      {panel, kStrip<T>, depth * kStrip<T>}, c + i * c_row, c_row, columns, finish);
}

// C[rows, columns] (+)= A B, with B[inner, columns] in rows that are `b_row` apart.
template <class T>
void multiply(Index rows, Index inner, Index columns, Left<T> left, const T* b, Index b_row, T* c, bool accumulate,
              bool relu, T* panel) {
  for (Index j = 0; j < columns; j += kPanel<T>) {
    const Index width = smaller(columns - j, kPanel<T>);
    for (Index k = 0, depth; k < inner; k += depth) {
      depth = depth_of(inner - k);
      pack(b + k * b_row + j, b_row, depth, width, panel);
      multiply_packed<T>(rows, depth, {left.a + k * left.inner, left.row, left.inner}, panel, c + j, columns, width,
                         {accumulate || k > 0, nullptr, relu && k + depth == inner});
    }
  }
}

template <class T>
Index work_size(const LinearShape& s) {
  return (kDepth + s.in) * kPanel<T> + s.n * s.out;
}

template <class T>
void forward(const LinearShape& s, const T* x, const T* w, const T* bias, T* y, bool relu, T* work) {
  for (Index i = 0; bias && i < s.n; ++i) __builtin_memcpy(y + i * s.out, bias, s.out * sizeof(T));
  multiply<T>(s.n, s.in, s.out, {x, s.in, 1}, w, s.out, y, bias != nullptr, relu, work);
}

// g = dy where the ReLU let y pass, and 0 elsewhere.
template <class T>
void mask_gradient(Index count, const T* __restrict__ dy, const T* __restrict__ y, T* __restrict__ g) {
  for (Index i = 0; i < count; ++i) g[i] = y[i] <= 0 ? 0 : dy[i];
}

// dx = g w^T, computed as dx^T = w g^T, so that g and dx are transposed, and w is not.
template <class T>
void backward_input(const LinearShape& s, const T* g, const T* w, T* dx, T* panel, T* transposed) {
  for (Index n = 0; n < s.n; n += kPanel<T>) {
    const Index width = smaller(s.n - n, kPanel<T>);
    for (Index k = 0, depth; k < s.out; k += depth) {
      depth = depth_of(s.out - k);
      for (Index j = 0; j < width; ++j) {
        T* const to = panel + j / kStrip<T> * kStrip<T> * depth + j % kStrip<T>;
        for (Index i = 0; i < depth; ++i) to[i * kStrip<T>] = g[(n + j) * s.out + k + i];
      }
      multiply_packed<T>(s.in, depth, {w + k, s.out, 1}, panel, transposed, kPanel<T>, width, {k > 0, nullptr, false});
    }
    for (Index j = 0; j < width; ++j)
      for (Index i = 0; i < s.in; ++i) dx[(n + j) * s.in + i] = transposed[i * kPanel<T> + j];
  }
}

template <class T>
void backward(const LinearShape& s, const T* dy, const T* y, const T* x, const T* w, T* dw, T* db, T* dx, T* work) {
  T *const panel = work, *const transposed = panel + kDepth * kPanel<T>, *const masked = transposed + s.in * kPanel<T>;
  if (y) mask_gradient(s.n * s.out, dy, y, masked);
  const T* const g = y ? masked : dy;
  if (db) {
    for (Index j = 0; j < s.out; ++j) db[j] = 0;
    for (Index i = 0; i < s.n; ++i)
      for (Index j = 0; j < s.out; ++j) db[j] += g[i * s.out + j];
  }
  if (dw && s.n == 0) __builtin_memset(dw, 0, s.in * s.out * sizeof(T));
  if (dw) multiply<T>(s.in, s.n, s.out, {x, 1, s.in}, g, s.out, dw, false, false, panel);
  if (dx) backward_input(s, g, w, dx, panel, transposed);
}

template <class T>
constexpr LinearTable<T> table_of = {&work_size<T>, &forward<T>, &backward<T>};

const LinearKernels table = {table_of<float>, table_of<double>};

}  // namespace

const LinearKernels& linear_kernels() { return table; }

}  // namespace distopt::DISTOPT_ISA
