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
// Launch, step = 128 k for w4, 64 for w8; stride(c) = (c | 7) + 5; line(b) = ceil128(b) + 64:
//   gate_up: own = 4 steps a warp, _few: 2; grid (ceil(F / 16), min(T K, E)), warps = clamp(ceil(D / step / own), 1, 8), threads
//     32 * warps, shared 32 * line(min(64 own warps, D bits / 8)) + warps * (1280 + 16 * min(T, 8) * stride(own step / 8))
//     _many: own = 2, up to 16 warps (w4_g32: 8), grid = what fits, up to ceil(F / 16) * min(T K, E); shared stages * 32 * D bits / 8
//     + warps * (2560 + 16 * stages * columns * stride(step / 4))
//   down: grid ceil(D / 16), warps 8 or 16 (w4_g32: 8), chunk_steps <= 6 and a whole number of groups, chunks = ceil(ceil(F / step) / chunk_steps),
//     shared warps * 16 * (stages * (line(min(64 chunk_steps, F bits / 8)) + columns * stride(chunk_steps * step / 8))) + 64 * T K * chunks
// Instances moe_{gate_up,down}_{w4,w4_g64,w4_g32,w8,w8_g64,w8_g32,w8_c}; no suffix: G = 128, c: one scale a row; moe_gate_up_*_few: more
// warps for each tile, faster for one or two tokens; moe_gate_up_*_many: blocks walk tiles, for three tokens and more, D <= 32 step.
//
// Floors: bytes of the chosen experts, 3 F D bits / 8 each, at read bandwidth; unpacking 13 instructions a word and lane.
#include "common/stream.cuh"
#include "common/routing.cuh"

struct GateUpArgs {
  bf16* h;
  const bf16* x;
  const ExpertSlot* slots;
  const int* num_slots;
  const int* pairs;  // [T K], by slot
  int T, D, F, K, G;  // K: experts a token
  int stages;         // _many: tiles in shared memory, 1 or 2
  int columns;        // _many: tokens of an expert at a time, 1..8
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
  int chunk_steps;  // 1..6, whole groups
  int stages;       // items in shared memory a warp, 1 or 2
  int columns;      // tokens of an expert at a time, 1..8
  float scale;
};

DEV int slot_pair(const ExpertSlot& slot, const int* pairs, int n) { return n < 8 ? slot.pair[n] : pairs[slot.first + n]; }

