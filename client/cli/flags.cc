#include "client/cli/flags.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <variant>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/api/call.h"
#include "client/api/error.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "common/base/limits.h"
#include "common/request/validation.h"

namespace ringattn::client::cli {
namespace {

constexpr char kShapeGroup[] = "Shape";
constexpr char kOptionGroup[] = "What is computed";
constexpr char kPlanGroup[] = "Where it is computed (never changes the result)";

absl::Status Invalid(absl::string_view message) { return UsageError(message); }

absl::StatusOr<uint64_t> TotalOf(const std::vector<uint64_t>& lengths, absl::string_view flag) {
  uint64_t total = 0;
  for (const uint64_t length : lengths) {
    if (__builtin_add_overflow(total, length, &total)) {
      return Invalid(absl::StrCat(flag, ": the lengths overflow"));
    }
  }
  return total;
}

void AppendCumulative(const std::vector<uint64_t>& lengths,
                      google::protobuf::RepeatedField<uint64_t>* cumulative) {
  uint64_t total = 0;
  cumulative->Add(0);
  for (const uint64_t length : lengths) cumulative->Add(total += length);
}

absl::StatusOr<v1::Window> ParseWindow(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ',');
  int64_t left, right;
  if (parts.size() > 2 || !absl::SimpleAtoi(parts.front(), &left) ||
      !absl::SimpleAtoi(parts.back(), &right)) {
    return Invalid(absl::StrCat("--window=", text, ": expected W or LEFT,RIGHT, -1 for no bound"));
  }
  v1::Window window;
  window.set_left(left);
  window.set_right(right);
  return window;
}

}  // namespace

void ShapeFlags::AddTo(FlagSet& command) {
  const auto add = [&](const char* name, auto* value, const std::string& help) {
    return command.Add(name, value, help).Group(kShapeGroup).NotNegative();
  };
  add("--batch", &batch_, "Batch size; 1 with --documents").ShowDefault();
  add("--seq_len", &seq_len_, "Queries per batch element; with --documents their sum");
  add("--seq_len_kv", &seq_len_kv_, "Keys per batch element; default: --seq_len");
  add("--heads", &heads_, "Query heads").ShowDefault();
  add("--kv_heads", &kv_heads_, "Key and value heads; default: --heads");
  add("--head_dim", &head_dim_, absl::StrCat("Dimension of q and k, 1..", kMaxHeadDim))
      .ShowDefault();
  add("--head_dim_v", &head_dim_v_, "Dimension of v; default: --head_dim");
  command.Add("--dtype", &dtype_, "Element type")
      .Group(kShapeGroup)
      .OneOf({"fp32", "bf16", "fp16"})
      .ShowDefault();
  add("--documents", &documents_,
      "Lengths a,b,c of packed documents. Attention stays within a document")
      .Delimiter(',');
  add("--documents_kv", &documents_kv_, "Keys of each document; default: --documents")
      .Delimiter(',');
}

absl::Status ShapeFlags::Apply(Problem* problem) const {
  v1::AttentionShape& shape = problem->shape;
  std::optional<uint64_t> seq_len = seq_len_, seq_len_kv = seq_len_kv_;
  if (!documents_.empty()) {
    const std::vector<uint64_t>& documents_kv = documents_kv_.empty() ? documents_ : documents_kv_;
    const auto total_q = TotalOf(documents_, "--documents");
    if (!total_q.ok()) return total_q.status();
    const auto total_kv = TotalOf(documents_kv, "--documents_kv");
    if (!total_kv.ok()) return total_kv.status();
    if (seq_len.value_or(*total_q) != *total_q) {
      return Invalid(absl::StrCat("--documents: the lengths add up to ", *total_q,
                                  ", --seq_len is ", *seq_len));
    }
    if (seq_len_kv.value_or(*total_kv) != *total_kv) {
      return Invalid(absl::StrCat("--documents_kv: the lengths add up to ", *total_kv,
                                  ", --seq_len_kv is ", *seq_len_kv));
    }
    seq_len = *total_q;
    seq_len_kv = *total_kv;
    AppendCumulative(documents_, shape.mutable_packed()->mutable_cu_seqlens_q());
    AppendCumulative(documents_kv, shape.mutable_packed()->mutable_cu_seqlens_k());
  } else if (!documents_kv_.empty()) {
    return Invalid("--documents_kv needs --documents");
  }
  if (!seq_len) return Invalid("--seq_len is required (or --documents)");
  shape.set_batch(batch_);
  shape.set_seq_len_q(*seq_len);
  shape.set_seq_len_kv(seq_len_kv.value_or(*seq_len));
  shape.set_num_heads(heads_);
  shape.set_num_kv_heads(kv_heads_ != 0 ? kv_heads_ : heads_);
  shape.set_head_dim(head_dim_);
  shape.set_head_dim_v(head_dim_v_ != 0 ? head_dim_v_ : head_dim_);
  problem->dtype = dtype_ == "fp32"   ? v1::DATA_TYPE_FLOAT32
                   : dtype_ == "bf16" ? v1::DATA_TYPE_BFLOAT16
                                      : v1::DATA_TYPE_FLOAT16;
  return absl::OkStatus();
}

