// The failure of a message that the client must not send.
#ifndef RINGATTN_SERVER_EDGE_DATA_BAD_CHUNK_H_
#define RINGATTN_SERVER_EDGE_DATA_BAD_CHUNK_H_

#include <string>
#include <utility>

#include "server/core/events/failure.h"

namespace ringattn::server {

// `field`: "chunk", or a field of it.
inline Failure BadChunk(std::string field, std::string message) {
  Failure failure;
  failure.code = absl::StatusCode::kInvalidArgument;
  failure.reason = "BAD_CHUNK";
  failure.field = std::move(field);
  failure.message = std::move(message);
  return failure;
}

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_BAD_CHUNK_H_
