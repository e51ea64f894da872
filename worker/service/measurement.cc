#include "worker/service/measurement.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kHeadDim = 128;
constexpr int kCallsInARow = 32;

// A socket that closes itself.
class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }

 private:
  int fd_;
};

absl::Status SocketError(const std::string& host) {
  return absl::UnavailableError(absl::StrCat("socket at ", host, ": ", std::strerror(errno)));
}

// Both ends of a connection.
absl::StatusOr<std::pair<Socket, Socket>> ConnectToSelf(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), "0", &hints, &found); error != 0) {
    return absl::UnavailableError(absl::StrCat("address ", host, ": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> keeper(found, freeaddrinfo);
  Socket listener(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  Socket client(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener.fd(), found->ai_addr, found->ai_addrlen) != 0 ||
      listen(listener.fd(), 1) != 0 || getsockname(listener.fd(), generic, &length) != 0 ||
      connect(client.fd(), generic, length) != 0) {
    return SocketError(host);
  }
  Socket server(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
  if (server.fd() < 0) return SocketError(host);
  return std::make_pair(std::move(client), std::move(server));
}

// A prepared forward call on operands of its own.
class ForwardOnDevice {
 public:
  static absl::StatusOr<std::unique_ptr<ForwardOnDevice>> Make(Device& device,
                                                               const MeasuredCall& size) {
    std::unique_ptr<ForwardOnDevice> made(new ForwardOnDevice(device));
    if (absl::Status status = made->Init(size); !status.ok()) return status;
    return made;
  }

  EventRef Start() { return device_.Start(*prepared_.front(), {}, &control_); }

 private:
  explicit ForwardOnDevice(Device& device) : device_(device) {}

  absl::Status Init(const MeasuredCall& size) {
    problem_.dtype = DType::kBFloat16;
    problem_.num_heads = problem_.num_kv_heads = size.heads;
    problem_.head_dim = problem_.head_dim_v = kHeadDim;
    problem_.softmax_scale = 0.1f;
    problem_.bands = {Band{}};
    const int64_t tensor_bytes = size.rows * size.heads * kHeadDim * 2;
    // Numbers around one: a GPU draws less power, and runs faster, on zeros.
    std::vector<uint16_t> values(tensor_bytes / 2);
    uint32_t state = 1;
    for (uint16_t& value : values) {
      state = state * 1664525u + 1013904223u;
      value = static_cast<uint16_t>(0x3f00 + (state >> 24) + ((state >> 8 & 1) << 15));
    }
    for (int64_t bytes :
         {tensor_bytes, tensor_bytes, tensor_bytes, tensor_bytes, size.rows * size.heads * 4}) {
      absl::StatusOr<std::unique_ptr<DeviceBuffer>> buffer = device_.Allocate(bytes);
      if (!buffer.ok()) return buffer.status();
      absl::Status status = device_.CopyFromHost((*buffer)->data(), values.data(), bytes);
      if (!status.ok()) return status;
      buffers_.push_back(*std::move(buffer));
    }
    const Piece piece{.length = size.rows};
    ForwardCall call;
    call.problem = &problem_;
    call.q_rows = size.rows;
    call.q_pieces = {piece};
    call.q = buffers_[0]->data();
    call.blocks = {{size.rows, {piece}, buffers_[1]->data(), buffers_[2]->data()}};
    call.out = buffers_[3]->data();
    call.lse = static_cast<float*>(buffers_[4]->data());
    call.initial = call.final = true;
    absl::StatusOr<PreparedCalls> prepared = device_.Prepare({call});
    if (!prepared.ok()) return prepared.status();
    prepared_ = *std::move(prepared);
    return absl::OkStatus();
  }

  Device& device_;
  AttentionProblem problem_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  PreparedCalls prepared_;
  RunControl control_;
};

absl::Time Patience() { return absl::Now() + absl::Minutes(1); }

}  // namespace

absl::StatusOr<double> MeasureFlopsPerSecond(Device& device, const MeasuredCall& size,
                                             absl::Duration budget) {
  absl::StatusOr<std::unique_ptr<ForwardOnDevice>> call = ForwardOnDevice::Make(device, size);
  if (!call.ok()) return call.status();
  const double flops = 4.0 * size.rows * size.rows * kHeadDim * size.heads;
  // The best call is the one least disturbed: the first ones warm up threads, caches
  // and clock, and other processes start at the same moment.
  absl::Duration best = absl::InfiniteDuration();
  const absl::Time end = absl::Now() + budget;
  do {
    EventRef done = (*call)->Start();
    absl::Status status = done->Wait(Patience());
    if (!status.ok()) return status;
    best = std::min(best, done->end_time() - done->begin_time());
  } while (absl::Now() < end);
  return flops / absl::ToDoubleSeconds(best);
}

absl::StatusOr<double> MeasureCallSeconds(Device& device, absl::Duration budget) {
  absl::StatusOr<std::unique_ptr<ForwardOnDevice>> call =
      ForwardOnDevice::Make(device, {.rows = 1, .heads = 1});
  if (!call.ok()) return call.status();
  absl::Duration best = absl::InfiniteDuration();
  const absl::Time end = absl::Now() + budget;
  do {
    std::vector<EventRef> calls;
    for (int i = 0; i <= kCallsInARow; ++i) calls.push_back((*call)->Start());
    // All of them: an event may touch its control until somebody has seen it done. The last
    // one first: waking up between them would disturb what is measured.
    absl::Status failure;
    for (size_t i = calls.size(); i-- > 0;) failure.Update(calls[i]->Wait(Patience()));
    if (!failure.ok()) return failure;
    best = std::min(best, (calls.back()->end_time() - calls.front()->end_time()) / kCallsInARow);
  } while (absl::Now() < end);
  return absl::ToDoubleSeconds(std::max(best, absl::Nanoseconds(1)));
}

absl::StatusOr<double> MeasureLinkBytesPerSecond(const std::string& host, absl::Duration budget) {
  absl::StatusOr<std::pair<Socket, Socket>> ends = ConnectToSelf(host);
  if (!ends.ok()) return ends.status();
  constexpr size_t kPiece = size_t{1} << 20;
  // The best stretch, for the same reason as above.
  constexpr double kStretchBytes = 16.0 * kPiece;  // more than socket buffers hold
  std::thread sender([fd = ends->first.fd(), budget] {
    const std::vector<char> piece(kPiece);
    const absl::Time end = absl::Now() + budget;
    // A machine too busy to move two stretches within the budget takes longer.
    double sent = 0;
    while (absl::Now() < end || sent < 2 * kStretchBytes) {
      const ssize_t n = send(fd, piece.data(), kPiece, MSG_NOSIGNAL);
      if (n <= 0) break;
      sent += static_cast<double>(n);
    }
    shutdown(fd, SHUT_WR);
  });
  std::vector<char> piece(kPiece);
  double best = 0, bytes = 0, stretch = 0;
  const absl::Time begin = absl::Now();
  absl::Time stretch_begin = begin;
  for (ssize_t got; (got = recv(ends->second.fd(), piece.data(), kPiece, 0)) > 0;) {
    bytes += got;
    stretch += got;
    if (stretch < kStretchBytes) continue;
    const absl::Time now = absl::Now();
    best = std::max(best, stretch / absl::ToDoubleSeconds(now - stretch_begin));
    stretch_begin = now;
    stretch = 0;
  }
  // Too busy a machine for a whole stretch: the average has to do.
  if (best == 0) best = bytes / absl::ToDoubleSeconds(absl::Now() - begin);
  sender.join();
  return best;
}

}  // namespace ringattn::worker
