// Codes with error feedback: `src/quant/gptq.rs`, `feed.rs` and `search.rs` for all matrices of a layer at once.
//
// Rounding, scales and the columns of a block are computed by the processor's operations in its order, so that the same inputs give
// the same bits; products between blocks (`tiles.cu`) and sums in f64 differ in order. A warp takes a row, or a group of one.

#include "common/matrix.cuh"

typedef unsigned char u8;

// Rows of one matrix with the second moments they share.
struct Tile {
  int first, rows, moments, pad;
};
// How rows are stored.
struct Form {
  int cols, group, bits, scale_kind, positive;
};

constexpr int BLOCK = 128;   // columns whose errors are carried to the rest by one product
constexpr int WARPS = 8;     // of every block here
constexpr int SIDE = 64;     // of the squares of a factorisation
constexpr float ROUND = 12582912.0f;

DEV int lane_id() { return threadIdx.x & 31; }
DEV int warp_id() { return threadIdx.x >> 5; }
DEV double warp_sum_f64(double x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
DEV float half_of(int bits) { return bits == 4 ? 8.0f : 128.0f; }

DEV float round_bf16(float x) {
  u32 u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return x;
  return __uint_as_float((u + 0x7fffu + ((u >> 16) & 1)) & 0xffff0000u);
}
DEV u16 to_f16(float x) {
  u16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
DEV float round_to(float x, int kind) {
  if (kind == BF16) return round_bf16(x);
  return kind == F16 ? f16_to_f32(to_f16(x)) : x;
}
// The code of a quotient, without its offset.
DEV float nearest(float x, float half) { return __fsub_rn(__fadd_rn(fminf(fmaxf(x, -half), half - 1.0f), ROUND), ROUND); }
DEV bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// Hundredths of the absmax scale that are tried: 100, down to `lowest`, then 101 to 105; 0 for none.
DEV float candidate(int i, int bits) {
  int down = bits == 4 ? 41 : 7;
  return i < down ? 100.0f - i : i < down + 5 ? 101.0f + (i - down) : 0.0f;
}

// What one candidate has summed: common to both signs, and of each; in runs of 256 values so that long groups lose no digits.
struct Errors {
  float scale, inverse, unit, total, sum, positive, negative;
};
DEV Errors errors_of(float scale, float absmax) {
  bool sound = scale > 0.0f && scale < INFINITY_F;
  float share = __fdiv_rn(scale, absmax);
  return {scale, sound ? __fdiv_rn(1.0f, scale) : 0.0f, sound ? __fmul_rn(share, share) : __int_as_float(0x7fc00000), 0, 0, 0, 0};
}
DEV void add_inner(Errors& e, float v, float w) {
  float q = __fsub_rn(__fmaf_rn(v, e.inverse, ROUND), ROUND), d = __fmaf_rn(v, e.inverse, -q);
  e.sum = __fmaf_rn(__fmul_rn(d, w), d, e.sum);
}
DEV float clamped(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}
DEV void add_outer(Errors& e, float v, float w, float half) {
  float q = __fsub_rn(__fmaf_rn(v, e.inverse, ROUND), ROUND);
  float p = __fmaf_rn(v, e.inverse, -clamped(q, -half, half - 1.0f)), n = __fmaf_rn(v, e.inverse, -clamped(q, 1.0f - half, half));
  e.positive = __fmaf_rn(__fmul_rn(p, w), p, e.positive);
  e.negative = __fmaf_rn(__fmul_rn(n, w), n, e.negative);
}
DEV void finish(Errors& e, int positive_only) {
  float common = __fadd_rn(e.total, e.sum);
  e.positive = __fmul_rn(__fadd_rn(e.positive, common), e.unit);
  e.negative = positive_only ? __int_as_float(0x7fc00000) : __fmul_rn(__fadd_rn(e.negative, common), e.unit);
}
DEV float smaller(float a, float b) { return b < a ? b : a; }

// The first value that is not finite leaves 2 * its place in *bad, if that is less. Grid any, block any.
extern "C" __global__ void solve_finite(const float* src, u64 n, u64* bad) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
    if (!is_finite(src[i])) atomicMin(bad, 2 * i);
}

// What outputs lack, columns as they are visited: dst[r, i] = scale * (src drift + debt)[r, order[i]]; products[r] = src drift. debt: rows
// that begin at the run's first, or null. Grid (tiles), block 256.
extern "C" __global__ void solve_owed(float* dst, const float* products, const u64* debt, const float* scale, const u64* order, const Tile* tiles, int cols) {
  Tile tile = tiles[blockIdx.x];
  const int* from = (const int*)order[tile.moments];
  const float* owed = (const float*)debt[tile.moments];
  for (int r = warp_id(); r < tile.rows; r += WARPS) {
    size_t row = (size_t)(tile.first + r) * cols;
    for (int c = lane_id(); c < cols; c += 32) {
      float sum = products[row + from[c]];
      if (owed) sum += owed[row + from[c]];
      dst[row + c] = sum * scale[tile.moments];
    }
  }
}
// src[r, order[i]] += change[r, i]; *lost: a change is not finite. Grid (tiles), block 256.
extern "C" __global__ void solve_aim(float* src, const float* change, const u64* order, const Tile* tiles, int cols, int* lost) {
  Tile tile = tiles[blockIdx.x];
  const int* to = (const int*)order[tile.moments];
  for (int r = warp_id(); r < tile.rows; r += WARPS) {
    size_t row = (size_t)(tile.first + r) * cols;
    for (int c = lane_id(); c < cols; c += 32) {
      float by = change[row + c];
      if (!is_finite(by)) lost[tile.moments] = 1;
      src[row + to[c]] += by;
    }
  }
}

// Scales of least weighted squared error, one a group: grid[row, g]. A value that is not finite, or a scale beyond its type, leaves
// 2 (row * cols + col), plus 1 for a scale, in *bad if that is less. Grid (tiles), block 256. energy: [cols] for each set of moments.
extern "C" __global__ __launch_bounds__(256) void solve_scales(float* grid, const float* src, const u64* energy, const Tile* tiles, Form form, u64* bad) {
  Tile tile = tiles[blockIdx.x];
  int groups = form.cols / form.group, lane = lane_id();
  float half = half_of(form.bits);
  const float* weights = (const float*)energy[tile.moments];
  for (int item = warp_id(); item < tile.rows * groups; item += WARPS) {
    size_t row = tile.first + item / groups;
    int g = item % groups, first = g * form.group;
    const float *x = src + row * form.cols + first, *w = weights + first;
    float absmax = 0;
    int wrong = form.group;
    for (int c = lane; c < form.group; c += 32) {
      absmax = fmaxf(absmax, fabsf(x[c]));
      if (!is_finite(x[c]) && c < wrong) wrong = c;
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      absmax = fmaxf(absmax, __shfl_xor_sync(~0u, absmax, o));
      wrong = min_int(wrong, __shfl_xor_sync(~0u, wrong, o));
    }
    u64 at = 2 * (row * form.cols + first);
    if (wrong < form.group) {
      if (lane == 0) atomicMin(bad, at + 2 * wrong), grid[row * groups + g] = 1.0f;
      continue;
    }
    float base = __fdiv_rn(absmax, half - 0.5f);
    float s0 = round_to(__fmul_rn(__fmul_rn(candidate(lane, form.bits), 0.01f), base), form.scale_kind);
    float s1 = round_to(__fmul_rn(__fmul_rn(candidate(lane + 32, form.bits), 0.01f), base), form.scale_kind);
    Errors e0 = errors_of(s0, absmax), e1 = errors_of(s1, absmax);
    float least = smaller(s0 > 0.0f ? s0 : INFINITY_F, s1 > 0.0f ? s1 : INFINITY_F);
#pragma unroll
    for (int o = 16; o; o >>= 1) least = smaller(least, __shfl_xor_sync(~0u, least, o));
    float threshold = __fmul_rn(__fmul_rn(least, half - 0.5f), 0.999f);
    int inner = 0;
    for (int c = 0; c < form.group; c += 32) {
      float own = c + lane < form.group ? x[c + lane] : 0.0f, own_w = c + lane < form.group ? w[c + lane] : 0.0f;
      int end = min_int(32, form.group - c);
      for (int i = 0; i < end; i++) {
        float v = __shfl_sync(~0u, own, i), weight = __shfl_sync(~0u, own_w, i);
        if (fabsf(v) >= threshold) {
          add_outer(e0, v, weight, half), add_outer(e1, v, weight, half);
        } else {
          if (inner == 256) {
            e0.total = __fadd_rn(e0.total, e0.sum), e1.total = __fadd_rn(e1.total, e1.sum);
            e0.sum = e1.sum = 0;
            inner = 0;
          }
          add_inner(e0, v, weight), add_inner(e1, v, weight);
          inner++;
        }
      }
    }
    finish(e0, form.positive), finish(e1, form.positive);
    float best = smaller(smaller(smaller(smaller(INFINITY_F, e0.positive), e0.negative), e1.positive), e1.negative);
#pragma unroll
    for (int o = 16; o; o >>= 1) best = smaller(best, __shfl_xor_sync(~0u, best, o));
    u32 in0 = __ballot_sync(~0u, e0.positive == best || e0.negative == best), in1 = __ballot_sync(~0u, e1.positive == best || e1.negative == best);
    float mine = in0 ? (e0.positive == best ? s0 : -s0) : (e1.positive == best ? s1 : -s1);
    float scale = __shfl_sync(~0u, mine, in0 ? __ffs(in0) - 1 : in1 ? __ffs(in1) - 1 : 0);
    if (!in0 && !in1) {
      scale = round_to(base, form.scale_kind);
      if (scale == 0.0f) scale = form.scale_kind == F16 ? 0.0009765625f : form.scale_kind == BF16 ? 0.0078125f : 1.1920929e-7f;
    }
    if (lane == 0) {
      if (!is_finite(scale)) atomicMin(bad, at + 1);
      grid[row * groups + g] = scale;
    }
  }
}

// codes = src rounded on the grid. Grid any, block any; n = rows * cols.
extern "C" __global__ void solve_round(u8* codes, const float* src, const float* grid, Form form, u64 n) {
  float half = half_of(form.bits);
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
    codes[i] = (u8)(int)(nearest(__fdiv_rn(src[i], grid[i / form.group]), half) + half);
}
// dst = src less what the codes stand for.
extern "C" __global__ void solve_rest(float* dst, const float* src, const u8* codes, const float* grid, Form form, u64 n) {
  float half = half_of(form.bits);
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
    dst[i] = __fsub_rn(src[i], __fmul_rn((float)codes[i] - half, grid[i / form.group]));
}
// dst = codes as signed numbers.
extern "C" __global__ void solve_signed(float* dst, const u8* codes, Form form, u64 n) {
  float half = half_of(form.bits);
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) dst[i] = (float)codes[i] - half;
}
// dst = factor * src in the scales' type.
extern "C" __global__ void solve_stretch(float* dst, const float* src, float factor, int scale_kind, u64 n) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) dst[i] = round_to(__fmul_rn(src[i], factor), scale_kind);
}

