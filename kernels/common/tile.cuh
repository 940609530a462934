// Sixteen rows of a stored matrix in registers, and the activations beside them in shared memory.
//
// A step is 64 bytes of a row: 128 k at 4 bits, 64 at 8, 32 at 16. Lane (g, t) holds 16 of them for rows g and g + 8.
#pragma once
#include "mma.cuh"

// Groups as a template argument: G = 32, 64 or 128 weights a scale, or 0 for one a row. SUB: groups a step, at least one.
template <int BITS, int G>
struct Groups {
  static const int STEP_K = Codes<BITS>::STEP_K;
  static const int SUB = G == 0 || G >= STEP_K ? 1 : STEP_K / G;
  static const int SHIFT = G == 0 ? 31 : G == 128 ? 7 : G == 64 ? 6 : 5;
};

template <int BITS, int G, int STEPS>
struct RowTile {
  uint4 lo[STEPS], hi[STEPS];
  StepScales<Groups<BITS, G>::SUB> s[STEPS];
};
// The first `limit` of the steps from `step` on of rows row + g and row + g + 8 of a [rows, K] matrix. `step` is a multiple of
// STEPS or begins a group. Past the end of rows or of k it reads the last ones again: such rows are not stored and such k meet
// zero activations.
template <int BITS, int G, int STEPS>
DEV void load_tile(RowTile<BITS, G, STEPS>& w, const void* packed, const bf16* scale, int row, int rows, int K, int step, int limit = STEPS) {
  typedef Groups<BITS, G> Gr;
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  const u32 r_lo = min_int(row + g, rows - 1), r_hi = min_int(row + g + 8, rows - 1), row_bytes = (u32)K * BITS / 8;
  const char *p_lo = (const char*)packed + (u64)r_lo * row_bytes, *p_hi = (const char*)packed + (u64)r_hi * row_bytes;
  const int at = step * 64 + t * 16;
  if (step * 64 + STEPS * 64 <= (int)row_bytes) {
    p_lo += at, p_hi += at;
#pragma unroll
    for (int c = 0; c < STEPS; c++)
      if (c < limit) w.lo[c] = load_streaming(p_lo + c * 64), w.hi[c] = load_streaming(p_hi + c * 64);
  } else {
#pragma unroll
    for (int c = 0; c < STEPS; c++) {
      const int b = min_int(at + c * 64, row_bytes - 16);
      if (c < limit) w.lo[c] = load_streaming(p_lo + b), w.hi[c] = load_streaming(p_hi + b);
    }
  }
  if constexpr (BITS != 16) {
    const int groups = G == 0 ? 1 : K >> Gr::SHIFT, first = (step * Gr::STEP_K) >> Gr::SHIFT;
    const bf16 *s_lo = scale + r_lo * groups, *s_hi = scale + r_hi * groups;
#pragma unroll
    for (int c = 0; c < STEPS; c++) {
      if (c > 0 && (G == 0 || c * Gr::STEP_K % (G ? G : 1) != 0)) {
        w.s[c] = w.s[c - 1];
        continue;
      }
#pragma unroll
      for (int q = 0; q < Gr::SUB; q++) {
        const int group = min_int(first + (G == 0 ? 0 : (c * Gr::STEP_K + q * (Gr::STEP_K / Gr::SUB)) >> Gr::SHIFT), groups - 1);
        w.s[c].lo[q] = load_u16_const(s_lo + group), w.s[c].hi[q] = load_u16_const(s_hi + group);
      }
    }
  }
}

// Where chunk c (eight k) of a row lies so that the four lanes of a row read 64 contiguous bytes.
template <int BITS>
DEV int chunk_place(int c) {
  const int per = 4 * Codes<BITS>::CHUNKS, in = c % per;
  return c - in + in % Codes<BITS>::CHUNKS * 4 + in / Codes<BITS>::CHUNKS;
}
// Row stride in chunks, 4 mod 8: eight rows of four lanes hit all banks.
DEV int chunk_stride(int chunks) { return (chunks | 7) + 5; }

// One warp copies `chunks` chunks of a row from k on into its own shared memory; zero past K.
template <int BITS>
DEV void copy_row(uint4* x_sh, const bf16* row, int k, int K, int chunks) {
#pragma unroll 1
  for (int c = threadIdx.x & 31; c < chunks; c += 32) {
    uint4* dst = x_sh + chunk_place<BITS>(c);
    if (k + c * 8 < K)
      copy_async_16(dst, row + k + c * 8);
    else
      *dst = make_uint4(0, 0, 0, 0);
  }
}
// Chunks of step c for column token[n]
template <int BITS, int NT>
DEV void read_chunks(uint4 (*x)[Codes<BITS>::CHUNKS], const uint4* x_sh, int stride, const int* column, int c) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < Codes<BITS>::CHUNKS; i++) x[n][i] = x_sh[column[n] * stride + (c * Codes<BITS>::CHUNKS + i) * 4 + t];
}
