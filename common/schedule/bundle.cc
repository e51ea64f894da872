#include "common/schedule/bundle.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace ringattn {

BundleTensor& Bundle::Of(TensorId id) {
  const auto tensor =
      std::find_if(tensors.begin(), tensors.end(),
                   [id](const BundleTensor& candidate) { return candidate.id == id; });
  assert(tensor != tensors.end());
  return *tensor;
}

Bundle KvBundle(const AttentionSpec& spec, std::vector<std::string> slot_names) {
  const std::vector<BufferId> none(slot_names.size(), kNoBuffer);
  Bundle bundle{std::move(slot_names), {}};
  for (TensorId id : {TensorId::kK, TensorId::kV}) {
    bundle.tensors.push_back({id, LayoutOf(spec, id).inner_bytes, none});
  }
  if (spec.options.segment_ids) {
    const TensorId ids = TensorId::kKvSegmentIds;
    bundle.tensors.push_back({ids, LayoutOf(spec, ids).inner_bytes, none});
  }
  return bundle;
}

Bundle KvGradientBundle(const AttentionSpec& spec, std::vector<std::string> slot_names) {
  const std::vector<BufferId> none(slot_names.size(), kNoBuffer);
  Bundle bundle{std::move(slot_names), {}};
  for (TensorId id : {TensorId::kDk, TensorId::kDv}) {
    const int64_t elements = LayoutOf(spec, id).inner_bytes / ElementBytes(DTypeOf(spec, id));
    bundle.tensors.push_back({id, elements * ElementBytes(DType::kFloat32), none});
  }
  return bundle;
}

}  // namespace ringattn
