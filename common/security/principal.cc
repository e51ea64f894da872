#include "common/security/principal.h"

#include <memory>
#include <vector>

#include <grpc/grpc_security_constants.h>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

// Returns the property's value; empty unless there is exactly one, because two would be ambiguous.
std::string OnlyValue(const grpc::AuthContext& auth, const char* property) {
  const std::vector<grpc::string_ref> values = auth.FindPropertyValues(property);
  return values.size() == 1 ? std::string(values[0].data(), values[0].size()) : std::string();
}

}  // namespace

std::string Principal::id() const {
  switch (kind) {
    case Kind::kAnonymous:
      return "";
    case Kind::kSpiffe:
      return name;
    case Kind::kX509Subject:
      return absl::StrCat("x509:", name);
  }
  return "";
}

Principal PrincipalOf(const grpc::AuthContext& auth) {
  if (!auth.IsPeerAuthenticated()) return {};
  if (std::string id = OnlyValue(auth, GRPC_PEER_SPIFFE_ID_PROPERTY_NAME); !id.empty()) {
    return {Principal::Kind::kSpiffe, std::move(id)};
  }
  if (std::string subject = OnlyValue(auth, GRPC_X509_SUBJECT_PROPERTY_NAME); !subject.empty()) {
    return {Principal::Kind::kX509Subject, std::move(subject)};
  }
  return {};
}

Principal PrincipalOf(const grpc::ServerContextBase& context) {
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  return auth == nullptr ? Principal() : PrincipalOf(*auth);
}

}  // namespace ringattn
