// HostTensorLocations: the regions in which a call's tensors lie, all of host memory or all of CUDA
// memory, and what of that a stream's header says.
#ifndef RINGATTN_CLIENT_CALL_HOST_TENSOR_LOCATIONS_H_
#define RINGATTN_CLIENT_CALL_HOST_TENSOR_LOCATIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/memory/region_index.h"
#include "client/memory/shared_region.h"
#include "client/transfer/transfer.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn::client {

// Immutable; keeps the regions' memory.
class HostTensorLocations {
 public:
  // Null if a tensor does not lie in a region, or in one of another kind than others: `why` says
  // which.
  static std::shared_ptr<const HostTensorLocations> Of(const std::vector<InputTensor>& inputs,
                                                       const std::vector<OutputTensor>& outputs,
                                                       const RegionIndex& regions,
                                                       std::string* why);

  // They lie on GPUs: nothing that the host reads.
  bool on_cuda() const { return on_cuda_; }

  // What one stream says. Nothing if a region has no name at the coordinator now: `why`.
  std::optional<v1::TransportOptions> Options(bool required, std::string* why) const;

  // `done` once no worker writes for the stream of this number any more; as SharedRegion::Fence.
  void Fence(uint64_t number, const SharedRegion::Fenced& done) const;
  // Some worker may lack a region.
  void AttachAgain() const;
  // SharedRegion::attachments of each region.
  std::vector<uint64_t> Attachments() const;
  // SharedRegion::ShowAgain of each, `than` as Attachments had it; `taken`: one of them was.
  void ShowAgain(const std::vector<uint64_t>& than, const SharedRegion::Shown& done) const;

 private:
  struct Place {
    v1::TensorId tensor;
    std::shared_ptr<SharedRegion> region;
    uint64_t offset = 0;
  };

  std::vector<std::shared_ptr<SharedRegion>> Regions() const;  // each once

  std::vector<Place> places_;
  bool on_cuda_ = false;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_HOST_TENSOR_LOCATIONS_H_
