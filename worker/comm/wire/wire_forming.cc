#include "worker/comm/wire/wire_forming.h"

#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "worker/comm/sockets/owned_fd.h"
#include "worker/comm/sockets/socket_address.h"

namespace ringattn::worker {
namespace {

// A peer drops a handshake if too many strangers connect. After this many drops, forming fails.
constexpr int kMaxTriesPerPeer = 5 * kMaxWireStripes;
constexpr absl::Duration kRetryDelay = absl::Milliseconds(50);
// Between two attempts to accept a connection without a free descriptor.
constexpr absl::Duration kNoDescriptorPause = absl::Milliseconds(10);
// A lost host is noticed after 3 + 3 * 1 seconds without traffic, and as late while it owes
// acknowledgements. So is a peer that takes no bytes for that long: receivers have announced memory
// for all that is sent. The coordinator waits about as long for a heartbeat (5 s).
constexpr int kKeepaliveIdleSeconds = 3;
constexpr int kKeepaliveIntervalSeconds = 1;
constexpr int kKeepaliveProbes = 3;
constexpr int kUnacknowledgedMs = 6'000;

void SetOption(int fd, int level, int option, int value) {
  // Options affect speed and detection only, so an error is not one of the connection.
  (void)setsockopt(fd, level, option, &value, sizeof(value));
}

void SetOptions(int fd) {
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepaliveIdleSeconds);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepaliveIntervalSeconds);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveProbes);
  SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kUnacknowledgedMs);
}

WireStream::Result ResultOfHandshake(const absl::Status& status) {
  const bool token = absl::IsPermissionDenied(status);
  return {.failure = token ? WireFailure::kToken : WireFailure::kProtocol,
          .why = std::string(status.message())};
}

}  // namespace

WireForming::WireForming(WireFormingOptions options)
    : options_(std::move(options)),
      token_(WireRingToken(options_.generation, options_.blobs)),
      is_peer_(options_.blobs.size()),
      streams_(options_.blobs.size()),
      tries_(options_.blobs.size()) {
  for (int peer : options_.peers) {
    is_peer_[peer] = true;
    streams_[peer].resize(StripesWith(peer));
    missing_ += StripesWith(peer);
    if (peer > options_.rank) missing_incoming_ += StripesWith(peer);
  }
}

int WireForming::StripesWith(int peer) const {
  if (!is_peer_[peer]) return 0;
  return std::min(options_.blobs[options_.rank].stripes, options_.blobs[peer].stripes);
}

absl::StatusOr<WireStreams> WireForming::Run(absl::Time deadline) {
  for (int peer = 0; peer < options_.rank; ++peer) {
    for (int stripe = 0; stripe < StripesWith(peer); ++stripe) {
      if (absl::Status status = Connect(peer, stripe, deadline); !status.ok()) return status;
    }
  }
  while (!Complete()) {
    std::vector<pollfd> polled = {{options_.cancelled, POLLIN, 0},
                                  {missing_incoming_ > 0 ? options_.listener : -1, POLLIN, 0}};
    absl::Time next = deadline;
    for (const Attempt& attempt : attempts_) {
      polled.push_back({attempt.stream->fd(), EventsOf(attempt), 0});
      next = std::min(next, attempt.deadline);
    }
    for (const Retry& retry : retries_) next = std::min(next, retry.due);
    const absl::Duration patience = std::max(next - MonotonicNow(), absl::ZeroDuration());
    const int timeout_ms =
        static_cast<int>(absl::ToInt64Milliseconds(std::min(patience, absl::Hours(1)))) + 1;
    if (poll(polled.data(), polled.size(), timeout_ms) < 0 && errno != EINTR) {
      return absl::UnavailableError(absl::StrCat("poll: ", std::strerror(errno)));
    }
    if (polled[0].revents != 0) return absl::CancelledError("forming the ring was cancelled");
    const absl::Time now = MonotonicNow();
    if (now >= deadline) return LateStatus();

    size_t index = 2;
    for (auto attempt = attempts_.begin(); attempt != attempts_.end(); ++index) {
      const auto current = attempt++;
      WireStream::Result result;
      if (polled[index].revents != 0) {
        if (Advance(*current, &result)) {
          Finish(current);
          continue;
        }
      }
      if (result.ok() && now >= current->deadline) {
        result = {.failure = WireFailure::kTimeout, .why = "the handshake took too long"};
      }
      if (result.ok()) continue;
      if (absl::Status status = Fail(current, result, deadline); !status.ok()) return status;
    }
    for (const Retry& retry : std::exchange(retries_, {})) {
      if (retry.due > now) {
        retries_.push_back(retry);
      } else if (absl::Status status = Connect(retry.peer, retry.stripe, deadline); !status.ok()) {
        return status;
      }
    }
    if (polled[1].revents != 0) Accept();
  }
  return std::move(streams_);
}

