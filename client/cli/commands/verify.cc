#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/attention_file.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "client/cli/flags.h"
#include "client/cli/progress_bar.h"
#include "client/cli/shard_form.h"
#include "client/cli/verify_json.h"
#include "client/transfer/tensor_bytes.h"
#include "common/oracle/verify.h"
#include "common/wire/proto_values.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

struct VerifyFlags {
  std::string input;
  std::string output;
  std::string forward;
  std::string progress_interval = "10s";
  OptionFlags options;
  bool dlse = false;
  v1::LseFormat lse_format = v1::LSE_FORMAT_UNSPECIFIED;
  std::vector<v1::ProbabilityRow> probability_rows;
  int64_t rows = 64;
  uint64_t seed = 1;
  bool json = false;
};

// A file and its name for messages.
struct Source {
  std::string path;
  SafetensorsFile file;

  static absl::StatusOr<Source> Open(const std::string& path) {
    auto file = SafetensorsFile::Open(path);
    if (!file.ok()) return file.status();
    if (absl::Status status = ConvertTensors(path, &*file); !status.ok()) return status;
    return Source{path, *std::move(file)};
  }
  bool Has(v1::TensorId tensor) const { return file.Find(TensorIdName(tensor)) != nullptr; }
  // Returns true if the file has one of the tensors, alone or packed.
  bool HasAny(std::initializer_list<v1::TensorId> tensors) const {
    return std::any_of(tensors.begin(), tensors.end(), [this](auto id) { return Has(id); });
  }
};

// Reads tensors of one problem in the oracle's form. Records the first failure.
class TensorReader {
 public:
  TensorReader(const Problem& problem, const AttentionSpec& spec)
      : problem_(problem), spec_(spec) {}

  // Returns the tensor's memory, which is valid during this object's lifetime.
  const uint8_t* Read(const Source& source, v1::TensorId tensor) {
    const auto id = static_cast<TensorId>(tensor);
    const v1::TensorId whole = ToProto(ClientTensorOf(spec_, id));
    const auto bytes = ReadTensor(source.path, source.file, problem_, whole);
    if (!bytes.ok()) {
      status_.Update(bytes.status());
      return nullptr;
    }
    if (whole != tensor) return Keep(PartOfPacked(spec_, id, *bytes));
    if (IsPerDocument(spec_, id)) {
      auto flat = FlatOfDocuments(spec_, id, *bytes, id == TensorId::kLse);
      if (!flat.ok()) {
        status_.Update(
            absl::InvalidArgumentError(absl::StrCat(source.path, ": ", flat.status().message())));
        return nullptr;
      }
      return Keep(*std::move(flat));
    }
    return bytes->empty() ? kEmpty : bytes->data();
  }
  // Returns null if the file does not have it.
  const uint8_t* ReadIfThere(const Source& source, v1::TensorId tensor) {
    const TensorId whole = ClientTensorOf(spec_, static_cast<TensorId>(tensor));
    return source.Has(ToProto(whole)) ? Read(source, tensor) : nullptr;
  }
  const absl::Status& status() const { return status_; }

 private:
  // Distinguishes an empty tensor from a missing one.
  static constexpr uint8_t kEmpty[8] = {};

  const uint8_t* Keep(std::vector<uint8_t> bytes) {
    if (bytes.empty()) return kEmpty;
    kept_.push_back(std::move(bytes));
    return kept_.back().data();
  }

  const Problem& problem_;
  const AttentionSpec& spec_;
  std::vector<std::vector<uint8_t>> kept_;
  absl::Status status_;
};

const int32_t* AsIds(const uint8_t* bytes) { return reinterpret_cast<const int32_t*>(bytes); }
const float* AsFloats(const uint8_t* bytes) { return reinterpret_cast<const float*>(bytes); }

const uint8_t* Of(const TensorMap<ConstBytes>& tensors, v1::TensorId tensor) {
  const auto found = tensors.find(tensor);
  return found == tensors.end() ? nullptr : found->second.data();
}

bool HasGradients(const Source& output) {
  return output.HasAny({v1::TENSOR_ID_DQ, v1::TENSOR_ID_DK, v1::TENSOR_ID_DV, v1::TENSOR_ID_DQKV,
                        v1::TENSOR_ID_DKV, v1::TENSOR_ID_DSINKS, v1::TENSOR_ID_DBIAS});
}

