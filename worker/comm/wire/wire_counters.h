// WireCounters: the counts that the metrics export, of rings over sockets.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_COUNTERS_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_COUNTERS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

namespace ringattn::worker {

// Why a connection ended or was not made.
enum class WireFailure : uint8_t {
  kNone,
  kClosed,    // the peer closed it
  kReset,     // the peer or the network reset it
  kTimeout,   // a transfer or a handshake took too long, or the peer does not answer
  kTls,       // TLS failed
  kToken,     // the peer does not know the ring's token
  kProtocol,  // malformed or unexpected bytes
  kSizes,     // the ranks disagree about a transfer's size
  kLimit,     // too many handshakes at a time
  kOther,     // refused, unreachable and so on
};

inline constexpr std::array<std::string_view, 10> kWireFailureNames = {
    "none", "closed", "reset", "timeout", "tls", "token", "protocol", "sizes", "limit", "other"};

inline constexpr std::string_view WireFailureName(WireFailure failure) {
  return kWireFailureNames[static_cast<size_t>(failure)];
}

// Totals since the process's start, except `connections`. Thread safe.
struct WireCounters {
  std::atomic<int64_t> sent_bytes{0};      // of transfers, without headers
  std::atomic<int64_t> received_bytes{0};  // the same
  std::atomic<int64_t> connections{0};     // open now
  std::atomic<int64_t> retries{0};         // repeated attempts to connect
  // By WireFailure: peers lost after the ring had formed, and refused incoming connections.
  std::array<std::atomic<int64_t>, kWireFailureNames.size()> lost_peers{};
  std::array<std::atomic<int64_t>, kWireFailureNames.size()> refused{};
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_COUNTERS_H_
