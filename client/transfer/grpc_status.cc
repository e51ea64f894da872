#include "client/transfer/grpc_status.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/api/error.h"

namespace ringattn::client {
namespace {

// Texts of gRPC 1.51 and OpenSSL, and the explanation of each.
constexpr struct {
  absl::string_view text;
  absl::string_view explanation;
} kTlsFailures[] = {
    {"certificate verify failed",
     "none of the given authorities (tls_ca) signed the server's certificate, or the certificate "
     "is not valid today"},
    {"Hostname Verification Check failed",
     "the server's certificate is for another name than the one dialled (tls_server_name)"},
    {"wrong version number", "the server speaks plain text, not TLS (tls_ca)"},
    {"ls handshake failed", "the TLS handshake failed"},
};

absl::Status ExplainUnavailable(const std::string& message) {
  for (const auto& [text, explanation] : kTlsFailures) {
    if (!absl::StrContains(message, text)) continue;
    return MakeErrorWithReason(absl::StatusCode::kUnavailable,
                               absl::StrCat(explanation, ": ", message), kTlsHandshakeFailed);
  }
  // A server that rejects the client's certificate, one that expects TLS, and one that just exits
  // look the same from here.
  const bool closed = absl::StrContains(message, "Socket closed") ||
                      absl::StrContains(message, "Connection reset") ||
                      absl::StrContains(message, "Broken pipe");
  if (closed && absl::StrContains(message, "failed to connect")) {
    return absl::UnavailableError(absl::StrCat(
        message, " (the server may expect TLS or another client certificate: tls_ca, tls_cert)"));
  }
  return absl::UnavailableError(message);
}

}  // namespace

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE && status.error_details().empty()) {
    return ExplainUnavailable(status.error_message());
  }
  absl::Status converted(static_cast<absl::StatusCode>(status.error_code()),
                         status.error_message());
  if (!status.ok() && !status.error_details().empty()) {
    SetDetails(status.error_details(), &converted);
  }
  return converted;
}

}  // namespace ringattn::client
