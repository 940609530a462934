// y[t, r] = add[t, r] + scale * (sum_k W[r, k] * n(x)[t, k] + bias[r]), up to three W at once; and the same for the chosen experts
//
// W      w4: [R, K/8] u32, low nibble first, code + 8;  w8: [R, K/4] u32, code + 128; rows 16-byte aligned
//        w16: [R, K] bf16
// scale  [R, K/G] bf16, G in {32, 64, 128} or K (w8 per channel); absent for w16
// x      staged: [T, K] f32 rows, n = nothing, RMSNorm or silu(x) * up; else planes (common/planes.cuh) of n(x) (planes_w*, rows.cu)
// y      [T, R] f32 with a row stride; bias [R] f32; add like y; y may be add
// needs  K % 32 == 0, any R; T K <= 65535 for experts; sums of a group exact, the rest f32
//
// moe_gate_up, moe_down_pairs: either half of the experts for many tokens (common/routing.cuh); for few there is moe.cu
//
// A tile is 16 MT rows a warp, WM warps side by side, WK warps share k; codes, scales and planes travel through rings of DA groups in
// shared memory, each lane copying the codes that it reads itself. Blocks walk items, and what is ahead runs on across items.
//
// Instances, F = w4, w4_g64, w4_g32, w8, w8_g64, w8_g32, w8_c, w16 (no suffix: G = 128, c: one scale a row), by (MT, WM, WK, DA):
//   linear_F_s4 (1, 1, 8, 3) staged, T <= 4; _h4 (1, 8, 1, 4) the same for very many rows; _n32
//   (2, 1, 8, 2; 32 tokens, w4_g32 16), _n64 (2, 4, 1, 3) from planes; moe_gate_up_F_n64 and moe_down_pairs_F_n64 as _n64
// Launch: threads 32 WM WK; grid (tiles, runs of tokens), or (tiles, blocks that walk experts); with N tokens at a time, of which
//   columns <= N are used (a multiple of 8, staged T), SUB = 128 / G (1 for c, 0 for w16), block = 256 (w16 512)
//   shared = WM WK DA (256 MT BITS + 128 SUB) + 4 WK min(16, N) (16 MT WM + 8) where WK > 1
//     + (staged ? columns groups (block + 8) + 16 : WK DA columns (block + 4)); DA is one less for w16 but in _n32
// Floors: bytes R K bits / 8 + R K / G * 2 at read bandwidth; operations 4 R K T on integer tensor cores (6.2 cycles a product
// and scheduler on sm_90, measured). Source: src/engine/cpu/linear.rs, experts.rs.
#include "common/linear.cuh"
#include "common/planes.cuh"
#include "common/routing.cuh"

// What a warp reads of one item: the rows g, g + 8 of MT sixteen-row tiles.
template <int MT>
struct RowSource {
  const char* code[2 * MT];
  const bf16* scale;  // of the row that this lane copies: row t of the four or two
};

// rows first.., clamped to the last
template <int BITS, int MT>
DEV void set_rows(RowSource<MT>& s, int which, const void* packed, const bf16* scale, int row, int rows, int row_bytes, int groups) {
  const int t = threadIdx.x & 3;
  const u32 r = min_int(row + ((threadIdx.x & 31) >> 2), rows - 1);
  s.code[which] = (const char*)packed + (u64)r * row_bytes + t * 16;
  if (t == which) s.scale = scale + (u64)r * groups;
}

