#include "common/plan/kernel_rate.h"

#include <algorithm>

namespace ringattn {

const KernelRate* RateOf(const std::vector<KernelRate>& rates, const AttentionSpec& spec,
                         Direction direction) {
  // Backward kernels that sum in a fixed order are those of score terms, on devices where others
  // do not.
  const bool fixed_order = spec.options.deterministic && direction == Direction::kBackward;
  const bool terms = HasScoreTerms(spec.options) || fixed_order;
  for (const KernelRate& rate : rates) {
    if (rate.direction != direction) continue;
    if (rate.score_terms != terms) continue;
    const auto& dtypes = rate.dtypes;
    if (std::find(dtypes.begin(), dtypes.end(), spec.dtype) != dtypes.end()) return &rate;
  }
  return nullptr;
}

}  // namespace ringattn
