#include "server/core/kv/kv_step_time.h"

#include <algorithm>

#include "common/attention/dtype.h"

namespace ringattn::server {

double PredictKvStepSeconds(const KvCacheSpec& spec, const KvPlacement& placement,
                            const KvWorkerRates& rates) {
  const double capacity = static_cast<double>(spec.blocks) *
                          static_cast<double>(EntriesPerTableEntry(spec, placement)) /
                          static_cast<double>(spec.groups.size());
  double seconds = 0;
  for (const KvLayerGroup& group : spec.groups) {
    const double seen = group.window_left < 0
                            ? capacity
                            : std::min(capacity, static_cast<double>(group.window_left) + 1);
    const double entries = seen / placement.position_parts;
    const auto dims = static_cast<double>(group.head_dim + group.head_dim_v);
    const auto heads = static_cast<double>(group.num_heads);
    const double bytes = entries * static_cast<double>(group.num_kv_heads) / placement.head_parts *
                         dims * static_cast<double>(ElementBytes(spec.dtype));
    const double products = entries * heads / placement.head_parts * dims * 2;
    double layer = bytes / rates.memory_bytes_per_second;
    if (rates.flops_per_second > 0) layer = std::max(layer, products / rates.flops_per_second);
    layer += kStepCallSeconds + kStepRankSeconds * (placement.world_size() - 1);
    if (placement.position_parts > 1) {
      const double results =
          placement.position_parts * heads * static_cast<double>(group.head_dim_v) * sizeof(float);
      layer += results / kMergedBytesPerSecond;
    }
    seconds += layer * static_cast<double>(group.layers.size());
  }
  return seconds;
}

}  // namespace ringattn::server
