// The innermost product of convolutions and linear layers, compiled once per set: a block of C stays in registers
// while one row of packed B and one column of A go by (Goto and van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication", ACM TOMS 34(3), 2008, section 6). Lowering writes B straight into the packed form, which a BLAS
// would make from a lowered matrix once more.
#pragma once

#include "cpu/vectors.h"

namespace distopt::DISTOPT_ISA {

// Vectors of a row of a tile.
#if defined(__AVX512F__)
constexpr Index kTileVectors = 4;
#else
constexpr Index kTileVectors = 2;
#endif

// Vectors of the widest tile where a row need not be one of a packed panel.
constexpr Index kWidestTile = kTileVectors < 3 ? 3 : 4;

// Columns of a panel of B, and the most rows of a packed one: 32 KiB, which stay in the first cache while every row of
// A passes over them.
template <class T>
constexpr Index kPanel = 256 / sizeof(T);
constexpr Index kPanelRows = 128;
// A packed panel lies strip after strip, each as wide as a tile and kPanelRows long: one long stride for all rows would
// make them compete for a few sets of the cache.
template <class T>
constexpr Index kStrip = kTileVectors * kLanes<T>;

// Where column j of the first row of a packed panel is.
template <class T>
constexpr Index packed_column(Index j) {
  return j / kStrip<T> * (kPanelRows * kStrip<T>)+j % kStrip<T>;
}

// A[i, k] = a[i * row + k * inner].
template <class T>
struct Left {
  const T* a;
  Index row, inner;
};

// A panel: its rows are `row` elements apart, its strips `strip`.
template <class T>
struct Right {
  const T* b;
  Index row, strip;

  const T* at(Index k) const { return b + k * row; }
};

// Rows that lie anywhere, at `offset[k]`.
template <class T>
struct Scattered {
  const T* b;
  const Index* offset;

  const T* at(Index k) const { return b + offset[k]; }
};

template <class T>
constexpr Right<T> packed(const T* b) {
  return {b, kStrip<T>, kPanelRows * kStrip<T>};
}

template <class T>
constexpr Right<T> in_rows(const T* b) {
  return {b, kPanel<T>, kStrip<T>};
}

// What happens to a block of C as it is stored.
template <class T>
struct Finish {
  bool accumulate;  // add to C instead of overwriting it
  const T* bias;    // one per row of C, added after the product; or null
  bool relu;
};

// C[rows, columns] = A[rows, inner] B[inner, columns]; B is one panel, of which the first `columns` count.
template <class T>
void multiply_panel(Index rows, Index inner, Left<T> left, Right<T> b, T* c, Index c_row, Index columns,
                    Finish<T> finish);

// The same with B in rows, `b_row` apart, of whole vectors. The widths are dealt out evenly, too.
template <class T>
void multiply_rows(Index rows, Index inner, Left<T> left, const T* b, Index b_row, T* c, Index c_row, Index vectors,
                   bool accumulate);

// The same with rows of B that lie anywhere, of at most kWidestTile whole vectors.
template <class T>
void multiply_scattered(Index rows, Index inner, Left<T> left, Scattered<T> b, T* c, Index c_row, Index vectors,
                        const Finish<T>& finish);

}  // namespace distopt::DISTOPT_ISA