// losses[r] = sum of d times product; without moments beyond the diagonal, of d^2 times that. Grid (tiles), block 256.
extern "C" __global__ void solve_dots(double* losses, const float* d, const float* product, const u64* diagonal, const Tile* tiles, int cols) {
  Tile tile = tiles[blockIdx.x];
  for (int r = warp_id(); r < tile.rows; r += WARPS) {
    const float *x = d + (size_t)(tile.first + r) * cols, *y = product ? product + (size_t)(tile.first + r) * cols : 0;
    const float* own = (const float*)diagonal[tile.moments];
    double sum = 0;
    for (int c = lane_id(); c < cols; c += 32) sum += y ? (double)x[c] * (double)y[c] : (double)__fmul_rn(__fmul_rn(x[c], x[c]), own[c]);
    sum = warp_sum_f64(sum);
    if (lane_id() == 0) losses[tile.first + r] = sum;
  }
}

// w[r, i] = src[r, order[i]]: columns as they are visited. Grid (tiles), block 256.
extern "C" __global__ void solve_visit(float* w, const float* src, const u64* order, const Tile* tiles, int cols) {
  Tile tile = tiles[blockIdx.x];
  const int* from = (const int*)order[tile.moments];
  for (int r = warp_id(); r < tile.rows; r += WARPS) {
    size_t row = (size_t)(tile.first + r) * cols;
    for (int c = lane_id(); c < cols; c += 32) w[row + c] = src[row + from[c]];
  }
}

