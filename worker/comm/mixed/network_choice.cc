#include "worker/comm/mixed/network_choice.h"

#include <functional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ringattn::worker {
namespace {

// Returns the first rank for which `holds` is true, or -1.
int First(const std::vector<MixedBlob>& blobs,
          const std::function<bool(const MixedBlob& blob)>& holds) {
  for (size_t rank = 0; rank < blobs.size(); ++rank) {
    if (holds(blobs[rank])) return static_cast<int>(rank);
  }
  return -1;
}

// Returns true if two ranks that share no memory are on different hosts, or may be.
bool LeavesHost(const std::vector<MixedBlob>& blobs, const std::vector<int>& island) {
  for (size_t rank = 1; rank < blobs.size(); ++rank) {
    if (blobs[rank].host.empty() || blobs[rank].host != blobs[0].host) return true;
  }
  return island.size() > 1 && blobs[0].host.empty();
}

}  // namespace

absl::string_view NetworkName(NetworkEngine engine) {
  switch (engine) {
    case NetworkEngine::kNone:
      return "none";
    case NetworkEngine::kNccl:
      return "nccl";
    case NetworkEngine::kWire:
      return "wire";
  }
  return "";
}

absl::StatusOr<NetworkChoice> ChooseNetwork(const std::vector<MixedBlob>& blobs,
                                            const std::vector<int>& island, absl::string_view why) {
  const int neither =
      First(blobs, [](const MixedBlob& blob) { return blob.nccl.empty() && blob.wire.empty(); });
  if (neither >= 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(why, ", and rank ", neither, " has no other transport"));
  }
  const int no_nccl = First(blobs, [](const MixedBlob& blob) { return blob.nccl.empty(); });
  const int no_wire = First(blobs, [](const MixedBlob& blob) { return blob.wire.empty(); });
  if (no_nccl >= 0 && no_wire >= 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        why, ", but rank ", no_nccl, " has no NCCL and rank ", no_wire,
        " no sockets; give all workers the same --ring_transport, and all of them NCCL or none"));
  }
  const bool leaves_host = LeavesHost(blobs, island);
  const int secured =
      First(blobs, [](const MixedBlob& blob) { return blob.tls && !blob.insecure_ring; });
  if (leaves_host && secured >= 0) {
    if (no_wire < 0) {
      return NetworkChoice{
          NetworkEngine::kWire,
          absl::StrCat("rank ", secured, " has cluster certificates, and NCCL does not encrypt")};
    }
    const std::string only =
        no_wire == secured ? " and only" : absl::StrCat(", and rank ", no_wire, " has only");
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", secured, " has cluster certificates", only,
        " NCCL, which does not encrypt what it sends between hosts; start all workers with "
        "--ring_transport=auto, or with --insecure_ring to permit plain text"));
  }
  const auto nccl = [](std::string reason) {
    return NetworkChoice{NetworkEngine::kNccl, std::move(reason)};
  };
  const auto wire = [](std::string reason) {
    return NetworkChoice{NetworkEngine::kWire, std::move(reason)};
  };
  if (no_wire >= 0) return nccl(absl::StrCat("rank ", no_wire, " has no sockets"));
  if (no_nccl >= 0) return wire(absl::StrCat("rank ", no_nccl, " has no NCCL"));
  if (!leaves_host) return nccl("all ranks are on one host");
  const int no_rdma = First(blobs, [](const MixedBlob& blob) { return !blob.rdma; });
  if (no_rdma < 0) return nccl("all ranks have RDMA");
  const int loopback = First(blobs, [](const MixedBlob& blob) { return blob.loopback; });
  if (loopback >= 0) {
    return nccl(absl::StrCat("rank ", loopback,
                             " has a loopback address as --ring_address, so its sockets cannot be "
                             "reached from other hosts"));
  }
  return wire(absl::StrCat("rank ", no_rdma, " has no RDMA"));
}

}  // namespace ringattn::worker
