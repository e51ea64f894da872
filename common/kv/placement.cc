#include "common/kv/placement.h"

#include <algorithm>

#include "common/attention/tensors.h"

namespace ringattn {
namespace {

// Entries below `end` that position part `part` holds.
int64_t EntriesBelow(int64_t end, int64_t block_tokens, int position_parts, int part) {
  const int64_t round = block_tokens * position_parts;
  const int64_t begin_of_part = part * block_tokens;
  return end / round * block_tokens +
         std::clamp<int64_t>(end % round - begin_of_part, 0, block_tokens);
}

}  // namespace

KvPlacement PlaceKvCache(const KvCacheSpec& spec, int world_size) {
  int head_parts = world_size;
  const auto divides = [&](int parts) {
    return world_size % parts == 0 &&
           std::all_of(spec.groups.begin(), spec.groups.end(),
                       [&](const KvLayerGroup& group) { return group.num_kv_heads % parts == 0; });
  };
  while (!divides(head_parts)) --head_parts;  // ends at 1
  return {head_parts, world_size / head_parts};
}

KvHeadRange KvHeadsOf(const KvLayerGroup& group, const KvPlacement& placement, int rank) {
  const int64_t per_part = group.num_kv_heads / placement.head_parts;
  KvHeadRange range;
  range.kv_begin = placement.head_part(rank) * per_part;
  range.kv_end = range.kv_begin + per_part;
  range.begin = range.kv_begin * group.group_size();
  range.end = range.kv_end * group.group_size();
  return range;
}

int64_t EntriesOnPart(int64_t begin, int64_t end, int64_t block_tokens, int position_parts,
                      int part) {
  return EntriesBelow(end, block_tokens, position_parts, part) -
         EntriesBelow(begin, block_tokens, position_parts, part);
}

int64_t DividedBlockTokens(const KvCacheSpec& spec, const KvPlacement& placement) {
  if (spec.block_tokens % placement.position_parts != 0) return 0;
  const int64_t tokens = spec.block_tokens / placement.position_parts;
  return tokens < kMinKvBlockTokens ? 0 : tokens;
}

KvPlaneShape PlaneShapeOfRank(const KvCacheSpec& spec, const KvPlacement& placement, int plane) {
  KvPlaneShape shape;
  for (const KvLayerGroup& group : spec.groups) {
    if (plane >= static_cast<int64_t>(group.layers.size())) continue;
    const int64_t kv_heads = group.num_kv_heads / placement.head_parts;
    shape.k_elements = std::max(shape.k_elements, kv_heads * group.head_dim);
    shape.v_elements = std::max(shape.v_elements, kv_heads * group.head_dim_v);
  }
  return shape;
}

int64_t KvBytesOfRank(const KvCacheSpec& spec, const KvPlacement& placement, int rank) {
  int64_t bytes = 0;
  for (int plane = 0; plane < spec.planes(); ++plane) {
    const KvPlaneShape shape = PlaneShapeOfRank(spec, placement, plane);
    bytes += SaturatingProduct({spec.blocks, spec.block_tokens, shape.k_elements + shape.v_elements,
                                ElementBytes(spec.dtype)});
    bytes = std::min(bytes, kSaturatedBytes);
  }
  return bytes;
}

}  // namespace ringattn
