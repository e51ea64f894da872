// Ranks of GPU rings over several emulated hosts: ranks of one machine that do not map each other's
// memory if their host ids differ.
#ifndef RINGATTN_WORKER_COMM_MIXED_EMULATED_HOSTS_H_
#define RINGATTN_WORKER_COMM_MIXED_EMULATED_HOSTS_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/security/tls_material.h"
#include "worker/comm/contract/ring_under_test.h"
#include "worker/comm/mixed/mixed_blob.h"
#include "worker/comm/mixed/ring_paths.h"

namespace ringattn::worker {

struct EmulatedRank {
  int device = 0;
  std::string host_id;  // empty: the rank does not share memory
  // The engines that it offers for transfers between hosts.
  bool nccl = true;
  bool wire = false;
  std::optional<TlsMaterial> tls = std::nullopt;  // for wire
  MixedBlob facts = {};                           // `host` is set to host_id
  // Called with the choice; may be null.
  std::function<void(const RingPaths& paths)> on_choice;
  bool shared_gpu = false;  // PeerTransportOptions
};

// Creates a rank of a MixedRingTransport. Its memory is that of MakePeerRank with descriptors.
std::unique_ptr<TestRank> MakeEmulatedRank(const EmulatedRank& rank,
                                           const TestRankOptions& options);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_MIXED_EMULATED_HOSTS_H_
