// How fast kernels bring experts from page-locked host memory to the device: by method, blocks and bytes in flight, in bursts of a few
// experts, as a layer of a decode step asks for them. Then whether a kernel that waits for nothing holds up those behind it.
//
// usage: nvcc -O3 -std=c++17 -arch=sm_90 -o link benches/cuda/link.cu && ./link [GiB of host memory, default 8]
//
// GB/s of bursts of 1, 2, 4 and 64 experts of 2.4 MB each, from random places; a burst is one kernel of a graph of 200. `ce` is the copy
// engine, a call a burst. Last, how long a fence and what has none take on a multiprocessor that has so much of it in flight.
#include <cuda_runtime.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>
#include "../../kernels/common/stream.cuh"

#define OK(call)                                                                                     \
  do {                                                                                               \
    cudaError_t e_ = (call);                                                                         \
    if (e_ != cudaSuccess) printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)), exit(1); \
  } while (0)

static const int RUN = 2432 << 10;  // 2.43 MB, as of 2048 x 768 int4 g128

struct Burst {
  const char* from[64];
  char* to;
  int experts;
};

DEV void store_v4(void* p, const uint4& v) { asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
template <int HOW>
DEV uint4 load(const void* p) {
  uint4 r;
  if (HOW == 0) asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  if (HOW == 1) asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  if (HOW == 2) asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}

// pieces of 4 KB AHEAD in turn, a lane the next 16 bytes
template <int HOW, int AHEAD>
__global__ void __launch_bounds__(256) copy_loads(const __grid_constant__ Burst b) {
  const int line = blockDim.x * 16, piece = line * AHEAD, pieces = (RUN + piece - 1) / piece;
  for (int item = blockIdx.x; item < b.experts * pieces; item += gridDim.x) {
    const int e = item / pieces, first = (item - e * pieces) * piece + threadIdx.x * 16;
    uint4 v[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (first + i * line < RUN) v[i] = load<HOW>(b.from[e] + first + i * line);
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (first + i * line < RUN) store_v4(b.to + (size_t)e * RUN + first + i * line, v[i]);
  }
}

// one thread: bulk copies to shared memory and from there to the device, a ring of `stages`
__global__ void __launch_bounds__(32) copy_bulk(const __grid_constant__ Burst b, int bytes, int stages) {
  extern __shared__ uint4 ring_sh[];
  __shared__ u64 full_sh[32];
  const int pieces = (RUN + bytes - 1) / bytes, items = b.experts * pieces;
  if ((int)threadIdx.x < stages) barrier_init(full_sh + threadIdx.x, 1);
  barrier_init_done();
  __syncthreads();
  if (threadIdx.x != 0) return;
  auto ask = [&](int n) {
    const int item = blockIdx.x + n * gridDim.x, stage = n % stages;
    if (item >= items) return;
    const int e = item / pieces, at = (item - e * pieces) * bytes, size = min_int(bytes, RUN - at);
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(full_sh + stage)), "r"(size) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address((char*)ring_sh + stage * bytes)), "l"(b.from[e] + at), "r"(size), "r"(shared_address(full_sh + stage)) : "memory");
  };
  for (int n = 0; n < stages; n++) ask(n);
  for (int n = 0; (int)blockIdx.x + n * (int)gridDim.x < items; n++) {
    const int item = blockIdx.x + n * gridDim.x, stage = n % stages, e = item / pieces, at = (item - e * pieces) * bytes, size = min_int(bytes, RUN - at);
    barrier_wait(full_sh + stage, n / stages & 1);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(b.to + (size_t)e * RUN + at), "r"(shared_address((char*)ring_sh + stage * bytes)), "r"(size) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the stage may be filled again
    ask(n + stages);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// 16-byte copies to shared memory, two halves of a ring, plain stores from there
template <int LINES>
__global__ void __launch_bounds__(256) copy_async(const __grid_constant__ Burst b) {
  extern __shared__ uint4 ring_sh[];  // [2][LINES][256]
  const int piece = 4096 * LINES, pieces = (RUN + piece - 1) / piece, items = b.experts * pieces;
  auto ask = [&](int item, int half) {
    if (item < items) {
      const int e = item / pieces, first = (item - e * pieces) * piece + threadIdx.x * 16;
#pragma unroll
      for (int i = 0; i < LINES; i++)
        if (first + i * 4096 < RUN) copy_async_16(ring_sh + (half * LINES + i) * 256 + threadIdx.x, b.from[e] + first + i * 4096);
    }
    copy_async_commit();
  };
  ask(blockIdx.x, 0);
  int half = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x, half ^= 1) {
    ask(item + gridDim.x, half ^ 1);
    copy_async_wait<1>();
    const int e = item / pieces, first = (item - e * pieces) * piece + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < LINES; i++)
      if (first + i * 4096 < RUN) store_v4(b.to + (size_t)e * RUN + first + i * 4096, ring_sh[(half * LINES + i) * 256 + threadIdx.x]);
  }
}

