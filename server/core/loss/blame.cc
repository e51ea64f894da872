#include "server/core/loss/blame.h"

#include <tuple>

namespace ringattn::server {

std::optional<int> RankToBlame(const std::vector<RankState>& ranks) {
  const RankState* blamed = nullptr;
  for (const RankState& state : ranks) {
    if (!state.silent) continue;
    if (blamed == nullptr || state.silence > blamed->silence) blamed = &state;
  }
  if (blamed != nullptr) return blamed->rank;

  const auto advance = [](const RankState& s) { return std::tie(s.step, s.progress, s.rank); };
  for (const RankState& state : ranks) {
    if (!state.owes_progress) continue;
    if (blamed == nullptr || advance(state) < advance(*blamed)) blamed = &state;
  }
  if (blamed == nullptr) return std::nullopt;
  return blamed->rank;
}

}  // namespace ringattn::server
