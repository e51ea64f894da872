// Converts the tokens of a shard between plain values and messages.
#ifndef RINGATTN_COMMON_WIRE_TOKEN_SPANS_H_
#define RINGATTN_COMMON_WIRE_TOKEN_SPANS_H_

#include "absl/status/statusor.h"
#include "common/layout/shard_plan.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn {

using TokenSpans = google::protobuf::RepeatedPtrField<v1::TokenSpan>;

// Appends the spans.
void ToProto(const Shard& shard, TokenSpans* spans);
// Reads a stride of 0 as 1. Returns INVALID_ARGUMENT for an empty span, and for one with a token of
// 2^40 or more.
absl::StatusOr<Shard> FromProto(const TokenSpans& spans);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_WIRE_TOKEN_SPANS_H_
