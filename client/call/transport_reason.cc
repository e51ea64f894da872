#include "client/call/transport_reason.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ringattn::client {

std::string TransportReason(const v1::Accepted& accepted,
                            std::initializer_list<const std::string*> client_reasons) {
  std::string said = accepted.transport_reason();
  if (said.empty()) said = **client_reasons.begin();
  const bool relayed = accepted.transport() == v1::TRANSPORT_RELAY ||
                       accepted.transport() == v1::TRANSPORT_UNSPECIFIED;
  if (!relayed) return said;
  for (const std::string* reason : client_reasons) {
    if (reason->empty() || absl::StrContains(said, *reason)) continue;
    absl::StrAppend(&said, said.empty() ? "" : "; ", *reason);
  }
  return said;
}

}  // namespace ringattn::client
