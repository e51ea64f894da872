// OperationWriters: the clients of one operation, if it has several, and the rows that each of them
// holds (Reserve.writers).
#ifndef RINGATTN_WORKER_OPERATION_OPERATION_WRITERS_H_
#define RINGATTN_WORKER_OPERATION_OPERATION_WRITERS_H_

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "common/layout/writer_rows.h"
#include "ringattn/v1/worker_control.pb.h"

namespace ringattn::worker {

// Immutable.
class OperationWriters {
 public:
  // One client, which has the whole tensors.
  OperationWriters() = default;
  // Returns INVALID_ARGUMENT, with the field's name, unless the writers together have each token
  // once.
  static absl::StatusOr<OperationWriters> Read(const v1::Reserve& reserve,
                                               const AttentionSpec& spec);

  // Whether the operation has writers, even if it is a single one.
  bool any() const { return !rows_.empty(); }
  // Number of clients, at least 1.
  int count() const { return any() ? static_cast<int>(rows_.size()) : 1; }
  // Maps the whole tensor to the writers' tensors. Returns nothing if the clients hold the whole
  // tensor.
  std::optional<ShardMap> MapOf(const AttentionSpec& spec, TensorId id) const;

 private:
  std::vector<WriterRows> rows_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_OPERATION_WRITERS_H_
