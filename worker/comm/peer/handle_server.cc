#include "worker/comm/peer/handle_server.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "common/local_memory/local_socket.h"
#include "common/observability/log.h"
#include "common/security/secret.h"
#include "common/security/token.h"

namespace ringattn::worker {
namespace {

constexpr char kPrefix[] = "ringattn-peer-";
constexpr char kSuffix[] = ".sock";
constexpr int kBacklog = 64;
constexpr int kPollMs = 250;  // deadlines are in seconds
constexpr absl::Duration kStopInterval = absl::Milliseconds(20);
constexpr size_t kMaxReplyBytes = 256;
constexpr size_t kNameBytes = 8;  // random bytes in a socket's name

struct FetchRequest {
  uint64_t magic = 0;
  uint64_t generation = 0;
  int32_t item = 0;
  char token[kTokenBytes] = {};
};
static_assert(std::is_trivially_copyable_v<FetchRequest>);
constexpr uint64_t kMagic = 0x72696e67646f6f31;  // includes the version

// The first byte of a reply. A message follows, except for kHere, which carries the descriptor.
enum class ReplyCode : char { kHere = 'h', kForeign = 'f', kGone = 'g', kNone = 'n' };

ReplyCode CodeOf(const absl::Status& status) {
  if (absl::IsPermissionDenied(status)) return ReplyCode::kForeign;
  return absl::IsOutOfRange(status) ? ReplyCode::kNone : ReplyCode::kGone;
}

std::string RandomName() {
  return absl::StrCat(kPrefix, absl::BytesToHexString(RandomToken().substr(0, kNameBytes)),
                      kSuffix);
}

// Removes the sockets of workers that were killed.
void SweepFolder(const std::string& folder) {
  DIR* const listing = opendir(folder.c_str());
  if (listing == nullptr) return;
  while (const dirent* entry = readdir(listing)) {
    const std::string name = entry->d_name;
    if (!absl::StartsWith(name, kPrefix) || !absl::EndsWith(name, kSuffix)) continue;
    const std::string path = absl::StrCat(folder, "/", name);
    struct stat file = {};
    if (lstat(path.c_str(), &file) != 0 || !S_ISSOCK(file.st_mode) || file.st_uid != geteuid()) {
      continue;
    }
    if (!ConnectLocally(path).ok()) unlink(path.c_str());
  }
  closedir(listing);
}

}  // namespace

absl::StatusOr<std::unique_ptr<HandleServer>> HandleServer::Open(Options options) {
  if (!options.folder.empty()) SweepFolder(options.folder);
  std::string socket = options.folder.empty() ? absl::StrCat("@", RandomName())
                                              : absl::StrCat(options.folder, "/", RandomName());
  absl::StatusOr<ScopedDescriptor> listener = ListenLocally(socket, 0600, kBacklog);
  if (!listener.ok()) return absl::FailedPreconditionError(listener.status().message());
  ScopedDescriptor wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) {
    return absl::FailedPreconditionError(absl::StrCat("eventfd: ", std::strerror(errno)));
  }
  std::unique_ptr<HandleServer> server(new HandleServer(std::move(options), std::move(socket),
                                                        *std::move(listener), std::move(wake)));
  server->thread_ = std::thread([raw = server.get()] { raw->Run(); });
  pthread_setname_np(server->thread_.native_handle(), "handle_server");
  return server;
}

HandleServer::HandleServer(Options options, std::string socket, ScopedDescriptor listener,
                           ScopedDescriptor wake)
    : options_(std::move(options)),
      socket_(std::move(socket)),
      listener_(std::move(listener)),
      wake_(std::move(wake)) {}

HandleServer::~HandleServer() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof(one));
  if (thread_.joinable()) thread_.join();
  if (!options_.folder.empty()) unlink(socket_.c_str());
}

std::shared_ptr<const void> HandleServer::Publish(PeerHandles handles) {
  auto shown = std::make_shared<const PeerHandles>(std::move(handles));
  {
    absl::MutexLock lock(&published_->mutex);
    published_->handles.push_back(shown);
  }
  const PeerHandles* const raw = shown.get();
  return {raw, [published = published_](const PeerHandles* gone) {
            absl::MutexLock lock(&published->mutex);
            auto& all = published->handles;
            all.erase(std::remove_if(all.begin(), all.end(),
                                     [gone](const auto& each) { return each.get() == gone; }),
                      all.end());
          }};
}

// ---------------------------------------------------------- the server's thread

void HandleServer::Run() {
  std::vector<pollfd> polled;
  while (true) {
    polled.assign(2, {});
    polled[0] = {wake_.get(), POLLIN, 0};
    polled[1] = {listener_.get(), POLLIN, 0};
    for (const Connection& connection : connections_) {
      polled.push_back({connection.socket.get(), POLLIN, 0});
    }
    poll(polled.data(), polled.size(), connections_.empty() ? -1 : kPollMs);
    if (polled[0].revents != 0) return;
    const absl::Time now = MonotonicNow();
    for (size_t i = connections_.size(); i-- > 0;) {
      const bool has_request = polled[i + 2].revents != 0;
      if (has_request) HandleRequest(connections_[i].socket.get());
      if (has_request || connections_[i].deadline < now) {
        connections_.erase(connections_.begin() + static_cast<ptrdiff_t>(i));
      }
    }
    if (polled[1].revents != 0) Accept();
  }
}

