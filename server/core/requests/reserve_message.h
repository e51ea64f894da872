// Builds the Reserve message of a planned request.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_RESERVE_MESSAGE_H_
#define RINGATTN_SERVER_CORE_REQUESTS_RESERVE_MESSAGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/core/events/events.h"

namespace ringattn::server {

//   spec     the request's; `request.spec` may be empty
//   members  generation ranks by ring rank, as many as the plan's world size
v1::Reserve MakeReserve(const RequestArrived& request, const AttentionSpec& spec, const Plan& plan,
                        const std::string& operation_id, uint64_t generation,
                        const std::vector<uint32_t>& members);

// Adds the tensors' locations in the client's host or CUDA memory.
void AddLocations(const TransportChoice& choice, v1::Reserve* reserve);
// Adds the rows of the request's writers, if it has several clients.
void AddWriters(const TransportChoice& choice, v1::Reserve* reserve);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_RESERVE_MESSAGE_H_
