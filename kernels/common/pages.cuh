// Where keys and values are in a page, for all kernels that write or read them.
#pragma once

static const int PAGE = 16;  // tokens

// Where a page's rows of one head begin, [16][dim].
__host__ __device__ __forceinline__ size_t page_at(int dim, int heads, int page, int head) { return ((size_t)page * heads + head) * PAGE * dim; }
// Rows of a page are pieces of 16 bytes, and where a row is whole lines the order of each eight is one of eight, by the row: a piece of eight rows, or four
// pieces of two, lie in all banks when a page is in shared memory as it is in the cache. The place of piece c, and of element i, of row r.
template <int DH>
__host__ __device__ __forceinline__ int piece_at(int r, int c) {
  return DH % 64 ? c : c ^ ((r & 1) << 2 | (r >> 1 & 3));
}
template <int DH>
__host__ __device__ __forceinline__ int element_at(int r, int i) {
  return piece_at<DH>(r, i >> 3) * 8 + (i & 7);
}
__host__ __device__ __forceinline__ int element_at(int dim, int r, int i) { return dim % 64 ? i : element_at<64>(r, i); }