void HandleServer::Accept() {
  ScopedDescriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) {
    // Without free descriptors the listener stays readable, so pause until some are freed.
    if (errno == EMFILE || errno == ENFILE) absl::SleepFor(absl::Milliseconds(10));
    return;
  }
  if (connections_.size() >= options_.max_waiting) connections_.erase(connections_.begin());
  connections_.push_back({std::move(socket), MonotonicNow() + options_.request_timeout});
}

void HandleServer::HandleRequest(int socket) {
  const absl::StatusOr<uid_t> user = PeerUser(socket);
  absl::StatusOr<ScopedDescriptor> found = absl::UnavailableError("the request is invalid");
  FetchRequest request;
  const auto message = ReceiveMessage(socket, sizeof(request) + 1, MSG_DONTWAIT);
  // A connection that only tests whether a server exists, as SweepFolder does.
  if (message.ok() && message->bytes.empty()) return;
  if (!user.ok() || *user != options_.user) {
    found = absl::PermissionDeniedError("this worker's peers are processes of its own user");
  } else if (message.ok() && message->bytes.size() == sizeof(request)) {
    std::memcpy(&request, message->bytes.data(), sizeof(request));
    if (request.magic == kMagic) {
      found = Find({"", request.generation, std::string(request.token, kTokenBytes)}, request.item);
    }
  }
  if (!found.ok()) {
    LogWarning("a peer was rejected", {{"why", found.status().message()}});
    std::string reply(1, static_cast<char>(CodeOf(found.status())));
    absl::StrAppend(&reply, found.status().message().substr(0, kMaxReplyBytes - 1));
    (void)SendMessage(socket, reply, -1, MSG_DONTWAIT);
    return;
  }
  const char here = static_cast<char>(ReplyCode::kHere);
  (void)SendMessage(socket, absl::string_view(&here, 1), found->get(), MSG_DONTWAIT);
}

absl::StatusOr<ScopedDescriptor> HandleServer::Find(const PeerAddress& asked, int32_t item) const {
  std::shared_ptr<const PeerHandles> handles;
  absl::MutexLock lock(&published_->mutex);  // keeps published descriptors open
  for (const auto& each : published_->handles) {
    if (SecretsEqual(each->token, asked.token) && each->generation == asked.generation) {
      handles = each;
    }
  }
  if (handles == nullptr) return absl::UnavailableError("this worker has no ring with that token");
  int shown = handles->segment;
  if (item != kPeerSegmentItem) {
    const std::vector<DeviceRegion> regions = handles->regions();
    if (item < 0 || item >= static_cast<int64_t>(regions.size()) || regions[item].descriptor < 0) {
      return absl::OutOfRangeError(absl::StrCat("this rank has no region ", item, ""));
    }
    shown = regions[item].descriptor;
  }
  ScopedDescriptor own(fcntl(shown, F_DUPFD_CLOEXEC, 0));
  if (!own.valid()) return absl::UnavailableError(absl::StrCat("dup: ", std::strerror(errno)));
  return own;
}

// ---------------------------------------------------------------- the client side

absl::StatusOr<ScopedDescriptor> HandleServer::Fetch(const PeerAddress& from, int32_t item,
                                                     absl::Time deadline,
                                                     const std::function<bool()>& stop,
                                                     uid_t user) {
  struct stat file = {};
  if (!absl::StartsWith(from.socket, "@") && lstat(from.socket.c_str(), &file) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(from.socket, " is not visible to this worker: ", std::strerror(errno)));
  }
  absl::StatusOr<ScopedDescriptor> socket = ConnectLocally(from.socket);
  if (!socket.ok()) return socket.status();
  const absl::StatusOr<uid_t> owner = PeerUser(socket->get());
  if (!owner.ok()) return absl::UnavailableError(owner.status().message());
  if (*owner != user) {
    return absl::FailedPreconditionError(absl::StrCat(from.socket, " belongs to another user"));
  }
  // Polls `stop` between two waits. A request of 56 bytes always fits into the socket's buffer.
  const timeval timeout = absl::ToTimeval(kStopInterval);
  setsockopt(socket->get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  setsockopt(socket->get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  FetchRequest request{kMagic, from.generation, item, {}};
  std::memcpy(request.token, from.token.data(), std::min(from.token.size(), kTokenBytes));
  const absl::Status sent =
      SendMessage(socket->get(), {reinterpret_cast<const char*>(&request), sizeof(request)}, -1, 0);
  if (!sent.ok()) return absl::UnavailableError(sent.message());
  absl::StatusOr<LocalMessage> reply = absl::UnavailableError("no reply");
  while (absl::IsUnavailable(reply.status()) && MonotonicNow() < deadline) {
    if (stop && stop()) return absl::CancelledError("the request was cancelled");
    reply = ReceiveMessage(socket->get(), kMaxReplyBytes, 0);
  }
  if (!reply.ok() || reply->bytes.empty()) {
    return absl::UnavailableError("the peer does not reply");
  }
  const std::string detail = reply->bytes.substr(1);
  switch (static_cast<ReplyCode>(reply->bytes[0])) {
    case ReplyCode::kHere:
      if (reply->descriptors.size() == 1 && !reply->is_cut) {
        return std::move(reply->descriptors.front());
      }
      return absl::UnavailableError("the reply has no descriptor");
    case ReplyCode::kForeign:
      return absl::FailedPreconditionError(detail);
    case ReplyCode::kNone:
      return absl::InternalError(detail);
    case ReplyCode::kGone:
      return absl::UnavailableError(detail);
  }
  return absl::UnavailableError("the peer replies in another version");
}

}  // namespace ringattn::worker
