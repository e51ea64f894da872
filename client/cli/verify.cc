#include <cstdio>
#include <memory>

#include "absl/strings/str_cat.h"
#include "client/cli/attention_file.h"
#include "client/cli/command.h"
#include "client/cli/flags.h"
#include "client/cli/verify_json.h"
#include "client/tensor_bytes.h"
#include "common/oracle/verify.h"

namespace ringattn::cli {
namespace {

struct Flags {
  std::string input;
  std::string output;
  OptionFlags options;
  int64_t rows = 64;
  uint64_t seed = 1;
  bool json = false;
};

// The tensor's memory, or null if the file does not have it.
absl::StatusOr<const uint8_t*> Optional(const std::string& path, const SafetensorsFile& file,
                                        const Problem& problem, v1::TensorId tensor) {
  if (file.Find(TensorIdName(tensor)) == nullptr) return nullptr;
  const auto bytes = ReadTensor(path, file, problem, tensor);
  if (!bytes.ok()) return bytes.status();
  // An empty tensor is there all the same.
  static constexpr uint8_t kEmpty[8] = {};
  return bytes->empty() ? kEmpty : bytes->data();
}

absl::StatusOr<oracle::Report> Verify(const Flags& flags) {
  const auto input = SafetensorsFile::Open(flags.input);
  if (!input.ok()) return input.status();
  const auto output = SafetensorsFile::Open(flags.output);
  if (!output.ok()) return output.status();
  Problem problem;
  if (absl::Status status = flags.options.Apply(&problem); !status.ok()) return status;
  if (absl::Status status = ReadShape(flags.input, *input, &problem); !status.ok()) return status;
  const auto valid = ValidateLocally(problem, Direction::kForward, false);
  if (!valid.ok()) return valid.status();

  absl::Status failure;
  const auto from = [&](const std::string& path, const SafetensorsFile& file, v1::TensorId tensor) {
    const auto data = Optional(path, file, problem, tensor);
    if (!data.ok()) failure.Update(data.status());
    return data.ok() ? *data : nullptr;
  };
  const auto lse_of = [&](const std::string& path, const SafetensorsFile& file) {
    return reinterpret_cast<const float*>(from(path, file, v1::TENSOR_ID_LSE));
  };
  const oracle::Inputs inputs{.q = from(flags.input, *input, v1::TENSOR_ID_Q),
                              .k = from(flags.input, *input, v1::TENSOR_ID_K),
                              .v = from(flags.input, *input, v1::TENSOR_ID_V),
                              .dout = from(flags.input, *input, v1::TENSOR_ID_DOUT)};
  const oracle::Outputs outputs{.out = from(flags.output, *output, v1::TENSOR_ID_OUT),
                                .lse = lse_of(flags.output, *output),
                                .dq = from(flags.output, *output, v1::TENSOR_ID_DQ),
                                .dk = from(flags.output, *output, v1::TENSOR_ID_DK),
                                .dv = from(flags.output, *output, v1::TENSOR_ID_DV)};
  const bool gradients =
      outputs.dq != nullptr || outputs.dk != nullptr || outputs.dv != nullptr;
  oracle::ForwardTensors given;
  if (gradients) {
    given = {.out = from(flags.input, *input, v1::TENSOR_ID_OUT),
             .lse = lse_of(flags.input, *input)};
  }
  if (!failure.ok()) return failure;
  if (outputs.out == nullptr && outputs.lse == nullptr && !gradients) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.output, ": none of out, lse, dq, dk, dv is there to verify"));
  }
  if (gradients && inputs.dout == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.input, ": dout is missing; gradients cannot be verified without it"));
  }
  return oracle::Verify(valid->spec, inputs, outputs, given,
                        {.rows = flags.rows, .seed = flags.seed});
}

int RunVerify(const Flags& flags) {
  const auto report = Verify(flags);
  if (!report.ok()) return Fail(report.status(), flags.json);
  if (flags.json) {
    Json object = {{"command", "verify"}, {"input", flags.input}, {"output", flags.output}};
    object.update(ReportJson(*report));
    Print(object);
  } else {
    std::printf("%s%s\n", report->ToString().c_str(),
                report->passed() ? "verified" : "MISMATCH: the result is wrong");
  }
  return report->passed() ? kSuccess : kMismatch;
}

}  // namespace

void AddVerify(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "verify", "Check results against attention computed here in fp64; exits 1 on a mismatch");
  command->add_option("--input", flags->input, "safetensors with q, k, v, for gradients also dout")
      ->required();
  command
      ->add_option("--output", flags->output,
                   "safetensors with what is to be checked: any of out, lse, dq, dk, dv")
      ->required();
  flags->options.AddTo(command);
  command
      ->add_option("--rows", flags->rows,
                   "Sampled rows of each tensor; small problems are checked whole")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--seed", flags->seed, "Chooses the rows")
      ->check(CLI::NonNegativeNumber.description(""))
      ->capture_default_str();
  command->add_flag("--json", flags->json, "Print one JSON object (docs/cli-json.md)");
  command->callback([flags, &run] { run = [flags] { return RunVerify(*flags); }; });
}

}  // namespace ringattn::cli
