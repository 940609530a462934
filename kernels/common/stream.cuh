// Rows of a stored matrix from memory to shared memory without registers: bulk copies from sm_90, 16-byte copies before, both
// counted by a barrier in shared memory.
#pragma once
#include "base.cuh"

#if __CUDA_ARCH__ >= 900
static const int STREAM_ARRIVALS = 1;
#else
static const int STREAM_ARRIVALS = 32;
#endif

DEV void stream_init(u64* barrier_sh) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier_sh)), "r"(STREAM_ARRIVALS) : "memory"); }
// makes initialised barriers known to the copy engine; a block barrier follows
DEV void stream_init_done() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
DEV bool stream_arrived(u64* barrier_sh, int parity) {
  u32 done;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(shared_address(barrier_sh)), "r"(parity) : "memory");
#else
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(shared_address(barrier_sh)), "r"(parity) : "memory");
#endif
  return done;
}
DEV void stream_wait(u64* barrier_sh, int parity) {
  while (!stream_arrived(barrier_sh, parity)) {
  }
}
// Row stride in shared memory. Whole rows come as one block and keep their stride; pieces of rows get one that is 64 mod 128,
// so that eight rows of four lanes hit all banks.
DEV int stream_stride(int bytes, int row_bytes) { return bytes == row_bytes ? bytes : ((bytes + 127) & ~127) + 64; }

// One warp copies `bytes` (a multiple of 16) from each of sixteen rows, the last valid one again past the end; the barrier
// completes one phase once stream_expect has said how many bytes it has and stream_arrive has followed the last piece.
DEV int stream_bytes(u32 src_stride, int rows, int bytes) { return bytes == (int)src_stride ? bytes * min_int(rows, 16) : bytes * 16; }
DEV void stream_expect(u64* barrier_sh, int phase_bytes) {
#if __CUDA_ARCH__ >= 900
  if ((threadIdx.x & 31) == 0) asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier_sh)), "r"(phase_bytes) : "memory");
  __syncwarp();
#endif
}
DEV void stream_rows(u64* barrier_sh, char* dst_sh, int dst_stride, const char* src, u32 src_stride, int rows, int bytes) {
  const int lane = threadIdx.x & 31;
#if __CUDA_ARCH__ >= 900
  const int pieces = bytes == (int)src_stride ? 1 : 16, size = pieces == 1 ? bytes * min_int(rows, 16) : bytes;
  if (lane == 0)
#pragma unroll 1
    for (int r = 0; r < pieces; r++)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(dst_sh + r * dst_stride)),
                   "l"(src + (u64)min_int(r, rows - 1) * src_stride), "r"(size), "r"(shared_address(barrier_sh))
                   : "memory");
#else
  for (int r = 0; r < 16; r++)
    for (int b = lane * 16; b < bytes; b += 512) copy_async_16(dst_sh + r * dst_stride + b, src + (u64)min_int(r, rows - 1) * src_stride + b);
#endif
}
DEV void stream_arrive(u64* barrier_sh) {
#if __CUDA_ARCH__ < 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier_sh)) : "memory");
#endif
}
// One warp copies a contiguous run, a multiple of 16 bytes; one lane of it issues where the copy engine works.
DEV void stream_copy(u64* barrier_sh, char* dst_sh, const void* src, int bytes, int by) {
#if __CUDA_ARCH__ >= 900
  if ((threadIdx.x & 31) == (u32)(by & 31))
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(dst_sh)), "l"(src), "r"(bytes), "r"(shared_address(barrier_sh)) : "memory");
#else
  for (int b = (threadIdx.x & 31) * 16; b < bytes; b += 512) copy_async_16(dst_sh + b, (const char*)src + b);
#endif
}
