// The live page: what it consists of, by path. "/" draws "/status.json"; the rest is fixed.
#ifndef RINGATTN_SERVER_EDGE_STATUS_LIVE_PAGE_H_
#define RINGATTN_SERVER_EDGE_STATUS_LIVE_PAGE_H_

#include "common/observability/http_server.h"
#include "server/edge/status/status_board.h"
#include "server/edge/status/status_json.h"

namespace ringattn::server {

// `board` outlives what serves the routes.
HttpRoutes LivePage(StatusConstants constants, StatusBoard* board);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_STATUS_LIVE_PAGE_H_
