// KvPlacement: how the ranks of a cache divide it. Kv heads first, then positions, because ranks
// with different heads exchange and merge nothing.
//
//   W = G * S ranks; rank = head_part * S + position_part
//   rank's kv heads of a group:  [head_part * Hkv / G, (head_part + 1) * Hkv / G)
//   rank's entries:              p with (p / block_tokens) mod S = position_part
//
// G is the largest divisor of W that divides num_kv_heads of every group.
#ifndef RINGATTN_COMMON_KV_PLACEMENT_H_
#define RINGATTN_COMMON_KV_PLACEMENT_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/kv/cache_spec.h"

namespace ringattn {

struct KvPlacement {
  int head_parts = 1;
  int position_parts = 1;

  int world_size() const { return head_parts * position_parts; }
  int head_part(int rank) const { return rank / position_parts; }
  int position_part(int rank) const { return rank % position_parts; }
  bool operator==(const KvPlacement&) const = default;
};

// REQUIRES: world_size >= 1.
KvPlacement PlaceKvCache(const KvCacheSpec& spec, int world_size);

// Heads of a group that a rank holds.
struct KvHeadRange {
  int64_t kv_begin = 0, kv_end = 0;  // kv heads
  int64_t begin = 0, end = 0;        // query heads
};
KvHeadRange KvHeadsOf(const KvLayerGroup& group, const KvPlacement& placement, int rank);

// Entries in [begin, end) of a sequence that position part `part` holds.
int64_t EntriesOnPart(int64_t begin, int64_t end, int64_t block_tokens, int position_parts,
                      int part);

// With S position parts one table entry stands for S blocks, one per part, so `blocks` of the spec
// counts table entries, and a table entry covers S * block_tokens sequence entries.
inline int64_t EntriesPerTableEntry(const KvCacheSpec& spec, const KvPlacement& placement) {
  return spec.block_tokens * placement.position_parts;
}

// The entries of a part's block if the parts divide the blocks of `spec`: a table entry then covers
// spec.block_tokens entries, as without parts. 0 if the parts cannot: a part's block must have at
// least kMinKvBlockTokens entries, and a power of two.
int64_t DividedBlockTokens(const KvCacheSpec& spec, const KvPlacement& placement);

// Row sizes of one plane of a rank, in elements: kv heads times dims of the widest group with a
// layer on that plane. K and V of a plane are two arrays of [blocks * block_tokens] such rows, so a
// run of blocks of the widest group is contiguous.
struct KvPlaneShape {
  int64_t k_elements = 0;
  int64_t v_elements = 0;
};
KvPlaneShape PlaneShapeOfRank(const KvCacheSpec& spec, const KvPlacement& placement, int plane);

// Device memory that a rank's K and V take; saturates at kSaturatedBytes. The sum over planes of
//   blocks * block_tokens * (k_elements + v_elements) * element size
int64_t KvBytesOfRank(const KvCacheSpec& spec, const KvPlacement& placement, int rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_KV_PLACEMENT_H_
