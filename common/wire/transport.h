// HTTP/2 as every endpoint sets it up that tensors go through: clients, coordinator
// and workers, servers and channels alike. Both ends of a connection need it, as each
// says only what the other may send.
#ifndef RINGATTN_COMMON_WIRE_TRANSPORT_H_
#define RINGATTN_COMMON_WIRE_TRANSPORT_H_

#include <grpcpp/server_builder.h>
#include <grpcpp/support/channel_arguments.h>

#include "absl/time/time.h"

namespace ringattn::wire {

// What a peer may send of a stream before anybody reads it. A reader that waits for a
// message allows that message beyond it, so 1 MiB and chunks of 1 MiB fill a link of
// 10 Gbit/s up to a round trip of 1.6 ms on one stream. And somewhat more than a chunk of 1 MiB:
// with its envelope the next one fits in whole while this one is handled. Without, its last
// bytes came a round trip after the reader had asked for them, message by message.
inline constexpr int kStreamWindowBytes = (1 << 20) + (64 << 10);

// Windows, frames and pings. The channel gets a connection of its own: one HTTP/2
// connection does not fill a link. Size limits and reconnecting are the caller's.
void SetTransport(grpc::ChannelArguments* arguments);

// A peer may ping this often, with a call or without, and three times more often by
// mistake; then its connection ends with "too many pings". Half of the 10 s that clients
// commonly choose, as timers fire early and networks delay one ping and not the next.
inline constexpr absl::Duration kMinPingInterval = absl::Seconds(5);

// Windows, frames and pings, no compression, a port that no second server can share.
// Size limits and quotas are the caller's.
void SetTransport(grpc::ServerBuilder* builder,
                  absl::Duration min_ping_interval = kMinPingInterval);

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_TRANSPORT_H_
