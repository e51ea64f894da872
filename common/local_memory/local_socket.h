// Unix sockets of whole messages (SOCK_SEQPACKET) that also carry file descriptors.
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

// Paths may be longer than a socket's address (107 bytes): they are reached through their
// folder. "@NAME" is no file but a name in the network namespace (abstract), gone with its
// listener; anybody there may connect. All descriptors are closed on exec. Thread safe.

// A listener at `path`, which must not be there, with the file's permissions. Not blocking.
absl::StatusOr<ScopedDescriptor> ListenLocally(const std::string& path, unsigned permissions,
                                               int backlog);

// A blocking connection. UNAVAILABLE if nobody listens there, with the reason.
absl::StatusOr<ScopedDescriptor> ConnectLocally(const std::string& path);

// The user, as this process counts them, who made or accepted the connection's other end.
absl::StatusOr<uid_t> PeerUser(int socket);

struct LocalMessage {
  std::string bytes;                          // empty at the end of the connection
  std::vector<ScopedDescriptor> descriptors;  // in the order in which they were sent
  bool is_cut = false;                        // it was longer, or had more descriptors
};

// `flags` as of send(2) and recv(2), beside MSG_NOSIGNAL and MSG_CMSG_CLOEXEC.
// `descriptor`: sent along unless it is negative. The errors are errno's.
absl::Status SendMessage(int socket, absl::string_view bytes, int descriptor, int flags);
// UNAVAILABLE if there is none yet and MSG_DONTWAIT is set, or a time-out of the socket is over.
absl::StatusOr<LocalMessage> ReceiveMessage(int socket, size_t max_bytes, int flags);

// Which machine this is, whatever its containers are called (the kernel's boot_id); empty if it
// does not say.
std::string HostId();

}  // namespace ringattn

#endif  // RINGATTN_COMMON_LOCAL_MEMORY_LOCAL_SOCKET_H_
