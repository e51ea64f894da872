#include "worker/comm/mixed/ring_paths.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "worker/comm/peer/peer_blob.h"

namespace ringattn::worker {
namespace {

// Returns why not every two of these ranks, which are on one machine, can read each other's memory;
// empty if they can.
std::string Obstacle(const std::vector<int>& ranks, const std::vector<PeerBlob>& blobs) {
  if (ranks.size() > kMaxPeerRing) {
    return absl::StrCat(ranks.size(), " ranks are on the machine of rank ", ranks[0], "; at most ",
                        kMaxPeerRing, " can share memory");
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    for (size_t j = i + 1; j < ranks.size(); ++j) {
      const std::string obstacle = PeerObstacle(blobs[ranks[i]], blobs[ranks[j]]);
      if (obstacle.empty()) continue;
      return absl::StrCat("ranks ", ranks[i], " and ", ranks[j], " ", obstacle);
    }
  }
  return "";
}

// Numbers islands in the order of their first ranks. `first`: by rank, the lowest rank of its
// island.
std::vector<int> Numbered(const std::vector<int>& first) {
  std::vector<int> island(first.size());
  int islands = 0;
  for (int rank = 0; rank < static_cast<int>(first.size()); ++rank) {
    island[rank] = first[rank] == rank ? islands++ : island[first[rank]];
  }
  return island;
}

RingPaths::Kind KindOf(const std::vector<int>& island, const std::vector<MixedBlob>& blobs) {
  const int islands = *std::max_element(island.begin(), island.end()) + 1;
  if (islands == 1 && !blobs[0].copies.empty()) return RingPaths::Kind::kCopies;
  return islands == static_cast<int>(island.size()) ? RingPaths::Kind::kNetwork
                                                    : RingPaths::Kind::kMixed;
}

}  // namespace

absl::StatusOr<RingPaths> ChoosePaths(const std::vector<MixedBlob>& blobs) {
  if (blobs.empty()) return absl::InvalidArgumentError("the ring has no members");
  const int world_size = static_cast<int>(blobs.size());
  std::vector<std::string> texts(blobs.size());
  std::vector<PeerBlob> peers(blobs.size());
  std::map<std::pair<PeerSharing, std::string>, std::vector<int>> machines;
  std::vector<int> first(blobs.size());
  for (int rank = 0; rank < world_size; ++rank) {
    first[rank] = rank;
    texts[rank] = blobs[rank].copies;
    if (texts[rank].empty()) continue;
    absl::StatusOr<PeerBlob> peer = DecodePeerBlob(texts[rank], rank);
    if (!peer.ok()) return peer.status();
    peers[rank] = *std::move(peer);
    machines[{peers[rank].sharing, peers[rank].host_key}].push_back(rank);
  }

  RingPaths paths;
  for (const auto& [key, ranks] : machines) {
    const std::string obstacle = Obstacle(ranks, peers);
    if (obstacle.empty()) {
      for (int rank : ranks) first[rank] = ranks[0];
    } else if (paths.within.empty()) {
      paths.within = obstacle;
    }
  }
  paths.island = Numbered(first);
  paths.kind = KindOf(paths.island, blobs);
  if (paths.kind == RingPaths::Kind::kCopies) return paths;
  const absl::Status all_by_copies = DecodePeerBlobs(texts).status();
  paths.across = all_by_copies.ok() ? paths.within : std::string(all_by_copies.message());
  if (world_size == 1) {
    // No bytes leave the rank. It needs a transport that forms rings of one.
    const bool wire = blobs[0].nccl.empty();
    paths.network = {wire ? NetworkEngine::kWire : NetworkEngine::kNccl, "the ring has one rank"};
    return paths;
  }
  absl::StatusOr<NetworkChoice> network = ChooseNetwork(blobs, paths.island, paths.across);
  if (!network.ok()) return network.status();
  paths.network = *std::move(network);
  return paths;
}

std::vector<int> RingPaths::PeersInside(int rank) const {
  std::vector<int> peers;
  for (int peer = 0; peer < static_cast<int>(island.size()); ++peer) {
    if (peer != rank && island[peer] == island[rank]) peers.push_back(peer);
  }
  return peers;
}

std::vector<int> RingPaths::PeersOutside(int rank) const {
  std::vector<int> peers;
  for (int peer = 0; peer < static_cast<int>(island.size()); ++peer) {
    if (island[peer] != island[rank]) peers.push_back(peer);
  }
  return peers;
}

std::string RingPaths::Islands() const {
  std::map<int, std::vector<std::string>> runs;  // by island, in ranks' order
  for (size_t begin = 0; begin < island.size();) {
    size_t end = begin + 1;
    while (end < island.size() && island[end] == island[begin]) ++end;
    runs[island[begin]].push_back(end - begin == 1 ? absl::StrCat(begin)
                                                   : absl::StrCat(begin, "-", end - 1));
    begin = end;
  }
  return absl::StrJoin(runs, " ", [](std::string* out, const auto& item) {
    absl::StrAppend(out, absl::StrJoin(item.second, ","));
  });
}

SplitGroup SplitByPath(const std::vector<PeerTransfer>& group, const std::vector<bool>& by_copies) {
  SplitGroup split;
  for (const PeerTransfer& transfer : group) {
    (by_copies[transfer.peer] ? split.copies : split.network).push_back(transfer);
  }
  return split;
}

}  // namespace ringattn::worker
