#include "worker/comm/peer/peer_blob.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/security/token.h"

namespace ringattn::worker {
namespace {

// Lines of text, in the order of PeerBlob's fields.
constexpr char kHead[] = "ringattn-peer-2";
constexpr char kVmmWord[] = "vmm";
constexpr char kIpcWord[] = "ipc";
constexpr char kHostIdMark[] = " host:";  // in a key
constexpr size_t kLines = 8;
constexpr size_t kUuidDigits = 32;
constexpr size_t kMaxTextBytes = 64 << 10;

// Returns the machine's boot id combined with a namespace, unless that is null.
std::string Key(const char* space_of) {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char space[64] = {};
  const ssize_t length = space_of == nullptr ? 1 : readlink(space_of, space, sizeof(space) - 1);
  // Without either, no process is considered to be on the same machine.
  if (boot.empty() || length <= 0) {
    static const auto* const alone = new std::string(absl::BytesToHexString(RandomToken()));
    return *alone;
  }
  return absl::StrCat(boot, " ", space);
}

bool IsHex(const std::string& text, size_t digits) {
  return text.size() == digits && std::all_of(text.begin(), text.end(), absl::ascii_isxdigit);
}

bool Decode(const std::string& text, PeerBlob* blob) {
  if (text.size() > kMaxTextBytes) return false;
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  if (lines.size() != kLines || lines[0] != kHead) return false;
  blob->sharing = lines[1] == kVmmWord ? PeerSharing::kVmm : PeerSharing::kIpc;
  blob->host_key = lines[2];
  blob->device_uuid = lines[4];
  blob->reachable_uuids = absl::StrSplit(lines[5], ',', absl::SkipEmpty());
  blob->place = lines[6];
  blob->token = absl::HexStringToBytes(IsHex(lines[7], lines[7].size()) ? lines[7] : "");
  const auto is_uuid = [](const std::string& uuid) { return IsHex(uuid, kUuidDigits); };
  if (blob->host_key.empty() || !absl::SimpleAtoi(lines[3], &blob->process_id) ||
      !is_uuid(blob->device_uuid) ||
      !std::all_of(blob->reachable_uuids.begin(), blob->reachable_uuids.end(), is_uuid)) {
    return false;
  }
  if (blob->sharing == PeerSharing::kVmm) {
    return blob->token.size() == kTokenBytes && lines[7].size() == 2 * kTokenBytes &&
           blob->place.size() > 1 && (blob->place[0] == '/' || blob->place[0] == '@');
  }
  return lines[1] == kIpcWord && lines[7].empty() &&
         absl::StartsWith(blob->place, absl::StrCat("/proc/", blob->process_id, "/fd/"));
}

// Returns the key with the id of the host, in hexadecimal because it may hold any character.
std::string WithHostId(std::string key, const std::string& host_id) {
  if (host_id.empty()) return key;
  return absl::StrCat(key, kHostIdMark, absl::BytesToHexString(host_id));
}

absl::string_view WithoutHostId(absl::string_view key) {
  return key.substr(0, key.find(kHostIdMark));
}

}  // namespace

std::string EncodePeerBlob(const PeerBlob& blob) {
  return absl::StrJoin(
      {std::string(kHead), std::string(blob.sharing == PeerSharing::kVmm ? kVmmWord : kIpcWord),
       blob.host_key, absl::StrCat(blob.process_id), blob.device_uuid,
       absl::StrJoin(blob.reachable_uuids, ","), blob.place, absl::BytesToHexString(blob.token)},
      "\n");
}

absl::StatusOr<PeerBlob> DecodePeerBlob(const std::string& text, int rank) {
  if (text.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("rank ", rank, " does not share memory"));
  }
  PeerBlob blob;
  if (Decode(text, &blob)) return blob;
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", rank, "'s blob is not that of a ring in shared memory"));
}

std::string PeerObstacle(const PeerBlob& a, const PeerBlob& b) {
  if (a.sharing != b.sharing) return "share memory in different ways (--peer_memory)";
  if (a.host_key != b.host_key) {
    if (WithoutHostId(a.host_key) == WithoutHostId(b.host_key)) return "differ in --host_id";
    return a.sharing == PeerSharing::kVmm
               ? "are not on one machine, or not in one network namespace (--peer_socket_dir)"
               : "are not on one machine, or not in one PID namespace";
  }
  const auto reaches = [](const PeerBlob& from, const PeerBlob& to) {
    return std::find(from.reachable_uuids.begin(), from.reachable_uuids.end(), to.device_uuid) !=
           from.reachable_uuids.end();
  };
  if (reaches(a, b) && reaches(b, a)) return "";
  return a.device_uuid == b.device_uuid ? "are on one GPU"
                                        : "have GPUs without access to each other";
}

absl::StatusOr<std::vector<PeerBlob>> DecodePeerBlobs(const std::vector<std::string>& texts) {
  std::vector<int> ranks(texts.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return DecodePeerBlobs(texts, ranks);
}

absl::StatusOr<std::vector<PeerBlob>> DecodePeerBlobs(const std::vector<std::string>& texts,
                                                      const std::vector<int>& ranks) {
  std::vector<PeerBlob> blobs(texts.size());
  for (int rank : ranks) {
    absl::StatusOr<PeerBlob> blob = DecodePeerBlob(texts[rank], rank);
    if (!blob.ok()) return blob.status();
    blobs[rank] = *std::move(blob);
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    for (size_t j = i + 1; j < ranks.size(); ++j) {
      const std::string obstacle = PeerObstacle(blobs[ranks[i]], blobs[ranks[j]]);
      if (obstacle.empty()) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("ranks ", ranks[i], " and ", ranks[j], " ", obstacle));
    }
  }
  return blobs;
}

std::string HostKey(const std::string& host_id) {
  return WithHostId(Key("/proc/self/ns/pid"), host_id);
}

std::string SocketKey(const std::string& socket, const std::string& host_id) {
  return WithHostId(absl::StartsWith(socket, "@") ? Key("/proc/self/ns/net") : Key(nullptr),
                    host_id);
}

}  // namespace ringattn::worker
