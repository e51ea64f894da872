// Converts tensors of a file to the oracle's form: components of packed tensors separate, lse and
// dlse flat.
// Tests: shard_form_test.cc.
#ifndef RINGATTN_CLIENT_CLI_SHARD_FORM_H_
#define RINGATTN_CLIENT_CLI_SHARD_FORM_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/api/call.h"
#include "common/attention/attention_spec.h"
#include "common/attention/tensors.h"

namespace ringattn::client::cli {

// Returns a component of a packed tensor. `bytes`: the whole tensor ClientTensorOf(spec, id) in the
// client's form.
std::vector<uint8_t> PartOfPacked(const AttentionSpec& spec, TensorId id, ConstBytes bytes);

// Returns the flat form of a tensor per document. If `holes_are_empty`, as results require, returns
// INVALID_ARGUMENT unless the padding after each document is -inf.
absl::StatusOr<std::vector<uint8_t>> FlatOfDocuments(const AttentionSpec& spec, TensorId id,
                                                     ConstBytes bytes, bool holes_are_empty);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_SHARD_FORM_H_
