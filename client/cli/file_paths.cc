#include "client/cli/file_paths.h"

#include <sys/stat.h>

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "client/cli/command.h"

namespace ringattn::client::cli {
namespace {

// A device or pipe may be named twice, because nothing in it is overwritten.
bool SameFile(const std::string& a, const std::string& b) {
  struct stat info_a, info_b;
  if (stat(a.c_str(), &info_a) == 0 && stat(b.c_str(), &info_b) == 0) {
    return S_ISREG(info_a.st_mode) && info_a.st_dev == info_b.st_dev &&
           info_a.st_ino == info_b.st_ino;
  }
  std::error_code error_a, error_b;
  const auto name_a = std::filesystem::weakly_canonical(a, error_a);
  const auto name_b = std::filesystem::weakly_canonical(b, error_b);
  return !error_a && !error_b && name_a == name_b;
}

}  // namespace

absl::Status CheckFilePaths(const std::vector<FilePath>& read,
                            const std::vector<FilePath>& written) {
  for (size_t i = 0; i < written.size(); ++i) {
    std::vector<FilePath> others = read;
    others.insert(others.end(), written.begin(), written.begin() + i);
    for (const FilePath& other : others) {
      if (written[i].path.empty() || other.path.empty()) continue;
      if (!SameFile(written[i].path, other.path)) continue;
      return UsageError(absl::StrCat(written[i].flag, "=", written[i].path, " is the same file as ",
                                     other.flag, "=", other.path, ", which it would overwrite"));
    }
  }
  return absl::OkStatus();
}

}  // namespace ringattn::client::cli
