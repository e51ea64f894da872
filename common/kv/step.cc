#include "common/kv/step.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/kv/kv_error.h"

namespace ringattn {
namespace {

// A number of entries of one sequence.
absl::Status ReadLength(const std::string& field, uint64_t value, const Limits& limits,
                        int64_t* length) {
  if (value > static_cast<uint64_t>(limits.max_tokens)) {
    return KvOverLimit(field, value, limits.max_tokens);
  }
  *length = static_cast<int64_t>(value);
  return absl::OkStatus();
}

absl::StatusOr<KvCommand> ParseCommand(const std::string& at, const v1::KvCommand& command,
                                       const Limits& limits) {
  switch (command.command_case()) {
    case v1::KvCommand::kFork: {
      KvForkCommand fork{command.fork().source(), command.fork().target(), 0};
      auto status = ReadLength(at + ".fork.length", command.fork().length(), limits, &fork.length);
      if (!status.ok()) return status;
      return fork;
    }
    case v1::KvCommand::kDrop: {
      const auto& sequences = command.drop().sequences();
      if (sequences.size() > limits.max_sequences) {
        return KvOverLimit(absl::StrCat("the size of ", at, ".drop.sequences"), sequences.size(),
                           limits.max_sequences);
      }
      return KvDropCommand{{sequences.begin(), sequences.end()}};
    }
    case v1::KvCommand::COMMAND_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError(absl::StrCat(at, " is empty; set fork or drop"));
}

absl::StatusOr<StepRow> ParseRow(const std::string& at, const v1::StepRow& from,
                                 const Limits& limits) {
  StepRow row;
  row.sequence = from.sequence();
  if (auto status =
          ReadLength(at + ".expected_length", from.expected_length(), limits, &row.expected_length);
      !status.ok())
    return status;
  if (auto status = ReadLength(at + ".keep_length", from.keep_length(), limits, &row.keep_length);
      !status.ok())
    return status;
  row.append_tokens = from.append_tokens();
  row.q_tokens = from.q_tokens();
  if (row.end() > limits.max_tokens) {
    return KvOverLimit(absl::StrCat("keep_length + append_tokens of ", at),
                       static_cast<uint64_t>(row.end()), limits.max_tokens);
  }
  if (!from.tree_mask().empty()) {
    return absl::UnimplementedError(
        absl::StrCat(at, ".tree_mask has ", from.tree_mask().size(),
                     " bytes; tree masks are not served yet, leave it empty"));
  }
  row.tables.reserve(from.tables_size());
  for (int t = 0; t < from.tables_size(); ++t) {
    const v1::KvTable& table = from.tables(t);
    if (table.group() >= static_cast<uint32_t>(limits.max_kv_layers)) {
      return absl::InvalidArgumentError(absl::StrCat(at, ".tables[", t, "].group is ",
                                                     table.group(), "; no cache has that group"));
    }
    row.tables.push_back({static_cast<int>(table.group()),
                          table.first(),
                          {table.blocks().begin(), table.blocks().end()}});
  }
  return row;
}

}  // namespace

int64_t KvStep::q_tokens() const {
  int64_t sum = 0;
  for (const StepRow& row : rows) sum += row.q_tokens;
  return sum;
}

int64_t KvStep::append_tokens() const {
  int64_t sum = 0;
  for (const StepRow& row : rows) sum += row.append_tokens;
  return sum;
}

const char* Name(RefusalReason reason) {
  switch (reason) {
    case RefusalReason::kLengthMismatch:
      return "LENGTH_MISMATCH";
    case RefusalReason::kKeepBeyondLength:
      return "KEEP_BEYOND_LENGTH";
    case RefusalReason::kFull:
      return "KV_FULL";
    case RefusalReason::kUnknownSequence:
      return "UNKNOWN_SEQUENCE";
    case RefusalReason::kSequenceExists:
      return "SEQUENCE_EXISTS";
    case RefusalReason::kBehindWindow:
      return "BEHIND_WINDOW";
    case RefusalReason::kBadBlock:
      return "BAD_BLOCK";
    case RefusalReason::kBlockWrittenTwice:
      return "BLOCK_WRITTEN_TWICE";
    case RefusalReason::kRowTwice:
      return "ROW_TWICE";
    case RefusalReason::kBadRow:
      return "BAD_ROW";
  }
  return "BAD_ROW";
}

absl::StatusOr<KvStep> ParseStep(const v1::StepBegin& begin, const Limits& limits) {
  if (begin.step() == 0) {
    return absl::InvalidArgumentError("begin.step is 0; steps are numbered from 1");
  }
  if (begin.lane() != 0) {
    return absl::UnimplementedError(
        absl::StrCat("begin.lane is ", begin.lane(), "; only lane 0 is served"));
  }
  if (begin.rows_size() > limits.max_step_rows) {
    return KvOverLimit("the number of begin.rows", begin.rows_size(), limits.max_step_rows);
  }
  if (begin.commands_size() > limits.max_sequences) {
    return KvOverLimit("the number of begin.commands", begin.commands_size(), limits.max_sequences);
  }
  KvStep step;
  step.number = begin.step();
  step.commands.reserve(begin.commands_size());
  for (int i = 0; i < begin.commands_size(); ++i) {
    auto command = ParseCommand(absl::StrCat("begin.commands[", i, "]"), begin.commands(i), limits);
    if (!command.ok()) return command.status();
    step.commands.push_back(*std::move(command));
  }
  step.rows.reserve(begin.rows_size());
  for (int i = 0; i < begin.rows_size(); ++i) {
    auto row = ParseRow(absl::StrCat("begin.rows[", i, "]"), begin.rows(i), limits);
    if (!row.ok()) return row.status();
    step.rows.push_back(*std::move(row));
  }
  if (step.q_tokens() > limits.max_step_tokens) {
    return KvOverLimit("the sum of q_tokens of begin.rows", step.q_tokens(),
                       limits.max_step_tokens);
  }
  if (step.append_tokens() > limits.max_step_tokens) {
    return KvOverLimit("the sum of append_tokens of begin.rows", step.append_tokens(),
                       limits.max_step_tokens);
  }
  return step;
}

v1::StepBegin ToProto(const KvStep& step) {
  v1::StepBegin begin;
  begin.set_step(step.number);
  for (const KvCommand& command : step.commands) {
    v1::KvCommand* to = begin.add_commands();
    if (const auto* fork = std::get_if<KvForkCommand>(&command)) {
      to->mutable_fork()->set_source(fork->source);
      to->mutable_fork()->set_target(fork->target);
      to->mutable_fork()->set_length(static_cast<uint64_t>(fork->length));
    } else {
      const std::vector<SequenceId>& sequences = std::get<KvDropCommand>(command).sequences;
      to->mutable_drop()->mutable_sequences()->Add(sequences.begin(), sequences.end());
    }
  }
  for (const StepRow& row : step.rows) {
    v1::StepRow* to = begin.add_rows();
    to->set_sequence(row.sequence);
    to->set_expected_length(static_cast<uint64_t>(row.expected_length));
    to->set_keep_length(static_cast<uint64_t>(row.keep_length));
    to->set_append_tokens(static_cast<uint32_t>(row.append_tokens));
    to->set_q_tokens(static_cast<uint32_t>(row.q_tokens));
    for (const KvTableUpdate& table : row.tables) {
      v1::KvTable* update = to->add_tables();
      update->set_group(static_cast<uint32_t>(table.group));
      update->set_first(static_cast<uint32_t>(table.first));
      update->mutable_blocks()->Add(table.blocks.begin(), table.blocks.end());
    }
  }
  return begin;
}

v1::StepRefused ToProto(uint64_t step, const std::vector<Refusal>& refusals) {
  v1::StepRefused refused;
  refused.set_step(step);
  for (const Refusal& refusal : refusals) {
    v1::RowRefusal* row = refused.add_rows();
    row->set_row(static_cast<uint32_t>(refusal.row));
    row->set_command(refusal.command);
    row->set_reason(Name(refusal.reason));
    row->set_length(static_cast<uint64_t>(refusal.length));
    row->set_blocks_missing(static_cast<uint64_t>(refusal.blocks_missing));
    row->set_detail(refusal.detail);
  }
  return refused;
}

}  // namespace ringattn
