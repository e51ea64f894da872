#include <algorithm>
#include <cstdio>
#include <memory>

#include "absl/strings/str_cat.h"
#include "client/cli/attention_file.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "client/cli/flags.h"
#include "client/cli/progress_bar.h"
#include "client/transfer/tensor_bytes.h"
#include "common/attention/attention_spec.h"
#include "common/oracle/generator.h"
#include "common/wire/proto_values.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

struct GenerateFlags {
  std::string output;
  ShapeFlags shape;
  uint64_t seed = 0;
  bool with_dout = false;
  bool sinks = false;
  bool dlse = false;
  TermFlags terms;
  v1::Packing packing = v1::PACKING_UNSPECIFIED;
  v1::LseFormat lse_format = v1::LSE_FORMAT_UNSPECIFIED;
  bool json = false;
};

// Fills `count` elements of a tensor from element `first` on. A packed tensor gets the values that
// its components would have.
void FillRows(const AttentionSpec& spec, uint64_t seed, TensorId id, int64_t first, int64_t count,
              uint8_t* target) {
  const DType dtype = DTypeOf(spec, id);
  const int64_t element_bytes = ElementBytes(dtype);
  const std::vector<TensorId> parts = PartsOf(id);
  const int64_t row = LayoutOf(spec, parts[0]).inner_bytes / element_bytes;
  const auto part_count = static_cast<int64_t>(parts.size());
  while (count > 0) {
    // The elements that are also consecutive in the component.
    const int64_t here = part_count == 1 ? count : std::min(count, row - first % row);
    const TensorId part = parts[part_count == 1 ? 0 : first / row % part_count];
    const int64_t index = part_count == 1 ? first : first / row / part_count * row + first % row;
    const bool scores = part == TensorId::kQ || part == TensorId::kK;
    oracle::FillNormal(dtype, seed, static_cast<uint64_t>(part), index, here,
                       scores ? oracle::QueryKeyDeviation(spec, oracle::DataKind::kNormal) : 1.0,
                       target);
    first += here;
    count -= here;
    target += here * element_bytes;
  }
}

absl::Status Generate(const GenerateFlags& flags, Problem* problem,
                      std::vector<v1::TensorId>* tensors) {
  if (absl::Status status = flags.shape.Apply(problem); !status.ok()) return status;
  if (absl::Status status = flags.terms.Apply(&problem->options); !status.ok()) return status;
  problem->shape.set_packing(flags.packing);
  problem->lse_format = flags.lse_format;
  if (flags.terms.has_alibi()) {
    SetGeometricSlopes(problem->shape.num_heads(), &problem->options);
  }
  const auto valid = ValidateLocally(*problem, Direction::kForward, false);
  if (!valid.ok()) return valid.status();
  const AttentionSpec& spec = valid->spec;

  for (const TensorId id : InputsOf(spec, Direction::kForward, false)) {
    const bool queries_or_keys = id <= TensorId::kV || !InfoOf(id).parts.empty();
    if (queries_or_keys) tensors->push_back(ToProto(id));
  }
  if (flags.with_dout) tensors->push_back(v1::TENSOR_ID_DOUT);
  if (flags.dlse) tensors->push_back(v1::TENSOR_ID_DLSE);
  if (flags.sinks) tensors->push_back(v1::TENSOR_ID_SINKS);
  for (const TensorId id :
       {TensorId::kBias, TensorId::kMask, TensorId::kQSegmentIds, TensorId::kKvSegmentIds}) {
    if (InfoOf(id).is_present(spec)) tensors->push_back(static_cast<v1::TensorId>(id));
  }
  auto writer = CreateFor(flags.output, *problem, *tensors, true, flags.terms.has_alibi());
  if (!writer.ok()) return writer.status();

  int64_t total = 0, written = 0;
  for (const v1::TensorId tensor : *tensors) total += (*writer)->data(TensorIdName(tensor)).size();
  ProgressBar bar;
  for (const v1::TensorId tensor : *tensors) {
    const auto id = static_cast<TensorId>(tensor);
    const DType dtype = HasDType(id) ? DTypeOf(spec, id) : DType::kFloat32;
    const bool ids = InfoOf(id).element == ElementOf::kInt32;
    const int64_t element_bytes = id == TensorId::kMask ? 1 : ElementBytes(dtype);
    const auto target = (*writer)->data(TensorIdName(tensor));
    const int64_t elements = static_cast<int64_t>(target.size()) / element_bytes;
    constexpr int64_t kPiece = 1 << 22;
    for (int64_t first = 0; first < elements; first += kPiece) {
      const int64_t count = std::min(kPiece, elements - first);
      uint8_t* const piece = target.data() + first * element_bytes;
      if (ids) {
        // Segment ids have no heads and no dimension, so the whole tensor is small.
        if (first == 0) {
          oracle::FillSegmentIds(flags.seed, spec.shape.batch, elements / spec.shape.batch,
                                 reinterpret_cast<int32_t*>(piece));
        }
      } else if (id == TensorId::kMask) {
        oracle::FillMask(spec, flags.seed, first, count, piece);
      } else if (id == TensorId::kBias) {
        oracle::FillBias(dtype, flags.seed, first, count, piece);
      } else {
        FillRows(spec, flags.seed, id, first, count, piece);
      }
      written += count * element_bytes;
      (*writer)->ReleasePages();
      bar.Update(absl::StrCat("writing ", TensorIdName(tensor)),
                 static_cast<double>(written) / total);
    }
  }
  return (*writer)->Commit();
}

int RunGenerate(const GenerateFlags& flags) {
  Problem problem;
  std::vector<v1::TensorId> tensors;
  if (absl::Status status = Generate(flags, &problem, &tensors); !status.ok()) {
    return Fail(status, flags.json);
  }
  if (flags.json) {
    Json object = {{"command", "generate"}, {"output", flags.output}, {"tensors", Json::object()}};
    for (const v1::TensorId tensor : tensors) {
      object["tensors"][TensorIdName(tensor)] = {
          {"dtype", ElementName(problem, tensor)},
          {"shape", *TensorDimensions(problem.shape, problem.types(), tensor, problem.options)}};
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

void AddGenerate(FlagSet& program, Run& run) {
  auto flags = std::make_shared<GenerateFlags>();
  FlagSet& command = program.AddCommand("generate",
                                        "Write random q, k, v (and dout, dlse, sinks, bias, mask, "
                                        "segment ids) to a safetensors file");
  command.Add("--output", &flags->output, "The file to write").Required();
  flags->shape.AddTo(command);
  AddPackingFlag(command, &flags->packing);
  AddLseFlag(command, &flags->lse_format);
  command
      .Add("--seed", &flags->seed,
           "Seed of the random numbers; equal seeds give equal bits on every machine")
      .NotNegative()
      .ShowDefault();
  command.Add("--with_dout", &flags->with_dout, "Also write dout, which backward needs");
  command.Add("--sinks", &flags->sinks, "Also write sinks, for --sinks of the other commands");
  command.Add("--dlse", &flags->dlse, "Also write dlse, for --dlse of backward");
  flags->terms.AddTo(command, TermForms::kGenerated);
  command.Add("--json", &flags->json, "Print one JSON object (docs/cli-json.md)");
  command.OnChosen([flags, &run] { run = [flags] { return RunGenerate(*flags); }; });
}

}  // namespace ringattn::client::cli