void OptionFlags::AddTo(FlagSet& command, TermForms forms) {
  command
      .AddSwitch(
          "--causal", [this] { options_.set_causal(true); },
          "Query i attends to keys up to i. The last query aligns with the last key")
      .Group(kOptionGroup);
  command
      .Add("--window", &window_,
           "LEFT,RIGHT: query i attends to keys from LEFT before to RIGHT after its aligned "
           "position; -1: no bound. W means W,W")
      .Group(kOptionGroup);
  command
      .AddFunction<double>(
          "--softmax_scale",
          [this](double scale) {
            options_.set_softmax_scale(scale);
            return absl::OkStatus();
          },
          "Default: 1/sqrt(head_dim)")
      .Group(kOptionGroup);
  command
      .AddFunction<double>(
          "--softcap",
          [this](double cap) {
            options_.set_softcap(cap);
            return absl::OkStatus();
          },
          "Replaces each score by c tanh(score / c)")
      .Group(kOptionGroup);
  command
      .AddSwitch(
          "--sinks", [this] { options_.mutable_sinks(); },
          "Tensor sinks: a logit per head that joins the softmax without a value")
      .Group(kOptionGroup);
  terms_.AddTo(command, forms);
  dilation_.AddTo(command, kOptionGroup);
  command
      .AddSwitch(
          "--deterministic", [this] { options_.set_deterministic(v1::DETERMINISM_SAME_RING); },
          "Equal requests on as many workers of the same kind give equal bits")
      .Group(kOptionGroup);
  command
      .AddFunction<std::string>(
          "--compute_dtype",
          [this](const std::string& dtype) {
            if (dtype == "fp8_e4m3") options_.set_compute_dtype(v1::COMPUTE_DTYPE_FLOAT8_E4M3);
            return absl::OkStatus();
          },
          "Type of the forward pass's products: the input's dtype, or fp8_e4m3 with scales that "
          "the "
          "workers compute from bf16 or fp16 tensors")
      .Group(kOptionGroup)
      .OneOf({"input", "fp8_e4m3"});
  command
      .Add("--output_dtype", &output_dtype_,
           "Type of out, dq, dk and dv: the input's dtype, or fp32. It also applies to out as an "
           "input of backward")
      .Group(kOptionGroup)
      .OneOf({"input", "fp32"})
      .ShowDefault();
  command
      .Add("--layout", &layout_,
           "How the sequence is sharded over the ranks; auto never chooses striped")
      .Group(kPlanGroup)
      .OneOf({"auto", "contiguous", "zigzag", "striped", "zigzag_per_document"})
      .ShowDefault();
  command
      .Add("--schedule", &schedule_,
           "single: one worker; ring: K/V travel around the ring; all_gather: every rank gathers "
           "all K/V first; pass_q: q travels around the ring; replicated_q: every rank has all q; "
           "double_ring: K/V travel around a ring in each group, and from group to group")
      .Group(kPlanGroup)
      .OneOf({"auto", "single", "ring", "all_gather", "pass_q", "replicated_q", "double_ring"})
      .ShowDefault();
  const auto add_count = [&](const char* name, auto* value, const char* help) {
    command.Add(name, value, help).Group(kPlanGroup).NotNegative();
  };
  add_count("--world_size", &world_size_, "Ring members; default: the server chooses");
  add_count("--stripe", &stripe_,
            "Tokens per stripe of the striped layout, at most 65,536 stripes; default: 1");
  add_count("--heads_per_step", &heads_per_step_,
            "With --schedule=all_gather: gather K/V of this many kv heads at a time, which bounds "
            "memory; default: all");
  add_count("--group_size", &group_size_,
            "With --schedule=double_ring: ring members per group; default: those of one host");
  AddTuning(command, "--tile_q", &v1::Tuning::set_tile_q, "Queries per kernel tile");
  AddTuning(command, "--tile_kv", &v1::Tuning::set_tile_kv, "Keys per kernel tile");
  AddTuning(command, "--key_splits", &v1::Tuning::set_key_splits,
            "Forward: maximum splits of a row's keys");
  command
      .Add("--members", &members_,
           "Workers to compute on, a,b,c, in ring order; default: the server chooses")
      .Group(kPlanGroup)
      .Delimiter(',');
}

