#include "worker/operation/operation_writers.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/wire/token_spans.h"

namespace ringattn::worker {

absl::StatusOr<OperationWriters> OperationWriters::Read(const v1::Reserve& reserve,
                                                        const AttentionSpec& spec) {
  OperationWriters writers;
  for (const v1::WriterRows& rows : reserve.writers()) {
    absl::StatusOr<Shard> q = FromProto(rows.q());
    absl::StatusOr<Shard> kv = FromProto(rows.kv());
    for (const absl::StatusOr<Shard>* shard : {&q, &kv}) {
      if (shard->ok()) continue;
      return absl::InvalidArgumentError(absl::StrCat("writers: ", shard->status().message()));
    }
    writers.rows_.push_back({*std::move(q), *std::move(kv)});
  }
  if (!writers.any()) return writers;
  for (const auto& [axis, why] :
       CheckWriters(writers.rows_, spec.shape.seq_len_q, spec.shape.seq_len_kv)) {
    return absl::InvalidArgumentError(absl::StrCat("writers.", axis, ": ", why));
  }
  return writers;
}

std::optional<ShardMap> OperationWriters::MapOf(const AttentionSpec& spec, TensorId id) const {
  if (!any() || !IsSplitByWriters(id)) return std::nullopt;
  return MapToWriters(spec, rows_, id);
}

}  // namespace ringattn::worker
