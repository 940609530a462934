// One plain kernel for every step, any shape and any format: the CUDA reference, and what runs where a fast kernel's
// divisibility does not hold or its parity row fails.
//
// Activations are f32, rows of `*_stride` elements. Weights are read in the format they are stored in. One warp an output
// element, lanes along the summed dimension, f32 accumulation, so that results differ from the CPU twin by rounding alone.
// Includes no CUDA header: NVRTC and a driver are all that is needed. Of the fast kernels it knows where keys and values are.

#include "common/pages.cuh"

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum Kind { F32 = 0, BF16 = 1, F16 = 2, INT4 = 3, INT8 = 4 };

// A weight as it lies on disk: plain floats row-major, or packed codes with a scale every `group` columns of a row. Zero points, words
// of one group of consecutive rows, begin 16 * `zeros` bytes behind `data`; 0: the middle code is zero.
struct Matrix {
  const void* data;
  const void* scales;
  int rows, cols, group, kind, scale_kind, zeros;
};

// What a token of the batch belongs to: its position and its row of the page table.
struct Pages {
  const int* position;  // [T]
  const int* row;       // [T]
  const int* table;     // [rows, stride]
  int stride;
  int kind;    // element type of the cache: F32 or BF16
  int turned;  // elements of a row are where element_at says, else in their order
};

constexpr int TOKENS = 8;    // tokens a warp carries through one weight row
constexpr u32 ALL = 0xffffffffu;
#define MINUS_INFINITY __int_as_float(0xff800000)