void OptionFlags::AddTuning(FlagSet& command, const char* name, void (v1::Tuning::*set)(uint32_t),
                            const char* help) {
  command
      .AddFunction<uint32_t>(
          name,
          [this, set](uint32_t value) {
            (tuning_.*set)(value);
            return absl::OkStatus();
          },
          absl::StrCat(help, "; a value that the worker's device supports"))
      .Group(kPlanGroup)
      .NotNegative();
}

absl::Status OptionFlags::Apply(Problem* problem) const {
  problem->options = options_;
  if (!window_.empty()) {
    auto window = ParseWindow(window_);
    if (!window.ok()) return window.status();
    *problem->options.mutable_window() = *window;
  }
  if (absl::Status status = terms_.Apply(&problem->options); !status.ok()) return status;
  problem->geometric_slopes = terms_.wants_geometric_slopes();
  if (problem->geometric_slopes && problem->shape.num_heads() > 0) {
    SetGeometricSlopes(problem->shape.num_heads(), &problem->options);
  }
  if (absl::Status status = dilation_.Apply(&problem->options); !status.ok()) return status;
  problem->split_heads = dilation_.wants_split();
  if (problem->split_heads && problem->shape.num_heads() > 0) {
    absl::Status status = SplitHeads(problem->shape.num_heads(), &problem->options);
    if (!status.ok()) return status;
  }
  problem->plan.set_layout(layout_ == "contiguous"            ? v1::LAYOUT_CONTIGUOUS
                           : layout_ == "zigzag"              ? v1::LAYOUT_ZIGZAG
                           : layout_ == "striped"             ? v1::LAYOUT_STRIPED
                           : layout_ == "zigzag_per_document" ? v1::LAYOUT_ZIGZAG_PER_DOCUMENT
                                                              : v1::LAYOUT_UNSPECIFIED);
  problem->plan.set_schedule(schedule_ == "single"         ? v1::SCHEDULE_SINGLE
                             : schedule_ == "ring"         ? v1::SCHEDULE_RING
                             : schedule_ == "all_gather"   ? v1::SCHEDULE_ALL_GATHER
                             : schedule_ == "pass_q"       ? v1::SCHEDULE_PASS_Q
                             : schedule_ == "replicated_q" ? v1::SCHEDULE_REPLICATED_Q
                             : schedule_ == "double_ring"  ? v1::SCHEDULE_DOUBLE_RING
                                                           : v1::SCHEDULE_UNSPECIFIED);
  if (output_dtype_ == "fp32") problem->output_dtype = v1::DATA_TYPE_FLOAT32;
  if (world_size_) problem->plan.set_world_size(*world_size_);
  if (stripe_) problem->plan.set_stripe(*stripe_);
  if (heads_per_step_) {
    problem->plan.set_heads_per_step(static_cast<uint32_t>(
        std::min<uint64_t>(*heads_per_step_, std::numeric_limits<uint32_t>::max())));
  }
  if (group_size_) problem->plan.set_group_size(*group_size_);
  if (tuning_.ByteSizeLong() > 0) *problem->plan.mutable_tuning() = tuning_;
  for (const std::string& member : members_) problem->plan.add_members(member);
  return absl::OkStatus();
}

void AddDlseFlag(FlagSet& command, bool* dlse) {
  command.Add("--dlse", dlse, "Tensor dlse, the gradient of lse, is an input of backward")
      .Group(kOptionGroup);
}

void AddLseFlag(FlagSet& command, v1::LseFormat* format) {
  command
      .AddFunction<std::string>(
          "--lse",
          [format](const std::string& form) {
            *format =
                form == "per_document" ? v1::LSE_FORMAT_PER_DOCUMENT : v1::LSE_FORMAT_UNSPECIFIED;
            return absl::OkStatus();
          },
          "Layout of lse and dlse of packed documents: flat [heads, tokens], or "
          "per_document [documents, heads, longest document], padded with -inf")
      .Group(kOptionGroup)
      .OneOf({"flat", "per_document"});
}

