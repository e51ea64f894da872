#include "worker/comm/mixed/mixed_blob.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace ringattn::worker {
namespace {

// Format: this line, a second line with the lengths of the four parts and the flags, and the parts.
constexpr absl::string_view kHead = "ringattn-gpu-2\n";
constexpr size_t kMaxNumbersBytes = 64;
constexpr uint32_t kTls = 1, kPlainRing = 2, kRdma = 4, kLoopback = 8, kAllFlags = 15;

absl::Status Malformed(int rank, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("rank ", rank, "'s blob ", why));
}

}  // namespace

std::string EncodeMixedBlob(const MixedBlob& blob) {
  const uint32_t flags = (blob.tls ? kTls : 0) | (blob.insecure_ring ? kPlainRing : 0) |
                         (blob.rdma ? kRdma : 0) | (blob.loopback ? kLoopback : 0);
  return absl::StrCat(kHead, blob.copies.size(), ",", blob.nccl.size(), ",", blob.wire.size(), ",",
                      blob.host.size(), ",", flags, "\n", blob.copies, blob.nccl, blob.wire,
                      blob.host);
}

absl::StatusOr<MixedBlob> DecodeMixedBlob(absl::string_view text, int rank) {
  if (text.empty()) return Malformed(rank, "is empty");
  if (!absl::StartsWith(text, kHead)) {
    return Malformed(rank,
                     absl::StrCat("is not that of a GPU worker of this version: it begins with \"",
                                  absl::CHexEscape(text.substr(0, kHead.size())),
                                  "\"; it must begin with \"", absl::CHexEscape(kHead), "\""));
  }
  absl::string_view rest = text.substr(kHead.size());
  const size_t line = rest.substr(0, kMaxNumbersBytes).find('\n');
  const std::vector<absl::string_view> texts = absl::StrSplit(rest.substr(0, line), ',');
  std::vector<uint32_t> numbers(texts.size());
  bool are_numbers = line != absl::string_view::npos && texts.size() == 5;
  for (size_t i = 0; i < texts.size(); ++i) {
    are_numbers = are_numbers && absl::SimpleAtoi(texts[i], &numbers[i]);
  }
  if (!are_numbers || numbers[4] > kAllFlags) {
    return Malformed(
        rank,
        "is malformed: its second line must hold four lengths and flags up to 15, as in "
        "\"120,300,90,36,1\"");
  }
  rest.remove_prefix(line + 1);
  size_t total = 0, longest = 0;
  for (size_t part = 0; part < 4; ++part) {
    total += numbers[part];
    longest = std::max<size_t>(longest, numbers[part]);
  }
  if (longest > kMaxMixedPartBytes || rest.size() != total) {
    return Malformed(
        rank, absl::StrCat("is malformed: it announces parts of ",
                           absl::StrJoin(texts.begin(), texts.begin() + 4, ", "), " bytes, and ",
                           rest.size(), " bytes follow; each part may have ", kMaxMixedPartBytes));
  }
  const auto take = [&rest](size_t bytes) {
    const std::string part(rest.substr(0, bytes));
    rest.remove_prefix(bytes);
    return part;
  };
  MixedBlob blob;
  blob.copies = take(numbers[0]);
  blob.nccl = take(numbers[1]);
  blob.wire = take(numbers[2]);
  blob.host = take(numbers[3]);
  const uint32_t flags = numbers[4];
  blob.tls = (flags & kTls) != 0;
  blob.insecure_ring = (flags & kPlainRing) != 0;
  blob.rdma = (flags & kRdma) != 0;
  blob.loopback = (flags & kLoopback) != 0;
  return blob;
}

}  // namespace ringattn::worker