__device__ __forceinline__ float bf16_to_f32(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ u16 f32_to_bf16(float x) {  // half to even; NaN stays NaN
  u32 u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (u16)((u >> 16) | 0x40);
  return (u16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
__device__ __forceinline__ float f16_to_f32(u16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}
__device__ __forceinline__ float load_float(const void* p, size_t i, int kind) {
  if (kind == F32) return ((const float*)p)[i];
  u16 x = ((const u16*)p)[i];
  return kind == BF16 ? bf16_to_f32(x) : f16_to_f32(x);
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(ALL, x, o);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL, x, o));
  return x;
}
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// Columns that one 32-bit word of a format holds; plain floats go one by one so that lanes stay coalesced.
template <int KIND> struct Unit { static constexpr int COLS = KIND == INT4 ? 8 : KIND == INT8 ? 4 : 1; };

// The code of zero of a group of a row of packed codes.
__device__ __forceinline__ int zero_code(const Matrix& w, size_t row, int group, int bits) {
  if (!w.zeros) return 1 << (bits - 1);
  int per_word = 32 / bits;
  const u32* zeros = (const u32*)((const char*)w.data + 16 * (size_t)w.zeros);
  u32 word = zeros[row / per_word * (size_t)(w.cols / w.group) + group];
  return (int)(word >> (bits * (int)(row % per_word)) & ((1u << bits) - 1));
}

template <int KIND>
__device__ __forceinline__ void decode(float* v, const Matrix& w, size_t row, int unit) {
  constexpr int COLS = Unit<KIND>::COLS;
  if (KIND == INT4 || KIND == INT8) {
    u32 word = ((const u32*)w.data)[row * (size_t)(w.cols / COLS) + unit];
    int group = unit * COLS / w.group, zero = zero_code(w, row, group, 32 / COLS);
    float scale = load_float(w.scales, row * (size_t)(w.cols / w.group) + group, w.scale_kind);
#pragma unroll
    for (int j = 0; j < COLS; j++) {
      int code = KIND == INT4 ? (int)((word >> (4 * j)) & 15) : (int)((word >> (8 * j)) & 255);
      v[j] = (float)(code - zero) * scale;
    }
  } else {
    v[0] = load_float(w.data, row * (size_t)w.cols + unit, KIND);
  }
}

// acc[t] = sum over k of w[row, k] * x[t, k], for up to TOKENS rows of x.
template <int KIND>
__device__ __forceinline__ void row_dot_of(float* acc, const Matrix& w, size_t row, const float* const* x, int num_tok) {
  constexpr int COLS = Unit<KIND>::COLS;
  for (int unit = threadIdx.x & 31; unit < w.cols / COLS; unit += 32) {
    float v[COLS];
    decode<KIND>(v, w, row, unit);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      if (t < num_tok) {
#pragma unroll
        for (int j = 0; j < COLS; j++) acc[t] += v[j] * x[t][unit * COLS + j];
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TOKENS; t++) acc[t] = warp_sum(acc[t]);
}
__device__ __forceinline__ void row_dot(float* acc, const Matrix& w, size_t row, const float* const* x, int num_tok) {
  switch (w.kind) {
    case F32: return row_dot_of<F32>(acc, w, row, x, num_tok);
    case BF16: return row_dot_of<BF16>(acc, w, row, x, num_tok);
    case F16: return row_dot_of<F16>(acc, w, row, x, num_tok);
    case INT4: return row_dot_of<INT4>(acc, w, row, x, num_tok);
    default: return row_dot_of<INT8>(acc, w, row, x, num_tok);
  }
}
// The same for one row of x.
__device__ __forceinline__ float row_dot_one(const Matrix& w, size_t row, const float* x) {
  float sum = 0;
  int lane = threadIdx.x & 31;
  switch (w.kind) {
#define ONE(KIND)                                                      \
  for (int unit = lane; unit < w.cols / Unit<KIND>::COLS; unit += 32) { \
    float v[Unit<KIND>::COLS];                                         \
    decode<KIND>(v, w, row, unit);                                     \
    for (int j = 0; j < Unit<KIND>::COLS; j++) sum += v[j] * x[unit * Unit<KIND>::COLS + j]; \
  }                                                                    \
  break;
    case F32: ONE(F32)
    case BF16: ONE(BF16)
    case F16: ONE(F16)
    case INT4: ONE(INT4)
    default: ONE(INT8)
#undef ONE
  }
  return warp_sum(sum);
}
// One element of a weight of any format.
__device__ __forceinline__ float element(const Matrix& w, size_t row, int col) {
  if (w.kind == INT4 || w.kind == INT8) {
    int bits = w.kind == INT4 ? 4 : 8, per_word = 32 / bits;
    u32 word = ((const u32*)w.data)[row * (size_t)(w.cols / per_word) + col / per_word];
    int code = (int)((word >> (bits * (col % per_word))) & ((1u << bits) - 1)) - zero_code(w, row, col / w.group, bits);
    return (float)code * load_float(w.scales, row * (size_t)(w.cols / w.group) + col / w.group, w.scale_kind);
  }
  return load_float(w.data, row * (size_t)w.cols + col, w.kind);
}

// dst[T, D] = table[token] * scale. Grid (T), block any.
extern "C" __global__ void plain_embed(float* dst, int dst_stride, Matrix table, const int* tokens, float scale) {
  size_t row = tokens[blockIdx.x];
  for (int c = threadIdx.x; c < table.cols; c += blockDim.x) dst[(size_t)blockIdx.x * dst_stride + c] = __uint_as_float(__float_as_uint(element(table, row, c) * scale) & ~1u);
}

// Normalises runs of `width` elements. Grid (runs, T), block 256. `layer`: LayerNorm, else RMSNorm.
extern "C" __global__ void plain_norm(float* dst, int dst_stride, const float* src, int src_stride, Matrix gain, Matrix bias, int layer, float eps, int width) {
  __shared__ float part[8];
  const float* x = src + (size_t)blockIdx.y * src_stride + (size_t)blockIdx.x * width;
  float* y = dst + (size_t)blockIdx.y * dst_stride + (size_t)blockIdx.x * width;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float mean = 0;
  for (int pass = layer ? 0 : 1; pass < 2; pass++) {
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += pass ? (x[i] - mean) * (x[i] - mean) : x[i];
    sum = warp_sum(sum);
    if (lane == 0) part[warp] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < (int)blockDim.x / 32; i++) sum += part[i];
    __syncthreads();
    if (pass == 0) {
      mean = sum / width;
    } else {
      float inv = 1.0f / sqrtf(sum / width + eps);
      for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float v = (x[i] - mean) * inv * load_float(gain.data, i, gain.kind);
        y[i] = bias.data ? v + load_float(bias.data, i, bias.kind) : v;
      }
    }
  }
}

