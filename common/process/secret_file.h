// Reads the file with the cluster's shared secret.
#ifndef RINGATTN_COMMON_PROCESS_SECRET_FILE_H_
#define RINGATTN_COMMON_PROCESS_SECRET_FILE_H_

#include <string>

#include "absl/status/statusor.h"

namespace ringattn {

// Returns the file's text without surrounding white space. Returns INVALID_ARGUMENT if the file
// cannot be read, has fewer than 16 or more than 1,024 characters, or holds characters that HTTP
// metadata does not permit.
absl::StatusOr<std::string> ReadSecretFile(const std::string& path);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_SECRET_FILE_H_
