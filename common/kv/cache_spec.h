// KvCacheSpec: a validated description of a K/V cache, and the arithmetic of its memory.
//
// Pure values; no I/O. Everything after ParseKvCacheSpec may trust the fields.
#ifndef RINGATTN_COMMON_KV_CACHE_SPEC_H_
#define RINGATTN_COMMON_KV_CACHE_SPEC_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/attention/dtype.h"
#include "common/base/limits.h"
#include "ringattn/v1/kv_cache.pb.h"

namespace ringattn {

// Layers of one shape and one mask.
struct KvLayerGroup {
  std::vector<uint32_t> layers;  // the model's numbers; layer i of the list is on plane i
  int64_t num_heads = 1;
  int64_t num_kv_heads = 1;  // divides num_heads
  int64_t head_dim = 1;      // 1..Limits::max_kv_head_dim
  int64_t head_dim_v = 1;
  double softmax_scale = 1;  // resolved
  double softcap = 0;        // 0: none
  // Entries that a query sees before its own; -1: all. Below kUnboundedBand.
  int64_t window_left = -1;
  bool causal = true;
  std::vector<float> sinks;  // empty, or [layers.size(), num_heads], natural log

  int64_t group_size() const { return num_heads / num_kv_heads; }
  bool operator==(const KvLayerGroup&) const = default;
};

// Accepted entries of a block: powers of two.
inline constexpr int64_t kMinKvBlockTokens = 16;
inline constexpr int64_t kMaxKvBlockTokens = 256;

enum class KvNumbering : uint8_t { kSequences = 0, kBlocks = 1 };

struct KvCacheSpec {
  std::vector<KvLayerGroup> groups;  // at least one
  DType dtype = DType::kFloat32;     // of q, k, v and out
  int64_t block_tokens = 64;         // 16..256, a power of two
  int64_t blocks = 0;                // per plane; 1..Limits::max_kv_blocks
  KvNumbering numbering = KvNumbering::kSequences;
  std::string label;

  // Layers of the longest group.
  int64_t planes() const;
  bool operator==(const KvCacheSpec&) const = default;
};

// Where a layer's K and V are: plane `plane`, with the shape of group `group`.
struct KvLayerLocation {
  int group = 0;
  int plane = 0;
  bool operator==(const KvLayerLocation&) const = default;
};

// Nothing for a layer that no group has.
std::optional<KvLayerLocation> FindLayer(const KvCacheSpec& spec, uint32_t layer);

// Errors: INVALID_ARGUMENT, RESOURCE_EXHAUSTED (a limit) or UNIMPLEMENTED (latent_rank, storage).
// The message starts with the field, e.g. "spec.groups[1].num_kv_heads is 3; it must divide
// num_heads, 8".
absl::StatusOr<KvCacheSpec> ParseKvCacheSpec(const v1::KvCacheSpec& spec, const Limits& limits);

// The inverse, with all defaults resolved.
v1::KvCacheSpec ToProto(const KvCacheSpec& spec);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_KV_CACHE_SPEC_H_
