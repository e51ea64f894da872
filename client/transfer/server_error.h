// The error of a response that violates the protocol.
#ifndef RINGATTN_CLIENT_TRANSFER_SERVER_ERROR_H_
#define RINGATTN_CLIENT_TRANSFER_SERVER_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ringattn::client {

// INTERNAL. `what` describes the response: "a chunk before Accepted".
inline absl::Status ServerError(absl::string_view what) {
  return absl::InternalError(absl::StrCat("the server violated the protocol: ", what));
}

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TRANSFER_SERVER_ERROR_H_
