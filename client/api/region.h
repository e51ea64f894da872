// ringattn::client::Region: host memory that it shares with the workers of this machine. Workers
// read and write tensors in it directly, so these tensors need no transfer.
//
//   auto region = ringattn::client::Region::Allocate(client.get(), 1 << 30);
//   ForwardArgs args;                // q, k, v and the results lie in (*region)->memory()
//   client->Forward(args, results);  // recognises them by their addresses
//
// CallReport reports the transport of each call and the reason for it. The library stages tensors
// outside regions where that is faster (ClientOptions::staging_bytes), at the cost of a copy each.
// Tests: client/call/region_call_test.cc, tests/e2e/test_host_memory.py.
#ifndef RINGATTN_CLIENT_API_REGION_H_
#define RINGATTN_CLIENT_API_REGION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/api/call.h"

namespace ringattn::client {

class Client;

// Thread safe, except for accesses to the memory itself.
class Region {
 public:
  // Allocates `bytes` of zeroed, page-aligned memory (about 3 GB/s) and attaches it to all workers.
  // Attaching takes milliseconds, or seconds if a worker hangs. If no worker can attach it (other
  // machine, --local_memory=off), the memory works like any other: trouble() returns the reason and
  // calls use another transport. The region may outlive `client`. Other clients' calls do not use
  // it. Errors: RESOURCE_EXHAUSTED without memory or descriptors; INVALID_ARGUMENT for 0 bytes.
  static absl::StatusOr<std::unique_ptr<Region>> Allocate(Client* client, int64_t bytes);

  // Detaches the region from all workers. Calls that use it end with CANCELLED, REGION_RELEASED.
  // The memory is unmapped after they have ended. A child process after fork() does not inherit it.
  ~Region();

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  MutableBytes memory() const;

  // Keeps the memory mapped while the returned pointer exists, even after the region is destroyed
  // and no worker has it attached.
  std::shared_ptr<const void> mapping() const;

  // Names of the workers that have the region attached. A restarted worker attaches it within
  // seconds.
  std::vector<std::string> workers() const;
  // Why some workers have not attached the region; empty if no problem is known.
  std::string trouble() const;

 private:
  struct Impl;
  explicit Region(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_REGION_H_
