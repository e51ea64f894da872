// Formats the coordinator's status as JSON for the live page (docs/operations.md).
#ifndef RINGATTN_SERVER_EDGE_STATUS_STATUS_JSON_H_
#define RINGATTN_SERVER_EDGE_STATUS_STATUS_JSON_H_

#include <string>

#include "absl/time/time.h"
#include "common/base/limits.h"
#include "server/edge/status/status_board.h"

namespace ringattn::server {

// Values that are constant for the process.
struct StatusConstants {
  std::string version;
  absl::Time started_at;
  Limits limits;
};

// Returns at most 400 KiB, usually a tenth of that: snapshot and ring bound the rows, and external
// text is cut to 256 bytes. Pure.
std::string StatusJson(const StatusConstants& constants, const ServerStatus& status,
                       absl::Time now);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_STATUS_STATUS_JSON_H_
