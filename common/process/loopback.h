// Tells loopback addresses from others.
#ifndef RINGATTN_COMMON_PROCESS_LOOPBACK_H_
#define RINGATTN_COMMON_PROCESS_LOOPBACK_H_

#include <string>

namespace ringattn {

// Returns true for "host:port" if every address of the host is in 127.0.0.0/8 or is ::1 (including
// ::ffff:127.x), and for "unix:..." and "unix-abstract:...". Returns false for an empty host,
// 0.0.0.0 and ::, which mean every address of the machine, and for names that do not resolve. May
// query a name server. Thread safe.
bool IsLoopback(const std::string& address);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_LOOPBACK_H_
