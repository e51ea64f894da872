// The values of a step: one forward pass of a model over a cache (kv_cache.proto, StepBegin).
#ifndef RINGATTN_COMMON_KV_STEP_H_
#define RINGATTN_COMMON_KV_STEP_H_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/limits.h"
#include "ringattn/v1/kv_cache.pb.h"

namespace ringattn {

using SequenceId = uint64_t;

struct KvForkCommand {
  SequenceId source = 0;
  SequenceId target = 0;
  int64_t length = 0;
  bool operator==(const KvForkCommand&) const = default;
};
struct KvDropCommand {
  std::vector<SequenceId> sequences;
  bool operator==(const KvDropCommand&) const = default;
};
using KvCommand = std::variant<KvForkCommand, KvDropCommand>;

struct KvTableUpdate {
  int group = 0;
  int64_t first = 0;
  std::vector<uint32_t> blocks;
  bool operator==(const KvTableUpdate&) const = default;
};

struct StepRow {
  SequenceId sequence = 0;
  int64_t expected_length = 0;
  int64_t keep_length = 0;
  int64_t append_tokens = 0;
  int64_t q_tokens = 0;
  std::vector<KvTableUpdate> tables;  // BLOCKS numbering

  int64_t end() const { return keep_length + append_tokens; }
  bool operator==(const StepRow&) const = default;
};

struct KvStep {
  uint64_t number = 0;
  std::vector<KvCommand> commands;
  std::vector<StepRow> rows;

  int64_t q_tokens() const;
  int64_t append_tokens() const;
  bool operator==(const KvStep&) const = default;
};

enum class RefusalReason : uint8_t {
  kLengthMismatch,
  kKeepBeyondLength,
  kFull,
  kUnknownSequence,
  kSequenceExists,
  kBehindWindow,
  kBadBlock,
  kBlockWrittenTwice,
  kRowTwice,
  kBadRow,
};
// "LENGTH_MISMATCH", ...
const char* Name(RefusalReason reason);

struct Refusal {
  int row = 0;
  bool command = false;  // `row` counts commands
  RefusalReason reason = RefusalReason::kBadRow;
  int64_t length = 0;
  int64_t blocks_missing = 0;
  std::string detail;
};

// Errors: INVALID_ARGUMENT for a message of another form (e.g. an empty command),
// RESOURCE_EXHAUSTED over Limits::max_step_rows or max_step_tokens, UNIMPLEMENTED for tree_mask and
// lane. The message names the field.
absl::StatusOr<KvStep> ParseStep(const v1::StepBegin& begin, const Limits& limits);
v1::StepBegin ToProto(const KvStep& step);
v1::StepRefused ToProto(uint64_t step, const std::vector<Refusal>& refusals);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_KV_STEP_H_