void AddProbabilitiesFlag(FlagSet& command, std::vector<v1::ProbabilityRow>* rows) {
  const auto parse = [rows](const std::vector<std::string>& texts) {
    for (const std::string& text : texts) {
      const std::vector<std::string> fields = absl::StrSplit(text, ':');
      uint64_t batch, position;
      if (fields.size() != 2 || !absl::SimpleAtoi(fields[0], &batch) ||
          !absl::SimpleAtoi(fields[1], &position)) {
        return absl::InvalidArgumentError(absl::StrCat(text, ": expected BATCH:POSITION"));
      }
      v1::ProbabilityRow& row = rows->emplace_back();
      row.set_batch(batch);
      row.set_position(position);
    }
    return absl::OkStatus();
  };
  command
      .AddFunction<std::vector<std::string>>(
          "--probabilities", parse,
          "Also return the softmax weights of these queries, BATCH:POSITION[,...] (packed: "
          "DOCUMENT:POSITION), as tensor probabilities [rows, heads, keys]")
      .Group(kOptionGroup)
      .Delimiter(',');
}

void AddPackingFlag(FlagSet& command, v1::Packing* packing) {
  command
      .AddFunction<std::string>(
          "--packing",
          [packing](const std::string& form) {
            *packing = form == "qkv"  ? v1::PACKING_QKV
                       : form == "kv" ? v1::PACKING_KV
                                      : v1::PACKING_UNSPECIFIED;
            return absl::OkStatus();
          },
          "qkv: one tensor [.., tokens, 3, heads, dim] instead of q, k, v; kv: q and one tensor "
          "[.., tokens, 2, kv_heads, dim]. The values are the same")
      .Group(kShapeGroup)
      .OneOf({"none", "qkv", "kv"});
}

namespace {

template <typename Header>
Header HeaderOf(const Problem& problem) {
  Header header;
  *header.mutable_shape() = problem.shape;
  header.set_dtype(problem.dtype);
  *header.mutable_options() = problem.options;
  *header.mutable_plan() = problem.plan;
  header.mutable_reply()->set_output_dtype(problem.output_dtype);
  header.mutable_reply()->set_lse_format(problem.lse_format);
  return header;
}

std::variant<ValidRequest, Rejection> Validate(const Problem& problem, Direction direction,
                                               bool has_forward_result) {
  if (direction == Direction::kForward) {
    auto header = HeaderOf<v1::ForwardHeader>(problem);
    for (const v1::ProbabilityRow& row : problem.probability_rows) {
      *header.mutable_reply()->add_probability_rows() = row;
    }
    return ValidateRequest(header, Limits());
  }
  auto header = HeaderOf<v1::BackwardHeader>(problem);
  header.set_has_forward_result(has_forward_result);
  header.set_has_dlse(problem.has_dlse);
  return ValidateRequest(header, Limits());
}

}  // namespace

absl::StatusOr<ValidRequest> ValidateLocally(const Problem& problem, Direction direction,
                                             bool has_forward_result) {
  auto checked = Validate(problem, direction, has_forward_result);
  if (auto* valid = std::get_if<ValidRequest>(&checked)) return std::move(*valid);
  const Rejection& rejection = std::get<Rejection>(checked);
  std::vector<FieldViolation> violations;
  for (const Violation& violation : rejection.violations) {
    violations.push_back({violation.field, violation.description});
  }
  return MakeError(rejection.code, rejection.ToStatus().message(), violations);
}

namespace {

std::string WithoutPrefix(const std::string& name, absl::string_view prefix) {
  return absl::AsciiStrToLower(absl::StripPrefix(name, prefix));
}

}  // namespace

std::string ShortName(v1::Layout layout) {
  return WithoutPrefix(v1::Layout_Name(layout), "LAYOUT_");
}

std::string ShortName(v1::Schedule schedule) {
  return WithoutPrefix(v1::Schedule_Name(schedule), "SCHEDULE_");
}

std::string ShortName(v1::Transport transport) {
  return WithoutPrefix(v1::Transport_Name(transport), "TRANSPORT_");
}

std::string ShortName(v1::Stage stage) { return WithoutPrefix(v1::Stage_Name(stage), "STAGE_"); }

std::string ShortName(v1::TimelineCategory category) {
  return WithoutPrefix(v1::TimelineCategory_Name(category), "TIMELINE_CATEGORY_");
}

std::string ShortName(v1::WorkerState state) {
  return WithoutPrefix(v1::WorkerState_Name(state), "WORKER_STATE_");
}

std::string ShortName(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FLOAT32:
      return "fp32";
    case v1::DATA_TYPE_BFLOAT16:
      return "bf16";
    case v1::DATA_TYPE_FLOAT16:
      return "fp16";
    default:
      return "unspecified";
  }
}

}  // namespace ringattn::client::cli
