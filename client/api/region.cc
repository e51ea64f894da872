#include "client/api/region.h"

#include <utility>

namespace ringattn::client {
namespace {

// Of the first round with the workers, each of which answers in milliseconds.
constexpr absl::Duration kFirstRound = absl::Seconds(10);

}  // namespace

absl::StatusOr<std::unique_ptr<Region>> Region::Allocate(Client* client, int64_t bytes) {
  absl::StatusOr<std::shared_ptr<SharedRegion>> shared =
      SharedRegion::Make(bytes, client->AttachCall());
  if (!shared.ok()) return shared.status();
  (*shared)->AwaitFirstRound(kFirstRound);
  client->regions()->Add(*shared);
  return std::unique_ptr<Region>(new Region(*std::move(shared), client->regions()));
}

Region::~Region() {
  index_->Remove(shared_.get());
  shared_->Stop();
}

}  // namespace ringattn::client