static cudaStream_t stream;
static std::vector<char*> chunks;
static char* device_memory;
static size_t chunk_runs;

static Burst burst(int experts) {
  Burst b = {};
  b.experts = experts, b.to = device_memory;
  for (int i = 0; i < experts; i++) {
    const size_t r = ((size_t)rand() << 16 ^ rand()) % (chunks.size() * chunk_runs);
    b.from[i] = chunks[r / chunk_runs] + r % chunk_runs * RUN;
  }
  return b;
}

template <class F>
static double gb_s(int experts, F&& enqueue) {
  const int bursts = experts > 8 ? 8 : 200;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < bursts; i++) enqueue(burst(experts));
  OK(cudaStreamEndCapture(stream, &graph));
  OK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t a, b;
  OK(cudaEventCreate(&a));
  OK(cudaEventCreate(&b));
  float best = 1e30f;
  for (int i = 0; i < 4; i++) {
    OK(cudaEventRecord(a, stream));
    OK(cudaGraphLaunch(exec, stream));
    OK(cudaEventRecord(b, stream));
    OK(cudaEventSynchronize(b));
    float ms;
    OK(cudaEventElapsedTime(&ms, a, b));
    best = std::min(best, ms);
  }
  OK(cudaGraphExecDestroy(exec));
  OK(cudaGraphDestroy(graph));
  return (double)bursts * experts * RUN / best / 1e6;
}
template <class F>
static void row(const char* name, int blocks, int in_flight, F&& enqueue) {
  printf("%-26s %6d %9d KB ", name, blocks, in_flight >> 10);
  for (int experts : {1, 2, 4, 64}) printf(" %6.1f", gb_s(experts, enqueue));
  printf("\n");
  fflush(stdout);
}

// A chain of dependent launches: the first goes on for `us` after it has let the second start, which waits for nothing; the third waits.
__global__ void chain_first(u64* out, int us) {
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
  const u64 start = global_time();
  if (threadIdx.x == 0) out[0] = start;
  while (global_time() < start + us * 1000ull) {
  }
  if (threadIdx.x == 0) out[1] = global_time();
}
__global__ void chain_second(u64* out) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x == 0) out[2] = global_time();
}
__global__ void chain_waits(u64* out) {
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x == 0) out[0] = global_time();
}
template <class... A>
static void dependent(void (*kernel)(A...), A... args) {
  cudaLaunchConfig_t c = {};
  c.gridDim = dim3(16), c.blockDim = dim3(64), c.stream = stream;
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  at[0].val.programmaticStreamSerializationAllowed = 1;
  c.attrs = at, c.numAttrs = 1;
  OK(cudaLaunchKernelEx(&c, kernel, args...));
}
static void chain() {
  u64* out;
  OK(cudaMalloc(&out, 64 * sizeof(u64)));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  chain_waits<<<16, 64, 0, stream>>>(out + 32);
  dependent(chain_first, out, 300);
  dependent(chain_second, out);
  for (int i = 3; i < 9; i++) dependent(chain_waits, out + i);
  OK(cudaStreamEndCapture(stream, &graph));
  OK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; i++) OK(cudaGraphLaunch(exec, stream));
  OK(cudaStreamSynchronize(stream));
  u64 t[9];
  OK(cudaMemcpy(t, out, sizeof t, cudaMemcpyDeviceToHost));
  printf("chain, us after the first began: it ended %.1f, the second (waits for nothing) began %.1f, those that wait began", (t[1] - t[0]) / 1e3, (t[2] - t[0]) / 1e3);
  for (int i = 3; i < 9; i++) printf(" %.1f", ((double)t[i] - (double)t[0]) / 1e3);
  printf("\n%s\n", t[3] < t[1] ? "=> a kernel that waits for nothing lets those behind it pass the one ahead of it" : "=> those behind wait for the one ahead all the same");
}

