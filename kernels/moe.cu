// moe_down: y[t, d] = add[t, d] + scale * sum_rank gate[p] * (W_down[e] h[p])_d,  p = t K + rank, e the expert of p
//
// W, scale as in linear.cu; one pointer an expert; h [T K, F] f32; y, add [T, D] f32, y may be add
// needs  F % 32 == 0, 16-byte aligned rows; T K <= 65535; sums of a group exact, the rest f32
//
// A block owns 16 rows of D; its warps take (expert, chunk of k) items, each with its codes arriving in its own stages and h turned
// into planes by itself. Every expert is read once, whatever the number of tokens that chose it; the grid does not depend on the
// routing. The sum over ranks goes in order of rank, inside one block: the same bits in any batch.
//
// Instances moe_down_F, F as in linear.cu. Launch: grid ceil(D / 16), warps 8 or 16 (w4_g32, w8_g32, w16: 8), chunk <= 6 groups of
//   128, chunks = ceil(ceil(F / 128) / chunk), block = 256 bytes (w16: 512)
//   shared warps * (16 * stages * line(min(16 chunk BITS, F BITS / 8)) + ceil16(columns * chunk * (block + 4))) + 64 * T K * chunks
// Floors: bytes of the chosen experts, F D bits / 8 each, at read bandwidth. Source: src/engine/cpu/experts.rs.
#include "common/planes.cuh"
#include "common/routing.cuh"
#include "common/stream.cuh"

struct DownArgs {
  float* y;
  const float* add;  // or null
  const float* h;
  const ExpertSlot* slots;
  const int* num_slots;
  const int* pairs;
  const float* gates;  // [T, K]
  int T, D, F, K;
  int chunk;    // groups an item, 1..6
  int stages;   // items of codes in shared memory a warp, 1 or 2
  int columns;  // tokens of an expert at a time, 1..4
  float scale;
};