template <int BITS, int G, int STEPS>
DEV void gate_up_tile(const GateUpArgs& a) {
  typedef Codes<BITS> C;
  const int CHUNKS = STEPS * 4 * C::CHUNKS, part = 8 * PARTIAL_STRIDE, SUB = Groups<BITS, G>::SUB;
  extern __shared__ uint4 moe_sh[];
  __shared__ ExpertSlot slot_sh;
  __shared__ u64 barrier_sh;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, x_stride = chunk_stride(CHUNKS);
  const int slice = STEPS * warps * 64, row_bytes = a.D * BITS / 8, stride = stream_stride(min_int(slice, row_bytes), row_bytes), tokens = min_int(a.T, 8);
  char* tile_sh = (char*)moe_sh;                                             // [gate, up][16][stride]
  float* partial_sh = (float*)(tile_sh + 32 * stride);                       // [warps][2][8][20]
  uint4* x_sh = (uint4*)(partial_sh + warps * 2 * part) + warp * tokens * x_stride;  // [tokens][x_stride] a warp
  const int row = blockIdx.x * 16, steps = div_up(a.D, C::STEP_K), rounds = div_up(steps, STEPS * warps);
  if (threadIdx.x == 0) stream_init(&barrier_sh), stream_init_done();
  dependency_wait();
  dependents_launch();
  const int num_slots = *a.num_slots;
  if (threadIdx.x < sizeof(ExpertSlot) / 16) ((uint4*)&slot_sh)[threadIdx.x] = load_v4((const uint4*)(a.slots + blockIdx.y) + threadIdx.x);
  if ((int)blockIdx.y >= num_slots) return;
  __syncthreads();
  const int count = slot_sh.count;

  TileScales<BITS, G, STEPS> s_gate, s_up;
  int phase = 0;
#pragma unroll 1
  for (int n0 = 0; n0 < count; n0 += 8) {
    const int column = min_int(g, count - n0 - 1);
    float acc_gate[1][4] = {{0.f, 0.f, 0.f, 0.f}}, acc_up[1][4] = {{0.f, 0.f, 0.f, 0.f}};
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
      const int step = (round * warps + warp) * STEPS;
      const bool fresh = n0 == 0 || rounds > 1;
      if (fresh) {
        if (warp == 0) {
          const int at = round * slice, bytes = min_int(slice, row_bytes - at), rows = a.F - row;
          const u64 from = (u64)row * row_bytes + at;
          stream_expect(&barrier_sh, 2 * stream_bytes(row_bytes, rows, bytes));
          stream_rows(&barrier_sh, tile_sh, stride, (const char*)slot_sh.gate_packed + from, row_bytes, rows, bytes);
          stream_rows(&barrier_sh, tile_sh + 16 * stride, stride, (const char*)slot_sh.up_packed + from, row_bytes, rows, bytes);
          stream_arrive(&barrier_sh);
        }
        load_scales<BITS, G, STEPS>(s_gate, slot_sh.gate_scale, row, a.F, a.D, step);
        load_scales<BITS, G, STEPS>(s_up, slot_sh.up_scale, row, a.F, a.D, step);
      }
      __syncwarp();
#pragma unroll 1
      for (int n = 0; n < min_int(8, count - n0); n++) {
        const int token = n0 == 0 ? slot_sh.token[n] : a.pairs[slot_sh.first + n0 + n] / a.K;
        copy_row<BITS>(x_sh + n * x_stride, a.x + (size_t)token * a.D, step * C::STEP_K, a.D, CHUNKS);
      }
      copy_async_commit();
      copy_async_wait<0>();
      __syncwarp();
      if (fresh) stream_wait(&barrier_sh, phase & 1), phase++;
#pragma unroll
      for (int c = 0; c < STEPS; c++) {
        if (step + c >= steps) break;
        uint4 x[1][C::CHUNKS], lo, hi;
        read_chunks<BITS, 1>(x, x_sh, x_stride, &column, c);
        read_codes(lo, hi, tile_sh, stride, warp * STEPS + c);
        step_products<BITS, SUB, 1>(acc_gate, lo, hi, s_gate.s[c], x);
        read_codes(lo, hi, tile_sh + 16 * stride, stride, warp * STEPS + c);
        step_products<BITS, SUB, 1>(acc_up, lo, hi, s_up.s[c], x);
      }
      if (rounds > 1) __syncthreads();
    }
    store_partial<1>(partial_sh + warp * 2 * part, acc_gate);
    store_partial<1>(partial_sh + (warp * 2 + 1) * part, acc_up);
    __syncthreads();
    // two threads an output: gate and up
    for (int i = threadIdx.x; i < 32 * min_int(8, count - n0); i += blockDim.x) {
      const int r = (i >> 1) & 15, n = i >> 5, f = row + r;
      float sum = 0.f;
#pragma unroll 4
      for (int k = 0; k < warps; k++) sum += partial_sh[(k * 2 + (i & 1)) * part + n * PARTIAL_STRIDE + r];
      const float up = __shfl_xor_sync(0xffffffffu, sum, 1);
      if ((i & 1) || f >= a.F) continue;
      a.h[(size_t)slot_pair(slot_sh, a.pairs, n0 + n) * a.F + (BITS == 4 ? nibble_position(f) : f)] = to_bf16(silu(sum) * up);
    }
    if (n0 + 8 < count) __syncthreads();
  }
}

