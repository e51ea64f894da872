// Bundle: the tensors of a block that travel together, and the slots that hold blocks on one rank.
#ifndef RINGATTN_COMMON_SCHEDULE_BUNDLE_H_
#define RINGATTN_COMMON_SCHEDULE_BUNDLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/attention/band.h"
#include "common/attention/tensors.h"
#include "common/program/program.h"

namespace ringattn {

// Location of a range of one source's rows: in a slot, as [batch, range.size(), inner], after
// `rows_before` rows per batch row of other ranges. The same on every rank, because all ranks use
// their slots alike.
struct BlockLocation {
  int slot = 0;
  int64_t rows_before = 0;
  RowRange range;
};

// One tensor of a bundle. Another tensor that travels with a block (ids, biases of keys, scales) is
// another entry.
struct BundleTensor {
  TensorId id = TensorId::kK;
  int64_t row_bytes = 0;        // of one row in one batch row
  std::vector<BufferId> slots;  // this rank's buffers, kNoBuffer until first used
};

struct Bundle {
  std::vector<std::string> slot_names;  // buffers are named SLOT.TENSOR
  std::vector<BundleTensor> tensors;    // in the order in which they travel

  // Returns the entry of `id`. REQUIRES: the bundle has it.
  BundleTensor& Of(TensorId id);
};

// The bundles of k and v in the spec's dtype, with their segment ids if the request has them, and
// of dk and dv in fp32.
Bundle KvBundle(const AttentionSpec& spec, std::vector<std::string> slot_names);
Bundle KvGradientBundle(const AttentionSpec& spec, std::vector<std::string> slot_names);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_BUNDLE_H_
