// Work on rows: planes, gated sums, the sum over ranks, argmax. Memory bound, one block or a few a row.
//
// planes_w{4,8,16}, planes_k{4,8,16} (in the order of k): planes (common/planes.cuh) of n(x)[t], n = nothing, RMSNorm, LayerNorm or silu(x) * up; x [T, K] f32;
//              in the order of k beside those for integer codes also those for bf16, if they are wanted
// moe_combine: y[t, d] = add[t, d] + scale * sum_rank gates[t, rank] pairs[t K + rank, d], ranks in order
// add_gated:   acc[t, d] += scale * sigmoid(gate[t]) * add[t, d]; gate null for 1
// argmax_rows: token[t] = first index of the largest logit; grid (blocks, T), last block of a row finishes
// needs widths % 8 == 0, 16-byte aligned rows
#include "common/planes.cuh"

struct PlanesArgs {
  char* q;             // [T][groups][block]
  float* scale;        // [T][groups, up to a multiple of 4]
  const float* x;
  const float* up;     // or null
  const float* gain;   // [K]
  const float* shift;  // [K], LayerNorm
  char* q_bf16;        // [T][groups][512], or null
  int K;
  int x_stride;        // elements
  int norm;            // 0 none, 1 RMS, 2 Layer
  float eps;
};
// grid T, 128 or 256 threads
template <int BITS, int ORDER = BY_LANE>
DEV void planes_row(const PlanesArgs& a) {
  __shared__ float scratch_sh[32];
  dependency_wait();
  dependents_launch();
  const float* x = a.x + (size_t)blockIdx.x * a.x_stride;
  const int groups = groups_of(a.K), chunks = groups * 16;
  auto load = [&](float* f, int k) { *(float4*)f = *(const float4*)(x + k), *(float4*)(f + 4) = *(const float4*)(x + k + 4); };
  float first[8], mean = 0.f, inv = 1.f;  // the first eight elements of this thread are read once
  if (threadIdx.x * 8 < a.K) load(first, threadIdx.x * 8);
  // of all elements, or of their squares without the mean
  auto row_sum = [&](bool squares) {
    float sum = 0.f;
#pragma unroll 1
    for (int k = threadIdx.x * 8; k < a.K; k += blockDim.x * 8) {
      float f[8];
      if (k >= (int)blockDim.x * 8) load(f, k);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float d = (k < (int)blockDim.x * 8 ? first[i] : f[i]) - mean;
        sum += squares ? d * d : d;
      }
    }
    return block_sum(sum, scratch_sh) / a.K;
  };
  if (a.norm == 2) mean = row_sum(false);
  if (a.norm) inv = rsqrtf(row_sum(true) + a.eps);
#pragma unroll 1
  for (int base = 0; base < chunks; base += blockDim.x) {
    const int c = base + threadIdx.x, k = c * 8;
    float f[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, other[8];
    if (k < a.K) {
      if (base) load(f, k);
      if (!base)
#pragma unroll
        for (int i = 0; i < 8; i++) f[i] = first[i];
      if (a.norm) {
        *(float4*)other = *(const float4*)(a.gain + k), *(float4*)(other + 4) = *(const float4*)(a.gain + k + 4);
#pragma unroll
        for (int i = 0; i < 8; i++) f[i] = (f[i] - mean) * inv * other[i] + (a.norm == 2 ? a.shift[k + i] : 0.f);
      } else if (a.up) {
        const float* up = a.up + (size_t)blockIdx.x * a.x_stride + k;
        *(float4*)other = *(const float4*)up, *(float4*)(other + 4) = *(const float4*)(up + 4);
#pragma unroll
        for (int i = 0; i < 8; i++) f[i] = silu(f[i]) * other[i];
      }
    }
    const size_t group = (size_t)blockIdx.x * groups + (c >> 4);
    make_block<BITS, ORDER>(a.q + group * Block<BITS>::BYTES, a.scale + (size_t)blockIdx.x * scale_row(groups) + (c >> 4), c, f, c < chunks);
    if (ORDER == BY_K && BITS != 16 && a.q_bf16) make_block<16, BY_K>(a.q_bf16 + group * Block<16>::BYTES, nullptr, c, f, c < chunks);
  }
}
extern "C" __global__ void __launch_bounds__(256) planes_w4(const __grid_constant__ PlanesArgs a) { planes_row<4>(a); }
extern "C" __global__ void __launch_bounds__(256) planes_w8(const __grid_constant__ PlanesArgs a) { planes_row<8>(a); }
extern "C" __global__ void __launch_bounds__(256) planes_w16(const __grid_constant__ PlanesArgs a) { planes_row<16>(a); }
extern "C" __global__ void __launch_bounds__(256) planes_k4(const __grid_constant__ PlanesArgs a) { planes_row<4, BY_K>(a); }
extern "C" __global__ void __launch_bounds__(256) planes_k8(const __grid_constant__ PlanesArgs a) { planes_row<8, BY_K>(a); }
extern "C" __global__ void __launch_bounds__(256) planes_k16(const __grid_constant__ PlanesArgs a) { planes_row<16, BY_K>(a); }

