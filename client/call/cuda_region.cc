#include "client/api/cuda_region.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/call/client_impl.h"
#include "client/memory/cuda_memory.h"
#include "client/memory/region_index.h"
#include "client/memory/shared_region.h"

namespace ringattn::client {
namespace {

// Wait for the first attachment. Mapping tens of gigabytes takes seconds.
constexpr absl::Duration kFirstCudaRound = absl::Seconds(60);

}  // namespace

struct CudaRegion::Impl {
  // Attaches `memory` to the workers and adds it to the client's regions.
  static absl::StatusOr<std::unique_ptr<CudaRegion>> Share(
      Client::Impl& client, absl::StatusOr<std::shared_ptr<const CudaMemory>> memory) {
    if (!memory.ok()) return memory.status();
    absl::StatusOr<std::shared_ptr<SharedRegion>> shared =
        SharedRegion::MakeOf(*std::move(memory), client.AttachCall());
    if (!shared.ok()) return shared.status();
    (*shared)->AwaitFirstRound(kFirstCudaRound);
    client.regions->Add(*shared);
    return std::unique_ptr<CudaRegion>(
        new CudaRegion(std::make_unique<Impl>(Impl{*std::move(shared), client.regions})));
  }

  absl::Status CheckInside(uint64_t offset, size_t bytes) const {
    const auto size = static_cast<uint64_t>(shared->bytes());
    if (offset <= size && bytes <= size - offset) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("offset is ", offset, "; ", bytes,
                                                   " bytes from there exceed the region's ", size,
                                                   " bytes"));
  }

  std::shared_ptr<SharedRegion> shared;
  std::shared_ptr<RegionIndex> index;
};

absl::StatusOr<std::unique_ptr<CudaRegion>> CudaRegion::Create(Client* client, int device,
                                                               int64_t bytes) {
  return Impl::Share(*client->impl_, CudaMemory::Allocate(device, bytes));
}

absl::StatusOr<std::unique_ptr<CudaRegion>> CudaRegion::CreateLinear(Client* client, int device,
                                                                     int64_t bytes) {
  return Impl::Share(*client->impl_, CudaMemory::AllocateLinear(device, bytes));
}

absl::StatusOr<std::unique_ptr<CudaRegion>> CudaRegion::Adopt(Client* client, void* data,
                                                              int64_t bytes) {
  return Impl::Share(*client->impl_, CudaMemory::Adopt(data, bytes));
}

CudaRegion::CudaRegion(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

CudaRegion::~CudaRegion() {
  impl_->index->Remove(impl_->shared.get());
  impl_->shared->Stop();
}

MutableBytes CudaRegion::memory() const {
  return {impl_->shared->data(), static_cast<size_t>(impl_->shared->bytes())};
}

int CudaRegion::device() const { return impl_->shared->cuda()->device(); }

absl::Status CudaRegion::CopyIn(uint64_t offset, ConstBytes from_host) const {
  absl::Status status = impl_->CheckInside(offset, from_host.size());
  if (!status.ok() || from_host.empty()) return status;
  const SharedRegion& shared = *impl_->shared;
  return shared.cuda()->CopyFromHost(shared.data() + offset, from_host.data(),
                                     static_cast<int64_t>(from_host.size()));
}

absl::Status CudaRegion::CopyOut(uint64_t offset, MutableBytes to_host) const {
  absl::Status status = impl_->CheckInside(offset, to_host.size());
  if (!status.ok() || to_host.empty()) return status;
  const SharedRegion& shared = *impl_->shared;
  return shared.cuda()->CopyToHost(to_host.data(), shared.data() + offset,
                                   static_cast<int64_t>(to_host.size()));
}

std::vector<std::string> CudaRegion::workers() const { return impl_->shared->workers(); }

std::string CudaRegion::trouble() const { return impl_->shared->trouble(); }

}  // namespace ringattn::client