// ------------------------------------------------------------------------------------------------------------------- jobs
// A job names items, where their weights and activations are, and where sums go. One direction of the grid walks the items (tiles
// of rows, or experts), the other is fixed (a run of tokens, or a tile of rows), so that no index is divided.
template <int BITS, int G, int MT, int WM>
struct DenseJob {
  static const bool GATED = false;
  static const int ROWS = 16 * MT * WM;
  const LinearArgs& a;
  int tiles0, tiles1, tiles2, first_token;
  DEV DenseJob(const LinearArgs& args) : a(args) {
    tiles0 = div_up(a.m[0].rows, ROWS), tiles1 = a.num_matrices > 1 ? div_up(a.m[1].rows, ROWS) : 0, tiles2 = a.num_matrices > 2 ? div_up(a.m[2].rows, ROWS) : 0;
    first_token = blockIdx.y * a.columns;
  }
  DEV int begin() const { return blockIdx.x; }
  DEV int step() const { return gridDim.x; }
  DEV int items() const { return tiles0 + tiles1 + tiles2; }
  DEV int inner() const { return a.K; }
  DEV int columns() const { return a.columns; }
  DEV int place(int tile, int& row) const {
    int matrix = 0;
    if (tile >= tiles0) tile -= tiles0, matrix = 1;
    if (matrix == 1 && tile >= tiles1) tile -= tiles1, matrix = 2;
    row = tile * ROWS;
    return matrix;
  }
  DEV void rows(RowSource<MT>& s, int item, int wm, int row_bytes, int groups) const {
    int row;
    const LinearMatrix& m = a.m[place(item, row)];
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) set_rows<BITS>(s, i, m.packed, m.scale, row + wm * 16 * MT + i * 8, m.rows, row_bytes, groups);
  }
  DEV int count(int) const { return min_int(a.columns, a.T - first_token); }
  DEV int source(int, int n) const { return first_token + n; }
  DEV const char* planes() const { return a.x_q; }
  DEV const float* plane_scales() const { return a.x_scale; }
  DEV void put(int item, int r, int n, float y) const {
    int row;
    const LinearMatrix& m = a.m[place(item, row)];
    row += r;
    if (row >= m.rows) return;
    if (m.bias) y = __fadd_rn(y, m.bias[row]);
    y = __fmul_rn(y, m.out_scale);
    const size_t at = (size_t)(first_token + n) * m.out_stride + row;
    if (m.add) y = __fadd_rn(y, m.add[at]);
    m.out[at] = without_tag(y);
  }
  DEV void put_gated(int, int, int, float, float) const {}
};
// Either half of the experts.
template <int BITS, int G, int MT, int WM, bool BOTH>
struct ExpertsJob {
  static const bool GATED = BOTH;
  const ExpertsArgs& a;
  int first;
  DEV ExpertsJob(const ExpertsArgs& args) : a(args) { first = blockIdx.x * (BOTH ? 8 : 16) * MT * WM; }
  DEV int begin() const { return blockIdx.y; }
  DEV int step() const { return gridDim.y; }
  DEV int items() const { return *a.num_slots; }
  DEV int inner() const { return a.inner; }
  DEV int columns() const { return a.columns; }
  DEV void rows(RowSource<MT>& s, int item, int wm, int row_bytes, int groups) const {
    const ExpertSlot& slot = a.slots[item];
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
      if (BOTH)
        set_rows<BITS>(s, i, i % 2 ? slot.up_packed : slot.gate_packed, i % 2 ? slot.up_scale : slot.gate_scale, first + wm * 8 * MT + i / 2 * 8, a.rows, row_bytes, groups);
      else
        set_rows<BITS>(s, i, slot.down_packed, slot.down_scale, first + wm * 16 * MT + i * 8, a.rows, row_bytes, groups);
    }
  }
  DEV int count(int item) const { return a.slots[item].count; }
  DEV int source(int item, int n) const {
    const ExpertSlot& slot = a.slots[item];
    if (!BOTH) return slot_pair(slot, a.pairs, n);
    return n < 8 ? slot.token[n] : (u32)a.pairs[slot.first + n] / (u32)a.K;
  }
  DEV const char* planes() const { return a.x_q; }
  DEV const float* plane_scales() const { return a.x_scale; }
  DEV void put(int item, int r, int n, float y) const {
    r += first;
    if (r < a.rows) a.out[(size_t)slot_pair(a.slots[item], a.pairs, n) * a.rows + r] = y;
  }
  DEV void put_gated(int item, int f, int n, float gate, float up) const { put(item, f, n, silu(gate) * up); }
};

