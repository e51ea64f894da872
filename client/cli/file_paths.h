// Which files a command reads and writes, checked before it does either.
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

// A UsageError naming both flags if a file that is written is also read, or written
// twice: under the same name, over a symbolic link, or as another name (hard link) of the
// same file. Touches nothing. Files that do not exist yet are compared by their names.
absl::Status CheckFilePaths(const std::vector<FilePath>& read,
                            const std::vector<FilePath>& written);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_FILE_PATHS_H_
