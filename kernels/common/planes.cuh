// Activations as two planes, tensor core products with stored codes.
//
// A group is 128 consecutive k of a row. Beside integer codes x = scale (256 hi + lo), hi in -127..127, lo in -128..127, scale =
// max |x| / 32639: an error of at most 2^-16 of the group's largest element, and sums of a group exact in s32. Beside bf16
// weights x = hi + lo, both bf16: 2^-16 of each element. Hi and lo are two columns of one product, so a product of eight columns
// serves four tokens. Four-bit codes need three instructions a word and eight-bit codes one to become operands, where bf16
// operands need 13 a word.
//
// Lane (g = lane / 4, t = lane % 4) owns rows g and g + 8 of A, column g of B (token g / 2, plane g % 2), and of the sums both planes
// of token t. A sum over k does not care about the order of k as long as both operands agree: lane t takes the 16 bytes of
// consecutive k that it loaded.
//
// A token's group is a block. BY_LANE: [piece][plane][lane t][16 bytes]. At four bits piece i of two is k 32 t + 16 i.., each run of eight as
// 0 2 4 6 1 3 5 7; at eight bits k 64 i + 16 t.. of two; at sixteen k 32 i + 8 t.. of four. BY_K, for warpgroup products: [plane][128] in the order of
// k, except that at four bits each run of 32 is [parity of k][16]. A row is [groups][block], its scales [groups, up to a multiple of 4]
// f32 (unused at sixteen bits).
#pragma once
#include "mma.cuh"
#include "reduce.cuh"

static const int GROUP_K = 128;
// Bytes of one token's group.
template <int BITS>
struct Block {
  static const int BYTES = BITS == 16 ? 512 : 256;
};