// Rejects out and lse in two files, because one of them would not be judged.
absl::Status CheckGivenOnce(const Source& forward, const std::vector<const Source*>& others) {
  for (const v1::TensorId tensor : {v1::TENSOR_ID_OUT, v1::TENSOR_ID_LSE}) {
    for (const Source* other : others) {
      if (!other->Has(tensor)) continue;
      return absl::InvalidArgumentError(absl::StrCat("--forward=", forward.path, ": ",
                                                     TensorIdName(tensor), " is in ", other->path,
                                                     " as well"));
    }
  }
  return absl::OkStatus();
}

// Rejects outputs without their flag, and flags without their output.
absl::Status CheckAskedFor(const VerifyFlags& flags, const Source& output, bool has_dbias,
                           bool has_sinks) {
  const auto wrong = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(output.path, ": tensor ", what));
  };
  if (!has_dbias && output.Has(v1::TENSOR_ID_DBIAS)) {
    return wrong("\"dbias\" is given without --dbias");
  }
  // A file of a forward pass has none, even if the flags of both directions are given.
  if (has_dbias && HasGradients(output) && !output.Has(v1::TENSOR_ID_DBIAS)) {
    return wrong("\"dbias\" is missing; --dbias needs it");
  }
  if (!has_sinks && output.Has(v1::TENSOR_ID_DSINKS)) {
    return wrong("\"dsinks\" is given without --sinks");
  }
  const bool has_rows = !flags.probability_rows.empty();
  if (has_rows && flags.dlse) {
    return UsageError("--probabilities (forward) cannot be combined with --dlse (backward)");
  }
  if (has_rows == output.Has(v1::TENSOR_ID_PROBABILITIES)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      output.path, ": tensor \"probabilities\" is ",
      has_rows ? "missing; --probabilities needs it" : "given without --probabilities"));
}

absl::StatusOr<oracle::Report> Verify(const VerifyFlags& flags) {
  const auto interval = ParseProgressInterval(flags.progress_interval);
  if (!interval.ok()) return interval.status();
  const auto input = Source::Open(flags.input);
  if (!input.ok()) return input.status();
  const auto output = Source::Open(flags.output);
  if (!output.ok()) return output.status();
  Problem problem;
  if (absl::Status status = flags.options.Apply(&problem); !status.ok()) return status;
  if (absl::Status status = ReadShape(input->path, input->file, &problem); !status.ok()) {
    return status;
  }
  problem.has_dlse = flags.dlse;
  problem.lse_format = flags.lse_format;
  problem.probability_rows = flags.probability_rows;
  const Direction direction = flags.dlse ? Direction::kBackward : Direction::kForward;
  const auto valid = ValidateLocally(problem, direction, false);
  if (!valid.ok()) return valid.status();

  // If a file serves both directions, dlse belongs to backward only.
  const bool judges_backward = flags.dlse || HasGradients(*output);
  const auto option_tensors =
      ReadOptionTensors(input->path, input->file, problem,
                        judges_backward ? Direction::kBackward : Direction::kForward);
  if (!option_tensors.ok()) return option_tensors.status();

  TensorReader reader(problem, valid->spec);
  const oracle::Inputs inputs{
      .q = reader.Read(*input, v1::TENSOR_ID_Q),
      .k = reader.Read(*input, v1::TENSOR_ID_K),
      .v = reader.Read(*input, v1::TENSOR_ID_V),
      .dout = reader.ReadIfThere(*input, v1::TENSOR_ID_DOUT),
      .sinks = AsFloats(Of(*option_tensors, v1::TENSOR_ID_SINKS)),
      .dlse = flags.dlse ? AsFloats(reader.ReadIfThere(*input, v1::TENSOR_ID_DLSE)) : nullptr,
      .bias = Of(*option_tensors, v1::TENSOR_ID_BIAS),
      .mask = Of(*option_tensors, v1::TENSOR_ID_MASK),
      .q_segment_ids = AsIds(Of(*option_tensors, v1::TENSOR_ID_Q_SEGMENT_IDS)),
      .kv_segment_ids = AsIds(Of(*option_tensors, v1::TENSOR_ID_KV_SEGMENT_IDS))};
  const bool has_dbias = problem.options.has_bias() && problem.options.bias().gradient();
  const bool has_rows = !flags.probability_rows.empty();
  if (absl::Status status = CheckAskedFor(flags, *output, has_dbias, problem.options.has_sinks());
      !status.ok()) {
    return status;
  }
  const oracle::Outputs outputs{
      .out = reader.ReadIfThere(*output, v1::TENSOR_ID_OUT),
      .lse = AsFloats(reader.ReadIfThere(*output, v1::TENSOR_ID_LSE)),
      .dq = reader.ReadIfThere(*output, v1::TENSOR_ID_DQ),
      .dk = reader.ReadIfThere(*output, v1::TENSOR_ID_DK),
      .dv = reader.ReadIfThere(*output, v1::TENSOR_ID_DV),
      .dsinks = problem.options.has_sinks()
                    ? AsFloats(reader.ReadIfThere(*output, v1::TENSOR_ID_DSINKS))
                    : nullptr,
      .dbias = has_dbias ? reader.ReadIfThere(*output, v1::TENSOR_ID_DBIAS) : nullptr,
      .probabilities = AsFloats(reader.ReadIfThere(*output, v1::TENSOR_ID_PROBABILITIES))};
  const bool gradients = HasGradients(*output);
  oracle::ForwardTensors given;
  std::optional<Source> forward;  // kept while its tensors are used
  if (!flags.forward.empty()) {
    auto opened = Source::Open(flags.forward);
    if (!opened.ok()) return opened.status();
    forward = *std::move(opened);
    const absl::Status once = CheckGivenOnce(*forward, {&*input, &*output});
    if (!once.ok()) return once;
    given = {.out = reader.Read(*forward, v1::TENSOR_ID_OUT),
             .lse = AsFloats(reader.Read(*forward, v1::TENSOR_ID_LSE))};
  } else if (gradients) {
    given = {.out = reader.ReadIfThere(*input, v1::TENSOR_ID_OUT),
             .lse = AsFloats(reader.ReadIfThere(*input, v1::TENSOR_ID_LSE))};
  }
  if (!reader.status().ok()) return reader.status();
  if (outputs.out == nullptr && outputs.lse == nullptr && !has_rows && !gradients) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.output,
                     ": has none of out, lse, probabilities, dq, dk, dv, dsinks, dbias to verify"));
  }
  ProgressBar bar(*interval);
  bar.Update("verifying", -1);
  return oracle::Verify(valid->spec, inputs, outputs, given,
                        {.rows = flags.rows, .seed = flags.seed});
}

