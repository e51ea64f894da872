#include "client/api/cuda_region.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn::client {
namespace {

// Of the first round with the workers: to map tens of gigabytes takes seconds.
constexpr absl::Duration kFirstRound = absl::Seconds(60);

}  // namespace

absl::StatusOr<std::unique_ptr<CudaRegion>> CudaRegion::Create(Client* client, int device,
                                                               int64_t bytes) {
  return Share(client, CudaMemory::Allocate(device, bytes));
}

absl::StatusOr<std::unique_ptr<CudaRegion>> CudaRegion::CreateLinear(Client* client, int device,
                                                                     int64_t bytes) {
  return Share(client, CudaMemory::AllocateLinear(device, bytes));
}

absl::StatusOr<std::unique_ptr<CudaRegion>> CudaRegion::Adopt(Client* client, void* data,
                                                              int64_t bytes) {
  return Share(client, CudaMemory::Adopt(data, bytes));
}

absl::StatusOr<std::unique_ptr<CudaRegion>> CudaRegion::Share(
    Client* client, absl::StatusOr<std::shared_ptr<const CudaMemory>> memory) {
  if (!memory.ok()) return memory.status();
  absl::StatusOr<std::shared_ptr<SharedRegion>> shared =
      SharedRegion::MakeOf(*std::move(memory), client->AttachCall());
  if (!shared.ok()) return shared.status();
  (*shared)->AwaitFirstRound(kFirstRound);
  client->regions()->Add(*shared);
  return std::unique_ptr<CudaRegion>(new CudaRegion(*std::move(shared), client->regions()));
}

CudaRegion::~CudaRegion() {
  index_->Remove(shared_.get());
  shared_->Stop();
}

absl::Status CudaRegion::CheckInside(uint64_t offset, size_t bytes) const {
  const auto size = static_cast<uint64_t>(shared_->bytes());
  if (offset <= size && bytes <= size - offset) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("offset: ", bytes, " bytes from ", offset,
                                                 " on reach beyond the region's ", size));
}

absl::Status CudaRegion::CopyIn(uint64_t offset, ConstBytes from_host) const {
  if (absl::Status status = CheckInside(offset, from_host.size()); !status.ok()) return status;
  if (from_host.empty()) return absl::OkStatus();
  return shared_->cuda()->CopyFromHost(shared_->data() + offset, from_host.data(),
                                       static_cast<int64_t>(from_host.size()));
}

absl::Status CudaRegion::CopyOut(uint64_t offset, MutableBytes to_host) const {
  if (absl::Status status = CheckInside(offset, to_host.size()); !status.ok()) return status;
  if (to_host.empty()) return absl::OkStatus();
  return shared_->cuda()->CopyToHost(to_host.data(), shared_->data() + offset,
                                     static_cast<int64_t>(to_host.size()));
}

}  // namespace ringattn::client
