// Checks from outside gRPC whether a gRPC port still accepts connections.
#ifndef RINGATTN_COMMON_PROCESS_LISTENER_PROBE_H_
#define RINGATTN_COMMON_PROCESS_LISTENER_PROBE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ringattn {

// The protocol that the listener expects.
enum class ListenerProtocol { kPlainText, kTls };

// Connects to "host:port", sends a client's first message of HTTP/2 or TLS and waits for the first
// byte of the response. TLS stops there: the probe authenticates nobody and needs no certificate. A
// listener that rejects connections for lack of room still passes, because it accepts. A connection
// alone is not enough, because the kernel completes it even for a process that never calls
// accept(). Blocks for at most `timeout`. Errors: UNAVAILABLE (refused, closed), DEADLINE_EXCEEDED
// (no response), RESOURCE_EXHAUSTED (no descriptor for the probe). Thread safe.
absl::Status ProbeListener(const std::string& address, absl::Duration timeout,
                           ListenerProtocol speech = ListenerProtocol::kPlainText);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_LISTENER_PROBE_H_
