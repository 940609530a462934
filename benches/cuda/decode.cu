// Correctness of every decode kernel against float64 loops, then one decode step of a model shape as a CUDA graph.
//
// usage: nvcc -O3 -std=c++17 -arch=sm_90 -o decode benches/cuda/decode.cu && ./decode [check] [all] [step] [mixtral] [kernels] [prefill] [variants] [whole]
//
// Weights are random and distinct in all layers, so that nothing but activations stays in the cache. Rates are shares of READ_TB_S.
#include <cuda_runtime.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>
#include "../../kernels/linear.cu"
#include "../../kernels/wide.cu"
#include "../../kernels/moe.cu"
#include "../../kernels/router.cu"
#include "../../kernels/attention.cu"
#include "../../kernels/rows.cu"
#include "../../kernels/step.cu"

static const double READ_TB_S = 4.23;

#define OK(call)                                                                                     \
  do {                                                                                               \
    cudaError_t e_ = (call);                                                                         \
    if (e_ != cudaSuccess) printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)), exit(1); \
  } while (0)

static cudaStream_t stream;
static bool use_pdl = true;
static int num_sm = 132;

template <class Args>
void launch(const void* kernel, dim3 grid, int threads, size_t shared, const Args& args, bool cooperative = false) {
  static std::map<const void*, size_t> raised;
  if (raised[kernel] < std::max<size_t>(shared, 1)) {
    OK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    OK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
    raised[kernel] = std::max<size_t>(shared, 1);
  }
  cudaLaunchConfig_t c = {};
  c.gridDim = grid, c.blockDim = dim3(threads), c.dynamicSmemBytes = shared, c.stream = stream;
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  at[0].val.programmaticStreamSerializationAllowed = 1;
  if (cooperative) at[0].id = cudaLaunchAttributeCooperative, at[0].val.cooperative = 1;
  c.attrs = at, c.numAttrs = use_pdl || cooperative ? 1 : 0;
  void* p[1] = {(void*)&args};
  OK(cudaLaunchKernelExC(&c, kernel, p));
}

template <class T>
T* device(size_t n) {
  T* p;
  OK(cudaMalloc(&p, n * sizeof(T)));
  return p;
}
template <class T>
T* zeros(size_t n) {
  T* p = device<T>(n);
  OK(cudaMemset(p, 0, n * sizeof(T)));
  return p;
}
template <class T>
T* upload(const std::vector<T>& v) {
  T* p = device<T>(v.size());
  OK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}
template <class T>
std::vector<T> download(const T* p, size_t n) {
  std::vector<T> v(n);
  OK(cudaDeviceSynchronize());
  OK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}

__host__ __device__ static inline u32 hash32(u64 i, u32 seed) {
  u64 z = i * 0x9e3779b97f4a7c15ull + seed * 0xbf58476d1ce4e5b9ull + 0x94d049bb133111ebull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull, z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return (u32)(z ^ z >> 31);
}
__global__ void fill_words(u32* p, size_t n, u32 seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = hash32(i, seed);
}
// bf16 uniform in +-[0.5, 1] * scale
__global__ void fill_scales(bf16* p, size_t n, u32 seed, float scale) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    const u32 h = hash32(i, seed);
    p[i] = to_bf16((h & 1 ? -1.f : 1.f) * scale * (0.5f + (h >> 8) * (0.5f / 16777216.f)));
  }
}
// uniform, mean zero, standard deviation `scale`
__global__ void fill_f32(float* p, size_t n, u32 seed, float scale, float mean) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    p[i] = mean + scale * 1.7320508f * ((hash32(i, seed) >> 8) * (2.f / 16777216.f) - 1.f);
}
__global__ void fill_bf16(bf16* p, size_t n, u32 seed, float scale) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    p[i] = to_bf16(scale * 1.7320508f * ((hash32(i, seed) >> 8) * (2.f / 16777216.f) - 1.f));
}
static u32 next_seed = 1;
static float* random_f32(size_t n, float scale, float mean = 0.f) {
  float* p = device<float>(n);
  fill_f32<<<1024, 256>>>(p, n, next_seed++, scale, mean);
  return p;
}
static bf16* random_bf16(size_t n, float scale) {
  bf16* p = device<bf16>(n);
  fill_bf16<<<1024, 256>>>(p, n, next_seed++, scale);
  return p;
}

// [rows, K] in one of the stored forms, for unit variance of the product
struct Stored {
  int bits, rows, K, G;
  void* packed;
  bf16* scale;
  double bytes() const { return (double)rows * K * bits / 8 + (bits == 16 ? 0 : (double)rows * (K / G) * 2); }
};
static void fill_stored(const Stored& s) {
  const float std = 1.f / sqrtf((float)s.K);
  if (s.bits == 16) {
    fill_bf16<<<1024, 256>>>((bf16*)s.packed, (size_t)s.rows * s.K, next_seed++, std);
    return;
  }
  fill_words<<<2048, 256>>>((u32*)s.packed, (size_t)s.rows * s.K * s.bits / 32, next_seed++);
  fill_scales<<<1024, 256>>>(s.scale, (size_t)s.rows * (s.K / s.G), next_seed++, std / (s.bits == 4 ? 3.5f : 56.f));
}
static Stored stored(int bits, int rows, int K, int G) {
  Stored s = {bits, rows, K, G, device<u32>((size_t)rows * K * bits / 32), bits == 16 ? nullptr : device<bf16>((size_t)rows * (K / G))};
  fill_stored(s);
  return s;
}

