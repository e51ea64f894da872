#include "worker/comm/wire/wire_blob.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/security/token.h"
#include "worker/comm/wire/wire_integers.h"

namespace ringattn::worker {
namespace {

constexpr absl::string_view kBlobMagic = "RAWB0001";
constexpr size_t kBlobBytes = 8 + 1 + 1 + 2 + sizeof(in6_addr) + kTokenBytes;

}  // namespace

std::string FormatWireBlob(const WireBlob& blob) {
  std::string text(kBlobMagic);
  AppendInteger(blob.tls ? 1 : 0, 1, &text);
  AppendInteger(static_cast<uint64_t>(blob.stripes), 1, &text);
  AppendInteger(blob.address.port, 2, &text);
  text.append(reinterpret_cast<const char*>(&blob.address.ip), sizeof(blob.address.ip));
  text += blob.secret;
  return text;
}

absl::StatusOr<WireBlob> ParseWireBlob(absl::string_view text) {
  if (text.size() != kBlobBytes || text.substr(0, kBlobMagic.size()) != kBlobMagic) {
    return absl::InvalidArgumentError("the blob is not one of this transport");
  }
  const char* const fields = text.data() + kBlobMagic.size();
  const uint64_t tls = ReadInteger(fields, 1), stripes = ReadInteger(fields + 1, 1);
  WireBlob blob;
  blob.address.port = static_cast<uint16_t>(ReadInteger(fields + 2, 2));
  if (tls > 1 || stripes < 1 || stripes > kMaxWireStripes || blob.address.port == 0) {
    return absl::InvalidArgumentError(absl::StrCat("the blob names ", stripes,
                                                   " connections, port ", blob.address.port,
                                                   " and protection ", tls));
  }
  blob.tls = tls == 1;
  blob.stripes = static_cast<int>(stripes);
  std::memcpy(&blob.address.ip, fields + 4, sizeof(blob.address.ip));
  blob.secret = std::string(text.substr(kBlobBytes - kTokenBytes));
  return blob;
}

std::string WireRingToken(uint64_t generation, const std::vector<WireBlob>& blobs) {
  std::string secrets, all;
  for (const WireBlob& blob : blobs) {
    secrets += blob.secret;
    all += FormatWireBlob(blob);
  }
  return DeriveToken(secrets, absl::StrCat("ring of generation ", generation, ": ", all));
}

}  // namespace ringattn::worker
