// y[t, r] = add[t, r] + scale * (sum_k W[r, k] * n(x)[t, k] + bias[r]),   n = nothing, RMSNorm or LayerNorm; up to three W at once
//
// W      w4: [R, K/8] u32, low nibble first, code + 8;  w8: [R, K/4] u32, code + 128;  w16: [R, K] bf16; rows 16-byte aligned
// scale  [R, K/G] bf16, G in {32, 64, 128} or K (w8 per channel); absent for w16
// x      [T, K] f32 or bf16, rows 16-byte aligned; gain, shift [K] f32
// y      [T, R] f32 or bf16 with a row stride; bias [R] f32; add [T, R] f32 with the stride of y; y may be add
// needs  K % 32 == 0; any R; accumulation f32
//
// Instances linear_{w4,w4_g64,w4_g32,w8,w8_g64,w8_g32,w8_c,w16}_{s,r,n1,n2,n4}; no suffix: G = 128, c: one scale a row.
//   s: x f32 or bf16 in natural order, any norm, into shared memory, T <= 8;  r: the same for f32 with RMSNorm alone
//   n1: x bf16 as it is (for w4 in nibble order), no norm, T <= 8;  n2, n4: the same, 16 or 32 tokens a pass, any T
// Launch: blocks walk tiles of 16 rows, grid = min(tiles, what fits); the warps of a block split K
//   step = 128 k for w4, 64 for w8, 32 for w16;  own = steps a warp: 8 for s, r, n1; 4 for n2, n4
//   threads = 32 * warps, warps = clamp(ceil(K / step / own), 1, 8)
//   shared n2, n4: 4 * max(8 warps, 32) + 1280 * warps * N + 16 * ((step / 2 | 7) + 5) * 8 N warps
//   shared s, r, n1: stages * 16 * (ceil128(min(512 warps, row bytes)) + 64) + 4 * max(8 warps, 32) + 1280 * warps
//                    + 16 * T * (s, r: (ceil(K / (8 step)) * step | 7) + 5; n1: warps * ((step | 7) + 5))
//   stages = 1 where a block has one tile and one round of k, else 2
//
// Floors: bytes R K bits / 8 + R K / G * 2 at read bandwidth; operations 2 R K 8 N on tensor cores, 13 (w4) or 8 (w8)
// instructions a word and lane to unpack. Source: mma fragment order, prototypes; activations are permuted, never weights.
#include "common/stream.cuh"
#include "common/reduce.cuh"

struct LinearMatrix {
  const void* packed;
  const bf16* scale;
  const float* bias;  // or null
  const float* add;   // or null
  void* out;
  int rows;
  int out_stride;     // elements
  int out_is_bf16;
  float out_scale;
};
struct LinearArgs {
  const void* x;
  const float* gain;   // [K]
  const float* shift;  // [K], LayerNorm
  LinearMatrix m[3];
  int num_matrices;
  int T, K, G;
  int x_stride;        // elements
  int x_is_f32;        // `s`
  int norm;            // `s`: 0 none, 1 RMS, 2 Layer
  float eps;
  int stages;          // s, r, n1: items of weights in shared memory, 1 or 2
};

static const int STEPS = 4;         // 16-byte loads of a row that a lane keeps in flight
static const int STREAM_STEPS = 8;  // steps of a warp in an item of linear_stream