// Codes of one block of columns after the other's errors: lane holds columns lane, lane + 32, ... of the block. Errors go to
// [rows, 128]. `weight`, `order` and `upper` are in the order of visits. Grid (tiles), block 256, shared 64 KiB.
extern "C" __global__ __launch_bounds__(256) void solve_feed(float* w, float* errors, u8* codes, double* losses, const float* grid, const u64* upper, const u64* weight, const u64* order, const Tile* tiles, Form form, int first) {
  extern __shared__ float upper_sh[];
  Tile tile = tiles[blockIdx.x];
  int cols = form.cols, width = min_int(BLOCK, cols - first), lane = lane_id(), groups = cols / form.group;
  const float* factors = (const float*)upper[tile.moments] + (size_t)first * cols + first;
  for (int i = threadIdx.x; i < BLOCK * BLOCK; i += blockDim.x) {
    int r = i / BLOCK, c = i % BLOCK;
    upper_sh[i] = r < width && c < width ? factors[(size_t)r * cols + c] : 0.0f;
  }
  __syncthreads();
  float half = half_of(form.bits);
  float cost[4];
  int column[4];
#pragma unroll
  for (int q = 0; q < 4; q++) {
    bool own = 32 * q + lane < width;
    cost[q] = own ? ((const float*)weight[tile.moments])[first + 32 * q + lane] : 0.0f;
    column[q] = own ? ((const int*)order[tile.moments])[first + 32 * q + lane] : -1;
  }
  for (int r = warp_id(); r < tile.rows; r += WARPS) {
    size_t row = tile.first + r;
    float x[4], scale[4], error[4];
#pragma unroll
    for (int q = 0; q < 4; q++) {
      x[q] = column[q] >= 0 ? w[row * cols + first + 32 * q + lane] : 0.0f;
      scale[q] = column[q] >= 0 ? grid[row * groups + column[q] / form.group] : 1.0f;
    }
    double loss = 0;
#pragma unroll
    for (int q = 0; q < 4; q++) {
      int end = min_int(32, width - 32 * q);
      for (int i = 0; i < end; i++) {
        float own = __fsub_rn(x[q], __fmul_rn(nearest(__fdiv_rn(x[q], scale[q]), half), scale[q]));
        float e = -__shfl_sync(~0u, own, i);
        const float* u_sh = upper_sh + (32 * q + i) * BLOCK + lane;
        // The factors of columns up to this one are zero: what is decided stays.
#pragma unroll
        for (int p = 0; p < 4; p++)
          if (p >= q) x[p] = __fmaf_rn(e, u_sh[32 * p], x[p]);
      }
      float code = nearest(__fdiv_rn(x[q], scale[q]), half);
      error[q] = __fsub_rn(x[q], __fmul_rn(code, scale[q]));
      if (column[q] >= 0) {
        codes[row * cols + column[q]] = (u8)(int)(code + half);
        loss += (double)__fmul_rn(__fmul_rn(error[q], error[q]), cost[q]);
      }
      errors[row * BLOCK + 32 * q + lane] = column[q] >= 0 ? error[q] : 0.0f;
    }
    loss = warp_sum_f64(loss);
    if (lane == 0) losses[row] = first == 0 ? loss : losses[row] + loss;
  }
}