absl::Status WireForming::Connect(int peer, int stripe, absl::Time deadline) {
  sockaddr_storage address;
  const socklen_t length = ToSockaddr(options_.blobs[peer].address, &address);
  const auto failed = [&](int error) {
    return absl::UnavailableError(absl::StrCat(
        "connecting to rank ", peer, " at ", IpText(address, length), ": ", std::strerror(error)));
  };
  OwnedFd fd(socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.get() < 0) return failed(errno);
  SetOptions(fd.get());
  const int connected = connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length);
  if (connected != 0 && errno != EINPROGRESS) return failed(errno);
  Attempt& attempt = attempts_.emplace_back();
  attempt.outgoing = true;
  attempt.connecting = true;
  attempt.peer = peer;
  attempt.stripe = stripe;
  attempt.deadline = deadline;
  attempt.encrypted = options_.tls == nullptr;
  attempt.stream = options_.tls == nullptr ? std::make_unique<WireStream>(fd.release())
                                           : options_.tls->Wrap(fd.release(), true);
  if (attempt.encrypted) BeginHandshake(attempt);
  return absl::OkStatus();
}

void WireForming::Accept() {
  while (true) {
    sockaddr_storage address{};
    socklen_t length = sizeof(address);
    const int fd = accept4(options_.listener, reinterpret_cast<sockaddr*>(&address), &length,
                           SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
      // The connection stays in the backlog. Without a pause this would spin.
      absl::SleepFor(kNoDescriptorPause);
      return;
    }
    if (fd < 0) return;
    SetOptions(fd);
    int incoming = 0;
    auto oldest = attempts_.end();
    for (auto it = attempts_.begin(); it != attempts_.end(); ++it) {
      if (it->outgoing) continue;
      if (incoming++ == 0) oldest = it;
    }
    if (incoming >= missing_incoming_ + kSpareHandshakes) {
      Refuse(oldest, WireFailure::kLimit, "too many handshakes at a time");
    }
    Attempt& attempt = attempts_.emplace_back();
    attempt.address = IpText(address, length);
    attempt.deadline = MonotonicNow() + options_.handshake_timeout;
    attempt.encrypted = options_.tls == nullptr;
    attempt.stream =
        options_.tls == nullptr ? std::make_unique<WireStream>(fd) : options_.tls->Wrap(fd, false);
    if (attempt.encrypted) BeginHandshake(attempt);
  }
}

void WireForming::BeginHandshake(Attempt& attempt) {
  WireHandshakeOptions options{.generation = options_.generation,
                               .rank = options_.rank,
                               .token = token_,
                               .binding = attempt.stream->Binding()};
  if (attempt.outgoing) {
    attempt.handshake.emplace(
        WireHandshake::Connector(std::move(options), attempt.peer, attempt.stripe));
  } else {
    attempt.handshake.emplace(WireHandshake::Acceptor(
        std::move(options), static_cast<int>(options_.blobs.size()), kMaxWireStripes));
  }
  attempt.output = attempt.handshake->TakeOutput();
}

short WireForming::EventsOf(const Attempt& attempt) const {
  if (attempt.connecting) return POLLOUT;
  if (!attempt.encrypted && attempt.stream->WantsWrite()) return POLLOUT;
  return attempt.output.empty() && !attempt.stream->WantsWrite() ? POLLIN : POLLIN | POLLOUT;
}

bool WireForming::Advance(Attempt& attempt, WireStream::Result* result) {
  if (attempt.connecting) {
    int error = 0;
    socklen_t length = sizeof(error);
    (void)getsockopt(attempt.stream->fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) {
      *result = {.failure = WireFailure::kOther, .why = std::strerror(error)};
      return false;
    }
    attempt.connecting = false;
  }
  if (!attempt.encrypted) {
    *result = attempt.stream->Handshake();
    if (!result->ok() || result->bytes == 0) return false;
    attempt.encrypted = true;
    BeginHandshake(attempt);
  }
  return AdvanceMessages(attempt, result);
}

