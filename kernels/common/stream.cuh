// Rows of a stored matrix from memory to shared memory without registers: bulk copies from sm_90, 16-byte copies before, counted by
// barriers in shared memory. One warp copies, others use: a tile is full when its bytes have arrived, its place empty when its users have left.
#pragma once
#include "base.cuh"

// Arrivals that make a tile full: of the copying warp's announcement, and before sm_90 of each of its lanes.
#if __CUDA_ARCH__ >= 900
static const int STREAM_ARRIVALS = 1;
#else
static const int STREAM_ARRIVALS = 33;
#endif

// Copies go by lines: what begins within one arrives later by a tenth (measured on an H200).
static const int COPY_LINE = 128;
__host__ DEV constexpr int whole_lines(int bytes) { return (bytes + COPY_LINE - 1) & ~(COPY_LINE - 1); }

DEV void barrier_init(u64* barrier_sh, int arrivals) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier_sh)), "r"(arrivals) : "memory"); }
// makes initialised barriers known to the copy engine; a block barrier follows
DEV void barrier_init_done() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
DEV void barrier_arrive(u32 barrier) { asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory"); }
DEV void barrier_arrive(u64* barrier_sh) { barrier_arrive(shared_address(barrier_sh)); }
DEV bool barrier_passed(u32 barrier, int parity) {
  u32 done;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#else
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#endif
  return done;
}
DEV bool barrier_passed(u64* barrier_sh, int parity) { return barrier_passed(shared_address(barrier_sh), parity); }
DEV void barrier_wait(u32 barrier, int parity) {
  while (!barrier_passed(barrier, parity)) {
  }
}
DEV void barrier_wait(u64* barrier_sh, int parity) { barrier_wait(shared_address(barrier_sh), parity); }

// By one warp: announces how many bytes come, then copies a contiguous run a lane (multiples of 16 bytes, 0 for none), then says that
// nothing more comes. What the warp stored in shared memory before the announcement is seen by whoever finds the tile full.
DEV void stream_expect(u64* barrier_sh, int bytes) {
  __syncwarp();
  if ((threadIdx.x & 31) != 0) return;
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier_sh)), "r"(bytes) : "memory");
#else
  barrier_arrive(barrier_sh);
#endif
}
DEV void stream_copies(u64* barrier_sh, char* dst_sh, const void* src, int bytes) {
#if __CUDA_ARCH__ >= 900
  if (bytes)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(dst_sh)), "l"(src), "r"(bytes), "r"(shared_address(barrier_sh)) : "memory");
#else
  for (u32 left = __ballot_sync(0xffffffffu, bytes != 0); left; left &= left - 1) {
    const int from = __ffs(left) - 1, n = __shfl_sync(0xffffffffu, bytes, from);
    char* to = (char*)__shfl_sync(0xffffffffu, (u64)dst_sh, from);
    const char* at = (const char*)__shfl_sync(0xffffffffu, (u64)src, from);
    for (int b = (threadIdx.x & 31) * 16; b < n; b += 512) copy_async_16(to + b, at + b);
  }
#endif
}
DEV void stream_done(u64* barrier_sh) {
#if __CUDA_ARCH__ < 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier_sh)) : "memory");
#endif
}
// From sm_90, by one thread, with a barrier of one arrival: bytes (multiples of 16) into shared memory, and from there to global memory.
DEV void stream_expect_one(u64* barrier_sh, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier_sh)), "r"(bytes) : "memory"); }
DEV void bulk_load(u64* barrier_sh, void* dst_sh, const void* src, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(dst_sh)), "l"(src), "r"(bytes), "r"(shared_address(barrier_sh)) : "memory");
}
DEV void bulk_store(void* dst, const void* src_sh, int bytes) { asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(shared_address(src_sh)), "r"(bytes) : "memory"); }
DEV void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// shared memory has been read; all but PENDING groups are written
DEV void bulk_read_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
template <int PENDING>
DEV void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory"); }
// Orders what this thread has seen arrive before the bulk copies that it asks for next; the second, what was done in shared memory alone, which
// takes no trip to L2.
DEV void stream_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
DEV void stream_fence_shared() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// a barrier of some warps of the block, named 1..15
DEV void team_barrier(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
// The same in two: warps that have used what others overwrite leave without waiting, those others wait. `threads` are all of both. By barriers of
// the block and not by arrivals counted in shared memory: a warp is one arrival with all its lanes, for which racecheck would take each lane's own.
DEV void leave(int name, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
DEV void await_left(int name, int threads) {
  __syncwarp();
  team_barrier(name, threads);
}
// Names of places that tiles pass through, eight at most.
static const int PLACES = 8;
// Until the last tiles of so many, which passed through `places` in turn, are left: no arrival outlives its block.
DEV void await_all_left(int tiles, int places, int threads) {
#pragma unroll 1
  for (int i = tiles > places ? tiles - places : 0; i < tiles; i++) await_left(PLACES + i % places, threads);
}