// Warps below `stages` copy pieces of 16 KB, one thread each, until the last warp has timed each operation 200 times: cycles, mean and most.
enum { LOAD, FENCE, RELEASE, RELAXED, ACQUIRE, BULK, OPERATIONS };
struct Fences {
  const char* from;
  char* to;
  int* words;
  long long* cycles;  // [blocks][OPERATIONS][2]
  int stages, copies;
};
__global__ void __launch_bounds__(256) fences(const __grid_constant__ Fences a) {
  const int PIECE = 16384, TIMES = 200;
  extern __shared__ uint4 ring_sh[];
  __shared__ u64 full_sh[8], own_sh;
  __shared__ volatile int stop_sh;
  const int warp = threadIdx.x >> 5;
  if (threadIdx.x < 8) barrier_init(full_sh + threadIdx.x, 1);
  if (threadIdx.x == 0) barrier_init(&own_sh, 1), stop_sh = 0;
  barrier_init_done();
  __syncthreads();
  if ((threadIdx.x & 31) != 0) return;
  if (warp < a.stages && a.copies) {
    char* stage_sh = (char*)ring_sh + (1 + warp) * PIECE;
    for (int n = 0; !stop_sh; n++) {
      const size_t at = (((size_t)n * gridDim.x + blockIdx.x) * a.stages + warp) * PIECE % (1 << 30);
      stream_expect_one(full_sh + warp, PIECE);
      bulk_load(full_sh + warp, stage_sh, a.from + at, PIECE);
      barrier_wait(full_sh + warp, n & 1);
      bulk_store(a.to + at % (64ull * RUN / PIECE * PIECE), stage_sh, PIECE);
      bulk_commit();
      bulk_read_wait();
    }
    bulk_wait<0>();
  }
  if (warp != 7) return;
  for (const u64 start = global_time(); global_time() < start + 200000;) {
  }
  int parity = 0, keep = 0;
  for (int what = 0; what < OPERATIONS; what++) {
    int* word = a.words + (blockIdx.x * OPERATIONS + what) * 64;
    long long sum = 0, most = 0;
    for (int i = 0; i < TIMES; i++) {
      const char* cold = a.to + ((size_t)(blockIdx.x * OPERATIONS + what) * TIMES + i) % 8192 * 8192;
      const long long start = clock64();
      if (what == FENCE || what == RELEASE) *(volatile int*)(word + 32) = i;
      if (what == LOAD) keep += __ldcg((const int*)cold);
      if (what == FENCE) __threadfence();
      if (what == RELEASE) add_release(word, 1);
      if (what == RELAXED) keep += atomicAdd(word, 1);
      if (what == ACQUIRE) keep += load_acquire(word);
      if (what == BULK) stream_expect_one(&own_sh, 2048), bulk_load(&own_sh, ring_sh, cold, 2048), barrier_wait(&own_sh, parity), parity ^= 1;
      if (keep == -1) stop_sh = 2;
      const long long took = clock64() - start;
      sum += took, most = took > most ? took : most;
    }
    long long* out = a.cycles + (blockIdx.x * OPERATIONS + what) * 2;
    out[0] = sum / TIMES, out[1] = most;
  }
  stop_sh = 1;
}
static void fence_rows() {
  Fences a = {chunks[0], device_memory};
  const int most_blocks = 32;
  const size_t words = (size_t)most_blocks * OPERATIONS * 64 * sizeof(int), cycles = most_blocks * OPERATIONS * 2 * sizeof(long long);
  int khz;
  OK(cudaMalloc(&a.words, words));
  OK(cudaMemset(a.words, 0, words));
  OK(cudaMallocManaged(&a.cycles, cycles));
  OK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
  OK(cudaFuncSetAttribute(fences, cudaFuncAttributeMaxDynamicSharedMemorySize, 9 * 16384));
  printf("\nus on a multiprocessor that copies, mean and most, at %d MHz\n%6s %12s %14s %14s %14s %14s %14s %14s\n", khz / 1000, "blocks", "in flight", "load", "fence", "red.release", "atomic", "ld.acquire", "bulk of 2 KB");
  const int rows[][3] = {{12, 4, 0}, {12, 2, 1}, {12, 4, 1}, {24, 4, 1}, {4, 6, 1}};
  for (const auto& r : rows) {
    a.stages = r[1], a.copies = r[2];
    fences<<<r[0], 256, (1 + r[1]) * 16384, stream>>>(a);
    OK(cudaStreamSynchronize(stream));
    printf("%6d %9d KB", r[0], r[2] * r[0] * r[1] * 16);
    for (int what = 0; what < OPERATIONS; what++) {
      double mean = 0, most = 0;
      for (int b = 0; b < r[0]; b++) mean += a.cycles[(b * OPERATIONS + what) * 2] / (double)r[0], most = std::max(most, (double)a.cycles[(b * OPERATIONS + what) * 2 + 1]);
      printf(" %7.2f %6.1f", mean * 1e3 / khz, most * 1e3 / khz);
    }
    printf("\n");
  }
}

