// Cuts the tensors of a layer call by rank, and joins the ranks' results. The client library
// (direct streams) and the coordinator's relay use the same functions.
#ifndef RINGATTN_COMMON_KV_SHARD_CUT_H_
#define RINGATTN_COMMON_KV_SHARD_CUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/kv/cache_spec.h"
#include "common/kv/placement.h"
#include "common/kv/step.h"
#include "ringattn/v1/kv_cache.pb.h"

namespace ringattn {

// Bytes of the tensors of a layer call that appends and of its result, for all ranks or for one.
struct KvCallBytes {
  int64_t q = 0, k = 0, v = 0;
  int64_t out = 0, lse = 0;
};
KvCallBytes CallBytes(const KvCacheSpec& spec, const KvStep& step, int group, v1::KvOutput output);
KvCallBytes CallBytesOfRank(const KvCacheSpec& spec, const KvPlacement& placement,
                            const KvStep& step, int group, v1::KvOutput output, int rank);

// The tensors of a layer call, in memory that others own.
struct KvCallTensors {
  absl::string_view q, k, v;
};
KvCallTensors TensorsOf(const v1::LayerCall& call);

// New entries of the step that `rank` holds.
int64_t AppendTokensOfRank(const KvCacheSpec& spec, const KvPlacement& placement,
                           const KvStep& step, int rank);

// INVALID_ARGUMENT, BAD_CALL, naming the tensor and both sizes, unless q, k and v have the sizes of
// CallBytes (or of CallBytesOfRank). k and v may both be empty: the call only reads.
absl::Status CheckCallBytes(const KvCallTensors& tensors, const KvCallBytes& expected);
absl::Status CheckCallBytes(const v1::LayerCall& call, const KvCallBytes& expected);

// Sets `cut` to the call of one rank. With several position parts the output becomes
// KV_OUTPUT_PARTIAL. `call` has the step, the layer and the output; its tensors are not read.
// `cut` keeps the memory that it has. REQUIRES: sizes were checked.
void CutCall(const KvCacheSpec& spec, const KvPlacement& placement, const KvStep& step,
             const v1::LayerCall& call, const KvCallTensors& tensors, int rank, v1::LayerCall* cut);
// The same for a call with its tensors.
v1::LayerCall CutCall(const KvCacheSpec& spec, const KvPlacement& placement, const KvStep& step,
                      const v1::LayerCall& call, int rank);

// Joins the results of all ranks, by rank: heads are interleaved, partials of position parts are
// merged (common/attention/merge.h) in the order of ranks, sinks join after the merge, and out is
// rounded to the cache's dtype. Errors: INTERNAL if a result has other sizes than it must have.
absl::StatusOr<v1::LayerResult> JoinResults(const KvCacheSpec& spec, const KvPlacement& placement,
                                            const KvStep& step, const v1::LayerCall& call,
                                            const std::vector<v1::LayerResult>& results);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_KV_SHARD_CUT_H_
