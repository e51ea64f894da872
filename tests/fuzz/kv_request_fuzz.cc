// For every CreateCache, OpenCache and ListCaches request, and for every StepBegin on the relay,
// reading stays inside the bytes and inside int64. An accepted request keeps every invariant that
// placement, memory accounting and kernels rely on. The first byte chooses the kind.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>
#include <variant>

#include "common/base/limits.h"
#include "common/kv/cache_spec.h"
#include "common/kv/placement.h"
#include "common/kv/shard_cut.h"
#include "common/kv/step.h"
#include "ringattn/v1/kv_cache.pb.h"
#include "server/edge/kv/kv_requests.h"

namespace {

using ringattn::KvCacheSpec;
using ringattn::KvPlacement;
using ringattn::Limits;
using ringattn::server::Caller;
using ringattn::server::Failure;

constexpr int kWorldSizes[] = {1, 2, 3, 4, 16};

void Require(bool condition) {
  if (!condition) std::abort();
}

void CheckFailure(const Failure& failure) {
  Require(failure.code != absl::StatusCode::kOk && failure.code != absl::StatusCode::kInternal);
  Require(!failure.reason.empty() && !failure.message.empty());
}

void CheckGroup(const ringattn::KvLayerGroup& group, const Limits& limits) {
  Require(!group.layers.empty());
  Require(group.num_kv_heads >= 1 && group.num_heads % group.num_kv_heads == 0);
  Require(group.head_dim >= 1 && group.head_dim <= limits.max_head_dim);
  Require(group.head_dim_v >= 1 && group.head_dim_v <= limits.max_head_dim);
  Require(std::isfinite(group.softmax_scale) && std::isfinite(group.softcap));
  Require(group.softcap >= 0 && group.window_left >= -1);
  Require(std::isfinite(static_cast<float>(group.softmax_scale)));
  Require(std::isfinite(static_cast<float>(group.softcap)));
  Require(group.sinks.empty() || static_cast<int64_t>(group.sinks.size()) ==
                                     static_cast<int64_t>(group.layers.size()) * group.num_heads);
}

void CheckPlacement(const KvCacheSpec& spec) {
  for (const int world_size : kWorldSizes) {
    const KvPlacement placement = PlaceKvCache(spec, world_size);
    Require(placement.world_size() == world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      Require(KvBytesOfRank(spec, placement, rank) > 0);
      for (const ringattn::KvLayerGroup& group : spec.groups) {
        const ringattn::KvHeadRange heads = KvHeadsOf(group, placement, rank);
        Require(0 <= heads.begin && heads.begin < heads.end && heads.end <= group.num_heads);
        Require((heads.kv_end - heads.kv_begin) * group.group_size() == heads.end - heads.begin);
      }
    }
  }
}

void CheckSpec(const KvCacheSpec& spec, const Limits& limits) {
  Require(!spec.groups.empty() && spec.planes() >= 1);
  Require(spec.blocks >= 1 && spec.blocks <= limits.max_kv_blocks);
  Require(spec.block_tokens >= 16 && spec.block_tokens <= 256);
  Require((spec.block_tokens & (spec.block_tokens - 1)) == 0);
  std::set<uint32_t> layers;
  for (const ringattn::KvLayerGroup& group : spec.groups) {
    CheckGroup(group, limits);
    for (const uint32_t layer : group.layers) Require(layers.insert(layer).second);
  }
  Require(static_cast<int64_t>(layers.size()) <= limits.max_kv_layers);
  CheckPlacement(spec);
  // What workers receive is the same cache.
  const auto again = ParseKvCacheSpec(ToProto(spec), limits);
  Require(again.ok() && *again == spec);
}

void CreateCache(const std::string& bytes, const Limits& limits) {
  ringattn::v1::CreateCacheRequest request;
  if (!request.ParseFromString(bytes)) return;
  const auto read = ringattn::server::ReadCreateCache(request, Caller(), limits);
  if (const auto* failure = std::get_if<Failure>(&read)) return CheckFailure(*failure);
  const auto& event = std::get<ringattn::server::KvCacheRequested>(read);
  CheckSpec(*event.spec, limits);
  Require(event.ttl > absl::ZeroDuration() && event.ttl <= limits.max_kv_ttl);
  Require(event.id.size() == ringattn::server::kKvCacheIdBytes);
  Require(event.members.size() <= static_cast<size_t>(limits.max_world_size));
  Require(!event.world_size ||
          (*event.world_size >= 1 && *event.world_size <= limits.max_world_size));
}

void OpenCache(const std::string& bytes) {
  ringattn::v1::OpenCacheRequest request;
  if (!request.ParseFromString(bytes)) return;
  const auto read = ringattn::server::ReadOpenCache(request, Caller());
  if (const auto* failure = std::get_if<Failure>(&read)) return CheckFailure(*failure);
  const auto& event = std::get<ringattn::server::KvWriterRequested>(read);
  Require(event.accepts_host_memory || event.accepts_direct || event.accepts_relay);
  Require(!event.token_seed.empty() && event.id == request.cache_id());
  Require(event.region_id == request.region_id());
}

void ListCaches(const std::string& bytes) {
  ringattn::v1::ListCachesRequest request;
  if (!request.ParseFromString(bytes)) return;
  const auto read = ringattn::server::ReadListCaches(request);
  if (const auto* failure = std::get_if<Failure>(&read)) return CheckFailure(*failure);
  const auto& page = std::get<ringattn::server::KvPage>(read);
  Require(page.size >= 1 && page.size <= 1000);
  Require(page.after.empty() || page.after.size() == ringattn::server::kKvCacheIdBytes);
}

// A cache whose steps are read: two groups, 4 by 2 ranks.
const KvCacheSpec& StepSpec() {
  static const auto* const spec = [] {
    ringattn::KvLayerGroup wide, narrow;
    wide.layers = {0, 1};
    wide.num_heads = 8;
    wide.num_kv_heads = 4;
    wide.head_dim = wide.head_dim_v = 128;
    narrow.layers = {2};
    narrow.num_heads = narrow.num_kv_heads = 4;
    narrow.head_dim = 64;
    narrow.head_dim_v = 32;
    auto* made = new KvCacheSpec;
    made->groups = {wide, narrow};
    made->blocks = 64;
    return made;
  }();
  return *spec;
}

void StepBegin(const std::string& bytes, const Limits& limits) {
  ringattn::v1::StepBegin begin;
  if (!begin.ParseFromString(bytes)) return;
  const auto step = ParseStep(begin, limits);
  if (!step.ok()) return CheckFailure(ringattn::server::KvRequestFailure(step.status()));
  Require(step->number >= 1);
  Require(static_cast<int64_t>(step->rows.size()) <= limits.max_step_rows);
  Require(step->q_tokens() >= 0 && step->q_tokens() <= limits.max_step_tokens);
  Require(step->append_tokens() >= 0 && step->append_tokens() <= limits.max_step_tokens);
  for (const ringattn::StepRow& row : step->rows) {
    Require(row.expected_length >= 0 && row.keep_length >= 0 && row.end() <= limits.max_tokens);
  }
  const auto again = ParseStep(ToProto(*step), limits);
  Require(again.ok() && *again == *step);
  const KvPlacement placement{4, 2};
  for (int group = 0; group < 2; ++group) {
    int64_t appended = 0;
    for (int rank = 0; rank < placement.world_size(); ++rank) {
      const ringattn::KvCallBytes of_rank = CallBytesOfRank(StepSpec(), placement, *step, group,
                                                            ringattn::v1::KV_OUTPUT_PARTIAL, rank);
      Require(of_rank.q >= 0 && of_rank.k >= 0 && of_rank.v >= 0 && of_rank.out >= 0);
      appended += of_rank.k;
    }
    const ringattn::KvCallBytes all =
        CallBytes(StepSpec(), *step, group, ringattn::v1::KV_OUTPUT_PARTIAL);
    Require(appended == all.k);  // every entry is on one position part
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  const Limits limits;
  switch (data[0] % 4) {
    case 0:
      CreateCache(bytes, limits);
      break;
    case 1:
      OpenCache(bytes);
      break;
    case 2:
      ListCaches(bytes);
      break;
    default:
      StepBegin(bytes, limits);
  }
  return 0;
}