// The same with blocks that walk (expert, tile) pairs, weights and activations one or two pairs ahead; all of k in one round.
template <int BITS, int G>
DEV void gate_up_stream(const GateUpArgs& a) {
  typedef Codes<BITS> C;
  const int STEPS = 2, CHUNKS = STEPS * 4 * C::CHUNKS, SUB = Groups<BITS, G>::SUB;
  extern __shared__ uint4 moe_sh[];
  __shared__ u64 barrier_sh[2];
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = (threadIdx.x & 31) >> 2, x_stride = chunk_stride(CHUNKS), x_stage = a.columns * x_stride;
  const int part = 8 * PARTIAL_STRIDE, parts = warps * 2 * part, row_bytes = a.D * BITS / 8, steps = div_up(a.D, C::STEP_K), step = warp * STEPS;
  char* tile_sh = (char*)moe_sh;                                                              // [stages][gate, up][16][row_bytes]
  float* partial_sh = (float*)(tile_sh + a.stages * 32 * row_bytes);                          // [2][warps][2][8][20]
  uint4* x_sh = (uint4*)(partial_sh + 2 * parts) + warp * a.stages * x_stage;                 // [stages][columns][x_stride] a warp
  const int tiles = (a.F + 15) / 16;
  if (threadIdx.x < 2) stream_init(barrier_sh + threadIdx.x), stream_init_done();
  __syncthreads();
  dependency_wait();
  dependents_launch();
  const int items = *a.num_slots * tiles;
  auto fetch = [&](int item, int stage) {  // one warp
    if (item >= items) return;
    const int slot_idx = item / tiles, row = (item - slot_idx * tiles) * 16, rows = a.F - row;
    const ExpertSlot& slot = a.slots[slot_idx];
    const u64 from = (u64)row * row_bytes;
    u64* bar = barrier_sh + stage;
    char* to = tile_sh + stage * 32 * row_bytes;
    stream_expect(bar, 2 * stream_bytes(row_bytes, rows, row_bytes));
    stream_rows(bar, to, row_bytes, (const char*)slot.gate_packed + from, row_bytes, rows, row_bytes);
    stream_rows(bar, to + 16 * row_bytes, row_bytes, (const char*)slot.up_packed + from, row_bytes, rows, row_bytes);
    stream_arrive(bar);
  };
  auto fetch_x = [&](int item, int stage, int n0) {  // each warp its part of k
    if (item < items) {
      const ExpertSlot& slot = a.slots[item / tiles];
#pragma unroll 1
      for (int n = 0; n < min_int(a.columns, slot.count - n0); n++) {
        const int token = n0 + n < 8 ? slot.token[n0 + n] : a.pairs[slot.first + n0 + n] / a.K;
        copy_row<BITS>(x_sh + stage * x_stage + n * x_stride, a.x + (size_t)token * a.D, step * C::STEP_K, a.D, CHUNKS);
      }
    }
    copy_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < a.stages; i++) {
    if (warp == 0) fetch(blockIdx.x + i * gridDim.x, i);
    fetch_x(blockIdx.x + i * gridDim.x, i, 0);
  }
  int stage = 0, phase = 0, parity = 0;
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int slot_idx = item / tiles, row = (item - slot_idx * tiles) * 16, next = item + a.stages * gridDim.x;
    const ExpertSlot& slot = a.slots[slot_idx];
    const int count = slot.count;
    TileScales<BITS, G, STEPS> s_gate, s_up;
    load_scales<BITS, G, STEPS>(s_gate, slot.gate_scale, row, a.F, a.D, step);
    load_scales<BITS, G, STEPS>(s_up, slot.up_scale, row, a.F, a.D, step);
    const char* codes_sh = tile_sh + stage * 32 * row_bytes;
#pragma unroll 1
    for (int n0 = 0; n0 < count; n0 += a.columns) {
      const int used = min_int(a.columns, count - n0), column = min_int(g, used - 1);
      if (n0 > 0) __syncwarp(), fetch_x(item, stage, n0);
      if (n0 > 0 || a.stages == 1)
        copy_async_wait<0>();
      else
        copy_async_wait<1>();
      __syncwarp();
      if (n0 == 0) stream_wait(barrier_sh + stage, phase);
      float acc_gate[1][4] = {{0.f, 0.f, 0.f, 0.f}}, acc_up[1][4] = {{0.f, 0.f, 0.f, 0.f}};
#pragma unroll
      for (int c = 0; c < STEPS; c++) {
        if (step + c >= steps) break;
        uint4 x[1][C::CHUNKS], lo, hi;
        read_chunks<BITS, 1>(x, x_sh + stage * x_stage, x_stride, &column, c);
        read_codes(lo, hi, codes_sh, row_bytes, step + c);
        step_products<BITS, SUB, 1>(acc_gate, lo, hi, s_gate.s[c], x);
        read_codes(lo, hi, codes_sh + 16 * row_bytes, row_bytes, step + c);
        step_products<BITS, SUB, 1>(acc_up, lo, hi, s_up.s[c], x);
      }
      float* sums_sh = partial_sh + parity * parts;
      store_partial<1>(sums_sh + warp * 2 * part, acc_gate);
      store_partial<1>(sums_sh + (warp * 2 + 1) * part, acc_up);
      __syncthreads();
      if (n0 + a.columns >= count) {
        if (warp == 0) fetch(next, stage);
        fetch_x(next, stage, 0);
      }
      for (int i = threadIdx.x; i < 32 * used; i += blockDim.x) {  // two threads an output: gate and up
        const int r = (i >> 1) & 15, n = i >> 5, f = row + r;
        float sum = 0.f;
#pragma unroll 4
        for (int k = 0; k < warps; k++) sum += sums_sh[(k * 2 + (i & 1)) * part + n * PARTIAL_STRIDE + r];
        const float up = __shfl_xor_sync(0xffffffffu, sum, 1);
        if ((i & 1) || f >= a.F) continue;
        a.h[(size_t)slot_pair(slot, a.pairs, n0 + n) * a.F + (BITS == 4 ? nibble_position(f) : f)] = to_bf16(silu(sum) * up);
      }
      parity ^= 1;
    }
    if (++stage == a.stages) stage = 0, phase ^= 1;
  }
  copy_async_wait<0>();
}

