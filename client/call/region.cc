#include "client/api/region.h"

#include <utility>

#include "client/call/client_impl.h"
#include "client/memory/region_index.h"
#include "client/memory/shared_region.h"

namespace ringattn::client {

struct Region::Impl {
  std::shared_ptr<SharedRegion> shared;
  std::shared_ptr<RegionIndex> index;
};

absl::StatusOr<std::unique_ptr<Region>> Region::Allocate(Client* client, int64_t bytes) {
  Client::Impl& impl = *client->impl_;
  absl::StatusOr<std::shared_ptr<SharedRegion>> shared =
      SharedRegion::Make(bytes, impl.AttachCall());
  if (!shared.ok()) return shared.status();
  (*shared)->AwaitFirstRound(SharedRegion::kFirstRound);
  impl.regions->Add(*shared);
  return std::unique_ptr<Region>(
      new Region(std::make_unique<Impl>(Impl{*std::move(shared), impl.regions})));
}

Region::Region(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Region::~Region() {
  impl_->index->Remove(impl_->shared.get());
  impl_->shared->Stop();
}

MutableBytes Region::memory() const {
  return {impl_->shared->data(), static_cast<size_t>(impl_->shared->bytes())};
}

std::shared_ptr<const void> Region::mapping() const { return impl_->shared; }

std::vector<std::string> Region::workers() const { return impl_->shared->workers(); }

std::string Region::trouble() const { return impl_->shared->trouble(); }

}  // namespace ringattn::client
