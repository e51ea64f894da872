#include "worker/device/cuda/cuda_calls.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {
namespace {

using cuda::DeviceInfo;
using cuda::PreparedBackward;
using cuda::PreparedForward;
using cuda::TableLaunch;
using Kernel = PreparedCudaCall::Kernel;

constexpr int64_t kStopWordBytes = 256;  // keeps what follows aligned

struct Planned {
  std::vector<Kernel> kernels;
  std::vector<int64_t> tables_offsets;
  int64_t tables_end = kStopWordBytes;  // stop word and tables
  int64_t scratch_bytes = 0;

  int64_t bytes() const { return tables_end + scratch_bytes; }
};

absl::StatusOr<Kernel> Choose(const KernelCall& call, const DeviceInfo& device) {
  if (const auto* forward = std::get_if<ForwardCall>(&call)) {
    return cuda::PrepareForward(*forward, device);
  }
  if (const auto* backward = std::get_if<BackwardCall>(&call)) {
    return cuda::PrepareBackward(*backward, device);
  }
  if (const auto* delta = std::get_if<DeltaCall>(&call)) return Kernel(*delta);
  if (const auto* zero = std::get_if<ZeroCall>(&call)) return Kernel(*zero);
  if (const auto* add = std::get_if<AddCall>(&call)) return Kernel(*add);
  return Kernel(std::get<ConvertCall>(call));
}

absl::StatusOr<Planned> Plan(const std::vector<KernelCall>& calls, const DeviceInfo& device) {
  Planned planned;
  for (const KernelCall& call : calls) {
    absl::StatusOr<Kernel> kernel = Choose(call, device);
    if (!kernel.ok()) return kernel.status();
    planned.tables_offsets.push_back(planned.tables_end);
    if (const auto* forward = std::get_if<PreparedForward>(&*kernel)) {
      planned.tables_end += forward->table_bytes();
      planned.scratch_bytes = std::max(planned.scratch_bytes, forward->scratch_bytes());
    } else if (const auto* backward = std::get_if<PreparedBackward>(&*kernel)) {
      planned.tables_end += backward->table_bytes();
    }
    planned.kernels.push_back(*std::move(kernel));
  }
  return planned;
}

template <typename Prepared>
void WriteAndDropTables(Kernel& kernel, char* target) {
  if (auto* prepared = std::get_if<Prepared>(&kernel)) {
    prepared->WriteTables(target);
    prepared->DropTables();
  }
}

}  // namespace

CallWorkspace::CallWorkspace(CudaEventPool* events, std::unique_ptr<DeviceBuffer> memory)
    : events_(events), memory_(std::move(memory)) {}

CallWorkspace::~CallWorkspace() {
  absl::MutexLock lock(&mutex_);
  if (stopped_ != nullptr) (void)stopped_->Wait(absl::Now() + absl::Seconds(10));
}

absl::Status CallWorkspace::Stop(cudaStream_t stream, const uint32_t* one) {
  absl::MutexLock lock(&mutex_);
  if (stopped_ != nullptr) return absl::OkStatus();
  stopped_ = std::make_shared<CudaEvent>(events_, nullptr, 0);
  absl::Status status =
      CudaStatus(cudaMemcpyAsync(data(), one, sizeof(*one), cudaMemcpyHostToDevice, stream),
                 "cudaMemcpyAsync of a stop word");
  if (status.ok()) status = stopped_->RecordEnd(stream);
  if (!status.ok()) stopped_->Fail(status);
  return status;
}

PreparedCudaCall::PreparedCudaCall(Kernel kernel, std::shared_ptr<CallWorkspace> workspace,
                                   int64_t tables_offset, int64_t scratch_offset)
    // The device needs no description any more, and pieces may be many.
    : PreparedCall(ZeroCall{}),
      kernel_(std::move(kernel)),
      workspace_(std::move(workspace)),
      tables_offset_(tables_offset),
      scratch_offset_(scratch_offset) {}

absl::Status PreparedCudaCall::Launch(cudaStream_t stream) const {
  const TableLaunch launch{stream, workspace_->data() + tables_offset_,
                           workspace_->data() + scratch_offset_, workspace_->stop_word()};
  struct Visitor {
    const TableLaunch& launch;
    absl::Status operator()(const PreparedForward& kernel) const { return kernel.Launch(launch); }
    absl::Status operator()(const PreparedBackward& kernel) const { return kernel.Launch(launch); }
    absl::Status operator()(const DeltaCall& call) const {
      return cuda::StartDelta(call, launch.stream);
    }
    absl::Status operator()(const ZeroCall& call) const {
      return cuda::StartZero(call, launch.stream);
    }
    absl::Status operator()(const AddCall& call) const {
      return cuda::StartAdd(call, launch.stream);
    }
    absl::Status operator()(const ConvertCall& call) const {
      return cuda::StartConvert(call, launch.stream);
    }
  };
  return std::visit(Visitor{launch}, kernel_);
}

absl::StatusOr<int64_t> CudaWorkspaceBytes(const std::vector<KernelCall>& calls,
                                           const DeviceInfo& device) {
  absl::StatusOr<Planned> planned = Plan(calls, device);
  if (!planned.ok()) return planned.status();
  return planned->bytes();
}

absl::StatusOr<PreparedCalls> PrepareCudaCalls(const std::vector<KernelCall>& calls,
                                               const DeviceInfo& device, CudaEventPool* events,
                                               CudaMemory* memory) {
  absl::StatusOr<Planned> planned = Plan(calls, device);
  if (!planned.ok()) return planned.status();
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> buffer = memory->Allocate(planned->bytes());
  if (!buffer.ok()) {
    return absl::Status(buffer.status().code(),
                        absl::StrCat("kernel workspace: ", buffer.status().message()));
  }
  auto workspace = std::make_shared<CallWorkspace>(events, *std::move(buffer));
  std::vector<char> tables(planned->tables_end);  // the stop word is 0
  PreparedCalls prepared;
  for (size_t i = 0; i < planned->kernels.size(); ++i) {
    Kernel& kernel = planned->kernels[i];
    const int64_t offset = planned->tables_offsets[i];
    WriteAndDropTables<PreparedForward>(kernel, tables.data() + offset);
    WriteAndDropTables<PreparedBackward>(kernel, tables.data() + offset);
    prepared.push_back(std::make_unique<PreparedCudaCall>(std::move(kernel), workspace, offset,
                                                          planned->tables_end));
  }
  absl::Status status = memory->CopyFromHost(workspace->data(), tables.data(), planned->tables_end);
  if (!status.ok()) return status;
  return prepared;
}

}  // namespace ringattn::worker