// dst[t, r] = (w[r] . src[pick(t)] + bias[r]) * scale. Grid (rows / 8, T / 8), block 256. `pick` null: identity.
extern "C" __global__ void plain_linear(float* dst, int dst_stride, const float* src, int src_stride, const int* pick, Matrix w, Matrix bias, float scale, int num_tok) {
  int row = blockIdx.x * 8 + (threadIdx.x >> 5), first = blockIdx.y * TOKENS;
  if (row >= w.rows) return;
  int n = min(TOKENS, num_tok - first);
  const float* x[TOKENS];
  float acc[TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    int at = first + min(t, n - 1);
    x[t] = src + (size_t)(pick ? pick[at] : at) * src_stride;
    acc[t] = 0;
  }
  row_dot(acc, w, row, x, n);
  float add = bias.data ? load_float(bias.data, row, bias.kind) : 0.0f;
#pragma unroll
  for (int t = 0; t < TOKENS; t++)
    if (t < n && (threadIdx.x & 31) == t) dst[(size_t)(first + t) * dst_stride + row] = (acc[t] + add) * scale;
}

extern "C" __global__ void plain_clip(float* buf, u64 n, float limit) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) buf[i] = fminf(fmaxf(buf[i], -limit), limit);
}

// Rotates 2 * half elements at `offset` of each head. Grid (heads, T), block 64. cos, sin: [T, half].
extern "C" __global__ void plain_rope(float* buf, int row_stride, int stride, int offset, const float* cos, const float* sin, int half, int interleaved) {
  float* x = buf + (size_t)blockIdx.y * row_stride + (size_t)blockIdx.x * stride + offset;
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + half;
    float c = cos[(size_t)blockIdx.y * half + i], s = sin[(size_t)blockIdx.y * half + i], p = x[a], q = x[b];
    x[a] = p * c - q * s;
    x[b] = q * c + p * s;
  }
}

__device__ __forceinline__ size_t cache_at(const Pages& pages, int row, int position, int heads, int head, int dim) {
  return page_at(dim, heads, pages.table[(size_t)row * pages.stride + position / PAGE], head) + position % PAGE * dim;
}

// Where element i of a row is.
__device__ __forceinline__ int place_of(const Pages& pages, int position, int dim, int i) { return pages.turned ? element_at(dim, position % PAGE, i) : i; }

// Stores one row a token in its page. Grid (heads, T), block 64.
extern "C" __global__ void plain_append(void* cache, const float* src, int src_stride, Pages pages, int dim) {
  int t = blockIdx.y, head = blockIdx.x;
  size_t at = cache_at(pages, pages.row[t], pages.position[t], gridDim.x, head, dim);
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {
    float x = src[(size_t)t * src_stride + head * dim + i];
    size_t to = at + place_of(pages, pages.position[t], dim, i);
    if (pages.kind == F32) ((float*)cache)[to] = x;
    else ((u16*)cache)[to] = f32_to_bf16(x);
  }
}

// Streaming softmax (Milakov and Gimelshein 2018) of one query over the keys it may see; each warp takes every fourth key.
// KN, VN: elements of a key and of a value that a lane holds.
template <int KN, int VN>
__device__ __forceinline__ void attend(float* dst, const float* q, const void* keys, const void* values, const Pages& pages, int t, int heads, int head, int k_dim, int v_dim, int v_row, float scale, int window) {
  constexpr int WARPS = 4;
  __shared__ float peak[WARPS], mass[WARPS], out[WARPS][VN * 32];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = pages.row[t], end = pages.position[t] + 1;
  float query[KN], acc[VN], m = MINUS_INFINITY, l = 0;
#pragma unroll
  for (int i = 0; i < KN; i++) query[i] = i * 32 + lane < k_dim ? q[i * 32 + lane] * scale : 0.0f;
#pragma unroll
  for (int i = 0; i < VN; i++) acc[i] = 0;
  for (int p = (window ? max(0, end - window) : 0) + warp; p < end; p += WARPS) {
    size_t k_at = cache_at(pages, row, p, heads, head, k_dim), v_at = cache_at(pages, row, p, heads, head, v_row);
    float score = 0;
#pragma unroll
    for (int i = 0; i < KN; i++)
      if (i * 32 + lane < k_dim) score += query[i] * load_float(keys, k_at + place_of(pages, p, k_dim, i * 32 + lane), pages.kind);
    score = warp_sum(score);
    float next = fmaxf(m, score), keep = expf(m - next), e = expf(score - next);
    l = l * keep + e;
    m = next;
#pragma unroll
    for (int i = 0; i < VN; i++) acc[i] = acc[i] * keep + (i * 32 + lane < v_dim ? e * load_float(values, v_at + place_of(pages, p, v_row, i * 32 + lane), pages.kind) : 0.0f);
  }
  if (lane == 0) peak[warp] = m, mass[warp] = l;
#pragma unroll
  for (int i = 0; i < VN; i++) out[warp][i * 32 + lane] = acc[i];
  __syncthreads();
  float top = MINUS_INFINITY, sum = 0;
  for (int w = 0; w < WARPS; w++) top = fmaxf(top, peak[w]);
  for (int w = 0; w < WARPS; w++) sum += mass[w] * expf(peak[w] - top);
  for (int i = threadIdx.x; i < v_dim; i += blockDim.x) {
    float x = 0;
    for (int w = 0; w < WARPS; w++) x += out[w][i] * expf(peak[w] - top);
    dst[i] = x / sum;
  }
}

