// moe_gate_up: h[p, f] = silu(W_gate[e] x[t])_f * (W_up[e] x[t])_f        for every pair p = t K + rank, e the expert of p
// moe_down:    y[t, d] = add[t, d] + scale * sum_rank gate[p] * (W_down[e] h[p])_d
//
// W      w4: [rows, k/8] u32, low nibble first, code + 8;  w8: [rows, k/4] u32, code + 128; one pointer an expert and matrix
// scale  [rows, k/G] bf16, G in {32, 64, 128} or k (w8 per channel)
// x      [T, D] bf16, h [T K, F] bf16: nibble order for w4, natural for w8; y, add [T, D] f32, y may be add
// needs  D % 32 == 0, F % 32 == 0, 16-byte aligned rows; T K <= 65535; accumulation f32
//
// Every expert is read once, whatever the number of tokens that chose it; the grid does not depend on the routing. The sum over
// ranks goes in order of rank, inside one block: the same bits in any batch.
//
// Launch: gate_up: grid (ceil(F / 16), min(T K, E)), threads 32 * clamp(ceil(D / step / 2), 1, 16; w4_g32: 8), shared 4 * warps * 320.
//   down: grid ceil(D / 16), threads 256 or 512 (w4_g32: 256), shared 64 * T K * chunks, chunks = ceil(ceil(F / step) / chunk_steps),
//   chunk_steps <= 6. step = 128 k for w4, 64 for w8.
// Instances moe_gate_up_w{4,8}[_g64,_g32], moe_down_w{4,8}[_g64,_g32]; without suffix a group is at least a step.
//
// Floors: bytes of the chosen experts, 3 F D bits / 8 each, at read bandwidth; unpacking 13 instructions a word and lane.
#include "common/mma.cuh"
#include "common/routing.cuh"

struct GateUpArgs {
  bf16* h;
  const bf16* x;
  const ExpertSlot* slots;
  const int* num_slots;
  const int* pairs;  // [T K], by slot
  int D, F, K, G;    // K: experts a token
};
struct DownArgs {
  float* y;
  const float* add;  // or null
  const bf16* h;
  const ExpertSlot* slots;
  const int* num_slots;
  const int* pairs;
  const float* gates;  // [T, K]
  int T, D, F, K, G;
  int chunk_steps;
  float scale;
};

template <int BITS, int SUB, int STEPS>
struct RowTile {
  uint4 lo[STEPS], hi[STEPS];
  StepScales<SUB> s[STEPS];
};
// STEPS steps from `step` of rows `row` + g and + 8 of a [rows, k] matrix
template <int BITS, int SUB, int STEPS>
DEV void load_tile(RowTile<BITS, SUB, STEPS>& w, const void* packed, const bf16* scale, int row, int rows, int k, int G, int step, int end) {
  typedef Codes<BITS> C;
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  const int r_lo = min_int(row + g, rows - 1), r_hi = min_int(row + g + 8, rows - 1), groups = k / G;
  const size_t row_bytes = (size_t)k * BITS / 8;
  const char *p_lo = (const char*)packed + r_lo * row_bytes, *p_hi = (const char*)packed + r_hi * row_bytes;
#pragma unroll
  for (int c = 0; c < STEPS; c++) {
    const int at = (step + c) * C::STEP_K, mine = at + t * C::LANE_K;
    w.lo[c] = w.hi[c] = make_uint4(0, 0, 0, 0);
    if (step + c < end) {
      if (mine < k) {
        w.lo[c] = load_streaming(p_lo + (size_t)mine * BITS / 8);
        w.hi[c] = load_streaming(p_hi + (size_t)mine * BITS / 8);
      }
      load_scales<BITS, SUB>(w.s[c], scale + (size_t)r_lo * groups, scale + (size_t)r_hi * groups, at, k, G);
    }
  }
}
template <int BITS>
DEV void load_chunks(uint4 (*x)[Codes<BITS>::CHUNKS], const bf16* row, int mine, int k, bool used) {
#pragma unroll
  for (int i = 0; i < Codes<BITS>::CHUNKS; i++) x[0][i] = used && mine < k ? load_v4(row + mine + i * 8) : make_uint4(0, 0, 0, 0);
}
DEV int slot_pair(const ExpertSlot& slot, const int* pairs, int n) { return n < 8 ? slot.pair[n] : pairs[slot.first + n]; }

