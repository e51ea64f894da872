#include "worker/comm/peer/peer_blob.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace ringattn::worker {
namespace {

// Lines of text, in the order of PeerBlob.
constexpr char kHead[] = "ringattn-peer-1";
constexpr size_t kLines = 6;
constexpr size_t kUuidDigits = 32;
constexpr size_t kMaxTextBytes = 64 << 10;

bool IsHex(const std::string& text, size_t digits) {
  return text.size() == digits && std::all_of(text.begin(), text.end(), absl::ascii_isxdigit);
}

bool Decode(const std::string& text, PeerBlob* blob) {
  if (text.size() > kMaxTextBytes) return false;
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  if (lines.size() != kLines || lines[0] != kHead) return false;
  blob->host_key = lines[1];
  blob->device_uuid = lines[3];
  blob->reachable_uuids = absl::StrSplit(lines[4], ',', absl::SkipEmpty());
  blob->segment_path = lines[5];
  const auto is_uuid = [](const std::string& uuid) { return IsHex(uuid, kUuidDigits); };
  if (blob->host_key.empty() || !absl::SimpleAtoi(lines[2], &blob->process_id) ||
      !is_uuid(blob->device_uuid) ||
      !std::all_of(blob->reachable_uuids.begin(), blob->reachable_uuids.end(), is_uuid) ||
      !absl::StartsWith(blob->segment_path, absl::StrCat("/proc/", blob->process_id, "/fd/"))) {
    return false;
  }
  return true;
}

// Why the ranks cannot read one another's memory; empty if they can.
std::string Obstacle(const PeerBlob& a, const PeerBlob& b) {
  if (a.host_key != b.host_key) return "are not on one machine";
  if (a.device_uuid == b.device_uuid) return "are on one GPU";
  const auto reaches = [](const PeerBlob& from, const PeerBlob& to) {
    return std::find(from.reachable_uuids.begin(), from.reachable_uuids.end(), to.device_uuid) !=
           from.reachable_uuids.end();
  };
  return reaches(a, b) && reaches(b, a) ? "" : "have GPUs that do not reach one another";
}

}  // namespace

std::string EncodePeerBlob(const PeerBlob& blob) {
  return absl::StrCat(kHead, "\n", blob.host_key, "\n", blob.process_id, "\n", blob.device_uuid,
                      "\n", absl::StrJoin(blob.reachable_uuids, ","), "\n", blob.segment_path);
}

absl::StatusOr<std::vector<PeerBlob>> DecodePeerBlobs(const std::vector<std::string>& texts) {
  std::vector<PeerBlob> blobs(texts.size());
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty()) {
      return absl::FailedPreconditionError(absl::StrCat("rank ", rank, " does not share memory"));
    }
    if (!Decode(texts[rank], &blobs[rank])) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank, "'s blob is not one of a ring in shared memory"));
    }
  }
  for (size_t a = 0; a < blobs.size(); ++a) {
    for (size_t b = a + 1; b < blobs.size(); ++b) {
      if (const std::string obstacle = Obstacle(blobs[a], blobs[b]); !obstacle.empty()) {
        return absl::FailedPreconditionError(absl::StrCat("ranks ", a, " and ", b, " ", obstacle));
      }
    }
  }
  return blobs;
}

std::string HostKey() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char space[64] = {};
  const ssize_t length = readlink("/proc/self/ns/pid", space, sizeof(space) - 1);
  // Without either nobody is on the same machine.
  if (boot.empty() || length <= 0) return absl::StrCat("process ", getpid());
  return absl::StrCat(boot, " ", space);
}

}  // namespace ringattn::worker