// Takes the rows over that another set of scales serves better. Grid (tiles), block 256.
extern "C" __global__ void solve_improve(u8* codes, float* grid, double* losses, const u8* other_codes, const float* other_grid, const double* other_losses, const Tile* tiles, Form form) {
  Tile tile = tiles[blockIdx.x];
  int groups = form.cols / form.group;
  for (int r = warp_id(); r < tile.rows; r += WARPS) {
    size_t row = tile.first + r;
    if (!(other_losses[row] < losses[row])) continue;
    __syncwarp();
    const u32* from = (const u32*)(other_codes + row * form.cols);
    u32* to = (u32*)(codes + row * form.cols);
    for (int c = lane_id(); c < form.cols / 4; c += 32) to[c] = from[c];
    for (int g = lane_id(); g < groups; g += 32) grid[row * groups + g] = other_grid[row * groups + g];
    if (lane_id() == 0) losses[row] = other_losses[row];
  }
}

// One row of the equations of the best scales: a[r, g, h] = product . codes of group h, b[r, g] = product . src, for the product of
// group g's codes with the moments. a and b begin at row `base`. Grid (tiles), block 256.
extern "C" __global__ void solve_equations(double* a, double* b, const float* product, const float* codes, const float* src, const Tile* tiles, Form form, int g, int base) {
  Tile tile = tiles[blockIdx.x];
  int groups = form.cols / form.group;
  for (int r = warp_id(); r < tile.rows; r += WARPS) {
    size_t row = tile.first + r, at = row - base;
    const float *p = product + row * form.cols, *c = codes + row * form.cols, *s = src + row * form.cols;
    double whole = 0;
    for (int h = 0; h < groups; h++) {
      double part = 0;
      for (int i = h * form.group + lane_id(); i < (h + 1) * form.group; i += 32) {
        part += (double)__fmul_rn(p[i], c[i]);
        whole += (double)__fmul_rn(p[i], s[i]);
      }
      part = warp_sum_f64(part);
      if (lane_id() == 0) a[(at * groups + g) * groups + h] = part;
    }
    whole = warp_sum_f64(whole);
    if (lane_id() == 0) b[at * groups + g] = whole;
  }
}