// x of all tokens as bf16 chunks in the order of the products; with RMSNorm the factor 1 / rms is left to the epilogue.
// RMS: x f32 with RMSNorm, nothing else.
template <int BITS, bool RMS>
DEV void linear_stage(uint4* x_sh, float* square_sh, const LinearArgs& a) {
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, lane = threadIdx.x & 31;
  const int chunks = div_up(a.K, Codes<BITS>::STEP_K * STREAM_STEPS) * STREAM_STEPS * 4 * Codes<BITS>::CHUNKS, stride = chunk_stride(chunks);
  const bool is_f32 = RMS || a.x_is_f32;
  const int norm = RMS ? 1 : a.norm;
#pragma unroll 1
  for (int n = 0; n < a.T; n++) {
    float mean = 0.f, inv = 1.f, square = 0.f;
    const float* xf = (const float*)a.x + (size_t)n * a.x_stride;
    const bf16* xb = (const bf16*)a.x + (size_t)n * a.x_stride;
    if (norm == 2) {
      float sum = 0.f, var = 0.f;
#pragma unroll 1
      for (int k = threadIdx.x; k < a.K; k += blockDim.x) sum += is_f32 ? xf[k] : to_f32(xb[k]);
      mean = block_sum(sum, square_sh) / a.K;
#pragma unroll 1
      for (int k = threadIdx.x; k < a.K; k += blockDim.x) {
        const float d = (is_f32 ? xf[k] : to_f32(xb[k])) - mean;
        var += d * d;
      }
      inv = rsqrtf(block_sum(var, square_sh) / a.K + a.eps);
    }
#pragma unroll 1
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (c * 8 < a.K) {
        if (norm == 0 && !is_f32) {
          v = load_v4(xb + c * 8);
        } else {
          float f[8], gain[8];
          if (norm) *(float4*)gain = *(const float4*)(a.gain + c * 8), *(float4*)(gain + 4) = *(const float4*)(a.gain + c * 8 + 4);
          if (is_f32) {
            *(float4*)f = *(const float4*)(xf + c * 8), *(float4*)(f + 4) = *(const float4*)(xf + c * 8 + 4);
          } else {
            const uint4 p = load_v4(xb + c * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) f[2 * i] = bf16_lo(word_at(p, i)), f[2 * i + 1] = bf16_hi(word_at(p, i));
          }
#pragma unroll
          for (int i = 0; i < 8; i++) {
            if (norm == 1) square += f[i] * f[i], f[i] *= gain[i];
            if (norm == 2) f[i] = (f[i] - mean) * inv * gain[i] + a.shift[c * 8 + i];
          }
          v = make_uint4(bf16_pair(f[0], f[1]), bf16_pair(f[2], f[3]), bf16_pair(f[4], f[5]), bf16_pair(f[6], f[7]));
        }
        if (BITS == 4) v = nibble_chunk(v);
      }
      x_sh[n * stride + chunk_place<BITS>(c)] = v;
    }
    if (norm == 1) {
      square = warp_sum(square);
      if (lane == 0) square_sh[n * warps + warp] = square;
    }
    if (norm == 2) __syncthreads();
  }
  __syncthreads();
}

static const int STAGE_NONE = 0, STAGE_ANY = 1, STAGE_RMS = 2;

