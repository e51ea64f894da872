// ringattn::client::Region: host memory that the workers of this machine read and write
// themselves, so that tensors in it need not travel.
//
//   auto region = ringattn::client::Region::Allocate(client.get(), 1 << 30);
//   ForwardArgs args;                       // q, k, v and the results lie in (*region)->memory()
//   client->Forward(args, results);         // finds them there by their addresses
//
// The report says which way the tensors took and why (CallReport::transport_reason). Tensors that
// lie in no region pass through one of the library's where that pays
// (ClientOptions::staging_bytes), at the cost of a copy each.
#ifndef RINGATTN_CLIENT_API_REGION_H_
#define RINGATTN_CLIENT_API_REGION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/api/call.h"
#include "client/api/client.h"
#include "client/memory/region_index.h"
#include "client/memory/shared_region.h"

namespace ringattn::client {

// Thread safe, but for what the caller does with the memory itself.
class Region {
 public:
  // `bytes` of memory, zeroed and aligned to pages, at the cost of populating them (some 3 GB/s);
  // shown to all workers before it returns, which takes milliseconds, or seconds where one hangs.
  // Where no worker takes it (another machine, --local_memory=off) it is memory like any other:
  // trouble() says why, and calls are relayed. `client` may go first; calls of other clients
  // do not find it.
  // Errors: RESOURCE_EXHAUSTED without memory or descriptors; INVALID_ARGUMENT for 0 bytes.
  static absl::StatusOr<std::unique_ptr<Region>> Allocate(Client* client, int64_t bytes);

  // Workers let go of it; calls that use it end with CANCELLED, REGION_RELEASED. The memory is
  // unmapped when they have ended. A child of fork() does not have it.
  ~Region();

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  MutableBytes memory() const { return {shared_->data(), static_cast<size_t>(shared_->bytes())}; }

  // The memory stays mapped for as long as anybody has this, also when the region is gone and no
  // worker has it any more.
  std::shared_ptr<const void> mapping() const { return shared_; }

  // By name, the workers that have it now. One that is started again gets it within seconds.
  std::vector<std::string> workers() const { return shared_->workers(); }
  // Why some have not; empty: nothing is known.
  std::string trouble() const { return shared_->trouble(); }

 private:
  Region(std::shared_ptr<SharedRegion> shared, std::shared_ptr<RegionIndex> index)
      : shared_(std::move(shared)), index_(std::move(index)) {}

  const std::shared_ptr<SharedRegion> shared_;
  const std::shared_ptr<RegionIndex> index_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_REGION_H_