// ------------------------------------------------------------------------------------------------------------------ staging
// Planes of all rows of x into shared memory, [T][groups]; inv_sh [T]: the factors 1 / rms of the sums. Up to four rows are loaded before
// the first is used. square_sh [T][groups] is free.
template <int BITS>
DEV void stage_rows(char* q_sh, float* scale_sh, float* inv_sh, float* square_sh, const LinearArgs& a, int groups) {
  const int AHEAD = 4, chunks = groups * 16;
#pragma unroll 1
  for (int n0 = 0; n0 < a.T; n0 += AHEAD) {
#pragma unroll 1
    for (int base = 0; base < chunks; base += blockDim.x) {
      const int c = base + threadIdx.x, k = c * 8;
      float f[AHEAD][8], gain[8];
#pragma unroll
      for (int j = 0; j < AHEAD; j++) {
        const float* x = a.x + (size_t)min_int(n0 + j, a.T - 1) * a.x_stride + k;
#pragma unroll
        for (int i = 0; i < 8; i++) f[j][i] = 0.f;
        if (k < a.K && n0 + j < a.T) *(float4*)f[j] = *(const float4*)x, *(float4*)(f[j] + 4) = *(const float4*)(x + 4);
      }
      if (k < a.K && a.norm) *(float4*)gain = *(const float4*)(a.gain + k), *(float4*)(gain + 4) = *(const float4*)(a.gain + k + 4);
#pragma unroll
      for (int j = 0; j < AHEAD; j++) {
        if (n0 + j >= a.T) break;
        const int group = (n0 + j) * groups + (c >> 4);
        if (a.norm) {
          const float square = group_square(f[j]);
          if (c < chunks && (c & 15) == 0) square_sh[group] = square;
          if (k < a.K)
#pragma unroll
            for (int i = 0; i < 8; i++) f[j][i] *= gain[i];
        } else if (k < a.K && a.up) {
          const float* at = a.up + (size_t)(n0 + j) * a.x_stride + k;
          float up[8];
          *(float4*)up = *(const float4*)at, *(float4*)(up + 4) = *(const float4*)(at + 4);
#pragma unroll
          for (int i = 0; i < 8; i++) f[j][i] = silu(f[j][i]) * up[i];
        }
        make_block<BITS>(q_sh + group * Block<BITS>::BYTES, scale_sh + group, c, f[j], c < chunks);
      }
    }
  }
  __syncthreads();
  if ((int)threadIdx.x < a.T) inv_sh[threadIdx.x] = a.norm ? inverse_rms(square_sh + threadIdx.x * groups, groups, a.K, a.eps) : 1.f;
  __syncthreads();
}

// -------------------------------------------------------------------------------------------------------------------- walk

