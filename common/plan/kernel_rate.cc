#include "common/plan/kernel_rate.h"

#include <algorithm>

namespace ringattn {

const KernelRate* RateOf(const std::vector<KernelRate>& rates, const AttentionSpec& spec,
                         Direction direction) {
  for (const KernelRate& rate : rates) {
    if (rate.direction != direction) continue;
    if (rate.score_terms != HasScoreTerms(spec.options)) continue;
    const auto& dtypes = rate.dtypes;
    if (std::find(dtypes.begin(), dtypes.end(), spec.dtype) != dtypes.end()) return &rate;
  }
  return nullptr;
}

}  // namespace ringattn
