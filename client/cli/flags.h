// Groups of flags that several commands share, and the requests that they describe.
// Tests: flags_test.cc.
#ifndef RINGATTN_CLIENT_CLI_FLAGS_H_
#define RINGATTN_CLIENT_CLI_FLAGS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/dilation_flags.h"
#include "client/cli/flag_set.h"
#include "client/cli/term_flags.h"
#include "client/transfer/tensor_bytes.h"
#include "common/request/validation.h"
#include "ringattn/v1/attention.pb.h"
#include "ringattn/v1/cluster.pb.h"

namespace ringattn::client::cli {

// A request without its tensors.
struct Problem {
  v1::AttentionShape shape;
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  v1::AttentionOptions options;
  v1::PlanOptions plan;
  bool has_dlse = false;          // backward
  bool geometric_slopes = false;  // options.alibi gets geometric slopes once the heads are known
  bool split_heads = false;  // options.dilation_levels get their heads once the heads are known
  v1::DataType output_dtype = v1::DATA_TYPE_UNSPECIFIED;
  v1::LseFormat lse_format = v1::LSE_FORMAT_UNSPECIFIED;

  std::vector<v1::ProbabilityRow> probability_rows;  // forward

  TensorTypes types() const { return {dtype, output_dtype, lse_format, probability_rows}; }
};

// --batch, --seq_len, ..., --dtype, --documents.
class ShapeFlags {
 public:
  void AddTo(FlagSet& command);

  // Sets shape and dtype. Errors: a UsageError naming the flag.
  absl::Status Apply(Problem* problem) const;

 private:
  uint64_t batch_ = 1;
  std::optional<uint64_t> seq_len_;
  std::optional<uint64_t> seq_len_kv_;
  uint32_t heads_ = 1;
  uint32_t kv_heads_ = 0;
  uint32_t head_dim_ = 64;
  uint32_t head_dim_v_ = 0;
  std::string dtype_ = "bf16";
  std::vector<uint64_t> documents_;
  std::vector<uint64_t> documents_kv_;
};

// --causal, --window, ..., and the flags of the plan: --layout, --schedule, ...
class OptionFlags {
 public:
  OptionFlags() = default;
  OptionFlags(const OptionFlags&) = delete;  // the flag set refers to it
  OptionFlags& operator=(const OptionFlags&) = delete;
  void AddTo(FlagSet& command, TermForms forms = TermForms::kFromFile);

  // Sets options and plan. Geometric ALiBi slopes and split heads depend on the shape: while it is
  // unknown, options.alibi has no slopes and levels have no heads. Errors: a UsageError naming the
  // flag.
  absl::Status Apply(Problem* problem) const;

 private:
  void AddTuning(FlagSet& command, const char* name, void (v1::Tuning::*set)(uint32_t),
                 const char* help);

  v1::AttentionOptions options_;  // without the window
  std::string window_;
  std::string output_dtype_ = "input";
  TermFlags terms_;
  DilationFlags dilation_;
  std::string layout_ = "auto";
  std::string schedule_ = "auto";
  std::optional<uint32_t> world_size_;
  std::optional<uint64_t> stripe_;
  std::optional<uint64_t> heads_per_step_;
  std::optional<uint32_t> group_size_;
  v1::Tuning tuning_;
  std::vector<std::string> members_;
};

// Adds --dlse, for commands of the backward pass.
void AddDlseFlag(FlagSet& command, bool* dlse);

// Adds --lse=flat|per_document.
void AddLseFlag(FlagSet& command, v1::LseFormat* format);

// Adds --probabilities=BATCH:POSITION[,...].
void AddProbabilitiesFlag(FlagSet& command, std::vector<v1::ProbabilityRow>* rows);

// Adds --packing=none|qkv|kv, for a generated file.
void AddPackingFlag(FlagSet& command, v1::Packing* packing);

// Validates the problem with the service's own rules and default limits, without a server. Errors:
// the code and the violations that the server would return.
absl::StatusOr<ValidRequest> ValidateLocally(const Problem& problem, Direction direction,
                                             bool has_forward_result);

// Returns an enum value's name without its type's prefix: "ring" for SCHEDULE_RING.
std::string ShortName(v1::Layout layout);
std::string ShortName(v1::Schedule schedule);
std::string ShortName(v1::Transport transport);
std::string ShortName(v1::Stage stage);
std::string ShortName(v1::TimelineCategory category);
std::string ShortName(v1::WorkerState state);
std::string ShortName(v1::DataType dtype);  // "fp32", "bf16", "fp16"

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_FLAGS_H_
