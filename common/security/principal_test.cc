#include "common/security/principal.h"

#include <map>
#include <string>
#include <vector>

#include <grpc/grpc_security_constants.h>

#include "common/security/call_capture.h"
#include "common/security/credentials.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

using Kind = Principal::Kind;

constexpr char kSpiffeId[] = "spiffe://lab.example/trainer";
constexpr char kSubject[] = "CN=trainer,O=lab";

// A peer's properties as a transport reports them.
class FakeAuthContext : public grpc::AuthContext {
 public:
  explicit FakeAuthContext(bool authenticated) : authenticated_(authenticated) {}

  bool IsPeerAuthenticated() const override { return authenticated_; }
  std::vector<grpc::string_ref> GetPeerIdentity() const override { return {}; }
  std::string GetPeerIdentityPropertyName() const override { return ""; }
  std::vector<grpc::string_ref> FindPropertyValues(const std::string& name) const override {
    std::vector<grpc::string_ref> values;
    for (auto [it, end] = properties_.equal_range(name); it != end; ++it) {
      values.emplace_back(it->second);
    }
    return values;
  }
  grpc::AuthPropertyIterator begin() const override { return None(); }
  grpc::AuthPropertyIterator end() const override { return None(); }
  void AddProperty(const std::string& key, const grpc::string_ref& value) override {
    properties_.emplace(key, std::string(value.data(), value.size()));
  }
  bool SetPeerIdentityPropertyName(const std::string&) override { return false; }

 private:
  struct None : grpc::AuthPropertyIterator {};

  const bool authenticated_;
  std::multimap<std::string, std::string> properties_;
};

TEST(PrincipalOf, ACallInPlainTextIsAnonymousWhateverItSays) {
  const TransportSecurity off;
  Principal seen{Kind::kX509Subject, "nobody"};
  const CallCapture server(off.ServerCredentials(), [&](const grpc::ServerContextBase& context) {
    seen = PrincipalOf(context);
    return grpc::Status::OK;
  });
  ASSERT_TRUE(server
                  .Call(off.ChannelCredentials(), {{GRPC_PEER_SPIFFE_ID_PROPERTY_NAME, kSpiffeId},
                                                   {GRPC_X509_SUBJECT_PROPERTY_NAME, kSubject}})
                  .ok());
  EXPECT_EQ(seen, Principal());
  EXPECT_EQ(seen.id(), "");
}

TEST(PrincipalOf, TheSpiffeIdComesBeforeTheSubject) {
  FakeAuthContext auth(/*authenticated=*/true);
  auth.AddProperty(GRPC_X509_SUBJECT_PROPERTY_NAME, kSubject);
  EXPECT_EQ(PrincipalOf(auth), (Principal{Kind::kX509Subject, kSubject}));
  auth.AddProperty(GRPC_PEER_SPIFFE_ID_PROPERTY_NAME, kSpiffeId);
  EXPECT_EQ(PrincipalOf(auth), (Principal{Kind::kSpiffe, kSpiffeId}));
}

TEST(PrincipalOf, OfTwoSpiffeIdsNoneCounts) {
  FakeAuthContext auth(/*authenticated=*/true);
  auth.AddProperty(GRPC_PEER_SPIFFE_ID_PROPERTY_NAME, kSpiffeId);
  auth.AddProperty(GRPC_PEER_SPIFFE_ID_PROPERTY_NAME, "spiffe://lab.example/admin");
  EXPECT_EQ(PrincipalOf(auth), Principal());
  auth.AddProperty(GRPC_X509_SUBJECT_PROPERTY_NAME, kSubject);
  EXPECT_EQ(PrincipalOf(auth), (Principal{Kind::kX509Subject, kSubject}));
}

TEST(PrincipalOf, WhatIsNotVerifiedDoesNotCount) {
  FakeAuthContext auth(/*authenticated=*/false);
  auth.AddProperty(GRPC_PEER_SPIFFE_ID_PROPERTY_NAME, kSpiffeId);
  auth.AddProperty(GRPC_X509_SUBJECT_PROPERTY_NAME, kSubject);
  EXPECT_EQ(PrincipalOf(auth), Principal());
}

TEST(Principal, IdsTellKindsApart) {
  EXPECT_EQ((Principal{Kind::kSpiffe, kSpiffeId}).id(), kSpiffeId);
  EXPECT_EQ((Principal{Kind::kX509Subject, kSubject}).id(), "x509:CN=trainer,O=lab");
  // A subject may be any text, even another principal's SPIFFE ID.
  EXPECT_NE((Principal{Kind::kX509Subject, kSpiffeId}).id(), kSpiffeId);
}

}  // namespace
}  // namespace ringattn
