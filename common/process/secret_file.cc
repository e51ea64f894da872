#include "common/process/secret_file.h"

#include <algorithm>
#include <array>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ringattn {
namespace {

constexpr size_t kMinBytes = 16;
constexpr size_t kMaxBytes = 1024;

}  // namespace

absl::StatusOr<std::string> ReadSecretFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  // Reading slightly more than the limit detects a long file without reading all of it.
  std::array<char, kMaxBytes + 64> read;
  file.read(read.data(), read.size());
  if (file.bad() || (file.gcount() == 0 && !file.eof())) {
    return absl::InvalidArgumentError(absl::StrCat("cannot read the secret file ", path));
  }
  const absl::string_view text =
      absl::StripAsciiWhitespace(absl::string_view(read.data(), file.gcount()));
  const bool printable =
      std::all_of(text.begin(), text.end(), [](char c) { return c > 0x20 && c < 0x7f; });
  if (text.size() < kMinBytes || text.size() > kMaxBytes || !printable) {
    return absl::InvalidArgumentError(absl::StrCat("the secret file ", path, " must hold ",
                                                   kMinBytes, " to ", kMaxBytes,
                                                   " printable characters without spaces"));
  }
  return std::string(text);
}

}  // namespace ringattn