template <int BITS, int G, int MT, int NT, int WM, int WK, int DA, bool STAGED, class Job, class Args>
DEV void walk(const Args& args, const LinearArgs* staged) {
  typedef Form<BITS, G> F;
  const int SUB = F::SUB, N = 4 * NT, CODE_BYTES = 256 * MT * BITS, STAGE_BYTES = CODE_BYTES + 128 * SUB, ROWS = 16 * MT * WM, BLOCK = Block<BITS>::BYTES;
  const int RED_NT = NT < 4 ? NT : 4, RED_STRIDE = ROWS + 8, PER = BLOCK / 16, TWO = NT > 1 && SUB < 4 ? 2 : 1, COPIES = STAGED ? 1 : (N * PER + WM * 32 - 1) / (WM * 32);
  extern __shared__ uint4 linear_sh[];
  const Job job(args);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, wm = warp % WM, kg = warp / WM, tid = wm * 32 + lane;
  const int K = job.inner(), groups = groups_of(K), row_bytes = K * BITS / 8, scales = BITS == 16 ? 0 : G == 0 ? 1 : K / (G ? G : 1), cols = job.columns();
  const int k_begin = groups * kg / WK, k_end = groups * (kg + 1) / WK;
  char* ring_sh = (char*)linear_sh + warp * DA * STAGE_BYTES;
  char* after = (char*)linear_sh + WM * WK * DA * STAGE_BYTES;
  const int plane_stage = cols * (BLOCK + 4), plane_part = STAGED ? 0 : DA * plane_stage;
  char* planes_sh = after + kg * plane_part;
  after += STAGED ? cols * groups * (BLOCK + 4) : WK * plane_part;
  float* staged_scale_sh = (float*)(planes_sh + cols * groups * BLOCK);
  float* red_sh = (float*)after;
  float* inv_sh = red_sh + (WK > 1 ? WK * 4 * RED_NT * RED_STRIDE : 0);  // STAGED: 1 / rms, then the squares

  // the ring's front: what is copied next
  int f_item = job.begin(), f_n0 = 0, f_k = k_begin, f_stage = 0, f_count = 0;
  RowSource<MT> from;
  const char* plane_from[COPIES];
  const float* scale_from = 0;
  int items = 0;
  auto aim_rows = [&]() { job.rows(from, f_item, wm, row_bytes, scales); };
  auto aim_tokens = [&]() {
    if (STAGED) return;
    f_count = job.count(f_item);
#pragma unroll
    for (int j = 0; j < COPIES; j++) {
      const int c = tid + j * WM * 32, n = min_int(f_n0 + c / PER, f_count - 1);
      if (c / PER < cols) plane_from[j] = job.planes() + (u64)job.source(f_item, n) * groups * BLOCK + c % PER * 16;
    }
    if (tid < cols) scale_from = job.plane_scales() + (u64)job.source(f_item, min_int(f_n0 + tid, f_count - 1)) * scale_row(groups);
  };
  auto copy_codes = [&]() {
    char* to = ring_sh + f_stage * STAGE_BYTES;
#pragma unroll
    for (int i = 0; i < F::PIECES; i++) {
      const int at = min_int(f_k * F::ROW_BYTES + i * 64, row_bytes - 16 - t * 16);
#pragma unroll
      for (int r = 0; r < 2 * MT; r++) copy_async_16(to + (r * F::PIECES + i) * 512 + lane * 16, from.code[r] + at);
    }
#pragma unroll
    for (int q = 0; q < SUB; q++) {
      const bf16* s = from.scale + (G == 0 ? 0 : min_int(f_k * SUB + q, scales - 1));
      if (t < 2 * MT) copy_async_4(to + CODE_BYTES + q * 128 + lane * 4, (const void*)((u64)s & ~3ull));
    }
  };
  auto copy_planes = [&]() {
    if (STAGED) return;
    char* to = planes_sh + f_stage * plane_stage;
#pragma unroll
    for (int j = 0; j < COPIES; j++) {
      const int c = tid + j * WM * 32;
      if (c / PER < min_int(cols, (f_count - f_n0 + 3) & ~3)) copy_async_16(to + c * 16, plane_from[j] + f_k * BLOCK);
    }
    if (tid < cols) copy_async_4(to + cols * BLOCK + tid * 4, scale_from + f_k);
  };
  auto advance = [&]() {
    if (++f_stage == DA) f_stage = 0;
    if (++f_k < k_end) return;
    f_k = k_begin;
    if (!STAGED && f_n0 + cols < f_count) {
      f_n0 += cols;
      aim_tokens();
      return;
    }
    f_n0 = 0, f_item += job.step();
    if (f_item < items) aim_rows(), aim_tokens();
  };

  const bool empty = k_begin == k_end;
  if (STAGED) {  // weights do not depend on the previous kernel
    items = job.items();
    if (f_item < items && !empty) aim_rows();
#pragma unroll 1
    for (int i = 0; i < DA - 1; i++) {
      if (f_item < items && !empty) copy_codes(), advance();
      copy_async_commit();
    }
    if (staged->norm && (int)threadIdx.x * 32 < K) prefetch_l2(staged->gain + threadIdx.x * 32);
    dependency_wait();
    dependents_launch();
    stage_rows<BITS>(planes_sh, staged_scale_sh, inv_sh, inv_sh + 4, *staged, groups);
  } else {
    dependency_wait();
    dependents_launch();
    items = job.items();
    if (f_item < items && !empty) aim_rows(), aim_tokens();
#pragma unroll 1
    for (int i = 0; i < DA - 1; i++) {
      if (f_item < items && !empty) copy_codes(), copy_planes(), advance();
      copy_async_commit();
    }
  }

  int stage = 0;
#pragma unroll 1
  for (int item = job.begin(); item < items; item += job.step()) {
    const int count = job.count(item);
#pragma unroll 1
    for (int n0 = 0; n0 < count; n0 += cols) {
      const int used = min_int(cols, count - n0);
      float acc[MT][NT][2];
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++) acc[i][n][0] = acc[i][n][1] = 0.f;
#pragma unroll 1
      for (int k = k_begin; k < k_end; k++) {
        copy_async_wait<DA - 2>();
        if (STAGED || WM == 1)
          __syncwarp();
        else
          asm volatile("bar.sync %0, %1;" ::"r"(kg + 1), "n"(WM * 32) : "memory");
        if (f_item < items) copy_codes(), copy_planes(), advance();
        copy_async_commit();
        const char* codes_sh = ring_sh + stage * STAGE_BYTES;
        u32 a[MT][F::MMAS][4];
        RowScales<SUB> s[MT];
#pragma unroll
        for (int i = 0; i < MT; i++) {
          uint4 lo[F::PIECES], hi[F::PIECES];
#pragma unroll
          for (int p = 0; p < F::PIECES; p++)
            lo[p] = *(const uint4*)(codes_sh + (2 * i * F::PIECES + p) * 512 + lane * 16), hi[p] = *(const uint4*)(codes_sh + ((2 * i + 1) * F::PIECES + p) * 512 + lane * 16);
          unpack<BITS>(a[i], lo, hi);
        }
#pragma unroll
        for (int q = 0; q < SUB; q++) {
          const uint4 v = *(const uint4*)(codes_sh + CODE_BYTES + q * 128 + g * 16);
          const int index = G == 0 ? 0 : min_int(k * SUB + q, scales - 1), shift = ((g & scales) ^ index) & 1 ? 0 : 16;
          const float unit = BITS == 4 ? 0.0625f : 1.f;
          s[0].lo[q] = unit * __uint_as_float(v.x << shift & 0xffff0000u), s[0].hi[q] = unit * __uint_as_float(v.y << shift & 0xffff0000u);
          if (MT == 2) s[MT - 1].lo[q] = unit * __uint_as_float(v.z << shift & 0xffff0000u), s[MT - 1].hi[q] = unit * __uint_as_float(v.w << shift & 0xffff0000u);
        }
        const char* x_sh = STAGED ? planes_sh + k * BLOCK : planes_sh + stage * plane_stage;
        const float* sx_sh = STAGED ? staged_scale_sh + k : (const float*)(x_sh + cols * BLOCK);
        const int token_bytes = groups * BLOCK;
#pragma unroll
        for (int first = 0; first < NT; first += TWO) {
          if (NT > 1 && 4 * first >= used) break;
          uint4 x[TWO][PER / 8];
          float sx[TWO], *sums[TWO];
#pragma unroll
          for (int n = 0; n < TWO; n++) {
            const int token = 4 * (first + n) + (g >> 1), mine = 4 * (first + n) + t;
            const char* b = x_sh + (STAGED ? min_int(token, used - 1) * token_bytes : token * BLOCK) + (g & 1) * 64 + t * 16;
#pragma unroll
            for (int i = 0; i < PER / 8; i++) x[n][i] = *(const uint4*)(b + i * 128);
            sx[n] = BITS == 16 ? 1.f : sx_sh[STAGED ? min_int(mine, used - 1) * groups : mine];
            sums[n] = acc[0][first + n];
          }
          group_products<BITS, SUB, MT, TWO>(sums, 2 * NT, a, s, x, sx);
        }
        if (++stage == DA) stage = 0;
      }
      if (WK == 1) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
          if (4 * n + t >= used) break;
          const float inv = STAGED ? inv_sh[4 * n + t] : 1.f;
#pragma unroll
          for (int i = 0; i < MT; i++) {
            if (Job::GATED) {
              job.put_gated(item, wm * 8 * MT + i * 8 + g, n0 + 4 * n + t, acc[i][n][0], acc[i][n][1]);
            } else {
              job.put(item, wm * 16 * MT + i * 16 + g, n0 + 4 * n + t, acc[i][n][0] * inv);
              job.put(item, wm * 16 * MT + i * 16 + 8 + g, n0 + 4 * n + t, acc[i][n][1] * inv);
            }
          }
        }
        continue;
      }