const char* Verdict(const oracle::Report& report) {
  if (report.mismatch()) return "MISMATCH: the result is wrong";
  return report.passed() ? "verified" : "INCOMPLETE: not everything could be judged";
}

int RunVerify(const VerifyFlags& flags) {
  const auto report = Verify(flags);
  if (!report.ok()) return Fail(report.status(), flags.json);
  if (flags.json) {
    Json object = {{"command", "verify"},
                   {"input", flags.input},
                   {"output", flags.output},
                   {"forward", flags.forward}};
    object.update(ReportJson(*report));
    Print(object);
  } else {
    std::printf("%s%s\n", report->ToString().c_str(), Verdict(*report));
  }
  if (report->mismatch()) return kMismatch;
  return report->passed() ? kSuccess : kUnjudged;
}

}  // namespace

void AddVerify(FlagSet& program, Run& run) {
  auto flags = std::make_shared<VerifyFlags>();
  FlagSet& command = program.AddCommand(
      "verify",
      "Verify results against attention computed here in fp64; exits 1 on a mismatch, 4 if "
      "something could not be judged");
  command
      .Add(
          "--input", &flags->input,
          "safetensors file with q, k, v (or qkv, or q and kv), for gradients also dout, and sinks "
          "and dlse as the flags require")
      .Required();
  command
      .Add("--output", &flags->output,
           "safetensors file with results to verify: any of out, lse, dq, dk, dv, dqkv, dkv, "
           "dsinks, "
           "dbias")
      .Required();
  command.Add(
      "--forward", &flags->forward,
      "safetensors file with out and lse of the forward pass, if neither other file has them. "
      "They are verified too, and used to verify dk and dv of long requests");
  flags->options.AddTo(command);
  AddDlseFlag(command, &flags->dlse);
  AddLseFlag(command, &flags->lse_format);
  AddProbabilitiesFlag(command, &flags->probability_rows);
  command
      .Add("--rows", &flags->rows, "Sampled rows of each tensor; small problems are verified whole")
      .Positive()
      .ShowDefault();
  command.Add("--seed", &flags->seed, "Seed of the row selection").NotNegative().ShowDefault();
  AddProgressFlag(command, &flags->progress_interval);
  command.Add("--json", &flags->json, "Print one JSON object (docs/cli-json.md)");
  command.OnChosen([flags, &run] { run = [flags] { return RunVerify(*flags); }; });
}

}  // namespace ringattn::client::cli