// Causal attention over pages. Grid (H, T), block 128. Dh <= 256. window 0: none.
extern "C" __global__ void plain_attend(float* dst, int dst_stride, const float* q, int q_stride, const void* keys, const void* values, Pages pages, int kv_heads, int dim, float scale, int window) {
  int head = blockIdx.x, t = blockIdx.y;
  attend<8, 8>(dst + (size_t)t * dst_stride + (size_t)head * dim, q + (size_t)t * q_stride + (size_t)head * dim, keys, values, pages, t, kv_heads, head / (gridDim.x / kv_heads), dim, dim, dim, scale, window);
}

// Queries in latent space: dst[t, h] = (q_n U_n, q_r), [Rkv + Dr]. Grid (H, T), block 256. up: [H * (Dn + Dv), Rkv].
extern "C" __global__ void plain_latent_query(float* dst, const float* q, int q_stride, Matrix up, int nope, int rope, int v) {
  int head = blockIdx.x, rank = up.cols;
  const float* x = q + (size_t)blockIdx.y * q_stride + (size_t)head * (nope + rope);
  float* y = dst + ((size_t)blockIdx.y * gridDim.x + head) * (rank + rope);
  for (int r = threadIdx.x; r < rank; r += blockDim.x) {
    float sum = 0;
    for (int n = 0; n < nope; n++) sum += x[n] * element(up, (size_t)head * (nope + v) + n, r);
    y[r] = sum;
  }
  for (int i = threadIdx.x; i < rope; i += blockDim.x) y[rank + i] = x[nope + i];
}

// Attention over cached latents: dst[t, h] = sum p c, [Rkv]. Grid (H, T), block 128. Rkv <= 512, Rkv + Dr <= 640.
extern "C" __global__ void plain_attend_latent(float* dst, const float* q, const void* latents, Pages pages, int rank, int rope, float scale) {
  size_t at = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
  attend<20, 16>(dst + at * rank, q + at * (rank + rope), latents, latents, pages, blockIdx.y, 1, 0, rank + rope, rank, rank + rope, scale, 0);
}

// dst[t, h, i] = U_v[i] . mixed[t, h]. Grid (Dv / 8, H, T), block 256.
extern "C" __global__ void plain_latent_value(float* dst, int dst_stride, const float* mixed, Matrix up, int nope, int v) {
  int i = blockIdx.x * 8 + (threadIdx.x >> 5), head = blockIdx.y, t = blockIdx.z;
  if (i >= v) return;
  float x = row_dot_one(up, (size_t)head * (nope + v) + nope + i, mixed + ((size_t)t * gridDim.y + head) * up.cols);
  if ((threadIdx.x & 31) == 0) dst[(size_t)t * dst_stride + (size_t)head * v + i] = x;
}

// Index of the first maximum of x[n], by one warp.
__device__ __forceinline__ int first_max(const float* x, int n) {
  int lane = threadIdx.x & 31, best = n;
  float top = MINUS_INFINITY;
  for (int i = lane; i < n; i += 32)
    if (best == n || x[i] > top) top = x[i], best = i;
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    float other = __shfl_xor_sync(ALL, top, o);
    int at = __shfl_xor_sync(ALL, best, o);
    if (at < n && (best == n || other > top || (other == top && at < best))) top = other, best = at;
  }
  return best;
}
// Softmax of x[n] in place, by one warp; minus infinity becomes zero.
__device__ __forceinline__ void softmax(float* x, int n) {
  int lane = threadIdx.x & 31;
  float top = MINUS_INFINITY, sum = 0;
  for (int i = lane; i < n; i += 32) top = fmaxf(top, x[i]);
  top = warp_max(top);
  for (int i = lane; i < n; i += 32) sum += x[i] = expf(x[i] - top);
  sum = warp_sum(sum);
  for (int i = lane; i < n; i += 32) x[i] /= sum;
  __syncwarp();
}