template <int BITS, int G>
DEV void down_rows(const DownArgs& a) {
  typedef Form<BITS, G> F;
  const int MOST = 6, SUB = F::SUB, BLOCK = Block<BITS>::BYTES;
  extern __shared__ uint4 moe_sh[];
  __shared__ u64 barriers_sh[2 * 16];
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int row = blockIdx.x * 16, groups = groups_of(a.F), chunks = div_up(groups, a.chunk), row_bytes = a.F * BITS / 8;
  const int slice = a.chunk * F::ROW_BYTES, stride = stream_stride(min_int(slice, row_bytes), row_bytes), x_bytes = (a.columns * a.chunk * (BLOCK + 4) + 15) & ~15;
  char* tile_sh = (char*)moe_sh + warp * a.stages * 16 * stride;               // [stages][16][stride] a warp
  char* x_sh = (char*)moe_sh + warps * a.stages * 16 * stride + warp * x_bytes;  // [columns][chunk][block] a warp
  float* sx_sh = (float*)(x_sh + a.columns * a.chunk * BLOCK);                 // [columns][chunk]
  float* part_sh = (float*)((char*)moe_sh + warps * (a.stages * 16 * stride + x_bytes));  // [T K][chunks][16]
  u64* barrier_sh = barriers_sh + warp * 2;
  if (lane < 2) stream_init(barrier_sh + (threadIdx.x & 1)), stream_init_done();
  __syncwarp();
  const int items = *a.num_slots * chunks;  // the router ran two kernels ago
  auto fetch = [&](int item, int stage) {
    const int slot_idx = item / chunks, at = (item - slot_idx * chunks) * slice, bytes = min_int(slice, row_bytes - at);
    stream_expect(barrier_sh + stage, stream_bytes(row_bytes, a.D - row, bytes));
    stream_rows(barrier_sh + stage, tile_sh + stage * 16 * stride, stride, (const char*)a.slots[slot_idx].down_packed + (u64)row * row_bytes + at, row_bytes, a.D - row, bytes);
    stream_arrive(barrier_sh + stage);
  };
#pragma unroll 1
  for (int i = 0; i < a.stages; i++)
    if (warp + i * warps < items) fetch(warp + i * warps, i);
  dependency_wait();
  dependents_launch();
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int item = warp; item < items; item += warps) {
    const int slot_idx = item / chunks, chunk = item - slot_idx * chunks, first = chunk * a.chunk, end = min_int(a.chunk, groups - first);
    const ExpertSlot& slot = a.slots[slot_idx];
    const int count = slot.count;
    RowScales<SUB> scales[MOST];
    if constexpr (SUB > 0) {
      const int each = G == 0 ? 1 : a.F / (G ? G : 1);
      const bf16 *s_lo = slot.down_scale + (u64)min_int(row + g, a.D - 1) * each, *s_hi = slot.down_scale + (u64)min_int(row + g + 8, a.D - 1) * each;
#pragma unroll
      for (int c = 0; c < MOST; c++) {
        if (c >= end) break;
#pragma unroll
        for (int q = 0; q < SUB; q++) {
          const int at = G == 0 ? 0 : min_int((first + c) * SUB + q, each - 1);
          scales[c].lo[q] = __uint_as_float(load_u16_const(s_lo + at) << 16) * (BITS == 4 ? 0.0625f : 1.f);
          scales[c].hi[q] = __uint_as_float(load_u16_const(s_hi + at) << 16) * (BITS == 4 ? 0.0625f : 1.f);
        }
      }
    }
#pragma unroll 1
    for (int n0 = 0; n0 < count; n0 += a.columns) {
      const int used = min_int(a.columns, count - n0), work = used * a.chunk * 16;
      __syncwarp();
#pragma unroll 1
      for (int base = 0; base < work; base += 32) {
        const int c = base + lane, n = c / (a.chunk * 16), in = c - n * a.chunk * 16, k = first * GROUP_K + in * 8;
        float f[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        if (c < work && k < a.F) {
          const float* h = a.h + (size_t)slot_pair(slot, a.pairs, n0 + n) * a.F + k;
          *(float4*)f = *(const float4*)h, *(float4*)(f + 4) = *(const float4*)(h + 4);
        }
        make_block<BITS>(x_sh + (c >> 4) * BLOCK, sx_sh + (c >> 4), in, f, c < work);
      }
      __syncwarp();
      if (n0 == 0) stream_wait(barrier_sh + stage, parity);
      float acc[2] = {0.f, 0.f};
      const int token = min_int(g >> 1, used - 1), mine = min_int(t, used - 1);
#pragma unroll
      for (int c = 0; c < MOST; c++) {
        if (c >= end) break;
        const char* codes = tile_sh + stage * 16 * stride + g * stride + c * F::ROW_BYTES + t * 16;
        uint4 lo[F::PIECES], hi[F::PIECES], x[1][BLOCK / 128];
#pragma unroll
        for (int i = 0; i < F::PIECES; i++) {
          // past the end of a row lie other bytes, harmless as integers times zero
          const bool inside = BITS != 16 || ((first + c) * F::ROW_BYTES + i * 64 + t * 16 < row_bytes);
          lo[i] = inside ? *(const uint4*)(codes + i * 64) : make_uint4(0, 0, 0, 0), hi[i] = inside ? *(const uint4*)(codes + 8 * stride + i * 64) : make_uint4(0, 0, 0, 0);
        }
        u32 m[1][F::MMAS][4];
        unpack<BITS>(m[0], lo, hi);
#pragma unroll
        for (int i = 0; i < BLOCK / 128; i++) x[0][i] = *(const uint4*)(x_sh + (token * a.chunk + c) * BLOCK + (g & 1) * 64 + t * 16 + i * 128);
        const float sx = BITS == 16 ? 1.f : sx_sh[mine * a.chunk + c];
        float* sums = acc;
        group_products<BITS, SUB, 1, 1>(&sums, 0, m, scales + c, x, &sx);
      }
      if (t < used) {
        float* out = part_sh + (slot_pair(slot, a.pairs, n0 + t) * chunks + chunk) * 16;
        out[g] = acc[0], out[g + 8] = acc[1];
      }
    }
    __syncwarp();
    const int next = item + a.stages * warps;
    if (next < items) fetch(next, stage);
    if (++stage == a.stages) stage = 0, parity ^= 1;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < 16 * a.T; i += blockDim.x) {
    const int r = i & 15, n = i >> 4;
    if (row + r >= a.D) continue;
    const size_t at = (size_t)n * a.D + row + r;
    const float before = a.add ? a.add[at] : 0.f;
    float sum = 0.f;
#pragma unroll 4
    for (int p = n * a.K; p < (n + 1) * a.K; p++) {
      float one = 0.f;
#pragma unroll 2
      for (int c = 0; c < chunks; c++) one += part_sh[(p * chunks + c) * 16 + r];
      sum += a.gates[p] * one;
    }
    a.y[at] = before + a.scale * sum;
  }
}

#define DOWN(NAME, BITS, G, THREADS) \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_down_##NAME(const __grid_constant__ DownArgs a) { down_rows<BITS, G>(a); }
DOWN(w4, 4, 128, 512)
DOWN(w4_g64, 4, 64, 512)
DOWN(w4_g32, 4, 32, 256)
DOWN(w8, 8, 128, 512)
DOWN(w8_g64, 8, 64, 512)
DOWN(w8_g32, 8, 32, 256)
DOWN(w8_c, 8, 0, 512)  // one scale a row
DOWN(w16, 16, 0, 256)
