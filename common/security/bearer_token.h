// BearerToken: the token from a file with which a client identifies itself in every call.
#ifndef RINGATTN_COMMON_SECURITY_BEARER_TOKEN_H_
#define RINGATTN_COMMON_SECURITY_BEARER_TOKEN_H_

#include <memory>
#include <string>

#include <grpcpp/client_context.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace ringattn {

inline constexpr char kAuthorizationKey[] = "authorization";
inline constexpr char kBearerPrefix[] = "Bearer ";
// Shorter tokens can be guessed; longer ones exceed common header limits.
inline constexpr size_t kMinTokenBytes = 16;
inline constexpr size_t kMaxTokenBytes = 1024;

// Returns whether `text` is 16 to 1,024 printable characters without spaces.
bool IsToken(absl::string_view text);

// Reads the file for each call, so a replaced token is used from the next call on. While the file
// cannot be read or holds no valid token, the last valid token is used. Thread safe.
class BearerToken {
 public:
  // Errors: INVALID_ARGUMENT, naming the file but not its contents.
  static absl::StatusOr<std::shared_ptr<BearerToken>> FromFile(const std::string& path);

  // Returns the token for a call that starts now.
  std::string Get() ABSL_LOCKS_EXCLUDED(mutex_);
  // REQUIRES: the call has not started.
  void AddTo(grpc::ClientContext* context) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  BearerToken(std::string path, std::string token)
      : path_(std::move(path)), token_(std::move(token)) {}

  const std::string path_;
  absl::Mutex mutex_;
  std::string token_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_BEARER_TOKEN_H_
