// ClientTerms: what the operator grants one client. The same for all its requests.
#ifndef RINGATTN_SERVER_CORE_EVENTS_CLIENT_TERMS_H_
#define RINGATTN_SERVER_CORE_EVENTS_CLIENT_TERMS_H_

#include <cstdint>
#include <optional>

namespace ringattn::server {

struct ClientTerms {
  // Of device time while others want it too: one of weight 2 gets twice what one of 1 gets.
  double weight = 1.0;
  // From arrival to end. Unset: bounded by the queue and by Limits::max_streams_per_client.
  std::optional<int64_t> max_requests_in_flight;
  // Input bytes of the requests that wait. Unset: Limits::max_queued_bytes_per_client.
  std::optional<int64_t> max_queued_bytes;

  // Of its residuals at a time. Unset: bounded by Limits::max_residual_bytes.
  std::optional<int64_t> max_residual_bytes;

  friend bool operator==(const ClientTerms&, const ClientTerms&) = default;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_CLIENT_TERMS_H_