struct CombineArgs {
  float* y;
  const float* add;    // or null
  const float* pairs;  // [T K, D]
  const float* gates;  // [T, K]
  int D, K;
  float scale;
};
// grid (ceil(D / 512), T), 128 threads
extern "C" __global__ void __launch_bounds__(128) moe_combine(const __grid_constant__ CombineArgs a) {
  dependency_wait();
  dependents_launch();
  const int k = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  if (k >= a.D) return;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int r = 0; r < a.K; r++) {
    const float gate = a.gates[blockIdx.y * a.K + r];
    const float4 v = *(const float4*)(a.pairs + ((size_t)blockIdx.y * a.K + r) * a.D + k);
    sum.x += gate * v.x, sum.y += gate * v.y, sum.z += gate * v.z, sum.w += gate * v.w;
  }
  const size_t at = (size_t)blockIdx.y * a.D + k;
  const float4 before = a.add ? *(const float4*)(a.add + at) : make_float4(0.f, 0.f, 0.f, 0.f);
  *(float4*)(a.y + at) = make_float4(before.x + a.scale * sum.x, before.y + a.scale * sum.y, before.z + a.scale * sum.z, before.w + a.scale * sum.w);
}

struct AddGatedArgs {
  float* acc;
  const float* add;
  const float* gate;  // [T] or null
  int D;
  float scale;
};
// grid (ceil(D / 256), T), 256 threads
extern "C" __global__ void __launch_bounds__(256) add_gated(const __grid_constant__ AddGatedArgs a) {
  dependency_wait();
  dependents_launch();
  const int d = blockIdx.x * blockDim.x + threadIdx.x;
  const size_t at = (size_t)blockIdx.y * a.D + d;
  if (d < a.D) a.acc[at] += a.scale * (a.gate ? 1.f / (1.f + __expf(-a.gate[blockIdx.y])) : 1.f) * a.add[at];
}

struct ArgmaxArgs {
  int* tokens;
  Sent sent;
  const float* logits;  // [T, V]
  u64* best;            // [T], zero before the first launch
  int* counters;        // [T], zero before the first launch
  int* positions;       // [T], advanced by one, or null
  int V;
};
// grid (blocks, T), 256 threads
extern "C" __global__ void __launch_bounds__(256) argmax_rows(const __grid_constant__ ArgmaxArgs a) {
  __shared__ u64 best_sh[8];
  __shared__ int last_sh;
  dependency_wait();
  dependents_launch();
  const float* row = a.logits + (size_t)blockIdx.y * a.V;
  u64 best = 0;
  for (int v = blockIdx.x * blockDim.x + threadIdx.x; v < a.V; v += gridDim.x * blockDim.x) {
    const u64 key = (u64)order_key(row[v]) << 32 | (0xffffffffu - v);
    best = key > best ? key : best;
  }
#pragma unroll
  for (int i = 16; i; i >>= 1) {
    const u64 other = __shfl_xor_sync(0xffffffffu, best, i);
    best = other > best ? other : best;
  }
  if ((threadIdx.x & 31) == 0) best_sh[threadIdx.x >> 5] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 8; i++) best = best_sh[i] > best ? best_sh[i] : best;
    atomicMax(a.best + blockIdx.y, best);
  }
  if (!arrives_last(a.counters + blockIdx.y, gridDim.x, &last_sh)) return;
  if (threadIdx.x == 0) {
    const int token = (int)(0xffffffffu - (u32)atomicExch(a.best + blockIdx.y, 0ull));
    a.tokens[blockIdx.y] = token;
    if (a.positions) send(a.sent, a.positions[blockIdx.y]++, blockIdx.y, token);
  }
}