// Solves them by Cholesky in place and puts the scales, rounded, into `refitted` where they are of the same sign as before; a system that
// has no factor leaves its row as it was. Grid (tiles), block 256.
extern "C" __global__ void solve_refit(float* refitted, const float* grid, double* a, double* b, const Tile* tiles, Form form, int base) {
  Tile tile = tiles[blockIdx.x];
  int n = form.cols / form.group, lane = lane_id();
  for (int r = warp_id(); r < tile.rows; r += WARPS) {
    size_t row = tile.first + r;
    double *m = a + (row - base) * n * n, *x = b + (row - base) * n;
    for (int i = 0; i < n; i++)
      for (int j = lane; j <= i; j += 32) m[(size_t)i * n + j] = 0.5 * (m[(size_t)i * n + j] + m[(size_t)j * n + i]);
    __syncwarp();
    bool sound = true;
    for (int j = 0; j < n && sound; j++) {
      double pivot = m[(size_t)j * n + j];
      sound = pivot > 0.0 && pivot < 1e300;
      if (!sound) break;
      double root = sqrt(pivot);
      __syncwarp();
      for (int i = j + lane; i < n; i += 32) m[(size_t)i * n + j] = i == j ? root : m[(size_t)i * n + j] / root;
      __syncwarp();
      for (int i = j + 1; i < n; i++) {
        double factor = m[(size_t)i * n + j];
        for (int c = j + 1 + lane; c <= i; c += 32) m[(size_t)i * n + c] -= factor * m[(size_t)c * n + j];
      }
      __syncwarp();
    }
    for (int i = 0; i < n && sound; i++) {
      double sum = 0;
      for (int c = lane; c < i; c += 32) sum += m[(size_t)i * n + c] * x[c];
      sum = warp_sum_f64(sum);
      if (lane == 0) x[i] = (x[i] - sum) / m[(size_t)i * n + i];
      __syncwarp();
    }
    for (int i = n - 1; i >= 0 && sound; i--) {
      double sum = 0;
      for (int c = i + 1 + lane; c < n; c += 32) sum += m[(size_t)c * n + i] * x[c];
      sum = warp_sum_f64(sum);
      if (lane == 0) x[i] = (x[i] - sum) / m[(size_t)i * n + i];
      __syncwarp();
    }
    for (int g = lane; g < n; g += 32) {
      float before = grid[row * n + g], found = sound ? round_to((float)x[g], form.scale_kind) : before;
      bool usable = is_finite(found) && found != 0.0f && (found > 0.0f) == (before > 0.0f);
      refitted[row * n + g] = usable ? found : before;
    }
  }
}

// Moves single codes while that lowers the loss, every column in order, `sweeps` times; gradient is H d' of the error d and follows. A
// lane owns every 32nd column. used: [cols, cols], own: its diagonal. Grid (tiles), block 256.
extern "C" __global__ void solve_sweep(u8* codes, float* gradient, double* losses, const float* grid, const u64* used, const u64* own, const Tile* tiles, Form form, int sweeps) {
  Tile tile = tiles[blockIdx.x];
  int cols = form.cols, groups = cols / form.group, lane = lane_id();
  float most = form.bits == 4 ? 15.0f : 255.0f;
  const float *h = (const float*)used[tile.moments], *diagonal = (const float*)own[tile.moments];
  for (int r = warp_id(); r < tile.rows; r += WARPS) {
    size_t row = tile.first + r;
    float* slope = gradient + row * cols;
    for (int sweep = 0; sweep < sweeps; sweep++) {
      double gain = 0;
      for (int first = 0; first < cols; first += 32) {
        int c = first + lane, from = 0;
        bool inside = c < cols;
        float energy = inside ? diagonal[c] : 1.0f, scale = inside ? grid[row * groups + c / form.group] : 1.0f;
        while (from < 32) {
          float moved = 0, step = 0, fall = 0, g = inside ? slope[c] : 0.0f;
          float wanted = __fdiv_rn(g, __fmul_rn(energy, scale));
          if (inside && lane >= from && fabsf(wanted) > 0.5f) {
            float code = (float)codes[row * cols + c];
            moved = fminf(fmaxf(code + roundf(wanted), 0.0f), most);
            step = __fmul_rn(moved - code, scale);
            fall = __fmul_rn(step, __fsub_rn(__fmul_rn(2.0f, g), __fmul_rn(step, energy)));
          }
          u32 moves = __ballot_sync(~0u, fall > 0.0f);
          if (!moves) break;
          int i = __ffs(moves) - 1;
          if (lane == i) codes[row * cols + c] = (u8)(int)moved;
          float e = -__shfl_sync(~0u, step, i);
          gain += (double)__shfl_sync(~0u, fall, i);
          const float* row_h = h + (size_t)(first + i) * cols;
          for (int k = lane; k < cols; k += 32) slope[k] = __fmaf_rn(e, row_h[k], slope[k]);
          from = i + 1;
        }
      }
      if (lane == 0) losses[row] -= gain;
      if (!(gain > 0.0)) break;
    }
  }
}