template <int BITS, int G>
DEV void down_tile(const DownArgs& a) {
  typedef Codes<BITS> C;
  const int STEPS = 6;
  extern __shared__ uint4 moe_sh[];
  __shared__ u64 barriers_sh[2 * 16];
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  const int x_stride = chunk_stride(a.chunk_steps * 4 * C::CHUNKS), x_stage = a.columns * x_stride;
  const int row = blockIdx.x * 16, steps = div_up(a.F, C::STEP_K), chunks = div_up(steps, a.chunk_steps), row_bytes = a.F * BITS / 8;
  const int slice = a.chunk_steps * 64, stride = stream_stride(min_int(slice, row_bytes), row_bytes);
  char* tile_sh = (char*)moe_sh + warp * a.stages * 16 * stride;                                          // [stages][16][stride] a warp
  uint4* x_sh = (uint4*)((char*)moe_sh + warps * a.stages * 16 * stride) + warp * a.stages * x_stage;      // [stages][columns][x_stride] a warp
  float* part_sh = (float*)((uint4*)((char*)moe_sh + warps * a.stages * 16 * stride) + warps * a.stages * x_stage);  // [T K][chunks][16]
  u64* barrier_sh = barriers_sh + warp * 2;
  if ((threadIdx.x & 31) < 2) stream_init(barrier_sh + (threadIdx.x & 1)), stream_init_done();
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

  auto fetch_x = [&](int item, int stage, int n0) {
    if (item < items) {
      const int slot_idx = item / chunks, step = (item - slot_idx * chunks) * a.chunk_steps;
      const ExpertSlot& slot = a.slots[slot_idx];
#pragma unroll 1
      for (int n = 0; n < min_int(a.columns, slot.count - n0); n++)
        copy_row<BITS>(x_sh + stage * x_stage + n * x_stride, a.h + (size_t)slot_pair(slot, a.pairs, n0 + n) * a.F, step * C::STEP_K, a.F, a.chunk_steps * 4 * C::CHUNKS);
    }
    copy_async_commit();
  };
  dependency_wait();
  dependents_launch();
#pragma unroll 1
  for (int i = 0; i < a.stages; i++) fetch_x(warp + i * warps, i, 0);
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int item = warp; item < items; item += warps) {
    const int slot_idx = item / chunks, chunk = item - slot_idx * chunks, step = chunk * a.chunk_steps, end = min_int(a.chunk_steps, steps - step);
    const ExpertSlot& slot = a.slots[slot_idx];
    const int count = slot.count;
    TileScales<BITS, G, STEPS> scales;
    load_scales<BITS, G, STEPS>(scales, slot.down_scale, row, a.D, a.F, step);
#pragma unroll 1
    for (int n0 = 0; n0 < count; n0 += a.columns) {
      const int used = min_int(a.columns, count - n0), column = min_int(g, used - 1);
      if (n0 > 0) __syncwarp(), fetch_x(item, stage, n0);
      if (n0 > 0 || a.stages == 1)
        copy_async_wait<0>();
      else
        copy_async_wait<1>();
      __syncwarp();
      if (n0 == 0) stream_wait(barrier_sh + stage, parity);
      float acc[1][4] = {{0.f, 0.f, 0.f, 0.f}};
#pragma unroll
      for (int c = 0; c < STEPS; c++) {
        if (c >= end) break;
        uint4 x[1][C::CHUNKS], lo, hi;
        read_codes(lo, hi, tile_sh + stage * 16 * stride, stride, c);
        read_chunks<BITS, 1>(x, x_sh + stage * x_stage, x_stride, &column, c);
        step_products<BITS, Groups<BITS, G>::SUB, 1>(acc, lo, hi, scales.s[c], x);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int n = 2 * t + i;
        if (n >= used) continue;
        float* out = part_sh + (slot_pair(slot, a.pairs, n0 + n) * chunks + chunk) * 16;
        out[g] = acc[0][i], out[g + 8] = acc[0][i + 2];
      }
    }
    __syncwarp();
    const int next = item + a.stages * warps;
    if (next < items) fetch(next, stage);
    fetch_x(next, stage, 0);
    if (++stage == a.stages) stage = 0, parity ^= 1;
  }
  copy_async_wait<0>();
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

