// Unix sockets that carry whole messages (SOCK_SEQPACKET) and file descriptors.
#ifndef RINGATTN_COMMON_LOCAL_MEMORY_LOCAL_SOCKET_H_
#define RINGATTN_COMMON_LOCAL_MEMORY_LOCAL_SOCKET_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/local_memory/scoped_descriptor.h"

namespace ringattn {

// Paths may exceed a socket address (107 bytes): they are opened relative to their folder. "@NAME"
// is an abstract name in the network namespace, not a file; it disappears with its listener, and
// every process in the namespace may connect. All descriptors are closed on exec. Thread safe.

// Creates a non-blocking listener at `path`, which must not exist, with the file's permissions.
absl::StatusOr<ScopedDescriptor> ListenLocally(const std::string& path, unsigned permissions,
                                               int backlog);

// Opens a blocking connection. Returns UNAVAILABLE, with the reason, if no process listens there.
absl::StatusOr<ScopedDescriptor> ConnectLocally(const std::string& path);

// Returns the user, in this process's user namespace, who made or accepted the other end of the
// connection.
absl::StatusOr<uid_t> PeerUser(int socket);

struct LocalMessage {
  std::string bytes;                          // empty at the end of the connection
  std::vector<ScopedDescriptor> descriptors;  // in the order in which they were sent
  bool is_cut = false;                        // longer than max_bytes, or too many descriptors
};

// `flags`: as for send(2) and recv(2), in addition to MSG_NOSIGNAL and MSG_CMSG_CLOEXEC. Sends
// `descriptor` with the message unless it is negative. Errors are errno's.
absl::Status SendMessage(int socket, absl::string_view bytes, int descriptor, int flags);
// Returns UNAVAILABLE if there is no message yet and MSG_DONTWAIT is set, or if the socket's
// timeout expires.
absl::StatusOr<LocalMessage> ReceiveMessage(int socket, size_t max_bytes, int flags);

// Returns an identifier of this machine that is the same in all its containers (the kernel's
// boot_id); empty if the kernel has none.
std::string HostId();

}  // namespace ringattn

#endif  // RINGATTN_COMMON_LOCAL_MEMORY_LOCAL_SOCKET_H_