// Packs the rows: what feedback found where it left less than the weighted search, else the latter, whose scales are in `plain`. The
// lesser loss is left in `losses`. Grid (tiles), block 256.
extern "C" __global__ void solve_pack(u32* words, void* scales, double* losses, const double* before, const u8* codes, const float* grid, const float* plain, const float* src, const Tile* tiles, Form form, int fed) {
  Tile tile = tiles[blockIdx.x];
  int groups = form.cols / form.group, each = 32 / form.bits, num_words = form.cols / each;
  float half = half_of(form.bits);
  for (int r = warp_id(); r < tile.rows; r += WARPS) {
    size_t row = tile.first + r;
    bool better = fed && losses[row] < before[row];
    __syncwarp();
    if (lane_id() == 0 && !better) losses[row] = before[row];
    const float* used = (better ? grid : plain) + row * groups;
    for (int i = lane_id(); i < num_words; i += 32) {
      u32 word = 0;
      for (int j = 0; j < each; j++) {
        int c = i * each + j;
        u32 code = better ? codes[row * form.cols + c] : (u32)(int)(nearest(__fdiv_rn(src[row * form.cols + c], used[c / form.group]), half) + half);
        word |= code << (form.bits * j);
      }
      words[row * num_words + i] = word;
    }
    for (int g = lane_id(); g < groups; g += 32) {
      if (form.scale_kind == F32) ((float*)scales)[row * groups + g] = used[g];
      else ((u16*)scales)[row * groups + g] = form.scale_kind == F16 ? to_f16(used[g]) : (u16)(__float_as_uint(round_bf16(used[g])) >> 16);
    }
  }
}

// Diagonals of second moments, dst[set, cols]. Grid (cols / 256, sets), block 256. full 0: sums are the diagonal.
extern "C" __global__ void solve_energies(float* dst, const u64* sums, int cols, int full) {
  int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < cols) dst[(size_t)blockIdx.y * cols + c] = ((const float*)sums[blockIdx.y])[full ? (size_t)c * cols + c : c];
}

// Second moments, and what they become.
struct Prepared {
  const float* sums;      // [cols, cols], the lower triangle valid
  const float* energy;    // [cols]
  const int* order;       // [cols]
  float* used;            // [cols, cols]
  float* own;             // [cols], its diagonal
  double* square;         // [side, side], side the next multiple of 64
  double* inverse;        // [side, side]
  float* upper;           // [cols, cols]
  float* weight;          // [cols], in the order of visits
  float* cost;            // [cols], the same by column
  double scale, damping;  // off the diagonal, and added to it
};

// used = shrunk and damped moments; square = the same in reverse order of visits, padded with ones. *correlated: any product of two
// columns is not zero. Grid (side / 256, side, which), block 256.
extern "C" __global__ void solve_moments(const Prepared* sets, const int* which, int* correlated, int cols, int side) {
  const Prepared& p = sets[which[blockIdx.z]];
  int i = blockIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= side) return;
  double value = i == j ? 1.0 : 0.0;
  if (i < cols && j < cols) {
    float sum = p.sums[(size_t)max_int(i, j) * cols + min_int(i, j)];
    double damped = (double)p.energy[i] + p.damping;
    p.used[(size_t)i * cols + j] = i == j ? (float)damped : (float)((double)sum * p.scale);
    if (i == j) p.own[i] = (float)damped;
    if (i != j && sum != 0.0f) correlated[which[blockIdx.z]] = 1;
    int a = p.order[cols - 1 - i], b = p.order[cols - 1 - j];
    value = a == b ? (double)p.energy[a] + p.damping : (double)p.sums[(size_t)max_int(a, b) * cols + min_int(a, b)] * p.scale;
  }
  p.square[(size_t)i * side + j] = value;
}

