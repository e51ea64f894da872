// Whether a gRPC port still takes connections, asked from outside gRPC.
#ifndef RINGATTN_COMMON_PROCESS_LISTENER_PROBE_H_
#define RINGATTN_COMMON_PROCESS_LISTENER_PROBE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ringattn {

// What the listener expects to hear first.
enum class ListenerProtocol { kPlainText, kTls };

// Connects to "host:port", says hello in HTTP/2 or TLS and waits for the first byte of the
// answer; of TLS a client's first words, no more: nothing is proved and no certificate needed. A
// listener that refuses connections for want of room answers too: it accepts. A connection alone
// would prove nothing, as the kernel completes it for a process that never calls accept(). Blocks
// for `timeout` at most. Errors: UNAVAILABLE (refused, closed), DEADLINE_EXCEEDED (no answer),
// RESOURCE_EXHAUSTED (no descriptor for asking). Thread safe.
absl::Status ProbeListener(const std::string& address, absl::Duration timeout,
                           ListenerProtocol speech = ListenerProtocol::kPlainText);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_LISTENER_PROBE_H_
