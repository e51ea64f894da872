#include "server/core/requests/worker_capabilities.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "common/request/option_fields.h"
#include "server/core/requests/client_failures.h"

namespace ringattn::server {
namespace {

using Values = google::protobuf::RepeatedField<uint32_t>;

std::optional<Failure> CheckTuning(const v1::Register& worker, const char* name, int32_t value,
                                   const Values& offered) {
  if (value == 0) return std::nullopt;
  if (std::find(offered.begin(), offered.end(), static_cast<uint32_t>(value)) != offered.end()) {
    return std::nullopt;
  }
  return TuningNotOffered(name, value, absl::StrJoin(offered, ", "), worker.device(),
                          worker.name());
}

}  // namespace

bool MayServe(const PlanChoice& choice, const std::string& worker) {
  const std::vector<std::string>& named = choice.members;
  return named.empty() || std::find(named.begin(), named.end(), worker) != named.end();
}

std::optional<Failure> CheckServedBy(const v1::Register& worker, const AttentionSpec& spec,
                                     const PlanChoice& choice) {
  for (const std::string& field : DeviceFieldsOf(spec)) {
    const auto& served = worker.options();
    if (std::find(served.begin(), served.end(), field) == served.end()) {
      return OptionNotServed(field, worker.device(), worker.name());
    }
  }
  const v1::TuningChoices& offer = worker.tuning();
  const Tuning& tuning = choice.tuning;
  if (auto why = CheckTuning(worker, "tile_q", tuning.tile_q, offer.tile_q())) return why;
  if (auto why = CheckTuning(worker, "tile_kv", tuning.tile_kv, offer.tile_kv())) return why;
  return CheckTuning(worker, "key_splits", tuning.key_splits, offer.key_splits());
}

}  // namespace ringattn::server