bool WireForming::AdvanceMessages(Attempt& attempt, WireStream::Result* result) {
  WireHandshake& handshake = *attempt.handshake;
  while (true) {
    while (!attempt.output.empty()) {
      const iovec part{attempt.output.data(), attempt.output.size()};
      *result = attempt.stream->Write(&part, 1);
      if (result->failure == WireFailure::kReset) {
        // The peer may have sent its reason before it closed the connection.
        char byte = 0;
        const WireStream::Result reason = attempt.stream->Read(&byte, 1);
        if (reason.failure == WireFailure::kTls) *result = reason;
      }
      if (!result->ok() || result->bytes == 0) return false;
      attempt.output.erase(0, result->bytes);
    }
    if (handshake.wanted() == 0) return true;
    // Never reads more than the handshake, because frames may follow.
    char buffer[WireHandshake::kLongestMessage];
    *result = attempt.stream->Read(buffer, handshake.wanted() - attempt.input.size());
    if (!result->ok() || result->bytes == 0) return false;
    attempt.input.append(buffer, result->bytes);
    if (attempt.input.size() < handshake.wanted()) continue;
    const absl::Status status = handshake.Take(std::exchange(attempt.input, {}));
    if (!status.ok()) {
      *result = ResultOfHandshake(status);
      return false;
    }
    attempt.output += handshake.TakeOutput();
  }
}

void WireForming::Finish(Attempts::iterator attempt) {
  const int peer = attempt->handshake->peer(), stripe = attempt->handshake->stripe();
  if (stripe >= StripesWith(peer)) {
    Refuse(attempt, WireFailure::kProtocol, "more connections than agreed");
    return;
  }
  // A peer connects again if it saw the first connection fail, so the last one counts.
  std::unique_ptr<WireStream>& stream = streams_[peer][stripe];
  if (stream == nullptr) {
    --missing_;
    if (!attempt->outgoing) --missing_incoming_;
  }
  stream = std::move(attempt->stream);
  attempts_.erase(attempt);
}

absl::Status WireForming::Fail(Attempts::iterator attempt, const WireStream::Result& result,
                               absl::Time deadline) {
  if (!attempt->outgoing) {
    Refuse(attempt, result.failure, result.why);
    return absl::OkStatus();
  }
  const int peer = attempt->peer, stripe = attempt->stripe;
  const bool dropped =
      result.failure == WireFailure::kClosed || result.failure == WireFailure::kReset;
  attempts_.erase(attempt);
  if (dropped && ++tries_[peer] < kMaxTriesPerPeer) {
    options_.counters->retries.fetch_add(1, std::memory_order_relaxed);
    retries_.push_back({peer, stripe, std::min(MonotonicNow() + kRetryDelay, deadline)});
    return absl::OkStatus();
  }
  if (result.failure == WireFailure::kTimeout) return LateStatus();
  return absl::UnavailableError(absl::StrCat("connecting to rank ", peer, ": ", result.why));
}

void WireForming::Refuse(Attempts::iterator attempt, WireFailure failure, const std::string& why) {
  options_.counters->refused[static_cast<size_t>(failure)].fetch_add(1, std::memory_order_relaxed);
  // The end of a connection says less than why others were refused.
  const bool ended = failure == WireFailure::kClosed || failure == WireFailure::kReset;
  if (refusal_.empty() || !ended) {
    refusal_ = absl::StrCat("; refused a connection from ", attempt->address, ": ", why);
  }
  attempts_.erase(attempt);
}

absl::Status WireForming::LateStatus() const {
  for (int peer = 0; peer < static_cast<int>(streams_.size()); ++peer) {
    for (const auto& stream : streams_[peer]) {
      if (stream != nullptr) continue;
      return absl::UnavailableError(
          absl::StrCat("rank ", peer, peer > options_.rank ? " did not connect" : " did not answer",
                       " in time", refusal_));
    }
  }
  return absl::UnavailableError("not in time");
}

}  // namespace ringattn::worker