// Items are (tile, pass of 8 NT tokens, round of k), innermost last; the weights of the next item are requested before the
// sums of the last one are finished, so that there is always something in flight.
template <int BITS, int G, int NT, int STAGE>
DEV void linear_tiles(const LinearArgs& a) {
  extern __shared__ float linear_sh[];
  typedef Codes<BITS> C;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = (threadIdx.x & 31) >> 2;
  const int part = warps * 8 * NT * PARTIAL_STRIDE, own_chunks = STEPS * 4 * C::CHUNKS;
  float* square_sh = linear_sh;                            // [8][warps], at least 32
  float* partial_sh = square_sh + max_int(8 * warps, 32);  // [2][warps][8 NT][20]
  uint4* x_sh = (uint4*)(partial_sh + 2 * part);
  const int steps = div_up(a.K, C::STEP_K), rounds = div_up(steps, STEPS * warps), passes = div_up(a.T, 8 * NT);
  const int x_stride = chunk_stride(STAGE ? div_up(steps, STEPS) * own_chunks : own_chunks);
  if (!STAGE) x_sh += warp * 8 * NT * x_stride;
  const int tiles0 = (a.m[0].rows + 15) / 16, tiles1 = a.num_matrices > 1 ? (a.m[1].rows + 15) / 16 : 0, tiles2 = a.num_matrices > 2 ? (a.m[2].rows + 15) / 16 : 0;
  const int total = tiles0 + tiles1 + tiles2;

  RowTile<BITS, G, STEPS> w;
  float acc[NT][4];
  int tile = blockIdx.x, pass = 0, round = 0, in_sh = -1, parity = 0;
  int last_matrix = 0, last_row = 0, last_token = 0;  // of the sums in partial_sh
  bool summed = false, first = true;
  while (true) {
    int matrix = 0, row = tile;
    if (row >= tiles0) row -= tiles0, matrix = 1;
    if (matrix == 1 && row >= tiles1) row -= tiles1, matrix = 2;
    row *= 16;
    const bool more = tile < total;
    const int step = (round * warps + warp) * STEPS;
    if (more && (rounds > 1 || pass == 0)) load_tile<BITS, G, STEPS>(w, a.m[matrix].packed, a.m[matrix].scale, row, a.m[matrix].rows, a.K, step);
    if (first) {
      first = false;
      if (STAGE && (STAGE == STAGE_RMS || a.norm) && (int)threadIdx.x * 32 < a.K) prefetch_l2(a.gain + threadIdx.x * 32);
      dependency_wait();
      dependents_launch();
      if (STAGE) linear_stage<BITS, STAGE == STAGE_RMS>(x_sh, square_sh, a);
    }
    if (summed) {
      const LinearMatrix& m = a.m[last_matrix];
      const float* from = partial_sh + (parity ^ 1) * part;
      // two threads an output, each half of the warps
      for (int i = threadIdx.x; i < 32 * min_int(a.T - last_token, 8 * NT); i += blockDim.x) {
        const int r = (i >> 1) & 15, n = i >> 5, out_row = last_row + r;
        float sum = 0.f, square = 0.f;
#pragma unroll 4
        for (int k = i & 1; k < warps; k += 2) {
          sum += from[(k * 8 * NT + n) * PARTIAL_STRIDE + r];
          if (STAGE == STAGE_RMS || STAGE == STAGE_ANY) square += square_sh[n * warps + k];
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        if (STAGE == STAGE_RMS || (STAGE == STAGE_ANY && a.norm == 1)) {
          square += __shfl_xor_sync(0xffffffffu, square, 1);
          sum *= rsqrtf(square * (1.f / a.K) + a.eps);
        }
        if ((i & 1) || out_row >= m.rows) continue;
        if (m.bias) sum += m.bias[out_row];
        sum *= m.out_scale;
        const size_t at = (size_t)(last_token + n) * m.out_stride + out_row;
        if (m.add) sum += m.add[at];
        if (m.out_is_bf16)
          ((bf16*)m.out)[at] = to_bf16(sum);
        else
          ((float*)m.out)[at] = sum;
      }
      summed = false;
    }
    if (!more) break;

    const int t0 = pass * 8 * NT;
    if (!STAGE && in_sh != pass * rounds + round) {
      __syncwarp();
#pragma unroll 1
      for (int n = 0; n < min_int(8 * NT, a.T - t0); n++)
        copy_row<BITS>(x_sh + n * x_stride, (const bf16*)a.x + (size_t)(t0 + n) * a.x_stride, step * C::STEP_K, a.K, own_chunks);
      copy_async_commit();
      in_sh = pass * rounds + round;
      copy_async_wait<0>();
      __syncwarp();
    }
    int column[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      column[n] = min_int(n * 8 + g, a.T - t0 - 1);
      if (round == 0) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
    }
    if (step < steps)
#pragma unroll
      for (int c = 0; c < STEPS; c++) {
        uint4 x[NT][C::CHUNKS];
        read_chunks<BITS, NT>(x, STAGE ? x_sh + step * 4 * C::CHUNKS : x_sh, x_stride, column, c);
        step_products<BITS, Groups<BITS, G>::SUB, NT>(acc, w.lo[c], w.hi[c], w.s[c], x);
      }
    if (++round == rounds) {
      round = 0;
      store_partial<NT>(partial_sh + parity * part + warp * 8 * NT * PARTIAL_STRIDE, acc);
      parity ^= 1, summed = true, last_matrix = matrix, last_row = row, last_token = t0;
      if (++pass == passes) pass = 0, tile += gridDim.x;
      __syncthreads();
    }
  }
}

// Up to eight tokens. An item is (tile, round of k): its rows travel to shared memory `stages` items ahead, the first ones before
// the previous kernel has ended.
template <int BITS, int G, int STAGE>
DEV void linear_stream(const LinearArgs& a) {
  extern __shared__ float linear_sh[];
  __shared__ u64 barrier_sh[2];
  typedef Codes<BITS> C;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = (threadIdx.x & 31) >> 2;
  const int part = warps * 8 * PARTIAL_STRIDE, own_chunks = STREAM_STEPS * 4 * C::CHUNKS;
  const int steps = div_up(a.K, C::STEP_K), rounds = div_up(steps, STREAM_STEPS * warps), row_bytes = a.K * BITS / 8;
  const int slice = STREAM_STEPS * warps * 64, stride = stream_stride(min_int(slice, row_bytes), row_bytes);
  const int x_stride = chunk_stride(STAGE ? div_up(steps, STREAM_STEPS) * own_chunks : own_chunks);
  char* tile_sh = (char*)linear_sh;                                          // [stages][16][stride]
  float* square_sh = (float*)(tile_sh + a.stages * 16 * stride);             // [8][warps], at least 32
  float* partial_sh = square_sh + max_int(8 * warps, 32);                    // [2][warps][8][20]
  uint4* x_sh = (uint4*)(partial_sh + 2 * part);
  if (!STAGE) x_sh += warp * a.T * x_stride;
  const int tiles0 = (a.m[0].rows + 15) / 16, tiles1 = a.num_matrices > 1 ? (a.m[1].rows + 15) / 16 : 0, tiles2 = a.num_matrices > 2 ? (a.m[2].rows + 15) / 16 : 0;
  const int total = tiles0 + tiles1 + tiles2;
  auto place = [&](int tile, int& row) {
    int matrix = 0;
    row = tile;
    if (row >= tiles0) row -= tiles0, matrix = 1;
    if (matrix == 1 && row >= tiles1) row -= tiles1, matrix = 2;
    row *= 16;
    return matrix;
  };
  int fetch_tile = blockIdx.x, fetch_round = 0, fetch_stage = 0;
  auto fetch = [&]() {  // the next item, one warp
    if (fetch_tile >= total) return;
    int row;
    const int matrix = place(fetch_tile, row), at = fetch_round * slice, bytes = min_int(slice, row_bytes - at);
    u64* bar = barrier_sh + fetch_stage;
    stream_expect(bar, stream_bytes(row_bytes, a.m[matrix].rows - row, bytes));
    stream_rows(bar, tile_sh + fetch_stage * 16 * stride, stride, (const char*)a.m[matrix].packed + (u64)row * row_bytes + at, row_bytes, a.m[matrix].rows - row, bytes);
    stream_arrive(bar);
    if (++fetch_round == rounds) fetch_round = 0, fetch_tile += gridDim.x;
    if (++fetch_stage == a.stages) fetch_stage = 0;
  };
  if (warp == 0) {
    if (threadIdx.x < 2) stream_init(barrier_sh + threadIdx.x), stream_init_done();
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < a.stages; i++) fetch();
  }
  if (STAGE && (STAGE == STAGE_RMS || a.norm) && (int)threadIdx.x * 32 < a.K) prefetch_l2(a.gain + threadIdx.x * 32);
  __syncthreads();

  TileScales<BITS, G, STREAM_STEPS> scales;
  float acc[1][4];
  const int column = min_int(g, a.T - 1);
  int tile = blockIdx.x, round = 0, stage = 0, phase = 0, parity = 0, in_sh = -1, last_row = 0, last_matrix = -1;
  bool first = true;
#pragma unroll 1
  while (true) {
    int row;
    const int matrix = place(tile, row), step = (round * warps + warp) * STREAM_STEPS;
    const bool more = tile < total;
    if (more) load_scales<BITS, G, STREAM_STEPS>(scales, a.m[matrix].scale, row, a.m[matrix].rows, a.K, step);
    if (first) {
      first = false;
      dependency_wait();
      dependents_launch();
      if (STAGE) linear_stage<BITS, STAGE == STAGE_RMS>(x_sh, square_sh, a);
    } else if (round == 0) {
      const LinearMatrix& m = a.m[last_matrix];
      const float* from = partial_sh + (parity ^ 1) * part;
      for (int i = threadIdx.x; i < 32 * a.T; i += blockDim.x) {  // two threads an output, each half of the warps
        const int r = (i >> 1) & 15, n = i >> 5, out_row = last_row + r;
        float sum = 0.f, square = 0.f;
#pragma unroll 4
        for (int k = i & 1; k < warps; k += 2) {
          sum += from[(k * 8 + n) * PARTIAL_STRIDE + r];
          if (STAGE) square += square_sh[n * warps + k];
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        if (STAGE == STAGE_RMS || (STAGE && a.norm == 1)) {
          square += __shfl_xor_sync(0xffffffffu, square, 1);
          sum *= rsqrtf(square * (1.f / a.K) + a.eps);
        }
        if ((i & 1) || out_row >= m.rows) continue;
        if (m.bias) sum += m.bias[out_row];
        sum *= m.out_scale;
        const size_t at = (size_t)n * m.out_stride + out_row;
        if (m.add) sum += m.add[at];
        if (m.out_is_bf16)
          ((bf16*)m.out)[at] = to_bf16(sum);
        else
          ((float*)m.out)[at] = sum;
      }
    }
    if (!more) break;
    if (!STAGE && in_sh != round) {
      __syncwarp();
#pragma unroll 1
      for (int n = 0; n < a.T; n++) copy_row<BITS>(x_sh + n * x_stride, (const bf16*)a.x + (size_t)n * a.x_stride, step * C::STEP_K, a.K, own_chunks);
      copy_async_commit();
      in_sh = round;
      copy_async_wait<0>();
      __syncwarp();
    }
    if (round == 0) acc[0][0] = acc[0][1] = acc[0][2] = acc[0][3] = 0.f;
    stream_wait(barrier_sh + stage, phase);
    const char* codes_sh = tile_sh + stage * 16 * stride;
#pragma unroll
    for (int c = 0; c < STREAM_STEPS; c++) {
      if (step + c >= steps) break;
      uint4 x[1][C::CHUNKS], lo, hi;
      read_codes(lo, hi, codes_sh, stride, warp * STREAM_STEPS + c);
      read_chunks<BITS, 1>(x, STAGE ? x_sh + step * 4 * C::CHUNKS : x_sh, x_stride, &column, c);
      step_products<BITS, Groups<BITS, G>::SUB, 1>(acc, lo, hi, scales.s[c], x);
    }
    if (++round == rounds) {
      store_partial<1>(partial_sh + parity * part + warp * 8 * PARTIAL_STRIDE, acc);
      round = 0, parity ^= 1, last_row = row, last_matrix = matrix, tile += gridDim.x;
    }
    if (++stage == a.stages) stage = 0, phase ^= 1;
    __syncthreads();
    if (warp == 0) fetch();
  }
}

#define LINEAR_STREAM(NAME, BITS, G, STAGE) \
  extern "C" __global__ void __launch_bounds__(STAGE == STAGE_ANY || (G == 64 && BITS == 4) || G == 32 ? 256 : 768, 1) linear_##NAME(const __grid_constant__ LinearArgs a) { linear_stream<BITS, G, STAGE>(a); }
#define LINEAR_WIDE(NAME, BITS, G, NT) \
  extern "C" __global__ void __launch_bounds__(256, 1) linear_##NAME(const __grid_constant__ LinearArgs a) { linear_tiles<BITS, G, NT, STAGE_NONE>(a); }
#define LINEAR(NAME, BITS, G)                    \
  LINEAR_STREAM(NAME##_s, BITS, G, STAGE_ANY)   \
  LINEAR_STREAM(NAME##_r, BITS, G, STAGE_RMS)   \
  LINEAR_STREAM(NAME##_n1, BITS, G, STAGE_NONE) \
  LINEAR_WIDE(NAME##_n2, BITS, G, 2)            \
  LINEAR_WIDE(NAME##_n4, BITS, G, (BITS == 4 && G == 32 ? 2 : 4))

LINEAR(w4, 4, 128)
LINEAR(w4_g64, 4, 64)
LINEAR(w4_g32, 4, 32)  // n4 is n2 here: registers
LINEAR(w8, 8, 128)
LINEAR(w8_g64, 8, 64)
LINEAR(w8_g32, 8, 32)
LINEAR(w8_c, 8, 0)  // one scale a row
LINEAR(w16, 16, 0)
