// RetryOptions: when the library replays a failed call.
#ifndef RINGATTN_CLIENT_API_RETRY_OPTIONS_H_
#define RINGATTN_CLIENT_API_RETRY_OPTIONS_H_

#include "absl/time/time.h"

namespace ringattn::client {

struct RetryOptions {
  // A ring that lost a worker recovers within seconds. Ten replays with these pauses wait about
  // half a minute for it.
  int max_replays = 10;
  absl::Duration initial_backoff = absl::Milliseconds(200);
  absl::Duration max_backoff = absl::Seconds(5);
  // A call gives up this early on a server that has never answered: its address is probably wrong.
  // A connection attempt that is under way then may take four times as long.
  absl::Duration connect_timeout = absl::Seconds(5);
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_RETRY_OPTIONS_H_
