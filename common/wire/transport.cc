#include "common/wire/transport.h"

namespace ringattn::wire {
namespace {

// The default of 16 KiB needs a header, a slice and a writev entry four times as often.
constexpr int kFrameBytes = 64 << 10;
// Many round trips; gRPC's default is two minutes. A half-open TLS handshake holds 45 KB until
// then.
constexpr int kHandshakeTimeoutMs = 5'000;

// Calls `set(name, value)` for the settings that servers and channels share.
template <typename Set>
void SetBothEnds(const Set& set) {
  // Windows that follow the measured rate reach tens of megabytes on loopback: more than caches
  // hold, and the memory of waiting data has no bound. A fixed window was a third faster
  // (tests/bench/results/relay_settings.csv).
  set(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  set(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamWindowBytes);
  set(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytes);
  // During a long computation the streams carry only pings. These detect connections whose peer has
  // disappeared.
  set(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  set(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
}

}  // namespace

void SetTransport(grpc::ChannelArguments* arguments) {
  SetBothEnds([&](const char* name, int value) { arguments->SetInt(name, value); });
  // Without a pool of its own every channel to one address would share one connection.
  arguments->SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
}

void SetTransport(grpc::ServerBuilder* builder, absl::Duration min_ping_interval) {
  SetBothEnds([&](const char* name, int value) { builder->AddChannelArgument(name, value); });
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              static_cast<int>(absl::ToInt64Milliseconds(min_ping_interval)));
  // Clients may keep a connection without a call.
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // A connection that does not complete the TLS and HTTP/2 handshakes frees its place.
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeTimeoutMs);
  // Tensors do not compress, and a small compressed message may expand to a huge one.
  builder->SetDefaultCompressionAlgorithm(GRPC_COMPRESS_NONE);
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  // Two servers on one port would share its connections at random.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

}  // namespace ringattn::wire
