// Work on rows: embedding, norms, gated activations, argmax. Memory bound, one block or a few a row.
//
// embed_{f32 table as bf16 | w8 | w4}: x[t, d] = scale * table[token[t], d], x f32
// norm_rows:  y[t] = RMSNorm or LayerNorm of x[t], x f32 or bf16, y bf16 (natural or nibble order) or f32
// gated_act:  y[t, f] = silu(gate[t, f]) * up[t, f], f32 in, bf16 (natural or nibble order) out
// add_gated:  acc[t, d] += scale * sigmoid(gate[t]) * add[t, d]; gate null for 1
// argmax_rows: token[t] = first index of the largest logit; grid (blocks, T), last block of a row finishes
// needs widths % 8 == 0, 16-byte aligned rows
#include "common/mma.cuh"
#include "common/reduce.cuh"

struct EmbedArgs {
  float* x;
  const void* table;
  const bf16* table_scale;
  const int* tokens;
  int D, G;
  float scale;
};
// grid T, any block
template <int BITS>
DEV void embed_row(const EmbedArgs& a) {
  dependency_wait();
  dependents_launch();
  const size_t row = a.tokens[blockIdx.x];
  for (int d = threadIdx.x; d < a.D; d += blockDim.x) {
    float v;
    if (BITS == 16) {
      v = to_f32(((const bf16*)a.table)[row * a.D + d]);
    } else {
      const u32 word = ((const u32*)a.table)[row * (a.D * BITS / 32) + d / (32 / BITS)];
      const int code = (int)(word >> (d % (32 / BITS) * BITS) & ((1u << (BITS % 32)) - 1)) - (1 << (BITS % 32 - 1));
      v = code * to_f32(a.table_scale[row * (a.D / a.G) + d / a.G]);
    }
    a.x[(size_t)blockIdx.x * a.D + d] = v * a.scale;
  }
}
extern "C" __global__ void __launch_bounds__(256) embed_w16(const __grid_constant__ EmbedArgs a) { embed_row<16>(a); }
extern "C" __global__ void __launch_bounds__(256) embed_w8(const __grid_constant__ EmbedArgs a) { embed_row<8>(a); }
extern "C" __global__ void __launch_bounds__(256) embed_w4(const __grid_constant__ EmbedArgs a) { embed_row<4>(a); }

struct NormArgs {
  void* y;
  const void* x;
  const float* gain;
  const float* shift;  // LayerNorm
  int width;
  int runs;            // of `width` elements in a row
  int x_stride, y_stride;  // elements, from row to row
  int x_is_bf16, y_is_f32;
  int nibble_order;
  int norm;            // 0 convert only, 1 RMS, 2 Layer
  float eps;
};
// grid (runs, T), 256 threads
extern "C" __global__ void __launch_bounds__(256) norm_rows(const __grid_constant__ NormArgs a) {
  __shared__ float scratch_sh[32];
  dependency_wait();
  dependents_launch();
  const size_t from = (size_t)blockIdx.y * a.x_stride + (size_t)blockIdx.x * a.width, to = (size_t)blockIdx.y * a.y_stride + (size_t)blockIdx.x * a.width;
  auto load = [&](int k) { return a.x_is_bf16 ? to_f32(((const bf16*)a.x)[from + k]) : ((const float*)a.x)[from + k]; };
  float mean = 0.f, inv = 1.f, sum = 0.f;
  if (a.norm == 2) {
    for (int k = threadIdx.x; k < a.width; k += blockDim.x) sum += load(k);
    mean = block_sum(sum, scratch_sh) / a.width;
    sum = 0.f;
  }
  if (a.norm) {
    for (int k = threadIdx.x; k < a.width; k += blockDim.x) sum += (load(k) - mean) * (load(k) - mean);
    inv = rsqrtf(block_sum(sum, scratch_sh) / a.width + a.eps);
  }
  for (int k = threadIdx.x; k < a.width; k += blockDim.x) {
    float v = load(k);
    if (a.norm) v = (v - mean) * inv * a.gain[k] + (a.norm == 2 ? a.shift[k] : 0.f);
    if (a.y_is_f32)
      ((float*)a.y)[to + k] = v;
    else
      ((bf16*)a.y)[to + (a.nibble_order ? nibble_position(k) : k)] = to_bf16(v);
  }
}

struct GatedActArgs {
  bf16* y;
  const float* gate;
  const float* up;
  int F;
  int nibble_order;
};
// grid (ceil(F / 256), T), 256 threads
extern "C" __global__ void __launch_bounds__(256) gated_act(const __grid_constant__ GatedActArgs a) {
  dependency_wait();
  dependents_launch();
  const int f = blockIdx.x * blockDim.x + threadIdx.x;
  const size_t at = (size_t)blockIdx.y * a.F;
  if (f < a.F) a.y[at + (a.nibble_order ? nibble_position(f) : f)] = to_bf16(silu(a.gate[at + f]) * a.up[at + f]);
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
    a.tokens[blockIdx.y] = (int)(0xffffffffu - (u32)atomicExch(a.best + blockIdx.y, 0ull));
    if (a.positions) a.positions[blockIdx.y]++;
  }
}
