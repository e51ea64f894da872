// The reason for a call's transport, as reports state it.
//
// Tests: client_test.cc, region_call_test.cc
#ifndef RINGATTN_CLIENT_CALL_TRANSPORT_REASON_H_
#define RINGATTN_CLIENT_CALL_TRANSPORT_REASON_H_

#include <initializer_list>
#include <string>

#include "ringattn/v1/attention.pb.h"

namespace ringattn::client {

// Returns the server's reason and, if the relay was used, each of the client's reasons for not
// offering a faster transport once. Empty reasons do not count. Without a reason of the server, the
// first one of the client is also stated for other transports.
std::string TransportReason(const v1::Accepted& accepted,
                            std::initializer_list<const std::string*> client_reasons);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_TRANSPORT_REASON_H_