enum Select { TOP = 0, GROUP_LIMITED = 1, SPARSE_MIXER = 2 };

struct Router {
  int experts, top_k, softmax_of_chosen, select, groups, keep, renorm;
  float jitter, scale;
};

// Chosen experts and their weights; ties go to the lower index. Grid (T), block 32, shared (2 E + groups + K) floats.
extern "C" __global__ void plain_route(int* experts, float* gates, const float* logits, Router r) {
  extern __shared__ float memory[];
  int lane = threadIdx.x, num = r.experts;
  float *scores = memory, *left = memory + num, *group = memory + 2 * num, *chosen = group + r.groups;
  const float* raw = logits + (size_t)blockIdx.x * num;
  int* ids = experts + (size_t)blockIdx.x * r.top_k;
  for (int i = lane; i < num; i += 32) scores[i] = raw[i];
  __syncwarp();
  if (r.select == SPARSE_MIXER) {
    for (int k = 0; k < r.top_k; k++) {
      int pick = first_max(scores, num);
      float best = scores[pick];
      for (int i = lane; i < num; i += 32) left[i] = (best - raw[i]) / fmaxf(fabsf(raw[i]), best) > 2.0f * r.jitter ? MINUS_INFINITY : scores[i];
      __syncwarp();
      softmax(left, num);
      if (lane == 0) ids[k] = pick, chosen[k] = left[pick], scores[pick] = MINUS_INFINITY;
      __syncwarp();
    }
  } else {
    if (!r.softmax_of_chosen) softmax(scores, num);
    if (r.select == GROUP_LIMITED) {
      int size = num / r.groups;
      for (int g = lane; g < r.groups; g += 32) {
        float top = MINUS_INFINITY;
        for (int i = 0; i < size; i++) top = fmaxf(top, scores[g * size + i]);
        group[g] = top;
      }
      for (int i = lane; i < num; i += 32) left[i] = 0;
      __syncwarp();
      for (int k = 0; k < r.keep; k++) {
        int g = first_max(group, r.groups);
        for (int i = lane; i < size; i += 32) left[g * size + i] = scores[g * size + i];
        __syncwarp();
        if (lane == 0) group[g] = MINUS_INFINITY;
        __syncwarp();
      }
      for (int i = lane; i < num; i += 32) scores[i] = left[i];
    } else {
      for (int i = lane; i < num; i += 32) left[i] = scores[i];
    }
    __syncwarp();
    for (int k = 0; k < r.top_k; k++) {
      int pick = first_max(left, num);
      __syncwarp();
      if (lane == 0) ids[k] = pick, chosen[k] = scores[pick], left[pick] = MINUS_INFINITY;
      __syncwarp();
    }
    if (r.softmax_of_chosen) softmax(chosen, r.top_k);
    if (r.renorm) {
      float sum = 0;
      for (int k = 0; k < r.top_k; k++) sum += chosen[k];
      __syncwarp();
      for (int k = lane; k < r.top_k; k += 32) chosen[k] /= sum;
      __syncwarp();
    }
  }
  for (int k = lane; k < r.top_k; k += 32) gates[(size_t)blockIdx.x * r.top_k + k] = chosen[k] * r.scale;
}

// inner[t, k, f] = silu(gate_e x) * up_e x. Grid (F / 8, T * K), block 256. table: [E][gate, up, down].
extern "C" __global__ void plain_experts_gate_up(float* inner, const float* src, int src_stride, const Matrix* table, const int* experts, int top_k, int width) {
  int f = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (f >= width) return;
  const Matrix* e = table + 3 * experts[blockIdx.y];
  const float* x = src + (size_t)(blockIdx.y / top_k) * src_stride;
  float gate = row_dot_one(e[0], f, x), up = row_dot_one(e[1], f, x);
  if ((threadIdx.x & 31) == 0) inner[(size_t)blockIdx.y * width + f] = silu(gate) * up;
}