#pragma unroll
      for (int first = 0; first < NT; first += RED_NT) {
        if (4 * first >= used) break;
        __syncthreads();
#pragma unroll
        for (int n = 0; n < RED_NT; n++)
#pragma unroll
          for (int i = 0; i < MT; i++) {
            float* to = red_sh + (kg * 4 * RED_NT + 4 * n + t) * RED_STRIDE + wm * 16 * MT + i * 16 + g;
            to[0] = acc[i][first + n][0], to[8] = acc[i][first + n][1];
          }
        __syncthreads();
        const int width = Job::GATED ? ROWS / 2 : ROWS;
#pragma unroll 1
        for (int i = threadIdx.x; i < width * min_int(4 * RED_NT, used - 4 * first); i += WM * WK * 32) {
          const int r = i % width, n = i / width;
          const float* sums = red_sh + n * RED_STRIDE + (Job::GATED ? r / 8 * 16 + r % 8 : r);
          float y = 0.f, up = 0.f;
#pragma unroll
          for (int w = 0; w < WK; w++) {
            y += sums[w * 4 * RED_NT * RED_STRIDE];
            if (Job::GATED) up += sums[w * 4 * RED_NT * RED_STRIDE + 8];
          }
          if (Job::GATED)
            job.put_gated(item, r, n0 + 4 * first + n, y, up);
          else
            job.put(item, r, n0 + 4 * first + n, STAGED ? y * inv_sh[n] : y);
        }
      }
    }
  }
  copy_async_wait<0>();
}

