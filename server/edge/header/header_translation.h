// Translates a Forward or Backward header from protobuf to the values that common/request checks.
// No part of a header is ignored: unknown fields at any depth, unknown enum values and reserved
// fields become violations by name.
#ifndef RINGATTN_SERVER_EDGE_HEADER_HEADER_TRANSLATION_H_
#define RINGATTN_SERVER_EDGE_HEADER_HEADER_TRANSLATION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "common/base/limits.h"
#include "common/request/validation.h"
#include "ringattn/v1/attention.pb.h"
#include "server/core/events/events.h"

namespace ringattn::server {

// The client's options for its reply.
struct ReplyChoice {
  int64_t max_chunk_bytes = 0;
  bool with_crc32c = false;
  absl::Duration progress_interval = absl::InfiniteDuration();
  bool with_timeline = false;
  bool single_message = false;  // the client takes a SingleReply
};

struct HeaderRequest {
  ValidRequest valid;
  std::string request_id;  // empty if the client sent none
  // Hash of the header without id and transport. A writer's excludes the fields of ReplyOptions
  // that concern only its stream. Stable within one process.
  uint64_t fingerprint = 0;
  // The same without inline tensors, `prepare` and the form of the reply. Requests that differ in
  // these only share a plan.
  uint64_t recipe_fingerprint = 0;
  ReplyChoice reply;
  // Not null; sizes are checked.
  std::shared_ptr<const InlineTensors> inline_tensors = std::make_shared<const InlineTensors>();

  // Returns true if no input follows the header.
  bool has_all_inputs() const;
};

// Returns the fingerprint of a header without its id; stable within one process.
uint64_t FingerprintOf(v1::BackwardHeader header);

// Reads a stream's first message. All functions are pure and safe for any message.
std::variant<HeaderRequest, Rejection> ReadHeader(v1::ForwardRequest first, const Limits& limits);
std::variant<HeaderRequest, Rejection> ReadHeader(v1::BackwardRequest first, const Limits& limits);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_HEADER_HEADER_TRANSLATION_H_
