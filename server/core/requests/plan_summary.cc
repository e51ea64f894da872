#include "server/core/requests/plan_summary.h"

#include <algorithm>
#include <vector>

namespace ringattn::server {
namespace {

std::vector<Shard> Summary(const std::vector<Shard>& shards) {
  std::vector<Shard> summary;
  summary.reserve(shards.size());
  for (const Shard& shard : shards) {
    const int64_t rows = RowsIn(shard);
    summary.push_back(rows == 0 ? Shard{} : Shard{{0, rows, 1}});
  }
  return summary;
}

int64_t ShardListBytes(const std::vector<Shard>& shards) {
  size_t bytes = shards.capacity() * sizeof(Shard);
  for (const Shard& shard : shards) bytes += shard.capacity() * sizeof(Span);
  return static_cast<int64_t>(bytes);
}

}  // namespace

Plan WithoutSpans(Plan plan) {
  plan.spans = 0;
  for (const std::vector<Shard>* shards : {&plan.shards.q, &plan.shards.kv}) {
    for (const Shard& shard : *shards) plan.spans += static_cast<int64_t>(shard.size());
  }
  plan.shards.q = Summary(plan.shards.q);
  plan.shards.kv = Summary(plan.shards.kv);
  plan.shards.chosen.clear();
  return plan;
}

ShardPlan ShardsOf(const Plan& plan, const AttentionSpec& spec) {
  return MakeShardPlan(spec, plan.recipe, plan.shards.world_size);
}

int64_t LargestBuffers(const Plan& plan) {
  return *std::max_element(plan.buffer_bytes.begin(), plan.buffer_bytes.end());
}

int64_t BytesOf(const Plan& plan) {
  const size_t per_rank = plan.buffer_bytes.capacity() + plan.workspace_bytes.capacity() +
                          plan.tiles.capacity() + plan.sent_bytes.capacity();
  return static_cast<int64_t>(sizeof(Plan) + per_rank * sizeof(int64_t) + plan.reason.capacity()) +
         ShardListBytes(plan.shards.q) + ShardListBytes(plan.shards.kv) +
         ShardListBytes(plan.shards.chosen);
}

}  // namespace ringattn::server
