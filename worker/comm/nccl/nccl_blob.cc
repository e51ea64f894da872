#include "worker/comm/nccl/nccl_blob.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ringattn::worker {
namespace {

// Four lines, followed by the raw bytes of the id.
constexpr char kHead[] = "ringattn-nccl-1";
constexpr size_t kMaxHostBytes = 256;
constexpr size_t kUuidDigits = 32;

bool IsHost(const std::string& text) {
  return text.size() <= kMaxHostBytes &&
         std::none_of(text.begin(), text.end(), absl::ascii_iscntrl);
}

absl::StatusOr<NcclBlob> Decode(const std::string& text, size_t rank) {
  const std::vector<std::string> parts = absl::StrSplit(text, absl::MaxSplits('\n', 4));
  if (parts.size() == 5 && parts[0] == kHead && IsHost(parts[1]) && IsHost(parts[2]) &&
      parts[3].size() == kUuidDigits &&
      std::all_of(parts[3].begin(), parts[3].end(), absl::ascii_isxdigit) &&
      parts[4].size() == (rank == 0 ? kNcclUniqueIdBytes : 0)) {
    return NcclBlob{parts[1], parts[3], parts[4], parts[2]};
  }
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", rank, "'s blob is not that of an NCCL ring"));
}

}  // namespace

std::string EncodeNcclBlob(const NcclBlob& blob) {
  return absl::StrCat(kHead, "\n", blob.host.substr(0, kMaxHostBytes), "\n",
                      blob.host_id.substr(0, kMaxHostBytes), "\n", blob.device_uuid, "\n",
                      blob.unique_id);
}

absl::StatusOr<std::string> UniqueIdOf(const std::vector<std::string>& blobs) {
  std::map<std::pair<std::string, std::string>, size_t> ranks_by_device;
  std::string unique_id;
  for (size_t rank = 0; rank < blobs.size(); ++rank) {
    absl::StatusOr<NcclBlob> blob = Decode(blobs[rank], rank);
    if (!blob.ok()) return blob.status();
    const auto [other, is_new] =
        ranks_by_device.emplace(std::pair(blob->host_id, blob->device_uuid), rank);
    if (!is_new) {
      return absl::InvalidArgumentError(absl::StrCat("ranks ", other->second, " and ", rank,
                                                     " both use GPU ", blob->device_uuid, " of ",
                                                     blob->host, "; a ring needs one each"));
    }
    if (rank == 0) unique_id = std::move(blob->unique_id);
  }
  if (blobs.empty()) return absl::InvalidArgumentError("the ring has no members");
  return unique_id;
}

}  // namespace ringattn::worker