// ---------------------------------------------------------------------------------------------------------------- references
__device__ double weight_at(const void* packed, const bf16* scale, int bits, int K, int G, int r, int k) {
  if (bits == 16) return to_f32(((const bf16*)packed)[(size_t)r * K + k]);
  const int per = 32 / bits;
  const u32 word = ((const u32*)packed)[(size_t)r * (K / per) + k / per];
  const int code = (int)(word >> (k % per * bits) & ((1u << bits) - 1)) - (1 << (bits - 1));
  return (double)code * to_f32(scale[(size_t)r * (K / G) + k / G]);
}
// y[t, r] = sum_k w[r, k] x[t, k]; one thread an output
__global__ void reference_linear(double* y, const double* x, const void* packed, const bf16* scale, int bits, int T, int rows, int K, int G) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, t = i / rows, r = i % rows;
  if (t >= T) return;
  double sum = 0;
  for (int k = 0; k < K; k++) sum += weight_at(packed, scale, bits, K, G, r, k) * x[(size_t)t * K + k];
  y[(size_t)t * rows + r] = sum;
}
static std::vector<double> multiply(const std::vector<double>& x, const Stored& w, int T) {
  double *dx = upload(x), *dy = device<double>((size_t)T * w.rows);
  reference_linear<<<(T * w.rows + 127) / 128, 128>>>(dy, dx, w.packed, w.scale, w.bits, T, w.rows, w.K, w.G);
  std::vector<double> y = download(dy, (size_t)T * w.rows);
  cudaFree(dx), cudaFree(dy);
  return y;
}
static float host_f32(bf16 b) {
  u32 u = (u32)b << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static bf16 host_bf16(float f) {
  u32 u;
  memcpy(&u, &f, 4);
  return (bf16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static std::vector<double> widen(const std::vector<bf16>& v) {
  std::vector<double> d(v.size());
  for (size_t i = 0; i < v.size(); i++) d[i] = host_f32(v[i]);
  return d;
}
static std::vector<double> widen(const std::vector<float>& v) { return std::vector<double>(v.begin(), v.end()); }
static int host_nibble(int k) { return (k & ~7) | ((k & 3) << 1) | ((k >> 2) & 1); }
template <class T>
static std::vector<T> natural(const std::vector<T>& v) {
  std::vector<T> n(v.size());
  for (size_t i = 0; i < v.size(); i++) n[i] = v[host_nibble((int)i)];
  return n;
}
template <class T>
static std::vector<T> nibble(const std::vector<T>& v) {
  std::vector<T> n(v.size());
  for (size_t i = 0; i < v.size(); i++) n[host_nibble((int)i)] = v[i];
  return n;
}
static int failures = 0, checks = 0;
static double worst = 0;
static std::string worst_name;
template <class A, class B>
static void compare(const char* name, const std::vector<A>& got, const std::vector<B>& want, double tolerance) {
  double diff = 0, norm = 0;
  bool finite = got.size() == want.size();
  for (size_t i = 0; i < want.size() && finite; i++) {
    if (!std::isfinite((double)got[i])) finite = false;
    diff += ((double)got[i] - want[i]) * ((double)got[i] - want[i]), norm += (double)want[i] * want[i];
  }
  const double e = sqrt(diff / norm);
  checks++;
  const bool good = finite && e <= tolerance;
  if (!good) failures++, printf("FAIL %s: error %.3g (bound %.1g)%s\n", name, e, tolerance, finite ? "" : " not finite");
  if (e / tolerance > worst) worst = e / tolerance, worst_name = name;
}
static std::vector<double> host_norm(const std::vector<double>& x, const std::vector<float>& gain, const std::vector<float>& shift, int kind, int width, double eps) {
  std::vector<double> y(x.size());
  for (size_t r = 0; r < x.size() / width; r++) {
    double mean = 0, var = 0;
    if (kind == 2) for (int k = 0; k < width; k++) mean += x[r * width + k] / width;
    for (int k = 0; k < width; k++) var += (x[r * width + k] - mean) * (x[r * width + k] - mean) / width;
    for (int k = 0; k < width; k++) y[r * width + k] = kind == 0 ? x[r * width + k] : (x[r * width + k] - mean) / sqrt(var + eps) * gain[k] + (kind == 2 ? shift[k] : 0.f);
  }
  return y;
}

// -------------------------------------------------------------------------------------------------------------------- linear
struct Planes {
  char* q;
  float* scale;
};
enum { S4, H4, N32, N64, WG, VARIANT_COUNT };
static int format_row(int bits, int G, int K) { return bits == 16 ? 7 : bits == 8 ? (G == K ? 6 : G == 32 ? 5 : G == 64 ? 4 : 3) : G == 32 ? 2 : G == 64 ? 1 : 0; }
static const void* linear_kernel(int row, int variant) {
#define VARIANTS(N) {(const void*)linear_##N##_s4, (const void*)linear_##N##_h4, (const void*)linear_##N##_n32, (const void*)linear_##N##_n64, (const void*)linear_##N##_wg}
  static const void* table[8][VARIANT_COUNT] = {VARIANTS(w4), VARIANTS(w4_g64), VARIANTS(w4_g32), VARIANTS(w8), VARIANTS(w8_g64), VARIANTS(w8_g32), VARIANTS(w8_c), VARIANTS(w16)};
  return table[row][variant];
}
static size_t block_bytes(int bits) { return bits == 16 ? 516 : 260; }  // with the scale
static int groups_of_k(int K) { return (K + 127) / 128; }
static int subs(int bits, int G, int K) { return bits == 16 ? 0 : G == K && G != 128 && G != 64 && G != 32 ? 1 : std::max(1, 128 / G); }
static size_t ring_bytes(int bits, int sub, int mt, int warps, int depth) { return (size_t)warps * depth * (256 * mt * bits + 128 * sub); }
static size_t reduction_bytes(int nt, int mt, int wm, int wk) { return wk == 1 ? 0 : 4ull * wk * 4 * std::min(nt, 4) * (16 * mt * wm + 8); }
static int occupancy(const void* kernel, int threads, size_t shared) {
  int n = 0;
  OK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
  OK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
  OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, kernel, threads, shared));
  return std::max(n, 1);
}
static const size_t MOST_SHARED = 227 * 1024;
static int blocks_each = 0, column_cost = 16;
static int wide_columns = 0, wide_cost = 64;
static size_t wide_shared(int bits, bool experts, int columns) {
  return 1024 + (bits == 16 ? 3 : experts ? 8 - bits / 2 : 5 - bits / 4) * (((size_t)columns * (bits == 16 ? 512 : 256) + 192 * (16 * bits + 16) + 576 + 1023) / 1024 * 1024);
}
static bool run_linear(LinearArgs a, int bits, int G, int variant) {
  if (variant == WG) {
    int tiles = 0, best = 1 << 30;
    for (int i = 0; i < a.num_matrices; i++) tiles += (a.m[i].rows + 191) / 192;
    for (int c = bits == 16 ? 32 : 128; c >= 16; c -= 16) {
      const int slots = num_sm, works = tiles * ((a.T + c - 1) / c), cost = (works + slots - 1) / slots * (c + wide_cost);
      if (wide_columns ? c == std::min(wide_columns, bits == 16 ? 32 : 128) : cost < best) best = cost, a.columns = c;
    }
    const int works = tiles * ((a.T + a.columns - 1) / a.columns);
    launch(linear_kernel(format_row(bits, G, a.K), WG), dim3(std::min(works, num_sm)), 512, wide_shared(bits, false, a.columns), a);
    return true;
  }
  const int row = format_row(bits, G, a.K), sub = subs(bits, G, a.K), depth = (variant == N32 || bits == 16 ? 2 : 3) + (variant == H4);
  const int mt = variant < N32 ? 1 : 2, wm = variant == N64 ? 4 : variant == H4 ? 8 : 1, wk = variant == N64 || variant == H4 ? 1 : 8, nt = variant < N32 ? 1 : variant == N32 ? (row == 2 ? 4 : 8) : 16;
  size_t shared = 0;
  for (a.columns = variant < N32 ? a.T : std::min(4 * nt, (a.T + 7) / 8 * 8);; a.columns = a.columns / 2 / 8 * 8) {
    if (a.columns < (variant < N32 ? a.T : 8)) return false;
    const size_t planes = a.columns * block_bytes(bits) * (variant < N32 ? groups_of_k(a.K) : wk * depth);
    shared = ring_bytes(bits, sub, mt, wm * wk, depth) + planes + reduction_bytes(nt, mt, wm, wk) + (variant < N32 ? 16 + 4 * a.columns * groups_of_k(a.K) : 0);
    if (shared <= MOST_SHARED) break;
    if (variant < N32) return false;
  }
  int tiles = 0;
  for (int i = 0; i < a.num_matrices; i++) tiles += (a.m[i].rows + 16 * mt * wm - 1) / (16 * mt * wm);
  const void* kernel = linear_kernel(row, variant);
  int fit = occupancy(kernel, 32 * wm * wk, shared);
  if (blocks_each) fit = std::min(fit, blocks_each);
  auto cost = [&](int columns) { return (double)((tiles * ((a.T + columns - 1) / columns) + fit * num_sm - 1) / (fit * num_sm)) * (columns + column_cost); };
  if (variant == N64)
    for (int c = a.columns, most = a.columns; c >= 16; c -= 8)
      if (c <= most && cost(c) < cost(a.columns)) a.columns = c;
  const int token_tiles = (a.T + a.columns - 1) / a.columns;
  launch(kernel, dim3(std::min(tiles, std::max(1, fit * num_sm / token_tiles)), token_tiles), 32 * wm * wk, shared, a);
  return true;
}
static Planes planes_for(int bits, int T, int K) { return {device<char>((size_t)T * groups_of_k(K) * (bits == 16 ? 512 : 256)), zeros<float>((size_t)T * (groups_of_k(K) + 3) / 4 * 4 + 4 * (size_t)T)}; }
static void run_planes(const Planes& p, int bits, const PlanesArgs& like, int T, bool by_k = false) {
  PlanesArgs a = like;
  a.q = p.q, a.scale = p.scale;
  launch(by_k ? (bits == 4 ? (const void*)planes_k4 : bits == 8 ? (const void*)planes_k8 : (const void*)planes_k16) : bits == 4 ? (const void*)planes_w4 : bits == 8 ? (const void*)planes_w8 : (const void*)planes_w16, dim3(T), a.K <= 1024 ? 128 : 256, 0, a);
}

static void check_linear() {
  struct Case { int bits, G, K, r0, r1; };
  const Case cases[] = {{4, 128, 2048, 40, 24}, {4, 128, 768, 64, 8}, {4, 64, 192, 33, 16}, {4, 32, 96, 16, 8}, {4, 32, 1408, 48, 16}, {8, 128, 4096, 40, 24},
                        {8, 64, 704, 40, 8}, {8, 32, 96, 17, 8}, {8, 1408, 1408, 32, 8}, {8, 128, 14336, 16, 8}, {16, 1, 2048, 40, 24}, {16, 1, 96, 8, 1}, {8, 128, 128, 300, 8}, {4, 128, 2048, 6000, 9000}};
  for (const Case& c : cases) {
    Stored w[2] = {stored(c.bits, c.r0, c.K, c.G), stored(c.bits, c.r1, c.K, c.G)};
    for (int T : {1, 3, 4, 5, 8, 9, 33, 65, 100, 150}) {
      if (c.r1 == 9000 && T != 3 && T != 65) continue;
      float *x = random_f32((size_t)T * c.K, 2.f), *up = random_f32((size_t)T * c.K, 1.f), *gain = random_f32(c.K, .3f, 1.f), *shift = random_f32(c.K, .2f), *bias = random_f32(c.r0, .5f);
      std::vector<double> hx = widen(download(x, (size_t)T * c.K)), hu = widen(download(up, (size_t)T * c.K));
      for (int norm = 0; norm < 4; norm++) {  // 3: gated
        std::vector<double> n = hx;
        if (norm == 3) for (size_t i = 0; i < n.size(); i++) n[i] = hx[i] / (1 + exp(-hx[i])) * hu[i];
        else if (norm) n = host_norm(hx, download(gain, c.K), download(shift, c.K), norm, c.K, 1e-6);
        std::vector<double> e0 = multiply(n, w[0], T), e1 = multiply(n, w[1], T);
        Planes p = planes_for(c.bits, T, c.K);
        run_planes(p, c.bits, {0, 0, x, norm == 3 ? up : nullptr, gain, shift, nullptr, c.K, c.K, norm == 3 ? 0 : norm, 1e-6f}, T);
        Planes pk = planes_for(c.bits, T, c.K);
        run_planes(pk, c.bits, {0, 0, x, norm == 3 ? up : nullptr, gain, shift, nullptr, c.K, c.K, norm == 3 ? 0 : norm, 1e-6f}, T, true);
        std::vector<float> hb = download(bias, c.r0);
        float* y0 = random_f32((size_t)T * c.r0, 1.f);
        float* y1 = zeros<float>((size_t)T * c.r1);
        std::vector<float> before = download(y0, (size_t)T * c.r0);
        for (int i = 0; i < T * c.r0; i++) e0[i] = before[i] + 0.5 * (e0[i] + hb[i % c.r0]);
        for (int variant = 0; variant < VARIANT_COUNT; variant++) {
          if ((variant < N32 && T > 4) || (variant < N32 && norm == 2)) continue;
          LinearArgs a = {};
          OK(cudaMemcpy(y0, before.data(), before.size() * 4, cudaMemcpyHostToDevice));
          a.x = x, a.up = norm == 3 ? up : nullptr, a.x_q = variant == WG ? pk.q : p.q, a.x_scale = variant == WG ? pk.scale : p.scale;
          a.gain = gain, a.T = T, a.K = c.K, a.x_stride = c.K, a.norm = norm == 3 ? 0 : norm, a.eps = 1e-6f, a.num_matrices = 2;
          a.m[0] = {w[0].packed, w[0].scale, bias, y0, y0, c.r0, c.r0, 0.5f, 0};
          a.m[1] = {w[1].packed, w[1].scale, nullptr, nullptr, y1, c.r1, c.r1, 1.f, 0};
          if (!run_linear(a, c.bits, c.G, variant)) continue;
          char name[128];
          snprintf(name, 128, "linear w%d g%d K %d T %d variant %d norm %d", c.bits, c.G, c.K, T, variant, norm);
          compare(name, download(y0, (size_t)T * c.r0), e0, 2e-4);
          compare(name, download(y1, (size_t)T * c.r1), e1, 2e-4);
        }
        cudaFree(y0), cudaFree(y1), cudaFree(p.q), cudaFree(p.scale);
      }
      cudaFree(x), cudaFree(up), cudaFree(gain), cudaFree(shift), cudaFree(bias);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------- router and experts
static void host_softmax(std::vector<float>& x) {
  float m = -INFINITY, s = 0;
  for (float v : x) m = std::max(m, v);
  for (float& v : x) v = expf(v - m), s += v;
  for (float& v : x) v /= s;
}
static int first_max(const std::vector<float>& x) {
  int b = 0;
  for (int i = 0; i < (int)x.size(); i++) if (x[i] > x[b]) b = i;
  return b;
}
static void host_route(int* ids, float* gates, const float* logits, const RouterArgs& a) {
  std::vector<float> row(logits, logits + a.rule.E);
  if (a.rule.select == 2) {
    std::vector<float> open = row;
    for (int k = 0; k < a.rule.K; k++) {
      const int pick = first_max(open);
      const float best = open[pick];
      std::vector<float> r = open;
      for (int e = 0; e < a.rule.E; e++) if ((best - row[e]) / std::max(fabsf(row[e]), best) > 2 * a.rule.jitter) r[e] = -INFINITY;
      host_softmax(r);
      ids[k] = pick, gates[k] = r[pick] * a.rule.scale, open[pick] = -INFINITY;
    }
    return;
  }
  std::vector<float> scores = row;
  if (!a.rule.softmax_of_chosen) host_softmax(scores);
  if (a.rule.select == 1) {
    const int size = a.rule.E / a.rule.num_groups;
    std::vector<float> best(a.rule.num_groups, -INFINITY);
    for (int e = 0; e < a.rule.E; e++) best[e / size] = std::max(best[e / size], scores[e]);
    std::vector<char> kept(a.rule.num_groups, 0);
    for (int k = 0; k < a.rule.keep_groups; k++) { int g = first_max(best); best[g] = -INFINITY, kept[g] = 1; }
    for (int e = 0; e < a.rule.E; e++) if (!kept[e / size]) scores[e] = 0;
  }
  std::vector<float> left = scores, chosen;
  for (int k = 0; k < a.rule.K; k++) { int b = first_max(left); left[b] = -INFINITY, ids[k] = b, chosen.push_back(scores[b]); }
  if (a.rule.softmax_of_chosen) host_softmax(chosen);
  float sum = 0;
  for (float v : chosen) sum += v;
  for (int k = 0; k < a.rule.K; k++) gates[k] = (a.rule.renorm ? chosen[k] / sum : chosen[k]) * a.rule.scale;
}
static bool generic_router = false;
static const int ROWS_FROM = 65;
static int router_most = 128;  // tokens of one block
static bool direct_route(const RouterArgs& a) { return a.T <= 4 && a.T * a.rule.K <= 32 && a.rule.E <= 128 && a.rule.select == 0; }
static void run_router(RouterArgs a, bool rows = true, bool wide = false) {
  const int E = a.rule.E, K = a.rule.K;
  if (a.T >= ROWS_FROM && !a.w_is_f32) {
    static std::map<int, Planes> scratch;
    if (!scratch.count(a.D)) scratch[a.D] = planes_for(16, 1024, a.D);
    PlanesArgs n = {0, 0, a.x, nullptr, a.gain, a.shift, nullptr, a.D, a.D, a.norm, a.eps};
    const bool both = wide && a.bits != 16;
    if (both) n.q_bf16 = scratch[a.D].q;
    run_planes({a.x_q, a.x_scale}, a.bits, n, a.T, wide), n.q_bf16 = nullptr;
    if (!both) run_planes(scratch[a.D], 16, n, a.T, wide);
    LinearArgs l = {};
    l.x_q = scratch[a.D].q, l.x_scale = scratch[a.D].scale, l.T = a.T, l.K = a.D, l.num_matrices = 1;
    l.m[0] = {a.w, nullptr, nullptr, nullptr, a.logits, E, E, 1.f, 0};
    run_linear(l, 16, 1, wide ? WG : N64);
  } else {
    const int tokens = a.T == 1 ? 1 : 4;
    a.ahead = !a.w_is_f32 && a.T != 2;
    launch(tokens == 1 ? (const void*)router_logits_t1 : (const void*)router_logits, dim3(std::max((E + 7) / 8, (a.D + 2047) / 2048), (a.T + tokens - 1) / tokens), 256, 4ull * tokens * a.D + (a.ahead ? 16ull * a.D : 0), a);
  }
  if (!rows) return;
  const bool any = E > 128 || a.rule.select || generic_router;
  const int warps = any ? 16 : 32;
  const void* kernel = any ? (const void*)router_rows : (const void*)router_rows_t4;
  if (a.T <= std::min(router_most, 4 * warps)) {
    a.tokens = (a.T + warps - 1) / warps * warps;
    launch(kernel, dim3(1), 32 * warps, 4ull * (((a.T * K + 31) / 32 | 1) * E + a.T * K + E + (any ? warps * E : 0)), a);
  } else {
    a.tokens = 8;
    launch(kernel, dim3((a.T + 7) / 8), 256, any ? 32ull * E : 0, a), launch((const void*)router_list, dim3(E), 256, 0, a);
  }
}
enum { EXPERTS_S4, EXPERTS_N64, EXPERTS_WG };
static int s4_most = 64, most_stages = 8, cols_most = 4, most_teams = 3, most_shared_kb = 227;
#define EXPERT_KERNELS(N) {(const void*)moe_gate_up_##N##_s4, (const void*)moe_gate_up_##N##_n64, (const void*)moe_down_pairs_##N##_s4, (const void*)moe_down_pairs_##N##_n64, (const void*)moe_down_##N, (const void*)moe_gate_up_##N##_wg, (const void*)moe_down_pairs_##N##_wg}
static const void* expert_kernel(int row, int which) {
  static const void* table[8][7] = {EXPERT_KERNELS(w4), EXPERT_KERNELS(w4_g64), EXPERT_KERNELS(w4_g32), EXPERT_KERNELS(w8), EXPERT_KERNELS(w8_g64), EXPERT_KERNELS(w8_g32), EXPERT_KERNELS(w8_c), EXPERT_KERNELS(w16)};
  return table[row][which];
}
static int scales_of(int bits, int G, int K) { return bits == 16 ? 0 : G == K && G > 128 ? 1 : K / G; }
// one half of the experts; false where a stage does not fit
static bool run_experts(bool first, ExpertsArgs a, int bits, int G, int max_slots, int variant = -1) {
  const int groups = groups_of_k(a.inner);
  const bool any = variant < 0;
  if (any) variant = a.T > s4_most;
  if (variant == EXPERTS_WG) {
    a.columns = std::min(bits == 16 ? 32 : 64, (a.T + 15) / 16 * 16);
    const int tiles = first ? (a.rows + 95) / 96 : (a.rows + 191) / 192, most = tiles * (max_slots + a.T * a.K / a.columns);
    launch(expert_kernel(format_row(bits, G, a.inner), first ? 5 : 6), dim3(std::min(most, num_sm)), 512, wide_shared(bits, true, a.columns) + 4 * max_slots, a);
    return true;
  }
  const void* kernel = expert_kernel(format_row(bits, G, a.inner), (first ? 0 : 2) + variant);
  if (!variant) {
    const int tile = first ? 32 : 64, tiles = (a.rows + (first ? 15 : 63)) / (first ? 16 : 64), works = tiles * max_slots;
    a.columns = std::min(std::min(4, a.T), cols_most);
    const size_t stage = whole_lines(whole_lines(whole_lines(tile * (a.inner * bits / 8)) + tile * 2 * scales_of(bits, G, a.inner)) + a.columns * (groups * (bits == 16 ? 512 : 256) + (groups + 3) / 4 * 16));
    const size_t table = a.direct.logits ? 48ull * a.direct.rule.E : 0;
    const int each = (works + num_sm - 1) / num_sm;
    auto shared = [&](int teams, int stages) { return stages * stage + (first ? 4ull * 2 * teams * 4 * 4 * (tile + 8) : 0) + table; };
    a.stages = 0;
    for (int teams = 1; teams <= std::min(most_teams, each); teams++)
      for (int stages = teams; stages <= std::min(most_stages, std::max(each, teams)); stages += teams)
        if (shared(teams, stages) + 4096 <= most_shared_kb * 1024ull && stages >= a.stages) a.teams = teams, a.stages = stages;
    if (!a.stages) return any ? run_experts(first, a, bits, G, max_slots, 1) : false;
    launch(kernel, dim3(std::min(works, num_sm)), 32 * (4 * a.teams + 1), shared(a.teams, a.stages), a);
    return true;
  }
  const int sub = subs(bits, G, a.inner), depth = bits == 16 ? 2 : 3;
  a.columns = std::min(64, (a.T + 7) / 8 * 8);
  size_t shared;
  while ((shared = ring_bytes(bits, sub, 2, 4, depth) + a.columns * block_bytes(bits) * depth) > MOST_SHARED) a.columns = a.columns / 2 / 8 * 8;
  const int tiles = first ? (a.rows + 63) / 64 : (a.rows + 127) / 128, fit = occupancy(kernel, 128, shared);
  launch(kernel, dim3(tiles, std::min(max_slots, std::max(1, fit * num_sm / tiles))), 128, shared, a);
  return true;
}
static int down_slice = 2048;
static bool run_down(DownArgs a, int bits, int G) {
  const int groups = groups_of_k(a.F), row = a.F * bits / 8, scales = scales_of(bits, G, a.F), pairs = a.T * a.K;
  const int wanted = (row + down_slice - 1) / down_slice;
  a.chunk = (groups + wanted - 1) / wanted;
  const int chunks = (groups + a.chunk - 1) / a.chunk;
  a.split = 1;
  while (a.split < 4 && a.chunk > 6 * a.split) a.split *= 2;
  a.warps = a.split;
  if (a.chunk > 6 * a.split) a.split = (a.chunk + 1) / 2, a.warps = (a.split + (a.split + 7) / 8 - 1) / ((a.split + 7) / 8);
  const int teams = a.split > 4 ? 2 : 8 / a.warps, warps = teams * a.warps;
  const size_t stage = whole_lines(whole_lines(16 * std::min(16 * a.chunk * bits, row)) + 32 * scales);
  const size_t rest = (size_t)pairs * groups * (bits == 16 ? 512 : 256) + ((size_t)pairs * groups * 4 + 15) / 16 * 16 + 128ull * pairs * chunks * a.split + (a.direct.logits ? 48ull * a.direct.rule.E : 0);
  const int tiles = (a.D + 15) / 16, most = std::max(teams, std::min(8, (a.T * a.K * chunks * ((tiles + num_sm - 1) / num_sm) + teams - 1) / teams * teams));
  for (a.stages = most; a.stages >= teams && a.stages * stage + rest + 4096 > MOST_SHARED;) a.stages -= teams;
  if (a.stages < teams) return false;
  launch(expert_kernel(format_row(bits, G, a.F), 4), dim3(std::min(tiles, num_sm)), 32 * (warps + 1), a.stages * stage + rest, a);
  return true;
}

struct Experts {
  std::vector<Stored> gate, up, down;
  u64* table;
};
static Experts experts(int E, int D, int F, int bits, int G) {
  Experts x;
  std::vector<u64> t;
  for (int e = 0; e < E; e++) {
    x.gate.push_back(stored(bits, F, D, G == 0 ? D : G)), x.up.push_back(stored(bits, F, D, G == 0 ? D : G)), x.down.push_back(stored(bits, D, F, G == 0 ? F : G));
    for (const Stored* s : {&x.gate[e], &x.up[e], &x.down[e]}) t.push_back((u64)s->packed), t.push_back((u64)s->scale);
  }
  x.table = upload(t);
  return x;
}
static void check_router_and_experts() {
  struct Case { int E, K, D, F, bits, G, select, chosen, renorm, norm, one; };
  const Case cases[] = {{16, 4, 256, 768, 4, 128, 0, 0, 1, 1, 0}, {16, 1, 2048, 128, 4, 128, 0, 0, 0, 1, 1}, {4, 4, 256, 512, 4, 64, 0, 1, 0, 1, 0},
                        {8, 2, 160, 96, 4, 32, 2, 0, 0, 2, 0},   {32, 6, 256, 1408, 8, 128, 1, 0, 0, 1, 0}, {128, 8, 2048, 768, 4, 128, 0, 0, 1, 1, 0},
                        {8, 2, 96, 96, 8, 32, 0, 0, 1, 0, 0},    {8, 2, 4096, 1024, 4, 128, 0, 0, 1, 1, 0}, {60, 4, 288, 704, 8, 0, 0, 0, 0, 1, 0}, {8, 2, 256, 160, 16, 1, 0, 0, 1, 1, 0}};
  for (const Case& c : cases) {
    Experts x = experts(c.E, c.D, c.F, c.bits, c.G);
    const int E = c.E, K = c.K, D = c.D, F = c.F, GD = c.G == 0 ? D : c.G, GF = c.G == 0 ? F : c.G;
    bf16* w = random_bf16((size_t)E * D, c.one ? 1e-4f : 1.5f / sqrtf(D));
    if (c.one) fill_bf16<<<8, 256>>>(w + (size_t)3 * D, D, 77, 1.f);
    const RouteRule rule = {E, K, c.select, c.chosen, c.renorm, 4, 2, 0.1f, 1.25f};
    for (int T : {1, 2, 4, 7, 9, 33, 150}) {
      float *r = random_f32((size_t)T * D, 2.f), *gain = random_f32(D, .3f, 1.f), *shift = random_f32(D, .2f);
      if (c.one) {
        std::vector<bf16> w3 = download(w + (size_t)3 * D, D);
        std::vector<float> hr = download(r, (size_t)T * D);
        for (size_t i = 0; i < hr.size(); i++) hr[i] += host_f32(w3[i % D]);
        OK(cudaMemcpy(r, hr.data(), hr.size() * 4, cudaMemcpyHostToDevice));
      }
      RouterArgs a = {};
      Planes px = planes_for(c.bits, T, D), ph = planes_for(c.bits, T * K, F);
      a.logits = device<float>((size_t)T * E), a.ids = device<int>(T * K), a.gates = device<float>(T * K), a.slots = zeros<ExpertSlot>(std::min(T * K, E));
      a.num_slots = device<int>(1), a.pairs = device<int>(T * K), a.x_q = px.q, a.x_scale = px.scale, a.x = r, a.gain = gain, a.shift = shift, a.w = w, a.table = x.table;
      a.T = T, a.D = D, a.norm = c.norm, a.eps = 1e-6f, a.bits = c.bits, a.rule = rule;
      router_most = T == 33 ? 16 : 128;
      run_router(a);
      char name[128];
      snprintf(name, 128, "router E %d K %d D %d T %d select %d", E, K, D, T, c.select);
      std::vector<double> n = host_norm(widen(download(r, (size_t)T * D)), download(gain, D), download(shift, D), c.norm, D, 1e-6);
      std::vector<float> logits = download(a.logits, (size_t)T * E);
      compare(name, logits, multiply(n, Stored{16, E, D, 1, w, nullptr}, T), T < ROWS_FROM ? 1e-5 : 2e-5);
      std::vector<int> ids = download(a.ids, T * K), want_ids(T * K);
      std::vector<float> gates = download(a.gates, T * K), want_gates(T * K);
      for (int t = 0; t < T; t++) host_route(&want_ids[t * K], &want_gates[t * K], &logits[(size_t)t * E], a);
      compare((std::string(name) + " ids").c_str(), ids, want_ids, 0);
      compare((std::string(name) + " gates").c_str(), gates, want_gates, 1e-5);
      std::vector<ExpertSlot> slots = download(a.slots, std::min(T * K, E));
      std::vector<int> pairs = download(a.pairs, T * K);
      int num_slots = download(a.num_slots, 1)[0], seen = 0, bad = 0, last = -1;
      for (int s = 0; s < num_slots; s++) {
        bad += slots[s].expert <= last || slots[s].first != seen || slots[s].count < 1, last = slots[s].expert;
        for (int i = 0; i < slots[s].count; i++) bad += ids[pairs[seen + i]] != slots[s].expert || (i < 8 && slots[s].pair[i] != pairs[seen + i]) || (i && pairs[seen + i] <= pairs[seen + i - 1]);
        seen += slots[s].count;
      }
      if (bad || seen != T * K) failures++, printf("FAIL %s: expert list, %d bad, %d of %d pairs, %d slots\n", name, bad, seen, T * K, num_slots);
      if (c.one && num_slots != 1) failures++, printf("FAIL %s: meant one expert, got %d\n", name, num_slots);

      float *h = zeros<float>((size_t)T * K * F), *y = random_f32((size_t)T * D, 1.f), *d = device<float>((size_t)T * K * D);
      std::vector<double> hd, want_h((size_t)T * K * F), want_y((size_t)T * D);
      const ExpertsArgs half = {nullptr, nullptr, nullptr, a.slots, a.num_slots, a.pairs, {}, {}, T, K, 0, 0, 0, 0, 0};
      const bool direct = direct_route(a);
      int* ids_d = device<int>(T * K);
      float* gates_d = device<float>(T * K);
      for (int variant = direct ? 2 : 1; variant >= 0; variant--) {  // 2: without a list
        if (direct && variant == 1) continue;
        ExpertsArgs up = half;
        up.out = h, up.x_q = px.q, up.x_scale = px.scale, up.inner = D, up.rows = F;
        if (variant == 2) up.direct = {a.logits, x.table, ids_d, gates_d, rule, 0};
        OK(cudaMemset(h, 255, (size_t)T * K * F * 4));
        if (!run_experts(true, up, c.bits, GD, std::min(T * K, E), variant % 2)) continue;
        hd = widen(download(h, (size_t)T * K * F));
        if (variant == 2) compare((std::string(name) + " direct ids").c_str(), download(ids_d, T * K), want_ids, 0), compare((std::string(name) + " direct gates").c_str(), download(gates_d, T * K), want_gates, 1e-5);
        if (variant > 0)
          for (int e = 0; e < E; e++) {
            std::vector<int> mine;
            for (int p = 0; p < T * K; p++) if (ids[p] == e) mine.push_back(p);
            if (mine.empty()) continue;
            const int m = (int)mine.size();
            std::vector<double> xs;
            for (int p : mine) xs.insert(xs.end(), &n[(size_t)(p / K) * D], &n[(size_t)(p / K) * D] + D);
            std::vector<double> g = multiply(xs, x.gate[e], m), u = multiply(xs, x.up[e], m);
            for (int i = 0; i < m; i++)
              for (int f = 0; f < F; f++) want_h[(size_t)mine[i] * F + f] = g[(size_t)i * F + f] / (1 + exp(-g[(size_t)i * F + f])) * u[(size_t)i * F + f];
          }
        snprintf(name, 128, "moe_gate_up w%d g%d E %d K %d D %d F %d T %d variant %d", c.bits, c.G, E, K, D, F, T, variant);
        compare(name, hd, want_h, 2e-4);
      }
      Planes pxk = planes_for(c.bits, T, D), phk = planes_for(c.bits, T * K, F);
      run_planes(pxk, c.bits, {0, 0, r, nullptr, gain, shift, nullptr, D, D, c.norm, 1e-6f}, T, true);
      if (!direct) {
        ExpertsArgs up = half;
        up.out = h, up.x_q = pxk.q, up.x_scale = pxk.scale, up.inner = D, up.rows = F;
        OK(cudaMemset(h, 255, (size_t)T * K * F * 4));
        run_experts(true, up, c.bits, GD, std::min(T * K, E), EXPERTS_WG);
        hd = widen(download(h, (size_t)T * K * F));
        snprintf(name, 128, "moe_gate_up w%d g%d E %d K %d D %d F %d T %d wide", c.bits, c.G, E, K, D, F, T);
        compare(name, hd, want_h, 2e-4);
      }
      std::vector<float> before = download(y, (size_t)T * D);
      for (size_t i = 0; i < before.size(); i++) want_y[i] = before[i];
      for (int e = 0; e < E; e++) {
        std::vector<int> mine;
        for (int p = 0; p < T * K; p++) if (ids[p] == e) mine.push_back(p);
        if (mine.empty()) continue;
        const int m = (int)mine.size();
        std::vector<double> hs;
        for (int p : mine) hs.insert(hs.end(), &hd[(size_t)p * F], &hd[(size_t)p * F] + F);
        std::vector<double> dn = multiply(hs, x.down[e], m);
        for (int i = 0; i < m; i++)
          for (int k = 0; k < D; k++) want_y[(size_t)(mine[i] / K) * D + k] += 0.7 * gates[mine[i]] * dn[(size_t)i * D + k];
      }
      snprintf(name, 128, "moe_down w%d g%d E %d K %d D %d F %d T %d", c.bits, c.G, E, K, D, F, T);
      for (int listed = !direct; T <= 4 && listed < 2; listed++) {
        OK(cudaMemcpy(y, before.data(), before.size() * 4, cudaMemcpyHostToDevice));
        DownArgs down = {y, y, h, a.slots, a.num_slots, a.pairs, a.gates, {}, {}, T, D, F, K, 0, 0, 0, 0, 0.7f};
        if (!listed) down.gates = nullptr, down.direct = {a.logits, x.table, nullptr, nullptr, rule, 0};
        if (run_down(down, c.bits, GF)) compare(name, download(y, (size_t)T * D), want_y, 2e-4);
      }
      OK(cudaMemcpy(y, before.data(), before.size() * 4, cudaMemcpyHostToDevice));
      run_planes(ph, c.bits, {0, 0, h, nullptr, nullptr, nullptr, nullptr, F, F, 0, 0.f}, T * K);
      for (int variant = 0; variant < 2; variant++) {
        OK(cudaMemcpy(y, before.data(), before.size() * 4, cudaMemcpyHostToDevice));
        OK(cudaMemset(d, 255, (size_t)T * K * D * 4));
        ExpertsArgs down = half;
        down.out = d, down.x_q = ph.q, down.x_scale = ph.scale, down.inner = F, down.rows = D;
        if (!run_experts(false, down, c.bits, GF, std::min(T * K, E), variant)) continue;
        launch((const void*)moe_combine, dim3((D + 511) / 512, T), 128, 0, CombineArgs{y, y, d, a.gates, D, K, 0.7f});
        snprintf(name, 128, "moe_down_pairs w%d g%d E %d K %d D %d F %d T %d variant %d", c.bits, c.G, E, K, D, F, T, variant);
        compare(name, download(y, (size_t)T * D), want_y, 2e-4);
      }
      if (!direct) {
        run_planes(phk, c.bits, {0, 0, h, nullptr, nullptr, nullptr, nullptr, F, F, 0, 1e-6f}, T * K, true);
        OK(cudaMemcpy(y, before.data(), before.size() * 4, cudaMemcpyHostToDevice));
        OK(cudaMemset(d, 255, (size_t)T * K * D * 4));
        ExpertsArgs down = half;
        down.out = d, down.x_q = phk.q, down.x_scale = phk.scale, down.inner = F, down.rows = D;
        run_experts(false, down, c.bits, GF, std::min(T * K, E), EXPERTS_WG);
        launch((const void*)moe_combine, dim3((D + 511) / 512, T), 128, 0, CombineArgs{y, y, d, a.gates, D, K, 0.7f});
        snprintf(name, 128, "moe_down_pairs w%d g%d E %d K %d D %d F %d T %d wide", c.bits, c.G, E, K, D, F, T);
        compare(name, download(y, (size_t)T * D), want_y, 2e-4);
      }
      cudaFree(pxk.q), cudaFree(pxk.scale), cudaFree(phk.q), cudaFree(phk.scale);
      for (void* p : {(void*)r, (void*)gain, (void*)shift, (void*)a.logits, (void*)a.ids, (void*)a.gates, (void*)a.slots, (void*)a.num_slots, (void*)a.pairs, (void*)px.q, (void*)ph.q, (void*)h, (void*)y, (void*)d}) cudaFree(p);
    }
    for (auto* v : {&x.gate, &x.up, &x.down}) for (auto& s : *v) cudaFree(s.packed), cudaFree(s.scale);
    cudaFree(x.table), cudaFree(w);
  }
}

// ----------------------------------------------------------------------------------------------------------------- attention
static size_t attention_shared(int Dh, int heads) { return std::max(8 * 2 * 16 * (Dh + 8) * 2, 8 * heads * (Dh + 4) * 4) + 18 * (Dh + 8) * 2 + 8 * Dh * 4; }
static void run_attention(const AttentionArgs& a, int Dh, int T) {
#define ATTENTIONS(D) {(const void*)attention_decode_d##D, (const void*)attention_decode_wide_d##D}
  static const void* table[4][2] = {ATTENTIONS(32), ATTENTIONS(64), ATTENTIONS(96), ATTENTIONS(128)};
  const bool wide = a.H / a.Hk > 8;
  launch(table[Dh / 32 - 1][wide], dim3(a.max_splits, a.Hk, T), 256, attention_shared(Dh, wide ? 16 : 8), a);
}
static void check_attention() {
  struct Case { int Dh, H, Hk, norm, interleaved, window, rope; float clip; };
  const Case cases[] = {{128, 32, 4, 1, 0, 0, 128, INFINITY}, {64, 8, 8, 2, 0, 0, 64, 1.5f}, {32, 16, 1, 0, 1, 40, 16, INFINITY}, {96, 6, 2, 0, 0, 0, 96, INFINITY}, {128, 8, 2, 0, 0, 20, 128, INFINITY}};
  // Many sequences, and one whose blocks merge together.
  for (const std::vector<int>& lengths : {std::vector<int>{1, 15, 16, 17, 33, 200, 1000}, std::vector<int>{6007}})
  for (const Case& c : cases) {
    const int T = (int)lengths.size(), H = c.H, Hk = c.Hk, Dh = c.Dh, max_pages = lengths.back() / 16 + 1, pages = T * max_pages, half = c.rope / 2, max_splits = T == 1 ? 32 : 8;
    std::vector<int> table(T * max_pages), positions;
    for (int i = 0; i < T * max_pages; i++) table[i] = (int)((i * 37ll + 11) % pages);
    for (int l : lengths) positions.push_back(l - 1);
    std::vector<float> cs(lengths.back() * half), sn(cs.size());
    for (int p = 0; p < lengths.back(); p++) for (int i = 0; i < half; i++) cs[p * half + i] = cosf(p * powf(1e4f, -2.f * i / c.rope)), sn[p * half + i] = sinf(p * powf(1e4f, -2.f * i / c.rope));
    float *q = random_f32(T * H * Dh, 1.3f), *k = random_f32(T * Hk * Dh, 1.3f), *v = random_f32(T * Hk * Dh, 1.f), *qg = random_f32(H * Dh, .3f, 1.f), *kg = random_f32(Hk * Dh, .3f, 1.f);
    bf16 *kp = random_bf16((size_t)pages * Hk * 16 * Dh, 1.f), *vp = random_bf16((size_t)pages * Hk * 16 * Dh, 1.f);
    float* out = zeros<float>(T * H * Dh);
    AttentionArgs a = {};
    a.out = out, a.q = q, a.k = k, a.v = v, a.layer = {qg, kg, kp, vp}, a.page_table = upload(table), a.positions = upload(positions);
    a.partial = device<float>((size_t)T * Hk * max_splits * 16 * (Dh + 4)), a.counters = zeros<int>(T * Hk), a.cosines = upload(cs), a.sines = upload(sn);
    a.q_stride = H * Dh, a.k_stride = a.v_stride = Hk * Dh, a.out_stride = H * Dh, a.H = H, a.Hk = Hk, a.max_pages = max_pages, a.max_splits = max_splits, a.norm = c.norm, a.eps = 1e-6f;
    a.clip = c.clip, a.rope_dim = c.rope, a.interleaved = c.interleaved, a.window = c.window, a.scale = 1.f / sqrtf(Dh), a.together = max_splits * Hk * T <= num_sm;
    run_attention(a, Dh, T);
    std::vector<double> got = widen(download(out, T * H * Dh)), want(got.size());
    std::vector<float> hq = download(q, T * H * Dh), hk = download(k, T * Hk * Dh), hv = download(v, T * Hk * Dh), hqg = download(qg, H * Dh), hkg = download(kg, Hk * Dh);
    std::vector<bf16> hkp = download(kp, (size_t)pages * Hk * 16 * Dh), hvp = download(vp, (size_t)pages * Hk * 16 * Dh);
    auto prepare = [&](std::vector<float>& row, const std::vector<float>& gain, int heads, int pos) {
      const int runs = c.norm == 2 ? 1 : heads, width = heads * Dh / runs;
      for (int r = 0; c.norm && r < runs; r++) {
        double sq = 0;
        for (int i = 0; i < width; i++) sq += (double)row[r * width + i] * row[r * width + i];
        for (int i = 0; i < width; i++) row[r * width + i] *= gain[i] / sqrt(sq / width + 1e-6);
      }
      for (float& x : row) x = fminf(fmaxf(x, -c.clip), c.clip);
      for (int h = 0; h < heads; h++)
        for (int i = 0; i < half; i++) {
          float &x = row[h * Dh + (c.interleaved ? 2 * i : i)], &y = row[h * Dh + (c.interleaved ? 2 * i + 1 : i + half)];
          const float p = x, s = y;
          x = p * cs[pos * half + i] - s * sn[pos * half + i], y = s * cs[pos * half + i] + p * sn[pos * half + i];
        }
    };
    int bad = 0;
    for (int t = 0; t < T; t++) {
      const int pos = positions[t];
      std::vector<float> rq(&hq[t * H * Dh], &hq[t * H * Dh] + H * Dh), rk(&hk[t * Hk * Dh], &hk[t * Hk * Dh] + Hk * Dh);
      prepare(rq, hqg, H, pos), prepare(rk, hkg, Hk, pos);
      for (int h = 0; h < H; h++) {
        const int kv = h / (H / Hk), begin = c.window ? std::max(0, pos + 1 - c.window) : 0;
        auto at = [&](const std::vector<bf16>& p, int s, int d) { return (double)host_f32(p[(((size_t)table[t * max_pages + s / 16] * Hk + kv) * 16 + s % 16) * Dh + element_at(Dh, s % 16, d)]); };
        for (int d = 0; d < Dh; d++) bad += fabs(at(hkp, pos, d) - rk[kv * Dh + d]) > 0.01 * fabs(rk[kv * Dh + d]) + 1e-4;
        std::vector<double> s;
        double m = -1e30, sum = 0;
        for (int p = begin; p <= pos; p++) {
          double dot = 0;
          for (int d = 0; d < Dh; d++) dot += host_f32(host_bf16(rq[h * Dh + d])) * at(hkp, p, d);
          s.push_back(dot * a.scale), m = std::max(m, s.back());
        }
        for (double& x : s) x = exp(x - m), sum += x;
        for (int d = 0; d < Dh; d++) {
          double o = 0;
          for (int p = begin; p <= pos; p++) o += s[p - begin] / sum * at(hvp, p, d);
          want[(t * H + h) * Dh + d] = o;
        }
      }
      for (int i = 0; i < Hk * Dh; i++) bad += fabs(host_f32(hvp[(((size_t)table[t * max_pages + pos / 16] * Hk + i / Dh) * 16 + pos % 16) * Dh + element_at(Dh, pos % 16, i % Dh)]) - std::min(std::max(hv[t * Hk * Dh + i], -c.clip), c.clip)) > 0.01;
    }
    char name[96];
    snprintf(name, 96, "attention Dh %d H %d Hk %d norm %d window %d", Dh, H, Hk, c.norm, c.window);
    if (bad) failures++, printf("FAIL %s: %d appended elements\n", name, bad);
    compare(name, got, want, 5e-3);
  }
}
static void check_rows() {
  const int T = 5, V = 1003;
  float* logits = random_f32(T * V, 1.f);
  int *tokens = device<int>(T), *counters = zeros<int>(T);
  launch((const void*)argmax_rows, dim3(3, T), 256, 0, ArgmaxArgs{tokens, {}, logits, zeros<u64>(T), counters, nullptr, V});
  std::vector<float> h = download(logits, T * V);
  std::vector<int> want, got = download(tokens, T);
  for (int t = 0; t < T; t++) want.push_back(first_max(std::vector<float>(&h[t * V], &h[t * V] + V)));
  compare("argmax", got, want, 0);
}

// ----------------------------------------------------------------------------------------------------------------------- step
struct Shape {
  const char* name;
  int L, D, H, Hk, Dh, E, K, F, V, qk_norm;
};
static const Shape qwen = {"Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 128, 8, 768, 151936, 1}, mixtral = {"Mixtral-8x7B", 32, 4096, 32, 8, 128, 8, 2, 14336, 32000, 0};
struct Layer {
  Stored q, k, v, o, gate, up, down;  // experts stacked on rows
  bf16* router;
  float *attn_gain, *ffn_gain;
  bf16 *k_pages, *v_pages;
  u64* table;
};
struct Op {
  const char* name;
  int layer;
  double bytes;
  std::function<void()> run;
};
struct Model {
  Shape s;
  std::vector<Layer> layers;
  Stored embed, head;
  float *final_gain, *q_gain, *k_gain, *cosines, *sines;
  int context, max_pages;
};
static const int MAX_T = 64;
static Model build(const Shape& s, int context, int max_batch) {
  Model m;
  m.s = s, m.context = context, m.max_pages = (context + 31) / 16;
  const int q = s.H * s.Dh, kv = s.Hk * s.Dh;
  for (int l = 0; l < s.L; l++) {
    Layer y;
    y.q = stored(8, q, s.D, 128), y.k = stored(8, kv, s.D, 128), y.v = stored(8, kv, s.D, 128), y.o = stored(8, s.D, q, 128);
    y.gate = stored(4, s.E * s.F, s.D, 128), y.up = stored(4, s.E * s.F, s.D, 128), y.down = stored(4, s.E * s.D, s.F, 128);
    y.router = random_bf16((size_t)s.E * s.D, 1.f / sqrtf(s.D));
    y.attn_gain = random_f32(s.D, .1f, 1.f), y.ffn_gain = random_f32(s.D, .1f, 1.f);
    const size_t cache = (size_t)max_batch * m.max_pages * kv * 16;
    y.k_pages = random_bf16(cache, 1.f), y.v_pages = random_bf16(cache, 1.f);
    std::vector<u64> t;
    for (int e = 0; e < s.E; e++)
      for (const Stored* w : {&y.gate, &y.up, &y.down}) {
        const size_t rows = w->rows / s.E;
        t.push_back((u64)w->packed + rows * e * w->K / 2), t.push_back((u64)w->scale + rows * e * (w->K / 128) * 2);
      }
    y.table = upload(t);
    m.layers.push_back(y);
  }
  m.embed = stored(16, s.V, s.D, 1), m.head = stored(8, s.V, s.D, 128);
  m.final_gain = random_f32(s.D, .1f, 1.f), m.q_gain = random_f32(s.Dh, .1f, 1.f), m.k_gain = random_f32(s.Dh, .1f, 1.f);
  std::vector<float> cs((size_t)(context + 32) * s.Dh / 2), sn(cs.size());
  for (int p = 0; p < context + 32; p++)
    for (int i = 0; i < s.Dh / 2; i++) cs[(size_t)p * s.Dh / 2 + i] = cosf(p * powf(1e6f, -2.f * i / s.Dh)), sn[(size_t)p * s.Dh / 2 + i] = sinf(p * powf(1e6f, -2.f * i / s.Dh));
  m.cosines = upload(cs), m.sines = upload(sn);
  OK(cudaDeviceSynchronize());
  return m;
}
static bool use_wide = true;
static int staged_most = 4, pairs_from = 2, direct_most = 4, max_splits_one = 32, wide_from = 33, head_variant = H4;
struct Buffers {
  float *x, *q, *k, *v, *attn, *h, *d, *logits, *router_logits, *gates, *partial;
  Planes px, pa, ph, pe;
  int *ids, *num_slots, *pairs, *counters, *tokens, *positions, *page_table;
  ExpertSlot* slots;
  u64* best;
};
// as an embedding gives them
static std::vector<float> widen_f32(const bf16* p, size_t n) {
  std::vector<float> v;
  for (bf16 b : download(p, n)) v.push_back(host_f32(b));
  return v;
}
static std::vector<Op> program(const Model& m, int T, Buffers& b, bool decode = true) {
  const Shape& s = m.s;
  const int q = s.H * s.Dh, kv = s.Hk * s.Dh;
  b.x = random_f32(T * s.D, 1.f);
  float* x0 = upload(widen_f32(random_bf16(T * s.D, 1.f), T * s.D));
  b.q = device<float>(T * q), b.k = device<float>(T * kv), b.v = device<float>(T * kv), b.logits = device<float>((size_t)T * s.V);
  b.router_logits = device<float>(T * s.E), b.gates = device<float>(T * s.K), b.attn = random_f32(T * q, 1.f), b.h = device<float>((size_t)T * s.K * s.F), b.d = device<float>((size_t)T * s.K * s.D);
  b.px = planes_for(8, T, s.D), b.pa = planes_for(8, T, q), b.ph = planes_for(4, T * s.K, s.F), b.pe = planes_for(4, T, s.D);
  b.ids = device<int>(T * s.K), b.num_slots = zeros<int>(1), b.pairs = device<int>(T * s.K), b.counters = zeros<int>(8192), b.slots = zeros<ExpertSlot>(s.E), b.best = zeros<u64>(T);
  const int max_splits = std::max(1, std::min(max_splits_one, num_sm / (T * s.Hk)));
  std::vector<int> tokens, positions(T, m.context - 1), table;
  if (decode) {
    b.partial = device<float>((size_t)T * s.Hk * max_splits * 16 * (s.Dh + 4));
    for (int t = 0; t < T; t++) {
      tokens.push_back((t * 7919 + 13) % s.V);
      for (int p = 0; p < m.max_pages; p++) table.push_back(t * m.max_pages + p);
    }
    b.tokens = upload(tokens), b.positions = upload(positions), b.page_table = upload(table);
  }
  const double distinct = s.E * (1 - pow(1 - (double)s.K / s.E, T));
  const bool staged = T <= staged_most;
  const bool wide = T >= 64 && use_wide;
  const int variant = staged ? S4 : T < wide_from ? N32 : wide ? WG : N64;
  std::vector<Op> ops;
  ops.push_back({"reset", -1, 0, [=] { OK(cudaMemcpyAsync(b.x, x0, 4ull * T * s.D, cudaMemcpyDeviceToDevice, stream)); }});
  for (int l = 0; l < s.L; l++) {
    const Layer& y = m.layers[l];
    const RouteRule rule = {s.E, s.K, 0, 0, 1, 1, 1, 0.f, 1.f};
    const bool direct = T <= direct_most && T * s.K <= 32 && (T < pairs_from || 64ull * s.F / 2 < MOST_SHARED);  // others need a list
    const DirectRoute route = direct ? DirectRoute{b.router_logits, y.table, b.ids, b.gates, rule, 0} : DirectRoute{};
    if (!staged) ops.push_back({"planes", l, 0, [=] { run_planes(b.px, 8, {0, 0, b.x, nullptr, y.attn_gain, nullptr, nullptr, s.D, s.D, 1, 1e-6f}, T, wide); }});
    ops.push_back({"qkv", l, y.q.bytes() + y.k.bytes() + y.v.bytes(), [=] {
      LinearArgs a = {};
      a.x = b.x, a.x_q = b.px.q, a.x_scale = b.px.scale, a.norm = staged, a.gain = y.attn_gain, a.eps = 1e-6f, a.T = T, a.K = s.D, a.x_stride = s.D, a.num_matrices = 3;
      a.m[0] = {y.q.packed, y.q.scale, nullptr, nullptr, b.q, q, q, 1.f, 0};
      a.m[1] = {y.k.packed, y.k.scale, nullptr, nullptr, b.k, kv, kv, 1.f, 0};
      a.m[2] = {y.v.packed, y.v.scale, nullptr, nullptr, b.v, kv, kv, 1.f, 0};
      run_linear(a, 8, 128, variant);
    }});
    if (decode) ops.push_back({"attention", l, 2.0 * T * m.context * kv * 2, [=] {
      AttentionArgs a = {};
      a.out = b.attn, a.q = b.q, a.k = b.k, a.v = b.v, a.layer = {m.q_gain, m.k_gain, y.k_pages, y.v_pages}, a.page_table = b.page_table, a.positions = b.positions, a.partial = b.partial, a.counters = b.counters;
      a.cosines = m.cosines, a.sines = m.sines, a.q_stride = a.out_stride = q, a.k_stride = a.v_stride = kv, a.H = s.H, a.Hk = s.Hk, a.max_pages = m.max_pages;
      a.max_splits = max_splits, a.norm = s.qk_norm, a.eps = 1e-6f, a.clip = INFINITY, a.rope_dim = s.Dh, a.scale = 1.f / sqrtf(s.Dh), a.together = max_splits * s.Hk * T <= num_sm;
      run_attention(a, s.Dh, T);
    }});
    if (!staged) ops.push_back({"planes", l, 0, [=] { run_planes(b.pa, 8, {0, 0, b.attn, nullptr, nullptr, nullptr, nullptr, q, q, 0, 1e-6f}, T, wide); }});
    ops.push_back({"o_proj", l, y.o.bytes(), [=] {
      LinearArgs a = {};
      a.x = b.attn, a.x_q = b.pa.q, a.x_scale = b.pa.scale, a.T = T, a.K = q, a.x_stride = q, a.num_matrices = 1;
      a.m[0] = {y.o.packed, y.o.scale, nullptr, b.x, b.x, s.D, s.D, 0.1f, 0};
      if (!run_linear(a, 8, 128, variant)) printf("o_proj does not fit\n");
    }});
    ops.push_back({"router", l, 2.0 * s.E * s.D, [=] {
      RouterArgs a = {};
      a.logits = b.router_logits, a.ids = b.ids, a.gates = b.gates, a.slots = b.slots, a.num_slots = b.num_slots, a.pairs = b.pairs, a.x_q = b.pe.q, a.x_scale = b.pe.scale, a.x = b.x, a.gain = y.ffn_gain, a.w = y.router;
      a.table = y.table, a.T = T, a.D = s.D, a.norm = 1, a.eps = 1e-6f, a.bits = 4, a.rule = rule;
      run_router(a, !direct, wide);
    }});
    ops.push_back({"gate_up", l, distinct * (y.gate.bytes() + y.up.bytes()) / s.E, [=] { run_experts(true, {b.h, b.pe.q, b.pe.scale, b.slots, b.num_slots, b.pairs, route, {}, T, s.K, s.D, s.F, 0, 0, 0}, 4, 128, std::min(T * s.K, s.E), wide ? EXPERTS_WG : -1); }});
    bool whole = T < pairs_from;
    if (whole) {
      ops.push_back({"down", l, distinct * y.down.bytes() / s.E, [=] { if (!run_down({b.x, b.x, b.h, b.slots, b.num_slots, b.pairs, b.gates, route, {}, T, s.D, s.F, s.K, 0, 0, 0, 0, 0.1f}, 4, 128)) printf("down does not fit\n"); }});
    } else {
      ops.push_back({"planes_h", l, 0, [=] { run_planes(b.ph, 4, {0, 0, b.h, nullptr, nullptr, nullptr, nullptr, s.F, s.F, 0, 1e-6f}, T * s.K, wide); }});
      ops.push_back({"down", l, distinct * y.down.bytes() / s.E, [=] { run_experts(false, {b.d, b.ph.q, b.ph.scale, b.slots, b.num_slots, b.pairs, route, {}, T, s.K, s.F, s.D, 0, 0, 0}, 4, 128, std::min(T * s.K, s.E), wide ? EXPERTS_WG : -1); }});
      ops.push_back({"combine", l, 0, [=] { launch((const void*)moe_combine, dim3((s.D + 511) / 512, T), 128, 0, CombineArgs{b.x, b.x, b.d, b.gates, s.D, s.K, 0.1f}); }});
    }
  }
  const int rows = decode ? T : 1;
  const bool head_staged = rows <= staged_most;
  if (!head_staged) ops.push_back({"planes", s.L, 0, [=] { run_planes(b.px, 8, {0, 0, b.x, nullptr, m.final_gain, nullptr, nullptr, s.D, s.D, 1, 1e-6f}, T); }});
  ops.push_back({"lm_head", s.L, m.head.bytes(), [=] {
    LinearArgs a = {};
    a.x = b.x, a.x_q = b.px.q, a.x_scale = b.px.scale, a.norm = head_staged, a.gain = m.final_gain, a.eps = 1e-6f, a.T = rows, a.K = s.D, a.x_stride = s.D, a.num_matrices = 1;
    a.m[0] = {m.head.packed, m.head.scale, nullptr, nullptr, b.logits, s.V, s.V, 1.f, 0};
    run_linear(a, 8, 128, head_staged ? head_variant : N64);
  }});
  if (decode) ops.push_back({"argmax", s.L, 4.0 * T * s.V, [=] { launch((const void*)argmax_rows, dim3(std::max(16, 64 / T), T), 256, 0, ArgmaxArgs{b.tokens, {}, b.logits, b.best, b.counters + 4096, nullptr, s.V}); }});
  return ops;
}
static double time_graph(const std::vector<Op>& ops, const std::function<bool(const Op&)>& keep, int repeats) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (const Op& op : ops) if (keep(op)) op.run();
  OK(cudaStreamEndCapture(stream, &graph));
  OK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; i++) OK(cudaGraphLaunch(exec, stream));
  std::vector<double> ms;
  cudaEvent_t a, b;
  cudaEventCreate(&a), cudaEventCreate(&b);
  for (int r = 0; r < 5; r++) {
    OK(cudaEventRecord(a, stream));
    for (int i = 0; i < repeats; i++) OK(cudaGraphLaunch(exec, stream));
    OK(cudaEventRecord(b, stream));
    OK(cudaEventSynchronize(b));
    float t;
    cudaEventElapsedTime(&t, a, b);
    ms.push_back(t / repeats);
  }
  OK(cudaGetLastError());
  cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaEventDestroy(a), cudaEventDestroy(b);
  std::sort(ms.begin(), ms.end());
  return ms[2];
}
// The same step by one kernel from the first layer to the last.
struct Whole {
  StepArgs a;
  size_t shared;
};
static Whole whole(const Model& m, const Buffers& b, int grid) {
  const Shape& s = m.s;
  std::vector<StepLayer> layers;
  for (const Layer& y : m.layers) {
    StepLayer l = {};
    auto set = [](StepMatrix& to, const Stored& from) { to.packed = (const char*)from.packed, to.scale = from.scale; };
    set(l.q, y.q), set(l.k, y.k), set(l.v, y.v), set(l.o, y.o);
    l.gain = y.attn_gain, l.cache = {m.q_gain, m.k_gain, y.k_pages, y.v_pages}, l.moe_gain = y.ffn_gain, l.router = y.router, l.table = y.table;
    layers.push_back(l);
  }
  StepArgs a = {};
  const int splits = std::max(1, std::min(max_splits_one, num_sm / s.Hk)), groups = s.F / 128;
  a.x = b.x, a.layers = upload(layers), a.x_box = zeros<float>(s.D), a.middle = zeros<float>(s.D), a.logits = zeros<float>(s.E + 4), a.h = zeros<float>(s.K * s.F), a.partial = zeros<u64>((size_t)s.Hk * splits * 16 * (s.Dh + 2)), a.uses = zeros<int>(grid);
  OK(cudaMemset(a.x_box, 1, 4 * s.D));
  AttentionArgs& t = a.attention;
  float* q = zeros<float>((s.H + 2 * s.Hk) * s.Dh);
  t.q = q, t.k = q + s.H * s.Dh, t.v = t.k + s.Hk * s.Dh, t.out = zeros<float>(s.H * s.Dh);
  t.page_table = b.page_table, t.positions = b.positions, t.cosines = m.cosines, t.sines = m.sines, t.H = s.H, t.Hk = s.Hk, t.max_splits = splits;
  t.norm = s.qk_norm, t.rope_dim = s.Dh, t.clip = INFINITY, t.eps = 1e-6f, t.scale = 1.f / sqrtf(s.Dh);
  a.num_layers = s.L, a.D = s.D, a.F = s.F, a.eps = a.moe_eps = 1e-6f, a.scale = a.moe_scale = 0.1f;
  a.split = groups > 6 ? 2 : 1, a.down_rows = groups > SLICE ? LONG_ROWS : s.D / 16 > grid ? 32 : 16;
  a.rule = {s.E, s.K, 0, 0, 1, 1, 1, 0.f, 1.f};
  const size_t fixed = whole_lines(AttendShared<128, false>::BYTES) + 8 * 8 * 264 + 8 * RED + 48 * 128;
  a.ring = (int)((227 * 1024 - fixed - 2048) / COPY_LINE * COPY_LINE);
  return {a, fixed + a.ring};
}
static void run_whole(const Whole& w, int grid) { launch(w.a.F > SLICE * 128 ? (const void*)step_w8_w4_long_d128 : (const void*)step_w8_w4_d128, dim3(grid), 384, w.shared, w.a, true); }
// Both from the same x, bit by bit, after any number of layers; then times.
static void check_whole(Model& m, int grid) {
  Buffers b;
  std::vector<Op> ops = program(m, 1, b);
  const Whole w = whole(m, b, grid);
  const int all = m.s.L;
  for (int layers : {1, 2, all}) {
    for (const Op& op : ops) if (op.layer < layers) op.run();
    OK(cudaStreamSynchronize(stream));
    const std::vector<u32> want = download((const u32*)b.x, m.s.D);
    Whole some = w;
    some.a.num_layers = layers;
    for (int i = 0; i < 2; i++) {
      ops[0].run(), run_whole(some, grid);
      OK(cudaStreamSynchronize(stream));
      const std::vector<u32> got = download((const u32*)b.x, m.s.D);
      int differ = 0;
      double most = 0;
      for (int j = 0; j < m.s.D; j++) {
        float x, y;
        memcpy(&x, &got[j], 4), memcpy(&y, &want[j], 4);
        differ += got[j] != want[j], most = std::max(most, (double)fabsf(x - y) / (fabsf(y) + 1e-3));
      }
      printf("grid %d, %d layers: %d of %d elements differ, at most %.2e\n", grid, layers, differ, m.s.D, most), fflush(stdout);
    }
  }
  std::vector<Op> one = {ops[0], {"whole", 0, 0, [=] { run_whole(w, grid); }}};
  for (const Op& op : ops) if (op.layer >= m.s.L) one.push_back(op);
  for (int i = 0; i < 2; i++)
    printf("context %d: by kernels %.3f ms, by one %.3f ms, of it layers %.3f, %.2f us a layer\n", m.context, time_graph(ops, [](const Op&) { return true; }, 20), time_graph(one, [](const Op&) { return true; }, 20), time_graph(one, [](const Op& o) { return !strcmp(o.name, "whole"); }, 20), time_graph(one, [](const Op& o) { return !strcmp(o.name, "whole"); }, 20) / m.s.L * 1e3), fflush(stdout);
}
static void measure(const Model& m, const std::vector<int>& batches, bool kernels, bool decode = true) {
  std::vector<std::string> lines;
  for (int T : batches) {
    Buffers b;
    std::vector<Op> ops = program(m, T, b, decode);
    for (const Op& op : ops) op.run();
    OK(cudaStreamSynchronize(stream));
    double bytes = 0;
    for (const Op& op : ops) bytes += op.bytes;
    const int repeats = decode ? 20 : 3;
    const double ms = time_graph(ops, [](const Op&) { return true; }, repeats);
    const int slots = download(b.num_slots, 1)[0];
    char line[512];
    snprintf(line, 512, "%s context %d batch %2d: %.3f ms  %7.0f tok/s  %4.1f %% of read bandwidth (%.2f GB, last layer %d experts)", m.s.name, m.context, T, ms, T / ms * 1e3, bytes / ms / 1e9 / READ_TB_S * 100, bytes / 1e9, slots);
    lines.push_back(line);
    if (kernels) {
      std::string row = "  us a launch alone / in the step, TB/s alone:";
      for (const char* name : {"planes", "qkv", "attention", "o_proj", "router", "gate_up", "planes_h", "down", "combine", "lm_head", "argmax"}) {
        int n = 0;
        double each = 0;
        for (const Op& op : ops) if (!strcmp(op.name, name)) n++, each += op.bytes;
        if (!n) continue;
        const double alone = time_graph(ops, [&](const Op& op) { return !strcmp(op.name, name); }, repeats) / n * 1e3;
        const double without = time_graph(ops, [&](const Op& op) { return strcmp(op.name, name); }, repeats);
        snprintf(line, 512, "  %s %.2f / %.2f", name, alone, (ms - without) / n * 1e3);
        row += line;
        if (each) snprintf(line, 512, " %.2f", each / n / alone / 1e6), row += line;
      }
      lines.push_back(row);
    }
    for (void* p : {(void*)b.x, (void*)b.q, (void*)b.k, (void*)b.v, (void*)b.logits, (void*)b.router_logits, (void*)b.gates, (void*)b.attn, (void*)b.h, (void*)b.d}) cudaFree(p);
  }
  for (auto& l : lines) puts(l.c_str());
}

int main(int argc, char** argv) {
  auto has = [&](const char* w) { for (int i = 1; i < argc; i++) if (!strcmp(argv[i], w)) return true; return false; };
  auto value = [&](const char* w, int d) { for (int i = 1; i < argc; i++) if (!strncmp(argv[i], w, strlen(w)) && argv[i][strlen(w)] == '=') return atoi(argv[i] + strlen(w) + 1); return d; };
  OK(cudaStreamCreate(&stream));
  if (has("check")) {
    use_pdl = false;
    check_rows(), printf("rows: %d checks, %d failures, worst %.2f of bound (%s)\n", checks, failures, worst, worst_name.c_str()), fflush(stdout);
    check_linear(), printf("linear: %d checks, %d failures, worst %.2f of bound (%s)\n", checks, failures, worst, worst_name.c_str()), fflush(stdout);
    check_router_and_experts(), printf("experts: %d checks, %d failures, worst %.2f of bound (%s)\n", checks, failures, worst, worst_name.c_str()), fflush(stdout);
    if (has("all")) generic_router = true, check_router_and_experts(), generic_router = false;
    check_attention(), printf("attention: %d checks, %d failures, worst %.2f of bound (%s)\n", checks, failures, worst, worst_name.c_str()), fflush(stdout);
    use_pdl = true;
  }
  staged_most = value("staged", staged_most), blocks_each = value("blocks", 0), max_splits_one = value("splits", max_splits_one);
  pairs_from = value("pairs_from", pairs_from), wide_from = value("wide_from", wide_from), s4_most = value("s4_most", s4_most), cols_most = value("cols", cols_most), most_stages = value("stages", most_stages), most_teams = value("teams", most_teams), direct_most = value("direct", direct_most), down_slice = value("slice", down_slice), most_shared_kb = value("shared", most_shared_kb), column_cost = value("column_cost", column_cost);
  if (has("step")) {
    const int context = value("context", 512);
    Shape shape = has("mixtral") ? mixtral : qwen;
    shape.L = value("layers", shape.L), use_pdl = !has("plain");
    Model m = build(shape, context, context > 2048 ? 1 : 64);
    std::vector<int> batches = {1, 4, 8, 16, 32};
    if (has("whole")) {
      check_whole(m, value("grid", num_sm));
      return 0;
    }
    if (has("one") || context > 2048) batches = {1};
    if (value("batch", 0)) batches = {value("batch", 0)};
    measure(m, batches, has("kernels"));
    if (has("prefill")) {
      measure(m, {512, 1024}, true, false);
      use_wide = false, measure(m, {512}, true, false), use_wide = true;
      for (int c : {64, 96}) printf("%d tokens a run: ", c), wide_columns = c, measure(m, {512}, true, false);
    }
    if (has("variants")) {
      for (int n : {2, 3}) printf("at most %d teams: ", n), most_teams = n, measure(m, {1, 4, 8, 32}, false);
      for (int n : {0, 1}) printf("direct %d: ", n), direct_most = n, measure(m, {1, 2, 4}, false);
      direct_most = 4;
      for (int n : {8, 16, 32}) printf("at most %d splits: ", n), max_splits_one = n, measure(m, {1, 4}, false);
    }
  }
  return failures != 0;
}
