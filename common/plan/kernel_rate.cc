#include "common/plan/kernel_rate.h"

#include <algorithm>

namespace ringattn {

bool RequestKind::Covers(int64_t head_dim, int64_t head_dim_v) const {
  const int64_t larger = std::max(head_dim, head_dim_v);
  return min_head_dim <= larger && larger <= max_head_dim && head_dim % head_dim_multiple == 0 &&
         head_dim_v % head_dim_multiple == 0;
}

const KernelRate* RateOf(const std::vector<KernelRate>& rates, const AttentionSpec& spec,
                         Direction direction) {
  const bool terms = HasScoreTerms(spec.options);
  const bool softcap = spec.options.softcap > 0;
  const KernelRate* best = nullptr;
  for (const KernelRate& rate : rates) {
    const RequestKind& kind = rate.kind;
    if (rate.direction != direction || kind.score_terms != terms) continue;
    if (kind.deterministic.value_or(spec.options.deterministic) != spec.options.deterministic) {
      continue;
    }
    if (kind.softcap.value_or(softcap) != softcap) continue;
    if (!kind.Covers(spec.shape.head_dim, spec.shape.head_dim_v)) continue;
    const auto& dtypes = rate.dtypes;
    if (std::find(dtypes.begin(), dtypes.end(), spec.dtype) == dtypes.end()) continue;
    if (best == nullptr || kind.head_dim_multiple > best->kind.head_dim_multiple) best = &rate;
  }
  return best;
}

}  // namespace ringattn