int main(int argc, char** argv) {
  const size_t gib = argc > 1 ? atoi(argv[1]) : 8;
  OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  chain();
  const size_t chunk = 1ull << 30;
  chunk_runs = chunk / RUN;
  for (size_t i = 0; i < gib; i++) {
    char* p;
    OK(cudaHostAlloc((void**)&p, chunk, cudaHostAllocMapped | cudaHostAllocPortable));
    chunks.push_back(p);
  }
  OK(cudaMalloc(&device_memory, 64ull * RUN));
  OK(cudaFuncSetAttribute(copy_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, 6 * 32768));
  OK(cudaFuncSetAttribute(copy_async<8>, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
  printf("%zu GiB of host memory; GB/s of bursts of 1, 2, 4, 64 experts of %.2f MB\n%-26s %6s %12s\n", gib, RUN / 1e6, "method", "blocks", "in flight");
  row("ce", 0, 0, [&](const Burst& b) {
    for (int e = 0; e < b.experts; e++) OK(cudaMemcpyAsync(b.to + (size_t)e * RUN, b.from[e], RUN, cudaMemcpyHostToDevice, stream));
  });
  for (int blocks : {8, 16, 32, 64, 132, 264}) {
    row("loads 256 B, 4", blocks, blocks * 16384, [&](const Burst& b) { copy_loads<0, 4><<<blocks, 256, 0, stream>>>(b); });
    row("loads 256 B, 8", blocks, blocks * 32768, [&](const Burst& b) { copy_loads<0, 8><<<blocks, 256, 0, stream>>>(b); });
    row("loads 256 B, 16", blocks, blocks * 65536, [&](const Burst& b) { copy_loads<0, 16><<<blocks, 256, 0, stream>>>(b); });
  }
  for (int blocks : {16, 64, 132}) {
    row("loads, 8", blocks, blocks * 32768, [&](const Burst& b) { copy_loads<1, 8><<<blocks, 256, 0, stream>>>(b); });
    row("loads volatile, 8", blocks, blocks * 32768, [&](const Burst& b) { copy_loads<2, 8><<<blocks, 256, 0, stream>>>(b); });
    row("16-byte async, 2 x 32 KB", blocks, blocks * 65536, [&](const Burst& b) { copy_async<8><<<blocks, 256, 65536, stream>>>(b); });
  }
  for (int blocks : {4, 8, 16, 32, 64, 132})
    for (int bytes : {2048, 8192, 32768})
      for (int stages : {2, 4, 6}) {
        if (bytes * stages > 200000) continue;
        char name[64];
        snprintf(name, sizeof name, "bulk %d KB x %d", bytes >> 10, stages);
        row(name, blocks, blocks * bytes * stages, [&](const Burst& b) { copy_bulk<<<blocks, 32, bytes * stages, stream>>>(b, bytes, stages); });
      }
  fence_rows();
  return 0;
}
