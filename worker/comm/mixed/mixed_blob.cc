#include "worker/comm/mixed/mixed_blob.h"

#include <cstdint>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ringattn::worker {
namespace {

// Format: this line, the lengths of both parts as a second line, and both parts.
constexpr absl::string_view kHead = "ringattn-gpu-1\n";
constexpr size_t kMaxLengthsBytes = 32;

absl::Status Malformed(int rank, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("rank ", rank, "'s blob ", why));
}

}  // namespace

std::string EncodeMixedBlob(const MixedBlob& blob) {
  return absl::StrCat(kHead, blob.copies.size(), ",", blob.network.size(), "\n", blob.copies,
                      blob.network);
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
  const size_t line = rest.substr(0, kMaxLengthsBytes).find('\n');
  const absl::string_view lengths = rest.substr(0, line);
  const size_t comma = lengths.find(',');
  uint32_t copies = 0, network = 0;
  if (line == absl::string_view::npos || comma == absl::string_view::npos ||
      !absl::SimpleAtoi(lengths.substr(0, comma), &copies) ||
      !absl::SimpleAtoi(lengths.substr(comma + 1), &network)) {
    return Malformed(rank,
                     "is malformed: its second line must hold two lengths, as in \"120,300\"");
  }
  rest.remove_prefix(line + 1);
  if (copies > kMaxMixedPartBytes || network > kMaxMixedPartBytes ||
      rest.size() != size_t{copies} + network) {
    return Malformed(rank, absl::StrCat("is malformed: it announces parts of ", copies, " and ",
                                        network, " bytes, and ", rest.size(),
                                        " bytes follow; each part may have ", kMaxMixedPartBytes));
  }
  return MixedBlob{std::string(rest.substr(0, copies)), std::string(rest.substr(copies))};
}

}  // namespace ringattn::worker
