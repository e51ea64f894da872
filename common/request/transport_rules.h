// Checks the TransportOptions of a header without knowledge of regions.
#ifndef RINGATTN_COMMON_REQUEST_TRANSPORT_RULES_H_
#define RINGATTN_COMMON_REQUEST_TRANSPORT_RULES_H_

#include <cstdint>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/base/limits.h"
#include "common/request/transport_choice.h"
#include "common/request/violations.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn {

// Bytes of a region's id (128 bits).
inline constexpr size_t kRegionIdBytes = 16;

// The request of the options, as far as it is valid.
struct TransportSubject {
  const AttentionSpec& spec;
  const std::vector<TensorId>& inputs;
  const std::vector<TensorId>& outputs;
  const google::protobuf::RepeatedPtrField<v1::InlineTensor>& inline_tensors;
  const Limits& limits;
};

// Pure; safe for any input from a client.
TransportChoice ReadTransport(const v1::TransportOptions& options, const TransportSubject& subject,
                              Violations& violations);

// Joins the choices of a request's writers, in the order of their indices, into the request's.
// Every choice has a writer, with an index equal to its place. Reports tokens that no writer or
// several writers have as violations of "transport.writer.q" and "transport.writer.kv".
TransportChoice JoinWriters(const std::vector<TransportChoice>& choices, int64_t seq_len_q,
                            int64_t seq_len_kv, Violations& violations);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_TRANSPORT_RULES_H_
