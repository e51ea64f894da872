// The order of ranks: workers of one host are neighbours, so that a ring crosses between hosts as
// seldom as possible. Pure.
// Tests: rank_order_test.cc
#ifndef RINGATTN_SERVER_CORE_RING_RANK_ORDER_H_
#define RINGATTN_SERVER_CORE_RING_RANK_ORDER_H_

#include <vector>

#include "server/core/ring/roster.h"

namespace ringattn::server {

// Sorts workers for their ranks: by zone, accelerator domain and host, and on one host by
// accelerator domain, slot and name. A host's zone and domain are the lowest of its workers'. A
// worker without a domain has its host's name as domain; one without a slot follows those with one.
// The order depends on the registrations only, so a ring of the same workers keeps its order.
void SortForRanks(const Roster& roster, std::vector<ConnectionId>* workers);

// Returns the host of each member as a number, from 0 in the order of their first members.
// Members without a host count as one host. REQUIRES: all are in the roster.
std::vector<int> HostsOf(const std::vector<ConnectionId>& members, const Roster& roster);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_RING_RANK_ORDER_H_
