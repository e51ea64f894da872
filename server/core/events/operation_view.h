// OperationView: the state of one request as GetStatus and Progress report it.
#ifndef RINGATTN_SERVER_CORE_EVENTS_OPERATION_VIEW_H_
#define RINGATTN_SERVER_CORE_EVENTS_OPERATION_VIEW_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/core/events/events.h"

namespace ringattn::server {

struct OperationView {
  std::string request_id;
  std::string principal;
  v1::RequestState state = v1::REQUEST_STATE_UNSPECIFIED;
  uint64_t generation = 0;
  std::shared_ptr<const Plan> plan;  // without spans (plan_summary.h); null: not planned
  std::vector<std::string> members;
  std::optional<Failure> failure;
  // While it computes: the fraction of its work that the least advanced member has done.
  double computed_fraction = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_OPERATION_VIEW_H_