typedef double Square[SIDE][SIDE + 1];
constexpr int SLICE = 16;
typedef double Slices[SLICE][SIDE + 2];

// sums[i][j] += sum over k < depth of a[4 y + i, k] times b[4 x + j, k], or b[k, 4 x + j] if b runs along columns; thread (x, y) of 16 x 16.
template <bool B_COLS>
DEV void multiply_f64(double (&sums)[4][4], const double* a, const double* b, int stride, int depth, Slices& a_sh, Slices& b_sh) {
  int x = threadIdx.x & 15, y = threadIdx.x >> 4, row = threadIdx.x >> 2, k4 = 4 * (threadIdx.x & 3);
  for (int k = 0; k < depth; k += SLICE) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; j++) {
      a_sh[k4 + j][row] = a[(size_t)row * stride + k + k4 + j];
      if (!B_COLS) b_sh[k4 + j][row] = b[(size_t)row * stride + k + k4 + j];
      else b_sh[y][4 * x + j] = b[(size_t)(k + y) * stride + 4 * x + j];
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < SLICE; s++) {
      double u[4], v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) u[i] = a_sh[s][4 * y + i], v[i] = b_sh[s][4 * x + i];
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] += u[i] * v[j];
    }
  }
  __syncthreads();
}

// Square j of the diagonal: its factor, and the inverse of that in the same place of `inverse`. failed[set] = 1 where there is none.
// Grid (which), block 256, shared 2 Squares.
extern "C" __global__ __launch_bounds__(256, 2) void solve_diagonal(const Prepared* sets, const int* which, int* failed, int side, int step) {
  extern __shared__ double squares_sh[];
  __shared__ Slices a_sh, b_sh;
  Square &s_sh = *(Square*)squares_sh, &x_sh = *((Square*)squares_sh + 1);
  const Prepared& p = sets[which[blockIdx.x]];
  int x = threadIdx.x & 15, y = threadIdx.x >> 4;
  double* own = p.square + ((size_t)step * side + step) * SIDE;
  const double* left = p.square + (size_t)step * SIDE * side;
  double sums[4][4] = {};
  multiply_f64<false>(sums, left, left, side, step * SIDE, a_sh, b_sh);
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) s_sh[4 * y + i][4 * x + j] = own[(size_t)(4 * y + i) * side + 4 * x + j] - sums[i][j];
  __syncthreads();
  for (int k = 0; k < SIDE; k++) {
    double pivot = s_sh[k][k];
    bool sound = pivot > 0.0 && pivot < 1e300;
    if (!sound && threadIdx.x == 0) failed[which[blockIdx.x]] = 1;
    double root = sound ? sqrt(pivot) : 1.0;
    __syncthreads();
    if (threadIdx.x < SIDE && threadIdx.x >= k) s_sh[threadIdx.x][k] = threadIdx.x == k ? root : s_sh[threadIdx.x][k] / root;
    __syncthreads();
    for (int at = threadIdx.x; at < SIDE * SIDE; at += blockDim.x) {
      int i = at / SIDE, j = at % SIDE;
      if (j > k && i >= j) s_sh[i][j] -= s_sh[i][k] * s_sh[j][k];
    }
    __syncthreads();
  }
  if (threadIdx.x < SIDE) {
    int c = threadIdx.x;
    for (int i = 0; i < SIDE; i++) {
      double sum = i == c ? 1.0 : 0.0;
      for (int m = c; m < i; m++) sum -= s_sh[i][m] * x_sh[m][c];
      x_sh[i][c] = i < c ? 0.0 : sum / s_sh[i][i];
    }
  }
  __syncthreads();
  double* inverse = p.inverse + ((size_t)step * side + step) * SIDE;
  for (int at = threadIdx.x; at < SIDE * SIDE; at += blockDim.x) {
    int i = at / SIDE, j = at % SIDE;
    own[(size_t)i * side + j] = j <= i ? s_sh[i][j] : 0.0;
    inverse[(size_t)i * side + j] = x_sh[i][j];
  }
}