DEV void mma_s8(int* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEV u32 pack_bytes(int a, int b, int c, int d) { return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410); }
// of products with both planes
DEV float planes_sum(int hi, int lo) { return (float)(hi * 256 + lo); }
static const float PLANES_MOST = 127 * 256 + 127;
// The sum of squares of a group, of which sixteen neighbouring lanes hold eight elements each.
DEV float group_square(const float* f) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum = fmaf(f[i], f[i], sum);
#pragma unroll
  for (int i = 8; i; i >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  return sum;
}
// the product of a group, of which sixteen neighbouring lanes hold eight elements each
DEV float group_dot(const float* w, const float4& a, const float4& b) {
  float sum = fmaf(w[3], a.w, fmaf(w[2], a.z, fmaf(w[1], a.y, __fmul_rn(w[0], a.x))));
  sum = fmaf(w[7], b.w, fmaf(w[6], b.z, fmaf(w[5], b.y, fmaf(w[4], b.x, sum))));
#pragma unroll
  for (int i = 8; i; i >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  return sum;
}
DEV float sum_groups(const float* group_sh, int groups) {
  float sum = 0.f;
#pragma unroll 8
  for (int i = 0; i < groups; i++) sum += group_sh[i];
  return sum;
}
// 1 / rms of a row from the squares of its groups
DEV float inverse_rms(const float* square_sh, int groups, int K, float eps) { return rsqrtf(sum_groups(square_sh, groups) / K + eps); }
// Sixteen neighbouring lanes with eight elements each (chunk c of a row) make one block; all lanes of a warp take part, `use` says
// which write. Not-a-number and infinity end up in the scale. `total`: 128 times the sum of a block, wanted by products that take codes without sign.
enum PlaneOrder { BY_LANE, BY_K };
template <int BITS, int ORDER = BY_LANE>
DEV void make_block(char* block, float* scale, int c, const float* f, bool use, int* total = 0) {
  const int in = c & 15;
  if (BITS == 16) {
    uint4 h, l;
    u32 *hi = &h.x, *lo = &l.x;
#pragma unroll
    for (int i = 0; i < 4; i++) hi[i] = bf16_pair(f[2 * i], f[2 * i + 1]), lo[i] = bf16_rest(f[2 * i], f[2 * i + 1], hi[i]);
    char* at = block + (ORDER == BY_K ? in * 16 : (in >> 2) * 128 + (in & 3) * 16);
    if (use) *(uint4*)at = h, *(uint4*)(at + (ORDER == BY_K ? 256 : 64)) = l;
    return;
  }
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) top = max(top, __float_as_uint(f[i]) & 0x7fffffffu);
  const bool second = threadIdx.x & 16;
  const u32 tops[2] = {warp_max_u32(second ? 0 : top), warp_max_u32(second ? top : 0)};
  top = second ? tops[1] : tops[0];
  const float largest = __uint_as_float(top), inv = largest > 1e-30f ? __fdividef(PLANES_MOST, largest) : 0.f;
  int hi[8], lo[8], sum = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int q = __float_as_int(fmaf(f[i], inv, 12582912.f)) - 0x4b400000;  // to the nearest integer
    hi[i] = (q + 128) >> 8, lo[i] = q - (hi[i] << 8), sum += q;
  }
  if (total) {
    const u32 sums[2] = {warp_sum_u32(second ? 0 : sum), warp_sum_u32(second ? sum : 0)};
    if (use && in == 0) *total = 128 * (int)(second ? sums[1] : sums[0]);
  }
  uint2 h = make_uint2(pack_bytes(hi[0], hi[1], hi[2], hi[3]), pack_bytes(hi[4], hi[5], hi[6], hi[7]));
  uint2 l = make_uint2(pack_bytes(lo[0], lo[1], lo[2], lo[3]), pack_bytes(lo[4], lo[5], lo[6], lo[7]));
  if (BITS == 4) {
    h = make_uint2(__byte_perm(h.x, h.y, 0x6420), __byte_perm(h.x, h.y, 0x7531));
    l = make_uint2(__byte_perm(l.x, l.y, 0x6420), __byte_perm(l.x, l.y, 0x7531));
  }
  if (!use) return;
  if (in == 0) *scale = largest * (1.f / PLANES_MOST);
  if (ORDER == BY_K) {
    char* at = block + (BITS == 4 ? (in >> 2) * 32 + (in & 3) * 4 : in * 8);
    const int second = BITS == 4 ? 16 : 4;
    *(u32*)at = h.x, *(u32*)(at + second) = h.y, *(u32*)(at + 128) = l.x, *(u32*)(at + 128 + second) = l.y;
    return;
  }
  char* at = block + (BITS == 4 ? (in >> 1 & 1) * 128 + (in >> 2) * 16 + (in & 1) * 8 : (in >> 3) * 128 + (in >> 1 & 3) * 16 + (in & 1) * 8);
  *(uint2*)at = h, *(uint2*)(at + 64) = l;
}

// Groups of weights as a template argument: G = 32, 64 or 128 weights a scale, or 0 for one a row or none. SUB: scales a group of 128.
template <int BITS, int G>
struct Form {
  static const int PIECES = BITS / 4;               // 16-byte pieces of a row and group that a lane holds
  static const int MMAS = BITS == 16 ? 8 : 4;       // products of a group
  static const int ROW_BYTES = GROUP_K * BITS / 8;  // of a row and group
  static const int SUB = BITS == 16 ? 0 : G == 0 ? 1 : GROUP_K / G;
};
DEV int groups_of(int K) { return div_up(K, GROUP_K); }
// Elements of a row of plane scales: whole 16 bytes.
DEV int scale_row(int groups) { return (groups + 3) & ~3; }

