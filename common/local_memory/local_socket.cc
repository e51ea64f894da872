#include "common/local_memory/local_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

// Room for more than a message's one descriptor, so that extra ones are received and closed.
constexpr size_t kMaxDescriptors = 4;

// An address within the length limit: the file relative to a descriptor of its folder.
struct LocalAddress {
  ScopedDescriptor folder;
  sockaddr_un address = {};
};

absl::StatusOr<LocalAddress> AddressOf(const std::string& path) {
  if (absl::StartsWith(path, "@")) {
    LocalAddress abstract;
    abstract.address.sun_family = AF_UNIX;
    if (path.size() < 2 || path.size() > sizeof(abstract.address.sun_path)) {
      return absl::InvalidArgumentError(absl::StrCat("the name of ", path, " is too long"));
    }
    std::memcpy(abstract.address.sun_path + 1, path.data() + 1, path.size() - 1);
    return abstract;
  }
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos || slash + 1 == path.size()) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not an absolute path of a socket"));
  }
  LocalAddress result;
  const std::string folder = path.substr(0, std::max<size_t>(slash, 1));
  result.folder = ScopedDescriptor(open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!result.folder.valid()) return absl::ErrnoToStatus(errno, folder);
  const std::string short_path =
      absl::StrCat("/proc/self/fd/", result.folder.get(), "/", path.substr(slash + 1));
  result.address.sun_family = AF_UNIX;
  if (short_path.size() >= sizeof(result.address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("the file name of ", path, " is too long"));
  }
  std::memcpy(result.address.sun_path, short_path.c_str(), short_path.size() + 1);
  return result;
}

const sockaddr* Generic(const LocalAddress& address) {
  return reinterpret_cast<const sockaddr*>(&address.address);
}

}  // namespace

absl::StatusOr<ScopedDescriptor> ListenLocally(const std::string& path, unsigned permissions,
                                               int backlog) {
  absl::StatusOr<LocalAddress> address = AddressOf(path);
  if (!address.ok()) return address.status();
  ScopedDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return absl::ErrnoToStatus(errno, "socket");
  if (bind(socket.get(), Generic(*address), sizeof(address->address)) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot make a socket at ", path));
  }
  // No connection succeeds before listen().
  const bool is_file = !absl::StartsWith(path, "@");
  if ((is_file && chmod(path.c_str(), permissions) != 0) || listen(socket.get(), backlog) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot listen at ", path));
  }
  return socket;
}

absl::StatusOr<ScopedDescriptor> ConnectLocally(const std::string& path) {
  absl::StatusOr<LocalAddress> address = AddressOf(path);
  if (!address.ok()) return absl::UnavailableError(address.status().message());
  ScopedDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return absl::ErrnoToStatus(errno, "socket");
  if (connect(socket.get(), Generic(*address), sizeof(address->address)) != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot connect to ", path, ": ", std::strerror(errno)));
  }
  return socket;
}

absl::StatusOr<uid_t> PeerUser(int socket) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return absl::ErrnoToStatus(errno, "SO_PEERCRED");
  }
  return peer.uid;
}

absl::Status SendMessage(int socket, absl::string_view bytes, int descriptor, int flags) {
  iovec piece = {const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &descriptor, sizeof(int));
  }
  ssize_t sent = 0;
  do {
    sent = sendmsg(socket, &message, flags | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return absl::ErrnoToStatus(errno, "sendmsg");
  return absl::OkStatus();
}

absl::StatusOr<LocalMessage> ReceiveMessage(int socket, size_t max_bytes, int flags) {
  LocalMessage result;
  result.bytes.resize(max_bytes);
  iovec piece = {result.bytes.data(), result.bytes.size()};
  msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received = 0;
  do {
    received = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return absl::UnavailableError("nothing came");
    return absl::ErrnoToStatus(errno, "recvmsg");
  }
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr;
       head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(head) + i * sizeof(int), sizeof(int));
      result.descriptors.emplace_back(descriptor);
    }
  }
  result.bytes.resize(received);
  result.is_cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  return result;
}

std::string HostId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

}  // namespace ringattn
