// Which experts run and for which tokens: written by router_topk, read by the expert kernels.
#pragma once
#include "base.cuh"

// One expert that at least one token chose. 96 bytes, aligned to 16.
struct ExpertSlot {
  const u32* gate_packed;  // [F, D / 8]
  const bf16* gate_scale;  // [F, D / G]
  const u32* up_packed;
  const bf16* up_scale;
  const u32* down_packed;  // [D, F / 8]
  const bf16* down_scale;  // [D, F / G]
  int expert;
  int first;     // of its pairs in the list
  int count;     // pairs
  int reserved;
  u16 pair[8];   // the first eight of them: token * K + rank
  u16 token[8];  // and their tokens
};
// pair n of an expert
DEV int slot_pair(const ExpertSlot& slot, const int* pairs, int n) { return n < 8 ? slot.pair[n] : pairs[slot.first + n]; }