// Codes of rows g and g + 8 in one group as operands: signed, four bits times 16; bf16 as they are.
template <int BITS>
DEV void unpack(u32 (*a)[4], const uint4* lo, const uint4* hi) {
  if constexpr (BITS == 4) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 l = word_at(lo[0], j), h = word_at(hi[0], j);
      a[j][0] = (l << 4 & 0xf0f0f0f0u) ^ 0x80808080u, a[j][1] = (h << 4 & 0xf0f0f0f0u) ^ 0x80808080u;
      a[j][2] = (l & 0xf0f0f0f0u) ^ 0x80808080u, a[j][3] = (h & 0xf0f0f0f0u) ^ 0x80808080u;
    }
  } else {
    const u32 sign = BITS == 8 ? 0x80808080u : 0u;
#pragma unroll
    for (int j = 0; j < Form<BITS, 0>::MMAS; j++) {
      const uint4 l = lo[j / 2], h = hi[j / 2];
      a[j][0] = word_at(l, j % 2 * 2) ^ sign, a[j][1] = word_at(h, j % 2 * 2) ^ sign;
      a[j][2] = word_at(l, j % 2 * 2 + 1) ^ sign, a[j][3] = word_at(h, j % 2 * 2 + 1) ^ sign;
    }
  }
}
// Scales of rows g and g + 8 in one group, over 16 at four bits.
template <int SUB>
struct RowScales {
  float lo[SUB ? SUB : 1], hi[SUB ? SUB : 1];
};
template <bool ROUNDED>
DEV void add_product(float& sum, float a, float b) {
  sum = ROUNDED ? __fadd_rn(sum, __fmul_rn(a, b)) : fmaf(a, b, sum);
}
// sums[n][i * stride + 0, 1] += scales * codes x activations of one group, rows g and g + 8 of tile i, token t of columns n; x: pieces of
// column g, sx: scale of token t. Where a group has several scales, the products are taken once for each, with the activations of
// the other lanes masked. Independent products alternate, since one alone waits 25 cycles for the one before. One column of tokens alone
// (NB = 1) adds rounded products, so that sums are the same bits wherever the products of a group were made.
template <int BITS, int SUB, int MT, int NB>
DEV void group_products(float* const* sums, int stride, const u32 (*a)[Form<BITS, 0>::MMAS][4], const RowScales<SUB>* s, const uint4 (*x)[Block<BITS>::BYTES / 128], const float* sx) {
  if constexpr (BITS == 16) {
    float c[MT][NB][4];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int n = 0; n < NB; n++) c[i][n][0] = c[i][n][1] = c[i][n][2] = c[i][n][3] = 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NB; n++) mma_bf16(c[i][n], a[i][j], j % 2 ? x[n][j / 2].z : x[n][j / 2].x, j % 2 ? x[n][j / 2].w : x[n][j / 2].y);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int n = 0; n < NB; n++) add_product<NB == 1>(sums[n][i * stride], sx[n], c[i][n][0] + c[i][n][1]), add_product<NB == 1>(sums[n][i * stride + 1], sx[n], c[i][n][2] + c[i][n][3]);
  } else {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int q = 0; q < SUB; q++) {
      const bool mine = SUB == 1 || (BITS == 4 ? t * SUB / 4 == q : SUB == 2 || t / 2 == q % 2);
      const int CHAINS = MT * NB * SUB == 1 ? 2 : 1;  // of sums that do not wait for each other
      int chain[CHAINS][MT][NB][4];
      int(&c)[MT][NB][4] = chain[0];
#pragma unroll
      for (int h = 0; h < CHAINS; h++)
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int n = 0; n < NB; n++) chain[h][i][n][0] = chain[h][i][n][1] = chain[h][i][n][2] = chain[h][i][n][3] = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (BITS == 8 && SUB > 1 && j / 2 != (SUB == 2 ? q : q / 2)) continue;
#pragma unroll
        for (int n = 0; n < NB; n++) {
          const u32 b0 = j % 2 ? x[n][j / 2].z : x[n][j / 2].x, b1 = j % 2 ? x[n][j / 2].w : x[n][j / 2].y;
#pragma unroll
          for (int i = 0; i < MT; i++) mma_s8(chain[j % CHAINS][i][n], a[i][j], mine ? b0 : 0u, mine ? b1 : 0u);
        }
      }
      if (CHAINS == 2)
#pragma unroll
        for (int i = 0; i < 4; i++) c[0][0][i] += chain[CHAINS - 1][0][0][i];
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NB; n++) {
          add_product<NB == 1>(sums[n][i * stride], s[i].lo[q] * sx[n], planes_sum(c[i][n][0], c[i][n][1]));
          add_product<NB == 1>(sums[n][i * stride + 1], s[i].hi[q] * sx[n], planes_sum(c[i][n][2], c[i][n][3]));
        }
    }
  }
}
