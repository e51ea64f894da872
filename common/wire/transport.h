// HTTP/2 as every endpoint sets it up that tensors go through: clients, coordinator
// and workers, servers and channels alike. Both ends of a connection need it, as each
// says only what the other may send.
#ifndef RINGATTN_COMMON_WIRE_TRANSPORT_H_
#define RINGATTN_COMMON_WIRE_TRANSPORT_H_

#include <string>

#include <grpc/impl/codegen/grpc_types.h>

namespace ringattn::wire {

// What a peer may send of a stream before anybody reads it. A reader that waits for a
// message allows that message beyond it, so 1 MiB and chunks of 1 MiB fill a link of
// 10 Gbit/s up to a round trip of 1.6 ms on one stream.
inline constexpr int kStreamWindowBytes = 1 << 20;

// The default of 16 KiB takes a header, a slice and an entry of writev four times as often.
inline constexpr int kFrameBytes = 64 << 10;

// Calls `set(name, value)` for each of gRPC's channel arguments.
template <typename Set>
void SetTransportArguments(const Set& set) {
  // Windows that grow with the measured rate reach tens of megabytes on loopback: more
  // than caches hold, and what waits in them is memory that nobody bounds. A fixed
  // window was a third faster (docs/benchmarks.md).
  set(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  set(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamWindowBytes);
  set(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytes);
}

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_TRANSPORT_H_
