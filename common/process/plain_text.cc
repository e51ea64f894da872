#include "common/process/plain_text.h"

#include "absl/strings/str_cat.h"
#include "common/process/loopback.h"

namespace ringattn {

absl::Status CheckPlainText(absl::string_view flag, const std::string& address,
                            absl::string_view remedy) {
  if (IsLoopback(address)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      flag, "=", address,
      " is not a loopback address, and plain text is permitted only on loopback: give ", remedy,
      ", or --insecure if the network may read and change everything"));
}

}  // namespace ringattn
