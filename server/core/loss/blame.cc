#include "server/core/loss/blame.h"

#include <tuple>

namespace ringattn::server {

std::optional<int> RankToBlame(const std::vector<Standing>& standings) {
  const Standing* blamed = nullptr;
  for (const Standing& standing : standings) {
    if (!standing.silent) continue;
    if (blamed == nullptr || standing.silence > blamed->silence) blamed = &standing;
  }
  if (blamed != nullptr) return blamed->rank;

  const auto advance = [](const Standing& s) { return std::tie(s.step, s.progress, s.rank); };
  for (const Standing& standing : standings) {
    if (!standing.owes_progress) continue;
    if (blamed == nullptr || advance(standing) < advance(*blamed)) blamed = &standing;
  }
  if (blamed == nullptr) return std::nullopt;
  return blamed->rank;
}

}  // namespace ringattn::server
