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
// Columns col .. col + 8 of a row; zero past the last.
DEV void elements8(float* v, const Matrix& w, size_t row, int col) {
  bool half = w.kind == BF16 || w.kind == F16;
  size_t at = row * (size_t)w.cols + col;
  if (col + 8 > w.cols || ((half || w.kind == F32) && (w.cols & 7))) {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = col + j < w.cols ? element(w, row, col + j) : 0.0f;
  } else if (w.kind == F32) {
    const float4* p = (const float4*)((const float*)w.data + at);
    float4 a = p[0], b = p[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else if (half) {
    uint4 p = *(const uint4*)((const u16*)w.data + at);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 pair = word_at(p, j);
      v[2 * j] = w.kind == BF16 ? bf16_lo(pair) : f16_to_f32((u16)pair);
      v[2 * j + 1] = w.kind == BF16 ? bf16_hi(pair) : f16_to_f32((u16)(pair >> 16));
    }
  } else {
    float scale = load_float(w.scales, row * (size_t)(w.cols / w.group) + col / w.group, w.scale_kind);
    int zero = zero_code(w, row, col / w.group, w.kind == INT4 ? 4 : 8);
    const u32* words = (const u32*)w.data + (w.kind == INT4 ? at >> 3 : at >> 2);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      int code = w.kind == INT4 ? (int)((words[0] >> (4 * j)) & 15) : (int)((words[j >> 2] >> (8 * (j & 3))) & 255);
      v[j] = (float)(code - zero) * scale;
    }
  }
}
