#include "common/security/bearer_token.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/security/tls_material.h"

namespace ringattn {
namespace {

absl::StatusOr<std::string> Read(const std::string& path) {
  absl::StatusOr<std::string> text = ReadWholeFile(path, "the token");
  if (!text.ok()) return text.status();
  absl::StripAsciiWhitespace(&*text);
  if (IsToken(*text)) return text;
  return absl::InvalidArgumentError(absl::StrCat(path, ": a token has ", kMinTokenBytes, " to ",
                                                 kMaxTokenBytes,
                                                 " printable characters without spaces"));
}

}  // namespace

bool IsToken(absl::string_view text) {
  return text.size() >= kMinTokenBytes && text.size() <= kMaxTokenBytes &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > 0x20 && c < 0x7f; });
}

absl::StatusOr<std::shared_ptr<BearerToken>> BearerToken::FromFile(const std::string& path) {
  absl::StatusOr<std::string> token = Read(path);
  if (!token.ok()) return token.status();
  return std::shared_ptr<BearerToken>(new BearerToken(path, *std::move(token)));
}

std::string BearerToken::Get() {
  absl::StatusOr<std::string> read = Read(path_);
  absl::MutexLock lock(&mutex_);
  if (read.ok()) token_ = *std::move(read);
  return token_;
}

void BearerToken::AddTo(grpc::ClientContext* context) {
  context->AddMetadata(kAuthorizationKey, absl::StrCat(kBearerPrefix, Get()));
}

}  // namespace ringattn
