// HTTP/2 settings of every endpoint that transfers tensors: clients, coordinator and workers,
// servers and channels. Both ends of a connection need them, because each end limits only what the
// other may send.
#ifndef RINGATTN_COMMON_WIRE_TRANSPORT_H_
#define RINGATTN_COMMON_WIRE_TRANSPORT_H_

#include <grpcpp/server_builder.h>
#include <grpcpp/support/channel_arguments.h>

#include "absl/time/time.h"

namespace ringattn::wire {

// Bytes that a peer may send on a stream before the reader reads them. A reader that waits for a
// message permits that message in addition, so 1 MiB with chunks of 1 MiB fills a link of 10 Gbit/s
// with one stream up to a round trip of 1.6 ms. The extra 64 KiB admit the whole next chunk,
// including its envelope, while the current one is processed. Without them, the last bytes of each
// message arrived one round trip after the reader requested them.
inline constexpr int kStreamWindowBytes = (1 << 20) + (64 << 10);

// Sets windows, frames and pings. Gives the channel its own connection, because one HTTP/2
// connection does not fill a link. The caller sets size limits and reconnection.
void SetTransport(grpc::ChannelArguments* arguments);

// Minimum ping interval of a peer, with or without a call. After three violations the connection
// ends with "too many pings". Half of the 10 s that clients commonly use, because timers fire early
// and networks delay some pings and not others.
inline constexpr absl::Duration kMinPingInterval = absl::Seconds(5);

// Sets windows, frames and pings, no compression, and a port that a second server cannot share. The
// caller sets size limits and quotas.
void SetTransport(grpc::ServerBuilder* builder,
                  absl::Duration min_ping_interval = kMinPingInterval);

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_TRANSPORT_H_
