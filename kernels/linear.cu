// y[t, r] = add[t, r] + scale * (sum_k W[r, k] * n(x)[t, k] + bias[r]),   n = nothing, RMSNorm or LayerNorm; up to three W at once
//
// W      w4: [R, K/8] u32, low nibble first, code + 8;  w8: [R, K/4] u32, code + 128;  w16: [R, K] bf16; rows 16-byte aligned
// scale  [R, K/G] bf16, G in {32, 64, 128} or K (w8 per channel); absent for w16
// x      [T, K] f32 or bf16, rows 16-byte aligned; gain, shift [K] f32
// y      [T, R] f32 or bf16 with a row stride; bias [R] f32; add [T, R] f32 with the stride of y; y may be add
// needs  K % 32 == 0; any R; accumulation f32
//
// Instances linear_w{4,8,16}[_g64,_g32]_{s,n1,n2,n4}: `s` normalises x into shared memory itself, T <= 8; `nN` reads x as bf16
// from memory, T <= 8 N a pass, any T; for w4 that x lies in nibble order (norm_rows, order = 1). A group of at least a step
// (128 k for w4, 64 for w8) needs no suffix.
// Launch: one block walks tiles of 16 rows, grid = min(tiles, what fits); its warps split K, four steps each where they can:
//   threads = 32 * clamp(ceil(K / step / 4), 1, 16; n2 and n4: 8);  shared = 4 * warps * 8 N * 20 + 4 * 8 * warps + (s: 16 * T * ((ceil(K, step) / 8 | 7) + 5))
//
// Floors: bytes R K bits / 8 + R K / G * 2 at read bandwidth; operations 2 R K 8 N on tensor cores, 13 (w4) or 8 (w8)
// instructions a word and lane to unpack. Source: mma fragment order, prototypes; activations are permuted, never weights.
#include "common/mma.cuh"
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
  int x_is_f32;        // `s` only
  int norm;            // `s` only: 0 none, 1 RMS, 2 Layer
  float eps;
};

static const int STEPS = 4;  // 16-byte loads of a row that a lane keeps in flight

template <int BITS, int SUB>
struct LinearWeights {
  uint4 lo[STEPS], hi[STEPS];
  StepScales<SUB> s[STEPS];
};

template <int BITS>
DEV int linear_row_chunks(int K) { return ((div_up(K, Codes<BITS>::STEP_K) * 4 * Codes<BITS>::CHUNKS) | 7) + 5; }

template <int BITS, int SUB>
DEV void linear_load(LinearWeights<BITS, SUB>& w, const LinearArgs& a, int tile, int round) {
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  int i = 0;
  while (i + 1 < a.num_matrices && tile >= div_up(a.m[i].rows, 16)) tile -= div_up(a.m[i].rows, 16), i++;
  const LinearMatrix& m = a.m[i];
  const int r_lo = min_int(tile * 16 + g, m.rows - 1), r_hi = min_int(tile * 16 + g + 8, m.rows - 1);
  const size_t row_bytes = (size_t)a.K * BITS / 8;
  const char *p_lo = (const char*)m.packed + r_lo * row_bytes, *p_hi = (const char*)m.packed + r_hi * row_bytes;
  const int groups = BITS == 16 ? 0 : a.K / a.G;
  const bf16 *s_lo = m.scale + (size_t)r_lo * groups, *s_hi = m.scale + (size_t)r_hi * groups;
#pragma unroll
  for (int c = 0; c < STEPS; c++) {
    const int k = ((round * warps + warp) * STEPS + c) * Codes<BITS>::STEP_K, mine = k + t * Codes<BITS>::LANE_K;
    if (mine < a.K) {
      w.lo[c] = load_streaming(p_lo + (size_t)mine * BITS / 8);
      w.hi[c] = load_streaming(p_hi + (size_t)mine * BITS / 8);
    } else {
      w.lo[c] = w.hi[c] = make_uint4(0, 0, 0, 0);
    }
    load_scales<BITS, SUB>(w.s[c], s_lo, s_hi, k, a.K, BITS == 16 ? 1 : a.G);
  }
}