// dst[t, d] = sum over k of gate_k * down_e inner[t, k]. Grid (D / 8, T), block 256.
extern "C" __global__ void plain_experts_down(float* dst, int dst_stride, const float* inner, const Matrix* table, const int* experts, const float* gates, int top_k, int width, int model_width) {
  int d = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (d >= model_width) return;
  float sum = 0;
  for (int k = 0; k < top_k; k++) {
    size_t slot = (size_t)blockIdx.y * top_k + k;
    sum += gates[slot] * row_dot_one(table[3 * experts[slot] + 2], d, inner + slot * width);
  }
  if ((threadIdx.x & 31) == 0) dst[(size_t)blockIdx.y * dst_stride + d] = sum;
}

extern "C" __global__ void plain_gated_act(float* gate, const float* up, u64 n) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) gate[i] = silu(gate[i]) * up[i];
}

// acc[t] += sigmoid(gate[t]) * add[t]; gate null: factor 1. Grid (T), block 256.
extern "C" __global__ void plain_add_gated(float* acc, const float* add, const float* gate, int width) {
  float factor = gate ? 1.0f / (1.0f + expf(-gate[blockIdx.x])) : 1.0f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) acc[(size_t)blockIdx.x * width + i] += factor * add[(size_t)blockIdx.x * width + i];
}

extern "C" __global__ void plain_add(float* acc, const float* add, u64 n, float scale) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) acc[i] += scale * add[i];
}

__device__ __forceinline__ u32 mixed(u64 x) {  // splitmix64 finaliser
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return (u32)((x ^ (x >> 31)) >> 16);
}

// Random words of packed codes, or random floats of `kind` in -scale..scale, for benchmarks. Grid any, block any.
extern "C" __global__ void plain_random(void* dst, u64 n, u64 seed, int kind, float scale) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
    u32 bits = mixed(seed + i);
    float x = ((float)(bits >> 8) * (1.0f / 8388608.0f) - 1.0f) * scale;
    if (kind == F32) ((float*)dst)[i] = x;
    else if (kind == BF16) ((u16*)dst)[i] = f32_to_bf16(x);
    else ((u32*)dst)[i] = bits;
  }
}

// The same value everywhere. kind F32 or BF16.
extern "C" __global__ void plain_fill(void* dst, u64 n, int kind, float value) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
    if (kind == F32) ((float*)dst)[i] = value;
    else ((u16*)dst)[i] = f32_to_bf16(value);
  }
}

// Reads n 16-byte words and keeps next to nothing: measures read bandwidth.
extern "C" __global__ void plain_read(u32* sink, const uint4* src, u64 n) {
  u32 sum = 0;
  u64 stride = (u64)gridDim.x * blockDim.x, i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
  for (; i + 3 * stride < n; i += 4 * stride) {
    uint4 a = src[i], b = src[i + stride], c = src[i + 2 * stride], d = src[i + 3 * stride];
    sum += (a.x ^ a.y ^ a.z ^ a.w) + (b.x ^ b.y ^ b.z ^ b.w) + (c.x ^ c.y ^ c.z ^ c.w) + (d.x ^ d.y ^ d.z ^ d.w);
  }
  for (; i < n; i += stride) sum += src[i].x;
  if (sum == 0x12345678u) *sink = sum;
}

// dst[r] = src[pick[r]]: rows that get logits, next to each other; `pick` null: identity. Grid (rows), block 256.
extern "C" __global__ void plain_pick(float* dst, const float* src, int src_stride, const int* pick, int width) {
  const float* row = src + (size_t)(pick ? pick[blockIdx.x] : blockIdx.x) * src_stride;
  for (int i = threadIdx.x; i < width; i += blockDim.x) dst[(size_t)blockIdx.x * width + i] = row[i];
}

// cos[t], sin[t] = rows `position[t]` of the tables [positions, half]. Grid (T), block 64.
extern "C" __global__ void plain_rotations(float* cos, float* sin, const float* cosines, const float* sines, const int* position, int half) {
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    cos[(size_t)blockIdx.x * half + i] = cosines[(size_t)position[blockIdx.x] * half + i];
    sin[(size_t)blockIdx.x * half + i] = sines[(size_t)position[blockIdx.x] * half + i];
  }
}
