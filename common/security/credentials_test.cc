#include "common/security/credentials.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "common/security/call_capture.h"
#include "common/security/principal.h"
#include "common/security/security_metrics.h"
#include "common/security/test_certificates.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

using Code = grpc::StatusCode;

TransportSecurity TlsWith(const TlsOptions& options) {
  auto security = TransportSecurity::Tls(options);
  EXPECT_TRUE(security.ok()) << security.status();
  return security.ok() ? *security : TransportSecurity();
}

TEST(TransportSecurity, BothEndsOfPlainTextMeet) {
  const TransportSecurity off;
  EXPECT_TRUE(off.is_plain());
  EXPECT_EQ(off.state(), std::nullopt);
  const CallCapture server(off.ServerCredentials(), [](const grpc::ServerContextBase&) {
    return grpc::Status(Code::DATA_LOSS, "reached");
  });
  EXPECT_EQ(server.Call(off.ChannelCredentials()).error_code(), Code::DATA_LOSS);
  // A client that requires TLS cannot connect.
  EXPECT_EQ(server.Call(grpc::SslCredentials({})).error_code(), Code::UNAVAILABLE);
}

// Listeners with each requirement accept or reject clients with a certificate, without one, and
// with another authority's; clients reject a server of another authority.
TEST(TransportSecurity, PeersProveAsMuchAsTheyAreAskedFor) {
  const TestAuthority ours("ours"), others("others");
  const auto files = [](const std::string& name, const TestCertificate& certificate,
                        const std::string& authorities) {
    return TlsFiles{PutFile(name + ".crt", certificate.certificate),
                    PutFile(name + ".key", certificate.key), PutFile(name + ".ca", authorities)};
  };
  const TlsFiles server_files = files("server", ours.Issue("server"), ours.pem());
  const auto known = TlsWith({.files = files("client", ours.Issue("client"), ours.pem())});
  const auto alien = TlsWith({.files = files("alien", others.Issue("alien"), ours.pem())});
  const auto nobody = TlsWith({.files = {"", "", PutFile("nobody.ca", ours.pem())}});
  const auto trusts_others =
      TlsWith({.files = files("misled", ours.Issue("client"), others.pem())});
  const struct {
    ClientCertificates peers;
    Code nobody, alien;
  } rows[] = {{ClientCertificates::kRequired, Code::UNAVAILABLE, Code::UNAVAILABLE},
              {ClientCertificates::kOptional, Code::DATA_LOSS, Code::UNAVAILABLE},
              {ClientCertificates::kNone, Code::DATA_LOSS, Code::DATA_LOSS}};
  for (const auto& row : rows) {
    std::string principal;
    const auto security = TlsWith({.files = server_files, .peers = row.peers});
    const CallCapture server(security.ServerCredentials(),
                             [&](const grpc::ServerContextBase& context) {
                               principal = PrincipalOf(context).id();
                               return grpc::Status(Code::DATA_LOSS, "reached");
                             });
    EXPECT_EQ(server.Call(known.ChannelCredentials()).error_code(), Code::DATA_LOSS);
    EXPECT_EQ(principal, row.peers == ClientCertificates::kNone ? "" : "x509:CN=client");
    EXPECT_EQ(server.Call(nobody.ChannelCredentials()).error_code(), row.nobody);
    EXPECT_EQ(server.Call(alien.ChannelCredentials()).error_code(), row.alien);
    const grpc::Status misled = server.Call(trusts_others.ChannelCredentials());
    EXPECT_EQ(misled.error_code(), Code::UNAVAILABLE);
    EXPECT_TRUE(absl::StrContains(misled.error_message(), "certificate verify failed"))
        << misled.error_message();
  }
}

TEST(TransportSecurity, AGateIsAskedBeforeTheServiceInPlainTextToo) {
  class Closed final : public grpc::AuthMetadataProcessor {
   public:
    bool IsBlocking() const override { return false; }
    grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext*, OutputMetadata*,
                         OutputMetadata*) override {
      return metadata.count("open") > 0 ? grpc::Status::OK
                                        : grpc::Status(Code::UNAUTHENTICATED, "closed");
    }
  };
  const TransportSecurity off;
  const CallCapture server(off.ServerCredentials(std::make_shared<Closed>()),
                           [](const grpc::ServerContextBase& context) {
                             EXPECT_EQ(PrincipalOf(context), Principal());
                             return grpc::Status(Code::DATA_LOSS, "reached");
                           });
  EXPECT_EQ(server.Call(off.ChannelCredentials()).error_code(), Code::UNAUTHENTICATED);
  EXPECT_EQ(server.Call(off.ChannelCredentials(), {{"open", "1"}}).error_code(), Code::DATA_LOSS);
}

TEST(TransportSecurity, FilesThatAreReplacedAreInForceForNewConnectionsUnlessTheyAreBad) {
  const TestAuthority first("first"), second("second");
  const TestCertificate before = first.Issue("before"), after = second.Issue("after");
  const TlsFiles files{PutFile("crt", before.certificate), PutFile("key", before.key), ""};
  const auto security = TlsWith({.files = files, .peers = ClientCertificates::kNone});
  Metrics metrics;
  ExportTls(&metrics, "clients", security);
  const CallCapture server(security.ServerCredentials(), [](const grpc::ServerContextBase&) {
    return grpc::Status(Code::DATA_LOSS, "reached");
  });
  const auto code = [&](const TestAuthority& authority, const char* name) {
    return server
        .Call(TlsWith({.files = {"", "", PutFile(name, authority.pem())}}).ChannelCredentials())
        .error_code();
  };
  const auto wait = [&](const auto& condition) {
    for (int i = 0; i < 500 && !condition(); ++i) absl::SleepFor(absl::Milliseconds(20));
    return condition();
  };
  EXPECT_EQ(code(first, "first.ca"), Code::DATA_LOSS);
  PutFile("crt", "rubbish");
  EXPECT_TRUE(wait([&] { return security.state()->refused_reloads == 1; }));
  absl::SleepFor(absl::Milliseconds(1200));  // gRPC reloads once a second
  EXPECT_EQ(code(first, "first.ca"), Code::DATA_LOSS);

  PutFile("key", after.key);
  PutFile("crt", after.certificate);
  EXPECT_TRUE(wait([&] { return code(second, "second.ca") == Code::DATA_LOSS; }));
  EXPECT_EQ(code(first, "first.ca"), Code::UNAVAILABLE);
  EXPECT_EQ(security.state()->reloads, 1);
  const std::string text = metrics.Text();
  EXPECT_TRUE(
      absl::StrContains(text, R"(ringattn_tls_reloads_total{link="clients",result="ok"} 1)"))
      << text;
  EXPECT_TRUE(absl::StrContains(
      text, R"(ringattn_tls_certificate_expiry_timestamp_seconds{link="clients"} )"))
      << text;
}

TEST(TransportSecurity, ErrorsNameTheFile) {
  EXPECT_EQ(TransportSecurity::Tls({.files = {"/no.crt", "/no.key", ""}}).status().message(),
            "/no.crt: cannot read the certificate");
}

}  // namespace
}  // namespace ringattn