// A square's sums from registers to shared memory, so that every thread can read them all.
DEV void spread(Square& to_sh, const double (&sums)[4][4]) {
  int x = threadIdx.x & 15, y = threadIdx.x >> 4;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) to_sh[4 * y + i][4 * x + j] = sums[i][j];
  __syncthreads();
}

// Squares below it: L = (A - L L') X', X the inverse of the diagonal's. Grid (squares below, which), block 256, shared 2 Squares.
extern "C" __global__ __launch_bounds__(256, 2) void solve_panel(const Prepared* sets, const int* which, int side, int step) {
  extern __shared__ double squares_sh[];
  __shared__ Slices a_sh, b_sh;
  Square &s_sh = *(Square*)squares_sh, &x_sh = *((Square*)squares_sh + 1);
  const Prepared& p = sets[which[blockIdx.y]];
  int x = threadIdx.x & 15, y = threadIdx.x >> 4, below = step + 1 + blockIdx.x;
  double* own = p.square + ((size_t)below * side + step) * SIDE;
  const double* inverse = p.inverse + ((size_t)step * side + step) * SIDE;
  double sums[4][4] = {};
  multiply_f64<false>(sums, p.square + (size_t)below * SIDE * side, p.square + (size_t)step * SIDE * side, side, step * SIDE, a_sh, b_sh);
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) sums[i][j] = own[(size_t)(4 * y + i) * side + 4 * x + j] - sums[i][j];
  for (int at = threadIdx.x; at < SIDE * SIDE; at += blockDim.x) x_sh[at / SIDE][at % SIDE] = inverse[(size_t)(at / SIDE) * side + at % SIDE];
  spread(s_sh, sums);
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) sums[i][j] = 0;
#pragma unroll 4
  for (int k = 0; k < SIDE; k++)
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] += s_sh[4 * y + i][k] * x_sh[4 * x + j][k];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) own[(size_t)(4 * y + i) * side + 4 * x + j] = sums[i][j];
}

// Row `step` of squares of the inverse: X = -X_own (sum of L X above). Grid (step, which), block 256, shared 2 Squares.
extern "C" __global__ __launch_bounds__(256, 2) void solve_inverse(const Prepared* sets, const int* which, int side, int step) {
  extern __shared__ double squares_sh[];
  __shared__ Slices a_sh, b_sh;
  Square &s_sh = *(Square*)squares_sh, &x_sh = *((Square*)squares_sh + 1);
  const Prepared& p = sets[which[blockIdx.y]];
  int x = threadIdx.x & 15, y = threadIdx.x >> 4, col = blockIdx.x;
  const double* own = p.inverse + ((size_t)step * side + step) * SIDE;
  double sums[4][4] = {};
  const double *left = p.square + ((size_t)step * side + col) * SIDE, *above = p.inverse + ((size_t)col * side + col) * SIDE;
  multiply_f64<true>(sums, left, above, side, (step - col) * SIDE, a_sh, b_sh);
  for (int at = threadIdx.x; at < SIDE * SIDE; at += blockDim.x) x_sh[at / SIDE][at % SIDE] = own[(size_t)(at / SIDE) * side + at % SIDE];
  spread(s_sh, sums);
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) sums[i][j] = 0;
#pragma unroll 4
  for (int k = 0; k < SIDE; k++)
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] -= x_sh[4 * y + i][k] * s_sh[k][4 * x + j];
  double* dst = p.inverse + ((size_t)step * side + col) * SIDE;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) dst[(size_t)(4 * y + i) * side + 4 * x + j] = sums[i][j];
}

// U / diag(U), zero up to the diagonal, and 1 / diag(U)^2, from the inverse in reverse order. Grid (cols / 256, cols, which), block 256.
extern "C" __global__ void solve_upper(const Prepared* sets, const int* which, int cols, int side) {
  const Prepared& p = sets[which[blockIdx.z]];
  int i = blockIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x, row = cols - 1 - i;
  if (j >= cols) return;
  double own = p.inverse[(size_t)row * side + row];
  p.upper[(size_t)i * cols + j] = j > i ? (float)(p.inverse[(size_t)row * side + cols - 1 - j] / own) : 0.0f;
  if (j == i) {
    float weight = (float)(1.0 / (own * own));
    p.weight[i] = weight;
    p.cost[p.order[i]] = weight;
  }
}
