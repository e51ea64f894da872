// The file that holds the cluster's shared secret.
#ifndef RINGATTN_COMMON_PROCESS_SECRET_FILE_H_
#define RINGATTN_COMMON_PROCESS_SECRET_FILE_H_

#include <string>

#include "absl/status/statusor.h"

namespace ringattn {

// The file's text without the white space around it. INVALID_ARGUMENT if it cannot
// be read, is shorter than 16 characters, longer than 1,024, or holds what HTTP
// metadata cannot carry.
absl::StatusOr<std::string> ReadSecretFile(const std::string& path);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_SECRET_FILE_H_
