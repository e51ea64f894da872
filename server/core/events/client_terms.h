// ClientTerms: the limits and the weight that the operator grants one client, for all its requests.
#ifndef RINGATTN_SERVER_CORE_EVENTS_CLIENT_TERMS_H_
#define RINGATTN_SERVER_CORE_EVENTS_CLIENT_TERMS_H_

#include <cstdint>
#include <optional>

namespace ringattn::server {

struct ClientTerms {
  // Share of device time under contention: a client of weight 2 gets twice that of a client of
  // weight 1.
  double weight = 1.0;
  // Counted from arrival to end. Unset: bounded by the queue and by Limits::max_streams_per_client.
  std::optional<int64_t> max_requests_in_flight;
  // Input bytes of the client's queued requests. Unset: Limits::max_queued_bytes_per_client.
  std::optional<int64_t> max_queued_bytes;

  // Bytes of the client's residuals at a time. Unset: bounded by Limits::max_residual_bytes.
  std::optional<int64_t> max_residual_bytes;

  // K/V caches of the client, and their bytes summed over workers. Unset: bounded by
  // Limits::max_kv_caches and max_kv_cache_bytes.
  std::optional<int64_t> max_kv_caches;
  std::optional<int64_t> max_kv_cache_bytes;

  friend bool operator==(const ClientTerms&, const ClientTerms&) = default;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_CLIENT_TERMS_H_
