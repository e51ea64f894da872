// Checks which files a command reads and writes before it does either.
// Tests: file_paths_test.cc.
#ifndef RINGATTN_CLIENT_CLI_FILE_PATHS_H_
#define RINGATTN_CLIENT_CLI_FILE_PATHS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ringattn::client::cli {

// A path and the flag that gave it.
struct FilePath {
  std::string flag;  // "--output"
  std::string path;  // empty: not given
};

// Returns a UsageError naming both flags if a file is both written and read, or written twice:
// under the same name, through a symbolic link, or as a hard link. Touches no file. Files that do
// not exist are compared by name.
absl::Status CheckFilePaths(const std::vector<FilePath>& read,
                            const std::vector<FilePath>& written);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_FILE_PATHS_H_
