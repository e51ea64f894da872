// Whether an address stays on this machine.
#ifndef RINGATTN_COMMON_PROCESS_LOOPBACK_H_
#define RINGATTN_COMMON_PROCESS_LOOPBACK_H_

#include <string>

namespace ringattn {

// True for "host:port" where everything that the host resolves to is in 127.0.0.0/8 or is ::1
// (also as ::ffff:127.x), and for "unix:..." and "unix-abstract:...". An empty host, 0.0.0.0
// and :: stand for every address of the machine and are not loopback; what does not resolve is
// not either. May ask a name server. Thread safe.
bool IsLoopback(const std::string& address);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_LOOPBACK_H_