#define LINEAR_STAGED(NAME, BITS, G, NT, WM, WK, DA, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(32 * WM * WK, BLOCKS) linear_##NAME(const __grid_constant__ LinearArgs a) { walk<BITS, G, 1, NT, WM, WK, DA, true, DenseJob<BITS, G, 1, WM>>(a, &a); }
#define LINEAR_PLANES(NAME, BITS, G, NT, WM, WK, DA, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(32 * WM * WK, BLOCKS) linear_##NAME(const __grid_constant__ LinearArgs a) { walk<BITS, G, 2, NT, WM, WK, DA, false, DenseJob<BITS, G, 2, WM>>(a, 0); }
#define EXPERTS(KIND, NAME, BITS, G, DA, BLOCKS, BOTH) \
  extern "C" __global__ void __launch_bounds__(128, BLOCKS) moe_##KIND##_##NAME(const __grid_constant__ ExpertsArgs a) { walk<BITS, G, 2, 16, 4, 1, DA, false, ExpertsJob<BITS, G, 2, 4, BOTH>>(a, 0); }
// The widest forms take one block a multiprocessor where others take two or three. Where shared memory holds fewer blocks anyway, registers
// need not be saved for more.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define FEWER 0
#else
#define FEWER 1
#endif
#define BLOCKS_OF(BITS, G) (BITS == 16 || G == 32 ? 1 : 2)
#define DEPTH_OF(BITS) (BITS == 16 ? 2 : 3)
#define FORM(NAME, BITS, G)                                                                  \
  LINEAR_STAGED(NAME##_s4, BITS, G, 1, 1, 8, DEPTH_OF(BITS), BLOCKS_OF(BITS, G) + 1 - FEWER) \
  LINEAR_STAGED(NAME##_h4, BITS, G, 1, 8, 1, DEPTH_OF(BITS) + 1, BLOCKS_OF(BITS, G))         \
  LINEAR_PLANES(NAME##_n32, BITS, G, (BITS == 4 && G == 32 ? 4 : 8), 1, 8, 2, 1)             \
  LINEAR_PLANES(NAME##_n64, BITS, G, 16, 4, 1, DEPTH_OF(BITS), 2)                            \
  EXPERTS(gate_up, NAME##_n64, BITS, G, DEPTH_OF(BITS), 2, true)                             \
  EXPERTS(down_pairs, NAME##_n64, BITS, G, DEPTH_OF(BITS), BLOCKS_OF(BITS, G), false)
#include "common/forms.cuh"