// x of all tokens as bf16 chunks in the order of the products; with RMSNorm the factor 1 / rms is left to the epilogue
template <int BITS>
DEV void linear_stage(uint4* x_sh, float* square_sh, const LinearArgs& a) {
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, lane = threadIdx.x & 31;
  const int stride = linear_row_chunks<BITS>(a.K), chunks = div_up(a.K, Codes<BITS>::STEP_K) * 4 * Codes<BITS>::CHUNKS;
  for (int n = 0; n < a.T; n++) {
    float mean = 0.f, inv = 1.f, square = 0.f;
    const float* xf = (const float*)a.x + (size_t)n * a.x_stride;
    const bf16* xb = (const bf16*)a.x + (size_t)n * a.x_stride;
    if (a.norm == 2) {
      float sum = 0.f, var = 0.f;
      for (int k = threadIdx.x; k < a.K; k += blockDim.x) sum += a.x_is_f32 ? xf[k] : to_f32(xb[k]);
      mean = block_sum(sum, square_sh) / a.K;
      for (int k = threadIdx.x; k < a.K; k += blockDim.x) {
        const float d = (a.x_is_f32 ? xf[k] : to_f32(xb[k])) - mean;
        var += d * d;
      }
      inv = rsqrtf(block_sum(var, square_sh) / a.K + a.eps);
    }
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (c * 8 < a.K) {
        if (a.norm == 0 && !a.x_is_f32) {
          v = load_v4(xb + c * 8);
        } else {
          float f[8];
          if (a.x_is_f32) {
            const float4 p = *(const float4*)(xf + c * 8), q = *(const float4*)(xf + c * 8 + 4);
            f[0] = p.x, f[1] = p.y, f[2] = p.z, f[3] = p.w, f[4] = q.x, f[5] = q.y, f[6] = q.z, f[7] = q.w;
          } else {
            const uint4 p = load_v4(xb + c * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) f[2 * i] = bf16_lo(word_at(p, i)), f[2 * i + 1] = bf16_hi(word_at(p, i));
          }
          if (a.norm != 0) {
            float gain[8];
            *(float4*)gain = *(const float4*)(a.gain + c * 8), *(float4*)(gain + 4) = *(const float4*)(a.gain + c * 8 + 4);
#pragma unroll
            for (int i = 0; i < 8; i++) {
              if (a.norm == 1) square += f[i] * f[i];
              f[i] = a.norm == 1 ? f[i] * gain[i] : (f[i] - mean) * inv * gain[i] + a.shift[c * 8 + i];
            }
          }
          v = make_uint4(bf16_pair(f[0], f[1]), bf16_pair(f[2], f[3]), bf16_pair(f[4], f[5]), bf16_pair(f[6], f[7]));
        }
        if (BITS == 4) v = nibble_chunk(v);
      }
      const int per = 4 * Codes<BITS>::CHUNKS, in = c % per;
      x_sh[n * stride + (c - in) + (in % Codes<BITS>::CHUNKS) * 4 + in / Codes<BITS>::CHUNKS] = v;
    }
    if (a.norm == 1) {
      square = warp_sum(square);
      if (lane == 0) square_sh[n * warps + warp] = square;
    }
    if (a.norm == 2) __syncthreads();
  }
  __syncthreads();
}

