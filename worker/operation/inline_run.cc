#include "worker/operation/inline_run.h"

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/layout/tensor_route.h"
#include "common/wire/proto_values.h"

namespace ringattn::worker {
namespace {

std::set<TensorId> ClientInputs(ShardOperation& operation) {
  std::set<TensorId> inputs;
  const Operation& bound = operation.operation();
  for (const BufferSpec& buffer : bound.program().buffers) {
    if (buffer.source != BufferSource::kUpload) continue;
    inputs.insert(ClientTensorOf(bound.spec(), *buffer.input));
  }
  return inputs;
}

absl::Status WriteInput(TensorId id, const std::string& data, ShardOperation& operation) {
  const Operation& bound = operation.operation();
  const TensorRoute route = TensorRoute::ForUpload(bound.spec(), bound.plan(), id);
  const auto bytes = static_cast<int64_t>(data.size());
  if (bytes != route.global_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("inline_run.inputs: ", TensorName(id), " has ",
                                                   bytes, " bytes; the tensor has ",
                                                   route.global_bytes()));
  }
  const auto write = [&](TensorId local, int64_t local_offset, int64_t offset, int64_t size) {
    const wire::ChunkHeader chunk{static_cast<int>(local), static_cast<uint64_t>(local_offset),
                                  std::nullopt};
    const wire::Fragment fragment{reinterpret_cast<const uint8_t*>(data.data()) + offset,
                                  static_cast<size_t>(size)};
    return operation.WriteSmall(chunk, {&fragment, 1}, size);
  };
  if (bytes == 0) return absl::OkStatus();
  if (route.replicated()) return write(id, 0, 0, bytes);
  for (const ByteRun& run : route.FromGlobal(0, bytes)) {
    if (run.rank == kNoRank) continue;
    absl::Status status =
        write(route.parts()[run.part], run.local_offset, run.global_offset, run.bytes);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status StartInputs(const v1::InlineRun& run, ShardOperation& operation) {
  if (operation.operation().members().size() != 1) {
    return absl::InvalidArgumentError("inline_run: the operation has more than one member");
  }
  const std::set<TensorId> inputs = ClientInputs(operation);
  for (const v1::InlineTensor& input : run.inputs()) {
    const std::optional<TensorId> id = TensorFromNumber(input.tensor());
    if (!id.has_value() || inputs.count(*id) == 0) {
      return absl::InvalidArgumentError(absl::StrCat("inline_run.inputs: tensor ", input.tensor(),
                                                     " is not an input of this operation"));
    }
    if (absl::Status status = WriteInput(*id, input.data(), operation); !status.ok()) return status;
  }
  if (operation.InputsComplete()) return absl::OkStatus();
  return absl::InvalidArgumentError("inline_run.inputs: an input is missing");
}

}  // namespace

absl::Status WriteInlineInputs(const v1::InlineRun& run, ShardOperation& operation) {
  absl::Status status = StartInputs(run, operation);
  // The message may end after this. The copies of all tensors run meanwhile, so that they cost
  // about one wait.
  for (const EventRef& copy : operation.PendingUploads()) {
    status.Update(copy->Wait(absl::InfiniteFuture()));  // the teardown's watchdog bounds it
  }
  return status;
}

absl::Status ReadInlineOutputs(const ShardOperation& operation,
                               google::protobuf::RepeatedPtrField<v1::TensorChunk>* outputs) {
  // Each tensor is copied once, although packed tensors leave it in many pieces.
  std::map<TensorId, std::pair<const char*, std::string>> tensors;  // the device's memory, a copy
  std::vector<DeviceCopy> copies;
  for (const ShardOperation::Output& output : operation.Outputs()) {
    auto& [memory, copy] = tensors[output.id];
    memory = static_cast<const char*>(output.memory.data);
    copy.resize(output.memory.bytes);
    copies.push_back({copy.data(), memory, output.memory.bytes});
  }
  if (absl::Status status = operation.CopyAllToHost(copies); !status.ok()) return status;
  for (const ShardOperation::Output& output : operation.StreamedOutputs()) {
    auto& [memory, copy] = tensors.at(output.id);
    const auto bytes = static_cast<size_t>(output.memory.bytes);
    const size_t place = static_cast<const char*>(output.memory.data) - memory;
    v1::TensorChunk* chunk = outputs->Add();
    chunk->set_tensor(ToProto(output.id));
    chunk->set_offset(static_cast<uint64_t>(output.offset));
    if (bytes == copy.size()) {
      chunk->set_data(std::move(copy));
    } else {
      chunk->set_data(copy.substr(place, bytes));
    }
  }
  return absl::OkStatus();
}

}  // namespace ringattn::worker
