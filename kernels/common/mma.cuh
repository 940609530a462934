// Tensor core products m16n8k16, bf16 x bf16 -> f32, and the way stored codes become their A operand.
//
// Lane (g = lane / 4, t = lane % 4) owns rows g and g + 8 of A and column g of B. A sum over k does not care about the order of
// k as long as both operands agree, so lane t takes the 16 bytes of consecutive k that it loaded: 32 k at 4 bits, 16 at 8, 8 at 16.
#pragma once
#include "base.cuh"

DEV void mma_16x8x16(float* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV void ldmatrix_x4_trans(u32* r, const void* p_sh) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p_sh)));
}
DEV void ldmatrix_x4(u32* r, const void* p_sh) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p_sh)));
}
DEV u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// nibbles i and i + 4 of a word, minus 8: 0x4300 | n is 128 + n, exact
DEV u32 nibble_pair(u32 word, int i) {
  u32 r;
  asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xEA;" : "=r"(r) : "r"(word >> (4 * i)), "r"(0x43004300u));
  return fma_bf16x2(r, 0x3f803f80u, 0xc308c308u);
}
// bytes 2 i and 2 i + 1 of a word, minus 128: (128 + low seven bits) - (256 or, with the top bit, 128)
DEV u32 byte_pair(u32 word, int i) {
  const u32 b = __byte_perm(word, 0u, i ? 0x4342 : 0x4140);
  u32 low, off;
  asm("lop3.b32 %0, %1, 0x007f007f, %2, 0xEA;" : "=r"(low) : "r"(b), "r"(0x43004300u));
  asm("lop3.b32 %0, %1, 0x00800080, %2, 0xAE;" : "=r"(off) : "r"(b), "r"(0xc300c300u));
  return fma_bf16x2(low, 0x3f803f80u, off);
}

template <int BITS>
struct Codes {
  static const int LANE_K = 128 / BITS;       // k of one 16-byte load
  static const int STEP_K = 4 * LANE_K;       // k of one load of four lanes
  static const int MMAS = LANE_K / 4;         // products that use it up
  static const int CHUNKS = LANE_K / 8;       // 16-byte chunks of activations beside it
};
// A operand of product j of a step from 16 bytes of row g and 16 of row g + 8; B is half j % 2 of activation chunk j / 2
template <int BITS>
DEV void codes_fragment(u32* a, const uint4& lo, const uint4& hi, int j) {
  if (BITS == 4) {
    const u32 l = word_at(lo, j / 2), h = word_at(hi, j / 2);
    const int i = (j % 2) * 2;
    a[0] = nibble_pair(l, i), a[1] = nibble_pair(h, i), a[2] = nibble_pair(l, i + 1), a[3] = nibble_pair(h, i + 1);
  } else if (BITS == 8) {
    const u32 l = word_at(lo, j), h = word_at(hi, j);
    a[0] = byte_pair(l, 0), a[1] = byte_pair(h, 0), a[2] = byte_pair(l, 1), a[3] = byte_pair(h, 1);
  } else {
    a[0] = word_at(lo, 2 * j), a[1] = word_at(hi, 2 * j), a[2] = word_at(lo, 2 * j + 1), a[3] = word_at(hi, 2 * j + 1);
  }
}

// Scales of one step for rows g and g + 8. SUB = groups a step: 1 where a group is at least a step, else step / group.
template <int SUB>
struct StepScales {
  u32 lo[SUB], hi[SUB];
};

// acc[NT][4] += scale * codes x activations over one step. x[nt][c]: chunk c of column g; columns are independent, so that one
// without a token may hold anything. With several groups in a step the products are taken once a group with the other lanes'
// activations masked.
template <int BITS, int SUB, int NT>
DEV void step_products(float (*acc)[4], const uint4& lo, const uint4& hi, const StepScales<SUB>& s, const uint4 (*x)[Codes<BITS>::CHUNKS]) {
  if constexpr (BITS == 16) {
#pragma unroll
    for (int j = 0; j < Codes<BITS>::MMAS; j++) {
      u32 a[4];
      codes_fragment<BITS>(a, lo, hi, j);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const uint4 v = x[n][j / 2];
        mma_16x8x16(acc[n], a, j % 2 ? v.z : v.x, j % 2 ? v.w : v.y);
      }
    }
  } else {
  float p[SUB][NT][4];
#pragma unroll
  for (int q = 0; q < SUB; q++)
#pragma unroll
    for (int n = 0; n < NT; n++) p[q][n][0] = p[q][n][1] = p[q][n][2] = p[q][n][3] = 0.f;
  const int mine = (threadIdx.x & 3) * SUB / 4;
#pragma unroll
  for (int j = 0; j < Codes<BITS>::MMAS; j++) {
    u32 a[4];
    codes_fragment<BITS>(a, lo, hi, j);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const uint4 v = x[n][j / 2];
      const u32 b0 = j % 2 ? v.z : v.x, b1 = j % 2 ? v.w : v.y;
#pragma unroll
      for (int q = 0; q < SUB; q++) mma_16x8x16(p[q][n], a, SUB == 1 || mine == q ? b0 : 0u, SUB == 1 || mine == q ? b1 : 0u);
    }
  }
#pragma unroll
  for (int q = 0; q < SUB; q++) {
    const float sl = __uint_as_float(s.lo[q] << 16), sh = __uint_as_float(s.hi[q] << 16);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      acc[n][0] += sl * p[q][n][0], acc[n][1] += sl * p[q][n][1];
      acc[n][2] += sh * p[q][n][2], acc[n][3] += sh * p[q][n][3];
    }
  }
}
}

// Partial sums of 16 rows: token n at n * PARTIAL_STRIDE, free of bank conflicts.
static const int PARTIAL_STRIDE = 20;
template <int NT>
DEV void store_partial(float* partial_sh, const float (*acc)[4]) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    float* p = partial_sh + (n * 8 + 2 * t) * PARTIAL_STRIDE;
    p[g] = acc[n][0], p[PARTIAL_STRIDE + g] = acc[n][1];
    p[g + 8] = acc[n][2], p[PARTIAL_STRIDE + g + 8] = acc[n][3];
  }
}