template <int BITS, int SUB, int NT, bool STAGED>
DEV void linear_tiles(const LinearArgs& a) {
  extern __shared__ float linear_sh[];
  typedef Codes<BITS> C;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  float* square_sh = linear_sh;                              // [8][warps], at least 32
  float* partial_sh = square_sh + max_int(8 * warps, 32);    // [warps][8 NT][20]
  uint4* x_sh = (uint4*)(partial_sh + warps * 8 * NT * PARTIAL_STRIDE);
  int total = 0;
  for (int i = 0; i < a.num_matrices; i++) total += div_up(a.m[i].rows, 16);
  const int rounds = div_up(a.K, C::STEP_K * STEPS * warps), x_chunks = STAGED ? linear_row_chunks<BITS>(a.K) : 0;

  LinearWeights<BITS, SUB> w;
  int tile = blockIdx.x;
  if (tile < total) linear_load<BITS, SUB>(w, a, tile, 0);
  dependency_wait();
  dependents_launch();
  if (STAGED) linear_stage<BITS>(x_sh, square_sh, a);

  for (; tile < total; tile += gridDim.x) {
    int first = 0, row_tile = tile;
    while (first + 1 < a.num_matrices && row_tile >= div_up(a.m[first].rows, 16)) row_tile -= div_up(a.m[first].rows, 16), first++;
    const LinearMatrix& m = a.m[first];
    for (int t0 = 0; t0 < a.T; t0 += 8 * NT) {
      float acc[NT][4];
#pragma unroll
      for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
      for (int round = 0; round < rounds; round++) {
        if (round > 0 || (t0 > 0 && rounds > 1)) linear_load<BITS, SUB>(w, a, tile, round);
#pragma unroll
        for (int c = 0; c < STEPS; c++) {
          const int step = (round * warps + warp) * STEPS + c, mine = step * C::STEP_K + t * C::LANE_K;
          if (step * C::STEP_K >= a.K) break;
          uint4 x[NT][C::CHUNKS];
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < C::CHUNKS; i++) {
              const int token = t0 + n * 8 + g;
              x[n][i] = make_uint4(0, 0, 0, 0);
              if (token < a.T) {
                if (STAGED)
                  x[n][i] = x_sh[token * x_chunks + step * 4 * C::CHUNKS + i * 4 + t];
                else if (mine < a.K)
                  x[n][i] = load_v4((const bf16*)a.x + (size_t)token * a.x_stride + mine + i * 8);
              }
            }
          step_products<BITS, SUB, NT>(acc, w.lo[c], w.hi[c], w.s[c], x);
        }
      }
      store_partial<NT>(partial_sh + warp * 8 * NT * PARTIAL_STRIDE, acc);
      if (t0 + 8 * NT >= a.T && tile + (int)gridDim.x < total) linear_load<BITS, SUB>(w, a, tile + gridDim.x, 0);
      __syncthreads();
      for (int i = threadIdx.x; i < 16 * min_int(a.T - t0, 8 * NT); i += blockDim.x) {
        const int r = i & 15, n = i >> 4, row = row_tile * 16 + r;
        if (row >= m.rows) continue;
        float sum = 0.f;
        for (int k = 0; k < warps; k++) sum += partial_sh[(k * 8 * NT + n) * PARTIAL_STRIDE + r];
        if (STAGED && a.norm == 1) {
          float square = 0.f;
          for (int k = 0; k < warps; k++) square += square_sh[n * warps + k];
          sum *= rsqrtf(square / a.K + a.eps);
        }
        if (m.bias) sum += m.bias[row];
        sum *= m.out_scale;
        const size_t at = (size_t)(t0 + n) * m.out_stride + row;
        if (m.add) sum += m.add[at];
        if (m.out_is_bf16)
          ((bf16*)m.out)[at] = to_bf16(sum);
        else
          ((float*)m.out)[at] = sum;
      }
      __syncthreads();
    }
  }
}

#define LINEAR_ONE(NAME, BITS, SUB, NT, STAGED, THREADS) \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_##NAME(const __grid_constant__ LinearArgs a) { linear_tiles<BITS, SUB, NT, STAGED>(a); }
#define LINEAR(NAME, BITS, SUB)                  \
  LINEAR_ONE(NAME##_s, BITS, SUB, 1, true, 512)  \
  LINEAR_ONE(NAME##_n1, BITS, SUB, 1, false, 512) \
  LINEAR_ONE(NAME##_n2, BITS, SUB, 2, false, 256) \
  LINEAR_ONE(NAME##_n4, BITS, SUB, 4, false, 256)

LINEAR(w4, 4, 1)      // G = 128
LINEAR(w4_g64, 4, 2)
LINEAR(w4_g32, 4, 4)
LINEAR(w8, 8, 1)      // G = 64, 128 or K
LINEAR(w8_g32, 8, 2)
LINEAR(w16, 16, 1)
