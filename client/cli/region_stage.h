// RegionStage: copies of a call's tensors in a region, so that repeated calls use host or CUDA
// memory.
// Tests: tests/cuda_memory/cuda_memory_fake_test.cc.
#ifndef RINGATTN_CLIENT_CLI_REGION_STAGE_H_
#define RINGATTN_CLIENT_CLI_REGION_STAGE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/api/call.h"
#include "client/api/client.h"
#include "client/api/cuda_region.h"
#include "client/api/region.h"
#include "client/call/call_tensors.h"
#include "client/cli/flag_set.h"

namespace ringattn::client::cli {

// Adds --transport=auto|relay|direct|host_memory|cuda_memory and --staging_limit.
void AddTransportFlags(FlagSet& command, std::string* transport, int64_t* staging_bytes);
// GPU memory for --transport=cuda_memory.
struct CudaFlags {
  int device = 0;
  std::string memory = "vmm";  // or malloc
};
// Adds --cuda_device and --cuda_memory.
void AddCudaFlags(FlagSet& command, CudaFlags* flags);
// Adds --channels_per_worker.
void AddChannelsFlag(FlagSet& command, int* channels);
// Sets the preference for a value of --transport. Any value except auto and relay is required.
void SetTransport(const std::string& transport, CallOptions* options);

// Not thread safe. `Args`, `Results`: of Forward or Backward.
template <typename Args, typename Results>
class RegionStage {
 public:
  // Copies all tensors into one region of the client: host memory, or CUDA memory if `cuda` is
  // given. Errors: those of Region::Allocate and CudaRegion::Create.
  static absl::StatusOr<RegionStage> Make(Client* client, const Args& args, const Results& results,
                                          const CudaFlags* cuda = nullptr) {
    int64_t bytes = 0;
    const auto add = [&](auto& tensor) { bytes += Rounded(tensor.size()); };
    Args sized_args = args;
    Results sized_results = results;
    ForEachTensor(sized_args, add);
    ForEachTensor(sized_results, add);
    bytes = std::max<int64_t>(bytes, 1);
    RegionStage stage(args, results);
    absl::Status status =
        cuda == nullptr ? stage.TakeHost(client, bytes) : stage.TakeCuda(client, *cuda, bytes);
    if (status.ok()) status = stage.CopyIn();
    if (!status.ok()) return status;
    return stage;
  }

  const Args& args() const { return args_; }
  const Results& results() const { return results_; }

  // Copies the results to the caller's memory. Errors: the driver's.
  absl::Status CopyBack() const {
    for (const auto& [from, to] : back_) {
      if (to.empty()) continue;
      if (cuda_ == nullptr) {
        std::memcpy(to.data(), from.data(), to.size());
      } else if (absl::Status status = cuda_->CopyOut(OffsetOf(from.data()), to); !status.ok()) {
        return status;
      }
    }
    return absl::OkStatus();
  }

 private:
  static constexpr size_t kAlignment = 64;
  static int64_t Rounded(size_t bytes) {
    return static_cast<int64_t>((bytes + kAlignment - 1) / kAlignment * kAlignment);
  }

  RegionStage(const Args& args, const Results& results) : args_(args), results_(results) {}

  absl::Status TakeHost(Client* client, int64_t bytes) {
    absl::StatusOr<std::unique_ptr<Region>> region = Region::Allocate(client, bytes);
    if (!region.ok()) return region.status();
    host_ = *std::move(region);
    base_ = host_->memory().data();
    return absl::OkStatus();
  }
  absl::Status TakeCuda(Client* client, const CudaFlags& flags, int64_t bytes) {
    absl::StatusOr<std::unique_ptr<CudaRegion>> region =
        flags.memory == "malloc" ? CudaRegion::CreateLinear(client, flags.device, bytes)
                                 : CudaRegion::Create(client, flags.device, bytes);
    if (!region.ok()) return region.status();
    cuda_ = *std::move(region);
    base_ = cuda_->memory().data();
    return absl::OkStatus();
  }
  uint64_t OffsetOf(const uint8_t* data) const { return static_cast<uint64_t>(data - base_); }

  absl::Status CopyIn() {
    absl::Status status;
    uint8_t* at = base_;
    const auto take = [&](size_t bytes) {
      const MutableBytes place(at, bytes);
      at += Rounded(bytes);
      return place;
    };
    ForEachTensor(args_, [&](ConstBytes& tensor) {
      if (tensor.empty()) return;
      const MutableBytes place = take(tensor.size());
      if (cuda_ == nullptr) {
        std::memcpy(place.data(), tensor.data(), tensor.size());
      } else {
        status.Update(cuda_->CopyIn(OffsetOf(place.data()), tensor));
      }
      tensor = place;
    });
    ForEachTensor(results_, [&](MutableBytes& tensor) {
      const MutableBytes place = take(tensor.size());
      back_.emplace_back(place, tensor);
      tensor = place;
    });
    return status;
  }

  std::unique_ptr<Region> host_;  // exactly one of the two is set
  std::unique_ptr<CudaRegion> cuda_;
  uint8_t* base_ = nullptr;
  Args args_;
  Results results_;
  std::vector<std::pair<MutableBytes, MutableBytes>>
      back_;  // from the region, to the caller's memory
};

// Makes one call by `call(args, results)`. Stages the tensors in CUDA memory meanwhile if the
// options prefer it; otherwise they stay in place.
template <typename Args, typename Results, typename Call>
CallResult CallStaged(Client* client, const Args& args, const Results& results,
                      const CallOptions& options, const CudaFlags& cuda, const Call& call) {
  if (options.transport != TransportPreference::kCudaMemory) return call(args, results);
  auto stage = RegionStage<Args, Results>::Make(client, args, results, &cuda);
  if (!stage.ok()) return stage.status();
  CallResult report = call(stage->args(), stage->results());
  if (!report.ok()) return report;
  if (absl::Status status = stage->CopyBack(); !status.ok()) return status;
  return report;
}

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_REGION_STAGE_H_
