// Tensors of a file in the form in which the oracle takes them: the parts of packed ones apart,
// lse and dlse flat.
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

// `bytes`: the whole tensor ClientTensorOf(spec, id) as a client has it. A part of a packed one.
std::vector<uint8_t> PartOfPacked(const AttentionSpec& spec, TensorId id, ConstBytes bytes);

// Of a tensor per document. INVALID_ARGUMENT if `holes_are_empty` and something else than -inf
// stands behind a document: of a result, that is what must be there.
absl::StatusOr<std::vector<uint8_t>> FlatOfDocuments(const AttentionSpec& spec, TensorId id,
                                                     ConstBytes bytes, bool holes_are_empty);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_SHARD_FORM_H_
