// A weight as it lies on disk, and how one element or eight in a row are read as floats.
#pragma once
#include "base.cuh"

enum Kind { F32 = 0, BF16 = 1, F16 = 2, INT4 = 3, INT8 = 4 };

// Plain floats row-major, or packed codes with a scale every `group` columns of a row. Zero points, words of one group of consecutive
// rows, begin 16 * `zeros` bytes behind `data`; 0: the middle code is zero.
struct Matrix {
  const void* data;
  const void* scales;
  int rows, cols, group, kind, scale_kind, zeros;
};

DEV float f16_to_f32(u16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}
DEV float load_float(const void* p, size_t i, int kind) {
  if (kind == F32) return ((const float*)p)[i];
  u16 x = ((const u16*)p)[i];
  return kind == BF16 ? to_f32(x) : f16_to_f32(x);
}
// The code of zero of a group of a row of packed codes.
DEV int zero_code(const Matrix& w, size_t row, int group, int bits) {
  if (!w.zeros) return 1 << (bits - 1);
  int per_word = 32 / bits;
  const u32* zeros = (const u32*)((const char*)w.data + 16 * (size_t)w.zeros);
  u32 word = zeros[row / per_word * (size_t)(w.cols / w.group) + group];
  return (int)(word >> (bits * (int)(row % per_word)) & ((1u << bits) - 1));
}
DEV float element(const Matrix& w, size_t row, int col) {
  if (w.kind != INT4 && w.kind != INT8) return load_float(w.data, row * (size_t)w.cols + col, w.kind);
  int bits = w.kind == INT4 ? 4 : 8, per_word = 32 / bits;
  u32 word = ((const u32*)w.data)[row * (size_t)(w.cols / per_word) + col / per_word];
  int code = (int)((word >> (bits * (col % per_word))) & ((1 << bits) - 1)) - zero_code(w, row, col / w.group, bits);
  return (float)code * load_float(w.scales, row * (size_t)(w.cols / w.group) + col / w.group, w.scale_kind);
}
// Eight elements in a row as they lie in memory, and as floats; apart, so that a kernel may do other work while they travel.
//
// `n` of the eight are there, the others are zero bits. `aligned`: the first plain float lies at a multiple of eight; codes always do, and
// lie in one group.
DEV void fetch8(u32* words, const void* p, size_t at, int kind, int n, bool aligned) {
#pragma unroll
  for (int j = 0; j < 8; j++) words[j] = 0;
  if (kind == INT4) {
    words[0] = ((const u32*)p)[at >> 3];
  } else if (kind == INT8) {
    words[0] = ((const u32*)p)[at >> 2];
    if (n > 4) words[1] = ((const u32*)p)[(at >> 2) + 1];
  } else if (n < 8 || !aligned) {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j < n) {
        if (kind == F32) words[j] = ((const u32*)p)[at + j];
        else words[j >> 1] |= (u32)((const u16*)p)[at + j] << 16 * (j & 1);
      }
  } else if (kind == F32) {
    uint4 a = *(const uint4*)((const u32*)p + at), b = *(const uint4*)((const u32*)p + at + 4);
    words[0] = a.x, words[1] = a.y, words[2] = a.z, words[3] = a.w, words[4] = b.x, words[5] = b.y, words[6] = b.z, words[7] = b.w;
  } else {
    uint4 a = *(const uint4*)((const u16*)p + at);
    words[0] = a.x, words[1] = a.y, words[2] = a.z, words[3] = a.w;
  }
}
DEV void decode8(float* v, const u32* words, int kind, int zero, float scale) {
#define EACH(x) \
  _Pragma("unroll") for (int j = 0; j < 8; j++) v[j] = x
  if (kind == F32) {
    EACH(__uint_as_float(words[j]));
  } else if (kind == BF16) {
    EACH(j & 1 ? bf16_hi(words[j >> 1]) : bf16_lo(words[j >> 1]));
  } else if (kind == F16) {
    EACH(f16_to_f32((u16)(words[j >> 1] >> 16 * (j & 1))));
  } else if (kind == INT4) {
    EACH((float)((int)(words[0] >> 4 * j & 15) - zero) * scale);
  } else {
    EACH((float)((int)(words[j >> 2] >> 8 * (j & 3) & 255) - zero) * scale);
  }
#undef EACH
}