// Of the bound of 768, where no block is larger than 512, comes a cap of 80 registers a thread: more blocks on a multiprocessor.
#define MOE(NAME, BITS, G, GATE_UP, DOWN)                                                                                                             \
  extern "C" __global__ void __launch_bounds__(GATE_UP, 1) moe_gate_up_##NAME(const __grid_constant__ GateUpArgs a) { gate_up_tile<BITS, G, 4>(a); }     \
  extern "C" __global__ void __launch_bounds__(DOWN, 1) moe_gate_up_##NAME##_few(const __grid_constant__ GateUpArgs a) { gate_up_tile<BITS, G, 2>(a); } \
  extern "C" __global__ void __launch_bounds__((BITS == 4 && G == 32 ? 256 : 512), 1) moe_gate_up_##NAME##_many(const __grid_constant__ GateUpArgs a) { gate_up_stream<BITS, G>(a); }  \
  extern "C" __global__ void __launch_bounds__(DOWN, 1) moe_down_##NAME(const __grid_constant__ DownArgs a) { down_tile<BITS, G>(a); }

MOE(w4, 4, 128, 768, 768)
MOE(w4_g64, 4, 64, 256, 512)
MOE(w4_g32, 4, 32, 256, 256)
MOE(w8, 8, 128, 256, 512)
MOE(w8_g64, 8, 64, 256, 512)
MOE(w8_g32, 8, 32, 256, 512)
MOE(w8_c, 8, 0, 256, 512)  // one scale a row