template <int BITS, int SUB>
DEV void gate_up_tile(const GateUpArgs& a) {
  typedef Codes<BITS> C;
  const int STEPS = 2;
  extern __shared__ float moe_sh[];  // [warps][2][8][20]
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  const int row = blockIdx.x * 16, steps = div_up(a.D, C::STEP_K), rounds = div_up(steps, STEPS * warps);
  dependency_wait();
  dependents_launch();
  const ExpertSlot& slot = a.slots[blockIdx.y];
  const int num_slots = *a.num_slots, count = slot.count;
  if ((int)blockIdx.y >= num_slots) return;

  RowTile<BITS, SUB, STEPS> gate, up;
  load_tile(gate, slot.gate_packed, slot.gate_scale, row, a.F, a.D, a.G, warp * STEPS, steps);
  load_tile(up, slot.up_packed, slot.up_scale, row, a.F, a.D, a.G, warp * STEPS, steps);
  for (int n0 = 0; n0 < count; n0 += 8) {
    const bool used = n0 + g < count;
    const bf16* x_row = a.x + (size_t)(used ? slot_pair(slot, a.pairs, n0 + g) / a.K : 0) * a.D;
    float acc_gate[1][4] = {{0.f, 0.f, 0.f, 0.f}}, acc_up[1][4] = {{0.f, 0.f, 0.f, 0.f}};
    for (int round = 0; round < rounds; round++) {
      const int step = (round * warps + warp) * STEPS;
      if (round > 0 || (n0 > 0 && rounds > 1)) {
        load_tile(gate, slot.gate_packed, slot.gate_scale, row, a.F, a.D, a.G, step, steps);
        load_tile(up, slot.up_packed, slot.up_scale, row, a.F, a.D, a.G, step, steps);
      }
#pragma unroll
      for (int c = 0; c < STEPS; c++) {
        if (step + c >= steps) break;
        uint4 x[1][C::CHUNKS];
        load_chunks<BITS>(x, x_row, (step + c) * C::STEP_K + t * C::LANE_K, a.D, used);
        step_products<BITS, SUB, 1>(acc_gate, gate.lo[c], gate.hi[c], gate.s[c], x);
        step_products<BITS, SUB, 1>(acc_up, up.lo[c], up.hi[c], up.s[c], x);
      }
    }
    const int part = 8 * PARTIAL_STRIDE;
    store_partial<1>(moe_sh + warp * 2 * part, acc_gate);
    store_partial<1>(moe_sh + (warp * 2 + 1) * part, acc_up);
    __syncthreads();
    for (int i = threadIdx.x; i < 128; i += blockDim.x) {
      const int r = i & 15, n = i >> 4;
      if (n0 + n >= count || row + r >= a.F) continue;
      float sum_gate = 0.f, sum_up = 0.f;
      for (int k = 0; k < warps; k++) {
        sum_gate += moe_sh[k * 2 * part + n * PARTIAL_STRIDE + r];
        sum_up += moe_sh[(k * 2 + 1) * part + n * PARTIAL_STRIDE + r];
      }
      const int p = slot_pair(slot, a.pairs, n0 + n), f = row + r;
      a.h[(size_t)p * a.F + (BITS == 4 ? nibble_position(f) : f)] = to_bf16(silu(sum_gate) * sum_up);
    }
    if (n0 + 8 < count) __syncthreads();
  }
}

template <int BITS, int SUB>
DEV void down_tile(const DownArgs& a) {
  typedef Codes<BITS> C;
  const int STEPS = 6;
  extern __shared__ float moe_sh[];  // [T K][chunks][16]
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  const int row = blockIdx.x * 16, steps = div_up(a.F, C::STEP_K), chunks = div_up(steps, a.chunk_steps);
  const int items = *a.num_slots * chunks;  // the router ran two kernels ago

  RowTile<BITS, SUB, STEPS> w;
  if (warp < items) {
    const ExpertSlot& slot = a.slots[warp / chunks];
    const int step = warp % chunks * a.chunk_steps;
    load_tile(w, slot.down_packed, slot.down_scale, row, a.D, a.F, a.G, step, min_int(step + a.chunk_steps, steps));
  }
  dependency_wait();
  dependents_launch();
  for (int item = warp; item < items; item += warps) {
    const ExpertSlot& slot = a.slots[item / chunks];
    const int chunk = item % chunks, step = chunk * a.chunk_steps, end = min_int(step + a.chunk_steps, steps), count = slot.count;
    if (item != warp) load_tile(w, slot.down_packed, slot.down_scale, row, a.D, a.F, a.G, step, end);
    for (int n0 = 0; n0 < count; n0 += 8) {
      const bool used = n0 + g < count;
      const bf16* h_row = a.h + (size_t)(used ? slot_pair(slot, a.pairs, n0 + g) : 0) * a.F;
      float acc[1][4] = {{0.f, 0.f, 0.f, 0.f}};
#pragma unroll
      for (int c = 0; c < STEPS; c++) {
        if (step + c >= end) break;
        uint4 x[1][C::CHUNKS];
        load_chunks<BITS>(x, h_row, (step + c) * C::STEP_K + t * C::LANE_K, a.F, used);
        step_products<BITS, SUB, 1>(acc, w.lo[c], w.hi[c], w.s[c], x);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int n = n0 + 2 * t + i;
        if (n >= count) continue;
        float* out = moe_sh + ((size_t)slot_pair(slot, a.pairs, n) * chunks + chunk) * 16;
        out[g] = acc[0][i], out[g + 8] = acc[0][i + 2];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * a.T; i += blockDim.x) {
    const int r = i & 15, n = i >> 4;
    if (row + r >= a.D) continue;
    float sum = 0.f;
    for (int p = n * a.K; p < (n + 1) * a.K; p++) {
      float one = 0.f;
      for (int c = 0; c < chunks; c++) one += moe_sh[(p * chunks + c) * 16 + r];
      sum += a.gates[p] * one;
    }
    const size_t at = (size_t)n * a.D + row + r;
    a.y[at] = (a.add ? a.add[at] : 0.f) + a.scale * sum;
  }
}

#define MOE(NAME, BITS, SUB, THREADS)                                                                                                                     \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_gate_up_##NAME(const __grid_constant__ GateUpArgs a) { gate_up_tile<BITS, SUB>(a); } \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_down_##NAME(const __grid_constant__ DownArgs a) { down_tile<BITS, SUB>(a); }

MOE(w4, 4, 1, 512)      // G = 128
MOE(w4_g64, 4, 2, 512)
MOE(w4_g32, 4, 4, 256)
MOE(w8, 8, 1, 512)      // G = 64, 128 or per channel
MOE(w8_g32, 8, 2, 512)
