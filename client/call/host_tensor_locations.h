// HostTensorLocations: the regions in which a call's tensors lie, either all in host memory or all
// in CUDA memory, and the part of the stream's header that describes them.
// Tests: region_call_test.cc.
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

// Immutable. Keeps the regions' memory alive.
class HostTensorLocations {
 public:
  // Returns null, with the reason in `why`, if a tensor lies in no region or the tensors lie in
  // regions of both kinds.
  static std::shared_ptr<const HostTensorLocations> Of(const std::vector<InputTensor>& inputs,
                                                       const std::vector<OutputTensor>& outputs,
                                                       const RegionIndex& regions,
                                                       std::string* why);

  // The tensors lie on GPUs, so the host must not read them.
  bool on_cuda() const { return on_cuda_; }

  // Returns the header's options for one stream. Returns nothing, with the reason in `why`, if the
  // coordinator has no name for a region now.
  std::optional<v1::TransportOptions> Options(bool required, std::string* why) const;

  // Calls `done` once no worker writes for the stream with this fence number any more; see
  // SharedRegion::Fence.
  void Fence(uint64_t number, const SharedRegion::Fenced& done) const;
  // Attaches the regions again, for workers that may lack one.
  void AttachAgain() const;
  // SharedRegion::attachments of each region.
  std::vector<uint64_t> Attachments() const;
  // SharedRegion::Reattach for each region. `than` comes from Attachments. `done` receives true if
  // a worker has attached one of them.
  void Reattach(const std::vector<uint64_t>& than, const SharedRegion::Reattached& done) const;

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
