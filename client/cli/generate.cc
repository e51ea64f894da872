#include <algorithm>
#include <cstdio>
#include <memory>

#include "absl/strings/str_cat.h"
#include "client/cli/attention_file.h"
#include "client/cli/command.h"
#include "client/cli/flags.h"
#include "client/cli/progress_bar.h"
#include "client/tensor_bytes.h"
#include "common/attention/attention_spec.h"
#include "common/oracle/generator.h"

namespace ringattn::client::cli {
namespace {

struct Flags {
  std::string output;
  ShapeFlags shape;
  uint64_t seed = 0;
  bool with_dout = false;
  bool sinks = false;
  bool dlse = false;
  bool json = false;
};

absl::Status Generate(const Flags& flags, Problem* problem, std::vector<v1::TensorId>* tensors) {
  if (absl::Status status = flags.shape.Apply(problem); !status.ok()) return status;
  const auto valid = ValidateLocally(*problem, Direction::kForward, false);
  if (!valid.ok()) return valid.status();
  const AttentionSpec& spec = valid->spec;

  *tensors = {v1::TENSOR_ID_Q, v1::TENSOR_ID_K, v1::TENSOR_ID_V};
  if (flags.with_dout) tensors->push_back(v1::TENSOR_ID_DOUT);
  if (flags.dlse) tensors->push_back(v1::TENSOR_ID_DLSE);
  if (flags.sinks) tensors->push_back(v1::TENSOR_ID_SINKS);
  auto writer = CreateFor(flags.output, *problem, *tensors, true);
  if (!writer.ok()) return writer.status();

  int64_t total = 0, written = 0;
  for (const v1::TensorId tensor : *tensors) total += (*writer)->data(TensorIdName(tensor)).size();
  ProgressBar bar;
  for (const v1::TensorId tensor : *tensors) {
    const DType dtype = DTypeOf(spec, static_cast<TensorId>(tensor));
    const int64_t element_bytes = ElementBytes(dtype);
    const bool scores = tensor == v1::TENSOR_ID_Q || tensor == v1::TENSOR_ID_K;
    const double deviation =
        scores ? oracle::QueryKeyDeviation(spec, oracle::DataKind::kNormal) : 1.0;
    const auto target = (*writer)->data(TensorIdName(tensor));
    const int64_t elements = static_cast<int64_t>(target.size()) / element_bytes;
    constexpr int64_t kPiece = 1 << 22;
    for (int64_t first = 0; first < elements; first += kPiece) {
      const int64_t count = std::min(kPiece, elements - first);
      oracle::FillNormal(dtype, flags.seed, static_cast<uint64_t>(tensor), first, count, deviation,
                         target.data() + first * element_bytes);
      written += count * element_bytes;
      (*writer)->ReleasePages();
      bar.Update(absl::StrCat("writing ", TensorIdName(tensor)),
                 static_cast<double>(written) / total);
    }
  }
  return (*writer)->Commit();
}

int RunGenerate(const Flags& flags) {
  Problem problem;
  std::vector<v1::TensorId> tensors;
  if (absl::Status status = Generate(flags, &problem, &tensors); !status.ok()) {
    return Fail(status, flags.json);
  }
  if (flags.json) {
    const auto spec = SpecForSizes(problem.shape, problem.dtype);
    Json object = {{"command", "generate"}, {"output", flags.output}, {"tensors", Json::object()}};
    for (const v1::TensorId tensor : tensors) {
      object["tensors"][TensorIdName(tensor)] = {
          {"dtype", DTypeOf(*spec, static_cast<TensorId>(tensor)) == DType::kFloat32
                        ? "fp32"
                        : ShortName(problem.dtype)},
          {"shape", *TensorDimensions(problem.shape, problem.dtype, tensor)}};
    }
    Print(object);
    return kSuccess;
  }
  std::printf("wrote %s:", flags.output.c_str());
  const char* separator = " ";
  for (const v1::TensorId tensor : tensors) {
    std::printf("%s%s", separator, Describe(problem, tensor).c_str());
    separator = ", ";
  }
  std::puts("");
  return kSuccess;
}

}  // namespace

void AddGenerate(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "generate", "Write random q, k, v (and dout, dlse, sinks) to a safetensors file");
  command->add_option("--output", flags->output, "The file to write")->required();
  flags->shape.AddTo(command);
  command->add_option("--seed", flags->seed, "The same seed gives the same bits anywhere")
      ->check(CLI::NonNegativeNumber.description(""))
      ->capture_default_str();
  command->add_flag("--with_dout", flags->with_dout, "Also dout, which backward needs");
  command->add_flag("--sinks", flags->sinks, "Also sinks, for --sinks of the other commands");
  command->add_flag("--dlse", flags->dlse, "Also dlse, for --dlse of backward");
  command->add_flag("--json", flags->json, "Print one JSON object (docs/cli-json.md)");
  command->callback([flags, &run] { run = [flags] { return RunGenerate(*flags); }; });
}

}  // namespace ringattn::client::cli
