#include "client/call/host_tensor_locations.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/transfer/tensor_bytes.h"

namespace ringattn::client {
namespace {

// Every stream of this process has its own number; a region belongs to one process.
std::atomic<uint64_t> last_fence_number{0};

}  // namespace

std::shared_ptr<const HostTensorLocations> HostTensorLocations::Of(
    const std::vector<InputTensor>& inputs, const std::vector<OutputTensor>& outputs,
    const RegionIndex& regions, std::string* why) {
  // An empty tensor lies in the region of some other tensor.
  std::shared_ptr<SharedRegion> any = regions.Any();
  for (const InputTensor& input : inputs) {
    const ConstRuns& bytes = input.bytes;
    if (bytes.size() == 0 || !bytes.in_one_piece()) continue;
    if (auto found = regions.Find(bytes.data(), bytes.size()); found != nullptr) any = found;
  }
  if (any == nullptr) {
    *why = "the client has no region";
    return nullptr;
  }
  auto places = std::make_shared<HostTensorLocations>();
  places->on_cuda_ = any->cuda() != nullptr;
  const auto add = [&](v1::TensorId tensor, const uint8_t* data, uint64_t size, bool whole) {
    if (size == 0) {
      places->places_.push_back({tensor, any, 0});
      return true;
    }
    std::shared_ptr<SharedRegion> region = whole ? regions.Find(data, size) : nullptr;
    if (region == nullptr) {
      *why = absl::StrCat(TensorIdName(tensor), " lies in no region");
      return false;
    }
    if ((region->cuda() != nullptr) != places->on_cuda_) {
      *why = absl::StrCat(TensorIdName(tensor), " lies in ",
                          places->on_cuda_ ? "host memory, others in CUDA memory"
                                           : "CUDA memory, others in host memory");
      return false;
    }
    const auto offset = static_cast<uint64_t>(data - region->data());
    places->places_.push_back({tensor, std::move(region), offset});
    return true;
  };
  for (const InputTensor& input : inputs) {
    const ConstRuns& bytes = input.bytes;
    if (!add(input.tensor, bytes.data(), bytes.size(), bytes.in_one_piece())) return nullptr;
  }
  for (const OutputTensor& output : outputs) {
    const MutableRuns& bytes = output.bytes;
    if (!add(output.tensor, bytes.data(), bytes.size(), bytes.in_one_piece())) return nullptr;
  }
  return places;
}

std::optional<v1::TransportOptions> HostTensorLocations::Options(bool required,
                                                                 std::string* why) const {
  v1::TransportOptions options;
  options.add_accept(on_cuda_ ? v1::TRANSPORT_CUDA_MEMORY : v1::TRANSPORT_HOST_MEMORY);
  options.set_required(required);
  options.set_fence_number(++last_fence_number);
  for (const Place& place : places_) {
    std::string trouble;
    const std::string id = place.region->id(&trouble);
    if (id.empty()) {
      *why = absl::StrCat("the region of ", TensorIdName(place.tensor),
                          " is attached to no worker: ", trouble);
      return std::nullopt;
    }
    v1::TensorLocation* added = options.add_places();
    added->set_tensor(place.tensor);
    added->set_region_id(id);
    added->set_offset(place.offset);
  }
  return options;
}

std::vector<std::shared_ptr<SharedRegion>> HostTensorLocations::Regions() const {
  std::vector<std::shared_ptr<SharedRegion>> regions;
  for (const Place& place : places_) {
    if (std::find(regions.begin(), regions.end(), place.region) == regions.end()) {
      regions.push_back(place.region);
    }
  }
  return regions;
}

void HostTensorLocations::Fence(uint64_t number, const SharedRegion::Fenced& done) const {
  struct Rest {
    absl::Mutex mutex;
    size_t waiting = 0;
    std::string unsure;
  };
  auto rest = std::make_shared<Rest>();
  const std::vector<std::shared_ptr<SharedRegion>> regions = Regions();
  rest->waiting = regions.size();
  for (const std::shared_ptr<SharedRegion>& region : regions) {
    region->Fence(number, [rest, done](const std::string& unsure) {
      {
        const absl::MutexLock lock(&rest->mutex);
        if (!unsure.empty()) rest->unsure = unsure;
        if (--rest->waiting > 0) return;
      }
      done(rest->unsure);
    });
  }
}

void HostTensorLocations::AttachAgain() const {
  for (const std::shared_ptr<SharedRegion>& region : Regions()) region->AttachAgain();
}

std::vector<uint64_t> HostTensorLocations::Attachments() const {
  std::vector<uint64_t> attachments;
  for (const std::shared_ptr<SharedRegion>& region : Regions()) {
    attachments.push_back(region->attachments());
  }
  return attachments;
}

// The callback does not keep the regions: it may be the last reference, on a region's own thread.
void HostTensorLocations::Reattach(const std::vector<uint64_t>& than,
                                   const SharedRegion::Reattached& done) const {
  struct Rest {
    absl::Mutex mutex;
    size_t waiting = 0;
    bool taken = false;
  };
  auto rest = std::make_shared<Rest>();
  const std::vector<std::shared_ptr<SharedRegion>> regions = Regions();
  rest->waiting = regions.size();
  for (size_t i = 0; i < regions.size(); ++i) {
    regions[i]->Reattach(than[i], [rest, done](bool taken) {
      {
        const absl::MutexLock lock(&rest->mutex);
        rest->taken |= taken;
        if (--rest->waiting > 0) return;
      }
      done(rest->taken);
    });
  }
}

}  // namespace ringattn::client
